"""The LLaVA tests and the sweep on other releases, each in an environment of its own that shares the installed torch.

Adding a release is adding it to RELEASES. The environments are made by recipes/in_release.py; the first time takes
minutes, so these tests are run by ``pytest -m releases``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ELSEWHERE

ROOT = Path(__file__).parents[2]
OLDER = ("4.45.2", "4.48.3", "4.49.0")
RELEASES = (pytest.param("4.48.3", marks=pytest.mark.thorough), "4.49.0")

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]


def run_in(release: str, *command: str) -> str:
    runner = [sys.executable, str(ROOT / "recipes" / "in_release.py"), release, "--"]
    done = subprocess.run([*runner, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_tests_in(release: str, *words: str, but: tuple[str, ...] = ("thorough",)) -> str:
    """Tests that need no other environment, of every mark but these; by one process, as others may run beside it."""
    marks = " and ".join(f"not {mark}" for mark in (*but, *ELSEWHERE))
    pytest_ = ("python", "-m", "pytest", "-q", "-n", "0", "-m", marks, "-p", "no:cacheprovider")
    return run_in(release, *pytest_, *words)


@pytest.mark.parametrize("release", (pytest.param("4.49.0", marks=pytest.mark.thorough), "5.4.0"))
def test_verify_tells_what_the_release_does(release: str) -> None:
    """LLaVA G times on 4.49.0; 1/G under a right log on 5.4.0; eval_loss."""
    run_tests_in(release, "tests/verify/test_verify.py", "tests/verify/test_eval_loss.py")


@pytest.mark.parametrize("release", ("4.49.0", *(pytest.param(f"{r}+", marks=pytest.mark.thorough) for r in OLDER)))
def test_data_and_hand_written_loops(release: str) -> None:
    """Streams that wrap, repeated samples, resumed epochs; with a "+" the slow ones, and the loop on two ranks."""
    words, but = ("tests/data", "tests/loop/test_two_ranks.py"), ("thorough",)
    run_tests_in(release.removesuffix("+"), *words, but=but if release.endswith("+") else (*but, "slow"))


@pytest.mark.parametrize("release", ("4.41.0", pytest.param("5.4.0", marks=pytest.mark.thorough)))
def test_trainers_of_other_libraries(release: str) -> None:
    """What is special about each, half a minute of processor time."""
    run_tests_in(release, "tests/clients/test_shapes.py", but=("thorough", "slow"))


@pytest.mark.parametrize("release", RELEASES)
def test_the_control_half(release: str) -> None:
    """Fingerprints and signatures of the release are those that the tables hold."""
    run_tests_in(release, "tests/upstream")


@pytest.mark.thorough
@pytest.mark.parametrize("release", ("4.49.0", "5.0.0"))
def test_the_patch_after_whatever_comes_first(release: str) -> None:
    run_tests_in(release, "tests/test_orders.py")


@pytest.mark.parametrize("release", RELEASES)
def test_the_sweep_shows_both_errors_and_fixes_both(release: str, tmp_path: Path) -> None:
    script = ["recipes/llava_sweep.py", "--steps", "1", "--total-batch", "16", "--splits", "8x1,1x8"]
    output = tmp_path / "sweep"
    launch = ["accelerate", "launch", "--cpu", "--num_processes", "2", *script]
    run_in(release, *launch, "--output", str(output))
    cells = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    initial = {(cell["mode"], cell["per_device"]): cell["losses"][0] for cell in cells}
    spread = {mode: initial[mode, 1] / initial[mode, 8] for mode in ("stock", "hotfix", "apply", "trainer")}
    if release == "4.49.0":
        assert spread["stock"] == pytest.approx(8 * spread["hotfix"], rel=1e-5)
    assert abs(spread["hotfix"] - 1) > 0.01
    assert spread["apply"] == pytest.approx(1, rel=1e-6) and spread["trainer"] == pytest.approx(1, rel=1e-6)


#: Heads that every release knows and runs in float64; what is no head's runs as a whole.
EVERYWHERE = "(llama or bert or t5 or no-kwargs or drops-kwargs or declares-false or uses or told) and not empty"
ONE_RANK = ("tests/balancing/test_dealing.py", "tests/balancing/test_trainings.py")


#: Every release makes its dataloader in a way of its own; CI looks at the first and the newest of them.
LATER = [pytest.param(release, marks=pytest.mark.thorough) for release in ("4.46.1", "4.49.0")]


@pytest.mark.parametrize("release", ("4.41.0", *LATER, pytest.param("5.4.0", marks=pytest.mark.thorough)))
def test_steps_trajectories_and_resumption(release: str) -> None:
    chosen = f"test_dealing or trajectory or resumed or dispatched or kept or (full_batch_step and {EVERYWHERE})"
    run_tests_in(release, "-k", chosen, *ONE_RANK)


@pytest.mark.thorough
@pytest.mark.parametrize("release", ("4.46.1", "4.49.0", "5.4.0"))
def test_two_ranks(release: str) -> None:
    run_tests_in(release, "tests/balancing/test_two_ranks.py")


MIXTRALS = ("Mixtral", "Qwen2-MoE", "Jamba")
OLDER = (*MIXTRALS, "OLMoE", "GraniteMoE")

#: The families of each. Left out on 5.4.0: OLMoE's config refuses its own default, GraniteMoE returns no router logits.
FAMILIES = {
    "4.46.1": OLDER,
    "4.51.3": (*OLDER, "Qwen3-MoE"),
    "4.57.6": (*OLDER, "Qwen3-MoE", "GPT-OSS", "DBRX"),
    "5.4.0": (*MIXTRALS, "Qwen3-MoE", "GPT-OSS"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("release", FAMILIES)
def test_exact_is_the_full_batch(release: str) -> None:
    test = "tests/router/test_conventions.py::test_exact_is_the_full_batch_for_every_cut"
    cases = [f"{test}[{family}-4]" for family in FAMILIES[release]]
    out = run_tests_in(release, *cases, but=())
    assert f"{len(cases)} passed" in out
