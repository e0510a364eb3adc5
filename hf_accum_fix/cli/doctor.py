"""``hf-accum-fix doctor``: what is installed, what is wrong in it, for whom, and what apply() would do about it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any, Final

from packaging.version import Version

import hf_accum_fix
from hf_accum_fix.accumulation.reduction import Reduction
from hf_accum_fix.cli import LEGEND, write
from hf_accum_fix.cli.inherit import VARIABLE
from hf_accum_fix.errors import ContractError
from hf_accum_fix.reporting import Report, loss_of, off_by, plain, versions, wrapped
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.environment import parsed
from hf_accum_fix.upstream.limits import LIMITS
from hf_accum_fix.upstream.plan import Decision
from hf_accum_fix.upstream.seams import TESTED_RELEASES, TRAINER_MODULE, seams_of

NEWEST: Final = max(map(Version, TESTED_RELEASES))
OLDEST: Final = min(Version(defect.since) for defect in DEFECTS)
"""The releases that were read; about others nothing is known."""

_COMMON: Final = {
    "gradient-divided-twice": "1/8x",
    "head-drops-item-count": "8x",
    "undivided-gradient-right-log": "8x",
    "loss-times-steps": "8x",
}
"""Defects that affect many models, and the gradient at 8 micro-batches; the first one hides the later ones."""

_REMEDY: Final = "hf-accum-fix run COMMAND"

DESCRIPTION: Final = """\
Say in one line whether the installed release, or with --model your model in it, trains at the right gradient, and what
to do if not. --verbose: which defects the release has, what each does to whom, and what apply() would do.

