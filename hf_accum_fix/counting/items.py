"""Count items, and the one number that makes plain averaging exact: ``n_mean = N / (G * W)``.

Engines average over the ``G`` micro-batches of a window and over ``W`` data-parallel ranks. With ``S`` the summed loss
of a micro-batch, ``N`` the items of the global batch:  ``1/(G W) * sum(S / n_mean) = sum(S) / N``.  Ranks with windows
of different length each use the ``G`` that their engine divides by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_accum_fix.errors import ContractError

#: Inputs whose leading dimension is the number of samples, most reliable first.
_SAMPLE_KEYS = ("labels", "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")


def sample_count(inputs: Mapping[str, Any]) -> int:
    """Number of samples in one micro-batch: the leading dimension of its most reliable input.

    Raises:
        ContractError: if no input has a leading dimension.
    """
    for key in (*(key for key in _SAMPLE_KEYS if key in inputs), *inputs):
        if has_rows(inputs[key]):
            return len(inputs[key])
    for value in inputs.values():
        if isinstance(value, Mapping) and value:
            return sample_count(value)
    raise ContractError(
        f"got the inputs {sorted(inputs)}; expected one with a leading dimension, to count samples; pass "
        "contract=LossContract(...)"
    )


def has_rows(value: Any) -> bool:
    """Whether an input can have a row for each sample."""
    return isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0)


#: The labels of a micro-batch by name, and how many axes they have; -1: not a tensor.
Labels = frozenset[tuple[str, int]]
#: Labels of question answering.
_ANSWERS = ("start_positions", "end_positions")


def labels_of(batch: Any, counted: Collection[str] | None = None) -> Labels:
    """The labels of a micro-batch, or those that are ``counted``; empty: it has none, or is no mapping."""
    if not isinstance(batch, Mapping):
        return frozenset()
    keys = [key for key in batch if ("label" in key or key in _ANSWERS if counted is None else key in counted)]
    return frozenset((key, getattr(batch[key], "ndim", -1)) for key in keys if batch[key] is not None)


def labels_in_words(labels: Labels) -> str:
    """Labels in words."""
    shapes = {-1: "a list", 0: "one number", 1: "one axis"}
    return ", ".join(f"{key!r} ({shapes.get(axes, f'{axes} axes')})" for key, axes in sorted(labels)) or "no labels"


class ZeroWeightBatch(dict[str, Any]):
    """A micro-batch that is run and counts nothing, so that a rank without samples stays in step."""


@dataclass(frozen=True)
class Items:
    """A rule that counts the items of a micro-batch from its inputs."""

    #: the inputs that hold the targets; the first is counted. Empty: the items are the samples
    keys: tuple[str, ...] = ()
    ignore_index: int | None = -100  # of a position that is no target (0 in a mask); None: every element is a target
    shift: bool = False  # the loss drops position 0 of the last axis, as causal heads do
    mask: str | None = None  # an input whose zeros are no targets either (LLaVA's attention mask up to 4.51)
    #: an input [batch, width, ...]; targets at or beyond its width are no targets (question answering clamps answers
    #: outside the text to that width and ignores it).
    width_of: str | None = None
    #: the counted input is a list with one entry per sample; the items are the rows of the entries (""), or of what
    #: they hold under this name (the boxes of an image). None: the input is a tensor.
    entry: str | None = None
    #: which of how many equal blocks of rows counts: (0, 2), chosen texts, which come before the rejected ones; (2, 3),
    #: the reference texts after both. None: all rows.
    block: tuple[int, int] | None = None
    mix: tuple[tuple[float, Items], ...] = ()  # a weighted sum of other counts (boxes, and queries without one)

    def __post_init__(self) -> None:
        if not (isinstance(self.keys, tuple) and all(isinstance(key, str) for key in self.keys)):
            raise ContractError(f"got keys={self.keys!r}; expected a tuple of inputs, such as Items(('labels',))")

    @property
    def names(self) -> tuple[str, ...]:
        """Every input that it reads."""
        of_mix = (name for _, rule in self.mix for name in rule.names)
        return tuple(name for name in (*self.keys, self.mask, self.width_of, *of_mix) if name is not None)

    @property
    def marks(self) -> bool:
        """Whether it tells targets from what is none."""
        return bool(self.keys) and (self.ignore_index is not None or self.width_of is not None)

    def has_targets(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a micro-batch has the counted input."""
        return not self.keys or isinstance(inputs, ZeroWeightBatch) or inputs.get(self.keys[0]) is not None

    def targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """Boolean tensor shaped like the counted input: which of its positions are targets.

        Raises:
            ContractError: if the counted input is missing or is no tensor.
        """
        value = inputs.get(self.keys[0])
        if not isinstance(value, Tensor):
            raise ContractError(
                f"got a micro-batch with {sorted(inputs)}, {self.keys[0]!r} as {type(value).__name__}; expected a "
                f"tensor {self.keys[0]!r}, from which the items are counted"
            )
        found = torch.ones_like(value, dtype=torch.bool) if self.ignore_index is None else value != self.ignore_index
        if self.width_of is not None:
            found = found & (value < inputs[self.width_of].shape[1])
        mask = None if self.mask is None else inputs.get(self.mask)
        # Of the source, it was as wide as the targets by chance where this rule was found.
        if isinstance(mask, Tensor) and mask.shape == found.shape:
            found = found & (mask != 0)
        # Labels of one axis are one target per sample, which is not shifted.
        if self.shift and found.ndim > 1:
            found[..., 0].fill_(False)
        if self.block is not None:
            which, blocks = self.block
            rows = len(found) // blocks
            found[: which * rows] = False
            found[(which + 1) * rows :] = False
        return found

    def count(self, inputs: Mapping[str, Any], device: torch.device | None = None) -> Tensor:
        """Items of one micro-batch: 0-dim tensor on ``device`` (default: the targets'); no device sync."""
        if self.mix:
            return torch.stack([factor * rule.count(inputs, device) for factor, rule in self.mix]).sum()
        if isinstance(inputs, ZeroWeightBatch):
            rows = 0
        elif self.entry is not None:
            rows = sum(len(each[self.entry] if self.entry else each) for each in inputs[self.keys[0]])
        elif not self.keys:
            rows = sample_count(inputs)
        else:
            found = self.targets(inputs)
            return found.sum(dtype=count_dtype(device or found.device)).to(device)
        device = device or torch.device("cpu")
        return torch.full((), rows, dtype=count_dtype(device), device=device)

    def with_target(self, inputs: Mapping[str, Any], count: Tensor | None = None) -> dict[str, Any]:
        """The inputs with one dummy target where there is none; ``count``: its items, if known.

        The mean over no item is nan, and 0 * nan is nan; with one target it is finite, its weight ``n / n_mean`` is
        still an exact zero, and every parameter is still touched. Decided on the device, without a sync.
        """
        result = dict(inputs)
        counted = result.get(self.keys[0]) if self.keys and self.entry is None else None
        if counted is None or not self.marks or counted.is_floating_point() or counted.dtype is torch.bool:
            return result
        count = self.count(inputs) if count is None else count.to(counted.device)
        target = 1 if self.ignore_index == 0 else 0
        # The first position that may be a target.
        place = self.targets({**inputs, self.keys[0]: torch.full_like(counted, target)}).flatten().byte().argmax()
        for key in self.keys:
            positions = torch.arange(result[key].numel(), device=counted.device).view_as(result[key])
            result[key] = result[key].masked_fill((positions == place) & count.logical_not(), target)
        return result

    def __str__(self) -> str:
        if self.mix:
            return " + ".join(f"{factor:.4g} x {rule}" for factor, rule in self.mix)
        if self.entry is not None:
            return f"rows of {self.entry or self.keys[0]!r}"
        if not self.keys:
            return "samples"
        words = ["shifted" if self.shift else "", f"{self.keys[0]!r}"]
        words.append("elements" if self.ignore_index is None else f"other than {self.ignore_index}")
        words.append(f"where {self.mask!r} is set" if self.mask else "")
        words.append(f"of block {self.block[0] + 1} of {self.block[1]} of the rows" if self.block else "")
        words.append(f"inside the width of {self.width_of!r}" if self.width_of else "")
        return " ".join(word for word in words if word)


