"""What hf_accum_fix.apply() costs: the same training with and without it, in turns, and with the stock Trainer twice.

    OMP_NUM_THREADS=1 python recipes/overhead.py                      # some 10 minutes on a core
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 recipes/overhead.py # the same on two gloo ranks
    python recipes/overhead.py --counts                               # no clocks: what CI looks at, in seconds

Three runs make a round: stock, stock again, apply; which of them begins changes from round to round. Of each run the
median time of an optimizer step is kept, of each round the ratios to its first stock run. "stock again" is the noise:
a ratio of apply means something only where it lies outside it. Operations, numbers read by the host and collectives
are counted, not timed, between the third optimizer step and the last, so that nothing is left of the first windows, in
which the loss is observed and corrected; the forwards that this takes are counted apart.

The output folder gets results.jsonl (a line per run) and table.md. Exit code 2: bad input.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import shared
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from tqdm import tqdm

import hf_accum_fix

MODES = ("stock", "stock again", "apply")
UNPROVEN = 3  # steps that are not counted: the first observes the loss, and on several ranks three are corrected
STEPS_OF_ACCUMULATION, PER_DEVICE, VOCABULARY = 4, 2, 512
#: Operations that make the host wait for a number from the device.
READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.equal"}


@dataclass(frozen=True)
class Size:
    """One model: width, layers, and the longest of its samples [tokens]; optimizer steps of a timed run."""

    width: int
    layers: int
    length: int
    steps: int


SIZES = {"tiny": Size(32, 2, 24, 30), "medium": Size(256, 8, 192, 6)}
HEADS = ("llama", "bert")


@dataclass(frozen=True)
class Counts:
    """Means of one optimizer step on this rank; reads: numbers that the host reads, on a GPU every wait for it."""

    operations: float
    reads: float
    collectives: float
    peak_bytes: int
    observing_forwards: int


@dataclass(frozen=True)
class Times:
    """One optimizer step [s]: the median by the clock, and the least of this thread's processor time."""

    wall: float
    processor: float


# ---- 1. The models ----------------------------------------------------------------------------------------


def build(head: str, size: Size) -> nn.Module:
    torch.manual_seed(0)
    width = {"hidden_size": size.width, "intermediate_size": 3 * size.width, "num_hidden_layers": size.layers}
    shape = {**width, "num_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": size.length}
    if head == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, num_labels=3))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


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


class Watcher(transformers.TrainerCallback):
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
        arguments = shared.arguments(
            output, per_device_train_batch_size=PER_DEVICE, gradient_accumulation_steps=STEPS_OF_ACCUMULATION,
            max_steps=steps, ddp_backend="gloo" if world > 1 and shared.on_cpu() else None,
        )  # fmt: skip
        data = samples_of(head, size, steps * STEPS_OF_ACCUMULATION * PER_DEVICE * world)
        trainer = transformers.Trainer(model, arguments, collate, data, callbacks=[Watcher(after)])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return forwards


# ---- 2. The counts ----------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Count operations as they reach a device, and the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = self.collectives = self.alive = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.collectives += name.startswith("c10d.")
        self.operations += not name.startswith("c10d.")
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
    """Count the operations of all steps but the first `UNPROVEN`, by step."""
    counting, waits = Counting(), None
    with contextlib.ExitStack() as stack:

        def after(step: int) -> None:
            nonlocal waits
            if step == UNPROVEN:
                waits = stack.enter_context(waits_for_the_gpu())
                stack.enter_context(counting)
            elif step == steps:
                stack.close()

        observing = train(head, size, mode, steps, after, **options)
    each = steps - UNPROVEN
    reads = counting.reads if waits is None else len(waits)
    return Counts(counting.operations / each, reads / each, counting.collectives / each, counting.peak, observing)


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


# ---- 4. The tables ----------------------------------------------------------------------------------------


def table_of(counted: dict[tuple[str, str], dict[str, Counts]], timed: dict[tuple[str, str], Any]) -> str:
    head = ["head", "model", "operations a micro-batch", "host reads a step", "collectives a step"]
    head += ["peak bytes", "forwards to observe"]
    if timed:
        head += ["stock step, processor time [ms]", "step / stock, by the clock", "stock again / stock"]
        head += ["by the processor", "stock again / stock"]
    rows = []
    for (name, size), modes in counted.items():
        stock, ours = modes["stock"], modes["apply"]
        before, now = (each.operations / STEPS_OF_ACCUMULATION for each in (stock, ours))
        row = [name, size, f"{before:.1f} to {now:.1f} ({now / before - 1:+.2%})", f"{stock.reads:g} to {ours.reads:g}"]
        row += [f"{stock.collectives:g} to {ours.collectives:g}", f"{ours.peak_bytes - stock.peak_bytes:+d}"]
        row += [f"{ours.observing_forwards}"]
        if timed:
            rounds = timed[name, size]
            row += [f"{1e3 * statistics.median(each['stock'].processor for each in rounds):.1f}"]
            for clock in ("wall", "processor"):
                row += [spread(ratios(rounds, mode, clock)).words(".3f") for mode in ("apply", "stock again")]
        rows.append(row)
    return shared.markdown(head, rows)


# ---- 5. The run -------------------------------------------------------------------------------------------


def main() -> None:
    parser = shared.Parser(__doc__, "overhead", new=True)
    parser.add_argument("--rounds", type=shared.positive, default=15, help="rounds of three runs (default: 15)")
    parser.add_argument("--heads", type=shared.some_of(HEADS), default=HEADS, help=f"default: {','.join(HEADS)}")
    parser.add_argument("--sizes", type=shared.some_of(SIZES), default=list(SIZES), help=f"default: {','.join(SIZES)}")
    parser.add_argument("--counts", action="store_true", help="count, and time nothing")
    options = parser.parse_args()
    first = shared.first_rank()

    def keep(**row: Any) -> None:
        if first:
            shared.add_line(options.output / "results.jsonl", row)

    pairs = [(head, size) for head in options.heads for size in options.sizes]
    counted = {pair: {mode: count(pair[0], SIZES[pair[1]], mode) for mode in ("stock", "apply")} for pair in pairs}
    timed: dict[tuple[str, str], list[dict[str, Times]]] = {}
    for (head, size), modes in counted.items():
        for mode, each in modes.items():
            keep(head=head, size=size, mode=mode, **asdict(each))
    rounds = 0 if options.counts else options.rounds
    bar = tqdm(total=rounds * len(pairs) * len(MODES), disable=not first or not rounds, unit="run")
    for turn in range(rounds):
        for head, size in pairs:
            found = {}
            for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                found[mode] = measure(head, SIZES[size], mode)
                keep(head=head, size=size, mode=mode, round=turn, **asdict(found[mode]))
                bar.update()
            timed.setdefault((head, size), []).append(found)
    bar.close()
    if first:
        table = table_of(counted, timed)
        (options.output / "table.md").write_text(table)
        sys.stdout.write(table)
    shared.end_ranks()


if __name__ == "__main__":
    main()
