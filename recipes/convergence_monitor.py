r"""Plain DistributedDataParallel training with every monitor on, and one planted fault for them to find.

    torchrun --nproc_per_node 2 recipes/convergence_monitor.py                  # healthy; half a minute on 2 cores
    torchrun --nproc_per_node 4 recipes/convergence_monitor.py --fault data     # one rank learns from wrong labels
    accelerate launch --cpu recipes/convergence_monitor.py --fault leak         # starts its two ranks itself
    accelerate launch --num_processes 4 recipes/convergence_monitor.py          # on 4 GPUs
    python recipes/convergence_monitor.py --audit                               # false alarms, delays; 5 to 15 minutes

A small convolutional network learns scikit-learn's handwritten digits, with gradient accumulation. The faults, each on
the last rank where it is one of a rank:

    data        its labels are shuffled: a bad shard
    seed        every rank is given the same samples
    scale       it does not divide its loss by the accumulation steps
    replica     one element of one parameter changes at half time
    batch-norm  the network has BatchNorm, and is converted after it was wrapped, by a converter that copies
    leak        it keeps 400 KiB of every step
    spike       the loss of one batch at half time is a hundred times too large
    lag         it waits 20 ms for every batch

The output folder gets results.jsonl (a line a log; `hf-accum-fix watch FOLDER` reads it), alarms.txt, and curves.png:
the loss as most logs show it (the last micro-batch before the log, averaged over the ranks) and as `LossMeter` does
(every micro-batch since the last log). Exit code: 0; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import shared

STEPS, ACCUMULATION, BATCH, LOG_EVERY, ACCURACY_EVERY = 400, 2, 32, 10, 50
LEARNING_RATE, MAX_NORM = 2e-3, 5.0
FAULTS = ("none", "data", "seed", "scale", "replica", "batch-norm", "leak", "spike", "lag")
LEAK = 400 * 1024


def main() -> None:
    parser = shared.Parser(__doc__, "convergence_monitor")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=shared.positive, default=STEPS)
    parser.add_argument("--processes", type=int, default=2, help="ranks, unless torchrun or accelerate sets them")
    parser.add_argument("--audit", action="store_true", help="simulate healthy and faulty runs, and train nothing")
    parser.add_argument("--quick", action="store_true", help="of --audit: a few logs, which show that it runs")
    options = parser.parse_args()
    if options.audit:
        from monitor_audit import audit

        for table in audit(options.output, quick=options.quick):
            print(table, flush=True)
        return
    if "RANK" not in os.environ:
        shared.start_ranks(options.processes)
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    train(options, torch.device("cuda" if gpu else "cpu"))
    shared.end_ranks()


def train(options: argparse.Namespace, device: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from hf_accum_fix.monitor import Monitor

    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    fault = options.fault if last or options.fault in ("seed", "batch-norm", "spike") else "none"
    start_log(options.output, rank)
    torch.manual_seed(0)
    network = digit_network(nn.BatchNorm2d if fault == "batch-norm" else partial(nn.GroupNorm, 4)).to(device)
    model = DistributedDataParallel(network, find_unused_parameters=fault == "batch-norm")
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    if fault == "batch-norm":
        model = copying_converter(model)

    monitor = Monitor(
        model, optimizer, max_norm=MAX_NORM, per_device_batch=BATCH, accumulation_steps=ACCUMULATION, classes=10
    )
    micro_batches, held_out = digits(device, rank, dist.get_world_size(), same=fault == "seed", seed=1)
    kept, rows = [], []
    for step in range(1, options.steps + 1):
        half_time = step == options.steps // 2
        for place in range(ACCUMULATION):
            images, labels = next(micro_batches)
            time.sleep(0.02 if fault == "lag" else 0)
            labels = labels[torch.randperm(BATCH, device=device)] if fault == "data" else labels
            with nullcontext() if place == ACCUMULATION - 1 else model.no_sync():
                loss = cross_entropy(model(images), labels)
                weight = 100 if fault == "spike" and half_time else 1
                (weight * loss / (1 if fault == "scale" else ACCUMULATION)).backward()
            if place < ACCUMULATION - 1:
                monitor.micro_batch(loss, items=len(labels))
        norm = nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        monitor.step(loss, items=len(labels), norm=norm)
        optimizer.step()
        optimizer.zero_grad()
        if fault == "replica" and half_time:
            with torch.no_grad():
                network[-1].weight[3, 5] += 0.01
        if fault == "leak":
            kept.append(torch.ones(LEAK, dtype=torch.uint8, device=device))

        if step % LOG_EVERY:
            continue
        measured = float(accuracy(network, held_out)) if step % ACCURACY_EVERY == 0 else None
        found = monitor.log(accuracy=measured)
        # The last micro-batch alone, as most logs show it.
        sampled = loss.detach().clone()
        dist.all_reduce(sampled)
        rows.append({
            "step": step, "loss": found["loss"], "loss_standard_error": found["loss_standard_error"],
            "sampled_loss": float(sampled) / dist.get_world_size(), "grad_norm": float(norm),
            **{f"hf_accum_fix/{name}": value for name, value in found.items()},
            **({} if measured is None else {"eval_accuracy": measured}),
        })  # fmt: skip
        if rank == 0:
            print(json.dumps({key: round(value, 4) for key, value in rows[-1].items()}), flush=True)
    if rank == 0:
        count = monitor.alarms.count
        print(f"{count} alarm{'s' * (count > 1)}" if count else "no alarm")
        (options.output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        draw_curves(rows, options.output / "curves.png")


def start_log(folder: Path, rank: int) -> None:
    """Alarms go to the screen and to alarms.txt."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        handlers = [logging.StreamHandler(), logging.FileHandler(folder / "alarms.txt", mode="w")]
        logging.basicConfig(level=logging.WARNING, format="ALARM %(message)s", handlers=handlers)


