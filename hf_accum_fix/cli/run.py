"""``hf-accum-fix run CMD ...``: run a command with the patch applied in every Python process it starts."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from hf_accum_fix.cli import complain
from hf_accum_fix.cli.inherit import environment_for, inherited_options
from hf_accum_fix.cli.require import run_required
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.options import CHOICES, SWITCH, Options, enabled

DESCRIPTION: Final = """\
Run a command with the patch applied in it and in every Python process it
starts: torchrun, accelerate launch, deepspeed, llamafactory-cli, shell scripts.
No file is edited: each process applies the patch when it imports
transformers.trainer, and the first one prints "is on" to stderr. Without that
line the patch is not on, as in processes that drop PYTHONPATH (sudo, ssh,
docker, python -E, -I and -S).

HF_ACCUM_FIX=0 runs the command without the patch.
"""

EPILOG: Final = """\
exit code: the command's own, which replaces this process and so gets its
signals; 2 wrong usage, 126 the command cannot be run, 127 it is not found.
With --require the command runs as a child, and gets the signals too; 3 if its
own code is 0 and no process of it applied the patch.

If apply() refuses the release or another package's patch, the process ends with
that error.
"""

OPTIONS: Final = {
    "allow_foreign": "wrap this replacement of a Trainer method by another package instead of refusing it; repeatable",
    "eval_loss": "report eval_loss as the mean over items",
    "drop_duplicates": "drop samples that accelerate repeats",
    "router_loss": "load-balancing loss: mean over micro-batches, or exact: over the global batch",
    "coupled_loss": "over which samples a coupled loss is computed",
    "coupled": "a module that returns one vector per sample, for --coupled-loss; repeatable",
    "balance_windows": "length-balance the micro-batches of a window",
    "accumulate_in": "dtype that sums gradients of 16-bit parameters",
    "global_batch": "if a checkpoint had another global batch: warn, or keep: refuse",
    "micro_batch": "fixed: as your batch size says; auto: as few micro-batches as fit in memory",
    "out_of_memory": "if a micro-batch does not fit: raise its error, or split it",
}
"""The options of apply() that are words, names and switches, and their help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.usage = "%(prog)s [-h] [--require] [options of apply()] CMD ..."
    about = "fail if no process of the command applied the patch (exit code 3)"
    parser.add_argument("--require", action="store_true", help=about)
    for name, about in OPTIONS.items():
        settings: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
        if name in CHOICES:
            settings = {"choices": CHOICES[name], "default": getattr(Options, name)}
        elif getattr(Options, name) is False:
            settings = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **settings)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD ...", help="the command and its arguments")


def execute(arguments: argparse.Namespace) -> int:
    """Replace this process by the command, or run it as a child.

    Returns:
        The command's exit code where it runs as a child (on Windows, and with --require); 126 or 127 if it cannot be
        run.

    Raises:
        OptionsError: if an option is invalid, there is no command, or --require with the patch switched off.
    """
    environment = environment_for({name: getattr(arguments, name) for name in OPTIONS}, os.environ)
    inherited_options(environment)
    command = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not command or not command[0]:
        found = "an empty command" if command else "no command"
        raise OptionsError(f"got {found}; expected one, such as: hf-accum-fix run torchrun train.py")
    if not enabled():
        if arguments.require:
            raise OptionsError(
                f"got --require and {SWITCH}={os.environ[SWITCH]}, which switches the patch off; expected one of them; "
                "omit --require"
            )
        complain(f"hf-accum-fix: off, {SWITCH}={os.environ[SWITCH]}: the command runs without the patch")
        environment = dict(os.environ)
    try:
        if arguments.require:
            return run_required(command, environment)
        if os.name == "posix":
            os.execvpe(command[0], command, environment)
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        is_script = command[0].endswith(".py") and Path(command[0]).is_file()
        meant = f"; did you mean: hf-accum-fix run python {' '.join(command)}" if is_script else ""
        complain(f"hf-accum-fix: {command[0]}: {error.strerror}{meant}")
        return 127 if isinstance(error, FileNotFoundError) else 126
