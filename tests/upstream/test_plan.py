"""The plan: pure, so every release and every state of the methods can be asked about without installing it."""

from __future__ import annotations

import functools
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from transformers import Seq2SeqTrainer, Trainer

from hf_accum_fix.errors import ForeignPatchError, SeamError, UnsupportedVersionError
from hf_accum_fix.options import Options
from hf_accum_fix.upstream.defects import DEFECTS, OLDEST_READ, Defect
from hf_accum_fix.upstream.environment import Environment, SeamState, detect, fingerprint, is_pristine
from hf_accum_fix.upstream.plan import Action, Plan, make_plan
from hf_accum_fix.upstream.seams import FIRST_RELEASE, SEAMS, TESTED_BODIES, TESTED_RELEASES, seams_of

FOREIGN = "somebody.compute_loss"


def seams(**changes: object) -> tuple[SeamState, ...]:
    """Every seam as upstream made it, compute_loss changed."""
    states = [
        SeamState(seam, seam.parameters, fits=True, tested_body=True, ours=False, foreign=None, composable=True)
        for seam in seams_of(None)
    ]
    return (*states[:-1], replace(states[-1], **changes))


def plan(transformers: str | None, states: tuple[SeamState, ...] = (), options: Options | None = None) -> Plan:
    environment = Environment(transformers, "1.15.0", "2.13.0", "3.11.7", bool(states), states)
    return make_plan(environment, options or Options())


def before(release: str) -> str:
    """A release just before this one, whether or not it exists."""
    major, minor, micro = Version(release).release
    if micro:
        return f"{major}.{minor}.{micro - 1}"
    return f"{major}.{minor - 1}.99" if minor else f"{major - 1}.99.0"


def action(release: str, defect: Defect) -> Action:
    made = plan(release, seams())
    assert [decision.defect for decision in made.decisions] == list(DEFECTS)
    [found] = [decision for decision in made.decisions if decision.defect is defect]
    assert found.reason
    return found.action


def done_about(defect: Defect, release: str) -> Action:
    """What has to be decided about a defect that a release has."""
    if Version(Version(release).base_version) < Version(FIRST_RELEASE):
        return Action.REFUSE
    return Action.NOT_FIXED if defect.not_fixed else Action.FIX


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_at_the_edges_of_its_range(defect: Defect) -> None:
    inside = [defect.since, f"{defect.since}.dev0", f"{defect.since}rc1", f"{defect.since}+local"]
    inside.append("99.0.0" if defect.until is None else before(defect.until))
    for release in inside:
        assert action(release, defect) is done_about(defect, release), release
    if defect.since != OLDEST_READ:
        assert action(before(defect.since), defect) is Action.NOT_AFFECTED
    if defect.until is not None:
        assert action(defect.until, defect) is Action.NOT_AFFECTED


@pytest.mark.parametrize("build", ["5.5.4.dev0", "5.5.4rc1", "4.49.0.dev0", "5.24.0.dev0", "5.24.0rc1+local"])
def test_a_build_that_is_no_release_is_never_called_unaffected(build: str) -> None:
    decisions = plan(build, seams()).decisions
    assert {decision.action for decision in decisions} <= {Action.FIX, Action.NOT_FIXED, Action.UNKNOWN}
    for decision in decisions:
        if decision.action is Action.UNKNOWN:
            assert build in decision.reason and not decision.defect.is_in(Version(build))


@pytest.mark.parametrize("release", [None, "not a version", "4.40.2", "4.38.2", "4.40.99"])
def test_a_release_that_cannot_be_fixed_is_refused_with_what_to_do(release: str | None) -> None:
    made = plan(release)
    assert isinstance(made.refusal, UnsupportedVersionError)
    assert FIRST_RELEASE in str(made.refusal) and "pip install -U transformers" in str(made.refusal)
    assert Action.FIX not in {decision.action for decision in made.decisions}
    assert len(made.decisions) == len(DEFECTS)


@pytest.mark.parametrize("release", ["4.41.0", "4.41.0.dev0", "4.41.0rc1", "5.0.0rc1", "6.1.0"])
def test_a_release_with_the_seams_is_not_refused(release: str) -> None:
    assert plan(release, seams()).refusal is None


def test_a_newer_release_a_build_before_one_and_another_body_are_marked_untested() -> None:
    for release in ("5.24.0rc1", "5.24.0.dev0", "5.5.0.dev0", "5.25.0", None):
        assert str(release) in str(plan(release, seams()).untested)
    assert plan("5.5.1", seams()).untested is None
    for release in ("5.5.1", "5.23.0"):
        assert "compute_loss" in str(plan(release, seams(tested_body=False)).untested)


