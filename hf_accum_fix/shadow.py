"""Letting an attribute of one object stand before what its class or its past gave it, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def shadow(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Let an instance attribute stand before the method of this name, and put back what stood there."""
    before = vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
