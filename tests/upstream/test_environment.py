"""detect() on the installed release, and the recomputation of the fingerprints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from packaging.version import Version
from transformers import Seq2SeqTrainer, Trainer

from hf_accum_fix.upstream import environment
from hf_accum_fix.upstream.environment import detect, fingerprint, fingerprints, imported_trainer, is_pristine
from hf_accum_fix.upstream.seams import TESTED_BODIES, TESTED_RELEASES, seams_of

INSTALLED = Version(metadata.version("transformers"))
TRAINER_FILE = Path(transformers.trainer.__file__)


def test_versions_are_those_of_the_metadata() -> None:
    found = detect()
    assert found.transformers == metadata.version("transformers")
    assert found.accelerate == metadata.version("accelerate")
    assert found.torch == metadata.version("torch")


def test_a_package_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(environment.metadata, "version", nothing)
    assert detect().transformers is None


def test_the_installed_release_has_the_seams() -> None:
    states = detect().seams
    assert [state.seam for state in states] == list(seams_of(INSTALLED))
    for state in states:
        assert state.fits and state.composable and state.foreign is None and not state.ours, state


def test_without_the_import_nothing_is_known_of_the_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "transformers.trainer")
    assert detect().seams == () and not detect().trainer_imported


def test_a_class_put_in_its_place_does_not_hide_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.trainer, "Trainer", type("Swapped", (Trainer,), {}))
    assert imported_trainer() is Trainer


@pytest.mark.skipif(INSTALLED.public not in TESTED_RELEASES, reason=f"{INSTALLED} is not a tested release")
def test_the_bodies_of_a_tested_release_are_in_the_table() -> None:
    for name, found in fingerprints(TRAINER_FILE).items():
        assert found in TESTED_BODIES[name], f"{name} of {INSTALLED}: {found}"
    assert all(state.tested_body for state in detect().seams)


def test_the_fingerprint_of_the_file_is_that_of_the_imported_method() -> None:
    of_file = fingerprints(TRAINER_FILE)
    assert {seam.name: fingerprint(vars(Trainer)[seam.name]) for seam in seams_of(INSTALLED)} == of_file


def test_a_fingerprint_knows_the_body_but_no_white_space(tmp_path: Path) -> None:
    first, spaced, other = (
        "class Trainer:\n    def train(self):\n        return 1\n",
        "class Trainer:\n\n    def train( self ):\n\n        return  1\n",
        "class Trainer:\n    def train(self):\n        return 2\n",
    )
    found = []
    for number, source in enumerate((first, spaced, other)):
        file = tmp_path / f"{number}.py"
        file.write_text(source)
        found.append(fingerprints(file)["train"])
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
