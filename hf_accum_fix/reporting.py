"""The report as text and as data: runs observed, defects of the installed release, what the patch does. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hf_accum_fix.upstream.environment import Environment, SeamState, parsed
from hf_accum_fix.upstream.plan import Action, Decision, Plan

WIDTH: Final = 80
"""Width of a report in columns; links may be longer."""

_LETTERS: Final = (
    "(G: gradient_accumulation_steps, W: data-parallel ranks, N: items of a step, the targets that count in its loss)"
)

_STATES: Final = {
    "applied": "fixed in this process",
    "pending": "fixed once transformers.trainer is imported",
    "switched off": "not fixed: HF_ACCUM_FIX switches it off",
    "not applied": "not fixed; call hf_accum_fix.apply()",
}
_ABSENT: Final = (Action.NOT_AFFECTED, Action.UNKNOWN)
_DOES: Final = {Action.FIX: "fixes it", Action.NOT_FIXED: "does not", Action.REFUSE: "refused"}


@dataclass(frozen=True)
class Report:
    """The state of the fix in this process.

    Attributes:
        version: of hf-accum-fix.
        state: "not applied", "pending", "applied", "refused" (in an import, until revert()) or "switched off".
        environment: what is installed.
        plan: the decision about every defect.
        missing: methods that no longer lead to our wrapper although the state is "applied".
        runs: the observations of this process's training runs, oldest first.
    """

    version: str
    state: str
    environment: Environment
    plan: Plan
    missing: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]

    @property
    def present(self) -> tuple[Decision, ...]:
        """The decision about each defect that the installed release has; empty if none is installed."""
        if parsed(self.environment.transformers) is None:
            return ()
        return tuple(decision for decision in self.plan.decisions if decision.action not in _ABSENT)

    @property
    def answer(self) -> str:
        """The verdict on the runs so far; before the first, whether the installed release is affected."""
        if self.runs:
            exact = sum(bool(run.get("exact")) for run in self.runs)
            verdict = {len(self.runs): "exact", 0: "not exact"}.get(
                exact, f"{exact} exact, {len(self.runs) - exact} not"
            )
            runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
            return f"{runs} trained with hf_accum_fix {self.version}: {verdict}"
        about = f"transformers {self.environment.transformers or '(not installed)'}"
        if self.plan.refusal is not None:
            return f"{about}: the patch is refused"
        if not self.present and self.plan.untested is None:
            return f"{about}: no known defect"
        return f"{about}: affected, {'no longer fixed' if self.missing else _STATES[self.state]}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as data for JSON."""
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
        """The answer, the runs, the installed versions and the defects of the release, in 80 columns."""
        defects = []
        if self.present:
            rows = [(each.defect.name, each.defect.gradient or "-", _DOES[each.action]) for each in self.present]
            defects = table(("defect of this release", "right gradient times", "the patch"), rows)
        more = "all known defects, with links: print(report().details())"
        return _joined(self._opening(), self._installation(), defects, [more])

    def details(self) -> str:
        """Everything: the text, the Trainer's methods, all known defects with their links, the runs in full."""
        seams = [(state.seam.name, _state(state)) for state in self.environment.seams]
        blocks = [
            self._opening(),
            self._installation(),
            table(("method", "state"), seams or [("Trainer", "not imported yet")]),
        ]
        for decision in self.plan.decisions:
            defect, action = decision.defect, decision.action
            # All defects share the one refusal, which the opening prints.
            reason = "see above" if action is Action.REFUSE else decision.reason
            facts = [f"{action.value}: {reason}", f"releases: {defect.range}"]
            facts += [f"gradient: {defect.gradient} times the right one"] * bool(defect.gradient)
            blocks.append([f"{defect.name}", *wrapped(*facts, indent=4), *(f"    {link}" for link in defect.source)])
        for number, run in enumerate(self.runs, start=1):
            blocks.append([f"run {number}", *wrapped(*(f"{key}: {value}" for key, value in run.items()), indent=2)])
        return _joined(*blocks)

    def __str__(self) -> str:
        """The text, so that print(report()) shows it."""
        return self.to_text()

    def _opening(self) -> list[str]:
        """The answer, the runs, and the meaning of the letters."""
        runs = [line for place, run in enumerate(self.runs, start=1) for line in _run(place, run)]
        none = "no training run so far; runs without the patch are not recorded"
        return [*wrapped(self.answer), *(runs or wrapped(none, indent=2)), *wrapped(_LETTERS)]

    def _installation(self) -> list[str]:
        """The installed versions, the state of the patch, and what keeps it off."""
        lines = [versions(self.environment), f"hf-accum-fix {self.version}: {self.state} now"]
        if self.plan.refusal is not None:
            lines.append(f"refused: {self.plan.refusal}")
        if self.plan.untested is not None:
            lines.append(f"untested: {self.plan.untested}")
        if self.missing:
            lines.append(f"dropped by a later patch: {', '.join(self.missing)}")
        return wrapped(*lines)


def versions(environment: Environment) -> str:
    """The installed versions, in a line."""
    return ", ".join(f"{name} {version}" for name, version in _installed(environment).items())


def wrapped(*paragraphs: str, indent: int = 0, hang: int = 2) -> list[str]:
    """Lines of at most `WIDTH` columns, unless a word is longer; ``hang``: further indent of later lines."""
    return [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


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


def _run(place: int, run: Mapping[str, Any]) -> list[str]:
    """One run: its model, G and W, and whether it was exact or why not."""
    shape = "".join(
        f", {letter} = {run[key]}"
        for letter, key in (("G", "accumulation_steps"), ("W", "world_size"))
        if run.get(key) is not None
    )
    verdict = "exact" if run.get("exact") else f"not exact ({run.get('reason', 'unknown')})"
    lines = wrapped(f"{place}. {run.get('head', 'a model')}{shape}: {verdict}", indent=2)
    if run.get("loss"):
        lines += wrapped(f"its loss {run['loss']}", indent=5)
    if run.get("reached_optimizer"):
        lines += wrapped(f"reached the optimizer: {run['reached_optimizer']}", indent=5)
    if run.get("repeated_samples"):
        done = "left out" if run.get("repeated_samples_dropped") else "counted twice"
        lines += wrapped(f"repeated samples: {run['repeated_samples']}, {done}", indent=5)
    return lines


def _joined(*blocks: Sequence[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, rule, *rows)
    ]
