"""``hf-accum-fix doctor``: defects of the installed release, the runs they affect, and what apply() does."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import IntEnum
from importlib import import_module
from typing import Final

from packaging.version import Version

import hf_accum_fix
from hf_accum_fix.cli import LEGEND, write
from hf_accum_fix.cli.inherit import VARIABLE
from hf_accum_fix.reporting import Report, versions, wrapped
from hf_accum_fix.upstream.defects import DEFECTS, LIMIT, Factor
from hf_accum_fix.upstream.engine_defects import EngineDefect, installed_engine_defects
from hf_accum_fix.upstream.environment import parsed
from hf_accum_fix.upstream.seams import TESTED_RELEASES, TRAINER_MODULE, seams_of

NEWEST: Final = max(map(Version, TESTED_RELEASES))
OLDEST: Final = min(Version(defect.since) for defect in DEFECTS)
"""The releases whose source was read; others are unknown."""

_COMMON: Final = {"gradient-divided-twice": "1/8x"} | dict.fromkeys(
    ("head-drops-item-count", "undivided-gradient-right-log", "loss-times-steps"), "8x"
)
"""Defects that affect many models, and the gradient at 8 micro-batches; the first one hides the later ones."""

_RUN: Final = "run: hf-accum-fix run COMMAND"
_CHECK: Final = "check: hf-accum-fix verify SCRIPT"

DESCRIPTION: Final = """\
Print in one line whether the installed release, or with --model your model on
it, trains at the right gradient, and what to do if not. --verbose lists the
defects of the release, the runs that each affects, and what apply() would do.

The release number decides; in a release newer than our tests, the lines of each
known defect are looked for in its code.
"""

EPILOG: Final = f"""\
exit code:
  0  clean: no defect in the installed release, or the patch is on in this
     process; with --model: this process trains that model right
  1  defects that nothing fixes in this process; with --model: it trains that
     model wrong
  2  wrong usage
  3  could not tell: transformers is not installed, cannot be imported, is older
     than {OLDEST}, or has the lines of no known defect; the patch is on in a
     release that our tests have not run; or the model of --model cannot be
     built, fed or verified
