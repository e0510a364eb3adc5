"""verify() at first use: it leaves nothing anywhere, verifies what users bring, and never answers without grounds."""

from __future__ import annotations

import array
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix import OptionsError, verify
from hf_accum_fix.verification.report import Kind
from tests.numerics.heads import before
from tests.verify.trainers import Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")

# --- it leaves nothing anywhere -------------------------------------------------------------------------------------

CALLS = 0
SEEN: list[int] = []


class Keeps(Trainer):
    """Changes in every loss whatever a trainer can reach."""

    calls_of_the_class = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(1)
        self.teacher = Regression(batch_norm=True).requires_grad_(False)
        self.prompts = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.loose = [nn.Parameter(torch.ones(2))]
        self.mean, self.table = torch.zeros(3), np.zeros(4)
        self.running = {"mean": torch.zeros(6), "var": torch.ones(6)}
        self.meter: Any = Meter()
        self.numbers, self.bytes = array.array("i", [0]), bytearray(2)
        self.shared = multiprocessing.Value("i", 0)
        self.counter, self.stream = itertools.count(), iter(range(1000))
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return count

        self.tick = tick

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        global CALLS
        CALLS += 1
        SEEN.append(CALLS)
        type(self).calls_of_the_class += 1
        with torch.no_grad():
            self.teacher(inputs["x"])
            for mine, other in zip(self.teacher.parameters(), model.parameters(), strict=False):
                mine.add_(other.flatten()[0])
            self.prompts[0].mul_(2)
            self.loose[0].data = self.loose[0].data * 3
            self.mean += 1
            nn.functional.batch_norm(torch.randn(5, 6), self.running["mean"], self.running["var"], training=True)
        self.table += 1
        self.meter.held.tensors[0].add_(1)
        self.meter.total += 1
        self.numbers[0] += 1
        self.bytes[0] += 1
        self.shared.value += 1
        next(self.stream)
        next(self.counter)
        self.tick()
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


class Held:
    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2)]


class Meter:
    def __init__(self) -> None:
        self.total, self.held = 0, Held()


def test_it_leaves_nothing_anywhere(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, points(8), cls=Keeps)
    before = {name: value.clone() for name, value in trainer.teacher.state_dict().items()}
    report = verify(trainer, splits=[2])
    assert report.verdict_of("apply()").kind is Kind.EXACT, report
    assert all(torch.equal(value, before[name]) for name, value in trainer.teacher.state_dict().items())
    assert all(each.grad is None for each in trainer.teacher.parameters())
    assert trainer.prompts[0].tolist() == [1.0] * 3 and trainer.loose[0].tolist() == [1.0] * 2
    assert trainer.mean.tolist() == [0.0] * 3 and trainer.table.tolist() == [0.0] * 4
    assert trainer.running["mean"].tolist() == [0.0] * 6 and trainer.running["var"].tolist() == [1.0] * 6
    assert trainer.meter.total == 0 and trainer.meter.held.tensors[0].tolist() == [0.0] * 2
    assert list(trainer.numbers) == [0] and trainer.bytes == bytearray(2) and trainer.shared.value == 0
    assert next(trainer.stream) == 0 and next(trainer.counter) == 0 and trainer.tick() == 1
    assert Keeps.calls_of_the_class == 0 and CALLS == 0 and SEEN == []


