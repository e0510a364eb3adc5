"""Whole accumulation windows for training loops that count micro-batches, not windows.

Such a loop steps after every ``G`` micro-batches. If an epoch ends inside a window, the loop leaks the rest into the
next epoch's first step, or never fetches it. So a short last window is filled up with placeholders, which are skipped
and never run. They come first, because engines reduce over ranks in the last backward of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import wrapt

from hf_accum_fix.counting.items import has_rows

OfWindow: TypeAlias = Callable[[list[Any]], Any] | None


class PlaceholderBatch(dict[str, Any]):
    """A micro-batch without samples: the tensors of another one, with no row."""

    @classmethod
    def like(cls, inputs: Any) -> PlaceholderBatch:
        """The placeholder for ``inputs``; an empty one if they are no mapping."""
        if not isinstance(inputs, Mapping):
            return cls()
        return cls({key: value[:0] if has_rows(value) else value for key, value in inputs.items()})


def is_placeholder(inputs: Any) -> bool:
    """Whether a batch is a placeholder, or what a custom step has made of one."""
    rows = [len(each) for each in inputs.values() if has_rows(each)] if isinstance(inputs, Mapping) else []
    return isinstance(inputs, PlaceholderBatch) or (bool(rows) and not any(rows))


class WholeWindows(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A train dataloader whose every epoch is whole windows of ``steps`` micro-batches; otherwise unchanged.

    Args:
        loader: the dataloader.
        steps: G, micro-batches of a window.
        opened: called with the micro-batches of each window before the first of them is yielded, for loops
            that fetch one by one; None: not called.
        merged: what to run of the micro-batches of a window, at most as many; None: them.
    """

    def __init__(self, loader: Any, steps: int, opened: OfWindow = None, merged: OfWindow = None) -> None:
        super().__init__(loader)
        self._self_steps = steps
        self._self_opened = opened
        self._self_merged = merged
        self._self_skipped = self._self_passes = 0

    def around(self, loader: Any) -> WholeWindows:
        """The same for another loader: the rest of a resumed epoch."""
        return WholeWindows(loader, self._self_steps, self._self_opened, self._self_merged)

    def past(self, batches: int) -> WholeWindows:
        """Begin the next epoch after the windows of so many micro-batches of a stream, perhaps in a later pass."""
        self._self_skipped = batches // self._self_steps
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the pass of a stream, which upstream counts anew where it resumes."""
        if hasattr(self.__wrapped__, "set_epoch"):
            self.__wrapped__.set_epoch(epoch + self._self_passes)

    def __len__(self) -> int:
        """Micro-batches of an epoch, with the placeholders.

        Raises:
            TypeError: if the loader has no length.
        """
        return -(-len(self.__wrapped__) // self._self_steps) * self._self_steps

    def __iter__(self) -> Iterator[Any]:
        """One epoch; a window is fetched whole before its first micro-batch is yielded."""
        windows, skipped, self._self_skipped = self._windows(), self._self_skipped, 0
        passed = sum(1 for _ in islice(windows, skipped))
        if 0 < passed < skipped:
            self._self_passes, skipped = divmod(skipped, passed)
            self.set_epoch(0)
            windows = islice(self._windows(), skipped, None)
        for window in windows:
            window = window if self._self_merged is None else self._self_merged(window)
            if self._self_opened is not None:
                self._self_opened(window)
            yield from [PlaceholderBatch.like(window[-1])] * (self._self_steps - len(window))
            yield from window

    def _windows(self) -> Iterator[list[Any]]:
        batches = iter(self.__wrapped__)
        while window := list(islice(batches, self._self_steps)):
            yield window
