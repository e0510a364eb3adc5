"""``hf-accum-fix verify train.py ARGS...``: the user's own script until it trains; there its trainer is verified."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_accum_fix.errors import OptionsError, UnsupportedSetupError

if TYPE_CHECKING:
    from hf_accum_fix.verification.report import VerificationReport

DESCRIPTION: Final = """\
Run a training script, unedited, until it calls trainer.train(). There, instead of training, the first global batch is
cut in several ways, each cut is run through the trainer's own loop without a step being taken, and its gradient is
compared with that of the full batch: as the script would train, and with apply().

On several ranks: accelerate launch -m hf_accum_fix verify train.py ...
"""

EPILOG: Final = """\
exit code:
  0  exact: as the script would train, every cut has the gradient of the full batch
  1  off: it has not
  2  wrong usage
  3  could not tell, with the reason; or the script ended before it trained
"""


class _Verified(BaseException):
    """Ends the script where it would train; no Exception, which a script may catch."""

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report.verdict))
        self.report = report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``verify`` takes."""
    parser.usage = "%(prog)s [-h] [--json FILE] [--plot FILE] [--splits BxG,...] [--windows N] train.py ARGS ..."
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="also draw the error of every cut, where one was computed (needs matplotlib)",
    )
    parser.add_argument(
        "--splits", type=_splits, metavar="BxG,...", help="cuts: samples of a micro-batch x accumulation steps"
    )
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="global batches to verify on")
    parser.add_argument("script", type=Path, metavar="train.py", help="the script")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS ...", help="its arguments")


def _splits(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, pair.split("x"))) for pair in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}; needed are pairs such as 4x2,1x8")
    return [(pair[0], pair[1]) for pair in pairs]


def execute(arguments: argparse.Namespace) -> int:
    """Run the script, print the report on the first rank, and return its verdict.

    Raises:
        OptionsError: if there is no such script, or a file asked for cannot be made; before anything is run.
        UnsupportedSetupError: if it ends before it trains.
    """
    script: Path = arguments.script
    if not script.is_file():
        raise OptionsError(f"there is no script {script}; needed is the file that you would start with python")
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionsError(f"{path} cannot be written: there is no folder {path.absolute().parent}; make it first")
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise OptionsError("--plot needs matplotlib; pip install matplotlib")
    _intercept(lambda trainer: _report(trainer, arguments))
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments.words]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
        ended = "it ended"
    except _Verified as verified:
        return int(verified.report.verdict.kind)
    except SystemExit as error:
        ended = f"it ended with exit code {error.code!r}"
    finally:
        sys.argv, sys.path[:] = before
    raise UnsupportedSetupError(
        f"{script} did not call trainer.train(): {ended}; needed is a script that trains by transformers.Trainer"
    )


def _intercept(answer: Callable[[Any], VerificationReport]) -> None:
    """Let the first train() of the process be answered by a verification, as soon as there is a Trainer.

    Nothing heavy is imported here: a script may set its environment before it imports torch.
    """
    from wrapt import register_post_import_hook, wrap_function_wrapper

    verifying = False

    def train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal verifying
        if verifying:
            return wrapped(*args, **kwargs)
        verifying = True
        raise _Verified(answer(instance))

    def at_import(owner: str) -> Callable[[Any], None]:
        def wrap(module: Any) -> None:
            wrap_function_wrapper(module, f"{owner}.train", train)

        return wrap

    # The subclass prepares for training before it comes to the Trainer, so it is stopped first.
    register_post_import_hook(at_import("Trainer"), "transformers.trainer")
    register_post_import_hook(at_import("GlobalBatchMixin"), "hf_accum_fix.trainer")


def _report(trainer: Any, arguments: argparse.Namespace) -> VerificationReport:
    """Verify, and on the first rank say what was found."""
    import hf_accum_fix

    report = hf_accum_fix.verify(trainer, arguments.splits, arguments.windows)
    if trainer.args.process_index == 0:
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        if arguments.plot is not None and any(result.error is not None for result in report.results):
            report.plot(arguments.plot)
    return report
