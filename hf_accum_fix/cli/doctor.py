"""``hf-accum-fix doctor``: what is installed, what is wrong in it, for whom, and what apply() would do about it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any, Final

from packaging.version import Version

import hf_accum_fix
from hf_accum_fix.cli import LEGEND
from hf_accum_fix.cli.inherit import VARIABLE
from hf_accum_fix.errors import ContractError
from hf_accum_fix.reporting import Report
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.environment import parsed
from hf_accum_fix.upstream.plan import Action, Decision
from hf_accum_fix.upstream.seams import TESTED_RELEASES, TRAINER_MODULE, seams_of

NEWEST: Final = max(map(Version, TESTED_RELEASES))
OLDEST: Final = min(Version(defect.since) for defect in DEFECTS)
"""The releases that were looked at; of the others nothing is known."""

DESCRIPTION: Final = """\
Say what is installed, which defects it has, what each does to whom, and what apply() would do.

The release's number settles that, so nothing heavy is imported, unless our tests have not run that very release: then
transformers.trainer is imported, to look at its methods. It is imported under hf-accum-fix run as well, to see whether
the patch is on, and for --model.
"""

EPILOG: Final = f"""\
exit code:
  0  clean: no defect in the installed release, or all of them mended in this process, as they are under
     hf-accum-fix run hf-accum-fix doctor, but for those that the report marks as not mended
  1  defects present, which nothing mends in this process
  2  wrong usage
  3  could not tell: transformers is not installed, is a pre-release, or is outside {OLDEST} to {NEWEST}, the releases
     looked at; its Trainer cannot be imported; the patch is on, but our tests have not run the release; or the head of
     --model cannot be built, fed or trained
