"""Verify instead of training, in the processes of a script under ``hf-accum-fix verify``.

``Trainer.train`` never returns there, so that no later line of the script runs: an exception could be caught, and a
``finally`` block saves a model. The process waits until the command that started the script ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from hf_accum_fix.cli import COULD_NOT_TELL, WRONG_USAGE
from hf_accum_fix.cli.inherit import python_path

if TYPE_CHECKING:
    from hf_accum_fix.verification.proof import Against
    from hf_accum_fix.verification.report import VerificationReport

VARIABLE: Final = "PYTHON_VERIFY_BY_HF_ACCUM_FIX"
"""Carries the request. Not a variable of ``run``, which removes its own from the environment it passes on."""

ANSWER: Final = "answer.json"
"""The file with the answer, in the folder of the request."""

_PAUSE: Final = 0.05


@dataclass(frozen=True)
class Request:
    """What to verify, and where to write what; the files are absolute, None where not asked for."""

    folder: str  # for the answer; while it exists, the command waits
    asked_by: int  # the process of the command
    splits: list[tuple[int, int]] | None  # with windows and step: arguments of `hf_accum_fix.verify`
    windows: int
    step: int
    json: str | None = None
    save: str | None = None
    against: str | None = None  # the proof to hold the trainer against, instead

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment in which a script verifies instead of training, with a temporary folder of its own."""
        temporary = Path(self.folder, "tmp")
        temporary.mkdir()
        passed = {"PYTHONPATH": python_path(inherited), VARIABLE: json.dumps(asdict(self))}
        return {**inherited, **passed, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}


def verify_instead_of_training() -> None:
    """Make the first train() of this process verify, once the Trainer is imported.

    Import nothing heavy here: a script may set environment variables before it imports torch.
    """
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

    # A subclass prepares for training before it calls the Trainer's method, so stop it first.
    wrap = wrap_function_wrapper
    register_post_import_hook(lambda module: wrap(module, "Trainer.train", train), "transformers.trainer")
    register_post_import_hook(lambda module: wrap(module, "GlobalBatchMixin.train", train), "hf_accum_fix.trainer")


def _answer(trainer: Any, request: Request) -> None:
    """Verify, and store the answer. An error is an answer too, because the script might catch it and train."""
    import hf_accum_fix

    try:
        report = _report(trainer, request)
        data = report.to_dict()
        answer = {"code": int(report.verdict.kind), "text": str(report), "error": _written(report, data, request)}
    except hf_accum_fix.OptionsError as error:
        answer = {"code": WRONG_USAGE, "text": "", "error": f"hf-accum-fix verify: {error}"}
    except hf_accum_fix.AccumFixError as error:
        text = f"could not tell: {error}"
        data = {"ok": False, "verdict": {"kind": "could_not_tell", "words": text}}
        answer = {"code": COULD_NOT_TELL, "text": text, "error": _written(None, data, request)}
    except BaseException:
        answer = {"code": COULD_NOT_TELL, "text": "", "error": traceback.format_exc().rstrip()}
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Every rank has the same answer; replace the file at once, because the command polls for it.
    draft = Path(request.folder, f"{os.getpid()}.json")
    draft.write_text(json.dumps(answer), encoding="utf-8")
    draft.replace(Path(request.folder, ANSWER))


def _report(trainer: Any, request: Request) -> VerificationReport | Against:
    import hf_accum_fix

    if request.against is not None:
        from hf_accum_fix.verification.proof import Proof, hold_against

        return hold_against(trainer, Proof.load(Path(request.against)))
    splits = None if request.splits is None else [(each[0], each[1]) for each in request.splits]
    save = None if request.save is None else Path(request.folder, "proof.json")
    return hf_accum_fix.verify(trainer, splits, request.windows, step=request.step, save=save)


def _written(report: Any, data: dict[str, Any], request: Request) -> str:
    """Write the files on the first rank; the errors: the report stands without them."""
    proof, errors = Path(request.folder, "proof.json"), list[str]()
    writing: list[tuple[str | None, bool, Callable[[str], object]]] = [
        (request.json, True, lambda path: Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")),
        (request.save, proof.is_file(), lambda path: shutil.copyfile(proof, path)),
    ]
    for path, has_it, write in writing if os.environ.get("RANK", "0") == "0" else ():
        try:
            if path is not None and has_it:
                write(path)
        except Exception as error:  # anything that a drawing backend raises
            errors.append(f"hf-accum-fix verify: cannot write {path}: {getattr(error, 'strerror', None) or error}")
    return "\n".join(errors)


def _wait_for_the_end(request: Request) -> NoReturn:
    """Wait until the command ends this process, or has ended itself."""
    import psutil

    while Path(request.folder).is_dir() and psutil.pid_exists(request.asked_by):
        time.sleep(_PAUSE)
    os._exit(COULD_NOT_TELL)