class Generating(Trainer):
    """Draws from a generator that a list holds, which cannot be wound back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generators = (value for value in range(1000)), iter(range(1000))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        next(self.generators[0])
        return super().compute_loss(*args, **kwargs)


def test_what_cannot_be_put_back_is_named(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(8), cls=Generating), splits=[2])
    assert any("cannot be put back" in note and "<genexpr>" in note for note in report.notes), report


# --- what users bring -----------------------------------------------------------------------------------------------


def rows() -> Iterator[dict[str, Any]]:
    for each in points(24):
        yield {"x": each["x"].tolist(), "labels": float(each["labels"])}


def streaming(folder: Path) -> Any:
    Dataset.from_list(list(rows())).to_json(str(folder / "data.jsonl"))
    return load_dataset("json", data_files=str(folder / "data.jsonl"), streaming=True, split="train")


STREAMS: dict[str, Callable[[Path], Any]] = {
    "streaming": streaming,
    "to_iterable_dataset": lambda _: Dataset.from_list(list(rows())).to_iterable_dataset(num_shards=2),
    "from_generator": lambda _: IterableDataset.from_generator(rows),
    "shuffle": lambda folder: streaming(folder).shuffle(seed=3, buffer_size=5),
    "map": lambda folder: streaming(folder).map(lambda row: {"labels": row["labels"] * 2}),
    "take": lambda folder: streaming(folder).take(12),
    "filter and skip": lambda folder: streaming(folder).filter(lambda row: row["labels"] > -3).skip(1),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_datasets_is_verified(name: str, tmp_path: Path) -> None:
    stream = STREAMS[name](tmp_path)
    wanted = list(stream)
    model = Regression().float()
    report = verify(small(model, tmp_path, stream.with_format("torch"), max_steps=2), splits=[2, 8])
    assert report.verdict_of("apply()").kind is Kind.EXACT and report.samples == (8,), report
    assert list(stream) == wanted


class Groups(Regression):
    """One query and its three passages a sample; the first passage is the right one."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(x)))[:, 0].view(len(labels), -1)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def passages() -> list[Any]:
    drawn = points(24)
    return [{"passages": [each["x"] for each in drawn[at : at + 3]]} for at in range(0, 24, 3)]


def flattened(samples: list[Any]) -> dict[str, Tensor]:
    x = torch.stack([each for sample in samples for each in sample["passages"]])
    return {"x": x, "labels": torch.zeros(len(samples), dtype=torch.long)}


def noisy(samples: list[Any]) -> dict[str, Tensor]:
    batch = flattened(samples)
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}


@pytest.mark.parametrize("collate", [flattened, noisy])
def test_grouped_rows(collate: Any, tmp_path: Path) -> None:
    trainer = small(Groups(), tmp_path, passages())
    trainer.data_collator = collate
    report = verify(trainer, splits=[1, 2, 8])
    assert report.verdict_of("apply()").kind is Kind.EXACT and report.samples == (8,), report


class Flattening:
    """A loader that collates by itself, and whose collate_fn is None."""

    collate_fn = None

    def __init__(self, per_batch: int) -> None:
        self.per_batch = per_batch

    def __len__(self) -> int:
        return 8 // self.per_batch

    def __iter__(self) -> Iterator[Any]:
        drawn = passages()
        for at in range(0, 8, self.per_batch):
            yield flattened(drawn[at : at + self.per_batch])


def test_grouped_rows_of_a_loader_without_collate_fn(tmp_path: Path) -> None:
    trainer = small(Groups(), tmp_path, passages())
    trainer.get_train_dataloader = lambda: Flattening(2)
    report = verify(trainer, splits=[1, 2, 8])
    assert report.verdict_of("apply()").kind is Kind.EXACT and report.samples == (8,), report


class NoOutputs(Trainer):
    """As the trainers of TRL that sample: no outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        if return_outputs:
            raise ValueError("The GRPOTrainer does not support returning outputs")
        return model(**inputs)["loss"]


class Bare(Trainer):
    """Knows nothing of outputs."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(**inputs)["loss"]


