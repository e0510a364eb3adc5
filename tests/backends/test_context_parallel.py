"""Samples cut over ranks by accelerate's context parallelism: the step, the log, the norm and clipping of all samples.

Its attention needs a GPU; another one takes its place (`tests.backends.sequence_parallel.OverRanks`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends import sequence_parallel as cut

#: By name: whether the model takes num_items_in_batch, and what else is asked for.
TRAININGS: dict[str, dict[str, Any]] = {
    "takes the number": {},
    "returns its own mean": {"hands_number": False},
    "clips": {"max_norm": cut.CLIPPED},
    "LoRA": {"adapt": cut.lora},
    "gradient checkpointing": {"arguments": {"gradient_checkpointing": True}, "hands_number": False},
    "few targets": {"targets": cut.ON_THE_FIRST, "hands_number": False},
    "smooths labels": {**cut.SMOOTHING, "hands_number": False},
}
CASES = {
    f"{name}, {ranks} ranks, {split[0]} x {split[1]}": (name, ranks, split)
    for name in TRAININGS
    for ranks in (2, 4)
    for split in (((1, 4), (2, 2)) if ranks == 2 else ((1, 4),))
}
#: In every CI.
SHOWN = (
    *("returns its own mean, 4 ranks, 1 x 4", "clips, 2 ranks, 2 x 2"),
    *("few targets, 2 ranks, 1 x 4", "smooths labels, 2 ranks, 2 x 2"),
)


def each(cases: list[str]) -> dict[str, Any]:
    """The step of every case by stock, the patch and the subclass."""
    found = {}
    for case in cases:
        name, ranks, split = CASES[case]
        given = TRAININGS[name]
        found[case] = [vars(cut.under_context(ranks, split, path, **given)) for path in ("stock", "apply", "trainer")]
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return cut.rows_of(request, each, lambda case: CASES[case][1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in SHOWN else pytest.mark.thorough) for each in CASES]
)
def test_every_step_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    stock, *ours = rows[case]
    for one in ours:
        # Of two float32 steps, as of FSDP2.
        assert one["error"] <= 4e-6 and one["loss"] <= 1e-6 and one["norm"] <= 4e-6, one
        assert one["report"]["exact"], one
    # Upstream counts before it cuts, and hands that to a model that takes it.
    hands = TRAININGS[CASES[case][0]].get("hands_number", True)
    assert stock["error"] <= 4e-6 if hands else stock["error"] > 0.1, stock