"""


class Verdict(IntEnum):
    """The answer, as an exit code."""

    CLEAN = 0
    DEFECTS = 1
    COULD_NOT_TELL = 3


@dataclass(frozen=True)
class Diagnosis:
    """Everything that is reported.

    Attributes:
        report: of this process.
        verdict: the answer.
        reason: of the verdict, in a sentence.
        head: what --model showed: "asked", and "built" with "observed", or "error"; empty without it.
    """

    report: Report
    verdict: Verdict
    reason: str
    head: Mapping[str, Any]

    @property
    def present(self) -> tuple[Decision, ...]:
        """What is decided about each defect of the installed release."""
        return _present(self.report)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``doctor`` takes."""
    parser.add_argument(
        "--model",
        metavar="CLASS|FOLDER",
        help="also observe what a head does with its loss, on made-up samples on the CPU: a class of transformers, "
        "built small from its default config, or a local checkpoint",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", const=to_json, dest="form", help="as JSON")
    form.add_argument("--markdown", action="store_const", const=to_markdown, dest="form", help="to paste in an issue")
    parser.set_defaults(form=to_text)


def execute(arguments: argparse.Namespace) -> int:
    """Print the diagnosis and return its verdict."""
    diagnosis = diagnose(arguments.model)
    sys.stdout.write(arguments.form(diagnosis) + "\n")
    return diagnosis.verdict


def diagnose(model: str | None) -> Diagnosis:
    """Look at what is installed and, where a model is named, at what its head does.

    Raises:
        OptionsError: if the model is neither a class of transformers nor a folder.
    """
    report = hf_accum_fix.report()
    release = parsed(report.environment.transformers)
    was_run = release is not None and release.public in TESTED_RELEASES
    broken = None
    if report.plan.refusal is None and (model or VARIABLE in os.environ or not was_run):
        broken = _import_trainer()
        report = hf_accum_fix.report()
    verdict, reason = judge(report)
    if broken is not None:
        verdict, reason = Verdict.COULD_NOT_TELL, f"{TRAINER_MODULE} cannot be imported: {broken}"
    head: dict[str, Any] = {}
    if model is not None:
        refusal = report.plan.refusal
        head = {"asked": model, **_observed(model, broken or (str(refusal) if refusal else None))}
    if "error" in head:
        verdict, reason = Verdict.COULD_NOT_TELL, f"{reason}; {model} could not be observed"
    return Diagnosis(report, verdict, reason, head)


def _import_trainer() -> str | None:
    """Import the Trainer, under ``run`` patched by that; the reason why it cannot be."""
    try:
        import_module(TRAINER_MODULE)
    except (Exception, SystemExit) as error:  # of whatever of it is broken; SystemExit is a refusal under run
        return f"{type(error).__name__}: {error}"
    return None


def _observed(model: str, obstacle: str | None) -> dict[str, Any]:
    """What the head was seen to do, or the reason why it was not."""
    if obstacle is not None:
        return {"error": obstacle}
    from hf_accum_fix.cli.head import observe_head

    try:
        observed = observe_head(model)
    except ContractError as error:
        return {"error": str(error)}
    return {"built": observed.built, "observed": dict(observed.run)}


def _present(report: Report) -> tuple[Decision, ...]:
    absent = (Action.NOT_AFFECTED, Action.UNKNOWN)
    return tuple(decision for decision in report.plan.decisions if decision.action not in absent)


def judge(report: Report) -> tuple[Verdict, str]:
    """The verdict on a report, and the reason for it. Pure."""
    installed = report.environment.transformers
    release = parsed(installed)
    if release is None:
        found = "not installed" if installed is None else f"of no release, {installed!r}"
        return Verdict.COULD_NOT_TELL, f"transformers is {found}"
    if release.is_prerelease:
        return Verdict.COULD_NOT_TELL, f"transformers {release} is a pre-release, which may differ from the release"
    if not OLDEST <= Version(release.base_version) <= NEWEST:
        return Verdict.COULD_NOT_TELL, f"{OLDEST} to {NEWEST} were looked at, not transformers {release}"
    present = _present(report)
    if not present:
        return Verdict.CLEAN, f"no known defect is in transformers {release}"
    defects = f"{len(present)} defects are in transformers {release}"
    if report.state == "applied" and not report.missing:
        if report.plan.untested is not None:
            return Verdict.COULD_NOT_TELL, f"{defects}; the patch is on, but {report.plan.untested}"
        rest = len(present) - len(report.plan.mended)
        but = f" but for {rest}, marked as not mended" if rest else ""
        return Verdict.CLEAN, f"{defects}, and mended in this process{but}"
    return Verdict.DEFECTS, f"{defects}, and not mended in this process ({report.state})"


def to_json(diagnosis: Diagnosis) -> str:
    """Everything, `Report.to_dict()` included."""
    head = {"verdict": diagnosis.verdict.name.lower(), "reason": diagnosis.reason, "head": dict(diagnosis.head) or None}
    return json.dumps({**head, **diagnosis.report.to_dict()}, indent=2)


def to_text(diagnosis: Diagnosis) -> str:
    """What matters, to read in a terminal."""
    blocks = [[f"hf-accum-fix {diagnosis.report.version}: {diagnosis.reason}", _versions(diagnosis)]]
    for decision in diagnosis.present:
        defect = decision.defect
        factor = f"gradient {defect.gradient} times the right one" if defect.gradient else "no one factor says it"
        left = defect.not_mended and f"not mended: {defect.not_mended}"
        told = (line for line in (defect.summary, defect.who, left) if line)
        blocks.append([f"{defect.name}: {factor}", *(f"    {line}" for line in told)])
    blocks.append([*_what_apply_does(diagnosis), *_head(diagnosis)])
    blocks.append([_LEGEND])
    return "\n\n".join("\n".join(block) for block in blocks)


def to_markdown(diagnosis: Diagnosis) -> str:
    """The same, to paste in an issue."""
    lines = [f"**hf-accum-fix {diagnosis.report.version}**: {diagnosis.reason}", "", _versions(diagnosis), ""]
    if diagnosis.present:
        lines += ["| defect | right gradient times | what happens | whose runs |", "|---|---|---|---|"]
        for defect in (decision.defect for decision in diagnosis.present):
            link = f"[`{defect.name}`]({defect.source[0]})"
            left = f" *(not mended: {defect.not_mended})*" if defect.not_mended else ""
            cells = (link, defect.gradient or "-", defect.summary + left, defect.who or "-")
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        lines.append("")
    lines += [f"- {line}" for line in (*_what_apply_does(diagnosis), *_head(diagnosis))]
    return "\n".join([*lines, "", _LEGEND])


_LEGEND: Final = f"{LEGEND}\nhf-accum-fix explain NAME has the equations and the links."


def _versions(diagnosis: Diagnosis) -> str:
    return ", ".join(f"{name} {version}" for name, version in diagnosis.report.to_dict()["installed"].items())


def _what_apply_does(diagnosis: Diagnosis) -> list[str]:
    report = diagnosis.report
    if report.plan.refusal is not None:
        return [f"apply() refuses: {report.plan.refusal}"]
    does = "wraps" if report.state == "applied" else "would wrap"
    methods = ", ".join(seam.name for seam in seams_of(parsed(report.environment.transformers)))
    lines = [f"apply() {does} {methods} of Trainer: {len(report.plan.mended)} defects mended"]
    if report.missing:
        lines.append(f"dropped since by another patch: {', '.join(report.missing)}")
    if report.plan.untested is not None:
        lines.append(f"UNTESTED: {report.plan.untested}")
    return lines


def _head(diagnosis: Diagnosis) -> list[str]:
    head = diagnosis.head
    if "observed" not in head:
        return [f"{head['asked']}: {head['error']}"] if head else []
    run = head["observed"]
    items = f" ({run['items']})" if run["items"] else ""
    router = f", plus {run['router_coefficient']:g} x router loss" if run["router_coefficient"] else ""
    router += f", plus {run['router_z_coefficient']:g} x router z-loss" if run["router_z_coefficient"] else ""
    exact = "exact for every cut" if run["exact"] else "not exact"
    lines = [f"{head['built']}: its loss {run['reduction']}{items}{router}; under apply() {exact} ({run['reason']})"]
    factor = run["stock_gradient_factor"]
    if factor is not None:
        cut = f"G = {run['accumulation_steps']}, W = {run['world_size']}"
        lines.append(f"cut in {cut}, the stock Trainer would train it at about {factor:.3g}x the right gradient")
    return lines
