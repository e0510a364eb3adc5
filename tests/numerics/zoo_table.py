"""The zoo side by side, stock and ours: one step of every class of the library, at every cut.

python -m tests.numerics.zoo_table OUTPUT.jsonl

writes one line a class to OUTPUT.jsonl, and the table to ZOO.md beside this file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.numerics.heads import HEADS, LEFT_OUT, Head
from tests.numerics.parity import contract_of, cut, pass_over_imports, reference_step, take_step

SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
TABLE = Path(__file__).with_name("ZOO.md")


def rows() -> Iterator[dict[str, Any]]:
    """One row a head that is a class of the library."""
    for head in HEADS.values():
        if head.model and head.exact:
            yield side_by_side(head)


def side_by_side(head: Head) -> dict[str, Any]:
    """The worst error of stock and of ours over the cuts, and what was observed."""
    pass_over_imports()
    stock: list[float] = []
    ours: list[float] = []
    raised, times, contract = "", None, None
    for per_device, accumulate in SPLITS:
        reference = reference_step(head, cut(head.samples, per_device))
        with tempfile.TemporaryDirectory() as output:
            try:
                step = take_step(head, head.samples, per_device, accumulate, "stock", Path(output))
                stock.append(step.error(reference))
                times = step.times(reference)
            except (RuntimeError, TypeError) as error:
                raised = type(error).__name__
            step = take_step(head, head.samples, per_device, accumulate, "apply", Path(output))
        ours.append(step.error(reference))
        contract = contract_of(step)
    return {
        "head": head.name,
        "class": head.model,
        "origin": None if head.origin is None else head.origin.value,
        "contract": str(contract),
        "exact": contract is not None and contract.exact,
        "stock_worst_error": max(stock, default=None),
        "stock_raised": raised,
        "stock_times_at_1x8": times,
        "ours_worst_error": max(ours),
    }


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """The table and what was left out, as Markdown."""
    lines = [
        "# The zoo, side by side",
        "",
        "Written by `python -m tests.numerics.zoo_table`; not to be edited. One SGD step (lr 1, no clipping) of eight",
        "ragged samples, cut 8 x 1, 4 x 2, 2 x 4 and 1 x 8 on one rank, beside the full-batch step by one forward and",
        "no Trainer, in float64. *Error*: relative, of the parameter change, the worst of the four cuts; about 1e-7 is",
        "the float32 in which the library computes many a loss. *Times*: how many times the right step stock's is, cut",
        "1 x 8. Router losses are means over micro-batches, by convention.",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}; {len(table)} heads of "
        f"{len({row['class'] for row in table})} classes.",
        "",
        "| class | head | taken from | the loss, as observed | stock: error | times | ours: error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(table, key=lambda row: (str(row["class"]), str(row["head"]))):
        head = "" if row["head"] == row["class"] else row["head"]
        stock = f"raises {row['stock_raised']}" if row["stock_raised"] else f"{row['stock_worst_error']:.1e}"
        times = "" if row["stock_times_at_1x8"] is None else f"{row['stock_times_at_1x8']:.2f}"
        ours = f"{row['ours_worst_error']:.1e}"
        cells = (row["class"], head, row["origin"] or "", row["contract"], stock, times, ours)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Left out", "", "| class | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(LEFT_OUT.items())]
    return "\n".join(lines) + "\n"


def main(output: Path) -> None:
    """Run every row, and write both files."""
    table = []
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as lines:
        for row in rows():
            table.append(row)
            print(json.dumps(row), file=lines, flush=True)
    TABLE.write_text(markdown(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
