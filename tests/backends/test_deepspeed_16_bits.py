"""DeepSpeed without ZeRO in bfloat16 steps the optimizer on zeros as it makes its states, before the first window."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from hf_accum_fix import observations
from tests.backends import trajectory
from tests.backends.rows import IN_BF16, deepspeed
from tests.backends.trajectory import HEADS, UNCLIPPED, furthest, reference
from tests.ranks import on_ranks

BF16 = deepspeed(0, "-bf16", reports_norm=False, **IN_BF16)


def losses(path: str) -> tuple[list[float], dict[str, Any]]:
    """As logged in three steps; the weights in float32 are its optimizer's alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory, "gathered", lambda model, _: dict(model.module.named_parameters()))
        found = trajectory.train(HEADS["llama"], BF16, (1, 4), path, UNCLIPPED, Path(tempfile.mkdtemp()))
    return found.losses, dict(observations.recorded()[-1])


@pytest.mark.deepspeed
@pytest.mark.parametrize("path", ["apply", "trainer"])
def test_it_trains(path: str) -> None:
    ours, report = on_ranks(losses, path)[0]
    wanted = reference(HEADS["llama"], UNCLIPPED, BF16).losses
    # bfloat16 has 8 bits; the second and the third step begin from other weights.
    assert furthest(ours, wanted) < 2e-2, (ours, wanted)
    assert report["reached_optimizer"].startswith(("yes", "not checked")), report
