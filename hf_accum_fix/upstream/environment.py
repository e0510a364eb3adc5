"""detect(): the installed versions and the state of the Trainer's methods. Changes nothing."""

from __future__ import annotations

import inspect
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from hf_accum_fix.upstream.patchers import Patcher, known_patcher
from hf_accum_fix.upstream.presence import missing_from_classes
from hf_accum_fix.upstream.seams import (
    TESTED_BODIES,
    TESTED_RELEASES,
    TRAINER_CLASS,
    TRAINER_MODULE,
    Attribute,
    Seam,
    seams_of,
)

_PACKAGE: Final = TRAINER_MODULE.partition(".")[0]

LINES: Final[dict[str, dict[str, str]]] = json.loads(Path(__file__).with_name("code.json").read_text(encoding="utf-8"))
"""The lines that make each defect of the newest tested release, by defect, then by file of transformers."""


@dataclass(frozen=True)
class SeamState:
    """The state of one seam."""

    seam: Seam
    parameters: tuple[str, ...] | None  # names of the method's parameters after self; None if there is no such method
    fits: bool  # whether they start with the seam's, or with some of them followed by *args and **kwargs
    tested_body: bool  # whether our tests have run this body
    ours: bool  # whether a wrapper of this package is on it
    foreign: str | None  # "module.qualname" of another package's innermost patch; None without one
    composable: bool  # whether the method still calls the original, through any wrappers
    patcher: Patcher | None = None  # the known package that replaced the original; None without one


@dataclass(frozen=True)
class Environment:
    """What is installed."""

    transformers: str | None  # version in its code, because the code runs; None if not installed
    accelerate: str | None  # version by its metadata; None if not installed
    torch: str | None  # version by its metadata; None if not installed
    python: str  # version
    trainer_imported: bool = False  # whether transformers.trainer is imported
    seams: tuple[SeamState, ...] = ()  # state of every seam; empty before that import
    stale_metadata: str | None = None  # version in transformers' metadata if its code has another one; None: they agree
    missing: tuple[Attribute, ...] = ()  # rows of `seams.ATTRIBUTES` that its classes lack; empty before that import
    #: Known defects whose lines are in the code of a release newer than all tested; None: another release.
    read: frozenset[str] | None = None


def detect() -> Environment:
    """Detect what is installed, without importing it; seams are empty until transformers.trainer is imported."""
    trainer = imported_trainer()
    named, package = _version(_PACKAGE), _package()
    stated = _stated_version(package)
    stale = len({getattr(parsed(each), "public", each) for each in (named, stated) if each is not None}) > 1
    # Sources on PYTHONPATH have no metadata.
    transformers = stated if stale or named is None else named
    return Environment(
        transformers=transformers,
        accelerate=_version("accelerate"),
        torch=_version("torch"),
        python=platform.python_version(),
        trainer_imported=trainer is not None,
        seams=() if trainer is None else tuple(_state(trainer, seam) for seam in seams_of(parsed(transformers))),
        stale_metadata=named if stale else None,
        missing=() if trainer is None else missing_from_classes(),
        read=still_in(package.submodule_search_locations or ()) if package and is_newer(transformers) else None,
    )


def parsed(version: str | None) -> Version | None:
    """Parse a version; None if there is none, or it cannot be parsed."""
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def is_newer(version: str | None) -> bool:
    """Whether a release, or a build before one, may hold code newer than the newest tested release."""
    release, newest = parsed(version), Version(TESTED_RELEASES[-1])
    if release is None:
        return False
    base = Version(release.base_version)
    return base > newest or (base == newest and release.is_prerelease)


def imported_trainer() -> type | None:
    """The class Trainer; None until the import of transformers.trainer has defined it.

    If a subclass replaced it in the module, return upstream's class, from which others inherit.
    """
    found = getattr(sys.modules.get(TRAINER_MODULE), TRAINER_CLASS, None)
    base = upstream_class(found) if isinstance(found, type) else None
    return base if base is not None and base.__module__ == TRAINER_MODULE else None


def upstream_class(cls: type) -> type | None:
    """The class Trainer of transformers among a class's bases, in whichever module; None without one."""
    for base in cls.__mro__:
        if base.__qualname__ == TRAINER_CLASS and base.__module__.partition(".")[0] == _PACKAGE:
            return base
    return None


