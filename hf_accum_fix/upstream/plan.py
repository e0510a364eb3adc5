"""make_plan(): a decision, with its reason, on every defect, from what is installed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from hf_accum_fix.errors import AccumFixError, ForeignPatchError, SeamError, UnsupportedVersionError
from hf_accum_fix.options import Options
from hf_accum_fix.upstream.defects import DEFECTS, OLDEST_READ, Defect
from hf_accum_fix.upstream.environment import Environment, SeamState, parsed
from hf_accum_fix.upstream.presence import refusal as absent
from hf_accum_fix.upstream.seams import FIRST_RELEASE, TESTED_RANGES, TESTED_RELEASES, TRAINER_CLASS

_TESTED = f"{TESTED_RELEASES[0]} to {TESTED_RELEASES[-1]}"


class Action(str, Enum):
    """What apply() does about a defect."""

    FIX = "fix"
    NOT_FIXED = "not fixed"
    NOT_AFFECTED = "not affected"
    UNKNOWN = "unknown"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """The decision on one defect, and why."""

    defect: Defect
    action: Action
    reason: str


@dataclass(frozen=True)
class Plan:
    """What apply() will do."""

    decisions: tuple[Decision, ...]  # one per defect, in the order of the table
    refusal: AccumFixError | None  # the error that apply() raises; None if it can patch
    untested: str | None  # why this release or method body counts as untested; None if tested

    @property
    def fixed(self) -> tuple[Defect, ...]:
        """The defects of this release that are fixed."""
        return tuple(decision.defect for decision in self.decisions if decision.action is Action.FIX)


def make_plan(environment: Environment, options: Options) -> Plan:
    """Decide on every defect; without seams (before transformers.trainer is imported) only versions count."""
    release = parsed(environment.transformers)
    refusal = _refusal(environment, release, options)
    decisions = tuple(_decide(defect, release, refusal, environment.read) for defect in DEFECTS)
    return Plan(decisions, refusal, _untested(environment, release))


def _refusal(environment: Environment, release: Version | None, options: Options) -> AccumFixError | None:
    """The error if nothing can be patched; None if it can."""
    if release is None or Version(release.base_version) < Version(FIRST_RELEASE):
        name = environment.transformers
        found = "no transformers" if name is None else f"transformers {name}"
        return UnsupportedVersionError(
            f"got {found}; expected a release from {FIRST_RELEASE} on; pip install -U transformers"
        )
    for state in environment.seams:
        method = f"{TRAINER_CLASS}.{state.seam.name}"
        if state.foreign is not None and not state.composable and state.foreign not in options.allow_foreign:
            advice = "" if state.patcher is None else state.patcher.advice
            return ForeignPatchError.replaced(method, state.foreign, advice)
        if not state.fits:
            do = f"use a release our tests have run ({_TESTED}) or a newer hf-accum-fix"
            return SeamError(f"got transformers {release} {_misfit(method, state)}; {do}")
    return absent(environment.missing)


def _misfit(method: str, state: SeamState) -> str:
    expected = ", ".join(("self", *state.seam.parameters))
    if state.parameters is None:
        return f"without {method}; expected {method}({expected}, ...)"
    return f"with {method}({', '.join(('self', *state.parameters))}); expected ({expected}, ...)"


def _decide(
    defect: Defect, release: Version | None, refusal: AccumFixError | None, read: frozenset[str] | None
) -> Decision:
    here = release is None or defect.is_in(release)
    # The version of a dev or rc build does not identify its code.
    known = release is not None and not release.is_prerelease and Version(release.base_version) >= Version(OLDEST_READ)
    if release is not None and not here and known:
        ended = defect.until is not None and Version(release.base_version) >= Version(defect.until)
        reason = f"gone since {defect.until}" if ended else f"first appears in {defect.since}"
        return Decision(defect, Action.NOT_AFFECTED, reason)
    if here and read is not None and defect.name not in read:
        return Decision(defect, Action.UNKNOWN, f"its lines of {TESTED_RELEASES[-1]} are not in the code of {release}")
    if refusal is not None:
        return Decision(defect, Action.REFUSE, str(refusal))
    if not here:
        reason = f"{release} is not a release: its version does not identify its code"
        return Decision(defect, Action.UNKNOWN, reason)
    if defect.not_fixed:
        return Decision(defect, Action.NOT_FIXED, defect.not_fixed)
    return Decision(defect, Action.FIX, f"at {TRAINER_CLASS}.{defect.seam}")


def _untested(environment: Environment, release: Version | None) -> str | None:
    """Why an installation is untested. Final releases are judged by method bodies, which patch releases share."""
    if environment.stale_metadata is not None:
        return (
            f"transformers is {environment.transformers} in its code, {environment.stale_metadata} in its metadata; "
            "reinstall transformers"
        )
    if release is None or release.is_prerelease or Version(release.public) > Version(TESTED_RELEASES[-1]):
        return f"our tests have run releases from {_TESTED}, not {environment.transformers}"
    changed = [state.seam.name for state in environment.seams if not state.tested_body]
    if changed:
        return f"{', '.join(changed)} of {TRAINER_CLASS} differs from the releases that our tests have run"
    torch, (first, last) = parsed(environment.torch), TESTED_RANGES["torch"]
    if torch is None or Version(first).release[:2] <= torch.release[:2] <= Version(last).release[:2]:
        return None
    return f"our tests have run torch {first} to {last}, not {torch}"
