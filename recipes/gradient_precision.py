"""What a window's gradient loses in 16 bits, by the number of micro-batches, and what keeps it.

    python recipes/gradient_precision.py --output results/gradient_precision

The same 1,024 ragged samples are split into G = 1 to 1,024 micro-batches, by accumulation_windows; the gradient
that the optimizer would see is compared with the float64 gradient at the same rounded weights. Writes rows.json,
table.md and error.png.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared
import torch
import transformers as hf
from torch import Tensor, nn

from hf_accum_fix import accumulation_windows

MODES = ("parameter", "float32")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VOCABULARY = 64
TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2}


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


def run(model: nn.Module, rows: Sequence[list[int]], steps: int, mode: str, epochs: int = 1) -> float:
    """Epochs of one window; milliseconds of processor time of a micro-batch of the last."""
    size = len(rows) // steps
    loader = [batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    windows = accumulation_windows(loader, steps=steps, accumulate_in=mode)
    for _ in range(epochs):
        model.zero_grad()
        seconds = []
        for window in windows:
            for each in window:
                began = time.process_time()
                with window.micro_batch(model):
                    window.loss(model, each).backward()
                seconds.append(time.process_time() - began)
    return 1e3 * sorted(seconds)[len(seconds) // 2]


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
    """Of a micro-batch, in the second of two windows, since the first is looked at as well."""
    lines = [
        (head, mode, f"{run(HEADS[head]().bfloat16().train(), rows, len(rows), mode, epochs=2):.2f}")
        for head in HEADS
        for mode in MODES
    ]
    return shared.markdown(("head", "accumulate_in", "ms"), lines)


def table(rows: Sequence[dict[str, Any]], splits: Sequence[int]) -> str:
    lines = []
    for key in dict.fromkeys(map(_key, rows)):
        found = {row["micro_batches"]: row["error"] for row in rows if key == _key(row)}
        lines.append((*key, *(f"{found[steps]:.2%}" for steps in splits)))
    return shared.markdown(("head", "parameters", "accumulate_in", *(f"G = {steps}" for steps in splits)), lines)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["head"], row["dtype"], row["accumulate_in"]


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, (panels,) = shared.figure_of(1, len(DTYPES), (8, 4.4), sharex=True)
    for panel, dtype in zip(panels, DTYPES, strict=True):
        for head, line in zip(HEADS, ("-", "--"), strict=True):
            for mode, colour in zip(MODES, ("tab:red", "tab:blue"), strict=True):
                some = [row for row in rows if _key(row) == (head, dtype, mode)]
                x, y = [row["micro_batches"] for row in some], [100 * row["error"] for row in some]
                panel.plot(x, y, line, color=colour, marker="o", markersize=3, label=f"{head}, {mode}")
        shown = [100 * row["error"] for row in rows if _key(row)[1] == dtype]
        scale = "log" if max(shown) > 3 * min(shown) else "linear"
        title = f"{dtype} parameters"
        shared.tidy(panel, xscale="log", yscale=scale, title=title, xlabel="micro-batches of one global batch, G")
        panel.set_xticks(sorted({row["micro_batches"] for row in rows}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
    panels[0].set_ylabel("error of the gradient against float64 [%]")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, title="head, accumulate_in", loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = shared.Parser(__doc__, "gradient_precision")
    parser.add_argument("--samples", type=shared.positive, default=1024, help="of the global batch")
    parser.add_argument("--splits", default="1,4,16,64,256,1024", help="micro-batches, comma-separated")
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
