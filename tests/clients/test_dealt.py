"""TRL's SFTTrainer with its windows dealt by length: it divides by the number it is handed, whatever was dealt."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_accum_fix
from hf_accum_fix.overrides.loader import DEALER
from tests.clients.sft import WAYS, sft_reference, sft_step
from tests.numerics.heads import FLOAT32_LOSS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

#: A router loss is averaged over the micro-batches, so it has another value where they are others.
EXPERTS = "mixture of experts"


@pytest.mark.parametrize("name", [name for name in WAYS if not name.startswith(EXPERTS)])
def test_dealt_windows_take_the_full_batch_step(name: str, tmp_path: Path) -> None:
    with hf_accum_fix.apply(balance_windows=True):
        step = sft_step(WAYS[name], "stock", 2, 4, tmp_path)
    assert step.error(sft_reference(WAYS[name], step.trainer, 2)) <= FLOAT32_LOSS
    dealer = step.trainer.__dict__[DEALER]
    assert dealer.real <= dealer.dealt <= dealer.as_they_come
