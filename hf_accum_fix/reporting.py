"""The report: what is installed, what is wrong in it, what was done; as text and as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_accum_fix.upstream.defects import Defect
from hf_accum_fix.upstream.environment import Environment, SeamState
from hf_accum_fix.upstream.plan import Action, Decision, Plan


@dataclass(frozen=True)
class Report:
    """The state of the fix in this process.

    Attributes:
        version: of hf-accum-fix.
        state: "not applied", "pending", "applied", "refused" (in an import, until revert()) or "switched off".
        environment: what is installed.
        plan: what is decided about every defect.
        missing: methods that no longer lead to our wrapper although the state is "applied".
        runs: what was observed in the training runs of this process, oldest first.
    """

    version: str
    state: str
    environment: Environment
    plan: Plan
    missing: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values that JSON knows."""
        return {
            "hf_accum_fix": self.version,
            "state": self.state,
            "installed": _installed(self.environment),
            "trainer_imported": self.environment.trainer_imported,
            "refusal": None if self.plan.refusal is None else str(self.plan.refusal),
            "untested": self.plan.untested,
            "missing": list(self.missing),
            "seams": [{**asdict(state), "state": _state(state)} for state in self.environment.seams],
            "defects": [_row(decision) for decision in self.plan.decisions],
            "runs": list(self.runs),
        }

    def to_text(self) -> str:
        """Everything, as tables to read."""
        head = [f"hf-accum-fix {self.version}: {self.state}"]
        head.append(", ".join(f"{name} {version}" for name, version in _installed(self.environment).items()))
        if self.plan.refusal is not None:
            head.append(f"refused: {self.plan.refusal}")
        if self.plan.untested is not None:
            head.append(f"untested: {self.plan.untested}")
        if self.missing:
            head.append(f"dropped by another patch since: {', '.join(self.missing)}")
        seams = [(state.seam.name, _state(state)) for state in self.environment.seams]
        defects = [_cells(decision) for decision in self.plan.decisions]
        blocks = [
            head,
            _table(("method", "state"), seams or [("Trainer", "not imported yet")]),
            _table(("defect", "releases", "decision", "reason", "stock gradient", "reported"), defects),
        ]
        for number, run in enumerate(self.runs, start=1):
            blocks.append([f"run {number}", *(f"  {key}: {value}" for key, value in run.items())])
        return "\n\n".join("\n".join(block) for block in blocks)

    def __str__(self) -> str:
        """The text, so that print(report()) shows it."""
        return self.to_text()


def defect_table(defects: Sequence[Defect]) -> str:
    """The defects as a Markdown table; a row whose evidence was only read, or which is not mended, says so."""
    lines = ["| defect | releases | right gradient times | what happens | reported |", "|---|---|---|---|---|"]
    for defect in defects:
        links = ", ".join(f"[{link.rsplit('/', 1)[-1].split('#')[0]}]({link})" for link in defect.source)
        said = ["read, not run"] * (defect.evidence == "read") + ["not mended"] * bool(defect.not_mended)
        mark = f" *({'; '.join(said)})*" if said else ""
        cells = (f"`{defect.name}`", defect.range, defect.gradient or "-", defect.summary + mark, links)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _installed(environment: Environment) -> dict[str, str]:
    names = ("transformers", "accelerate", "torch", "python")
    return {name: getattr(environment, name) or "not installed" for name in names}


def _row(decision: Decision) -> dict[str, Any]:
    defect = decision.defect
    return {
        "name": defect.name,
        "summary": defect.summary,
        "releases": defect.range,
        "decision": decision.action.value,
        "reason": decision.reason,
        "gradient": defect.gradient,
        "who": defect.who,
        "wrong": defect.wrong,
        "right": defect.right,
        "evidence": defect.evidence,
        "seam": defect.seam,
        "source": list(defect.source),
    }


def _cells(decision: Decision) -> tuple[str, ...]:
    """One defect as a line of the table; the refusal, the same for all, stands above it."""
    defect, action = decision.defect, decision.action
    reason = "see above" if action is Action.REFUSE else decision.reason
    return defect.name, defect.range, action.value, reason, defect.gradient or "-", defect.source[0]


def _state(state: SeamState) -> str:
    """One seam in words."""
    if state.parameters is None:
        return "missing"
    if state.foreign is not None and not state.composable:
        words = f"wrapped around {state.foreign}" if state.ours else f"replaced by {state.foreign}"
    elif state.foreign is not None:
        words = f"wrapped, beneath {state.foreign}" if state.ours else f"original, beneath {state.foreign}"
    else:
        words = "wrapped" if state.ours else "original"
    if not state.fits:
        words += f", takes ({', '.join(state.parameters)})"
    return words if state.tested_body else f"{words}, body untested"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    lines = []
    for row in (head, rule, *rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return lines
