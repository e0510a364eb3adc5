"""What one GPU shows in some ten minutes: what the package costs there, what it gains, and that it waits for nothing.

    OMP_NUM_THREADS=8 python recipes/on_gpu.py                    # every part, on the GPU
    OMP_NUM_THREADS=1 python recipes/on_gpu.py --quick            # the same on small models; two minutes of a CPU core
    python recipes/on_gpu.py --parts overhead,accumulate_in

The parts:

    overhead        apply() and stock, in turns: a micro-batch, a step, the waits of the host (overhead.py)
    speed           length-balanced windows, stock and batch_rebalance, a 1B Llama, bfloat16 autocast (window_speed.py)
    router_loss     "exact" against "mean": a small Mixtral
    accumulate_in   "float32" against "parameter": a bfloat16 Llama
    sweep           the LLaVA sweep, 128 samples a step: stock, hotfix, apply() (llava_sweep.py)

Times are medians over paired runs: in every round each mode runs once, and is divided by the first one's time of that
round; the first mode runs twice, and that is the noise. The output folder gets results.json, written anew after every
part, and table.txt. A part that fails is a row with its error. Exit codes: 1, a part failed; 2, bad input.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import shared
import torch
import transformers
import window_speed

import hf_accum_fix

Train = Callable[[Callable[[int], None]], object]
HERE = Path(__file__).resolve().parent
LABEL, FIGURE = 50, 28  # of the table, in characters: a line is at most 80 wide
ON_GPU = torch.cuda.is_available()
AGAIN = "again"  # the first mode once more


class Rows(list[dict[str, Any]]):
    """The figures of all parts: the part, what was measured, the number, and how the table shows it."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.part = part

    def add(self, what: str, value: float, shown: str = "") -> None:
        self.append({"part": self.part, "what": what, "value": value, "shown": shown or f"{value:.4g}"})


# ---- 1. Paired runs ---------------------------------------------------------------------------------------


def step_seconds(train: Train) -> float:
    """Median time of an optimizer step after the first, in which the loss is observed."""
    ends: list[float] = []

    def after(_: int) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    train(after)
    return statistics.median(late - early for early, late in itertools.pairwise(ends))


