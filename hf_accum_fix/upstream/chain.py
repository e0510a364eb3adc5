"""A patched method as a chain of wrappers: the place that holds each link, and the link's author.

A wrapper is a link if it calls what it wraps: a wrapt proxy, or a functools.wraps function with the wrapped function in
one of its closure cells. Anything else ends the chain. So a function that replaces the original without calling it is
the end of its own chain: a replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Final, Protocol, TypeAlias

import wrapt

from hf_accum_fix.errors import SeamError

Pristine: TypeAlias = Callable[[Any, str], bool]

PROXY: Final[type] = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)
"""The base of every wrapt wrapper; wrapt has two such classes from version 2 on."""

ABSENT: Final = object()
"""Marks that a class has no such attribute of its own; restoring it makes the method inherited again."""


class Place(Protocol):
    """A place that holds one link of a chain."""

    def get(self) -> Any:
        """The identical object held here; ABSENT for an inherited class attribute."""

    def put(self, value: Any) -> None:
        """Hold value instead."""


@dataclass(frozen=True, eq=False)
class ClassAttribute:
    """The attribute of a class, read from its own namespace so that static and class methods survive."""

    owner: type
    name: str

    def get(self) -> Any:
        """The attribute in the class's own namespace, or ABSENT."""
        return vars(self.owner).get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Set the attribute, or delete it if value is ABSENT."""
        if value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True, eq=False)
class ProxyTarget:
    """The object that a wrapt proxy wraps."""

    proxy: Any

    def get(self) -> Any:
        """The wrapped object."""
        return self.proxy.__wrapped__

    def put(self, value: Any) -> None:
        """Wrap value instead."""
        self.proxy.__wrapped__ = value


@dataclass(frozen=True, eq=False)
class ClosureCell:
    """The closure cell through which a functools.wraps function calls what it wraps."""

    function: FunctionType
    cell: CellType

    def get(self) -> Any:
        """The function called."""
        return self.cell.cell_contents

    def put(self, value: Any) -> None:
        """Call value instead, and note it in __wrapped__, which inspect and we ourselves read."""
        self.cell.cell_contents = value
        self.function.__wrapped__ = value  # type: ignore[attr-defined]


def follow(owner: type, name: str, pristine: Pristine = lambda *_: False) -> Iterator[Place]:
    """The places that hold owner's method, from the class attribute inwards.

    The last place holds the pristine function or, if no link is pristine, the end of the chain.

    Args:
        owner: the class.
        name: the method's name.
        pristine: pristine(function, name) is true where function is the original of the method called name.

    Raises:
        SeamError: if neither owner nor a base has the attribute.
    """
    place: Place | None = ClassAttribute(owner, name)
    while place is not None:
        yield place
        link = held(place)
        place = None if pristine(link, name) else _beneath(link)


def held(place: Place) -> Any:
    """The object in effect at a place: the one it holds, or the inherited one."""
    value = place.get()
    if value is not ABSENT or not isinstance(place, ClassAttribute):
        return value
    for base in place.owner.__mro__[1:]:
        if place.name in vars(base):
            return vars(base)[place.name]
    raise SeamError(
        f"got {place.owner.__module__}.{place.owner.__qualname__} without a method {place.name!r}; expected a "
        "class that defines or inherits it; check the name and the installed release"
    )


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
    if isinstance(link, PROXY):
        return ProxyTarget(link)
    if isinstance(link, FunctionType):
        wrapped = getattr(link, "__wrapped__", ABSENT)
        for cell in link.__closure__ or ():
            if _contents(cell) is wrapped:
                return ClosureCell(link, cell)
    return None


def _contents(cell: CellType) -> Any:
    """The content of a closure cell; None for an empty one, for which Python raises ValueError."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
