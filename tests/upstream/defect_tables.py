"""The tables of hf_accum_fix/upstream/DEFECTS.md: ``python -m tests.upstream.defect_tables`` prints them."""

from __future__ import annotations

from collections.abc import Sequence

from hf_accum_fix.upstream.defects import DEFECTS, Defect
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS, EngineDefect


def defect_table(defects: Sequence[Defect]) -> str:
    """The defects as a Markdown table; rows that were only read, or are not fixed, are marked."""
    lines = ["| defect | releases | right gradient times | what happens | reported |", "|---|---|---|---|---|"]
    for defect in defects:
        links = ", ".join(f"[{link.rsplit('/', 1)[-1].split('#')[0]}]({link})" for link in defect.source)
        marks = ["read, not run"] * (defect.evidence == "read") + ["not fixed"] * bool(defect.not_fixed)
        mark = f" *({'; '.join(marks)})*" if marks else ""
        cells = (f"`{defect.name}`", defect.range, defect.gradient or "-", defect.summary + mark, links)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def engine_table(defects: Sequence[EngineDefect]) -> str:
    """The defects of engines as a Markdown table."""
    lines = ["| defect | releases | whose runs | what happens | here | reported |", "|---|---|---|---|---|---|"]
    for row in defects:
        links = ", ".join(f"[{link.rsplit('/', 1)[-1]}]({link})" for link in row.source)
        cells = (f"`{row.name}`", row.range, row.who, f"{row.summary} {row.wrong}.", row.fixed, links)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(defect_table(DEFECTS), engine_table(ENGINE_DEFECTS), sep="\n\n")
