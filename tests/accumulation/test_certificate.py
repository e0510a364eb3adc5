"""What a certificate takes of micro-batches that are no fetched ones, wherever their tensors are."""

from __future__ import annotations

import pytest
import torch

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.accumulation.contract import LossContract, Reduction
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