#: Items of a micro-batch, 0-dim, by rule; by the place of its term where forwards have counted them.
Counts = dict[Items | int, Tensor]


def count_dtype(device: torch.device) -> torch.dtype:
    """float64, exact for every count; float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def count_by_rules(
    rules: Sequence[Items], window: Sequence[Mapping[str, Any]], device: torch.device, *, several_ranks: bool = False
) -> tuple[list[Counts], list[Tensor]]:
    """Items of each micro-batch of a window by every rule, and their sums by every rule, 0-dim; no device sync.

    A micro-batch without the counted input counts as the mean of the others.

    Raises:
        ContractError: on several ranks, if a micro-batch lacks it: failing on one rank would leave the others waiting.
    """
    each: list[Counts] = [{} for _ in window]
    totals, dtype = list[Tensor](), count_dtype(device)
    for rule in rules:
        counted = [rule.count(its, device) if several_ranks or rule.has_targets(its) else None for its in window]
        known = [count for count in counted if count is not None]
        if len(known) < len(counted):
            mean = torch.stack(known).mean() if known else torch.ones((), dtype=dtype, device=device)
            known = [mean if count is None else count for count in counted]
        for items, count in zip(each, known, strict=True):
            items[rule] = count
        totals.append(torch.stack(known).sum() if known else torch.zeros((), dtype=dtype, device=device))
    return each, totals


def as_weight(count: Tensor, dtype: torch.dtype) -> Tensor:
    """A count in the precision of a loss's weights: float64 of a loss in float64, else float32."""
    return count if dtype is torch.float64 else count.float()


def scale_mean(loss: Tensor, ratio: Tensor | float, router: Tensor | None = None) -> Tensor:
    """``(loss - router) * ratio + router``, out of place, in the loss's own precision (at least float32).

    ``ratio`` is ``n / n_mean``, ``router`` a term that is not scaled (a router loss).
    """
    if isinstance(ratio, Tensor):
        ratio = ratio.to(device=loss.device, dtype=torch.promote_types(loss.dtype, torch.float32))
    return loss * ratio if router is None else (loss - router) * ratio + router
