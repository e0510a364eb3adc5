"""``hf-accum-fix run --require``: run a command as a child, and fail if no process of it switched the patch on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Final

from hf_accum_fix.cli import COULD_NOT_TELL, complain

VARIABLE: Final = "PYTHON_REQUIRED_BY_HF_ACCUM_FIX"
"""Carries the files that a process with the patch on makes. Not a variable of ``run``, which removes its own."""

#: Sent to this process alone; those of the keyboard reach the command by themselves.
_FORWARDED: Final = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_OF_THE_KEYBOARD: Final = ("SIGINT", "SIGQUIT")


def report_on() -> None:
    """Let the commands that require it know that the patch is on in this process."""
    for file in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        with suppress(OSError):  # of another machine, or of a command that has ended
            Path(file).touch()


def run_required(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command; end by the signal that ended it.

    Returns:
        The command's exit code; 3 if that is 0 and no process of the command switched the patch on.

    Raises:
        OSError: if the command cannot be run.
    """
    with TemporaryDirectory(prefix="hf-accum-fix-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "on")
        files = os.pathsep.join(filter(None, (str(file), environment.get(VARIABLE, ""))))
        with _held_back() as children:
            child = subprocess.Popen(command, env={**environment, VARIABLE: files})
            children.append(child)
            code = child.wait()
        on = file.exists()
    if not on:
        complain(
            "hf-accum-fix: NOT on: got a command in which no process applied the patch; expected at least one, by "
            "--require; a process applies it as it imports transformers.trainer, unless its environment or Python "
            "flags (-E, -I, -S) drop PYTHONPATH: call hf_accum_fix.apply() in the script"
        )
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code or (0 if on else COULD_NOT_TELL)


@contextmanager
def _held_back() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Pass signals on to the children, and do not end by them; these are added once they run."""
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        if not children:
            raise SystemExit(128 + number)
        for child in children:
            child.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        if not _is_in_the_foreground():
            forward(number, frame)

    with handled({**dict.fromkeys(_FORWARDED, forward), **dict.fromkeys(_OF_THE_KEYBOARD, ignore)}):
        yield children


@contextmanager
def handled(handlers: Mapping[str, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals, by name, that this system has and nobody ignores (nohup); only the main thread may."""
    before = {}
    for name, handler in handlers.items() if threading.current_thread() is threading.main_thread() else ():
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            before[getattr(signal, name)] = signal.signal(getattr(signal, name), handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _is_in_the_foreground() -> bool:
    """Whether the keyboard's signals reach every process of this group, the command included."""
    with suppress(OSError, AttributeError), Path("/dev/tty").open("rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
