"""``hf-accum-fix verify train.py ARGS...``: run a script up to ``train()``, and verify its trainer there."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from hf_accum_fix.cli import complain, write
from hf_accum_fix.cli.instead import ANSWER, PROOF, Request
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError

DESCRIPTION: Final = """\
Run a training script, unedited, until it calls trainer.train(). Then, instead of training, split its first global
batch in several ways, run each split through the trainer's own loop without an optimizer step, and compare its gradient
with the full batch's: as the script would train, and with apply().

The script runs in a separate process, which is ended there: no line after trainer.train() runs, and no process that the
script starts trains.

On several ranks: accelerate launch -m hf_accum_fix verify train.py ...
"""

EPILOG: Final = """\
exit code:
  0  exact: the script's own split has the gradient of the full batch; the other splits do not count
  1  off: the script's own split is off; if --splits omits it: one of the given splits is off
  2  wrong usage
  3  could not tell, with the reason; or the script ended before it trained
"""

_PAUSE: Final = 0.05
#: Print a line on stderr once a process has ended, or after five seconds.
_PRINT_AFTER: Final = """
import sys, time, psutil
for _ in range(100):
    if not psutil.pid_exists(int(sys.argv[1])) or psutil.Process(int(sys.argv[1])).status() == psutil.STATUS_ZOMBIE:
        break
    time.sleep(0.05)
sys.stderr.write(f"hf-accum-fix verify: {sys.argv[2]}\\n")
"""
#: Seconds that a rank continues after a signal: a launcher ends all ranks as soon as one has its answer.
_GRACE: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    options = (
        "[--json FILE] [--plot FILE] [--splits BxG,...]\n  [--windows N] [--step N]\n  [--save FILE | --against FILE]"
    )
    parser.usage = f"%(prog)s [-h] {options} (train.py | -m module) ARGS ..."
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="also draw the error of every split (needs matplotlib)",
    )
    parser.add_argument(
        "--splits",
        type=_splits,
        metavar="BxG,...",
        help="splits to verify: samples per micro-batch x accumulation steps",
    )
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="number of global batches to verify")
    parser.add_argument(
        "--step", type=int, default=0, metavar="N", help="optimizer step to verify, such as one after a warm-up"
    )
    proof = parser.add_mutually_exclusive_group()
    proof.add_argument("--save", metavar="FILE", type=Path, help="also save the gradient of the full batch as a proof")
    proof.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="train up to the first optimizer step, on any engine, and hold that gradient against a proof, instead",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", metavar="train.py", help="the training script")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS ...", help="its arguments")


def _splits(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, pair.split("x"))) for pair in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected pairs such as 4x2,1x8")
    return [(pair[0], pair[1]) for pair in pairs]


def execute(arguments: argparse.Namespace) -> int:
    """Run the script, print the report on the first rank, and return its verdict.

    Raises:
        OptionsError: if the script does not exist, or an output file cannot be written; before anything runs.
        UnsupportedSetupError: if the script ends before it trains.
    """
    command = _command(arguments)
    for path in (arguments.json, arguments.plot, arguments.save):
        _check_writable(path)
    against = None if arguments.against is None else str(arguments.against.absolute())
    if against is not None:
        _check_alone(arguments)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise OptionsError("got --plot without matplotlib; expected it installed; pip install matplotlib")
    # A rank must survive the end of another one until its answer is written.
    with TemporaryDirectory(prefix="hf-accum-fix-", ignore_cleanup_errors=True) as folder, _terminable() as deadline:
        plot = None if arguments.plot is None else arguments.plot.suffix or ".png"
        asked = (arguments.splits, arguments.windows, arguments.step, plot, arguments.save is not None, against)
        request = Request(folder, os.getpid(), *asked)
        with _running(command, request) as script:
            answer = _answer_of(script, Path(folder), deadline)
        if answer is None:
            raise UnsupportedSetupError(
                f"got {arguments.script}, which did not call trainer.train(): {_ending(script.returncode)}; expected a "
                "script that trains with transformers.Trainer"
            )
        if os.environ.get("RANK", "0") == "0":
            complain(answer["error"].rstrip())
            write(f"{answer['text']}\n" if answer["text"] else "")
            if arguments.json is not None and answer["report"] is not None:
                with _reported(arguments.json):
                    arguments.json.write_text(json.dumps(answer["report"], indent=2) + "\n", encoding="utf-8")
            for made, path in ((f"plot{plot}", arguments.plot), (PROOF, arguments.save)):
                if Path(folder, made).is_file():
                    with _reported(path):
                        shutil.copyfile(Path(folder, made), path)
    if answer["code"]:
        report = answer["report"]
        _show_last(report["verdict"]["words"] if report else answer["error"].rstrip().rpartition("\n")[2])
    return int(answer["code"])


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Report a file that cannot be written; the exit code stays."""
    try:
        yield
    except OSError as error:
        complain(f"hf-accum-fix verify: cannot write {path}: {error.strerror}")


