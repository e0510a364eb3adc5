"""What a first user sees while recipes/in_release.py makes an environment, by a pip that only pretends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.recipes import RECIPES, load

#: Says what pip says, takes half a second, and fails where a requirement is named so.
PIP = """#!/bin/sh
echo "Collecting $6"
echo "  Downloading wheel-of-$6"
echo "  Successfully uninstalled setuptools"
sleep 0.5
echo "ERROR: pip's dependency resolver does not currently take into account all the packages" >&2
case "$*" in *broken*) echo "ERROR: No matching distribution found for broken" >&2; exit 7;; esac
echo "Successfully installed $6"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("in_release")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / ".environments")
    pip = tmp_path / "lender" / module.BIN / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    return module


def test_the_set_up_says_each_step_and_hides_what_pip_says(
    recipe: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = recipe.made("5.4.0", ["torch==2"], ["transformers==5.4.0", "peft"], shared=[tmp_path / "lender"])
    assert folder == tmp_path / ".environments" / "5.4.0" and (folder / "complete").exists()
    shown, errors = capfd.readouterr()
    lines = shown.splitlines()
    assert [line.partition(" (")[0] for line in lines[:3]] == [
        ".environments/5.4.0, step 1 of 3: a virtual environment",
        ".environments/5.4.0, step 2 of 3: pip install torch==2",
        ".environments/5.4.0, step 3 of 3: pip install transformers==5.4.0 peft",
    ]
    assert lines[3].startswith(".environments/5.4.0 is made, in ") and len(lines) == 4
    assert "resolver" not in shown + errors and "ERROR" not in shown + errors
    log = (folder / "pip.log").read_text()
    assert log.count("dependency resolver") == 2 and "Successfully installed torch==2" in log
    again = recipe.made("5.4.0", ["torch==2"], shared=[tmp_path / "lender"])
    assert again == folder and capfd.readouterr() == ("", "")


def test_a_long_step_says_every_minute_how_long_and_what(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "MINUTE", 0.2)
    recipe.made("5.4.0", ["torch==2"], shared=[tmp_path / "lender"])
    lines = capfd.readouterr().out.splitlines()
    told = [line for line in lines if line.endswith("Downloading wheel-of-torch==2")]
    assert told and all(line.lstrip()[0].isdigit() and " s" in line for line in told)


def test_a_failed_install_ends_with_pips_reason_and_the_log(
    recipe: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        recipe.made("5.4.0", ["broken==1"], ["never"], shared=[tmp_path / "lender"])
    folder = tmp_path / ".environments" / "5.4.0"
    assert not (folder / "complete").exists()
    message = str(ended.value)
    assert "pip install broken==1" in message and "exit code 7" in message
    assert "No matching distribution found for broken" in message
    assert str(folder / "pip.log") in message and (folder / "pip.log").exists()
    assert "never" not in capfd.readouterr().out


def test_a_torch_of_its_own_is_shared_by_the_releases_beside_it(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, tuple[Sequence[Sequence[str]], list[str]]] = {}

    def remember(name: str, *installs: Sequence[str], shared: Sequence[Path] = ()) -> Path:
        made[name] = installs, [each.name for each in shared]
        return recipe.ENVIRONMENTS / name

    monkeypatch.setattr(recipe, "made", remember)
    for release in ("4.41.0", "4.45.2"):
        recipe.environment(f"{release}@torch==2.2.2@numpy==1.26.4")
    recipe.environment("4.42.0")
    assert made["torch-2.2.2"] == ((["torch==2.2.2"],), [])
    for release in ("4.41.0", "4.45.2"):
        ((wanted,), shared) = made[f"{release}@torch-2.2.2@numpy-1.26.4"]
        assert shared == ["torch-2.2.2", recipe.NEWEST]
        assert {"torch==2.2.2", "numpy==1.26.4", "pyarrow<20", f"transformers=={release}"} <= {*wanted}
    assert made["4.42.0"][1] == [recipe.NEWEST] and "peft<0.14" in made["4.42.0"][0][0]
    assert len(made) == 5


def test_the_matrix_keeps_the_log_of_an_environment_that_failed(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "in_release", recipe)
    matrix = load("release_matrix", known_as="release_matrix_of_failures")
    monkeypatch.setattr(
        recipe, "environment", lambda release: recipe.made(release, ["broken==1"], shared=[tmp_path / "lender"])
    )
    why = matrix.run_release("5.4.0", tmp_path)
    log = tmp_path / ".environments" / "5.4.0" / "pip.log"
    assert why is not None and str(log) in why and log.exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_what_a_killed_call_has_begun_is_made_again_once_its_pip_has_ended(
    recipe: ModuleType, tmp_path: Path, end: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip outlives the recipe, and would go on to write into what the next call makes."""
    lender = tmp_path / "lender"
    pip = lender / recipe.BIN / "python"
    pip.write_text('#!/bin/sh\nsleep 1.5\ntouch "${4%/*}/by-$$"\n')
    calls = f"""
import signal, sys; from pathlib import Path; sys.path.insert(0, {str(RECIPES)!r}); import in_release
# A shell's background jobs ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
in_release.ROOT, in_release.ENVIRONMENTS = Path({str(tmp_path)!r}), Path({str(recipe.ENVIRONMENTS)!r})
in_release.made("5.4.0", ["torch==2"], shared=[Path({str(lender)!r})])
"""
    with subprocess.Popen([sys.executable, "-c", calls], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        while not (line := killed.stdout.readline()).endswith(b"pip install torch==2\n"):
            assert line
        # Until pip runs.
        while not Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text():
            time.sleep(0.01)
        killed.send_signal(end)
    folder = recipe.ENVIRONMENTS / "5.4.0"
    assert not (folder / "complete").exists()
    begun = time.monotonic()
    recipe.made("5.4.0", ["torch==2"], shared=[lender])
    assert time.monotonic() - begun > 2
    time.sleep(1.5)
    assert (folder / "complete").exists() and len([*folder.glob("*/by-*")]) == 1


@pytest.mark.slow
def test_a_failed_set_up_is_no_traceback(tmp_path: Path) -> None:
    """In a copy of the recipe, with a pip that can't reach an index."""
    (tmp_path / "recipes").mkdir()
    script = tmp_path / "recipes" / "in_release.py"
    script.write_text((RECIPES / "in_release.py").read_text())
    environment = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    command = [sys.executable, str(script), "5.23.0", "--", "python", "-V"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "pip.log" in done.stderr
    assert done.stdout.splitlines()[1].endswith("pip install torch==2.13.0")