def paired(trainings: dict[str, Train], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Step times of every mode in every round, the order turning; the most GPU memory of each mode [MiB]."""
    names = [*trainings, AGAIN]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    # Kernels are loaded and modules imported in the first run of all.
    step_seconds(next(iter(trainings.values())))
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            seconds[name].append(step_seconds(trainings.get(name, next(iter(trainings.values())))))
            if ON_GPU:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
    return seconds, peaks


def add_times(rows: Rows, label: str, trainings: dict[str, Train], rounds: int, micro_batches: int) -> None:
    """A step of every mode over one of the first mode, and the microseconds that a micro-batch takes longer."""
    seconds, peaks = paired(trainings, rounds)
    first = next(iter(trainings))
    rows.add(f"{label}: {first}, step [ms]", 1e3 * statistics.median(seconds[first]))
    for name in [*list(trainings)[1:], AGAIN]:
        pairs = list(zip(seconds[name], seconds[first], strict=True))
        ratio = overhead.spread([one / other for one, other in pairs])
        shown = f"{first} again" if name == AGAIN else name
        rows.add(f"{label}: {shown}, step / {first}", ratio.median, ratio.words(".3f"))
        more = overhead.spread([1e6 * (one - other) / micro_batches for one, other in pairs])
        rows.add(f"{label}: {shown}, us more a micro-batch", more.median, more.words(".0f"))
    for name, peak in peaks.items():
        if name != AGAIN:
            rows.add(f"{label}: {name}, peak memory [MiB]", peak, f"{peak:.0f}")


# ---- 2. The parts -----------------------------------------------------------------------------------------


def part_overhead(rows: Rows, options: argparse.Namespace) -> None:
    sizes = ("tiny",) if options.quick else ("tiny", "medium")
    for head, name in itertools.product(overhead.HEADS, sizes):
        size = replace(overhead.SIZES[name], steps=options.steps)
        trainings = {mode: partial(overhead.train, head, size, mode, size.steps) for mode in ("stock", "apply")}
        add_times(rows, f"{head} {name}", trainings, options.rounds, overhead.STEPS_OF_ACCUMULATION)
        stock, ours = (overhead.count(head, size, mode) for mode in ("stock", "apply"))
        rows.add(f"{head} {name}: stock, waits a step", stock.reads)
        rows.add(f"{head} {name}: apply, waits a step", ours.reads)
        # On a CPU, where it waits for nothing, one number is read in every window.
        if ours.reads > stock.reads + (0 if ON_GPU else 1):
            raise RuntimeError(f"got {ours.reads:g} waits a step with apply(); expected {stock.reads:g}, stock's")


def part_speed(rows: Rows, options: argparse.Namespace) -> None:
    # Grouped by length, other samples meet in a step.
    modes = [mode for mode in window_speed.MODES if mode not in ("group_by_length", "auto")]
    given = ["--modes", ",".join(modes), "--rounds", "1"]
    if options.quick:
        given += ["--size", "tiny", "--windows", "1", "--batch", "4", "--steps", "4"]
    else:
        given += ["--size", "1b", "--dtype", "bfloat16", "--windows", "4"]
    found = lines_of("window_speed.py", [*given, *["--cuda"] * ON_GPU], options.output / "speed")
    limit = next(row["samples_per_second"] for row in found if row["mode"] == "no padding")
    for row in found:
        speed = row["samples_per_second"]
        rows.add(f"{row['mode']}: samples a second", speed)
        rows.add(f"{row['mode']}: share of no padding", speed / limit, f"{speed / limit:.2f}")
        rows.add(f"{row['mode']}: peak memory [MiB]", row["peak_mib"], f"{row['peak_mib']:.0f}")
        if "gradient" in row:
            rows.add(f"{row['mode']}: gradient against stock's", row["gradient"], f"{row['gradient']:.1e}")


def part_router_loss(rows: Rows, options: argparse.Namespace) -> None:
    size = overhead.Size(width=256, layers=4, length=192, steps=options.steps if ON_GPU else 2)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.MixtralConfig(vocab_size=overhead.VOCABULARY, router_aux_loss_coef=0.01, **shape)

    def train(mode: str, after: Callable[[int], None]) -> None:
        torch.manual_seed(0)
        with hf_accum_fix.apply(router_loss=mode, quiet=True):
            overhead.run(transformers.MixtralForCausalLM(config), "llama", size, size.steps, after)

    trainings = {mode: partial(train, mode) for mode in ("mean", "exact")}
    add_times(rows, "Mixtral", trainings, 1 if options.quick else options.rounds, overhead.STEPS_OF_ACCUMULATION)


def part_accumulate_in(rows: Rows, options: argparse.Namespace) -> None:
    size = replace(overhead.SIZES["tiny" if options.quick else "medium"], steps=options.steps)

    def training(mode: str) -> Train:
        def train(after: Callable[[int], None]) -> None:
            with hf_accum_fix.apply(accumulate_in=mode, quiet=True):
                overhead.run(overhead.build("llama", size).bfloat16(), "llama", size, size.steps, after)

        return train

    modes = ("parameter", "float32")
    add_times(rows, "Llama", {mode: training(mode) for mode in modes}, options.rounds, overhead.STEPS_OF_ACCUMULATION)


def part_sweep(rows: Rows, options: argparse.Namespace) -> None:
    total, splits, steps = (16, "4x4,1x16", 1) if options.quick else (128, "32x4,16x8,1x128", 3)
    given = ["--modes", "stock,hotfix,apply", "--total-batch", str(total), "--splits", splits, "--steps", str(steps)]
    found = lines_of("llava_sweep.py", given, options.output / "sweep")
    reference = json.loads((options.output / "sweep" / "environment.json").read_text())["reference"]
    for row in found:
        split = f"{row['mode']} {row['per_device']} x {row['accumulation']}"
        for key in ("loss", "grad_norm"):
            times = row["losses" if key == "loss" else "grad_norms"][0] / reference[key]
            rows.add(f"{split}: {key} / full batch", times, f"{times:.6f}")


def lines_of(recipe: str, arguments: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """The lines of results that another recipe writes, in its own process."""
    command = [sys.executable, str(HERE / recipe), *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{recipe} ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


PARTS = {
    "overhead": part_overhead,
    "router_loss": part_router_loss,
    "accumulate_in": part_accumulate_in,
    "sweep": part_sweep,
    "speed": part_speed,
}

# ---- 3. All of them ---------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the figures were taken on, and when."""
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else f"CPU, a stand-in: {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "transformers": transformers.__version__,
        "hf_accum_fix": hf_accum_fix.__version__,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [textwrap.fill(", ".join(f"{key} {value}" for key, value in machine().items()), LABEL + FIGURE + 2)]
    for part, own in itertools.groupby(rows, lambda row: row["part"]):
        lines += ["", part]
        lines += [f"  {row['what'][:LABEL]:<{LABEL}}{row['shown'][:FIGURE]:>{FIGURE}}" for row in own]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = shared.Parser(__doc__, "on_gpu", new=True)
    parser.add_argument("--parts", type=shared.some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small models and few runs; the figures mean little")
    parser.add_argument("--rounds", type=shared.positive, help="paired runs of every mode (default: 5; quick: 2)")
    options = parser.parse_args()
    if not ON_GPU and not options.quick:
        parser.error("got no GPU, torch.cuda.is_available() is False; expected one, or --quick on a CPU")
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = 3 if options.quick else 12
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    failed = 0
    for number, part in enumerate(options.parts, 1):
        began, own = time.monotonic(), Rows(part)
        try:
            PARTS[part](own, options)
        except Exception as error:  # The other parts are worth having.
            failed += 1
            shown = {"value": None, "shown": type(error).__name__, "error": str(error)}
            own.append({"part": part, "what": "FAILED", **shown})
        rows += own
        (options.output / "results.json").write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
        (options.output / "table.txt").write_text(table(rows))
        outcome = own[-1].get("error", "done")
        print(f"[{number}/{len(options.parts)}] {part}, {time.monotonic() - began:.0f} s: {outcome}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    sys.stdout.write("\n" + table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
