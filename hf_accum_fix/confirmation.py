"""The line on stderr that confirms that this package is at work, once per job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hf_accum_fix.options import Options, enabled

if TYPE_CHECKING:
    from hf_accum_fix.upstream.environment import Environment
    from hf_accum_fix.upstream.plan import Plan

QUIET: Final = "HF_ACCUM_FIX_QUIET"
#: Set by the process that prints "is on", so that its children do not print it again.
_ANNOUNCED: Final = "PYTHON_HF_ACCUM_FIX_ANNOUNCED"


def on_line(environment: Environment, plan: Plan, where: str = "") -> str:
    """The line that reports that the patch is on; ``where``: a class that trains by this package without it."""
    from hf_accum_fix.version import __version__

    if plan.untested is not None:
        return (
            f"{__version__} is on{where} and fits transformers {environment.transformers}, but {plan.untested}; "
            "check your run: hf-accum-fix verify SCRIPT"
        )
    return f"{__version__} is on{where}: transformers {environment.transformers}, {len(plan.fixed)} defects fixed"


def is_quiet() -> bool:
    """Whether the environment asks for no line about the patch."""
    return os.environ.get(QUIET, "").strip().lower() not in ("", "0", "off", "false", "no")


def print_once_per_job(line: str) -> None:
    """Print a line to stderr, in one process of a job."""
    if _ANNOUNCED not in os.environ:
        print_line(line)
        os.environ[_ANNOUNCED] = "1"


def print_line(line: str) -> None:
    """Print a line to stderr, if there is one and this is the first rank."""
    if sys.stderr is not None and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        sys.stderr.write(f"hf-accum-fix: {line}\n")


def confirm_class(name: str, options: Options) -> None:
    """Print once per job that a trainer's class trains by this package, unless it is switched off."""
    if not _is_due():
        return
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    environment = detect()
    print_once_per_job(on_line(environment, make_plan(environment, options), f" in {name}"))


def confirm_loop(installed: str) -> None:
    """Print once per job that a loop trains by this package, unless it is switched off."""
    from hf_accum_fix.version import __version__

    if _is_due():
        print_once_per_job(f"{__version__} is on in accumulation_windows: {installed}")


def _is_due() -> bool:
    return enabled() and not is_quiet() and _ANNOUNCED not in os.environ


@contextmanager
def unconfirmed() -> Iterator[None]:
    """Confirm nothing meanwhile: what trains in a verification is no training of the user's."""
    before = os.environ.get(_ANNOUNCED)
    os.environ[_ANNOUNCED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ANNOUNCED]