@pytest.mark.parametrize("cls", [NoOutputs, Bare])
def test_a_loss_that_cannot_return_outputs(cls: type, tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(8), cls=cls), splits=[2, 8])
    assert report.verdict_of("apply()").kind is Kind.EXACT, report


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.words(x).mean(1))[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_sparse_gradients(tmp_path: Path) -> None:
    samples = [{"x": torch.arange(3) + place % 6, "labels": torch.tensor(float(place))} for place in range(8)]
    trainer = small(Sparse(), tmp_path, samples, max_grad_norm=0.0)
    for reference in ("full", "streamed"):
        report = verify(trainer, splits=[2, 8], reference=reference)
        assert report.verdict_of("apply()").kind is Kind.EXACT, report


def test_no_train_set_is_a_sentence(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, None)
    report = verify(trainer)
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "train_dataset" in report.verdict.words
    assert verify(trainer, [2, 8], samples=points(8)).verdict_of("apply()").kind is Kind.EXACT


# --- an answer needs grounds ----------------------------------------------------------------------------------------


class Scaled(Regression):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        return {**found, "loss": found["loss"] * self.factor}


class TimesG(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.args.gradient_accumulation_steps


@pytest.mark.parametrize("cls", [Trainer, TimesG])
def test_a_gradient_of_zero_is_no_proof(cls: type, tmp_path: Path) -> None:
    report = verify(small(Scaled(0.0), tmp_path, points(8), cls=cls))
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "zero" in report.verdict.words, report


@pytest.mark.parametrize("splits", [[(1000, 1000)], [(9, 1)], [9], [(4, 1)], [(0, 8)]])
def test_a_split_that_does_not_fit_is_an_error(splits: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="8 samples"):
        verify(small(Regression(), tmp_path, points(8)), splits=splits)


@pytest.mark.parametrize("factor", [1e30, 1e-30, 1e36])
def test_a_right_gradient_is_right_whatever_its_size(factor: float, tmp_path: Path) -> None:
    model = Scaled(factor).float()
    samples = [{name: value.float() for name, value in each.items()} for each in points(8)]
    report = verify(small(model, tmp_path, samples), splits=[1, 2])
    assert report.verdict_of("apply()").kind is Kind.EXACT, report


@pytest.mark.parametrize("factor", [1e39, float("nan")])
def test_an_overflow_is_named(factor: float, tmp_path: Path) -> None:
    model = Scaled(factor).float()
    samples = [{name: value.float() for name, value in each.items()} for each in points(8)]
    report = verify(small(model, tmp_path, samples), splits=[1, 2])
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "overflow" in report.verdict.words, report


class OverflowsInAWindow(Trainer):
    """Its sums over a window leave the range of float32, which the full batch does not."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        factor = 1.0 if self.args.gradient_accumulation_steps == 1 else 3e37
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor


def test_an_overflow_of_a_split_is_named(tmp_path: Path) -> None:
    samples = [{name: value.float() * 1e3 for name, value in each.items()} for each in points(8)]
    trainer = small(Regression().float(), tmp_path, samples, cls=OverflowsInAWindow)
    report = verify(trainer, splits=[1], with_apply=False)
    assert report.verdict.kind is Kind.OFF and "overflow" in report.verdict.words, report


class Counts(Trainer):
    """Weighs its loss by the calls that it counts."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.calls += 1
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss / self.calls
        return (loss, outputs) if return_outputs else loss


def test_a_trainer_that_counts_its_calls_is_not_random(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(8), cls=Counts))
    assert report.verdict.kind is Kind.COULD_NOT_TELL
    assert "random" not in report.verdict.words and "Counts.calls" in report.verdict.words, report


# --- the first line -------------------------------------------------------------------------------------------------


class Inflated(Regression):
    """Takes any keyword and drops the number: G times in the releases since 4.46."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


RELEASE = pytest.mark.skipif(
    before("4.46") or (before("5.6") and not before("5.2")), reason="stock trains this head at another factor"
)


@RELEASE
def test_the_first_line_is_about_the_users_own_split(tmp_path: Path) -> None:
    report = verify(small(Inflated(), tmp_path, points(8)))
    first, *rest = str(report).splitlines()
    assert first.startswith("4x too large at your 2 x 4 (G times)") and first.endswith("apply() makes it exact"), first
    assert not report.ok and not report
    also = next(line for line in rest if line.startswith("also looked at"))
    assert "1 x 8" in also and "8x too large" in also


@RELEASE
def test_the_other_splits_do_not_decide(tmp_path: Path) -> None:
    report = verify(small(Inflated(), tmp_path, points(8), per_device=8, accumulate=1))
    assert report.ok and report
    lines = str(report).splitlines()
    assert lines[0].startswith("exact at your 8 x 1")
    assert any(line.startswith("also looked at") and "8x too large at 1 x 8" in line for line in lines)


def test_could_not_tell_is_not_ok(tmp_path: Path) -> None:
    report = verify(small(Scaled(0.0), tmp_path, points(8)))
    assert not report.ok and str(report).splitlines()[0].startswith("could not tell")
