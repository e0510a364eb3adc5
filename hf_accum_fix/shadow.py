"""Letting an attribute of one object stand before what its class or its past gave it, for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

_ABSENT = object()


class shadow(AbstractContextManager[None]):
    """Inside a ``with`` block an instance attribute stands before the method of this name; then what stood there.

    A class, since as a generator it takes twice the time, and every micro-batch enters it several times.
    """

    __slots__ = ("_before", "_holder", "_name", "_value")

    def __init__(self, holder: Any, name: str, value: Any) -> None:
        self._holder, self._name, self._value = holder, name, value

    def __enter__(self) -> None:
        self._before = vars(self._holder).get(self._name, _ABSENT)
        setattr(self._holder, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        if self._before is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._before)