def _show_last(line: str) -> None:
    """Make a launcher print the verdict last: for every exit code but 0 it prints an error of its own, for each rank.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html: torchrun prints that file as the root cause.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    launcher = psutil.Process().parent()
    with suppress(OSError, psutil.Error):
        if place is not None:
            cause = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(place).write_text(json.dumps({"message": cause}), encoding="utf-8")
        elif launcher is not None and any("accelerate" in word for word in launcher.cmdline()[:3]):
            # accelerate starts a single process without torchrun, and prints a traceback after it.
            words = [sys.executable, "-c", _PRINT_AFTER, str(launcher.pid), line]
            subprocess.Popen(words, start_new_session=os.name == "posix")


def _command(arguments: argparse.Namespace) -> list[str]:
    """The command that starts the script without verify."""
    named: str = arguments.script
    if arguments.is_module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = find_spec(named.partition(".")[0]) is not None
        finally:
            sys.path.pop(0)
        if not found:
            raise OptionsError(f"got -m {named}; expected a module that python -m finds")
        return [sys.executable, "-m", named, *arguments.words]
    if not Path(named).is_file():
        what = "is a folder" if Path(named).is_dir() else "does not exist"
        raise OptionsError(f"got {named}, which {what}; expected a Python script, or -m and a module; check the path")
    return [sys.executable, named, *arguments.words]


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse what ``--against`` has no use for, and a proof that is not there."""
    if not arguments.against.is_file():
        raise OptionsError(
            f"got --against {arguments.against}, which is no file; expected a proof; make one with --save"
        )
    if arguments.plot is not None or arguments.splits is not None or (arguments.windows, arguments.step) != (1, 0):
        raise OptionsError(
            "got --against with --splits, --windows, --step or --plot; expected it alone: the script's own split and "
            "first step are run; omit them"
        )


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise OptionsError(f"got {path}; expected a file in an existing folder; make {path.absolute().parent} first")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        what = "is a folder" if path.is_dir() else "is not writable"
        raise OptionsError(f"got {path}, which {what}; expected a writable file; name another path")


@contextmanager
def _running(command: list[str], request: Request) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script in a new session; then end it and every process that it has started."""
    environment = request.environment(os.environ)
    script = subprocess.Popen(command, env=environment, start_new_session=os.name == "posix")
    try:
        yield script
    finally:
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(script.pid).children(recursive=True)
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
        else:
            script.kill()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        script.wait()


def _answer_of(script: subprocess.Popen[bytes], folder: Path, deadline: list[float]) -> dict[str, Any] | None:
    """Wait for the answer until the deadline; None if the script ended without one."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            script.wait(_PAUSE)
        ended = script.returncode is not None
        if (folder / ANSWER).is_file():
            answer: dict[str, Any] = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
            return answer
        if ended:
            return None
        if time.monotonic() > deadline[0]:
            raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def _terminable() -> Iterator[list[float]]:
    """The deadline: a SIGTERM or SIGHUP sets it; a rank waits a little longer, because its answer may follow."""
    deadline = [math.inf]
    if threading.current_thread() is not threading.main_thread():
        yield deadline
        return

    def terminate(*_: Any) -> None:
        deadline[0] = time.monotonic() + (_GRACE if "RANK" in os.environ else 0.0)

    caught = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.signal(each, terminate) for each in caught]
    try:
        yield deadline
    finally:
        for each, handler in zip(caught, before, strict=True):
            signal.signal(each, handler)


def _ending(code: int) -> str:
    if code < 0:
        return f"it was ended by signal {-code}"
    return f"it ended with exit code {code}" if code else "it ended"