"""


class Answer(IntEnum):
    """The answer, as an exit code."""

    CLEAN = 0
    DEFECTS = 1
    COULD_NOT_TELL = 3


@dataclass(frozen=True)
class Diagnosis:
    """The content of every form: the report, the answer, and why; ``broken``: why the Trainer cannot be imported."""

    report: Report
    verdict: Answer
    reason: str
    broken: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    about = "verify this model on made-up samples instead: a class of transformers, or a checkpoint's, built small"
    parser.add_argument("--model", metavar="CLASS|FOLDER", help=about)
    form = parser.add_mutually_exclusive_group()
    for flag, function, about in (("--verbose", to_verbose, "the release's defects"), ("--json", to_json, "as JSON")):
        form.add_argument(flag, action="store_const", const=function, dest="form", help=about)
    parser.set_defaults(form=to_text)


def execute(arguments: argparse.Namespace) -> int:
    """Print the diagnosis, or the verification of a model, and return the verdict.

    Raises:
        OptionsError: if the model is neither a class of transformers nor the folder of a checkpoint.
    """
    if arguments.model is None:
        diagnosis = diagnose()
        write(arguments.form(diagnosis) + "\n")
        return diagnosis.verdict
    if (broken := _import_trainer()) is not None:
        write(f"could not tell: {TRAINER_MODULE} cannot be imported: {broken}\n")
        return Answer.COULD_NOT_TELL
    from hf_accum_fix.cli.made_up import verified

    report = verified(arguments.model)
    write((json.dumps(report.to_dict(), indent=2) if arguments.form is to_json else str(report)) + "\n")
    return report.verdict.kind


def diagnose() -> Diagnosis:
    """Diagnose the installation."""
    report = hf_accum_fix.report()
    release = parsed(report.environment.transformers)
    was_run = release is not None and release.public in TESTED_RELEASES
    broken = None
    if report.plan.refusal is None and (VARIABLE in os.environ or not was_run):
        broken = _import_trainer()
        report = hf_accum_fix.report()
    verdict, reason = judge(report)
    if verdict is Answer.DEFECTS and TRAINER_MODULE not in sys.modules:
        broken = broken or _import_elsewhere()
    if broken is not None:
        verdict, reason = Answer.COULD_NOT_TELL, f"{TRAINER_MODULE} cannot be imported: {broken}"
    return Diagnosis(report, verdict, reason, broken)


def _import_trainer() -> str | None:
    """Import the Trainer, which ``run`` patches; return why that failed, or None."""
    try:
        import_module(TRAINER_MODULE)
    except (Exception, SystemExit) as error:  # any broken dependency; SystemExit is a refusal under run
        return f"{type(error).__name__}: {error}"
    return None


def _import_elsewhere() -> str | None:
    """The same in a separate process, so that this one imports nothing heavy."""
    command = [sys.executable, "-c", f"import {TRAINER_MODULE}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no error message"])[-1]


def judge(report: Report) -> tuple[Answer, str]:
    """The verdict on a report, and the reason for it. Pure."""
    installed = report.environment.transformers
    release = parsed(installed)
    if release is None:
        found = "not installed" if installed is None else f"of no release: {installed!r}"
        return Answer.COULD_NOT_TELL, f"transformers is {found}"
    present, is_read = report.present, report.environment.read is not None
    if release.is_prerelease and not is_read:
        return Answer.COULD_NOT_TELL, f"transformers {release} is a pre-release and may differ from the release"
    if not OLDEST <= Version(release.base_version) <= NEWEST and not is_read:
        return Answer.COULD_NOT_TELL, f"defects are known of {OLDEST} to {NEWEST}, not of transformers {release}"
    if not present:
        if is_read:
            return Answer.COULD_NOT_TELL, f"the code of transformers {release} has the lines of no known defect"
        return Answer.CLEAN, f"transformers {release} has no known defect"
    defects = f"transformers {release} has {len(present)} defects"
    if is_read:
        known = sum(decision.defect.until is None for decision in report.plan.decisions)
        part = f"all {known}" if len(present) == known else f"{len(present)} of the {known}"
        defects = f"{part} defects of {NEWEST} are still in the code of transformers {release}"
    if _is_on(report):
        if report.plan.untested is not None:
            return Answer.COULD_NOT_TELL, f"{defects}; the patch is on, but {report.plan.untested}"
        rest = len(present) - len(report.plan.fixed)
        but = f", all but {rest} (marked: not fixed)" if rest else ""
        return Answer.CLEAN, f"{defects}, fixed in this process{but}"
    return Answer.DEFECTS, f"{defects}, not fixed in this process ({report.state})"


def _is_on(report: Report) -> bool:
    return report.state == "applied" and not report.missing


def _answer(diagnosis: Diagnosis) -> list[str]:
    """The answer, and what to do, a line each."""
    report, verdict = diagnosis.report, diagnosis.verdict
    about = f"transformers {report.environment.transformers or '(not installed)'}"
    if verdict is Answer.COULD_NOT_TELL and not diagnosis.broken and _is_on(report):
        return [f"{about}: the patch is on and fits, but this release is not in our tests", _CHECK]
    if verdict is Answer.COULD_NOT_TELL:
        return [f"{about}: could not tell"]
    if verdict is Answer.CLEAN:
        present = len(report.present)
        on = f"the patch is on and fixes {len(report.plan.fixed)} of {present} defects"
        return [f"{about}: fine, {on if present else 'no known defect'}"]
    names = {decision.defect.name for decision in report.present}
    factor = next((f", many models {factor} at G = 8" for name, factor in _COMMON.items() if name in names), "")
    do = _RUN if report.plan.untested is None else f"{_RUN}, then {_CHECK}"
    return [f"{about}: affected{factor}", do if report.plan.refusal is None else "the patch is refused, see below"]


def to_json(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, with `Report.to_dict()`."""
    found = {"answer": "; ".join(_answer(diagnosis)), "verdict": diagnosis.verdict.name.lower()}
    details = {"reason": diagnosis.reason, **diagnosis.report.to_dict(), "limits": [asdict(LIMIT)]}
    details["engine_defects"] = [{"installed": release, **asdict(row)} for release, row in installed_engine_defects()]
    return json.dumps({**found, **details}, indent=2)


