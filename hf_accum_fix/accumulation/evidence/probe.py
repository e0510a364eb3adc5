"""The samples that a loss is observed on: a batch whose rows tell ways of counting apart, and two parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.accumulation.evidence.forwards import RouterPair, Seen, weighed_router
from hf_accum_fix.accumulation.evidence.router_terms import router_terms
from hf_accum_fix.accumulation.evidence.rules import count_by, is_close, listed_targets, ways_of_counting
from hf_accum_fix.accumulation.window import has_rows, sample_count


def telling_batch(window: Sequence[Mapping[str, Any]], *, again: int = 0) -> tuple[dict[str, Any], bool]:
    """The micro-batch whose rows tell most ways of counting apart, and of those the one with the most targets.

    ``again``: how many places further down that order, if there are as many.

    It has at least two samples if they can be had: micro-batches of one are put together by twos; whether they were.
    """
    ordered = sorted(window, key=target_count, reverse=True)
    several: list[Mapping[str, Any]] = [inputs for inputs in ordered if sample_count(inputs) > 1]
    stacked = False
    if not several:
        pairs = [_stacked(ordered[0], other) for other in ordered[1:] or ordered]
        found = [pair for pair in pairs if pair is not None]
        several, stacked = [*found] or ordered[:1], bool(found)
    filled = list(map(with_telling_labels, several))
    ways = list(map(_ways_told_apart, filled))
    telling = sorted(range(len(filled)), key=ways.__getitem__, reverse=True)
    # One that tells nothing apart is taken only where none does.
    usable = [place for place in telling if bool(ways[place]) == bool(ways[telling[0]])]
    return filled[usable[again % len(usable)]], stacked


def _ways_told_apart(inputs: Mapping[str, Any]) -> int:
    """How many different shares of a batch its part of one row has, by all the ways of counting.

    None where it has no such part, or one of the two parts has no target.
    """
    if not _has_parts(inputs):
        return 0
    one = _rows(inputs, [_least_row(inputs)])
    counts = [(count_by(rule, one), count_by(rule, inputs)) for rule in ways_of_counting(inputs, ())]
    if counts[0][0] in (0.0, counts[0][1]):
        return 0
    return len({round(part / whole, 6) for part, whole in counts if whole})


def with_telling_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Labels that tell rules apart.

    A target is put at position 0 and at a padded position of every row of token labels, and rows of one length lose a
    target in one of them: rules that shift, that heed the attention mask, and that count samples then differ.
    """
    inputs = dict(inputs)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point() and labels.shape[1] > 1:
        labels = labels.clone()
        valid = labels.amax(dim=1)
        fill = valid >= 0
        labels[:, 0] = torch.where(fill & (labels[:, 0] < 0), valid, labels[:, 0])
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            padded = (mask == 0) & (torch.arange(labels.shape[1], device=mask.device) > 0)
            first = padded & (padded.cumsum(dim=1) == 1)
            labels = torch.where(first & fill[:, None], valid[:, None].clamp(min=0), labels)
        inputs["labels"] = _with_unequal_rows(labels)
    return inputs


def _with_unequal_rows(labels: Tensor) -> Tensor:
    """Where -100 is in use and every row has as many targets, the last row loses its last one."""
    targets = labels != -100
    per_row = targets.sum(dim=1)
    if len(labels) < 2 or bool(targets.all()) or bool((per_row != per_row[0]).any()) or int(per_row[0]) < 3:
        return labels
    labels = labels.clone()
    labels[-1, int(targets[-1].nonzero()[-1])] = -100
    return labels


def target_count(inputs: Mapping[str, Any]) -> float:
    """Targets of a micro-batch by the most telling way of counting there is."""
    return float(next(ways_of_counting(inputs, ())).count(inputs))


def label_count(inputs: Mapping[str, Any]) -> int:
    """The ``labels`` other than -100."""
    labels = inputs.get("labels")
    return int((labels != -100).sum()) if isinstance(labels, Tensor) else 0


