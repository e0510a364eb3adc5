"""``run`` against commands, paths and variables that broke it, and switches that are set to nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from hf_accum_fix.cli.inherit import BOOTSTRAP, VARIABLE, environment_for, inherited_options
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.options import SWITCH, Options, enabled
from tests.cli.processes import ROOT, RUN, environment, start


@pytest.mark.parametrize("words", [("",), ("--", ""), ("", "train.py")])
def test_an_empty_command_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = start([*RUN, *words], environment())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "hf-accum-fix run torchrun train.py" in done.stderr


def test_a_word_that_looks_like_python_is_only_a_word() -> None:
    done = start([*RUN, "echo", "python", "-I"], environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "python -I\n", "")


def test_a_relative_path_reaches_a_child_that_changes_folder(tmp_path: Path) -> None:
    """The package is found by it alone: without it the child would say NOT on."""
    shutil.copytree(ROOT / "hf_accum_fix", tmp_path / "source" / "hf_accum_fix")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    child = "import hf_accum_fix; print(hf_accum_fix.__file__)"
    script = (
        f"import os, subprocess, sys; os.chdir({str(elsewhere)!r}); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    done = start([*RUN, sys.executable, "-c", script], environment("source"), tmp_path)
    assert Path(done.stdout.strip()) == tmp_path / "source" / "hf_accum_fix" / "__init__.py", done.stderr


def test_every_folder_handed_down_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.pathsep.join(("src", "/one", "", "../two"))
    handed = environment_for(Options(), {"PYTHONPATH": before})["PYTHONPATH"].split(os.pathsep)
    assert handed == [BOOTSTRAP, str(tmp_path / "src"), "/one", str(tmp_path), str(tmp_path.parent / "two")]
    assert Path(BOOTSTRAP).is_absolute()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_a_variable_nested_beyond_reading_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match=VARIABLE) as refused:
        inherited_options({VARIABLE: text})
    assert len(str(refused.value)) < 400


def test_run_inside_run_inside_run() -> None:
    done = start([*RUN, *RUN, *RUN, sys.executable, "-c", "import sys; print(len(sys.meta_path))"], environment())
    once = start([*RUN, sys.executable, "-c", "import sys; print(len(sys.meta_path))"], environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, once.stdout, "")


@pytest.mark.parametrize("value", ["", "  "])
def test_a_switch_set_to_nothing_is_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, value)
    assert enabled()
    done = start([*RUN, "echo", "on"], environment(HF_ACCUM_FIX=value))
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")
