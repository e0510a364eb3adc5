"""The pure functions: random item counts over random cuts give the mean of the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.items import Items, mean_item_count, sample_count, scale_mean, total_items
from hf_accum_fix.errors import ContractError

counts = st.integers(0, 5_000)
sums = st.floats(-1e4, 1e4, allow_nan=False)
micro_batches = st.lists(st.tuples(counts, sums), min_size=1, max_size=12)


@given(st.lists(micro_batches, min_size=1, max_size=5))
@settings(deadline=None)
def test_plain_averaging_of_shares_is_the_mean_over_all_items(ranks: list[list[tuple[int, float]]]) -> None:
    """Each rank divides by its own window's length, as its engine does; ranks may have windows of different length."""
    total = sum(n for rank in ranks for n, _ in rank)
    summed = sum(s for rank in ranks for n, s in rank if n)
    averaged = 0.0
    for rank in ranks:
        mean = mean_item_count(torch.tensor(float(total), dtype=torch.float64), len(rank), len(ranks))
        for n, s in rank:
            by_number = torch.tensor(s if n else 0.0, dtype=torch.float64) / mean
            own_mean = torch.tensor(s / n if n else 0.0, dtype=torch.float64)
            by_ratio = scale_mean(own_mean, torch.tensor(float(n), dtype=torch.float64) / mean)
            assert by_number == pytest.approx(float(by_ratio), rel=1e-12, abs=1e-12)
            averaged += float(by_ratio) / len(rank) / len(ranks)
    # Rounding of up to sixty sums that may cancel.
    scale = sum(abs(s) for rank in ranks for _, s in rank) / max(total, 1)
    assert averaged == pytest.approx(summed / max(total, 1), rel=1e-12, abs=1e-12 * max(scale, 1.0))


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=6), st.booleans())
@settings(deadline=None)
def test_counting_does_not_depend_on_the_cut(rows: list[list[bool]], shift: bool) -> None:
    labels = [torch.tensor([5 if target else -100 for target in row]) for row in rows]
    rule = Items(("labels",), shift=shift)
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    _, apart = total_items(rule, [{"labels": row[None]} for row in labels], torch.device("cpu"))
    _, together = total_items(rule, [{"labels": padded}], torch.device("cpu"))
    assert float(apart) == float(together) == sum(sum(row[1:] if shift else row) for row in rows)


def test_a_carried_term_keeps_its_weight() -> None:
    loss = torch.tensor(5.0, dtype=torch.float64)
    carried = torch.tensor(2.0, dtype=torch.float64)
    assert float(scale_mean(loss, 0.25, carried)) == 0.25 * 3.0 + 2.0


def test_the_share_keeps_the_precision_of_the_loss_and_the_loss_itself() -> None:
    loss = torch.tensor(5.0, dtype=torch.bfloat16)
    share = scale_mean(loss, torch.tensor(0.5, dtype=torch.float64))
    assert share.dtype is torch.float32 and float(share) == 2.5 and float(loss) == 5.0


@pytest.mark.parametrize(
    ("rule", "inputs", "count"),
    [
        (Items(("labels",)), {"labels": torch.tensor([[1, -100, 2]])}, 2),
        (Items(("labels",), shift=True), {"labels": torch.tensor([[1, -100, 2]])}, 1),
        (Items(("labels",), 255), {"labels": torch.tensor([[[1, 255], [255, 255]]])}, 1),
        (Items(("labels",), None), {"labels": torch.zeros(2, 3)}, 6),
        (Items(("mask",), 0), {"mask": torch.tensor([[1, 0], [1, 1]])}, 3),
        (
            Items(("labels",), mask="attention_mask"),
            {"labels": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])},
            2,
        ),
        (Items(("start",), None, width_of="ids"), {"start": torch.tensor([0, 9, 3]), "ids": torch.zeros(3, 4)}, 2),
        (Items(), {"labels": [{"boxes": 1}, {"boxes": 2}]}, 2),
        (Items(), {"pixel_values": torch.zeros(4, 3, 2, 2)}, 4),
    ],
    ids=str,
)
def test_ways_of_counting(rule: Items, inputs: dict[str, object], count: int) -> None:
    assert float(rule.count(inputs)) == count


@pytest.mark.parametrize(
    "rule",
    [Items(("labels",)), Items(("labels",), shift=True), Items(("labels",), shift=True, mask="attention_mask")],
    ids=str,
)
def test_a_dummy_target_is_given_only_where_there_is_none(rule: Items) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    blank = {"labels": torch.full((2, 4), -100), "attention_mask": mask}
    given_one = rule.with_target(blank)
    assert float(rule.count(given_one)) == 1
    assert float(rule.count(blank)) == 0
    full = {"labels": torch.tensor([[-100, -100, 3, 4], [-100, -100, 5, -100]]), "attention_mask": mask}
    assert torch.equal(rule.with_target(full)["labels"], full["labels"])


def test_missing_targets_and_missing_samples_are_named() -> None:
    with pytest.raises(ContractError, match="labels"):
        Items(("labels",)).count({"input_ids": torch.zeros(1, 2)})
    with pytest.raises(ContractError, match="to count samples"):
        sample_count({"flag": True})
    with pytest.raises(ContractError, match="without items"):
        LossContract(Reduction.MEAN)