def digits(
    device: Any, rank: int, ranks: int, *, same: bool, seed: int
) -> tuple[Iterator[tuple[Any, Any]], tuple[Any, Any]]:
    """Endless micro-batches of this rank's own samples, and 297 held-out digits."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8).to(device)
    labels = torch.from_numpy(labels).to(device)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw)
    held_out, others = order[:297], order[297:]

    def endless() -> Iterator[tuple[Any, Any]]:
        while True:
            shuffled = others[torch.randperm(len(others), generator=draw)]
            mine = shuffled if same else shuffled[rank::ranks]
            for rows in mine[: len(others) // ranks // BATCH * BATCH].split(BATCH):
                yield images[rows], labels[rows]

    return endless(), (images[held_out], labels[held_out])


def digit_network(normalisation: Callable[[int], Any]) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), normalisation(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), normalisation(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def copying_converter(module: Any) -> Any:
    """Copy parameters, as apex's converter and older ones do, with layers that run on a CPU too."""
    from torch import nn

    result = module
    if isinstance(module, nn.BatchNorm2d):
        result = nn.BatchNorm2d(module.num_features).to(module.weight.device)
        result.load_state_dict(module.state_dict())
    for name, child in module.named_children():
        result.add_module(name, copying_converter(child))
    return result


def accuracy(network: Any, held_out: tuple[Any, Any]) -> float:
    import torch

    network.eval()
    with torch.no_grad():
        right = (network(held_out[0]).argmax(-1) == held_out[1]).float().mean()
    network.train()
    return float(right)


def draw_curves(rows: list[dict[str, float]], path: Path) -> None:
    """Both curves: the last micro-batch before each log, and every micro-batch with twice its standard error."""
    steps, means, errors = ([row[key] for row in rows] for key in ("step", "loss", "loss_standard_error"))
    figure, ((panel,),) = shared.figure_of(1, 1, (8, 4))
    panel.plot(steps, [row["sampled_loss"] for row in rows], color="C1", label="last micro-batch, mean of the ranks")
    panel.plot(steps, means, color="C0", label="every micro-batch (LossMeter)")
    low, high = ([m + side * 2 * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
    panel.fill_between(steps, low, high, color="C0", alpha=0.25, linewidth=0, label="twice its standard error")
    shared.tidy(panel, steps=True, xlabel="optimizer step", ylabel="loss", yscale="log")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
