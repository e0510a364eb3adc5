"""The conventions side by side: what each makes of the auxiliary gradient, by family, cut and ranks.

python -m tests.router.table

writes ERRORS.md beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.router.conventions import FAMILIES, SAMPLES, SIZES
from tests.router.rows import errors

TABLE = Path(__file__).with_name("ERRORS.md")

#: Columns, and who trains so.
CONVENTIONS = {
    "stock": "the installed Trainer",
    "mean": "mean over micro-batches: TRL, and `mean`",
    "token share": "by share of targets: unsloth, ms-swift",
    "exact": "`exact`",
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [
        "# The load-balancing loss, convention by convention",
        "",
        f"Written by `python -m tests.router.table`; not to be edited. One step over {SAMPLES} ragged samples of",
        "four domains, micro-batches of b, on W ranks. *Relative error of the auxiliary part of the gradient* to a",
        "float64 twin of the formula over the full batch, with what the library computes in float32 computed in",
        "float64; in brackets the value logged over the full batch's.",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}.",
        "",
        "| family | W | b | " + " | ".join(CONVENTIONS.values()) + " |",
        "|---|---|---|" + "---|" * len(CONVENTIONS),
    ]
    for row in rows:
        cells = [row["family"], str(row["ranks"]), str(row["per_device"])]
        cells += [_cell(row["error"][name], row["value"].get(name)) for name in CONVENTIONS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(error: float, value: float | None) -> str:
    shown = f"**{error:.0e}**" if error < 1e-6 else f"{error:.2f}"
    return shown if value is None else f"{shown} ({value:.4g})"


def main() -> None:
    """Every family and cut, on one rank and two."""
    cases = [f"{family} {size}" for family in FAMILIES for size in SIZES]
    rows = [row for ranks in (1, 2) for row in errors(ranks, cases)]
    order = [*FAMILIES]
    rows.sort(key=lambda row: (order.index(row["family"]), row["ranks"], row["per_device"]))
    TABLE.write_text(markdown(rows))


if __name__ == "__main__":
    main()
