"""Whole accumulation windows for training loops that count micro-batches, not windows.

Such a loop steps after every ``G`` micro-batches it is handed. Where an epoch ends inside a window it leaks the rest
into the next epoch's first step, or never fetches it. Handed epochs that are whole windows it steps where it should: a
short last window is filled up with blanks, which are stepped over and never run. They stand in front, because engines
reduce over ranks in the last backward of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import wrapt

from hf_accum_fix.accumulation.window import has_rows


class Blank(dict[str, Any]):
    """A micro-batch without samples: the tensors of another one, with no row."""

    @classmethod
    def like(cls, inputs: Any) -> Blank:
        """The blank that stands beside ``inputs``; an empty one where they are no mapping."""
        if not isinstance(inputs, Mapping):
            return cls()
        return cls({key: value[:0] if has_rows(value) else value for key, value in inputs.items()})


def without_blanks(window: Sequence[Any]) -> list[Any]:
    """The micro-batches of a window that are to be run."""
    return [inputs for inputs in window if not isinstance(inputs, Blank)]


class WholeWindows(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A train dataloader as it is, except that every epoch of it is whole windows of ``steps`` micro-batches.

    Args:
        loader: the dataloader.
        steps: G, micro-batches of a window.
        opened: called with the micro-batches of each window before the first of them is handed out, for loops
            that fetch one by one; None: not called.
    """

    def __init__(self, loader: Any, steps: int, opened: Callable[[list[Any]], object] | None = None) -> None:
        super().__init__(loader)
        self._self_steps = steps
        self._self_opened = opened

    def around(self, loader: Any) -> WholeWindows:
        """The same for another loader: what is left of an epoch that is resumed."""
        return WholeWindows(loader, self._self_steps, self._self_opened)

    def __len__(self) -> int:
        """Micro-batches of an epoch, blanks among them.

        Raises:
            TypeError: if the loader knows no length, as the loader itself would.
        """
        return -(-len(self.__wrapped__) // self._self_steps) * self._self_steps

    def __iter__(self) -> Iterator[Any]:
        """One epoch; a window is fetched whole before its first micro-batch is handed out."""
        batches = iter(self.__wrapped__)
        while window := list(islice(batches, self._self_steps)):
            if self._self_opened is not None:
                self._self_opened(window)
            yield from [Blank.like(window[-1])] * (self._self_steps - len(window))
            yield from window
