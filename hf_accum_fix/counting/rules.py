"""Rules that count the items of a batch from its inputs, to predict the divisor of a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_accum_fix.counting.items import Items

#: Blocks of rows that a term may count alone: chosen texts before rejected ones (ORPO, CPO), reference texts (TPO).
BLOCKS = ((0, 2), (2, 3))


def is_near(a: float, b: float | None, tolerance: float = 1e-6) -> bool:
    """Whether two numbers agree within a relative ``tolerance``."""
    return b is not None and abs(a - b) <= tolerance * max(abs(a), abs(b))


#: Whether two counts agree, within the rounding of sums of weights.
_is_close = partial(is_near, tolerance=1e-5)


def matching_rules(
    counts: Sequence[float],
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int] = (-100,),
    named: Sequence[Items] = (),
) -> dict[Items, float]:
    """The rules in proportion to these counts in every batch, and the ratio of count to rule.

    ``named``: rules known from elsewhere in the loss, which come first; ``ignored`` as for `ways_of_counting`.
    """
    in_proportion: dict[Items, float] = {}
    rules = dict.fromkeys((*named, *ways_of_counting(batches[0], ignored)))
    for rule in (each for each in rules if all(map(each.has_targets, batches))):
        by_rule = [float(rule.count(batch)) for batch in batches]
        ratio = counts[0] / by_rule[0] if by_rule[0] else 0.0
        # Heads with lists of targets divide by at least 1.
        least = float(rule.entry is not None)
        pairs = zip(counts, by_rule, strict=True)
        if ratio and all(_is_close(n, max(ratio * m, least)) or n == m == 0.0 for n, m in pairs):
            in_proportion[rule] = ratio
    found = {rule: 1.0 for rule, ratio in in_proportion.items() if _is_close(ratio, 1.0)}
    if batches[1] is not batches[2] and all(counts):
        # Elements: several for each item, or several items for each; every rule is in proportion to one number alone.
        whole = {rule for rule, n in in_proportion.items() if any(_is_close(each, round(each)) for each in (n, 1 / n))}
        found |= {rule: ratio for rule, ratio in in_proportion.items() if rule in whole and rule not in found}
    mixed = None if found else _mixed(counts, batches)
    return found if mixed is None else {mixed: 1.0}


def _mixed(counts: Sequence[float], batches: Sequence[Mapping[str, Any]]) -> Items | None:
    """A rule for weighted classes over listed targets: one weight per target, one per query without a target."""
    listed = next(listed_targets(batches[0]), None)
    if listed is None:
        return None
    rules = (listed, Items())
    counted = [[float(rule.count(batch)) for rule in rules] for batch in batches[:2]]
    if abs(np.linalg.det(counted)) < 1e-9:
        return None
    weights = np.linalg.solve(counted, counts[:2])
    # Rounded, so that ranks agree.
    return Items(mix=tuple((float(f"{each:.6g}"), rule) for each, rule in zip(weights, rules, strict=True)))


def is_padded(rule: Items, batch: Mapping[str, Any]) -> bool:
    """Whether a rule counts every position of a text, and padding is among them."""
    if not rule.keys or rule.ignore_index is not None or rule.width_of is not None or rule.entry is not None:
        return False
    mask = batch.get("attention_mask")
    return isinstance(mask, Tensor) and not batch[rule.keys[0]].is_floating_point() and not bool(mask.all())


def targets_padding(rule: Items, batch: Mapping[str, Any], decoder_pad: int | None = None) -> bool:
    """Whether padding is among the targets of a text: labels that were copied from padded tokens.

    ``decoder_pad``: the token that pads a decoder's texts, which have no mask; None: there is no decoder.
    """
    tokens, mask, labels = (batch.get(key) for key in ("input_ids", "attention_mask", next(iter(rule.keys), "")))
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        return False
    if decoder_pad is not None:
        return bool((rule.targets(batch)[:, -1] & (labels[:, -1] == decoder_pad)).any())
    if not (isinstance(tokens, Tensor) and isinstance(mask, Tensor)):
        return False
    alike = tokens.shape == mask.shape == labels.shape
    return alike and bool((rule.targets(batch) & (mask == 0) & (labels == tokens)).any())


def ways_of_counting(inputs: Mapping[str, Any], ignored: Sequence[int] = (-100,)) -> Iterator[Items]:
    """Every rule that fits the inputs, most likely first; ``ignored``: labels that are no targets."""
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim > 0}
    tokens = tensors.get("input_ids")
    if "start_positions" in tensors and tokens is not None and tokens.ndim > 1 and tokens.shape[1] in ignored:
        yield Items(("start_positions", "end_positions"), ignore_index=None, width_of="input_ids")
    labels = [key for key, value in tensors.items() if "label" in key or has_ignored(value)]
    labels.sort(key=lambda key: (key != "shift_labels", key != "labels"))
    attention = tensors.get("attention_mask")
    for key in labels:
        value = tensors[key]
        if value.is_floating_point():
            yield Items((key,), ignore_index=None)
            continue
        shifts = (True, False) if value.ndim == 2 and key != "shift_labels" else (False,)
        masked = value.ndim == 2 and attention is not None and attention.shape == value.shape
        masks = (None, "attention_mask") if masked else (None,)
        yield from (Items((key,), each, shift, mask) for each in ignored for mask in masks for shift in shifts)
    yield from listed_targets(inputs)
    zeros = [key for key in tensors if "mask" in key and (_is_mask(tensors[key]) or "observed" in key)]
    target_masks = sorted((key for key in zeros if "attention" not in key), key=lambda key: "past" in key)
    attended = [key for key in zeros if "attention" in key]
    yield from (Items((key,), 0) for key in target_masks)
    yield Items()
    yield from (Items((key,), 0) for key in attended)
    yield from (Items((key,), 0, shift=True) for key in (*target_masks, *attended) if tensors[key].ndim == 2)
    integers = [key for key, value in tensors.items() if value.ndim > 1 and not value.is_floating_point()]
    yield from (Items((key,), None) for key in integers)
    for key in (*(each for each in labels if each != "shift_labels"), *target_masks):
        for block in BLOCKS if key in integers and tensors[key].ndim == 2 else ():
            ignores = () if len(tensors[key]) % block[1] else ignored if key in labels else (0,)
            yield from (Items((key,), each, shift, block=block) for each in ignores for shift in (True, False))


def listed_targets(inputs: Mapping[str, Any]) -> Iterator[Items]:
    """Rules for targets listed by sample: the boxes of an image, or its masks."""
    for key, value in inputs.items():
        if "label" not in key or not isinstance(value, (list, tuple)) or not value:
            continue
        if isinstance(value[0], Tensor):
            yield Items((key,), None, entry="")
        elif isinstance(value[0], Mapping):
            yield from (Items((key,), None, entry=each) for each in value[0] if "label" in each)


def has_ignored(value: Tensor) -> bool:
    """Whether an input has -100, as labels do."""
    return not value.is_floating_point() and value.dtype is not torch.bool and bool((value == -100).any())


def _is_mask(value: Tensor) -> bool:
    return not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