#: What is found of compute_loss, the error, and words of it.
REFUSED: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "a missing method": (
        {"parameters": None, "fits": False, "composable": False}, SeamError,
        ("without Trainer.compute_loss; expected Trainer.compute_loss(self, model, inputs, return_outputs",)),
    "another signature": (
        {"parameters": ("model", "batch"), "fits": False}, SeamError, ("(self, model, batch)", "num_items_in_batch")),
    "a replacement": ({"foreign": FOREIGN, "composable": False}, ForeignPatchError, (FOREIGN, "allow_foreign")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    changes, error, words = REFUSED[name]
    made = plan("6.0.0", seams(**changes))
    assert isinstance(made.refusal, error) and all(each in str(made.refusal) for each in words)
    assert {decision.action for decision in made.decisions} == {Action.REFUSE, Action.NOT_AFFECTED}


def test_a_replacement_allowed_by_name_is_not_refused() -> None:
    states = seams(foreign=FOREIGN, composable=False, tested_body=False)
    assert plan("5.23.0", states, Options(allow_foreign=(FOREIGN,))).refusal is None
    assert plan("5.23.0", states, Options(allow_foreign=("somebody.else",))).refusal is not None


INSTALLED = Version(metadata.version("transformers"))


def test_the_installed_release_has_the_seams() -> None:
    states = detect().seams
    assert [state.seam for state in states] == list(seams_of(INSTALLED))
    for state in states:
        assert state.fits and state.composable and state.foreign is None and not state.ours, state


@pytest.mark.skipif(INSTALLED.public not in TESTED_RELEASES, reason=f"{INSTALLED} is not a tested release")
def test_the_bodies_of_a_tested_release_are_in_the_table() -> None:
    for name in {seam.name for seam in seams_of(INSTALLED)}:
        found = fingerprint(vars(Trainer)[name])
        assert found in TESTED_BODIES[name], f"{name} of {INSTALLED}: {found}"
    assert all(state.tested_body for state in detect().seams)


def test_a_fingerprint_knows_the_body_but_no_white_space(tmp_path: Path) -> None:
    found = []
    for place, body in enumerate(("(self):\n    return 1", "( self ):\n\n    return  1", "(self):\n    return 2")):
        file = tmp_path / f"body_{place}.py"
        file.write_text(f"def train{body}\n")
        found.append(fingerprint(runpy.run_path(str(file))["train"]))
    assert found[0] == found[1] != found[2]


def test_only_the_function_of_the_file_is_pristine() -> None:
    original = vars(Trainer)["compute_loss"]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    assert is_pristine(original, "compute_loss")
    assert not is_pristine(original, "training_step")
    assert not is_pristine(wrapped, "compute_loss")
    namespace: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("class Trainer:\n    def compute_loss(self): ...", namespace)
    assert not is_pristine(vars(namespace["Trainer"])["compute_loss"], "compute_loss")


def tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return trace


def test_a_foreign_wrapper_and_a_replacement_are_distinguished_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "compute_loss", tracing(vars(Trainer)["compute_loss"]))
    monkeypatch.setattr(Trainer, "training_step", lambda self, model, inputs, num_items_in_batch=None: None)
    states = {state.seam.name: state for state in detect().seams}
    wrapped, replaced = states["compute_loss"], states["training_step"]
    assert wrapped.composable and wrapped.fits and wrapped.foreign is not None
    assert wrapped.foreign.startswith(__name__) and wrapped.foreign.endswith("trace")
    assert not replaced.composable and replaced.fits and not replaced.tested_body
    assert replaced.foreign is not None and "lambda" in replaced.foreign
    assert vars(Seq2SeqTrainer).get("compute_loss") is None


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: row.name)
def test_a_row_is_complete(row: Defect) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name)
    assert all((row.summary, row.who, row.wrong, row.right, row.goes_when, row.source))
    assert all(link.startswith("https://") for link in row.source) and row.seam in {seam.name for seam in SEAMS}
    assert row.until is None or Version(row.since) < Version(row.until)


def test_the_range_is_half_open_and_takes_builds_for_the_release_they_lead_to() -> None:
    row = replace(DEFECTS[0], since="4.49.0", until="5.0.0")
    inside = ["4.49.0", "4.49.0.dev0", "4.49.0rc1", "4.57.6", "4.49.0+local"]
    outside = ["4.48.3", "5.0.0", "5.0.0rc1", "5.0.0.dev0"]
    assert [release for release in inside + outside if row.is_in(Version(release))] == inside
