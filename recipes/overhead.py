"""What hf_accum_fix.apply() costs: the same training with and without it, in turns, and with the stock Trainer twice.

    OMP_NUM_THREADS=1 python recipes/overhead.py                      # some 10 minutes on a core
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 recipes/overhead.py # the same on two gloo ranks
    python recipes/overhead.py --counts                               # no clocks: what CI looks at, in seconds

Three runs make a round: stock, stock again, apply; which of them begins changes from round to round. Of each run the
median time of an optimizer step is kept, of each round the ratios to its first stock run. "stock again" is the noise:
a ratio of apply means something only where it lies outside it. Operations, numbers read by the host and collectives
are counted, not timed, between the third optimizer step and the last, so that nothing is left of the first windows, in
which the loss is observed and corrected; the forwards that this takes are counted apart. Of a model that is nothing but
a loss the operations that are added are also run by themselves: what a micro-batch takes longer, less these, is Python.

The output folder gets results.jsonl (a line per run), table.md and overhead.png. Exit code 2: bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_accum_fix

MODES = ("stock", "stock again", "apply")
#: Steps that are not counted: the first observes the loss, and on several ranks three are corrected in any case.
UNPROVEN = 3
STEPS_OF_ACCUMULATION, PER_DEVICE, VOCABULARY = 4, 2, 512
#: Operations that make the host wait for a number from the device.
READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.equal"}


@dataclass(frozen=True)
class Size:
    """One model: width, layers, and the longest of its samples [tokens]; optimizer steps of a timed run.

    Without a layer it is only a loss, so that the cost added to a step stands out.
    """

    width: int
    layers: int
    length: int
    steps: int


SIZES = {"empty": Size(0, 0, 24, 300), "tiny": Size(32, 2, 24, 30), "medium": Size(256, 8, 192, 6)}
HEADS = ("llama", "bert")


@dataclass(frozen=True)
class Counts:
    """Counts of one optimizer step on this rank, on average; bytes are the peak above the bytes before it.

    Reads are numbers that the host reads from the device; on a GPU, every wait for it.
    """

    operations: float
    reads: float
    collectives: float
    peak_bytes: int
    observing_forwards: int


@dataclass(frozen=True)
class Times:
    """One optimizer step [s]: the median by the wall clock, and the least of this thread's processor time.

    Other programs can only add to the latter.
    """

    wall: float
    processor: float


# ---- 1. The models ----------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """A loss of one parameter, by the number passed in if there is one, or the mean over its own items."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, labels: Tensor, input_ids: Any = None, attention_mask: Any = None) -> dict[str, Tensor]:
        return self.of(labels, None)

    def of(self, labels: Tensor, number: Any) -> dict[str, Tensor]:
        targets = labels[..., 1:].flatten() if labels.ndim > 1 else labels
        logits = self.weight * torch.zeros(len(targets), VOCABULARY, device=targets.device)
        loss = nn.functional.cross_entropy(logits, targets, reduction="mean" if number is None else "sum")
        return {"loss": loss if number is None else loss / number}


