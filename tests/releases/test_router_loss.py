"""The router's loss of the full batch on other releases, whose modeling files wrote it in other words.

    4.46, 4.51   one row a token and expert; DBRX takes logits
    4.57         DBRX takes probabilities; some families cut a slice by the index of the device
    5.4          the families' files are alike; NLLB pools, too

On all of them the form is recognised by what the function does. The environments are made by recipes/in_release.py.
"""

from __future__ import annotations

import pytest

from tests.releases.test_releases import run_tests_in

MIXTRALS = ("Mixtral", "Mixtral, LoRA", "Mixtral, checkpointing", "Mixtral, no mask", "Qwen2-MoE", "Jamba")
OLDER = (*MIXTRALS, "OLMoE", "GraniteMoE")

#: The families of each. Left out on 5.4.0: OLMoE's config refuses its own default, GraniteMoE returns no router logits.
FAMILIES = {
    "4.46.1": OLDER,
    "4.51.3": (*OLDER, "Qwen3-MoE"),
    "4.57.6": (*OLDER, "Qwen3-MoE", "GPT-OSS", "DBRX"),
    "5.4.0": (*MIXTRALS, "Qwen3-MoE", "GPT-OSS"),
}

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "release", [pytest.param(each, marks=[pytest.mark.thorough] * (each != "5.4.0")) for each in FAMILIES]
)
def test_exact_is_the_full_batch(release: str) -> None:
    test = "tests/router/test_conventions.py::test_exact_is_the_full_batch_for_every_cut"
    cases = [f"{test}[{family}-4]" for family in FAMILIES[release]]
    out = run_tests_in(release, *cases)
    assert f"{len(cases)} passed" in out
