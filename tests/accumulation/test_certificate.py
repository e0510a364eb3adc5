"""What a certificate takes of micro-batches that are no fetched ones, wherever their tensors are."""

from __future__ import annotations

import pytest
import torch

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.accumulation.contract import Composition, LossContract, Reduction
from hf_accum_fix.accumulation.loss_calls import LossCall
from hf_accum_fix.accumulation.micro_batch import weigh
from hf_accum_fix.accumulation.share import Cut, Share
from hf_accum_fix.accumulation.window import Items

SAMPLES, LABELS = Items(), Items(("labels",))
BY_HAND = LossContract(Reduction.MEAN, LABELS, alternatives=(LABELS, SAMPLES))


@pytest.mark.parametrize(("second", "broken"), [([[1, 2], [3, 4]], False), ([[1, -100], [3, 4]], True)])
def test_ways_of_counting_that_differ_are_seen(second: list[list[int]], broken: bool) -> None:
    certificate = Certificate(BY_HAND)
    for labels in ([[1, 2], [3, 4]], second):
        certificate.note_inputs({"labels": torch.tensor(labels)}, torch.device("cpu"))
    found = certificate.broken()
    assert found is not None and bool(found) is broken


def test_labels_on_a_device_are_counted_beside_samples() -> None:
    """The number of samples is known to the host; both are held where counts are."""
    certificate = Certificate(BY_HAND)
    certificate.note_inputs({"labels": torch.ones(2, 3, dtype=torch.long, device="meta")}, torch.device("meta"))
    found = certificate.broken()
    assert found is not None and found.device.type == "meta"


@pytest.mark.parametrize(("is_corrected", "share", "broken"), [(True, 5 / 34, False), (False, 36 / 34, True)])
def test_what_is_not_corrected_is_weighed_by_its_rule(is_corrected: bool, share: float, broken: bool) -> None:
    """36 items by the rule, 5 by the loss call: by the 5 the window's gradient would be a seventh of its scale."""
    contract = LossContract(Reduction.MEAN, LABELS, made_of=Composition((1.0,)))
    loss, mean = torch.tensor(2.0, dtype=torch.float64), torch.tensor(34.0)
    call = LossCall("mean", loss, torch.tensor(5.0), torch.tensor(5.0), weighted=False, ignore_index=None)
    certificate = Certificate(contract)
    cut = Cut(mean, mean, 1, 2, is_corrected=is_corrected)
    weighed, seen = weigh(contract, loss, [call], {LABELS: torch.tensor(36.0)}, cut, Share({}, None, None), certificate)
    found = certificate.broken()
    assert float(weighed) == pytest.approx(2 * share) and seen is not None and float(seen) == 5
    assert found is not None and bool(found) is broken
