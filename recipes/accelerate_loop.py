r"""A hand-written training loop with accelerate: its two official recipes and accumulation windows, on real text.

    torchrun --nproc_per_node 2 recipes/accelerate_loop.py                          # two processes, some minutes
    accelerate launch --multi_gpu --num_processes 2 recipes/accelerate_loop.py      # the same, on GPUs or without
    python recipes/accelerate_loop.py --head bert                                   # one process; a masked model
    python recipes/accelerate_loop.py --splits 16x4,1x64 --modes windows --epochs 1

A split PxG is P samples per device and G micro-batches per optimizer step; the samples of a step are the same for any
the split, and an epoch ends in a short window of half as many. Every cell starts from the same weights:

    accumulate  ``with accelerator.accumulate(model)``, the first page of accelerate's guide
    count       its recipe for language models: count the labels other than -100, hand the number to the model
    windows     hf_accum_fix.accumulation_windows

The table compares the gradients of two windows of the first epoch, the first and the short one, with the float64
gradient of their samples in one forward. ``accumulate`` averages the means of micro-batches, and divides the short
window by the full G. ``count`` counts the label at position 0 of every text, which no causal model learns (llama), or
passes its number to a head that ignores it (bert: G x W times the right gradient).

The text is the Python reference that every Python carries in pydoc_data: a sample is a paragraph, a token a byte. The
output folder gets results.jsonl (a line per cell), environment.json and curves.png. Bad input: exit code 2.

Source: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation (both recipes).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

IGNORED, LONGEST, MASK, VOCABULARY = -100, 192, 256, 257


class BadInputError(ValueError):
    """The command line is invalid; the message has what was given and what is expected."""


class Split(NamedTuple):
    """One way to split the global batch."""

    per_device: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.per_device}x{self.accumulation}"


# ---- 1. The options ---------------------------------------------------------------------------------------


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--head", choices=("llama", "bert"), default="llama", help="a causal model, or a masked one")
    add("--modes", default=",".join(MODES), help="some of %(default)s")
    add("--splits", help="such as 16x2,1x32; default: 16, 4 and 1 samples per device")
    add("--total-batch", type=int, default=64, help="samples of one optimizer step, over all processes")
    add("--windows", type=int, default=10, help="full windows of an epoch, before the short one")
    add("--epochs", type=int, default=3)
    add("--lr", type=float, default=3e-3, help="of AdamW")
    add("--output", type=Path, default=Path("results") / "accelerate_loop")
    options = parser.parse_args(argv)
    options.world = int(os.environ.get("WORLD_SIZE", "1"))
    for name in ("total_batch", "windows", "epochs"):
        if getattr(options, name) < 1:
            raise BadInputError(f"got --{name.replace('_', '-')} {getattr(options, name)}; expected 1 or more")
    options.modes = options.modes.split(",")
    if unknown := set(options.modes) - set(MODES):
        raise BadInputError(f"got modes {sorted(unknown)}; expected some of --modes {','.join(MODES)}")
    share = options.total_batch // options.world
    if options.splits is None:
        splits = [Split(each, share // each) for each in (16, 4, 1) if share % each == 0]
    else:
        found = [re.fullmatch(r"(\d+)x(\d+)", part) for part in options.splits.split(",")]
        if None in found:
            raise BadInputError(f"got --splits '{options.splits}'; expected PxG, such as 16x2, with commas between")
        splits = [Split(int(each[1]), int(each[2])) for each in found]
    for split in splits:
        # The short window holds whole micro-batches of every rank, so that accelerate repeats no sample.
        if split.per_device * split.accumulation * options.world != options.total_batch or split.accumulation % 2:
            raise BadInputError(
                f"split {split} does not make --total-batch {options.total_batch} on {options.world} "
                "processes with an even number of micro-batches: give PxG with P x G x processes"
            )
    options.splits = splits
    return options


# ---- 2. The text and the models ---------------------------------------------------------------------------


def read_samples(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Paragraphs as bytes; for bert every sixth byte, counted on from the paragraph's number, is masked."""
    from pydoc_data.topics import topics

    import torch

    texts = (re.sub(r"\s+", " ", part).strip() for name in sorted(topics) for part in topics[name].split("\n\n"))
    texts = (text for text in texts if re.search(r"\w{2}", text))
    needed = options.total_batch * options.windows + options.total_batch // 2
    samples = []
    for number, text in enumerate(itertools.islice(texts, needed)):
        tokens = torch.tensor(list(text.encode()[:LONGEST]))
        labels = tokens
        if options.head == "bert":
            hidden = (torch.arange(len(tokens)) + number) % 6 == 0
            tokens, labels = tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, IGNORED)
        samples.append({"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)})
    if len(samples) < needed:
        raise BadInputError(f"got a text of {len(samples)} paragraphs; expected {needed}; give fewer --windows")
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    from torch.nn.utils.rnn import pad_sequence

    fill = {"labels": IGNORED}
    return {key: pad_sequence([each[key] for each in samples], True, fill.get(key, 0)) for key in samples[0]}


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    import torch
    import transformers as hf

    torch.manual_seed(0)
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST,
    }
    if options.head == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**size, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def gradient(model: torch.nn.Module) -> torch.Tensor:
    import torch

    return torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])


def full_batch(options: argparse.Namespace, model: torch.nn.Module, samples: list[Any]) -> tuple[float, torch.Tensor]:
    """The reference, without a loop: loss and gradient of a window's samples at these weights, in float64.

    loss = sum of -log p over all target bytes / number of target bytes
    """
    import torch
    from torch.nn.functional import cross_entropy

    copy = build_model(options).double()
    copy.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    batch = collate(samples)
    labels = batch.pop("labels")
    logits = copy(**batch).logits
    if options.head == "llama":  # position t predicts token t + 1
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    assert torch.isfinite(loss)
    return float(loss.detach()), gradient(copy)


# ---- 3. Three loops ---------------------------------------------------------------------------------------
# Each yields the loss that it logs whenever it has accumulated the gradient of a window, before the step.


def by_accumulate(epochs: int, loader: Any, model: Any, optimizer: Any, accelerator: Any) -> Iterator[float]:
    losses = []
    for batch in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                yield float(accelerator.reduce(sum(losses) / len(losses), "mean"))
                losses = []
            optimizer.step()
            optimizer.zero_grad()


def by_count(epochs: int, loader: Any, model: Any, optimizer: Any, accelerator: Any) -> Iterator[float]:
    steps, ranks = accelerator.gradient_accumulation_steps, accelerator.num_processes
    for window in itertools.chain.from_iterable(batched(loader, steps) for _ in range(epochs)):
        number = accelerator.reduce(sum((batch["labels"] != IGNORED).sum() for batch in window), "sum").item()
        losses = []
        for place, batch in enumerate(window):
            waiting = ranks > 1 and place < len(window) - 1
            with model.no_sync() if waiting else contextlib.nullcontext():
                # DDP averages over ranks and accelerate over micro-batches; the number divides by both already
                loss = model(**batch, num_items_in_batch=number).loss * steps * ranks
                accelerator.backward(loss)
                losses.append(loss.detach())
        yield float(accelerator.reduce(sum(losses), "mean")) / steps
        optimizer.step()
        optimizer.zero_grad()


def batched(loader: Any, steps: int) -> Iterator[list[Any]]:
    batches = iter(loader)
    while window := list(itertools.islice(batches, steps)):
        yield window


def by_windows(epochs: int, loader: Any, model: Any, optimizer: Any, accelerator: Any) -> Iterator[float]:
    from hf_accum_fix import accumulation_windows

    windows = accumulation_windows(loader, accelerator)
    for window in itertools.chain.from_iterable(itertools.repeat(windows, epochs)):
        for batch in window:
            with window.micro_batch(model):
                accelerator.backward(window.loss(model, batch))
        yield float(window.mean_loss())
        optimizer.step()
        optimizer.zero_grad()


MODES: dict[str, Callable[..., Iterator[float]]] = {
    "accumulate": by_accumulate,
    "count": by_count,
    "windows": by_windows,
}


def run_cell(mode: str, split: Split, options: argparse.Namespace, samples: list[Any]) -> dict[str, Any]:
    """Trains one cell from the initial weights and returns its line of results.jsonl."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # accelerate keeps these for the whole process; the process group below stays
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=split.accumulation)
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = torch.utils.data.DataLoader(samples, batch_size=split.per_device, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    started, losses, errors = time.perf_counter(), [], {}
    for step, loss in enumerate(MODES[mode](options.epochs, loader, model, optimizer, accelerator)):
        losses.append(loss)
        if step in (0, options.windows):
            own = samples[step * options.total_batch : (step + 1) * options.total_batch]
            wanted, right = full_batch(options, accelerator.unwrap_model(model), own)
            found = gradient(model).to(right.device)
            errors[str(step)] = {
                "gradient": float((found - right).norm() / right.norm()),
                "times": float(found @ right / (right @ right)),
                "loss": loss / wanted,
            }
    return {
        "head": options.head,
        "mode": mode,
        "processes": accelerator.num_processes,
        **split._asdict(),
        "seconds": round(time.perf_counter() - started, 1),
        "errors": errors,
        "losses": losses,
    }


# ---- 4. The results ---------------------------------------------------------------------------------------


def show_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(
        title=f"{options.head}, total batch {options.total_batch}, an epoch of {options.windows} windows and "
        f"a short one; accelerate {importlib.metadata.version('accelerate')}"
    )
    for heading in (
        "loop",
        "processes",
        "per device",
        "accumulation",
        "first window: gradient off by",
        "times",
        "short window: gradient off by",
        "times",
        f"loss at step {len(rows[0]['losses'])}",
    ):
        table.add_column(heading, justify="right")
    for mode in options.modes:
        table.add_section()
        for row in (each for each in rows if each["mode"] == mode):
            shown = [row["processes"], row["per_device"], row["accumulation"]]
            for error in row["errors"].values():
                shown += [f"{error['gradient']:.1e}", f"{error['times']:.4g}"]
            table.add_row(mode, *map(str, shown), f"{row['losses'][-1]:.4f}")
    console.print(table)
    for mode in options.modes:
        mine = [row["losses"] for row in rows if row["mode"] == mode]
        apart = max(max(step) / min(step) - 1 for step in zip(*mine, strict=True))
        console.print(f"{mode}: the losses of the splits are up to {apart:.1e} apart", highlight=False)


def draw_curves(rows: list[dict[str, Any]], options: argparse.Namespace, path: Path) -> None:
    """Draws the logged loss over optimizer steps: one panel per loop, one line per split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    modes = options.modes
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(3.2 * len(modes) + 0.6, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, mode in zip(panels[0], modes, strict=True):
        for place, row in enumerate(each for each in rows if each["mode"] == mode):
            label = f"{row['processes']} x {row['per_device']} x {row['accumulation']}"
            # each line thinner than the one before, so that lines that coincide all show
            panel.plot(range(1, len(row["losses"]) + 1), row["losses"], label=label, linewidth=3.6 / (place + 1))
        panel.set(title=mode, xlabel="optimizer step", yscale="log")
        panel.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    panels[0][0].set_ylabel("logged loss")
    lines, labels = panels[0][0].get_legend_handles_labels()
    title = "processes x samples per device x micro-batches of a step"
    figure.legend(lines, labels, title=title, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=150)


def environment(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    names = ("transformers", "accelerate", "torch", "hf-accum-fix")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "arguments": {name: str(value) for name, value in vars(options).items()},
    }


def main(argv: list[str] | None = None) -> int:
    first = os.environ.get("RANK", "0") == "0"
    try:
        options = read_options(argv)
        samples = read_samples(options)
        options.output.mkdir(parents=True, exist_ok=True)
    except (BadInputError, OSError) as error:
        if first:
            sys.stderr.write(f"accelerate_loop: {error}\n")
        return 2
    import transformers

    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    if first:
        (options.output / "environment.json").write_text(json.dumps(environment(options), indent=1))
        (options.output / "results.jsonl").write_text("")
    for mode, split in itertools.product(options.modes, options.splits):
        rows.append(run_cell(mode, split, options, samples))
        if first:
            with (options.output / "results.jsonl").open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if first:
        draw_curves(rows, options, options.output / "curves.png")
        show_table(rows, options)
    if options.world > 1:
        import torch

        torch.distributed.barrier()
        # Do not destroy the process group: gloo's threads may still hold tensors, so that it could abort or hang.
        sys.stdout.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
