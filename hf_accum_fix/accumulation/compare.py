"""What is known of a training before its loss is learnt: its facts, and looks at a batch and at its two parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_accum_fix.accumulation.join import Split
from hf_accum_fix.accumulation.look import Look
from hf_accum_fix.accumulation.rules import is_near

#: Relative tolerance of two values computed alike, by bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}


@dataclass(frozen=True)
class Setting:
    """Facts about a training that are known before its loss is observed; "the number" is num_items_in_batch.

    Attributes:
        handed: which forwards get the number: "all", "none", or one more ("once"), to see whether it divides the loss.
        hands_number: the model or the compute_loss_func cannot do without it, and gets it in training.
        custom: a custom ``compute_loss`` makes the loss.
        func: a compute_loss_func makes it.
        own: G and W, as far as the code that computes a custom loss names them, those above 1.
        own_steps: G alone.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products are less precise than float32.
        decoder_pad: as for `rules.targets_padding`.
        has_z_loss: the model's loss has a mean over all positions, a router's loss by convention.
        has_stock: a Trainer hands its number on, so that what cannot be read may stay as it is there.
        doubt: why it is not exact, whatever is observed; empty: there is no reason.
        is_cut: the ranks that hold a sample's parts run each forward together, of one micro-batch as it was fetched.
    """

    handed: str = "none"
    hands_number: bool = False
    custom: bool = False
    func: bool = False
    own: frozenset[int] = frozenset()
    own_steps: frozenset[int] = frozenset()
    world_size: int = 1
    upstream_number: float | None = None
    rounded: bool = False
    has_z_loss: bool = False
    decoder_pad: int | None = None
    has_stock: bool = False
    is_cut: bool = False
    doubt: str = ""


@dataclass(frozen=True)
class Comparison:
    """Looks at the three batches of a split, the whole first.

    Attributes:
        window: the micro-batches of this rank.
        by_number: the model would divide by the number, if it got it.
    """

    looks: Sequence[Look]
    split: Split
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    by_number: bool = False

    @property
    def whole(self) -> Look:
        """The look at the batch."""
        return self.looks[0]

    @property
    def batches(self) -> list[Mapping[str, Any]]:
        """The batch and its parts."""
        return [each.batch for each in self.looks]

    @cached_property
    def ignored(self) -> list[int]:
        """The labels that are no targets."""
        found = (each.ignored for each in (*self.whole.terms, *self.whole.inside))
        return list(dict.fromkeys([*(each for each in found if each is not None), -100]))

    @property
    def rounding(self) -> float:
        """Relative, of the loss's values."""
        return 2e-2 if self.setting.rounded else _TOLERANCE.get(self.whole.dtype.itemsize, 2e-2)

    @property
    def tolerance(self) -> float:
        """Relative tolerance of the loss's values; random numbers differ between a batch and its parts."""
        return math.inf if self.whole.drew or not self.split.apart else self.rounding

    def are_numbers(self, values: Sequence[float]) -> bool:
        """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
        numbers = [each.number for each in self.looks]
        if None in numbers:
            return False
        # A model in 16 bits rounds it.
        tolerance = 1e-2 if self.setting.rounded or self.whole.dtype.itemsize < 4 else 1e-6
        times = [value / (number or 1) for value, number in zip(values, numbers, strict=True)]
        return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)