def to_text(diagnosis: Diagnosis) -> str:
    """The answer and its reasons, on one screen."""
    report = diagnosis.report
    letters = ["G: gradient_accumulation_steps"] if " G = " in _answer(diagnosis)[0] else []
    lines = [*letters, f"why: {diagnosis.reason}", *_in_the_way(diagnosis), _installed(diagnosis)]
    if report.present:
        fixed = len(report.plan.fixed)
        lines.append(f"apply() fixes {fixed} of {len(report.present)} defects: hf-accum-fix doctor --verbose")
    layouts = report.present if diagnosis.verdict is Answer.DEFECTS else []
    for defect in (decision.defect for decision in layouts if Factor.SHARERS in decision.defect.factors):
        lines.append(f"sequence parallelism, gradient x {defect.gradient}: hf-accum-fix explain {defect.name}")
    lines.append(f"in every release ({LIMIT.owner}): hf-accum-fix explain {LIMIT.name}")
    lines += [f"{about}: hf-accum-fix explain {row.name}" for about, row in _engines()]
    lines.append("for your model: hf-accum-fix doctor --model CLASS (or a checkpoint's folder)")
    return "\n".join([*wrapped(*_answer(diagnosis)), "", *wrapped(*lines)])


def to_verbose(diagnosis: Diagnosis) -> str:
    """The same, with every defect of the release, and what apply() does."""
    legend = f"{LEGEND}\nhf-accum-fix explain NAME has the equations and the links."
    blocks = [wrapped(*_answer(diagnosis)), [legend], wrapped(f"why: {diagnosis.reason}", _installed(diagnosis))]
    report = diagnosis.report
    for decision in report.present:
        defect = decision.defect
        factor = f"gradient {defect.gradient} times the right one" if defect.gradient else "no single factor"
        left = defect.not_fixed and f"not fixed: {defect.not_fixed}"
        facts = (line for line in (defect.summary, defect.who, left) if line)
        blocks.append([*wrapped(f"{defect.name}: {factor}"), *wrapped(*facts, indent=4)])
    first = f"{LIMIT.name}: in every release ({LIMIT.owner})"
    blocks.append([first, *wrapped(LIMIT.summary, LIMIT.who, f"set {LIMIT.remedy}", indent=4)])
    for about, row in _engines():
        blocks.append([*wrapped(f"{row.name}: {about}"), *wrapped(row.summary, row.who, row.fixed, indent=4)])
    does = "wraps" if report.state == "applied" else "would wrap"
    methods = ", ".join(seam.name for seam in seams_of(parsed(report.environment.transformers)))
    wraps = f"apply() {does} {methods} of Trainer: {len(report.plan.fixed)} defects fixed"
    blocks.append(wrapped(*([wraps] if report.plan.refusal is None else []), *_in_the_way(diagnosis)))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _installed(diagnosis: Diagnosis) -> str:
    return f"hf-accum-fix {diagnosis.report.version}, {versions(diagnosis.report.environment)}"


def _engines() -> list[tuple[str, EngineDefect]]:
    """The defects of the installed engines, each with the release that has it."""
    return [(f"in {row.package} {release}", row) for release, row in installed_engine_defects()]


def _in_the_way(diagnosis: Diagnosis) -> list[str]:
    """What keeps the patch off, or makes it untested."""
    plan, missing = diagnosis.report.plan, diagnosis.report.missing
    lines = [f"dropped by a later patch: {', '.join(missing)}"] if missing else []
    if plan.refusal is not None:
        lines = [f"apply() refuses: {plan.refusal}", *lines]
    elif plan.untested is not None:
        lines.append(f"apply() fits, but {plan.untested}")
    return lines if diagnosis.broken is None else []
