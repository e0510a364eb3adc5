"""What a window's gradient loses in 16 bits, by the number of micro-batches, and what keeps it.

    python recipes/gradient_precision.py --output results/gradient_precision

The same 1,024 ragged samples are split into G = 1 to 1,024 micro-batches, by accumulation_windows; the gradient
that the optimizer would see is compared with the float64 gradient at the same rounded weights. Writes rows.json,
table.md and error.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from matplotlib import ticker
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_accum_fix import accumulation_windows

MODES = ("parameter", "float32", "compensated")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VOCABULARY = 64
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY, num_key_value_heads=2, pad_token_id=0))


def bert() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForTokenClassification(hf.BertConfig(**TINY, **dropout, num_labels=VOCABULARY))


HEADS = {"Llama": llama, "BERT": bert}


def samples(count: int) -> list[list[int]]:
    """Ragged: 2 to 6 tokens."""
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (2 + index % 5,), generator=drawn).tolist() for index in range(count)]


def batch(rows: Sequence[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Calls(TorchDispatchMode):
    """Counts the operators that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def held(model: nn.Module, windows: Any) -> int:
    """Bytes of gradients and of their sums, each storage once."""
    tensors = [each.grad for each in model.parameters()]
    for summed in windows._host.delivery.gradient._sums.values():
        tensors += [each for each in vars(summed).values() if isinstance(each, Tensor)]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each is not None
    }
    return sum(storages.values())


def run(model: nn.Module, rows: Sequence[list[int]], steps: int, mode: str, epochs: int = 1) -> dict[str, float]:
    """Epochs of one window: milliseconds and operators of a micro-batch of the last, and the most bytes held."""
    size = len(rows) // steps
    loader = [batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    windows = accumulation_windows(loader, steps=steps, accumulate_in=mode)
    most = 0
    for _ in range(epochs):
        model.zero_grad()
        seconds, counted = [], Calls()
        for window in windows:
            for place, each in enumerate(window):
                began = time.process_time()
                with counted if place == 2 else nullcontext(), window.micro_batch(model):
                    loss = window.loss(model, each)
                    seconds.append(time.process_time() - began)
                    most = max(most, held(model, windows))
                    began = time.process_time()
                    loss.backward()
                seconds[-1] += time.process_time() - began
    return {"ms": 1e3 * sorted(seconds)[len(seconds) // 2], "operators": counted.count, "bytes": most}


def error(head: str, dtype: str, rows: Sequence[list[int]], steps: int, mode: str) -> dict[str, Any]:
    """Error of the window's gradient against float64 at the same rounded weights."""
    model = HEADS[head]().to(DTYPES[dtype]).train()
    exact = copy.deepcopy(model).double()
    exact(**batch(rows))["loss"].backward()
    run(model, rows, steps, mode)
    far = norm = 0.0
    for found, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        if wanted.grad is not None:
            far += float((found.grad.double() - wanted.grad).square().sum())
            norm += float(wanted.grad.square().sum())
    named = {"head": head, "dtype": dtype, "micro_batches": steps, "accumulate_in": mode}
    return {**named, "error": (far / norm) ** 0.5}


def costs(rows: Sequence[list[int]]) -> str:
    """Of a micro-batch, in the second of two windows, since the first is estimated in as well."""
    lines = ["| head | accumulate_in | ms | operators more, a parameter | bytes of gradients, a parameter |"]
    lines.append("|---|---|---|---|---|")
    for head in HEADS:
        model = HEADS[head]().bfloat16().train()
        trained = list(model.parameters())
        found = {mode: run(model, rows, len(rows), mode, epochs=2) for mode in MODES}
        for mode, cost in found.items():
            more = (cost["operators"] - found[MODES[0]]["operators"]) / len(trained)
            each = cost["bytes"] / sum(parameter.numel() for parameter in trained)
            lines.append(f"| {head} | {mode} | {cost['ms']:.2f} | {more:.1f} | {each:.1f} |")
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]], splits: Sequence[int]) -> str:
    lines = [f"| head | parameters | accumulate_in | {' | '.join(f'G = {steps}' for steps in splits)} |"]
    lines.append("|---|---|---|" + "---|" * len(splits))
    for key in dict.fromkeys((row["head"], row["dtype"], row["accumulate_in"]) for row in rows):
        found = {row["micro_batches"]: row["error"] for row in rows if key == _key(row)}
        lines.append(f"| {' | '.join(key)} | {' | '.join(f'{found[steps]:.2%}' for steps in splits)} |")
    return "\n".join(lines) + "\n"


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["head"], row["dtype"], row["accumulate_in"]


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    panels = figure.subplots(1, len(DTYPES), sharex=True)
    for panel, dtype in zip(panels, DTYPES, strict=True):
        for head, line in zip(HEADS, ("-", "--"), strict=True):
            for mode, colour in zip(MODES, ("tab:red", "tab:blue", "tab:green"), strict=True):
                some = [row for row in rows if _key(row) == (head, dtype, mode)]
                x, y = [row["micro_batches"] for row in some], [100 * row["error"] for row in some]
                panel.plot(x, y, line, color=colour, marker="o", markersize=3, label=f"{head}, {mode}")
        shown = [100 * row["error"] for row in rows if _key(row)[1] == dtype]
        panel.set(xscale="log", title=f"{dtype} parameters", xlabel="micro-batches of one global batch, G")
        panel.set_xticks(sorted({row["micro_batches"] for row in rows}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        if max(shown) > 3 * min(shown):
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_locator(ticker.NullLocator())
        else:
            panel.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=(1, 2, 5, 10)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    panels[0].set_ylabel("error of the gradient against float64 [%]")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, title="head, accumulate_in", loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024, help="of the global batch")
    parser.add_argument("--splits", default="1,4,16,64,256,1024", help="micro-batches, comma-separated")
    parser.add_argument("--output", type=Path, default=Path("results/gradient_precision"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    splits = [int(steps) for steps in given.splits.split(",")]
    rows, drawn = [], samples(given.samples)
    for head in HEADS:
        for dtype in DTYPES:
            for mode in MODES:
                for steps in splits:
                    rows.append(error(head, dtype, drawn, steps, mode))
                    print(json.dumps(rows[-1]), flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "rows.json").write_text(json.dumps(rows, indent=1))
    (given.output / "table.md").write_text(table(rows, splits) + "\n" + costs(drawn[:64]))
    picture(rows, given.output / "error.png")


if __name__ == "__main__":
    main()