The release's number settles that. Before it recommends a command it imports transformers.trainer, in a process of its
own, to see whether the installation works.
"""

EPILOG: Final = f"""\
exit code:
  0  clean: no defect in the installed release, or the patch is on in this process, as under
     hf-accum-fix run hf-accum-fix doctor (the report marks defects that it does not mend)
  1  defects present, which nothing mends in this process
     with --model both are about that model alone: 0 also where the stock Trainer trains it right
  2  wrong usage
  3  could not tell: transformers is not installed, is a pre-release, or is outside {OLDEST} to {NEWEST}, the releases
     that were read; its Trainer cannot be imported; the patch is on, but our tests have not run the release; or the
     model of --model cannot be built, fed or trained, or has a loss that is not recognised
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
        head: findings on the model of --model: "asked", and "built" with "observed", or "error"; empty without it.
    """

    report: Report
    verdict: Verdict
    reason: str
    head: Mapping[str, Any]

    @property
    def present(self) -> tuple[Decision, ...]:
        """The decision about each defect of the installed release."""
        return self.report.present


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument(
        "--model",
        metavar="CLASS|TYPE|FOLDER",
        help="answer for this model, by one step on made-up samples on the CPU: a class of transformers or a model "
        "type such as bert, built small from its default config, or the folder of a checkpoint",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--verbose", action="store_const", const=to_verbose, dest="form", help="every defect of the release"
    )
    form.add_argument("--json", action="store_const", const=to_json, dest="form", help="as JSON")
    form.add_argument("--markdown", action="store_const", const=to_markdown, dest="form", help="to paste in an issue")
    parser.set_defaults(form=to_text)


def execute(arguments: argparse.Namespace) -> int:
    """Print the diagnosis and return its verdict."""
    diagnosis = diagnose(arguments.model)
    write(arguments.form(diagnosis) + "\n")
    return diagnosis.verdict


def diagnose(model: str | None) -> Diagnosis:
    """Look at the installation and, where a model is named, at its loss.

    Raises:
        OptionsError: if the model is neither a class or model type of transformers nor a folder.
    """
    report = hf_accum_fix.report()
    release = parsed(report.environment.transformers)
    was_run = release is not None and release.public in TESTED_RELEASES
    broken = None
    if report.plan.refusal is None and (model or VARIABLE in os.environ or not was_run):
        broken = _import_trainer()
        report = hf_accum_fix.report()
    verdict, reason = judge(report)
    if verdict is Verdict.DEFECTS and TRAINER_MODULE not in sys.modules and report.plan.refusal is None:
        broken = _import_elsewhere()
    if broken is not None:
        verdict, reason = Verdict.COULD_NOT_TELL, f"{TRAINER_MODULE} cannot be imported: {broken}"
    head: dict[str, Any] = {}
    if model is not None:
        refusal = report.plan.refusal
        head = {"asked": model, **_observed(model, broken or (str(refusal) if refusal else None))}
    if "error" in head:
        verdict, reason = Verdict.COULD_NOT_TELL, f"{reason}; {model} could not be observed"
    elif head and verdict is not Verdict.COULD_NOT_TELL:
        verdict, reason = judge_model(report, head["observed"])
    return Diagnosis(report, verdict, reason, head)


def _import_trainer() -> str | None:
    """Import the Trainer, which ``run`` patches; the reason why that failed, or None."""
    try:
        import_module(TRAINER_MODULE)
    except (Exception, SystemExit) as error:  # of whatever of it is broken; SystemExit is a refusal under run
        return f"{type(error).__name__}: {error}"
    return None


def _import_elsewhere() -> str | None:
    """The same in a process of its own, before ``run`` is recommended: this one stays light."""
    command = [sys.executable, "-c", f"import {TRAINER_MODULE}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def _observed(model: str, obstacle: str | None) -> dict[str, Any]:
    """The observation of the head, or the reason why there is none."""
    if obstacle is not None:
        return {"error": obstacle}
    from hf_accum_fix.cli.head import observe_head

    try:
        observed = observe_head(model)
    except ContractError as error:
        return {"error": str(error)}
    return {"built": observed.built, "observed": dict(observed.run)}


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
        return Verdict.COULD_NOT_TELL, f"{OLDEST} to {NEWEST} were read, not transformers {release}"
    present = report.present
    if not present:
        return Verdict.CLEAN, f"no known defect is in transformers {release}"
    defects = f"{len(present)} defects are in transformers {release}"
    if _is_on(report):
        if report.plan.untested is not None:
            return Verdict.COULD_NOT_TELL, f"{defects}; the patch is on, but {report.plan.untested}"
        rest = len(present) - len(report.plan.mended)
        but = f" but for {rest}, marked as not mended" if rest else ""
        return Verdict.CLEAN, f"{defects}, and mended in this process{but}"
    return Verdict.DEFECTS, f"{defects}, and not mended in this process ({report.state})"


def judge_model(report: Report, run: Mapping[str, Any]) -> tuple[Verdict, str]:
    """The verdict on one model in a known release, by its observation, and the reason. Pure."""
    if not run["exact"]:
        return Verdict.COULD_NOT_TELL, f"its loss is not known to be a mean over targets: {plain(run['reason'])}"
    steps, off = run["accumulation_steps"], off_by(run)
    if off is not None:
        of_stock = f"{off} at G = {steps}".replace("router loss", "its router loss")
    elif run["stock_gradient_factor"] is None and run["stock_router_factor"] is None:
        return Verdict.COULD_NOT_TELL, "what the stock Trainer makes of its loss cannot be read off"
    elif run["reduction"] == Reduction.MEAN:
        of_stock = "unless all micro-batches hold equally many targets"
    else:
        return Verdict.CLEAN, "fine, the stock Trainer trains it right"
    if _is_on(report):
        return Verdict.CLEAN, f"fine, the patch is on; stock: {of_stock}"
    return Verdict.DEFECTS, f"affected, {of_stock}"


def _is_on(report: Report) -> bool:
    return report.state == "applied" and not report.missing


def answer(diagnosis: Diagnosis) -> str:
    """The answer in one line, and what to do."""
    report, head = diagnosis.report, diagnosis.head
    release = report.environment.transformers or "(not installed)"
    about = f"transformers {release}"
    if head:
        about = f"{head['observed']['head'] if 'observed' in head else head['asked']} on {release}"
    if diagnosis.verdict is Verdict.COULD_NOT_TELL:
        return f"{about}: could not tell"
    words = diagnosis.reason if head else _of_release(report, diagnosis.verdict)
    if diagnosis.verdict is Verdict.CLEAN:
        return f"{about}: {words}"
    refused = report.plan.refusal is not None
    return f"{about}: {words}; " + ("the patch is refused, see below" if refused else f"run: {_REMEDY}")


def _of_release(report: Report, verdict: Verdict) -> str:
    """The effect of a release on many models."""
    if verdict is Verdict.CLEAN:
        mended, present = len(report.plan.mended), len(report.present)
        return f"fine, the patch is on and mends {mended} of {present} defects" if present else "fine, no known defect"
    names = {decision.defect.name for decision in report.present}
    factor = next((factor for name, factor in _COMMON.items() if name in names), None)
    return "affected" if factor is None else f"affected, many models {factor} at G = 8"


def to_json(diagnosis: Diagnosis) -> str:
    """Everything, `Report.to_dict()` included."""
    told = {"answer": answer(diagnosis), "verdict": diagnosis.verdict.name.lower(), "reason": diagnosis.reason}
    limits = [asdict(each) for each in LIMITS]
    told_of = {"head": dict(diagnosis.head) or None, **diagnosis.report.to_dict(), "limits": limits}
    return json.dumps({**told, **told_of}, indent=2)


def to_text(diagnosis: Diagnosis) -> str:
    """The answer and its grounds: a screen at most."""
    report = diagnosis.report
    lines = ["G: gradient_accumulation_steps"] if " G = " in answer(diagnosis) else []
    lines += [*_why(diagnosis), *_model(diagnosis), *_in_the_way(report), _installed(diagnosis)]
    if report.present:
        mended = len(report.plan.mended)
        lines.append(f"{len(report.present)} defects, of which apply() mends {mended}: hf-accum-fix doctor --verbose")
    lines += [f"not a release's defect but {each.owner}'s own: hf-accum-fix explain {each.name}" for each in LIMITS]
    if not diagnosis.head:
        lines.append("your model: hf-accum-fix doctor --model CLASS (or bert, or the folder of a checkpoint)")
    return "\n".join([answer(diagnosis), "", *wrapped(*lines)])


def to_verbose(diagnosis: Diagnosis) -> str:
    """The same, with every defect of the release, and what apply() does."""
    blocks = [[answer(diagnosis)], [_LEGEND]]
    blocks.append(wrapped(*_why(diagnosis), *_model(diagnosis), _installed(diagnosis)))
    for decision in diagnosis.present:
        defect = decision.defect
        factor = f"gradient {defect.gradient} times the right one" if defect.gradient else "no one factor says it"
        left = defect.not_mended and f"not mended: {defect.not_mended}"
        told = (line for line in (defect.summary, defect.who, left) if line)
        blocks.append([f"{defect.name}: {factor}", *(f"    {line}" for line in told)])
    for limit in LIMITS:
        first = f"{limit.name}: {limit.owner}'s own, not a release's defect"
        blocks.append([first, *(f"    {line}" for line in (limit.summary, limit.who, f"take {limit.remedy}"))])
    blocks.append(_what_apply_does(diagnosis))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def to_markdown(diagnosis: Diagnosis) -> str:
    """The same, to paste in an issue."""
    lines = [f"**{answer(diagnosis)}**", "", _LEGEND, "", _installed(diagnosis), ""]
    if diagnosis.present:
        lines += ["| defect | right gradient times | what happens | whose runs |", "|---|---|---|---|"]
        for defect in (decision.defect for decision in diagnosis.present):
            link = f"[`{defect.name}`]({defect.source[0]})"
            left = f" *(not mended: {defect.not_mended})*" if defect.not_mended else ""
            cells = (link, defect.gradient or "-", defect.summary + left, defect.who or "-")
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        lines.append("")
    lines += [f"- {each.owner}'s own, not a release's defect: `{each.name}`, {each.summary}" for each in LIMITS]
    lines += [f"- {line}" for line in (*_why(diagnosis), *_what_apply_does(diagnosis), *_model(diagnosis))]
    return "\n".join(lines)


_LEGEND: Final = f"{LEGEND}\nhf-accum-fix explain NAME has the equations and the links."


def _installed(diagnosis: Diagnosis) -> str:
    return f"hf-accum-fix {diagnosis.report.version}, {versions(diagnosis.report.environment)}"


def _why(diagnosis: Diagnosis) -> list[str]:
    """The reason of a verdict that is not in the answer."""
    told = diagnosis.verdict is Verdict.COULD_NOT_TELL or not diagnosis.head
    return [f"why: {diagnosis.head.get('error', diagnosis.reason)}"] if told else []


def _in_the_way(report: Report) -> list[str]:
    """Why the patch is not on, or what is unknown about it."""
    lines = [] if report.plan.refusal is None else [f"apply() refuses: {report.plan.refusal}"]
    if report.missing:
        lines.append(f"dropped since by another patch: {', '.join(report.missing)}")
    if report.plan.untested is not None and report.plan.refusal is None:
        lines.append(f"UNTESTED: {report.plan.untested}")
    return lines


def _what_apply_does(diagnosis: Diagnosis) -> list[str]:
    report = diagnosis.report
    does = "wraps" if report.state == "applied" else "would wrap"
    methods = ", ".join(seam.name for seam in seams_of(parsed(report.environment.transformers)))
    wraps = f"apply() {does} {methods} of Trainer: {len(report.plan.mended)} defects mended"
    return [*([wraps] if report.plan.refusal is None else []), *_in_the_way(report)]


def _model(diagnosis: Diagnosis) -> list[str]:
    """The observation of the named model."""
    head = diagnosis.head
    if "observed" not in head:
        return []
    run = head["observed"]
    exact = f"under apply() {'exact for every split' if run['exact'] else 'not exact'}"
    batches = f"{run['accumulation_steps']} micro-batches of 2 made-up samples"
    lines = [f"seen: one step of {head['built']}, {batches}, one process", f"its loss {loss_of(run)}; {exact}"]
    if diagnosis.verdict is Verdict.COULD_NOT_TELL and (off := off_by(run)):
        lines.append(f"the stock Trainer would train it at {off}")
    return lines
