"""Several tasks in one training, each with its own loss and items.

A global batch of S samples, S_k of them of task k, is trained by

    L = sum over tasks of  S_k / S * (mean over the N_k items of task k)

for every split; the plain mean over micro-batches of equal size is the same. With one denominator per task (see
`items`),  n_mean = N_k / (G W) * S / S_k,  plain averaging is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The labels of a micro-batch by name, and how many axes they have; -1: not a tensor. Empty: no labels, which is no
#: task where there are others, since missing labels may be a fault.
Task = frozenset[tuple[str, int]]

#: Labels of question answering.
_LABELS = ("start_positions", "end_positions")


def task_of(batch: Any) -> Task:
    """The task of a micro-batch, by names and axes of its labels."""
    if not isinstance(batch, Mapping):
        return frozenset()
    labels = ((key, value) for key, value in batch.items() if "label" in key or key in _LABELS)
    return frozenset((key, getattr(value, "ndim", -1)) for key, value in labels if value is not None)


def describe(task: Task) -> str:
    """A task in words."""
    shapes = {-1: "a list", 0: "one number", 1: "one axis"}
    return ", ".join(f"{key!r} ({shapes.get(axes, f'{axes} axes')})" for key, axes in sorted(task)) or "no labels"