def _stacked(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Two micro-batches of one sample as one of two, padded on the right; None where that cannot be done safely."""
    result: dict[str, Any] = {}
    for key, value in one.items():
        mate = other.get(key)
        if isinstance(value, Tensor) and isinstance(mate, Tensor):
            if value.ndim == 0 or value.ndim != mate.ndim or len(value) != 1 or len(mate) != 1:
                return None
            if value.ndim == 2 or not value.is_floating_point():
                width = max(value.shape[-1], mate.shape[-1])
                fill = -100 if "label" in key else 0
                value, mate = (F.pad(row, (0, width - row.shape[-1]), value=fill) for row in (value, mate))
            if value.shape != mate.shape:
                return None
            result[key] = torch.cat([value, mate])
        elif isinstance(value, list) and isinstance(mate, list):
            result[key] = value + mate
        elif isinstance(value, (bool, str)) or value is None:
            result[key] = value
        else:
            return None
    return result


def without_first_label(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with position 0 of its ``labels``, which a shift drops, masked."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return dict(inputs)
    labels = labels.clone()
    labels[:, 0] = -100
    return {**inputs, "labels": labels}


def parts_of(
    inputs: Mapping[str, Any], whole: Seen, configured: RouterPair, *, again: int
) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """Two parts of a batch, and whether rows were taken apart; ``again``: so many rows on.

    Where rows cannot be taken apart (one sample, image patches without a row axis), the targets are: the labels of the
    other part are masked with what the loss call ignores. The batch itself, twice: neither can be done.
    """
    if _has_parts(inputs):
        least = _least_row(inputs)
        least = (least + again) % sample_count(inputs)
        others = [row for row in range(sample_count(inputs)) if row != least]
        return _rows(inputs, [least]), _rows(inputs, others), True
    return masked_parts(inputs, whole, configured)


def pairs_of(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Two parts of a batch whose second half stands beside its first, row by row; None: it has too few rows."""
    half, odd = divmod(sample_count(inputs), 2)
    if odd or half < 2:
        return None
    rows = [*range(1, half), *range(half + 1, 2 * half)]

    def taken(rows: list[int]) -> dict[str, Any]:
        # What has a row for each pair is taken by pairs.
        each = {key: value for key, value in inputs.items() if has_rows(value) and len(value) == half}
        every = {key: value for key, value in inputs.items() if key not in each}
        return {**_rows(every, rows), **_rows(each, [row for row in rows if row < half])}

    return taken([0, half]), taken(rows)


def masked_parts(
    inputs: Mapping[str, Any], whole: Seen, configured: RouterPair
) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """The parts of a batch whose rows cannot be taken apart: the same rows, each with some of the targets."""
    labels = inputs.get("labels")
    losses = [
        whole.loss - weighed_router(coefficients, whole.router) for coefficients in router_terms(whole, configured)
    ]
    calls = [c for c in whole.calls if any(is_close(c.value, loss) for loss in losses)]
    ignored = [c.ignore_index for c in calls if c.ignore_index is not None]
    if ignored and isinstance(labels, Tensor) and labels.numel() > 1 and not labels.is_floating_point():
        order = (labels != ignored[0]).flatten().cumsum(0).view_as(labels)
        first_third = order <= (order.max() // 3).clamp(min=1)
        one, other = (torch.where(keep, labels, ignored[0]) for keep in (first_third, ~first_third))
        return {**inputs, "labels": one}, {**inputs, "labels": other}, False
    return inputs, inputs, False


def _has_parts(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch can be taken apart: more than one sample, and every input has as many rows."""
    rows = sample_count(inputs)
    return rows > 1 and all(_is_plain(value) and len(value) == rows for value in _sized(inputs))


def _is_plain(value: Any) -> bool:
    """Whether a value can be indexed by rows: sparse and nested tensors cannot."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)


def _sized(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """The values that may have a row for each sample, also inside nested inputs."""
    for value in inputs.values():
        if isinstance(value, Mapping):
            yield from _sized(value)
        elif has_rows(value):
            yield value


def _least_row(inputs: Mapping[str, Any]) -> int:
    """The row with the fewest labels, but some; the first where there are none.

    Of targets listed for each sample, the row whose number of them is furthest from the others'.
    """
    listed = next(listed_targets(inputs), None)
    if listed is not None:
        targets = [count_by(listed, _rows(inputs, [row])) for row in range(sample_count(inputs))]
        return max(range(len(targets)), key=lambda row: abs(targets[row] - sum(targets) / len(targets)))
    labels = inputs.get("labels")
    rows = labels if isinstance(labels, Tensor) else [None] * sample_count(inputs)
    counts = [label_count({"labels": row}) for row in rows]
    return min(range(len(counts)), key=lambda row: (counts[row] == 0, counts[row]))


def _rows(inputs: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    def taken(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _rows(value, rows)
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
            return value[rows]
        return type(value)(value[row] for row in rows) if type(value) in (list, tuple) else value

    return {key: taken(value) for key, value in inputs.items()}
