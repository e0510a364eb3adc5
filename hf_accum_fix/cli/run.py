"""``hf-accum-fix run CMD ...``: run a command with the patch applied in every Python process it starts."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hf_accum_fix.cli import complain
from hf_accum_fix.cli.inherit import environment_for
from hf_accum_fix.cli.require import run_required
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.options import SWITCH, enabled, on_the_command_line, options_from

DESCRIPTION: Final = """\
Run a command with the patch applied in it and in every Python process it starts: torchrun, accelerate launch,
deepspeed, llamafactory-cli, a shell script. No file is edited: each process applies the patch when it imports
transformers.trainer, and the first one prints "is on" to stderr. Without that line the patch is not on, as in
processes that drop PYTHONPATH (sudo, ssh, docker, python -E, -I and -S).

HF_ACCUM_FIX=0 runs the command without the patch.
"""

EPILOG: Final = """\
exit code: the command's own, which replaces this process and so gets its signals;
2 wrong usage, 126 the command cannot be run, 127 the command is not found.
With --require the command runs as a child, and gets the signals too; 3 if its own
code is 0 and no process of it applied the patch.

If apply() refuses the installed release or another package's patch, the process ends with that error.
"""

_CANNOT_RUN: Final = 126
_NOT_FOUND: Final = 127

#: Programs that run the words after their options as a command; launchers do so with one of the flags below.
_RUNNING: Final = frozenset((
    "conda", "env", "ionice", "mpirun", "nice", "nohup", "numactl", "setsid", "srun", "stdbuf", "sudo", "taskset",
    "time", "timeout", "uv",
))  # fmt: skip
_LAUNCHERS: Final = frozenset(("torchrun", "accelerate", "deepspeed"))
_ENV_TAKING_A_VALUE: Final = frozenset(("-u", "--unset", "-C", "--chdir", "-g", "-U", "-D", "-p"))
"""Options of env and sudo whose value is a word of its own."""
_NO_PYTHON: Final = frozenset(("--no-python", "--no_python"))

_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*t?(\.exe)?")
_DEFEATING: Final = "EIS"
_ENDING: Final = "cm"
_TAKING_A_VALUE: Final = "WX"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.usage = "%(prog)s [-h] [--require] [options of apply()] CMD ..."
    parser.add_argument(
        "--require", action="store_true", help="fail if no process of the command applied the patch (exit code 3)"
    )
    for option in on_the_command_line():
        flag, default = f"--{option.name.replace('_', '-')}", option.default
        settings: dict[str, Any] = {"help": option.metadata["help"], "default": default}
        if option.metadata["choices"] is not None:
            parser.add_argument(flag, choices=option.metadata["choices"], **settings)
        elif default is False:
            parser.add_argument(flag, action="store_true", **settings)
        else:
            parser.add_argument(flag, action="append", metavar="NAME", **{**settings, "default": []})
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD ...", help="the command and its arguments")


def execute(arguments: argparse.Namespace) -> int:
    """Replace this process by the command, or run it as a child.

    Returns:
        The command's exit code where it runs as a child (on Windows, and with --require); 126 or 127 if it cannot be
        run.

    Raises:
        OptionsError: if there is no command, or it starts a Python that ignores PYTHONPATH.
        UnsupportedSetupError: see environment_for().
    """
    given: dict[str, Any] = {option.name: getattr(arguments, option.name) for option in on_the_command_line()}
    options = options_from({name: tuple(each) if isinstance(each, list) else each for name, each in given.items()})
    command = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not command or not command[0]:
        found = "an empty command" if command else "no command"
        raise OptionsError(f"got {found}; expected one, such as: hf-accum-fix run torchrun train.py")
    if enabled():
        _refuse_cleaned_environment(command)
        _refuse_deaf_python(command)
        environment = environment_for(options, os.environ)
    elif arguments.require:
        raise OptionsError(
            f"got --require and {SWITCH}={os.environ[SWITCH]}, which switches the patch off; expected one of them; "
            "omit --require"
        )
    else:
        complain(f"hf-accum-fix: off, {SWITCH}={os.environ[SWITCH]}: the command runs without the patch")
        environment = dict(os.environ)
    try:
        if arguments.require:
            return run_required(command, environment)
        if os.name == "posix":
            os.execvpe(command[0], command, environment)
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        complain(f"hf-accum-fix: {command[0]}: {error.strerror}")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN


def _refuse_cleaned_environment(command: Sequence[str]) -> None:
    """Refuse ``env -i``, ``sudo`` and the like, which drop the variables that carry the patch."""
    cleaning = cleaning_words(command)
    if cleaning is not None:
        place, words = cleaning
        before, after = " ".join(command[:place]), " ".join(command[place:]) or "COMMAND"
        raise OptionsError(
            f"got {words!r} in the command, which drops or replaces PYTHONPATH, which carries the patch; expected the "
            f"command to keep it; put hf-accum-fix run behind it: {before} hf-accum-fix run {after}"
        )


def cleaning_words(command: Sequence[str]) -> tuple[int, str] | None:
    """Where the command begins that gets a cleaned environment, and the words that clean it; None without them.

    Source: https://www.gnu.org/software/coreutils/manual/html_node/env-invocation.html
    """
    for place, word in enumerate(command):
        name = Path(word).name
        if name in ("env", "sudo"):
            found, end = _cleaning_option(name, command[place + 1 :])
            if found:
                return place + 1 + end, f"{name} {found}".strip()
        if name not in _RUNNING and not (place > 0 and (word.startswith("-") or "=" in word or not shutil.which(word))):
            return None
    return None


def _cleaning_option(name: str, words: Sequence[str]) -> tuple[str, int]:
    """The option of env or sudo that cleans the environment (sudo: its lack of one), and the number of its words."""
    found, at = "", 0
    while at < len(words) and (words[at].startswith("-") or "=" in words[at]):
        word = words[at]
        value = word in _ENV_TAKING_A_VALUE and at + 1 < len(words)
        given = f"{word} {words[at + 1]}" if value else word
        kept = word.startswith(("-E", "--preserve-env"))
        cleans = word in ("-", "-i", "--ignore-environment") or (
            (word.startswith("-") and not word.startswith("--") and "i" in word and not value)
            or given.replace("=", " ").split()[:2] in (["-u", "PYTHONPATH"], ["--unset", "PYTHONPATH"])
            or given == "-uPYTHONPATH"
            or word.startswith("PYTHONPATH=")
        )
        if name == "env" and cleans:
            found = found or given
        if name == "sudo" and kept:
            return "", at
        at += 2 if value else 1
    return (found, at) if name == "env" else ("without -E", at)


def _refuse_deaf_python(command: Sequence[str]) -> None:
    """Refuse a command that would train without the patch; flags inside scripts cannot be detected."""
    flag = defeating_flag(command)
    if flag is not None:
        raise OptionsError(
            f"got {' '.join(command)}, where {flag} makes Python ignore PYTHONPATH or sitecustomize, which carry the "
            "patch; expected a command without it; drop the flag, or call hf_accum_fix.apply() in the script"
        )
    program = shutil.which(command[0])
    flag = None if program is None else defeating_flag(_shebang(Path(program)))
    if flag is not None:
        raise OptionsError(
            f"got {program}, whose first line starts Python with {flag}: that ignores PYTHONPATH or sitecustomize, "
            f"which carry the patch; expected it to run without the flag: hf-accum-fix run python {program} ..."
        )


def defeating_flag(words: Sequence[str]) -> str | None:
    """The -E, -I or -S flag of the Python that a command starts; None without one.

    Source: https://docs.python.org/3/using/cmdline.html
    """
    flags = iter(_words_after_python(words))
    for word in flags:
        if word == "-" or not word.startswith("-"):
            return None
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(flags, None)
            continue
        for place, letter in enumerate(word[1:], start=2):
            if letter in _DEFEATING:
                return word
            if letter in _ENDING:
                return None
            if letter in _TAKING_A_VALUE:
                if place == len(word):
                    next(flags, None)
                break
    return None


def _words_after_python(words: Sequence[str]) -> Sequence[str]:
    """The words after the Python that a command starts, directly or through programs that run a command; else none."""
    for place, word in enumerate(words):
        name = Path(word).name
        if _PYTHON.fullmatch(name):
            return words[place + 1 :]
        runs = name in _RUNNING or (name in _LAUNCHERS and not _NO_PYTHON.isdisjoint(words))
        # The options of such a program, and their values, are no programs.
        option = place > 0 and (word.startswith("-") or "=" in word or shutil.which(word) is None)
        if not runs and not option:
            return ()
    return ()


def _shebang(script: Path) -> list[str]:
    """The words of a script's first line; empty for other files."""
    if not os.access(script, os.R_OK):  # a binary such as sudo; scripts are readable
        return []
    with script.open("rb") as file:
        line = file.readline(1024)
    return line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
