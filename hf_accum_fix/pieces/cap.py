"""How large a piece of a micro-batch may be, learnt from what ran out of memory and what did not.

A size is rows times width: the numbers of the widest input, for a text its tokens with padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Windows without a failure after which a larger piece is tried.
PATIENCE: Final = 200
#: Sizes this near, relative, are not worth another trial.
_NEAR: Final = 0.05


@dataclass
class Cap:
    """What is known of sizes."""

    limit: int | None = None  # the largest size that is run; None: any
    fails: int | None = None  # the smallest that ran out of memory
    windows: int = 0  # since the last failure, or the last larger trial

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Cap:
        """As it was in a checkpoint; {}: there was none."""
        return cls(**{name: int(value) for name, value in kept.items() if value is not None})

    def failed(self, size: int, next_size: int) -> None:
        """A size ran out of memory, and the next to be tried is smaller."""
        self.fails = size if self.fails is None else min(self.fails, size)
        self.limit = next_size if self.limit is None else min(self.limit, next_size)
        self.windows = 0

    def window_ended(self) -> bool:
        """Count a window; whether the limit has grown: half-way to what failed, until that is near."""
        self.windows += 1
        if self.limit is None or self.fails is None or self.windows < PATIENCE:
            return False
        self.windows, between = 0, (self.limit + self.fails) // 2
        if between <= self.limit * (1 + _NEAR):
            return False
        self.limit = between
        return True
