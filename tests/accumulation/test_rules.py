"""Which way of counting predicts what a loss divides by: the batch, what was seen in it and its two parts, the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_accum_fix.counting.items import Items, count_by_rules, sample_count, scale_mean
from hf_accum_fix.counting.rules import is_padded, matching_rules, targets_padding, ways_of_counting
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import LossContract, Reduction

Batch = Mapping[str, Any]
#: Four samples of five labels: 4, 1, 3 and 0 targets, the first at position 0 in two of them.
LABELS = torch.full((4, 5), -100)
for row, places in enumerate(([0, 1, 2, 4], [1], [0, 3, 4], [])):
    LABELS[row, places] = 7
ATTENTION = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
TEXT: Batch = {"input_ids": torch.ones(4, 5, dtype=torch.long), "attention_mask": ATTENTION, "labels": LABELS}
CLASSES: Batch = {"input_ids": TEXT["input_ids"], "labels": torch.tensor([0, 2, -100, 1])}
VALUES: Batch = {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4, 3)}
SPANS: Batch = {
    "input_ids": TEXT["input_ids"],
    "start_positions": torch.tensor([0, 9, 3, 2]),
    "end_positions": torch.tensor([1, 9, 4, 4]),
}
BOXES: Batch = {
    "pixel_values": torch.zeros(4, 3),
    "labels": [{"class_labels": torch.ones(n), "boxes": torch.ones(n, 4)} for n in (3, 1, 0, 2)],
}
MASKS: Batch = {
    "pixel_values": torch.zeros(4, 3),
    "mask_labels": [torch.ones(n, 2, 2) for n in (3, 1, 1, 2)],
    "class_labels": [torch.ones(n) for n in (3, 1, 1, 2)],
}
MASKED: Batch = {"x": torch.zeros(4, 3), "loss_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])}
SERIES: Batch = {
    "past_values": torch.zeros(4, 3),
    "past_observed_mask": torch.ones(4, 3),
    "future_values": torch.zeros(4, 2),
    "future_observed_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
}
SHIFTED: Batch = {**TEXT, "shift_labels": LABELS.roll(1, 1)}


def rows_of(batch: Batch, rows: list[int]) -> dict[str, Any]:
    return {
        key: value[rows] if isinstance(value, Tensor) else [value[row] for row in rows] for key, value in batch.items()
    }


def parts_of(batch: Batch) -> list[Batch]:
    """The batch, its second sample, and the rest."""
    return [batch, rows_of(batch, [1]), rows_of(batch, [0, 2, 3])]


def targets(batch: Batch) -> float:
    return float((batch["labels"] != -100).sum())


def shifted(batch: Batch) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


def attended(batch: Batch) -> float:
    return float(((batch["labels"] != -100) & (batch["attention_mask"] != 0))[:, 1:].sum())


def samples(batch: Batch) -> float:
    return float(len(next(iter(batch.values()))))


def boxes(batch: Batch) -> float:
    return float(max(sum(len(each["class_labels"]) for each in batch["labels"]), 1))


def listed(batch: Batch) -> float:
    return float(sum(map(len, batch["mask_labels"])))


TABLE: dict[str, tuple[Batch, Callable[[Batch], float], str, float]] = {
    "tokens, shifted": (TEXT, shifted, "shifted 'labels' other than -100", 1),
    "tokens": (TEXT, targets, "'labels' other than -100", 1),
    "half of the tokens": (TEXT, lambda b: targets(b) / 2, "'labels' other than -100", 0.5),
    "tokens that are attended to": (
        TEXT,
        attended,
        "shifted 'labels' other than -100 where 'attention_mask' is set",
        1,
    ),
    "samples of tokens": (TEXT, samples, "samples", 1),
    "attended positions": (TEXT, lambda b: float(b["attention_mask"].sum()), "'attention_mask' other than 0", 1),
    "all positions": (TEXT, lambda b: float(b["labels"].numel()), "'input_ids' elements", 1),
    "labels that are shifted already": (
        SHIFTED,
        lambda b: float((b["shift_labels"] != -100).sum()),
        "'shift_labels' other than -100",
        1,
    ),
    "classes": (CLASSES, targets, "'labels' other than -100", 1),
    "classes, all samples": (CLASSES, samples, "samples", 1),
    "elements": (VALUES, lambda b: float(b["labels"].numel()), "'labels' elements", 1),
    "samples of values": (VALUES, samples, "samples", 1),
    "logits of two numbers for each": (VALUES, lambda b: 2.0 * b["labels"].numel(), "'labels' elements", 2),
    "boxes, at least one": (BOXES, boxes, "rows of 'class_labels'", 1),
    "boxes of three groups, at least one": (
        BOXES,
        lambda b: max(3 * float(sum(len(each["class_labels"]) for each in b["labels"])), 1.0),
        "rows of 'class_labels'",
        3,
    ),
    "images": (BOXES, samples, "samples", 1),
    "boxes, and queries without one": (
        BOXES,
        lambda b: sum(len(each["class_labels"]) * 0.9 + 1.2 for each in b["labels"]),
        "0.9 x rows of 'class_labels' + 1.2 x samples",
        1,
    ),
    "masks": (MASKS, listed, "rows of 'mask_labels'", 1),
    "points of masks": (MASKS, lambda b: 64 * listed(b), "rows of 'mask_labels'", 64),
    "a mask of one's own": (MASKED, lambda b: float(b["loss_mask"].sum()), "'loss_mask' other than 0", 1),
    "values to come that were observed": (
        SERIES,
        lambda b: float(b["future_observed_mask"].sum()),
        "'future_observed_mask' other than 0",
        1,
    ),
}


@pytest.mark.parametrize(("batch", "counted", "rule", "times"), TABLE.values(), ids=TABLE)
def test_the_first_rule_that_counts_as_the_loss(
    batch: Batch, counted: Callable[[Batch], float], rule: str, times: float
) -> None:
    parts = parts_of(batch)
    found = matching_rules([counted(each) for each in parts], parts)
    assert found, "no rule"
    assert next((str(each), ratio) for each, ratio in found.items()) == (rule, times)
    for each in parts:
        for by_rule, ratio in found.items():
            assert ratio * float(by_rule.count(each)) == pytest.approx(counted(each), rel=1e-6) or counted(each) == 1


NONE: dict[str, tuple[Batch, Callable[[Batch], float]]] = {
    "class weights": (TEXT, lambda b: 0.37 * targets(b) + 0.21 * shifted(b)),
    "two fifths of the targets": (TEXT, lambda b: 0.4 * targets(b)),
    "samples with two targets": (TEXT, lambda b: float(((b["labels"] != -100).sum(1) > 1).sum())),
    "a constant": (TEXT, lambda b: 3.0),
    "another label": (TEXT, lambda b: float((b["labels"] == 7).sum()) + 1),
}


@pytest.mark.parametrize(("batch", "counted"), NONE.values(), ids=NONE)
def test_what_no_rule_counts(batch: Batch, counted: Callable[[Batch], float]) -> None:
    parts = parts_of(batch)
    assert matching_rules([counted(each) for each in parts], parts) == {}


def test_an_index_beside_the_usual_one() -> None:
    labels = LABELS.masked_fill(LABELS == -100, 255)
    parts = parts_of({**TEXT, "labels": labels})
    counts = [float((each["labels"] != 255).sum()) for each in parts]
    assert matching_rules(counts, parts) == {}
    (rule, ratio), *_ = matching_rules(counts, parts, (255, -100)).items()
    assert (str(rule), ratio) == ("'labels' other than 255", 1.0)


def test_spans_inside_of_the_text() -> None:
    """Question answering ignores answers outside of the text by the width of that."""
    parts = parts_of(SPANS)
    found = matching_rules([3.0, 0.0, 3.0], parts, (5, -100))
    assert {str(rule): ratio for rule, ratio in found.items()} == {
        "'start_positions' elements inside the width of 'input_ids'": 1.0
    }


def test_the_rule_whose_targets_the_loss_has_kept_comes_first() -> None:
    """Without a target at position 0, and nothing masked, several count the same."""
    labels = torch.tensor([[-100, 7, 7], [-100, 7, -100]])
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": labels}
    parts = [batch, rows_of(batch, [0]), rows_of(batch, [1])]
    counts = [3.0, 2.0, 1.0]
    named = Items(("labels",))
    assert [*matching_rules(counts, parts)] == [Items(("labels",), shift=True), named]
    assert [*matching_rules(counts, parts, named=[named])] == [named, Items(("labels",), shift=True)]


@pytest.mark.parametrize(("rounding", "fits"), [(0.0, True), (1e-6, True), (-5e-6, True), (1e-4, False)])
def test_sums_of_weights_may_round(rounding: float, fits: bool) -> None:
    parts = parts_of(TEXT)
    rules = matching_rules([targets(each) * (1 + rounding) for each in parts], parts)
    assert bool(rules) == fits


@pytest.mark.parametrize("none", [0.0, 1.0])
def test_a_part_without_listed_targets_counts_none_or_at_least_one(none: float) -> None:
    images = [{"class_labels": torch.ones(n)} for n in (2, 0)]
    batches: list[Batch] = [{"labels": each} for each in (images, images[:1], images[1:])]
    assert matching_rules([2.0, 2.0, none], batches) == {Items(("labels",), None, entry="class_labels"): 1.0}


def test_a_batch_beside_itself_shows_no_proportion() -> None:
    """Its parts are one another: every count that doubles would be so many times every other."""
    one = rows_of(TEXT, [0])
    beside = {key: torch.cat([value, value]) for key, value in one.items()}
    assert matching_rules([10.0, 5.0, 5.0], [beside, one, one]) == {
        Items(("input_ids",), None): 1.0,
        Items(("attention_mask",), None): 1.0,
        Items(("labels",), None): 1.0,
    }
    assert matching_rules([12.0, 6.0, 6.0], [beside, one, one]) == {}


@pytest.mark.parametrize(
    ("rule", "batch", "padded"),
    [
        (Items(("input_ids",), None), TEXT, True),
        (Items(("labels",)), TEXT, False),
        (Items(("attention_mask",), 0), TEXT, False),
        (Items(("labels",), None), VALUES, False),
        (Items(), TEXT, False),
        (Items(("labels",), None, entry="class_labels"), BOXES, False),
        (Items(("start_positions",), None, width_of="input_ids"), SPANS, False),
    ],
    ids=str,
)
def test_rules_that_count_padding(rule: Items, batch: Batch, padded: bool) -> None:
    assert is_padded(rule, batch) == padded


def test_labels_that_are_shifted_already_are_not_shifted_again() -> None:
    shifts = [str(rule) for rule in ways_of_counting(SHIFTED) if rule.keys == ("shift_labels",) and rule.shift]
    assert shifts == []


# --- the pure functions: random item counts over random cuts give the mean of the whole batch -----------------------

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
        mean = torch.tensor(max(total, 1.0), dtype=torch.float64) / (len(rank) * len(ranks))
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
    _, [apart] = count_by_rules([rule], [{"labels": row[None]} for row in labels], torch.device("cpu"))
    _, [together] = count_by_rules([rule], [{"labels": padded}], torch.device("cpu"))
    assert float(apart) == float(together) == sum(sum(row[1:] if shift else row) for row in rows)


def test_the_share_keeps_the_precision_of_the_loss_and_the_loss_itself() -> None:
    loss = torch.tensor(5.0, dtype=torch.bfloat16)
    share = scale_mean(loss, torch.tensor(0.5, dtype=torch.float64))
    assert share.dtype is torch.float32 and float(share) == 2.5 and float(loss) == 5.0


@pytest.mark.parametrize(
    "rule",
    [
        Items(("labels",)),
        Items(("labels",), shift=True),
        Items(("labels",), shift=True, mask="attention_mask"),
        Items(("labels",), block=(1, 2)),
    ],
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
    with pytest.raises(ContractError, match="with items=None"):
        LossContract(Reduction.MEAN)


@pytest.mark.parametrize("keys", ["labels", ["labels"], (0,)])
def test_what_names_no_inputs_is_refused(keys: Any) -> None:
    with pytest.raises(ContractError, match=r"expected a tuple of inputs, such as Items\(\('labels',\)\)"):
        Items(keys)
    for reduction in (Reduction.NUMBER, Reduction.SUM):
        with pytest.raises(ContractError, match=r"with items=.*; expected items=Items"):
            LossContract(reduction, keys)


@pytest.mark.parametrize(("pad", "padded", "found"), [(0, 0, True), (0, -100, False), (None, 0, False)])
def test_padding_among_a_decoders_targets(pad: int | None, padded: int, found: bool) -> None:
    batch = {"input_ids": torch.ones(2, 6), "labels": torch.tensor([[5, 1, padded], [5, 6, 1]])}
    assert targets_padding(Items(("labels",)), batch, pad) == found
