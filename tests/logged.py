"""What the package logs meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

#: The messages so far that hold these words: the fixture `said`.
Said = Callable[..., list[str]]


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of this level and above."""
    kept: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("hf_accum_fix")
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
