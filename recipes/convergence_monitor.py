r"""Plain DistributedDataParallel training with every monitor on, and one planted fault for them to find.

    torchrun --nproc_per_node 2 recipes/convergence_monitor.py                  # healthy; half a minute on 2 cores
    torchrun --nproc_per_node 4 recipes/convergence_monitor.py --fault data     # one rank learns from wrong labels
    accelerate launch --cpu recipes/convergence_monitor.py --fault leak         # starts its two ranks itself
    accelerate launch --num_processes 4 recipes/convergence_monitor.py          # on 4 GPUs
    torchrun --nproc_per_node 2 recipes/convergence_monitor.py --overhead       # what all of them cost
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
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# Answer a wrong option at once: import nothing heavy before the options are read.

STEPS, ACCUMULATION, BATCH, LOG_EVERY, CHECK_EVERY = 400, 2, 32, 10, 50
LEARNING_RATE, MAX_NORM = 2e-3, 5.0
FAULTS = ("none", "data", "seed", "scale", "replica", "batch-norm", "leak", "spike", "lag")
LEAK = 400 * 1024

#: The transformer for measuring the cost: 11 million parameters, 512 tokens a micro-batch.
WIDTH, LAYERS, VOCABULARY, SAMPLES, TOKENS = 384, 6, 1000, 8, 64


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DDP training with every monitor on, and one planted fault.")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path("results/convergence_monitor"))
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    parser.add_argument("--processes", type=int, default=2, help="ranks, unless torchrun or accelerate sets them")
    parser.add_argument("--overhead", action="store_true", help="measure what the monitors cost, and train nothing")
    parser.add_argument("--audit", action="store_true", help="simulate healthy and faulty runs, and train nothing")
    parser.add_argument("--quick", action="store_true", help="of --audit: a few logs, which show that it runs")
    parser.add_argument("--rounds", type=int, default=8, help="of --overhead: each is three times ten steps")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if options.audit:
        from monitor_audit import audit

        for line in audit(options.output, quick=options.quick):
            print(line, flush=True)
        return 0
    if "RANK" not in os.environ:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
        os.execv(sys.executable, [sys.executable, *ranks, __file__, *sys.argv[1:]])
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    device = torch.device("cuda" if gpu else "cpu")
    if options.overhead:
        measure_overhead(options, device)
    else:
        train(options, device)
    dist.barrier()
    # Do not destroy the process group: gloo's threads may still hold tensors, so that it could abort or hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- 1. Training, with every monitor as a plain object ------------------------------------------------------


def train(options: argparse.Namespace, device: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from hf_accum_fix.monitor import (
        Alarms,
        GradientNorm,
        LossMeter,
        MemoryMonitor,
        Pace,
        RankGradients,
        RankLoss,
        Replicas,
        check_batch_norm,
    )

    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    fault = options.fault if last or options.fault in ("seed", "batch-norm", "spike") else "none"
    start_log(options.output, rank)
    torch.manual_seed(options.seed)
    network = digit_network(nn.BatchNorm2d if fault == "batch-norm" else partial(nn.GroupNorm, 4)).to(device)
    model = DistributedDataParallel(network, find_unused_parameters=fault == "batch-norm")
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    if fault == "batch-norm":
        model = copying_converter(model)

    alarms = Alarms()
    meter, alignment = LossMeter(), RankLoss()
    gradients, norms = RankGradients(), GradientNorm(MAX_NORM)
    replicas = Replicas(model, optimizer, every=CHECK_EVERY)
    memory, pace = MemoryMonitor(), Pace(model)
    gradients.attach(model)

    micro_batches, held_out = digits(device, rank, dist.get_world_size(), same=fault == "seed", seed=1 + options.seed)
    kept, rows, summary = [], [], ""
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
            meter.update(loss, items=len(labels))
        norm = nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        norms.update(norm)
        optimizer.step()
        optimizer.zero_grad()
        if fault == "replica" and half_time:
            with torch.no_grad():
                network[-1].weight[3, 5] += 0.01
        if fault == "leak":
            kept.append(torch.ones(LEAK, dtype=torch.uint8, device=device))

        memory.sample()
        pace.step()
        alarms.say(replicas.step())
        if step == 1:
            for finding in check_batch_norm(
                model, per_device_batch=BATCH, accumulation_steps=ACCUMULATION, optimizer=optimizer
            ):
                alarms.say(finding)
        if step % LOG_EVERY:
            continue
        reading, rank_norms, norm_reading, held = meter.read(), gradients.read(), norms.read(), memory.read()
        alarms.say(alignment.judge(reading))
        alarms.say(gradients.judge(rank_norms))
        alarms.say(norms.judge(norm_reading))
        alarms.say(memory.judge(held))
        alarms.say(pace.judge(pace.read()))
        # The last micro-batch alone, as most logs show it.
        sampled = loss.detach().clone()
        dist.all_reduce(sampled)
        rows.append({
            "step": step, "loss": reading.mean, "loss_standard_error": reading.standard_error,
            "sampled_loss": float(sampled) / dist.get_world_size(), "grad_norm": float(norm),
            "hf_accum_fix/rank_loss_spread": reading.spread,
            "hf_accum_fix/rank_gradient_norm_jitter": rank_norms.jitter,
            "hf_accum_fix/gradient_norm_median": norm_reading.median,
            "hf_accum_fix/memory_mib": held[-1].used / 2**20,
            "hf_accum_fix/all_alarms": alarms.count,
        })  # fmt: skip
        if step % CHECK_EVERY == 0:
            rows[-1]["eval_accuracy"] = accuracy(network, held_out)
        if rank == 0:
            summary = f"memory of the last rank: {held[-1]}"
            print(json.dumps({key: round(value, 4) for key, value in rows[-1].items()}), flush=True)
    if rank == 0:
        print(summary)
        print(f"{alarms.count} alarm{'s' * (alarms.count > 1)}" if alarms.count else "no alarm")
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    steps, means, errors = ([row[key] for row in rows] for key in ("step", "loss", "loss_standard_error"))
    figure, panel = pyplot.subplots(figsize=(8, 4), layout="constrained")
    panel.plot(steps, [row["sampled_loss"] for row in rows], color="C1", label="last micro-batch, mean of the ranks")
    panel.plot(steps, means, color="C0", label="every micro-batch (LossMeter)")
    low, high = ([m + side * 2 * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
    panel.fill_between(steps, low, high, color="C0", alpha=0.25, linewidth=0, label="twice its standard error")
    panel.set(xlabel="optimizer step", ylabel="loss", yscale="log")
    panel.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


# ---- 2. What the monitors cost ------------------------------------------------------------------------------


def measure_overhead(options: argparse.Namespace, device: Any) -> None:
    """Print the cost of each monitor in a step of a transformer, and of whole steps with and without them in turns.

    Clocks on a busy machine are noisy; a second arm without monitors shows how noisy.
    """
    import torch.distributed as dist

    arms = {name: Arm(device, monitored=name == "monitored") for name in ("plain", "monitored", "plain again")}
    clocks: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
    spent: dict[tuple[str, str], list[float]] = {(arm, clock): [] for arm in arms for clock in clocks}
    for round_number in range(options.rounds + 1):
        names = list(arms)
        for name in names[round_number % 3 :] + names[: round_number % 3]:
            dist.barrier()
            before = {clock: read() for clock, read in clocks.items()}
            arms[name].run(LOG_EVERY)
            if round_number:  # the first allocates
                for clock, read in clocks.items():
                    spent[name, clock].append(read() - before[clock])
    step = median(spent["plain", "processor"] + spent["plain again", "processor"]) / LOG_EVERY
    parts = arms["monitored"].parts()
    counts = {name: operations(lambda arm=arm: arm.run(LOG_EVERY)) for name, arm in arms.items()}
    if dist.get_rank():
        return
    print(f"{device.type}, {dist.get_world_size()} ranks, {step * 1e3:.0f} ms of processor time a step")
    for part, seconds in parts.items():
        print(f"  {part:52} {seconds * 1e6:8.0f} us a step {seconds / step:7.3%}")
    print(f"  {'all of them':52} {sum(parts.values()) * 1e6:8.0f} us a step {sum(parts.values()) / step:7.3%}")
    print(f"whole steps, {options.rounds} rounds of {LOG_EVERY} in turns, median of rounds:")
    for clock in clocks:
        shares = {
            name: median(a / b - 1 for a, b in zip(spent[name, clock], spent["plain", clock], strict=True))
            for name in ("monitored", "plain again")
        }
        print(f"  {clock}: with monitors {shares['monitored']:+.2%}, without once more {shares['plain again']:+.2%}")
    print(f"counted in {LOG_EVERY} steps and their log:")
    for counted in ("torch operations", "collectives"):
        without, ours = counts["plain"][counted], counts["monitored"][counted]
        print(
            f"  {counted}: {without:,} without monitors, {ours - without:,} more with them ({ours / without - 1:+.2%})"
        )


class Arm:
    """The transformer under DDP, with every monitor or with none."""

    def __init__(self, device: Any, *, monitored: bool) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from hf_accum_fix.monitor import Monitor, RankGradients, Replicas

        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.network = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, VOCABULARY)
        ).to(device)
        self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        torch.manual_seed(dist.get_rank())
        self.words = torch.randint(VOCABULARY, (SAMPLES, TOKENS), device=device)
        self.monitor = Monitor(self.model, self.optimizer, max_norm=1.0) if monitored else None
        # What is part of a step or of a hundred, once more alone.
        self.gradients, self.replicas = RankGradients(), Replicas(self.model, self.optimizer)

    def run(self, steps: int) -> None:
        """Run so many steps and one log."""
        from torch import nn
        from torch.nn.functional import cross_entropy

        for _ in range(steps):
            loss = cross_entropy(self.model(self.words).flatten(0, 1), self.words.flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            if self.monitor is not None:
                self.each_step(loss, norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.log()
        else:
            float(loss.detach())

    def each_step(self, loss: Any, norm: Any) -> None:
        self.monitor.samples(self.words)
        self.monitor.step(loss, items=self.words.numel(), norm=norm)

    def parts(self) -> dict[str, float]:
        """Processor seconds a step of each part, alone and again and again."""
        import torch

        gradient = torch.cat([parameter.detach().flatten() for parameter in self.network.parameters()])
        loss = norm = torch.ones((), device=gradient.device)

        def measure_gradient() -> None:
            # As the hook does on a CPU, where the division is a separate pass, too.
            self.gradients.add(gradient)
            self.gradients.end_of_step()
            gradient.div_(1.0)

        replicas = seconds_of(self.replicas.check, 5) / 100
        return {
            "Monitor.step without the replicas, every step": seconds_of(lambda: self.each_step(loss, norm), 500)
            - replicas,
            "gradient norm before the reduction, every step": seconds_of(measure_gradient, 20),
            f"Monitor.log, every {LOG_EVERY} steps": seconds_of(self.monitor.log, 20) / LOG_EVERY,
            "replicas, every 100 steps": replicas,
        }


def operations(call: Callable[[], Any]) -> Counter[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    found = Counter[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found["collectives" if operation.namespace == "c10d" else "torch operations"] += 1
            return operation(*args, **(kwargs or {}))

    with Counting():
        call()
    return found


def seconds_of(call: Callable[[], Any], times: int) -> float:
    import torch

    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = time.perf_counter() if torch.cuda.is_available() else time.process_time()
    for _ in range(times):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return (time.perf_counter() - before) / times
    return (time.process_time() - before) / times


if __name__ == "__main__":
    sys.exit(main())
