"""Compare what is installed with `seams.ATTRIBUTES`: raise a SeamError that names the row, not an AttributeError."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from packaging.version import InvalidVersion, Version

from hf_accum_fix.errors import OptionsError, SeamError
from hf_accum_fix.upstream.seams import (
    ACCELERATOR,
    ARGUMENTS,
    ATTRIBUTES,
    ENGINE_STATE,
    PROCESSES,
    SHOWS_SHAPES,
    STATE,
    TESTED_RANGES,
    TRAINER,
    Attribute,
    Seen,
)


def missing(target: str, holder: object, *seen: Seen) -> tuple[Attribute, ...]:
    """The rows of the installed release, of a target and seen there, that a class, module or object lacks.

    Empty if the release is unknown.
    """
    release = _release(target.partition(".")[0])
    rows = (row for row in ATTRIBUTES if row.target == target and row.seen in seen)
    return () if release is None else tuple(row for row in rows if row.is_in(release) and not hasattr(holder, row.name))


def missing_from_classes() -> tuple[Attribute, ...]:
    """The missing rows of every class and module, as imported now."""
    targets = dict.fromkeys(row.target for row in ATTRIBUTES)
    return tuple(row for target in targets for row in missing(target, _found(target), "class"))


def require(target: str, holder: object, *seen: Seen) -> dict[str, str]:
    """Refuse an object that lacks a necessary attribute.

    Returns:
        The features that the other missing rows switch off, and why.

    Raises:
        SeamError: if a necessary row is missing.
    """
    absent = missing(target, holder, *seen)
    error = refusal(absent)
    if error is not None:
        raise error
    return {row.off: f"{_explained(row)}; {row.off} is off, until a newer hf-accum-fix" for row in absent}


def require_trainer(trainer: Any) -> dict[str, str]:
    """The same for a Trainer before it trains, its arguments, state and accelerator."""
    off = require(TRAINER, trainer, "class", "object")
    off |= require(ARGUMENTS, trainer.args, "class", "object") | require(STATE, trainer.state, "class", "object")
    return off | require_accelerator(trainer.accelerator)


def require_accelerator(accelerator: Any) -> dict[str, str]:
    """The same for an ``accelerate.Accelerator``."""
    if not hasattr(accelerator, "backward"):
        raise OptionsError(
            f"got accelerator={accelerator!r}; expected an accelerate.Accelerator; without one pass steps=G alone"
        )
    off = require(ACCELERATOR, accelerator, "object")
    off |= require(PROCESSES, accelerator.state, "object") | require(ACCELERATOR, accelerator, "class")
    if accelerator.distributed_type == "DEEPSPEED":
        off |= require(ACCELERATOR, accelerator, "DeepSpeed") | require(ENGINE_STATE, accelerator.state, "DeepSpeed")
    static = getattr(accelerator.ddp_handler, "static_graph", False)
    torch, engine = _release("torch"), "static_graph" if static else str(accelerator.distributed_type.value)
    if torch is not None and torch < Version(SHOWS_SHAPES) and engine in ("DEEPSPEED", "FSDP", "static_graph"):
        raise SeamError(
            f"got torch {torch} under {engine}; expected torch {SHOWS_SHAPES} or newer, because on older releases "
            f"reading a loss runs part of its backward; install torch>={SHOWS_SHAPES}"
        )
    return off


def require_in_loop(trainer: Any) -> dict[str, str]:
    """The same for attributes that a Trainer has only in its loop."""
    return require(TRAINER, trainer, "loop")


def refusal(absent: Iterable[Attribute]) -> SeamError | None:
    """The error for the first necessary row; None without one."""
    for row in absent:
        if not row.off:
            first, last = TESTED_RANGES[_package(row)]
            until = f"to before {row.until}" if row.until else f"to {last}"
            return SeamError(
                f"{_explained(row)}; use {_package(row)} {row.since or first} {until}, or a newer hf-accum-fix"
            )
    return None


def _explained(row: Attribute) -> str:
    package = _package(row)
    return f"got {package} {_release(package)} without {row}; expected it: hf-accum-fix uses it to {row.used_for}"


def _package(row: Attribute) -> str:
    return row.target.partition(".")[0]


def _found(target: str) -> object:
    """The class or module; None if missing."""
    module, _, owner = target.partition(":")
    try:
        holder = import_module(module)
    except ImportError:
        return None
    return getattr(holder, owner, None) if owner else holder


def _release(package: str) -> Version | None:
    try:
        return Version(getattr(sys.modules.get(package), "__version__", ""))
    except InvalidVersion:
        return None
