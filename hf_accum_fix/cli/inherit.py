"""Pass the options of ``hf-accum-fix run`` to child processes, and apply the patch there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hf_accum_fix.cli.require import report_on
from hf_accum_fix.errors import AccumFixError, OptionsError
from hf_accum_fix.options import SWITCH, Options, options_from

VARIABLE: Final = "PYTHON_HF_ACCUM_FIX"
"""Carries the options. DeepSpeed's launcher forwards variables with the prefix PYTHON to other machines."""

BOOTSTRAP: Final = str(Path(__file__).with_name("bootstrap").absolute())
"""The folder of our sitecustomize."""


def environment_for(given: Mapping[str, object], inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes every Python process apply the patch, with options, when it imports the Trainer."""
    passed = {name: value for name, value in inherited.items() if not name.startswith(VARIABLE)}
    return {**passed, "PYTHONPATH": python_path(inherited), VARIABLE: json.dumps(given)}


def python_path(inherited: Mapping[str, str]) -> str:
    """A PYTHONPATH on which our sitecustomize is found first."""
    before = inherited.get("PYTHONPATH", "")
    # Absolute, because a child may start in another folder and has to find this package.
    folders = [os.path.abspath(folder) for folder in before.split(os.pathsep)] if before else []  # noqa: PTH100
    return os.pathsep.join([BOOTSTRAP, *(folder for folder in folders if folder != BOOTSTRAP)])


def inherited_options(environment: Mapping[str, str]) -> Options:
    """The options that environment_for() stored; the defaults if a launcher dropped the variable.

    Raises:
        OptionsError: if the variable holds something else.
    """
    text = environment.get(VARIABLE, "{}")
    try:
        given = json.loads(text)
        return options_from({name: tuple(each) if isinstance(each, list) else each for name, each in given.items()})
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise OptionsError(
            f"got {VARIABLE}={text[:100]!r}; expected the JSON of hf-accum-fix run; unset it, and start with that "
            "command"
        ) from error


def apply_inherited() -> None:
    """Call apply() in a process that has just loaded transformers.trainer.

    Raises:
        SystemExit: if apply() refuses: `from transformers import Trainer` would turn another error into an
            ImportError about missing requirements, which scripts catch and continue without the Trainer.
    """
    from hf_accum_fix import __version__, apply
    from hf_accum_fix.confirmation import is_quiet, print_line

    try:
        handle = apply(**vars(inherited_options(os.environ)))
    except AccumFixError as error:
        raise SystemExit(f"hf-accum-fix: {error}") from error
    if handle.active:
        report_on()
    elif not is_quiet():
        print_line(f"{__version__} is off: {SWITCH}={os.environ.get(SWITCH)}")
