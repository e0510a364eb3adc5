"""A head on a device and in a precision: its step by the Trainer, beside the full batch's in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from tests.numerics.heads import Batch, Head, Sample
from tests.numerics.parity import Step, cut, reference_step, take_step

#: Cuts of eight samples.
SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
#: A cut may be as far off as twice the full batch in the same precision; float32 sums differ by this much anyway.
FLOORS, FLOAT32_SUMS = 2.0, 1e-6
#: Large, so that a step is not rounded to the digits of float32 parameters; a power of two, which rounds nothing.
RATE = 2.0**10


def in_float32(head: Head, device: str = "cpu") -> Head:
    """Weights and inputs in float32; for a forward by hand, on the device."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, torch.float32 if value.is_floating_point() else value.dtype)

    def collated(samples: Sequence[Sample]) -> Batch:
        return tree_map(moved, head.batch(samples))

    return replace(head, build=lambda: head.build().float().to(device), collate=collated)


def in_float64(head: Head) -> Head:
    """The same rounded weights, on the CPU, in float64."""
    return replace(head, build=lambda: head.build().float().double())


def by_trainer(head: Head, device: str, split: tuple[int, int], path: str, output: Path, **arguments: Any) -> Step:
    """A step of the Trainer in float32, or in the mixed precision that the arguments say."""
    given = {"learning_rate": RATE, "use_cpu": device == "cpu", **arguments}
    step = take_step(in_float32(head), head.samples, *split, path, output, **given)
    return replace(step, change={name: each / RATE for name, each in step.change.items()})


def full_batch(head: Head, device: str, split: tuple[int, int], autocast: torch.dtype | None = None) -> Step:
    """The whole batch in one forward in the precision of the training: what this precision can do."""
    with torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False):
        return reference_step(in_float32(head, device), cut(head.samples, split[0]))


def exact(head: Head, split: tuple[int, int]) -> Step:
    # A test may allow one kernel alone, which has no float64.
    with sdpa_kernel(SDPBackend.MATH):
        return reference_step(in_float64(head), cut(head.samples, split[0]))


def assert_every_cut(
    head: Head, device: str, output: Path, *, autocast: torch.dtype | None = None,
    splits: Sequence[tuple[int, int]] = SPLITS, **arguments: Any,
) -> None:  # fmt: skip
    """Every cut is as near to float64 as the full batch in the same precision."""
    for split in splits:
        wanted = exact(head, split)
        tolerance = max(FLOORS * full_batch(head, device, split, autocast).error(wanted), FLOAT32_SUMS)
        step = by_trainer(head, device, split, "apply", output, **arguments)
        assert step.error(wanted) <= tolerance, (head.name, split, step.error(wanted), tolerance)
        assert abs(step.loss / wanted.loss - 1) <= tolerance, (head.name, split, step.loss, wanted.loss)
