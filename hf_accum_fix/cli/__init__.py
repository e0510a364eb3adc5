"""The command line: each command is a row of COMMANDS and a module of that name.

The module holds ``add_arguments(parser)``, ``execute(arguments) -> exit code``, and the help texts ``DESCRIPTION`` and
``EPILOG``. Only the requested command's module is imported, so that every command starts quickly.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final, TextIO

from hf_accum_fix.errors import AccumFixError, OptionsError
from hf_accum_fix.version import __version__

COMMANDS: Final = {
    "doctor": "check whether the installed release, or your model on it, trains at the right gradient",
    "explain": "explain one defect: the wrong equation, the right one, links; without a name, list all",
    "run": "run a command with the patch applied, in it and in every Python process it starts",
    "verify": "compare the gradient of a training script for several splits of one batch, instead of training",
    "watch": "summarise the logs of a run; of several runs, the ratio of their losses",
}
"""Name of each command and of its module, and a summary."""

LEGEND: Final = """\
G: gradient_accumulation_steps, W: data-parallel ranks,
r: micro-batches of a short window, N: items (targets) of the global batch,
N_k: those of rank k, n_m and S_m: items and summed loss of micro-batch m.
head: a model class with its loss; item: a target that counts in the loss;
window: micro-batches of one step."""
"""The letters and words of the defect table."""

WRONG_USAGE: Final = 2
COULD_NOT_TELL: Final = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program's name, by default this process's.

    Returns:
        The command's exit code; 2: wrong usage; 3: it failed.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in argv if word in COMMANDS), "")
    try:
        arguments = _parsed(argv, name)
        code: int = import_module(f"{__name__}.{arguments.name}").execute(arguments)
    except (AccumFixError, KeyboardInterrupt, ModuleNotFoundError) as error:
        install = "; install it, or reinstall hf-accum-fix" if isinstance(error, ModuleNotFoundError) else ""
        complain(f"hf-accum-fix {name}: {str(error) or 'interrupted'}{install}")
        code = WRONG_USAGE if isinstance(error, OptionsError) else COULD_NOT_TELL
    except Exception:
        # Python's exit code for a crash, 1, would mean "affected".
        complain(traceback.format_exc().rstrip())
        code = COULD_NOT_TELL
    finally:
        # argparse has written to them, too.
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
    return code


def write(text: str) -> None:
    """Write to stdout, on the first rank; a closed pipe or a full disk does not change the exit code."""
    # RANK alone is that of a machine of a cluster, on which a user asks.
    if "LOCAL_RANK" in os.environ and os.environ.get("RANK", "0") != "0":
        return
    with suppress(OSError):
        sys.stdout.write(text)
    error = _flush(sys.stdout)
    if error is not None and error.errno != errno.EPIPE:
        complain(f"hf-accum-fix: cannot write the report: {error.strerror}")


def complain(text: str) -> None:
    """Write a line to stderr, on the first rank of each machine; a closed pipe does not change the exit code."""
    if text and sys.stderr is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
        _flush(sys.stderr)


def _flush(stream: TextIO | None) -> OSError | None:
    """Flush; if that fails, drop what is not written: Python flushes again at exit, and would exit with 120."""
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _parsed(argv: Sequence[str], asked: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hf-accum-fix", description="Exact gradient accumulation for Hugging Face Transformers."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked:
            module = import_module(f"{__name__}.{name}")
            command.description, command.epilog = module.DESCRIPTION, module.EPILOG
            module.add_arguments(command)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse would print the usage of the program, not that of the command.
        commands.choices[arguments.name].error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments
