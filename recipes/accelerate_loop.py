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

The table compares the gradients of the first window and of the short one with the float64 gradient of their samples
in one forward.

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
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import shared
from shared import IGNORED, Split

if TYPE_CHECKING:
    import torch

LONGEST, MASK, VOCABULARY = 192, 256, 257


# ---- 1. The options ---------------------------------------------------------------------------------------


def read_options() -> argparse.Namespace:
    parser = shared.Parser(__doc__, "accelerate_loop")
    add = parser.add_argument
    add("--head", choices=("llama", "bert"), default="llama", help="a causal model, or a masked one")
    add("--modes", type=shared.some_of(MODES), default=list(MODES), help=f"some of {','.join(MODES)}")
    add("--splits", type=shared.splits_of, help="such as 16x2,1x32; default: 16, 4 and 1 samples per device")
    add("--total-batch", type=shared.positive, default=64, help="samples of one optimizer step, over all processes")
    add("--windows", type=shared.positive, default=10, help="full windows of an epoch, before the short one")
    add("--epochs", type=shared.positive, default=3)
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share = options.total_batch // world
    options.splits = options.splits or [Split(each, share // each) for each in (16, 4, 1) if share % each == 0]
    for split in options.splits:
        # The short window holds whole micro-batches of every rank, so that accelerate repeats no sample.
        if split.per_device * split.accumulation * world != options.total_batch or split.accumulation % 2:
            parser.error(
                f"got split {split} on {world} processes; expected PxG with an even G and "
                f"P x G x processes = --total-batch {options.total_batch}"
            )
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
        raise SystemExit(f"got a text of {len(samples)} paragraphs; expected {needed}; give fewer --windows")
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    from torch.nn.utils.rnn import pad_sequence

    fill = {"labels": IGNORED}
    return {key: pad_sequence([each[key] for each in samples], True, fill.get(key, 0)) for key in samples[0]}


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    import torch
    import transformers as hf

    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 4, "max_position_embeddings": LONGEST}
    if options.head == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**size, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def gradient(model: torch.nn.Module) -> torch.Tensor:
    import torch

    return torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])


def full_batch(options: argparse.Namespace, model: torch.nn.Module, samples: list[Any]) -> tuple[float, torch.Tensor]:
    """The reference: mean loss over the target bytes of a window, and its gradient, in float64, without a loop."""
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
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, steps)):
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


Loop = Callable[..., Iterator[float]]
MODES: dict[str, Loop] = {"accumulate": by_accumulate, "count": by_count, "windows": by_windows}


def run_cell(mode: str, split: Split, options: argparse.Namespace, samples: list[Any]) -> dict[str, Any]:
    """Trains one cell from the initial weights and returns its line of results.jsonl."""
    import torch
    from accelerate import Accelerator

    shared.forget_accelerator()
    accelerator = Accelerator(cpu=shared.on_cpu(), gradient_accumulation_steps=split.accumulation)
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
    row = {"head": options.head, "mode": mode, "processes": accelerator.num_processes, **split._asdict()}
    return {**row, "seconds": round(time.perf_counter() - started, 1), "errors": errors, "losses": losses}


# ---- 4. The results ---------------------------------------------------------------------------------------


def show_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{options.head}, total batch {options.total_batch}, an epoch of {options.windows} windows and a short one; "
          f"accelerate {importlib.metadata.version('accelerate')}\n")  # fmt: skip
    head = ["loop", "processes", "split", "first window: gradient off by", "times", "short window: off by", "times"]
    lines = []
    for row in rows:
        errors = [f"{error[name]:{form}}" for error in row["errors"].values()
                  for name, form in (("gradient", ".1e"), ("times", ".4g"))]  # fmt: skip
        split = Split(row["per_device"], row["accumulation"])
        lines.append([row["mode"], row["processes"], split, *errors, f"{row['losses'][-1]:.4f}"])
    print(shared.markdown([*head, f"loss at step {len(rows[0]['losses'])}"], lines))
    for mode in options.modes:
        mine = [row["losses"] for row in rows if row["mode"] == mode]
        apart = max(max(step) / min(step) - 1 for step in zip(*mine, strict=True))
        print(f"{mode}: the losses of the splits are up to {apart:.1e} apart")


def draw_curves(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Draws the logged loss over optimizer steps: one panel per loop, one line per split."""
    figure, panels = shared.figure_of(1, len(options.modes), (3.2 * len(options.modes) + 0.6, 4), sharey=True)
    for panel, mode in zip(panels[0], options.modes, strict=True):
        for place, row in enumerate(each for each in rows if each["mode"] == mode):
            label = f"{row['processes']} x {row['per_device']} x {row['accumulation']}"
            # each line thinner than the one before, so that lines that coincide all show
            panel.plot(range(1, len(row["losses"]) + 1), row["losses"], label=label, linewidth=3.6 / (place + 1))
        shared.tidy(panel, steps=True, title=mode, xlabel="optimizer step", yscale="log")
    panels[0][0].set_ylabel("logged loss")
    lines, labels = panels[0][0].get_legend_handles_labels()
    title = "processes x samples per device x micro-batches of a step"
    figure.legend(lines, labels, title=title, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(options.output / "curves.png", dpi=150)


def main() -> None:
    options = read_options()
    samples = read_samples(options)
    options.output.mkdir(parents=True, exist_ok=True)
    import transformers

    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    if shared.first_rank():
        (options.output / "environment.json").write_text(json.dumps(shared.environment(options), indent=1))
        (options.output / "results.jsonl").write_text("")
    for mode, split in itertools.product(options.modes, options.splits):
        rows.append(run_cell(mode, split, options, samples))
        if shared.first_rank():
            shared.add_line(options.output / "results.jsonl", rows[-1])
    if shared.first_rank():
        draw_curves(rows, options)
        show_table(rows, options)
    shared.end_ranks()


if __name__ == "__main__":
    main()
