"""Micro-batches of several kinds in one training: tasks by turns, each with a loss and items of its own.

A global batch of S samples, S_k of them of kind k, is trained by

    L = sum over kinds of  S_k / S * (mean over the N_k items of kind k),

whatever the cut; micro-batches of equal size, one by one, are trained so by the plain mean. With the one denominator
of a kind (see `window`),  n_mean = N_k / (G W) * S / S_k,  plain averaging is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The labels of a micro-batch by name, and how many axes they have; -1: they are no tensor. Empty: it has none, and is
#: no kind of its own beside others: what left its labels out may be a fault.
Task = frozenset[tuple[str, int]]

#: Labels by another name, as heads for question answering have them.
_LABELS = ("start_positions", "end_positions")


def task_of(batch: Any) -> Task:
    """The kind of a micro-batch, which its names and axes tell without reading it."""
    if not isinstance(batch, Mapping):
        return frozenset()
    labels = ((key, value) for key, value in batch.items() if "label" in key or key in _LABELS)
    return frozenset((key, getattr(value, "ndim", -1)) for key, value in labels if value is not None)


def describe(kind: Task) -> str:
    """A kind, for people."""
    shapes = {-1: "a list", 0: "one number", 1: "one axis"}
    return ", ".join(f"{key!r} ({shapes.get(axes, f'{axes} axes')})" for key, axes in sorted(kind)) or "no labels"
