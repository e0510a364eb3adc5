"""apply(), revert() and report(): detect, plan and patch the Trainer of this process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from hf_accum_fix.confirmation import is_quiet, on_line, print_line, print_once_per_job
from hf_accum_fix.errors import AccumFixError, ForeignPatchError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.observations import recorded
from hf_accum_fix.options import SWITCH, Options, enabled, options_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hf_accum_fix.reporting import Report
    from hf_accum_fix.upstream.environment import Environment
    from hf_accum_fix.upstream.patch import Installation, Wrapper
    from hf_accum_fix.upstream.plan import Plan

_LOG = logging.getLogger("hf_accum_fix")
# Do not hold it while transformers.trainer may be imported: that import runs our hook, which takes this lock.
_LOCK = RLock()
#: Holds the active handle of the process; survives a reload or a second import of this package.
_MEMORY: Final[dict[str, Any]] = vars(sys.modules.setdefault("_hf_accum_fix_memory", ModuleType("memory")))


class _State(str, Enum):
    """State of a handle; compare it by ==, because a reload of this module creates it again."""

    OFF = "switched off"
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"
    REVERTED = "not applied"


class PatchHandle:
    """The patch of this process; revert(), or the end of a with block, undoes one apply().

    Attributes:
        options: the user's options.
        plan: the decision about every defect; a pending handle plans again when the import applies it.
    """

    def __init__(self, options: Options, plan: Plan, *, off: bool = False, quiet: bool = False) -> None:
        """Only apply() creates handles."""
        self.options = options
        self.plan = plan
        self._quiet = quiet
        self._deferred = False
        self._state = _State.OFF if off else _State.PENDING
        self._applications = 1
        self._trainer: type | None = None
        self._installation: Installation | None = None
        self._guard: Installation | None = None
        self._hand_back: Callable[[Options], None] | None = None
        self._refusal: Exception | None = None

    @property
    def active(self) -> bool:
        """Whether the Trainer's methods are wrapped."""
        return self._state == _State.APPLIED

    @property
    def pending(self) -> bool:
        """Whether the wrapping waits for the import of transformers.trainer."""
        return self._state == _State.PENDING

    def missing(self) -> tuple[str, ...]:
        """Names of the methods that another patch has replaced since, so that our wrapper is not called."""
        with _LOCK:
            if self._installation is None:
                return ()
            return self._installation.names if self._is_stale() else tuple(self._installation.replacements())

    def _is_stale(self) -> bool:
        """Whether transformers.trainer was reloaded since, so that another class is the Trainer now."""
        from hf_accum_fix.upstream.environment import imported_trainer

        return self.active and imported_trainer() not in (None, self._trainer)

    def revert(self) -> None:
        """Undo one apply(); the last one restores the identical original methods, or cancels a pending patch.

        Raises:
            ForeignPatchError: if another patch replaced a method since; then nothing is changed.
        """
        self._undo_one()
        if self.active:
            _LOG.info("the patch stays on, for other calls of apply(); hf_accum_fix.revert() undoes all of them")

    def _undo_one(self) -> None:
        with _LOCK:
            if self._applications > 1:
                self._applications -= 1
            else:
                self._undo_all()

    def _undo_all(self) -> None:
        with _LOCK:
            installed = [each for each in (self._installation, self._guard) if each is not None]
            if installed:
                from hf_accum_fix.upstream.environment import is_training
                from hf_accum_fix.upstream.patch import restore

                restore(installed)
                # Without an installation apply() was refused.
                if self._installation is not None and is_training():
                    _LOG.warning("revert() while a Trainer trains: the stock Trainer runs the rest of its training")
                self._installation = self._guard = None
            self._refusal, self._applications = None, 0
            if self._state != _State.OFF:
                self._state = _State.REVERTED
            if _MEMORY.get("handle") is self:
                _MEMORY["handle"] = None
            if installed and self._hand_back is not None:
                self._hand_back(self.options)

    def __enter__(self) -> PatchHandle:
        """Return the handle; apply() has patched already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo one apply()."""
        self._undo_one()

    def _install(self, _: ModuleType) -> None:
        """Wrap the methods if this handle is pending: the hook at the Trainer's import."""
        if not self.pending:
            return
        # Waits if another thread is importing it; in the hook itself the import is done.
        import_module("transformers.trainer")
        from hf_accum_fix.upstream.environment import imported_trainer, is_pristine, is_training
        from hf_accum_fix.upstream.patch import Patch, install
        from hf_accum_fix.upstream.seams import EVALUATION

        with _LOCK, self._remembering_refusal():
            if not self.pending:
                return
            environment, self.plan = _planned(self.options)
            if self.plan.refusal is not None:
                raise self.plan.refusal
            if is_training():
                raise UnsupportedSetupError(
                    "got apply() while a Trainer trains; expected it before train(), or part of the run would be "
                    "stock; call it at the top of the script"
                )
            trainer = imported_trainer()
            if trainer is None:
                raise SeamError(
                    "got transformers.trainer without a class Trainer; expected that class; call apply() before or "
                    "after the import of that module, not while it is imported"
                )
            # Imported late: these modules need attributes that the plan has just checked.
            from hf_accum_fix.evaluation import evaluation_loop
            from hf_accum_fix.overrides import OVERRIDES, hand_back

            names = [state.seam.name for state in environment.seams]
            patches = [Patch(trainer, name, self._wrapper(name, OVERRIDES[name])) for name in names]
            if self.options.eval_loss:
                loops = [name for name in EVALUATION if hasattr(trainer, name)]
                patches += [Patch(trainer, name, self._wrapper(name, evaluation_loop)) for name in loops]
            self._installation = install(patches, is_pristine, self.options.allow_foreign)
            self._trainer, self._hand_back = trainer, hand_back
            self._state = _State.APPLIED
        _log_patched(environment, self.plan)
        if not self._quiet:
            print_once_per_job(on_line(environment, self.plan))

    def _watch(self, _: ModuleType) -> None:
        """Wrap on_train_begin, to check the methods as training begins: the hook at the import of callbacks."""
        from hf_accum_fix.upstream.patch import Patch, install
        from hf_accum_fix.upstream.seams import GUARD

        module, (owner, name) = import_module(GUARD[0]), GUARD[1:]

        with _LOCK:
            if self._guard is not None or not (self.pending or self.active):
                return
            handler = getattr(module, owner, None)
            if handler is None or not hasattr(handler, name):
                _LOG.warning(
                    "%s has no %s.%s: a replacement or reload of the Trainer after apply() will not be detected",
                    *GUARD,
                )
                return
            self._guard = install([Patch(handler, name, self._at_train_begin)], lambda *_: True)

    @contextmanager
    def _remembering_refusal(self) -> Iterator[None]:
        """Store a refusal, so that a script that catches it is refused again when training begins."""
        try:
            yield
        except Exception as error:
            self._state, self._refusal = _State.REFUSED, error
            if self._deferred and not self._quiet:
                # transformers hides an error in its imports behind "are this object's requirements defined correctly?".
                print_line(f"NOT on: {error}")
            raise

    def _at_train_begin(self, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from hf_accum_fix.upstream.environment import calling_trainer, upstream_class

        trainer = calling_trainer(sys._getframe(1))
        base = None if trainer is None else upstream_class(type(trainer))
        if base is not None and self.active and not enabled():
            _LOG.warning(
                "%s=%s was set after apply(): the stock %s trains; unset it, or call revert()",
                *(SWITCH, os.environ[SWITCH], type(trainer).__name__),
            )
        if base is not None and enabled():
            if self._refusal is not None:
                raise self._refusal
            if self.pending or (self.active and base is not self._trainer):
                raise SeamError(
                    f"got a {type(trainer).__name__} based on {base.__module__}.{base.__qualname__}; expected the "
                    "class that apply() patched: transformers.trainer was reloaded, or the class has moved; call "
                    "revert() and apply(), then create the trainer from the class imported now"
                )
            self._check_nothing_was_dropped()
        return wrapped(*args, **kwargs)

    def _warn_if_never_imported(self) -> None:
        """Warn at exit if the process imported transformers, but never transformers.trainer."""
        if self.pending and not self._quiet and "transformers" in sys.modules:
            print_once_per_job(
                "NOT on: transformers.trainer was never imported, so apply() had no effect in this process"
            )

    def _check_nothing_was_dropped(self) -> None:
        """Refuse to train if another patch replaced a method, and with it dropped our wrapper."""
        from hf_accum_fix.upstream.chain import author
        from hf_accum_fix.upstream.patchers import known_patcher

        with _LOCK:
            dropped = {} if self._installation is None else self._installation.replacements()
        if not dropped or self._trainer is None:
            return
        authors = {name: author(replacement) for name, replacement in dropped.items()}
        known = (known_patcher(replacement, authors[name], self._trainer) for name, replacement in dropped.items())
        patcher = next((each for each in known if each is not None), None)
        by_method = {f"Trainer.{name}": found for name, found in authors.items()}
        raise ForeignPatchError.dropped(by_method, "" if patcher is None else patcher.advice)

    def _wrapper(self, name: str, override: Callable[..., Any]) -> Wrapper:
        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A bound method or a foreign wrapper may hold ours after revert(): then call the original.
            if self._state != _State.APPLIED:
                return wrapped(*args, **kwargs)
            if name == "train":
                self._check_nothing_was_dropped()
            return override(wrapped, instance, args, kwargs, options=self.options)

        return call


def apply(*, quiet: bool = False, **options: Any) -> PatchHandle:
    """Patch transformers.Trainer, and so every subclass.

    Before transformers.trainer is imported the handle is pending, and the import applies it (or raises).
    Calls are counted: while the patch is on, apply() returns the same handle, and the patch stays on until every call
    is undone. With HF_ACCUM_FIX=0 in the environment it does nothing.

    Args:
        quiet: do not print "is on" to stderr, which one process per job does; HF_ACCUM_FIX_QUIET=1 has the same effect.
        options: the fields of `Options`, by name.

    Returns:
        The handle: its revert(), or the end of a with block, undoes one call; hf_accum_fix.revert() undoes all.

    Raises:
        UnsupportedVersionError: if transformers is missing or older than 4.41.
        SeamError: if a method to wrap, an attribute that we use, or the module transformers.trainer is missing, or if a
            method has another signature.
        ForeignPatchError: if another package replaced a method, and allow_foreign does not name the replacement.
        OptionsError: if an option is invalid, or differs from those already applied.
        UnsupportedSetupError: if a Trainer is training.
    """
    from wrapt import register_post_import_hook

    from hf_accum_fix.upstream.seams import GUARD, TRAINER_MODULE

    if not isinstance(quiet, bool):
        raise OptionsError(f"got quiet={quiet!r}; expected True or False")
    decided = options_from(options)
    if not enabled():
        _LOG.info("%s switches hf-accum-fix off: transformers.Trainer is not patched", SWITCH)
        return PatchHandle(decided, _planned(decided)[1], off=True)
    while True:
        handle = _claim(decided, quiet or is_quiet())
        if not handle.active:
            # The hooks fire at once if the module is imported. Also register for a handle that another thread made,
            # because that thread may not have registered yet.
            try:
                register_post_import_hook(handle._watch, GUARD[0])
                register_post_import_hook(handle._install, TRAINER_MODULE)
            except AccumFixError:
                handle._undo_all()  # The caller handles the error, so forget the refusal.
                raise
            if handle.pending and not handle._deferred:
                handle._deferred = True
                atexit.register(handle._warn_if_never_imported)
        if handle.active or handle.pending:
            return handle


def revert() -> None:
    """Undo every apply() of this process, or forget a refusal; without either, do nothing."""
    handle = _MEMORY.get("handle")
    if handle is not None:
        # An earlier load of this package may have made the handle.
        getattr(handle, "_undo_all", handle.revert)()


def active_handle() -> PatchHandle | None:
    """The active handle, pending or applied; None without one."""
    handle: PatchHandle | None = _MEMORY.get("handle")
    return handle if handle is not None and (handle.active or handle.pending) else None


def report() -> Report:
    """Report the installed versions, their defects, the state of the patch, and the training runs so far."""
    from hf_accum_fix.reporting import Report
    from hf_accum_fix.version import __version__

    with _LOCK:
        handle: PatchHandle | None = _MEMORY.get("handle")
        environment, plan = _planned(Options() if handle is None else handle.options)
        state = _State.REVERTED if handle is None else handle._state
        if not enabled() and state in (_State.REVERTED, _State.APPLIED):
            state = _State.OFF
        return Report(
            version=__version__,
            state=state.value,
            environment=environment,
            plan=plan,
            missing=() if handle is None else handle.missing(),
            runs=recorded(),
        )


def _claim(options: Options, quiet: bool) -> PatchHandle:
    """Count one more call for the active handle, or create a pending one if the installed versions allow it."""
    with _LOCK:
        handle = active_handle()
        # No handle, or one of an earlier load of this package or of a Trainer that was reloaded since.
        if handle is None or not isinstance(handle, PatchHandle) or handle._is_stale():
            revert()
            _, plan = _planned(options)
            if plan.refusal is not None:
                raise plan.refusal
            handle = _MEMORY["handle"] = PatchHandle(options, plan, quiet=quiet)
            return handle
        if handle.options != options:
            raise OptionsError(
                f"got {options}; expected {handle.options}, which are already applied; call revert() first to "
                "change them"
            )
        handle._applications += 1
        return handle


def _planned(options: Options) -> tuple[Environment, Plan]:
    """What is installed, and what the patch does about it."""
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    environment = detect()
    return environment, make_plan(environment, options)


def _log_patched(environment: Environment, plan: Plan) -> None:
    """Log the wrapped methods and the defects that they fix, with their factors."""
    from hf_accum_fix.version import __version__

    factors = "; ".join(f"{defect.name} ({defect.gradient})" for defect in plan.fixed if defect.gradient)
    _LOG.info(
        "hf-accum-fix %s on transformers %s: wrapped Trainer.%s; %d defects fixed. If one of these affects your model, "
        "its stock gradient was off by the factor in brackets; tune learning rate and clipping again: %s%s",
        __version__,
        environment.transformers,
        ", ".join(state.seam.name for state in environment.seams),
        len(plan.fixed),
        factors,
        "" if plan.untested is None else f". Not tested: {plan.untested}",
    )
