"""Pass the options of ``hf-accum-fix run`` to the processes it starts, and apply them there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_accum_fix.errors import AccumFixError, OptionsError, UnsupportedSetupError
from hf_accum_fix.options import SWITCH, Options, on_the_command_line

VARIABLE: Final = "PYTHON_HF_ACCUM_FIX"
"""Carries the options. DeepSpeed's launcher passes variables on to other machines by prefix; PYTHON is one."""

BOOTSTRAP: Final = str(Path(__file__).with_name("bootstrap").absolute())
"""The folder with the sitecustomize."""


def environment_for(options: Options, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process is patched when it imports the Trainer.

    Args:
        options: for apply() there; neither ``contract`` nor limits of `BalanceOptions` travel.
        inherited: the environment to start from, also one that another run has made.

    Raises:
        UnsupportedSetupError: if PYTHONPATH cannot hold the package's path.
    """
    if os.pathsep in BOOTSTRAP:
        raise UnsupportedSetupError(
            f"hf_accum_fix is installed in {BOOTSTRAP}, which PYTHONPATH cannot hold because of its {os.pathsep!r}; "
            "install it in another folder, or call hf_accum_fix.apply() in the script"
        )
    before = inherited.get("PYTHONPATH", "")
    # Absolute, because a process below may start in another folder and has to find this package.
    folders = [os.path.abspath(folder) for folder in before.split(os.pathsep)] if before else []  # noqa: PTH100
    rest = [folder for folder in folders if folder != BOOTSTRAP]
    handed = {name: value for name, value in inherited.items() if not name.startswith(VARIABLE)}
    return {
        **handed,
        "PYTHONPATH": os.pathsep.join([BOOTSTRAP, *rest]),
        VARIABLE: json.dumps(_travelling(options)),
    }


def _travelling(options: Options) -> dict[str, Any]:
    """The keywords of apply() that JSON holds."""
    given = {option.name: getattr(options, option.name) for option in on_the_command_line()}
    return {**given, "balance_windows": bool(options.balance_windows)}


def inherited_options(environment: Mapping[str, str]) -> Options:
    """The options that environment_for() stored; the defaults where a launcher dropped the variable.

    Raises:
        OptionsError: if the variable holds something else.
    """
    text = environment.get(VARIABLE, "{}")
    try:
        given = json.loads(text)
        return Options(**{**given, "allow_foreign": tuple(given.get("allow_foreign", ()))})
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        raise OptionsError(
            f"got {VARIABLE}={shown!r}; expected what hf-accum-fix run puts there; unset it, and start by run"
        ) from error


def apply_inherited() -> str:
    """Call apply() in a process that has just loaded transformers.trainer, and print the result in one line.

    Raises:
        SystemExit: if apply() refuses: `from transformers import Trainer` would turn another error into an
            ImportError about missing requirements, which scripts catch and go on without the Trainer.
    """
    from hf_accum_fix import __version__, apply
    from hf_accum_fix.upstream.environment import detect

    try:
        handle = apply(**vars(inherited_options(os.environ)))
    except AccumFixError as error:
        raise SystemExit(f"hf-accum-fix: {error}") from error
    if not handle.active:
        return f"{__version__} is off: {SWITCH}={os.environ.get(SWITCH)}"
    line = f"{__version__} is on: transformers {detect().transformers}, {len(handle.plan.fixed)} defects fixed"
    return line if handle.plan.untested is None else f"{line}, UNTESTED: {handle.plan.untested}"
