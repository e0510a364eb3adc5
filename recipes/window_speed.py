r"""The same gradient, how much faster: length-balanced windows and the Trainer's own ways to pad less.

    python recipes/window_speed.py                                     # one process, a medium Llama on CPU, 12 minutes
    python recipes/window_speed.py --ranks 2 --batch 4 --steps 8       # two processes
    python recipes/window_speed.py --texts my_texts.jsonl --column text
    python recipes/window_speed.py --size 1b --dtype bfloat16 --cuda   # on a GPU

A window is the b * G * W samples of one optimizer step. The modes, each a training in its own process:

    stock            the installed Trainer: samples as they come
    stock again      the same once more: the difference of the two is the noise
    group_by_length  the Trainer's: samples of about one length meet in a micro-batch and so in a step: other steps
    batch_rebalance  the Trainer's, from 5.17 on: balances a window by a cost model; shuffles by its own seed
    balanced         hf_accum_fix.apply(balance_windows=True): stock's own windows, length-balanced
    no padding       the limit: balanced's micro-batches with all rows of each levelled to one length
    auto             only if named: apply(micro_batch="auto"), a window in as few as fit; padding as fetched

Rounds are interleaved, so that other programs slow all modes alike; every figure is the median over rounds, with the
least and the greatest. The first three windows of a training warm up and are not counted. Memory is the peak above the
model and the data. The gradient of the first window is compared with stock's, in modes with stock's windows.

The output folder gets results.jsonl (a line per training), table.md and window_speed.png.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared

ROOT = Path(__file__).resolve().parents[1]
MODES = ("stock", "group_by_length", "batch_rebalance", "balanced", "no padding", "stock again", "auto")
WARM_UP = 3  # windows before those that are timed: in these a loss is observed
SAME_WINDOWS = ("stock again", "balanced")  # as stock's
OURS = {"balanced": {"balance_windows": True}, "no padding": {"balance_windows": True}, "auto": {"micro_batch": "auto"}}
#: hidden, layers, heads, intermediate; tokens of the vocabulary
SIZES = {"tiny": (64, 2, 4, 128, 2000), "medium": (320, 8, 5, 864, 4096), "1b": (2048, 16, 32, 8192, 32000)}


def read_options() -> argparse.Namespace:
    parser = shared.Parser(__doc__, "window_speed")
    add = parser.add_argument
    add("--modes", type=shared.some_of(MODES), default=[*MODES[:-1]], help=f"some of {','.join(MODES)}")
    add("--rounds", type=shared.positive, default=3, help="trainings of every mode")
    add("--windows", type=shared.positive, default=2, help="optimizer steps that are timed, after three that warm up")
    add("--batch", type=shared.positive, default=8, help="b: samples per device")
    add("--steps", type=shared.positive, default=16, help="G: micro-batches per optimizer step")
    add("--ranks", type=shared.positive, default=1, help="W: processes, started by torchrun")
    add("--texts", default="lognormal", help="lognormal (drawn lengths), docstrings (of Python's library), or a .jsonl")
    add("--column", default="text", help="of the .jsonl")
    add("--longest", type=int, default=1024, help="tokens that a sample is truncated to")
    add("--size", choices=tuple(SIZES), default="medium", help="of the Llama")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is mixed precision")
    add("--mib", type=shared.positive, default=0, help="memory that a training may take beside model and data; 0: any")
    add("--cuda", action="store_true", help="train on the GPU")
    add("--cell", help=argparse.SUPPRESS)
    add("--keep", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- 1. Samples --------------------------------------------------------------------------------------------


def samples_of(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of each sample, in the order of the training."""
    count = options.batch * options.steps * options.ranks * (options.windows + WARM_UP)
    vocabulary = SIZES[options.size][-1]
    choose = random.Random(0)
    if options.texts == "lognormal":
        drawn = [int(choose.lognormvariate(3.9, 0.8)) for _ in range(count)]
        lengths = [min(max(length, 8), options.longest) for length in drawn]
        return [[choose.randrange(4, vocabulary) for _ in range(length)] for length in lengths]
    if options.texts == "docstrings":
        texts = docstrings()
    else:
        with Path(options.texts).open(encoding="utf-8") as lines:
            texts = [json.loads(line)[options.column] for line in lines if line.strip()]
    if len(texts) < count:
        raise SystemExit(f"got {len(texts)} texts; expected {count}; give fewer --windows, --batch or --steps")
    # Hash words and marks: only the lengths of real texts matter here.
    words = (re.findall(r"\w+|[^\w\s]", text)[: options.longest] for text in choose.sample(texts, count))
    return [[4 + zlib.crc32(word.encode()) % (vocabulary - 4) for word in text or ["."]] for text in words]


