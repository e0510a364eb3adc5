"""Verify instead of training, in the processes of a script under ``hf-accum-fix verify``.

``Trainer.train`` never returns there, so that no line of the script runs after it: an exception can be caught, and a
``finally`` saves. The process waits for the command that started the script to end it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from hf_accum_fix.verification.report import VerificationReport

VARIABLE: Final = "PYTHON_VERIFY_BY_HF_ACCUM_FIX"
"""Carries the request; no variable of ``run``, which drops its own before it hands them on."""

BOOTSTRAP: Final = str(Path(__file__).with_name("verify_bootstrap"))
"""The folder with the sitecustomize."""

ANSWER: Final = "answer.json"
"""The file with the answer, in the folder of the request."""

_PAUSE: Final = 0.05
_WRONG_USAGE: Final = 2
_NO_ANSWER: Final = 3


@dataclass(frozen=True)
class Request:
    """What to verify, and where the answer goes.

    Attributes:
        folder: for the answer; as long as it exists somebody waits for it.
        asked_by: the process that waits.
        splits, windows, step: arguments of `hf_accum_fix.verify`.
        plot: ending of the picture's name; None: no picture.
    """

    folder: str
    asked_by: int
    splits: list[tuple[int, int]] | None
    windows: int
    step: int
    plot: str | None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment in which a script verifies instead of training; its temporary files vanish with it."""
        before = inherited.get("PYTHONPATH", "")
        folders = [BOOTSTRAP, *(folder for folder in before.split(os.pathsep) if folder and folder != BOOTSTRAP)]
        temporary = Path(self.folder, "tmp")
        temporary.mkdir()
        handed = {"PYTHONPATH": os.pathsep.join(folders), VARIABLE: json.dumps(asdict(self))}
        return {**inherited, **handed, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}


def verify_instead_of_training() -> None:
    """Make the first train() of this process verify, as soon as there is a Trainer.

    Import nothing heavy here: a script may set its environment before it imports torch.
    """
    if VARIABLE not in os.environ:
        return
    from wrapt import register_post_import_hook, wrap_function_wrapper

    request = Request(**json.loads(os.environ[VARIABLE]))
    first = threading.Lock()
    verifying: int | None = None

    def train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal verifying
        if verifying == threading.get_ident():
            return wrapped(*args, **kwargs)
        if first.acquire(blocking=False):
            verifying = threading.get_ident()
            _answer(instance, request)
        _wait_for_the_end(request)

    def at_import(owner: str) -> Callable[[Any], None]:
        def wrap(module: Any) -> None:
            wrap_function_wrapper(module, f"{owner}.train", train)

        return wrap

    # A subclass prepares for training before it calls the Trainer's method, so stop it first.
    register_post_import_hook(at_import("Trainer"), "transformers.trainer")
    register_post_import_hook(at_import("GlobalBatchMixin"), "hf_accum_fix.trainer")


def _answer(trainer: Any, request: Request) -> None:
    """Verify, and store the answer. An error is an answer, too: the script might catch it and train."""
    import hf_accum_fix

    splits = None if request.splits is None else [(each[0], each[1]) for each in request.splits]
    try:
        report = hf_accum_fix.verify(trainer, splits, request.windows, step=request.step)
        error = _draw(report, request)
        answer = {"code": int(report.verdict.kind), "text": str(report), "error": error, "report": report.to_dict()}
    except hf_accum_fix.OptionsError as error:
        answer = {"code": _WRONG_USAGE, "text": "", "error": f"hf-accum-fix verify: {error}\n", "report": None}
    except BaseException:
        answer = {"code": _NO_ANSWER, "text": "", "error": traceback.format_exc(), "report": None}
    sys.stdout.flush()
    sys.stderr.flush()
    # Every rank has the same answer; write it in one go, because somebody waits for it.
    draft = Path(request.folder, f"{os.getpid()}.json")
    draft.write_text(json.dumps(answer), encoding="utf-8")
    draft.replace(Path(request.folder, ANSWER))


def _draw(report: VerificationReport, request: Request) -> str:
    """Draw the picture, and return why there is none."""
    if request.plot is None or not any(result.error is not None for result in report.results):
        return ""
    draft = Path(request.folder, f"{os.getpid()}{request.plot}")
    try:
        report.plot(draft)
    except Exception as error:  # whatever a backend raises: the report has an answer
        return f"hf-accum-fix verify: the picture cannot be drawn: {error}\n"
    draft.replace(Path(request.folder, f"plot{request.plot}"))
    return ""


def _wait_for_the_end(request: Request) -> NoReturn:
    """Wait until the script is ended, or until nobody is left to end it."""
    import psutil

    while Path(request.folder).is_dir() and psutil.pid_exists(request.asked_by):
        time.sleep(_PAUSE)
    os._exit(_NO_ANSWER)
