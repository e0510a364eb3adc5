"""The samples that a loss is observed on: how micro-batches are joined, and that the parts hold every sample once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accum_fix.learning.join import can_divide, join, splits

Batch = Mapping[str, Any]


def tokens(*targets: int, width: int = 5, first: int = 0) -> dict[str, Any]:
    """A sample for each: so many targets, from the right; every sample has ids of its own."""
    labels = torch.full((len(targets), width), -100)
    for row, count in enumerate(targets):
        labels[row, width - count :] = 7
    ids = torch.arange(first, first + len(targets))[:, None].expand(-1, width).clone()
    return {"input_ids": ids, "labels": labels}


def attended(*lengths: int) -> dict[str, Any]:
    """As `tokens`, with padding on the right of each sample."""
    batch = tokens(*lengths, width=max(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {**batch, "labels": batch["labels"].flip(1), "attention_mask": mask}


def images(*counts: int) -> dict[str, Any]:
    labels = [{"class_labels": torch.arange(count)} for count in counts]
    return {"pixel_values": torch.arange(len(counts))[:, None] * 1.0, "labels": labels}


def ids(batch: Batch) -> list[int]:
    """Which samples a batch holds."""
    value: Tensor = batch["input_ids"] if "input_ids" in batch else batch["pixel_values"]
    return [int(each) for each in value.flatten(1)[:, 0]]


#: Joined micro-batches, or halves of the only one, as whole=part+part; then rows alone, as far as they run.
SPLITS: dict[str, tuple[Sequence[Batch], str]] = {
    "rows of the only micro-batch": ([tokens(3, 1, 2)], "012=0+12 012=0+12 012=2+01 012=0+12 012012=012+012"),
    "the first row alone is one with a target": (
        [tokens(0, 3, 2)],
        "012=0+12 012=1+02 012=2+01 012=0+12 012012=012+012",
    ),
    "what has no target is not joined": (
        [tokens(0, 0), tokens(2, 1, first=2)],
        "23=2+3 23=2+3 23=3+2 23=2+3 2323=23+23",
    ),
    "two micro-batches, in blocks where each has pairs": (
        [tokens(1, 2, 3, 4), tokens(1, 2, 1, 1, first=4)],
        "01234567=0123+4567 01452367=0123+4567 0123=0+123 0123=3+012 "
        "0123=01+23 0123=23+01 0123=0+123 01230123=0123+0123",
    ),
    "triples, whose second and last third belong to the first": (
        [tokens(1, 2, 3, 4, 5, 5)],
        "012345=012+345 012345=03+1245 012345=024+135 012345=0+12345 012345=5+01234 012345=01+2345 "
        "012345=45+0123 012345=012+345 012345=345+012 012345=0+12345 012345012345=012345+012345",
    ),
    "several micro-batches of one sample": (
        [tokens(3), tokens(1, width=3, first=1), tokens(2, first=2), tokens(2, first=3), tokens(1, first=4)],
        "01=0+1 0143=0+143 0143=3+014 0143=01+43 0143=43+01 00=0+0",
    ),
    "one sample": ([tokens(3)], "00=0+0"),
    "images": ([images(2, 2, 5)], "012=0+12 012=0+12 012=2+01 012=0+12 012012=012+012"),
}


@pytest.mark.parametrize(("window", "expected"), SPLITS.values(), ids=SPLITS)
def test_the_samples_of_every_split(window: Sequence[Batch], expected: str) -> None:
    found = [split for split in splits(window) if split.apart]
    whole, one, other = ([digits(split[at]) for split in found] for at in range(3))
    assert [f"{w}={a}+{b}" for w, a, b in zip(whole, one, other, strict=True)] == expected.split()
    # A batch beside itself shows no coupling.
    assert [split.shows_coupling for split in found] == [True] * (len(found) - 1) + [False]


def digits(batch: Batch) -> str:
    return "".join(map(str, ids(batch)))


@pytest.mark.parametrize("window", [window for window, _ in SPLITS.values()], ids=SPLITS)
def test_in_the_end_every_micro_batch_as_it_is(window: Sequence[Batch]) -> None:
    together, *alone = [split for split in splits(window) if not split.apart]
    assert not any(split.shows_coupling for split in (together, *alone))
    assert all(any(batch is each for each in window) for batch in together[:3])
    assert {tuple(map(id, split[:3])) for split in alone} == {(id(each),) * 3 for each in window}


@pytest.mark.parametrize("window", [window for window, _ in SPLITS.values()], ids=SPLITS)
def test_every_sample_of_the_whole_is_in_one_part(window: Sequence[Batch]) -> None:
    for whole, one, other, *_ in (split for split in splits(window) if split.apart):
        assert sorted(ids(whole)) == sorted(ids(one) + ids(other))
        for batch in (whole, one, other):
            for place, sample in enumerate(ids(batch)):
                [(source, row)] = [(each, ids(each).index(sample)) for each in window if sample in ids(each)]
                assert _targets(batch, place) == _targets(source, row)


def _targets(batch: Batch, row: int) -> int:
    label = batch["labels"][row]
    return len(label["class_labels"]) if isinstance(label, Mapping) else int((label != -100).sum())


def test_micro_batches_of_different_width_are_padded() -> None:
    (both, one, other, *_), *_ = splits([tokens(3, width=6), tokens(1, width=4, first=1)])
    assert both["labels"].shape == (2, 6) and both["labels"][1].tolist() == [-100, -100, -100, 7, -100, -100]
    assert both["input_ids"][1].tolist() == [1, 1, 1, 1, 0, 0]
    assert one["labels"].shape == (1, 6) and other["labels"].shape == (1, 4)


@pytest.mark.parametrize(
    "beside",
    [
        {"extra": torch.zeros(3)},
        {"graph": torch.eye(2).to_sparse()},
        {"ragged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    ],
    ids=["other rows", "sparse", "nested"],
)
def test_inputs_that_have_no_row_for_each_sample_are_only_doubled(beside: dict[str, Any]) -> None:
    batch = {**tokens(3, 1), **beside}
    [(twice, *parts)] = [split[:3] for split in splits([batch]) if split.apart]
    assert parts == [batch, batch] and ids(twice) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.tensor(3.0), [3.0, 3.0]),
        ("text", ["text", "text"]),
        ((1, 2), [(1,), (2,)]),
        ([[1], [2]], [[[1]], [[2]]]),
        ({"inner": torch.tensor([1, 2])}, [{"inner": [1]}, {"inner": [2]}]),
    ],
    ids=["number", "word", "tuple", "list", "nested"],
)
def test_what_a_part_holds_of_each_value(value: Any, rows: list[Any]) -> None:
    (_, one, other, *_), *_ = splits([{**tokens(3, 1), "value": value}])
    assert [_plain(each["value"]) for each in (one, other)] == rows


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def test_inputs_with_a_row_for_each_pair_are_taken_by_pairs() -> None:
    batch = {**tokens(1, 2, 3, 4), "reward": torch.tensor([10, 20])}
    (whole, one, other, *_), *_ = splits([batch])
    assert [ids(each) for each in (whole, one, other)] == [[0, 1, 2, 3], [0, 2], [1, 3]]
    assert [each["reward"].tolist() for each in (whole, one, other)] == [[10, 20], [10], [20]]


def test_position_ids_of_three_axes_have_their_samples_second() -> None:
    positions = torch.arange(5).expand(3, 1, 5)
    (twice, *_), *_ = splits([{**tokens(3), "position_ids": positions}])
    assert twice["position_ids"].shape == (3, 2, 5) and twice["labels"].shape == (2, 5)


def test_three_samples_are_not_taken_for_the_three_axes_of_their_positions() -> None:
    positions = torch.arange(5).expand(3, 3, 5)
    assert not can_divide({**tokens(3, 4, 5), "position_ids": positions})
    assert can_divide({**tokens(3, 4, 5), "position_ids": positions[0]})


def test_targets_of_another_sequence_stay_as_wide_as_they_are() -> None:
    """The source and the targets of two rows may be as wide as one another by chance (T5)."""
    batch = {**attended(2, 4), "labels": torch.tensor([[7, 7, 7, 7], [7, 7, -100, -100]])}
    narrowed = [split.one for split in splits([batch]) if split.group]
    assert [each["labels"].shape[1] for each in narrowed] == [4, 4] and narrowed[0]["input_ids"].shape[1] == 2


def test_micro_batches_are_joined_on_the_side_where_they_are_padded() -> None:
    left = {key: value.flip(1) for key, value in attended(2, 4).items()}
    [joined] = [split.whole for split in splits([left, attended(3, 3)]) if split.blocks == 1]
    mask = joined["attention_mask"]
    assert len(mask) == 4 and bool(mask[:, -1].all()) and not bool(mask[:, 0].all())


@pytest.mark.parametrize(
    ("batch", "widths"),
    [
        ({"forget": attended(2, 4), "retain": attended(3, 5)}, {"forget": 2, "retain": 3}),
        (
            {**attended(2, 4), "input_ids_other": torch.ones(2, 4), "attention_mask_other": torch.ones(2, 4).long()},
            {"input_ids": 2, "input_ids_other": 4},
        ),
        ({**attended(2, 4), "other_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}, {"input_ids": 2, "other_ids": 4}),
        (
            {
                **attended(2, 4),
                "labels": torch.tensor([[7, 7, -100], [7, 7, 7]]),
                "decoder_input_ids": torch.tensor([[1, 0, 0], [1, 2, 3]]),
            },
            {"input_ids": 2, "labels": 2, "decoder_input_ids": 2},
        ),
    ],
    ids=["nested", "a-second-text", "a-second-text-without-a-mask", "a-decoder"],
)
def test_each_text_is_as_narrow_as_its_own_tokens(batch: dict[str, Any], widths: dict[str, int]) -> None:
    [one, *_] = [split.one for split in splits([batch], has_decoder="decoder_input_ids" in batch) if split.group]
    flat = {key: value["input_ids"] if isinstance(value, Mapping) else value for key, value in one.items()}
    assert {key: flat[key].shape[1] for key in widths} == widths


def test_groups_are_as_narrow_as_their_own_tokens() -> None:
    """What adds up as wide as its batch may not where it is narrower."""
    [half, *_] = [split for split in splits([attended(2, 2, 4, 4)]) if split.group == 2]
    assert (half.one["input_ids"].shape[1], half.other["input_ids"].shape[1]) == (2, 4) and half.pads


def test_texts_are_joined_with_those_of_another_width() -> None:
    """Without a mask only that shows whether padding enters the loss."""
    (whole, one, other, *_), *_ = splits([tokens(3, 1, 2, 4), tokens(4, 1, 2, 2), tokens(2, 1, 2, 3, width=4)])
    assert len(whole["labels"]) == 8 and {one["labels"].shape[1], other["labels"].shape[1]} == {4, 5}


def test_frames_are_joined_with_those_of_another_length() -> None:
    (_, one, other, *_), *_ = splits([{"x": torch.ones(1, n, 2), "n": torch.ones(1)} for n in (3, 5, 3)])
    assert {one["x"].shape[1], other["x"].shape[1]} == {3, 5}


def test_graphs_are_numbered_on() -> None:
    """PyG's index of each node's graph, and the first node of each; what is no such index stays as it is."""
    one = {"x": torch.ones(3, 2), "batch": torch.tensor([0, 0, 1]), "ptr": torch.tensor([0, 2, 3])}
    other = {"x": torch.ones(2, 2), "batch": torch.tensor([0, 0]), "ptr": torch.tensor([0, 2])}
    joined = join(one, other)
    edges = {"edge_index": torch.tensor([[0, 1, 1], [1, 0, 1]])}
    with_edges = join({**one, **edges}, {**other, **edges})
    assert with_edges is not None and with_edges["edge_index"].tolist() == [[0, 1, 1, 3, 4, 4], [1, 0, 1, 4, 3, 4]]
    assert join({**one, **edges}, {**other, **edges}, 2) is None and join(edges, edges) is None
    assert joined is not None and joined["x"].shape == (5, 2)
    assert joined["batch"].tolist() == [0, 0, 1, 2, 2] and joined["ptr"].tolist() == [0, 2, 3, 5]
    assert not [split for split in splits([one]) if split.group or (split.apart and split.are_distinct)]
    plates = join(
        {"x": torch.ones(2, 2), "batch": torch.tensor([1, 0])}, {"x": torch.ones(1, 2), "batch": torch.tensor([1])}
    )
    assert plates is not None and plates["batch"].tolist() == [1, 0, 1]
