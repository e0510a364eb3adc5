"""``hf-accum-fix explain NAME``: one row of the defect table, in full."""

from __future__ import annotations

import argparse
from typing import Final

from hf_accum_fix.cli import LEGEND, write
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.upstream.defects import DEFECTS, Defect
from hf_accum_fix.upstream.limits import LIMITS, Limit

DESCRIPTION: Final = "Explain one defect of transformers; without a name, list all defects."
EPILOG: Final = "exit code: 0, or 2 for an unknown name."

_EVIDENCE: Final = {"run": "measured on the released wheel", "read": "read in the source, not run"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``explain``."""
    parser.add_argument("defect", nargs="?", metavar="NAME", help="a defect, such as gradient-divided-twice")


def execute(arguments: argparse.Namespace) -> int:
    """Print the row, or the list.

    Raises:
        OptionsError: if there is no such row; it names the nearest.
    """
    rows: dict[str, Defect | Limit] = {row.name: row for row in (*DEFECTS, *LIMITS)}
    if arguments.defect is None:
        width = max(map(len, rows))
        lines = [f"{name:{width}}  {row.summary}" for name, row in rows.items()]
        write("\n".join(lines) + "\n")
        return 0
    if arguments.defect not in rows:
        raise _unknown(arguments.defect, list(rows))
    row = rows[arguments.defect]
    write((explanation(row) if isinstance(row, Defect) else explanation_of_limit(row)) + "\n")
    return 0


def explanation(defect: Defect) -> str:
    """A row as text, without its empty fields."""
    facts = {
        "releases": defect.range,
        "gradient": f"{defect.gradient} times the right one" if defect.gradient else "no single factor",
        "whose runs": defect.who,
        "wrong": defect.wrong,
        "right": defect.right,
        "fixed at": "" if defect.not_fixed else f"Trainer.{defect.seam}",
        "not fixed": defect.not_fixed,
        "evidence": _EVIDENCE[defect.evidence],
        "obsolete": f"when {defect.goes_when}",
        "reported": f"\n{' ' * 12}".join(defect.source),
    }
    lines = [f"{name:10}  {fact}" for name, fact in facts.items() if fact]
    return "\n".join([defect.name, defect.summary, "", *lines, "", LEGEND])


def explanation_of_limit(limit: Limit) -> str:
    """A limit as text."""
    return "\n".join(
        [
            limit.name,
            limit.summary,
            "",
            f"releases    all: a property of {limit.owner}",
            f"whose runs  {limit.who}",
            f"remedy      {limit.remedy}",
            f"reported    {f'{chr(10)}            '.join(limit.source)}",
        ]
    )


def _unknown(name: str, names: list[str]) -> OptionsError:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1)
    nearest = f", such as {near[0]!r}" if near else ""
    return OptionsError(f"got {name!r}; expected a known defect{nearest}; list all with: hf-accum-fix explain")
