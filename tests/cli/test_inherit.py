"""What ``run`` hands down, and what a process does with it as soon as it has a Trainer."""

from __future__ import annotations

import os
from typing import Any

import pytest
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix.cli.inherit import BOOTSTRAP, VARIABLE, apply_inherited, environment_for, inherited_options
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.options import Options


def test_pythonpath_of_the_user_is_kept_behind_ours() -> None:
    here = os.path.abspath("")  # noqa: PTH100 - what Python makes of an empty entry
    for before, behind in (("/one:/two", ":/one:/two"), ("", ""), ("/one:", f":/one:{here}")):
        handed = environment_for(Options(), {"PYTHONPATH": before.replace(":", os.pathsep), "HOME": "/"})
        assert handed["PYTHONPATH"] == BOOTSTRAP + behind.replace(":", os.pathsep)
        assert handed["HOME"] == "/"
    assert environment_for(Options(), {})["PYTHONPATH"] == BOOTSTRAP


def test_the_options_travel() -> None:
    switches = {"eval_loss": True, "drop_duplicates": True, "balance_windows": True}
    options = Options(allow_foreign=("a.b", "c.d"), router_loss="exact", accumulate_in="float32", **switches)
    assert inherited_options(environment_for(options, {})) == options
    assert inherited_options({}) == Options()
    assert VARIABLE.startswith("PYTHON")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"allow_foreign": ["nodot"]}', '{"allow_foreign": 3}'])
def test_a_variable_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(OptionsError):
        inherited_options({VARIABLE: text})


def test_a_folder_that_pythonpath_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accum_fix.cli.inherit.BOOTSTRAP", f"/a{os.pathsep}b")
    with pytest.raises(UnsupportedSetupError, match="install it in another folder"):
        environment_for(Options(), {})


# --- in a process that trains -----------------------------------------------------------------------------------------


def theirs(self: Any, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> None:
    """Another package's replacement of compute_loss."""


THEIRS = f"{__name__}.theirs"


def test_it_is_on_with_the_options_that_travelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, environment_for(Options(allow_foreign=(THEIRS,)), {})[VARIABLE])
    monkeypatch.setattr(Trainer, "compute_loss", theirs)
    assert f"{hf_accum_fix.__version__} is on: transformers " in apply_inherited()
    handle = hf_accum_fix.active_handle()
    assert handle is not None and handle.active and handle.options.allow_foreign == (THEIRS,)
    hf_accum_fix.revert()


def test_a_refusal_is_no_error_that_a_script_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(Trainer, "compute_loss", theirs)
    with pytest.raises(SystemExit, match=f"hf-accum-fix: got {THEIRS} in place of Trainer.compute_loss"):
        apply_inherited()
    assert hf_accum_fix.active_handle() is None


def test_switched_off_it_reports_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ACCUM_FIX", "0")
    assert apply_inherited() == f"{hf_accum_fix.__version__} is off: HF_ACCUM_FIX=0"


def test_an_untested_release_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accum_fix.upstream.plan.TESTED_RELEASES", ("4.41.0",))
    line = apply_inherited()
    hf_accum_fix.revert()
    assert ", UNTESTED: our tests have run" in line
