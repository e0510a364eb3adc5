"""``run --require``: a command in which no process applied the patch fails. Transformers is a stand-in here."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, RUN, environment, start

REQUIRE = [*RUN, "--require"]
NOT_ON = "hf-accum-fix: NOT on: got a command in which no process applied the patch; expected at least one"
TRAINS = "import transformers.trainer; print('trained')"


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return start([*REQUIRE, *command], environment(**variables))


def test_a_command_without_the_patch_fails() -> None:
    done = run(sys.executable, "-c", "print('trained')")
    assert (done.returncode, done.stdout) == (3, "trained\n") and done.stderr.startswith(NOT_ON)
    hidden = f"import subprocess, sys; subprocess.run([sys.executable, '-E', '-c', {TRAINS!r}], check=True)"
    done = run(sys.executable, "-c", hidden)
    assert (done.returncode, done.stdout) == (3, "trained\n") and done.stderr.startswith(NOT_ON)


@pytest.mark.parametrize("quiet", [{}, {"HF_ACCUM_FIX_QUIET": "1"}], ids=["told", "quiet"])
def test_a_child_with_the_patch_is_enough(quiet: dict[str, str]) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRAINS!r}], check=True); sys.exit(0)"
    done = run(sys.executable, "-c", child, **quiet)
    assert (done.returncode, done.stdout) == (0, "trained\n") and "NOT on" not in done.stderr
    assert (" is on: transformers " in done.stderr) == (not quiet)


def test_the_commands_own_failure_stays() -> None:
    done = run(sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7 and done.stderr.startswith(NOT_ON)
    assert run("no-such-command").returncode == 127
    killed = run(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL


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
    command = [sys.executable, "-c", heeding, *REQUIRE, sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == code
