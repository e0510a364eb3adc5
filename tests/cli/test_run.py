"""``run`` as a command: what it starts, and in which environment. No transformers here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accum_fix.cli.inherit import BOOTSTRAP, VARIABLE, inherited_options
from tests.cli.processes import ROOT, RUN, environment, start

SHOW = "import os, json; print(json.dumps(dict(os.environ)))"


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return start([*RUN, *command], environment(**variables))


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_the_arguments_and_the_exit_code_are_those_of_the_command(dashes: tuple[str, ...]) -> None:
    script = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = run(*dashes, sys.executable, "-c", script, "--help", "--", "--allow-foreign", "-I")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "['--help', '--', '--allow-foreign', '-I']\n"


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "no_program").touch()
    (tmp_path / "train.py").touch()
    assert run("no-such-command").returncode == 127
    done = start([*RUN, "train.py", "--lr", "1"], environment(ROOT), tmp_path)
    assert done.returncode == 127 and "did you mean: hf-accum-fix run python train.py --lr 1\n" in done.stderr
    done = run(tmp_path / "no_program")
    assert done.returncode == 126 and "no_program: Permission denied" in done.stderr


def test_the_inner_of_two_runs_counts() -> None:
    inner = [*RUN, "--allow-foreign", "in.ner", sys.executable, "-c", SHOW]
    handed = json.loads(run("--allow-foreign", "out.er", *inner, PYTHON_HF_ACCUM_FIX_ANNOUNCED="1").stdout)
    assert handed["PYTHONPATH"] == BOOTSTRAP
    assert inherited_options(handed).allow_foreign == ("in.ner",)
    assert f"{VARIABLE}_ANNOUNCED" not in handed


def test_switched_off_the_command_runs_as_it_is() -> None:
    done = run(sys.executable, "-I", "-c", SHOW, HF_ACCUM_FIX="0")
    assert done.stderr == "hf-accum-fix: off, HF_ACCUM_FIX=0: the command runs without the patch\n"
    assert not {"PYTHONPATH", VARIABLE} & json.loads(done.stdout).keys()
    assert run("true", HF_ACCUM_FIX="maybe").returncode == 2
