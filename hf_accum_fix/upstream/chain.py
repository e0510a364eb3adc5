"""A patched method as a chain of wrappers: the place that holds each link, and the link's author.

A wrapper is a link if it calls what it wraps: a wrapt proxy, or a functools.wraps function with the wrapped function in
one of its closure cells. Anything else ends the chain. So a function that replaces the original without calling it is
the end of its own chain: a replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Final, TypeAlias

import wrapt

Pristine: TypeAlias = Callable[[Any, str], bool]
"""pristine(function, name): whether function is the original of the method called name."""

PROXY: Final[type] = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)
"""The base of every wrapt wrapper; wrapt has two such classes from version 2 on."""

ABSENT: Final = object()
"""Marks that a class has no such attribute of its own."""


@dataclass(frozen=True, eq=False)
class Place:
    """A place that holds one link of a chain: an attribute of a class, of a wrapt proxy or of a function."""

    holder: Any  # the class, the proxy, or the functools.wraps function
    name: str  # of the attribute; ``__wrapped__`` inside a wrapper
    held: Any  # the identical object in effect there, from a namespace, so that static and class methods survive
    inherited: bool = False  # whether a class has it from a base
    cell: CellType | None = None  # the closure cell through which a function calls what it wraps

    def put(self, value: Any) -> None:
        """Hold value instead; ABSENT deletes the attribute of a class, so that the method is inherited again."""
        if value is ABSENT:
            delattr(self.holder, self.name)
            return
        if self.cell is not None:
            self.cell.cell_contents = value
        setattr(self.holder, self.name, value)


def follow(owner: type, name: str, pristine: Pristine = lambda *_: False) -> Iterator[Place]:
    """The places that hold owner's method, from the class attribute inwards.

    The last place holds the pristine function or, if no link is pristine, the end of the chain.
    """
    base = next(base for base in owner.__mro__ if name in vars(base))
    place: Place | None = Place(owner, name, vars(base)[name], inherited=base is not owner)
    while place is not None:
        yield place
        place = None if pristine(place.held, name) else _beneath(place.held)


def author(link: Any) -> str:
    """The author of a link, as "module.qualname".

    functools.wraps and wrapt copy the name of what they wrap, so name a wrapper by its code.
    """
    if isinstance(link, PROXY):
        link = getattr(link, "_self_wrapper", type(link))
    if isinstance(link, FunctionType) and hasattr(link, "__wrapped__"):
        code = link.__code__  # co_qualname exists from Python 3.11 on
        return f"{link.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"
    if not hasattr(link, "__qualname__"):
        link = type(link)
    return f"{link.__module__}.{link.__qualname__}"


def _beneath(link: Any) -> Place | None:
    """The place inside a link that holds the next one; None at the end of the chain."""
    wrapped = getattr(link, "__wrapped__", ABSENT)
    if isinstance(link, PROXY):
        return Place(link, "__wrapped__", wrapped)
    cells = (link.__closure__ or ()) if isinstance(link, FunctionType) else ()
    # An empty cell raises ValueError.
    cell = next((each for each in cells if each != CellType() and each.cell_contents is wrapped), None)
    return None if cell is None else Place(link, "__wrapped__", wrapped, cell=cell)
