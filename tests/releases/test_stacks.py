"""The oldest stack, the newest and the one between: the core, the loops, and the wheel as a user installs it.

A stack is a release with a torch of its own, named as recipes/in_release.py takes it, which makes the environments;
CI makes them beforehand. Its row of the release matrix is run there, too (.ci/run).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, environment, start
from tests.releases.test_releases import run_tests_in

sys.path.insert(0, str(ROOT / "recipes"))
import in_release

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]

OLDEST = "4.41.0@torch==2.2.2@numpy==1.26.4@accelerate==0.26.0"
OLD = "4.45.2@torch==2.2.2@numpy==1.26.4@accelerate==0.34.2"
BETWEEN = f"{in_release.NEWEST}@{in_release.TORCH}"
NEWEST = f"{in_release.NEWEST}@torch==2.15.0"

#: Compares with what the stock Trainer and loops of the newest release do, and with heads that it alone has.
OF_THE_NEWEST = [
    word
    for name in ("test_every_head_takes_the_full_batch_step", "test_every_cut")
    for word in ("--deselect", f"tests/loop/test_windows.py::{name}")
]


@pytest.mark.parametrize(
    ("stack", "tests"),
    [
        # Heads of its two ranks are no part of 4.41.0.
        pytest.param(OLDEST, ["tests/accumulation", "tests/loop/test_windows.py"], id="oldest"),
        pytest.param(OLD, ["tests/loop"], marks=pytest.mark.thorough, id="old"),
        pytest.param(NEWEST, ["tests/accumulation", "tests/loop"], marks=pytest.mark.thorough, id="newest"),
    ],
)
def test_the_core_and_the_loops(stack: str, tests: list[str]) -> None:
    run_tests_in(stack, *tests, *([] if stack == NEWEST else OF_THE_NEWEST), but=("thorough", "slow"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = start([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT], environment())
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("stack", [OLDEST, OLD, BETWEEN, NEWEST], ids=["oldest", "old", "between", "newest"])
def test_the_wheel_leaves_torch_alone_and_answers(
    stack: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, *pins = stack.split("@")
    (pin,) = (each for each in pins if each.startswith("torch=="))
    torch = in_release.made(in_release.folder_of(pin).name, [pin])
    for name in ("ROOT", "ENVIRONMENTS"):
        monkeypatch.setattr(in_release, name, tmp_path)
    wanted = [f"{wheel}[recipes]", f"transformers=={release}", *pins, *in_release.older(release, pins)]
    folder = in_release.made("fresh", wanted, shared=[torch])
    assert not [*folder.glob("lib/*/site-packages/torch*")]

    def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = start([folder / "bin" / words[0], *words[1:]], environment(), cwd=tmp_path)
        assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    where = run("python", "-c", "import hf_accum_fix, torch; print(hf_accum_fix.__file__, torch.__version__)").stdout
    assert where.startswith(str(folder)) and where.split()[1].startswith(pin.partition("==")[2])
    report = run("hf-accum-fix", "doctor", code=1).stdout
    assert report.startswith(f"transformers {release}: affected") and "untested" not in report.lower()
