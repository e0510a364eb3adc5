"""The oldest stack and the newest: the core and the loops.

A stack is a release with a torch of its own, named as recipes/in_release.py takes it, which makes the environments;
CI makes them beforehand. Its row of the release matrix is run there, too (.ci/run).
"""

from __future__ import annotations

import sys

import pytest

from tests.cli.processes import ROOT
from tests.releases.test_releases import run_tests_in

sys.path.insert(0, str(ROOT / "recipes"))
import in_release

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]

OLDEST = "4.41.0@torch==2.2.2@numpy==1.26.4@accelerate==0.26.0"
OLD = "4.45.2@torch==2.2.2@numpy==1.26.4@accelerate==0.34.2"
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