def calling_trainer(frame: FrameType | None) -> Any:
    """The Trainer whose method runs in a frame or in the nearest of its callers; None without one."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and upstream_class(type(caller)) is not None:
            return caller
        frame = frame.f_back
    return None


def is_training() -> bool:
    """Whether a Trainer runs its training loop, in any thread."""
    for frame in [*sys._current_frames().values()]:
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name == "_inner_training_loop" and above.f_globals.get("__name__") == TRAINER_MODULE:
                return True
            above = above.f_back
    return False


def is_pristine(function: Any, name: str) -> bool:
    """Whether function is the method name as defined in transformers' own trainer.py.

    The file is compared too, because functools.wraps copies the names, and other patchers re-execute the source.
    """
    module = sys.modules.get(TRAINER_MODULE)
    return (
        isinstance(module, ModuleType)
        and type(function) is FunctionType
        and function.__module__ == TRAINER_MODULE
        and function.__qualname__ == f"{TRAINER_CLASS}.{name}"
        and function.__code__.co_filename == module.__file__
    )


def fingerprint(body: FunctionType) -> str | None:
    """First 16 hex digits of the sha256 of a function's source without white space; None without source.

    `TESTED_BODIES` has those of each tested release's methods.
    """
    try:
        source = inspect.getsource(body)
    except OSError:
        return None
    return sha256(_squeezed(source).encode()).hexdigest()[:16]


def still_in(package: Iterable[str]) -> frozenset[str]:
    """The defects whose lines are all in the source of transformers; white space does not count.

    Args:
        package: the folders of the installed transformers.
    """
    folders = [Path(folder) for folder in package]
    return frozenset(
        name
        for name, lines in LINES.items()
        if all(any(_squeezed(text) in _source(folder / file) for folder in folders) for file, text in lines.items())
    )


@lru_cache(maxsize=16)
def _source(file: Path) -> str:
    try:
        return _squeezed(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _state(trainer: type, seam: Seam) -> SeamState:
    # Imported here: they import wrapt, which is slow and not needed before the Trainer is imported.
    from hf_accum_fix.upstream.chain import author, follow
    from hf_accum_fix.upstream.patch import is_ours

    if not hasattr(trainer, seam.name):
        return SeamState(seam, None, False, False, False, None, False)
    *wrappers, end = (place.held for place in follow(trainer, seam.name, is_pristine))
    composable = is_pristine(end, seam.name)
    foreign = [author(link) for link in wrappers if not is_ours(link)] + ([] if composable else [author(end)])
    parameters = _parameters(end)
    return SeamState(
        seam=seam,
        parameters=None if parameters is None else tuple(each.name for each in parameters),
        fits=parameters is not None and _fits(parameters, seam),
        tested_body=composable and fingerprint(end) in TESTED_BODIES[seam.name],
        ours=any(is_ours(link) for link in wrappers),
        foreign=foreign[-1] if foreign else None,
        composable=composable,
        patcher=None if composable else known_patcher(end, author(end), trainer),
    )


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """The parameters after self; None if they cannot be read, as those of some builtins."""
    try:
        return list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return None


def _fits(parameters: Sequence[inspect.Parameter], seam: Seam) -> bool:
    """Whether they start with the seam's, or with some of them followed by *args and **kwargs."""
    kinds = {parameter.kind for parameter in parameters}
    named = tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    length = min(len(named), len(seam.parameters)) if takes_any else len(seam.parameters)
    return named[:length] == seam.parameters[:length]


def _package() -> ModuleSpec | None:
    """The spec of transformers, imported or not; None if not installed."""
    try:
        return find_spec(_PACKAGE)
    except ValueError:  # a module without a spec
        return None


def _stated_version(package: ModuleSpec | None) -> str | None:
    """The ``__version__`` of a package, read from its source unless imported; None without one."""
    imported = getattr(sys.modules.get(_PACKAGE), "__version__", None)
    if imported is not None or package is None or package.origin is None:
        return imported
    try:
        source = Path(package.origin).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"""^__version__ = ["'](.+)["']""", source, re.MULTILINE)
    return None if found is None else found[1]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
