"""Samples cut over ranks by DeepSpeed's Ulysses: the step, the log, the norm and clipping of the global batch."""

from __future__ import annotations

from typing import Any

import pytest

from hf_accum_fix.engines import sample_shards
from tests.backends import sequence_parallel as cut
from tests.backends.trajectory import attempted
from tests.ranks import RankFailedError, on_ranks

STAGES, SPLITS = (0, 1, 2, 3), ((1, 1), (1, 4), (1, 8), (2, 1), (2, 4), (2, 8))
#: In every run; the others in the thorough one.
SHOWN = ("2 ranks, ZeRO 2, 1 x 8", "2 ranks, ZeRO 3, 2 x 4", "4 ranks, ZeRO 2, 1 x 4")


CASES = {
    f"{ranks} ranks, ZeRO {stage}, {split[0]} x {split[1]}": (ranks, stage, split)
    for ranks in (2, 4)
    for stage in STAGES
    for split in SPLITS
}


def row(case: str) -> list[dict[str, Any]]:
    """Every step of a case, or what it raised."""
    ranks, stage, split = CASES[case]
    found = []
    for path, max_norm, targets in (
        ("apply", cut.UNCLIPPED, cut.RAGGED),
        ("apply", cut.CLIPPED, cut.RAGGED),
        ("apply", cut.UNCLIPPED, cut.ON_THE_FIRST),
        ("apply", cut.UNCLIPPED, cut.ON_THE_SECOND),
        ("trainer", cut.UNCLIPPED, cut.RAGGED),
        # On four ranks some end, and the others wait for them.
        *((("stock", cut.UNCLIPPED, cut.RAGGED),) if ranks == cut.CUT else ()),
    ):
        step = attempted(cut.under_ulysses, stage, ranks, split, path, max_norm, targets)
        found.append({"path": path, **(step if isinstance(step, dict) else vars(step))})
    return found


def each(cases: list[str]) -> dict[str, Any]:
    return {case: row(case) for case in cases}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return cut.rows_of(request, each, lambda case: CASES[case][0])


@pytest.mark.deepspeed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in SHOWN else pytest.mark.thorough) for each in CASES]
)
def test_every_step_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    stage = CASES[case][1]
    ours = [each for each in rows[case] if each["path"] != "stock"]
    assert len(ours) == 5
    assert not [each for each in ours if "raised" in each], case
    for each in ours:
        assert each["error"] <= 4e-6 and each["loss"] <= 1e-6, each
        assert each["norm"] is None if stage == 0 else each["norm"] <= 4e-6, each
        assert each["report"]["exact"] and each["report"]["reached_optimizer"].startswith("yes, "), each
    for each in (each for each in rows[case] if each["path"] == "stock"):
        # A mean of means, which stage 3 divides by all ranks and the others by those that share no sample.
        if stage == 3 and CASES[case][2][1] == 1:
            assert each["error"] <= 4e-6, each
        else:
            assert each["error"] > (0.3 if stage == 3 else 0.9), each


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["4 ranks, ZeRO 2, 1 x 4"])
def test_stock_ends_where_ranks_hold_other_samples_too(case: str) -> None:
    ranks, stage, split = CASES[case]
    with pytest.raises(RankFailedError, match="is not part of group"):
        on_ranks(cut.under_ulysses, stage, ranks, split, "stock", ranks=ranks, timeout=120)


def unmeasured(case: str) -> tuple[cut.Cut, cut.Cut]:
    """A training whose engine cannot be measured, and stock's."""
    ranks, stage, split = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_shards, "measured_divisor", lambda *_: 1 / 0)
        ours = cut.under_ulysses(stage, ranks, split, "apply")
    return ours, cut.under_ulysses(stage, ranks, split, "stock")


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["2 ranks, ZeRO 2, 1 x 8"])
def test_an_engine_that_cannot_be_measured_trains_as_stock_and_says_so(case: str) -> None:
    ours, stock = on_ranks(unmeasured, case, ranks=2, timeout=120)[0]
    assert not ours.report["exact"]
    assert (ours.error, ours.loss) == pytest.approx((stock.error, stock.loss), rel=1e-4)
