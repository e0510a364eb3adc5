"""``run`` as a command: what it starts, in which environment, and what it refuses to start. No transformers here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accum_fix.cli.inherit import BOOTSTRAP, VARIABLE, environment_for, inherited_options
from hf_accum_fix.cli.run import defeating_flag
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.options import SWITCH, Options, enabled
from tests.cli.processes import ROOT, RUN, environment, start

SHOW = "import os, json; print(json.dumps(dict(os.environ)))"


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return start([*RUN, *command], environment(**variables))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_the_arguments_and_the_exit_code_are_those_of_the_command(dashes: tuple[str, ...]) -> None:
    script = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = run(*dashes, sys.executable, "-c", script, "--help", "--", "--allow-foreign", "-I")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "['--help', '--', '--allow-foreign', '-I']\n"


def test_a_signal_reaches_the_command_and_ends_it_as_it_would_alone() -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9));"
        "print('ready', flush=True); time.sleep(60)"
    )
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 9)):
        command = [*RUN, sys.executable, "-c", script]
        with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(timeout=30) == code


def test_the_command_takes_the_place_of_run() -> None:
    command = [*RUN, sys.executable, "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "no_program").touch()
    (tmp_path / "train.py").touch()
    assert run("no-such-command").returncode == 127
    done = start([*RUN, "train.py", "--lr", "1"], environment(ROOT), tmp_path)
    assert done.returncode == 127 and "did you mean: hf-accum-fix run python train.py --lr 1\n" in done.stderr
    done = run(tmp_path / "no_program")
    assert done.returncode == 126 and "no_program: Permission denied" in done.stderr


def test_no_command_is_wrong_usage() -> None:
    for words in ([], ["--"], ["--allow-foreign", "a.b"]):
        done = run(*words)
        assert done.returncode == 2 and "hf-accum-fix run torchrun train.py" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--allow-foreign", "nodot"), "module.qualname"),
        (("--coupled", "NoSuch"), "got coupled=('NoSuch',) with coupled_loss='micro-batch'"),
    ],
)
def test_an_option_that_means_nothing_is_wrong_usage(words: tuple[str, ...], said: str) -> None:
    done = run(*words, "true")
    assert done.returncode == 2 and said in done.stderr


# --- the environment it hands down ------------------------------------------------------------------------------------


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


# --- interpreters that do not listen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py", "-I"),
        ("python3.11 -u -E train.py", "-E"),
        ("/usr/bin/python3 -sE train.py", "-sE"),
        ("python -W ignore -S train.py", "-S"),
        ("python -Wignore -X dev -OSm train", "-OSm"),
        ("python --check-hash-based-pycs always -I train.py", "-I"),
        ("env A=1 python -I train.py", "-I"),
        ("pypy3 -E train.py", "-E"),
        ("python train.py -I", None),
        ("python -m train -I", None),
        ("python -mIE", None),
        ("python -c print() -S", None),
        ("python -ucI", None),
        ("python -X Importtime -W S train.py", None),
        ("python - -I", None),
        ("python", None),
        ("torchrun -I train.py", None),
        ("accelerate launch train.py -S", None),
        # Only the Python that a command starts is looked at.
        ("env echo python -I", None),
        ("nice -n 10 cat python -S", None),
        ("grep -r python -I", None),
        ("torchrun train.py python -I", None),
        ("accelerate launch train.py python -I", None),
        ("nice -n 10 python -I train.py", "-I"),
        ("timeout -s KILL 10 python3 -S train.py", "-S"),
        ("env -u A B=1 nice python -E train.py", "-E"),
        ("/usr/bin/env -S python -sE", "-sE"),
        ("torchrun --nproc_per_node 2 --no-python python -I train.py", "-I"),
        ("accelerate launch --no_python python -E train.py", "-E"),
        ("torchrun --nproc_per_node 2 --no-python python train.py -I", None),
        ("", None),
    ],
)
def test_the_flags_that_defeat_it_are_found(command: str, flag: str | None) -> None:
    assert defeating_flag(command.split()) == flag


def test_such_a_python_is_not_started() -> None:
    done = run(sys.executable, "-I", "-c", "print('trained')")
    assert (done.returncode, done.stdout) == (2, "")
    assert "-I makes Python ignore PYTHONPATH" in done.stderr


# --- ``run`` against commands, paths and variables that broke it, and switches that are set to nothing --------------


@pytest.mark.slow
@pytest.mark.parametrize("words", [("",), ("--", ""), ("", "train.py")])
def test_an_empty_command_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = start([*RUN, *words], environment())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "hf-accum-fix run torchrun train.py" in done.stderr


@pytest.mark.slow
def test_a_word_that_looks_like_python_is_only_a_word() -> None:
    done = start([*RUN, "echo", "python", "-I"], environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "python -I\n", "")


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_folder_handed_down_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.pathsep.join(("src", "/one", "", "../two"))
    handed = environment_for(Options(), {"PYTHONPATH": before})["PYTHONPATH"].split(os.pathsep)
    assert handed == [BOOTSTRAP, str(tmp_path / "src"), "/one", str(tmp_path), str(tmp_path.parent / "two")]
    assert Path(BOOTSTRAP).is_absolute()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_a_variable_nested_beyond_reading_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match=VARIABLE) as refused:
        inherited_options({VARIABLE: text})
    assert len(str(refused.value)) < 400


@pytest.mark.slow
def test_run_inside_run_inside_run() -> None:
    done = start([*RUN, *RUN, *RUN, sys.executable, "-c", "import sys; print(len(sys.meta_path))"], environment())
    once = start([*RUN, sys.executable, "-c", "import sys; print(len(sys.meta_path))"], environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, once.stdout, "")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["", "  "])
def test_a_switch_set_to_nothing_is_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, value)
    assert enabled()
    done = start([*RUN, "echo", "on"], environment(HF_ACCUM_FIX=value))
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")
