"""``run`` as a command: what it starts, and in which environment; ``run --require``."""

from __future__ import annotations

import json
import signal
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


# --- ``--require``: a command in which no process applied the patch fails ---------------------------------------------

NOT_ON = "hf-accum-fix: NOT on: got a command in which no process applied the patch; expected at least one"
TRAINS = "import transformers.trainer; print('trained')"


def require(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("--require", *command, **variables)


@pytest.mark.slow
def test_a_command_without_the_patch_fails() -> None:
    done = require(sys.executable, "-c", "print('trained')")
    assert (done.returncode, done.stdout) == (3, "trained\n") and done.stderr.startswith(NOT_ON)
    hidden = f"import subprocess, sys; subprocess.run([sys.executable, '-E', '-c', {TRAINS!r}], check=True)"
    done = require(sys.executable, "-c", hidden)
    assert (done.returncode, done.stdout) == (3, "trained\n") and done.stderr.startswith(NOT_ON)


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [{}, {"HF_ACCUM_FIX_QUIET": "1"}], ids=["told", "quiet"])
def test_a_child_with_the_patch_is_enough(quiet: dict[str, str]) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRAINS!r}], check=True); sys.exit(0)"
    done = require(sys.executable, "-c", child, **quiet)
    assert (done.returncode, done.stdout) == (0, "trained\n") and "NOT on" not in done.stderr
    assert (" is on: transformers " in done.stderr) == (not quiet)


@pytest.mark.slow
def test_the_commands_own_failure_stays() -> None:
    done = require(sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7 and done.stderr.startswith(NOT_ON)
    assert require("no-such-command").returncode == 127
    killed = require(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 9), (signal.SIGINT, 8)]
)
def test_a_signal_reaches_the_command(number: signal.Signals, code: int) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9));"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(8)); print('ready', flush=True); time.sleep(60)"
    )
    # A job that a shell runs in the background ignores SIGINT, and so do its children.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", heeding, *RUN, "--require", sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == code
