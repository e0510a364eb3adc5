"""Install wrappers on the methods of a class and remove them again, all or none.

Ours wraps the upstream function directly, inside the wrappers of others, which are still called. Removing it takes it
out of the chain and leaves the identical objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import wrapt

from hf_accum_fix.errors import ForeignPatchError
from hf_accum_fix.upstream.chain import ABSENT, Place, Pristine, author, follow

Wrapper: TypeAlias = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapper(wrapped, instance, args, kwargs), which wrapt calls instead of the method."""


@dataclass(frozen=True)
class Patch:
    """One method to wrap."""

    owner: type
    name: str
    wrapper: Wrapper


# No type arguments: only wrapt 2 supports them, and other packages pin wrapt below 2.
class _BoundMethod(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """Our wrapper as read from an instance; copied and pickled like a plain bound method."""

    def __copy__(self) -> _BoundMethod:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(deepcopy(self._holder(), memo), self.__name__)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (self._holder(), self.__name__)

    def _holder(self) -> Any:
        """The instance; for a static or class method, the class."""
        if self._self_instance is not None:
            return self._self_instance
        return getattr(self, "__self__", self._self_parent._self_class)


class _Method(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Our wrapper; copied and pickled like a plain function: as the same object."""

    __bound_function_wrapper__ = _BoundMethod

    def __init__(self, wrapped: Any, patch: Patch) -> None:
        super().__init__(wrapped, patch.wrapper)
        self._self_class = patch.owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None and isinstance(self.__wrapped__, FunctionType):
            return self
        return super().__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Bind to no instance, so that wrapt takes it from the arguments.
        return super().__get__(None, self._self_class)(*args, **kwargs)

    def __copy__(self) -> _Method:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (self._self_class, self.__name__)


def is_ours(link: Any) -> bool:
    """Whether a link of a chain is a wrapper of this package, or of another load or installation of it."""
    made_by = type(link)
    return made_by.__module__ == __name__ and made_by.__name__ in (_Method.__name__, _BoundMethod.__name__)


@dataclass(frozen=True, eq=False)
class _Installed:
    """One installed wrapper."""

    patch: Patch  # the requested patch
    method: _Method  # our wrapper
    outermost: Any  # the class attribute after installing: ours, or the foreign wrapper around it
    inherited: bool  # whether the class had no such attribute of its own

    def place(self) -> Place | None:
        """The place that holds our wrapper now; None if the method no longer calls it."""
        for place in self.chain():
            link = place.held
            # Reading Trainer.method gives a bound wrapper, whose parent is ours.
            if link is self.method or (is_ours(link) and link._self_parent is self.method):
                return place
        return None

    def end(self) -> Any:
        """The end of the method's chain now: the original, or a replacement."""
        *_, place = self.chain()
        return place.held

    def undoable(self) -> bool:
        """Whether no other patch was put around ours, or in its place, since."""
        if self.place() is None:  # If another package restored what we wrapped, nothing is left to undo.
            return any(place.held is self.method.__wrapped__ for place in self.chain())
        now = next(self.chain()).held
        return now is self.outermost or now is self.method

    def unlink(self) -> None:
        """Take our wrapper out of the chain: its place then holds the identical object that it wrapped."""
        place = self.place()
        if place is not None:
            gone = self.inherited and place.holder is self.patch.owner
            place.put(ABSENT if gone else self.method.__wrapped__)

    def chain(self) -> Iterator[Place]:
        """The places that hold the method now."""
        return follow(self.patch.owner, self.patch.name)


class Installation:
    """The wrappers of one install(), removed together."""

    def __init__(self, installed: Sequence[_Installed]) -> None:
        """Own wrappers that are already installed."""
        self._installed = tuple(installed)

    @property
    def names(self) -> tuple[str, ...]:
        """The wrapped methods."""
        return tuple(one.patch.name for one in self._installed)

    def replacements(self) -> dict[str, Any]:
        """The replacement of each method that no longer calls our wrapper, by method name."""
        return {one.patch.name: one.end() for one in self._installed if one.place() is None}


def restore(installations: Sequence[Installation]) -> None:
    """Restore the identical original objects of all of them, last first, or of none; a second call has no effect.

    Raises:
        ForeignPatchError: if another package patched a method since; then nothing is changed.
    """
    wrappers = [one for installation in installations for one in installation._installed]
    left = [one for one in wrappers if not one.undoable()]
    if left:
        covered = [f"{_name(one.patch)} (now of {author(next(one.chain()).held)})" for one in left]
        raise ForeignPatchError(
            f"got a later patch of {', '.join(covered)}; expected the methods as apply() left them; undo that later "
            "patch first, then call revert() (nothing was changed)"
        )
    for one in reversed(wrappers):
        one.unlink()
    for installation in installations:
        installation._installed = ()


def install(patches: Sequence[Patch], pristine: Pristine, allowed: Collection[str] = ()) -> Installation:
    """Wrap every method, or none; ``allowed`` names replacements of originals that may be wrapped instead.

    Raises:
        ForeignPatchError: if a method calls neither its original nor an allowed replacement.
    """
    installed = []
    with ExitStack() as undo:
        for patch in patches:
            *_, place = follow(patch.owner, patch.name, pristine)
            function = place.held
            if not pristine(function, patch.name) and author(function) not in allowed:
                raise ForeignPatchError.replaced(_name(patch), author(function))
            method = _Method(function, patch)
            undo.callback(place.put, ABSENT if place.inherited else function)
            place.put(method)
            installed.append(_Installed(patch, method, vars(patch.owner)[patch.name], place.inherited))
        undo.pop_all()
    return Installation(installed)


def _name(patch: Patch) -> str:
    return f"{patch.owner.__qualname__}.{patch.name}"