def docstrings() -> list[str]:
    """The docstrings of the modules of Python's library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found += [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
    return [text for text in found if text]


def levelled(samples: list[list[int]], options: argparse.Namespace) -> list[list[int]]:
    """Samples of the balanced micro-batches, levelled to one length in each: no padding, as many tokens."""
    from hf_accum_fix.data.packing import pack

    window = options.batch * options.steps * options.ranks
    result: list[list[int]] = []
    for start in range(0, len(samples), window):
        rows = samples[start : start + window]
        plan = pack([len(row) for row in rows], options.steps, options.ranks, rows=options.batch)
        for micro_batch in (each for own in plan for each in own):
            tokens = [token for place in micro_batch for token in rows[place]]
            length = round(len(tokens) / len(micro_batch))
            tokens += tokens[: max(length * len(micro_batch) - len(tokens), 0)]
            result += [tokens[at * length : (at + 1) * length] for at in range(len(micro_batch))]
    return result


# ---- 2. One training ---------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """One training in this process, on every rank; rank 0 prints the figures as a line of JSON."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import hf_accum_fix

    if not options.cuda:
        torch.set_num_threads(1)
    mode = options.cell
    samples = samples_of(options)
    if mode == "no padding":
        samples = levelled(samples, options)
    hidden, layers, heads, intermediate, vocabulary = SIZES[options.size]
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    size |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocabulary}
    torch.manual_seed(0)
    # On a CPU the weights of a large one would be drawn for minutes.
    with torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if options.cuda else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**size, max_position_embeddings=max(2048, options.longest)))
    shapes: list[tuple[int, int, int]] = []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = [row["input_ids"] for row in rows]
        width = max(map(len, ids))
        shapes.append((len(ids), width, sum(map(len, ids))))
        padded = torch.tensor([row + [-100] * (width - len(row)) for row in ids])
        return {"input_ids": padded.clamp(min=0), "attention_mask": (padded >= 0).long(), "labels": padded}

    class Clock(TrainerCallback):
        """Keep the end of each optimizer step, and the first gradient."""

        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []
            self.gradient: torch.Tensor | None = None

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if self.gradient is None:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                self.gradient = torch.cat([grad.flatten() for grad in grads]).float().cpu()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if options.cuda:
                torch.cuda.synchronize()
            self.ends.append((time.perf_counter(), time.process_time()))

    class Ordered(shared.InOrder, Trainer):
        """The samples as they come."""

    strategy: dict[str, Any] = {}
    if mode in ("group_by_length", "batch_rebalance"):
        new = hasattr(TrainingArguments, "train_sampling_strategy")
        strategy = {"train_sampling_strategy": mode} if new else {"group_by_length": True}
    arguments = shared.arguments(
        tempfile.gettempdir(), per_device_train_batch_size=options.batch, gradient_accumulation_steps=options.steps,
        num_train_epochs=1, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=1e30, optim="adamw_torch",
        bf16=options.dtype == "bfloat16", use_cpu=not options.cuda, logging_strategy="steps", logging_steps=1,
        ddp_backend=None if options.cuda or options.ranks == 1 else "gloo", **strategy,
    )  # fmt: skip
    clock = Clock()
    with hf_accum_fix.apply(**OURS[mode]) if mode in OURS else contextlib.nullcontext():
        rows, kind = [{"input_ids": ids} for ids in samples], Trainer if strategy else Ordered
        trainer = kind(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[clock])
        before = resident()
        if options.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        if options.mib and options.cuda:
            torch.cuda.set_per_process_memory_fraction((before + options.mib * 2**20) / torch.cuda.mem_get_info()[1])
        elif options.mib:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + options.mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        trainer.train()
    peak = torch.cuda.max_memory_allocated() if options.cuda else resident(peak=True)
    padded, real = sum(rows * width for rows, width, _ in shapes), sum(tokens for *_, tokens in shapes)
    counted = options.batch * options.steps * options.ranks * options.windows
    (wall, cpu), (first_wall, first_cpu) = clock.ends[-1], clock.ends[WARM_UP - 1]
    slowest = torch.tensor([padded, real, cpu - first_cpu, peak - before], dtype=torch.float64)
    total, most = slowest.clone(), slowest.clone()
    if options.ranks > 1:
        on = "cuda" if options.cuda else "cpu"
        total, most = total.to(on), most.to(on)
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    if trainer.args.process_index == 0:
        if options.keep:
            torch.save(clock.gradient, options.keep)
        row = {"mode": mode, "transformers": transformers.__version__, "torch": torch.__version__}
        row |= {"padded_over_real": float(total[0] / total[1]), "peak_mib": float(most[3]) / 2**20}
        row |= {"slowest_rank_over_ideal": float(most[0] * options.ranks / total[1])}
        row |= {"samples_per_second": counted / (wall - first_wall), "samples_per_cpu_second": counted / float(most[2])}
        row |= {"most_rows": max(rows for rows, *_ in shapes)}
        row |= {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
        print(json.dumps(row), flush=True)
    shared.end_ranks()


def resident(*, peak: bool = False) -> int:
    """Bytes of memory of this process, now or at most so far."""
    if peak:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if pages.exists() else resident(peak=True)


# ---- 3. All of them ----------------------------------------------------------------------------------------


def run_cell(mode: str, keep: Path) -> dict[str, Any]:
    """One training of a mode in new processes, and its line."""
    options = read_options()
    command = [sys.executable]
    if options.ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(options.ranks)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += [str(Path(__file__).resolve()), *sys.argv[1:], "--cell", mode, "--keep", str(keep)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"mode"')]
    if done.returncode or not lines:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every mode in every round, one after the other."""
    import torch

    modes = [mode for mode in options.modes if mode != "batch_rebalance" or has_batch_rebalance()]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, (options.output / "results.jsonl").open("w") as lines:
        for number in range(options.rounds):
            gradients: dict[str, torch.Tensor] = {}
            for mode in modes:
                keep = Path(folder) / "gradient.pt"
                row = {"round": number, **run_cell(mode, keep)}
                if number == 0 and mode in ("stock", *SAME_WINDOWS):
                    gradients[mode] = torch.load(keep)
                    if "stock" in gradients:
                        wanted = gradients["stock"].double()
                        row["gradient"] = float((gradients[mode].double() - wanted).norm() / wanted.norm())
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(f"round {number + 1}, {mode}: {row['samples_per_second']:.2f} samples/s", flush=True)
    return rows


def has_batch_rebalance() -> bool:
    """Whether the installed transformers has the strategy."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return "class BatchRebalanceSampler" in (Path(spec.origin).parent / "trainer_pt_utils.py").read_text()


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def times(rows: list[dict[str, Any]], mode: str, base: str, key: str) -> list[float]:
    """In each round, this mode's figure over another's; over the mean of stock's two where they were run."""
    bases = ("stock", "stock again") if base == "stock" and mode not in ("stock", "stock again") else (base,)
    ratios = []
    for row in (row for row in rows if row["mode"] == mode):
        stock = [other[key] for other in rows if other["round"] == row["round"] and other["mode"] in bases]
        ratios += [row[key] / statistics.mean(stock)] if stock else []
    return ratios


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The figures as a Markdown table, with what they were measured on."""
    first = rows[0]
    setting = (
        f"b={options.batch}, G={options.steps}, W={options.ranks}, {options.texts} lengths, {options.size} Llama, "
        f"{options.dtype}, {'GPU' if options.cuda else 'CPU, one thread a rank'}; "
        f"transformers {first['transformers']}, torch {first['torch']}, Python {platform.python_version()}; "
        f"{options.rounds} interleaved rounds of "
        f"{options.windows} windows after {WARM_UP} that warm up; median (least-greatest).\n\n"
    )
    head = ["mode", "padded/real", "slowest rank/ideal", "samples/s", "x stock", "samples/CPU s", "x stock"]
    head += ["of no padding", "most rows", "peak MiB", "gradient"]
    lines = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        wall, cpu = "samples_per_second", "samples_per_cpu_second"
        of_limit = times(rows, mode, "no padding", cpu)
        gradient = next((row["gradient"] for row in own if "gradient" in row), None)
        cells = [
            mode,
            f"{own[0]['padded_over_real']:.3f}",
            f"{own[0]['slowest_rank_over_ideal']:.3f}",
            spread([row[wall] for row in own]),
            spread(ratios) if (ratios := times(rows, mode, "stock", wall)) else "-",
            spread([row[cpu] for row in own]),
            spread(ratios) if (ratios := times(rows, mode, "stock", cpu)) else "-",
            f"{statistics.median(of_limit):.2f}" if of_limit else "-",
            str(own[0]["most_rows"]),
            spread([row["peak_mib"] for row in own], ".0f"),
            "-" if gradient is None else f"{gradient:.1e}",
        ]
        lines.append(cells)
    return setting + shared.markdown(head, lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Samples per second with their spread, and the losses of stock and balanced."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, ((bars, curves),) = shared.figure_of(1, 2, (11, 4))
    for place, mode in enumerate(modes):
        values = [row["samples_per_cpu_second"] for row in rows if row["mode"] == mode]
        middle = statistics.median(values)
        error = [[middle - min(values)], [max(values) - middle]]
        bars.barh(place, middle, xerr=error, color="tab:green" if mode == "balanced" else "tab:gray", capsize=3)
    shared.tidy(bars, xlabel="samples per second of processor time")
    bars.set_yticks(range(len(modes)), modes)
    bars.invert_yaxis()
    for mode, style in (("stock", "-"), ("balanced", "o")):
        losses = next((row["losses"] for row in rows if row["mode"] == mode), [])
        curves.plot(range(1, len(losses) + 1), losses, style, label=mode, fillstyle="none")
    shared.tidy(curves, steps=True, xlabel="optimizer step", ylabel="logged loss")
    curves.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    options = read_options()
    if options.cell:
        return train(options)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    text = table(rows, options)
    print(text)
    (options.output / "table.md").write_text(text)
    draw(rows, options.output / "window_speed.png")


if __name__ == "__main__":
    main()
