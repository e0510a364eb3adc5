"""``hf-accum-fix explain NAME``: one row of the defect table, in full."""

from __future__ import annotations

import argparse
from typing import Final, TypeAlias

from hf_accum_fix.cli import LEGEND, write
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.reporting import wrapped
from hf_accum_fix.upstream.defects import DEFECTS, LIMIT, Defect, Limit
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS, EngineDefect

DESCRIPTION: Final = "Explain one defect of transformers or DeepSpeed; without a name, list all."
EPILOG: Final = "exit code: 0, or 2 for an unknown name."

Row: TypeAlias = Defect | EngineDefect | Limit

_EVIDENCE: Final = {
    "run": "measured on the released wheel",
    "newest": "measured on the newest release; older ones were read",
    "read": "read in the source, not run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``explain``."""
    parser.add_argument("defect", nargs="?", metavar="NAME", help="a defect, such as gradient-divided-twice")


def execute(arguments: argparse.Namespace) -> int:
    """Print the row, or the list.

    Raises:
        OptionsError: if there is no such row; it names the nearest.
    """
    known: tuple[Row, ...] = (*DEFECTS, *ENGINE_DEFECTS, LIMIT)
    rows = {row.name: row for row in known}
    if arguments.defect is None:
        lines = [line for name, row in rows.items() for line in (name, *wrapped(row.summary, indent=4, hang=0))]
        write("\n".join(lines) + "\n")
        return 0
    asked: str = arguments.defect
    if asked not in rows:
        from difflib import get_close_matches

        near = "".join(f", such as {name!r}" for name in get_close_matches(asked, rows, n=1))
        raise OptionsError(f"got {asked!r}; expected a known defect{near}; list all with: hf-accum-fix explain")
    write(explanation(rows[asked]) + "\n")
    return 0


def explanation(row: Row) -> str:
    """A row as text, without its empty fields."""
    if isinstance(row, Limit):
        facts = {"releases": f"all: a property of {row.owner}", "whose runs": row.who, "remedy": row.remedy}
    elif isinstance(row, EngineDefect):
        facts = {"releases": row.range, "whose runs": row.who, "wrong": row.wrong, "fixed": row.fixed}
        facts["without it"] = row.remedy
    else:
        facts = {
            "releases": row.range,
            "gradient": f"{row.gradient} times the right one" if row.gradient else "no single factor",
            "whose runs": row.who,
            "wrong": row.wrong,
            "right": row.right,
            "fixed at": "" if row.not_fixed else f"Trainer.{row.seam}",
            "not fixed": row.not_fixed,
            "evidence": _EVIDENCE[row.evidence],
            "obsolete": f"when {row.goes_when}",
        }
    lines = [line for name, fact in facts.items() if fact for line in wrapped(f"{name:10}  {fact}", hang=12)]
    lines += [f"{'' if place else 'reported':10}  {link}" for place, link in enumerate(row.source)]
    legend = ["", LEGEND] if isinstance(row, Defect) else []
    return "\n".join([row.name, *wrapped(row.summary, hang=0), "", *lines, *legend])
