r"""How late labels that are shuffled on one of two ranks are found, in three trainings and as many healthy ones.

    python recipes/shuffled_labels.py                # 8 seeds of 80 logs each; some 6 minutes on an idle core
    python recipes/shuffled_labels.py --seeds 1 --logs 12

One process takes the part of two ranks under DistributedDataParallel: each has its own gradient, and both step by their
mean; ten steps of two micro-batches are a log. Prints a line a training: in which log `RankLoss` and `RankGradients`
first alarm, None for never. Exit code: 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_accum_fix.monitor import RankGradients, RankLoss
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.rank_gradients import RankGradientsReading

STEPS, MICRO_BATCHES = 10, 2
Draw = Callable[[], tuple[Tensor, Tensor]]
Task = Callable[[torch.Generator], tuple[nn.Module, Draw, torch.optim.Optimizer]]


class Two:
    """Two ranks, of which nothing is summed."""

    rank, size = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


class Words(nn.Module):
    """One layer of a transformer over 50 words, and four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.words(words)).mean(1))
        return found


def digits(draw: torch.Generator) -> tuple[nn.Module, Draw, torch.optim.Optimizer]:
    """Handwritten digits, eight a micro-batch, by plain SGD."""
    images, labels = (torch.from_numpy(its) for its in load_digits(return_X_y=True))

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (8,), generator=draw)
        return images[rows].float() / 16, labels[rows]

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, batch, torch.optim.SGD(model.parameters(), 0.05)


def noisy_digits(draw: torch.Generator) -> tuple[nn.Module, Draw, torch.optim.Optimizer]:
    """The same by AdamW, where 40 % of all labels are drawn at random anyway."""
    images, labels = (torch.from_numpy(its) for its in load_digits(return_X_y=True))

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(labels), (16,), generator=draw)
        noisy, wrong = labels[rows].clone(), torch.rand(16, generator=draw) < 0.4
        noisy[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
        return images[rows].float() / 16, noisy

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, batch, torch.optim.AdamW(model.parameters(), 1e-3)


def words(draw: torch.Generator) -> tuple[nn.Module, Draw, torch.optim.Optimizer]:
    """How many words of a kind a sentence has: a small transformer, which learns it late."""

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(50, (16, 16), generator=draw)
        return rows, (rows < 25).sum(1).sub(5).clamp(0, 7).div(2, rounding_mode="floor")

    model = Words()
    return model, batch, torch.optim.AdamW(model.parameters(), 1e-3)


TASKS: dict[str, Task] = {"digits": digits, "digits, 40 % label noise": noisy_digits, "words": words}


def readings(task: Task, seed: int, logs: int, *, shuffled: bool) -> Iterator[tuple[LossReading, RankGradientsReading]]:
    """What the two ranks measure, log by log."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model, batch, optimizer = task(draw)
    for _ in range(logs):
        moments = [Moments(), Moments()]
        norms: list[list[float]] = [[], []]
        for _ in range(STEPS):
            gradients = []
            for rank in range(2):
                model.zero_grad()
                for _ in range(MICRO_BATCHES):
                    inputs, labels = batch()
                    if shuffled and rank == 1:
                        labels = labels[torch.randperm(len(labels), generator=draw)]
                    loss, items = cross_entropy(model(inputs), labels), float(len(labels))
                    (loss / MICRO_BATCHES).backward()
                    summed = loss.item() * items
                    moments[rank] += Moments(1.0, items, summed, summed**2, summed * items, items**2)
                gradients.append([its.grad.clone() for its in model.parameters() if its.grad is not None])
                norms[rank].append(float(torch.stack([its.norm() for its in gradients[rank]]).norm()))
            for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = (one + other) / 2
            optimizer.step()
        yield LossReading(tuple(moments)), RankGradientsReading(tuple(map(tuple, norms)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--logs", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, task in TASKS.items():
        for shuffled in (True, False):
            for seed in range(40, 40 + options.seeds):
                losses, gradients = RankLoss(), RankGradients(Two())
                first: dict[str, int] = {}
                for log, (loss, norms) in enumerate(readings(task, seed, options.logs, shuffled=shuffled), start=1):
                    for kind, alarm in (("loss", losses.judge(loss)), ("gradient", gradients.judge(norms))):
                        if alarm is not None:
                            first.setdefault(kind, log)
                what = "shuffled" if shuffled else "healthy"
                print(
                    f"{name}, {what}, seed {seed}: loss {first.get('loss')}, gradient {first.get('gradient')}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