class NothingByNumber(Nothing):
    """Takes the number."""

    def forward(self, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return self.of(labels, kwargs.get("num_items_in_batch"))


def build(head: str, size: Size) -> nn.Module:
    torch.manual_seed(0)
    if size.layers == 0:
        return NothingByNumber() if head == "llama" else Nothing()
    width = {"hidden_size": size.width, "intermediate_size": 3 * size.width, "num_hidden_layers": size.layers}
    shape = {**width, "num_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": size.length}
    if head == "bert":
        return BertForSequenceClassification(BertConfig(**shape, num_labels=3))
    return LlamaForCausalLM(LlamaConfig(**shape))


def samples_of(head: str, size: Size, count: int) -> list[dict[str, Tensor]]:
    """Ragged texts; the first quarter of each is a prompt without targets."""
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        length = int(torch.randint(size.length // 2, size.length + 1, (), generator=g))
        ids = torch.randint(4, VOCABULARY, (length,), generator=g)
        labels = ids.clone()
        labels[: length // 4] = -100
        made.append({"input_ids": ids, "labels": labels if head == "llama" else ids[0] % 3})
    return made


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in samples], batch_first=True)
    mask = pad([torch.ones_like(each["input_ids"]) for each in samples], batch_first=True)
    labels = [each["labels"] for each in samples]
    together = pad(labels, batch_first=True, padding_value=-100) if labels[0].ndim else torch.stack(labels)
    return {"input_ids": ids, "attention_mask": mask, "labels": together}


class Watcher(TrainerCallback):
    """Calls back at the end of every optimizer step."""

    def __init__(self, after: Any) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after(state.global_step)


def train(head: str, size: Size, mode: str, steps: int, after: Any, **options: Any) -> int:
    """Train; return the number of extra forwards."""
    with hf_accum_fix.apply(**options) if mode == "apply" else contextlib.nullcontext():
        return run(build(head, size), head, size, steps, after) - steps * STEPS_OF_ACCUMULATION


def run(model: nn.Module, head: str, size: Size, steps: int, after: Any) -> int:
    """Train a model under the current patch; return the number of forwards."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_pre_hook(count)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            per_device_train_batch_size=PER_DEVICE,
            gradient_accumulation_steps=STEPS_OF_ACCUMULATION,
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="gloo" if world > 1 and not torch.cuda.is_available() else None,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        data = samples_of(head, size, steps * STEPS_OF_ACCUMULATION * PER_DEVICE * world)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Watcher(after)]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return forwards


# ---- 2. The counts ----------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Count operations as they reach a device, and the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = self.collectives = self.alive = self.peak = 0
        self.waits: int | None = None
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.resources = contextlib.ExitStack()

    def __enter__(self) -> Any:
        warned = self.resources.enter_context(waits_for_the_gpu())
        if warned is not None:
            self.resources.callback(lambda: setattr(self, "waits", len(warned)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.resources.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name.startswith("c10d."):
            self.collectives += 1
        else:
            self.operations += 1
        self.reads += name in READS
        old = {each.untyped_storage() for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        found = func(*args, **(kwargs or {}))
        for each in tree_iter(found):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage not in self.seen and storage not in old:
                self.seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return found

    def _add(self, count: int) -> None:
        self.alive += count
        self.peak = max(self.peak, self.alive)


@contextlib.contextmanager
def waits_for_the_gpu() -> Iterator[list[Any] | None]:
    """The host's waits for a GPU, by torch's sync debug mode; None without a GPU."""
    if not torch.cuda.is_available():
        yield None
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode(before)


def count(head: str, size: Size, mode: str, steps: int = UNPROVEN + 2, **options: Any) -> Counts:
    """Count the operations of a step, without the first windows."""
    counting = Counting()
    observing = watch(counting, head, size, mode, steps, **options)
    each = steps - UNPROVEN
    reads = counting.reads if counting.waits is None else counting.waits
    numbers = (counting.operations / each, reads / each, counting.collectives / each)
    return Counts(*numbers, counting.peak, observing)


def watch(by: TorchDispatchMode, head: str, size: Size, mode: str, steps: int, **options: Any) -> int:
    """Count the operations of all steps but the first `UNPROVEN`; return the number of extra forwards."""
    with contextlib.ExitStack() as stack:

        def after(step: int) -> None:
            if step == UNPROVEN:
                stack.enter_context(by)
            elif step == steps:
                stack.close()

        return train(head, size, mode, steps, after, **options)


# ---- 3. The times -----------------------------------------------------------------------------------------


def measure(head: str, size: Size, mode: str) -> Times:
    marks: list[tuple[float, float]] = []

    def after(step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), time.thread_time()))

    train(head, size, mode, size.steps, after)
    steps = [(late[0] - early[0], late[1] - early[1]) for early, late in itertools.pairwise(marks[1:])]
    return Times(statistics.median(wall for wall, _ in steps), min(processor for _, processor in steps))


class Keeping(TorchDispatchMode):
    """Every call of an operation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def again(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def added_operations(head: str, size: Size) -> float:
    """Time of the operations added to a micro-batch [us], run by themselves, less the ones that are saved."""
    seen = {mode: Keeping() for mode in ("stock", "apply")}
    for mode, keeping in seen.items():
        watch(keeping, head, size, mode, UNPROVEN + 1)
    with torch.no_grad():
        least = {mode: min(timeit.repeat(keeping.again, number=1, repeat=500)) for mode, keeping in seen.items()}
    return 1e6 * (least["apply"] - least["stock"]) / STEPS_OF_ACCUMULATION


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    def words(self, form: str) -> str:
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


def spread(values: list[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def ratios(rounds: list[dict[str, Times]], mode: str, clock: str) -> list[float]:
    """The step of a mode against the first stock run of its round, by one of the clocks of `Times`."""
    return [getattr(each[mode], clock) / getattr(each["stock"], clock) for each in rounds]


def microseconds(rounds: list[dict[str, Times]], mode: str) -> list[float]:
    """The least processor time of a micro-batch beyond the first stock run's."""
    return [1e6 * (each[mode].processor - each["stock"].processor) / STEPS_OF_ACCUMULATION for each in rounds]


# ---- 4. The tables ----------------------------------------------------------------------------------------

Table = list[tuple[str, ...]]


def table_of(
    counted: dict[tuple[str, str], dict[str, Counts]],
    timed: dict[tuple[str, str], Any],
    alone: dict[tuple[str, str], float],
) -> Table:
    head: tuple[str, ...] = ("head", "model", "operations a micro-batch", "host reads a step", "collectives a step")
    head += ("peak bytes", "forwards to observe")
    rows = []
    for (name, size), modes in counted.items():
        stock, ours = modes["stock"], modes["apply"]
        before, now = (each.operations / STEPS_OF_ACCUMULATION for each in (stock, ours))
        row = (name, size, f"{before:.1f} to {now:.1f} ({now / before - 1:+.2%})", f"{stock.reads:g} to {ours.reads:g}")
        row += (f"{stock.collectives:g} to {ours.collectives:g}", f"{ours.peak_bytes - stock.peak_bytes:+d}")
        row += (f"{ours.observing_forwards}",)
        if timed:
            rounds = timed[name, size]
            row += (f"{1e3 * statistics.median(each['stock'].processor for each in rounds):.1f}",)
            for clock in ("wall", "processor"):
                row += tuple(spread(ratios(rounds, mode, clock)).words(".3f") for mode in ("apply", "stock again"))
            row += tuple(spread(microseconds(rounds, mode)).words(".0f") for mode in ("apply", "stock again"))
            row += (f"{alone[name, size]:.0f}" if (name, size) in alone else "-",)
        rows.append(row)
    if timed:
        head += ("stock step, processor time [ms]", "step by the wall / stock", "stock again / stock")
        head += ("step by the processor / stock", "stock again / stock")
        head += (
            "more processor time a micro-batch [us]",
            "stock again [us]",
            "the operations of it by themselves [us]",
        )
    return [head, *rows]


def markdown(table: Table) -> str:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]) + "\n"


def show(table: Table) -> None:
    """Print it on its side: one column per head and model."""
    widths = [max(len(cell) for cell in row) for row in table]
    for cells in zip(*table, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, [max(widths[0], 0), *widths[1:]], strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def draw(timed: dict[tuple[str, str], list[dict[str, Times]]], path: Path) -> None:
    """The ratios of every round: apply, and the noise of two stock runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * len(timed) + 1, 6), layout="constrained")
    rows = figure.subplots(2, len(timed), sharey="row", squeeze=False)
    for clock, panels in zip(("wall", "processor"), rows, strict=True):
        for panel, ((head, size), rounds) in zip(panels, timed.items(), strict=True):
            for place, mode in enumerate(("stock again", "apply")):
                values = ratios(rounds, mode, clock)
                panel.scatter([place] * len(values), values, s=9, alpha=0.5)
                panel.plot([place - 0.2, place + 0.2], [statistics.median(values)] * 2, color="black")
            panel.axhline(1, color="grey", linewidth=0.8)
            panel.set_xticks([0, 1], ["stock again", "apply()"])
            panel.set_xlim(-0.5, 1.5)
            panel.set_title(f"{head}, {size}", fontsize=9)
        panels[0].set_ylabel(f"optimizer step / stock, {clock}")
    figure.savefig(path, dpi=150)


# ---- 5. The run -------------------------------------------------------------------------------------------


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of three runs (default: 15)")
    parser.add_argument("--heads", default=",".join(HEADS), help=f"default: {','.join(HEADS)}")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"default: {','.join(SIZES)}")
    parser.add_argument("--counts", action="store_true", help="count, and time nothing")
    parser.add_argument("--output", type=Path, default=Path("overhead"), help="folder (default: overhead)")
    options = parser.parse_args(argv)
    for name, known in (("heads", HEADS), ("sizes", tuple(SIZES))):
        chosen = tuple(getattr(options, name).split(","))
        if not set(chosen) <= set(known):
            parser.error(f"got --{name} {getattr(options, name)}; expected some of {','.join(known)}")
        setattr(options, name, chosen)
    if options.rounds < 1:
        parser.error(f"got --rounds {options.rounds}; expected 1 or more")
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        parser.error(f"--output {options.output} is there already; give a new folder, so that nothing is overwritten")
    return options


class Results:
    """Lines of JSON, each on the disk as soon as it is known."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path, self._writes = path, writes

    def add(self, row: dict[str, Any]) -> None:
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def ranks() -> Iterator[int]:
    """This rank; with several the process ends here, because destroying a gloo group can hang."""
    yield int(os.environ.get("RANK", "0"))
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv)
    with ranks() as rank:
        pairs = [(head, size) for head in options.heads for size in options.sizes]
        counted = {pair: {mode: count(pair[0], SIZES[pair[1]], mode) for mode in ("stock", "apply")} for pair in pairs}
        timed: dict[tuple[str, str], list[dict[str, Times]]] = {}
        keep = Results(options.output / "results.jsonl", writes=rank == 0)
        for (head, size), modes in counted.items():
            for mode, each in modes.items():
                keep.add({"head": head, "size": size, "mode": mode, **asdict(each)})
        rounds = 0 if options.counts else options.rounds
        bar = tqdm(total=rounds * len(pairs) * len(MODES), disable=rank > 0 or not rounds, unit="run")
        for turn in range(rounds):
            for head, size in pairs:
                order = MODES[turn % 3 :] + MODES[: turn % 3]
                found = {}
                for mode in order:
                    found[mode] = measure(head, SIZES[size], mode)
                    keep.add({"head": head, "size": size, "mode": mode, "round": turn, **asdict(found[mode])})
                    bar.update()
                timed.setdefault((head, size), []).append(found)
        bar.close()
        alone = {pair: added_operations(pair[0], SIZES[pair[1]]) for pair in timed if SIZES[pair[1]].layers == 0}
        for (head, size), each in alone.items():
            keep.add({"head": head, "size": size, "added_operations_us": each})
        if rank == 0:
            table = table_of(counted, timed, alone)
            (options.output / "table.md").write_text(markdown(table))
            if timed:
                draw(timed, options.output / "overhead.png")
            show(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
