"""The base of the monitors that are read over the ranks. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from hf_accum_fix.monitor.alarms import Alarm

if TYPE_CHECKING:
    from torch import Tensor

    from hf_accum_fix.monitor.ranks import Ranks

R = TypeVar("R")


class Gathered(Generic[R]):
    """A monitor whose reading is made of one row of numbers from each rank."""

    _ranks: Ranks

    def row(self) -> Tensor:
        """This rank's numbers since the last reading: [numbers], float64 on the CPU, as many on every rank.

        One device sync at most, and no collective.
        """
        raise NotImplementedError

    def reading(self, table: Tensor) -> R:
        """The reading, from the rows of all ranks: [ranks, numbers]."""
        raise NotImplementedError

    def read(self) -> R:
        """What was measured since the last reading: one device sync at most, one collective of a row a rank."""
        from hf_accum_fix.monitor.ranks import by_rank

        return self.reading(by_rank(self._ranks, self.row()))

    def judge(self, reading: R) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        return None

    def logged(self, reading: R) -> dict[str, float]:
        """What to log of a reading, by name; nan: no number yet."""
        return {}
