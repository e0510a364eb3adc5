"""Listen to the calls of a method of one object, in any number and order, and leave the object as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LISTENERS = "_hf_accum_fix_listeners"
_ABSENT = object()


def listen(owner: Any, name: str, listener: Callable[..., None], *, before: bool = False) -> None:
    """Call ``listener`` with the arguments of every call: before it, or after it with the result in front of them.

    The instance's method hides the class's until the last listener leaves, in any order.
    """
    of_owner: dict[str, tuple[Any, list[tuple[bool, Callable[..., None]]], Callable[..., Any]]]
    of_owner = owner.__dict__.setdefault(_LISTENERS, {})
    # Whoever had put a method there before, and took theirs away after an exception, took ours away as well.
    if name not in of_owner or vars(owner).get(name) is not of_owner[name][2]:
        method = getattr(owner, name)
        listeners: list[tuple[bool, Callable[..., None]]] = of_owner[name][1] if name in of_owner else []

        def heard(*args: Any, **kwargs: Any) -> Any:
            for early, each in listeners:
                if early:
                    each(*args, **kwargs)
            result = method(*args, **kwargs)
            for early, each in listeners:
                if not early:
                    each(result, *args, **kwargs)
            return result

        of_owner[name] = vars(owner).get(name, _ABSENT), listeners, heard
        setattr(owner, name, heard)
    # A run that ended by an exception is still registered: nobody listens twice.
    listeners = of_owner[name][1]
    if (before, listener) not in listeners:
        listeners.append((before, listener))


def stop_listening(owner: Any, name: str, listener: Callable[..., None]) -> None:
    """Call ``listener`` no more; the last one to leave takes our method off the object."""
    of_owner = owner.__dict__.get(_LISTENERS, {})
    if name not in of_owner:
        return  # Added in the midst of a run, it has never listened.
    standing, listeners, heard = of_owner[name]
    listeners[:] = [(early, each) for early, each in listeners if each != listener]
    if listeners:
        return
    del of_owner[name]
    if vars(owner).get(name) is not heard:
        pass
    elif standing is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, standing)
    if not of_owner:
        delattr(owner, _LISTENERS)
