"""``hf-accum-fix verify train.py ARGS...``: run a script up to ``train()``, and verify its trainer there."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from hf_accum_fix.cli import complain, write
from hf_accum_fix.cli.instead import ANSWER, Request
from hf_accum_fix.cli.require import handled
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError

DESCRIPTION: Final = """\
Run a training script, unedited, until it calls trainer.train(). Then, instead
of training, split its first global batch in several ways, run each split
through the trainer's own loop without an optimizer step, and compare its
gradient with the full batch's: as the script would train, and with apply().

No line after trainer.train() runs, and no process that the script starts
trains. On several ranks: accelerate launch -m hf_accum_fix verify train.py ...
"""

EPILOG: Final = """\
exit code:
  0  exact: the script's own split has the full batch's gradient, whatever the
     other splits have
  1  the script's own split is off; if --splits omits it: one of them is off
  2  wrong usage
  3  could not tell, with the reason; or the script ended before it trained
"""

_PAUSE: Final = 0.05
#: Seconds that a rank continues after a signal: a launcher ends all ranks as soon as one has its answer.
_GRACE: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    options = "[--json FILE] [--splits BxG,...] [--windows N] [--step N]\n  [--save FILE | --against FILE]"
    parser.usage = f"%(prog)s [-h] {options} (train.py | -m module) ARGS ..."
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    about = "splits to verify: samples per micro-batch x accumulation steps"
    parser.add_argument("--splits", type=_splits, metavar="BxG,...", help=about)
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="number of global batches to verify")
    about = "optimizer step to verify, such as one after a warm-up"
    parser.add_argument("--step", type=int, default=0, metavar="N", help=about)
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--save", metavar="FILE", type=Path, help="also save the gradient of the full batch as a proof")
    about = "train up to the first optimizer step, on any engine, and hold that gradient against a proof, instead"
    proof.add_argument("--against", metavar="FILE", type=Path, help=about)
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", metavar="train.py", help="the training script")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS ...", help="its arguments")


def _splits(text: str) -> list[tuple[int, int]]:
    pairs = [re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", pair) for pair in text.split(",")]
    if None in pairs:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected pairs such as 4x2,1x8")
    return [(int(pair[1]), int(pair[2])) for pair in pairs if pair]


def execute(arguments: argparse.Namespace) -> int:
    """Run the script, print the report on the first rank, and return its verdict.

    Raises:
        OptionsError: if the script does not exist, or an output file cannot be written; before anything runs.
        UnsupportedSetupError: if the script ends before it trains.
    """
    command = _command(arguments)
    given = {name: getattr(arguments, name) for name in ("json", "save", "against")}
    files = {name: None if path is None else str(path.absolute()) for name, path in given.items()}
    _check_files(arguments)
    deadline = [math.inf]

    def terminate(*_: Any) -> None:
        # A rank must survive the end of another one until its answer is written.
        deadline[0] = time.monotonic() + (_GRACE if "RANK" in os.environ else 0.0)

    temporary = TemporaryDirectory(prefix="hf-accum-fix-", ignore_cleanup_errors=True)
    with temporary as folder, handled({"SIGTERM": terminate, "SIGHUP": terminate}):
        request = Request(folder, os.getpid(), arguments.splits, arguments.windows, arguments.step, **files)
        with _running(command, request) as script:
            answer = _answer_of(script, Path(folder), deadline)
    if answer is None:
        code = script.returncode
        ended = f" with exit code {code}" if code > 0 else f", by signal {-code}" if code else ""
        raise UnsupportedSetupError(
            f"got {arguments.script}, which did not call trainer.train(): it ended{ended}; expected a script that "
            "trains with transformers.Trainer"
        )
    if os.environ.get("RANK", "0") == "0":
        complain(answer["error"])
        write(f"{answer['text']}\n" if answer["text"] else "")
    return int(answer["code"])


def _command(arguments: argparse.Namespace) -> list[str]:
    """The command that starts the script without verify."""
    named: str = arguments.script
    if arguments.is_module:
        if PathFinder.find_spec(named.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise OptionsError(f"got -m {named}; expected a module that python -m finds")
        return [sys.executable, "-m", named, *arguments.words]
    if not Path(named).is_file():
        what = "is a folder" if Path(named).is_dir() else "does not exist"
        raise OptionsError(f"got {named}, which {what}; expected a Python script, or -m and a module; check the path")
    return [sys.executable, named, *arguments.words]


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be written, and a proof that is not there, or comes with what it has no use for."""
    for path in filter(None, (arguments.json, arguments.save)):
        folder = path.absolute().parent
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            what = "is a folder" if path.is_dir() else "is not writable"
            raise OptionsError(f"got {path}, which {what}; expected a writable file; name another path")
    if (against := arguments.against) is not None and not against.is_file():
        raise OptionsError(f"got --against {against}, which is no file; expected a proof; make one with --save")
    asked = (arguments.splits, arguments.windows, arguments.step)
    if against is not None and asked != (None, 1, 0):
        raise OptionsError(
            "got --against with --splits, --windows or --step; expected it alone: the script's own split and "
            "first step are run; omit them"
        )


@contextmanager
def _running(command: list[str], request: Request) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script in a new session; then end it and every process that it has started."""
    environment = request.environment(os.environ)
    script = subprocess.Popen(command, env=environment, start_new_session=os.name == "posix")
    try:
        yield script
    finally:
        processes: list[Any] = [script]
        with suppress(psutil.NoSuchProcess):
            processes += psutil.Process(script.pid).children(recursive=True)
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        script.wait()


def _answer_of(script: subprocess.Popen[bytes], folder: Path, deadline: list[float]) -> dict[str, Any] | None:
    """Wait for the answer until the deadline; None if the script ended without one."""
    while time.monotonic() <= deadline[0]:
        with suppress(subprocess.TimeoutExpired):
            script.wait(_PAUSE)
        ended = script.returncode is not None
        if (folder / ANSWER).is_file():
            answer: dict[str, Any] = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
            return answer
        if ended:
            return None
    raise SystemExit(128 + signal.SIGTERM)
