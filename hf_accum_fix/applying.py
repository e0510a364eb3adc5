"""apply(), revert() and report(): detect, plan and patch, once, for the whole process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import contextmanager, suppress
from enum import Enum
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from hf_accum_fix.errors import AccumFixError, ForeignPatchError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.observations import recorded
from hf_accum_fix.options import SWITCH, Options, enabled, options_from, shows_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from hf_accum_fix.reporting import Report
    from hf_accum_fix.upstream.environment import Environment
    from hf_accum_fix.upstream.patch import Installation, Wrapper
    from hf_accum_fix.upstream.plan import Plan

_LOG = logging.getLogger("hf_accum_fix")
# Never hold it while transformers.trainer may be imported: that import runs our hook, which takes this lock.
_LOCK = RLock()
#: Holds the one live handle of the process; it outlives a reload of this package, or an import of it anew.
_MEMORY: Final[dict[str, Any]] = vars(sys.modules.setdefault("_hf_accum_fix_memory", ModuleType("memory")))

QUIET: Final = "HF_ACCUM_FIX_QUIET"
#: Set by the first process of a job that prints "is on", for the processes it starts.
_SAID: Final = "PYTHON_HF_ACCUM_FIX_SAID"


#: Seconds that a fork waits for a thread that applies or reverts.
_FORK_WAITS: Final = 5.0


def _release_after_fork() -> None:
    with suppress(RuntimeError):  # It was not acquired in time.
        _LOCK.release()


def _renew_locks() -> None:
    """Open the locks in the child of a fork: nobody is left there to release those that another thread held."""
    importer = sys.modules.get("wrapt.importer")
    locks: tuple[Any, ...] = (_LOCK, getattr(importer, "_post_import_hooks_lock", None))
    for lock in locks:
        if hasattr(lock, "_at_fork_reinit"):
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _LOCK.acquire(timeout=_FORK_WAITS),
        after_in_parent=_release_after_fork,
        after_in_child=_renew_locks,
    )


class _State(str, Enum):
    """Compared by ==, since a reload of this module makes it anew."""

    OFF = "switched off"
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"
    REVERTED = "not applied"


class PatchHandle:
    """The patch of this process; revert(), or the end of a with block, undoes one apply().

    Attributes:
        options: what the user decided.
        plan: what was decided about every defect; a pending handle makes it again when it is applied, with the methods
            known.
    """

    def __init__(self, options: Options, plan: Plan, *, off: bool = False, quiet: bool = False) -> None:
        """Made by apply() alone."""
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
        """Names of the methods that somebody else has replaced since, so that they no longer lead to us."""
        with _LOCK:
            if self._installation is None:
                return ()
            return self._installation.names if self._is_stale() else tuple(self._installation.replacements())

    def _is_stale(self) -> bool:
        """Whether transformers.trainer has been loaded anew since, so that another class is the Trainer now."""
        from hf_accum_fix.upstream.environment import imported_trainer

        return self.active and imported_trainer() not in (None, self._trainer)

    def revert(self) -> None:
        """Undo one apply(): the last one puts the identical original methods back, or cancels what is pending.

        Raises:
            ForeignPatchError: if somebody else replaced a method since; then nothing is touched.
        """
        self._undo_one()
        if self.active:
            _LOG.info("hf-accum-fix stays on for the other calls of apply(); hf_accum_fix.revert() undoes them all")

    def _undo_one(self) -> None:
        with _LOCK:
            if self._applications > 1:
                self._applications -= 1
            else:
                self._take_off()

    def _take_off(self) -> None:
        with _LOCK:
            installed = [each for each in (self._installation, self._guard) if each is not None]
            if installed:
                from hf_accum_fix.upstream.environment import is_training
                from hf_accum_fix.upstream.patch import restore

                restore(installed)
                if is_training():
                    _LOG.warning("revert() while a Trainer trains: the rest of its run is the stock Trainer's")
                self._installation = self._guard = None
            self._refusal, self._applications = None, 0
            if self._state != _State.OFF:
                self._state = _State.REVERTED
            if _MEMORY.get("handle") is self:
                _MEMORY["handle"] = None
            if installed and self._hand_back is not None:
                self._hand_back(self.options)

    def __enter__(self) -> PatchHandle:
        """The handle itself; apply() has done the work."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo one apply()."""
        self._undo_one()

    def _install(self, _: ModuleType) -> None:
        """Wrap the methods if this handle still waits for it: the hook at the Trainer's import."""
        if not self.pending:
            return
        # Another thread may be importing it now: wait for that. In the hook itself the import is done.
        import_module("transformers.trainer")
        from hf_accum_fix.upstream.environment import detect, imported_trainer, is_pristine, is_training
        from hf_accum_fix.upstream.patch import Patch, install
        from hf_accum_fix.upstream.plan import make_plan
        from hf_accum_fix.upstream.seams import EVALUATION

        with _LOCK, self._refusing():
            if not self.pending:
                return
            environment = detect()
            self.plan = make_plan(environment, self.options)
            if self.plan.refusal is not None:
                raise self.plan.refusal
            if is_training():
                raise UnsupportedSetupError(
                    "got apply() while a Trainer trains, half of whose run would be the stock Trainer's; expected it "
                    "before train(); call it where the script begins"
                )
            trainer = imported_trainer()
            if trainer is None:
                raise SeamError(
                    "got transformers.trainer without a class Trainer; expected that class; call apply() before or "
                    "after that module is imported, not while it is being imported"
                )
            # Only now: these modules import attributes that the plan has just checked.
            from hf_accum_fix.overrides import OVERRIDES, hand_back
            from hf_accum_fix.overrides.evaluation import evaluation_loop

            names = [state.seam.name for state in environment.seams]
            patches = [Patch(trainer, name, self._wrapper(name, OVERRIDES[name])) for name in names]
            if self.options.eval_loss:
                loops = [name for name in EVALUATION if hasattr(trainer, name)]
                patches += [Patch(trainer, name, self._wrapper(name, evaluation_loop)) for name in loops]
            self._installation = install(patches, is_pristine, self.options.allow_foreign)
            self._trainer, self._hand_back = trainer, hand_back
            self._state = _State.APPLIED
        _announce(environment, self.plan)
        if not self._quiet:
            _say_once_a_job(on_line(environment, self.plan))

    def _watch(self, _: ModuleType) -> None:
        """Check the methods whenever a Trainer begins to train: the hook at the import of its callbacks."""
        from hf_accum_fix.upstream.patch import Patch, install
        from hf_accum_fix.upstream.seams import GUARD

        module = import_module(GUARD.module)

        with _LOCK:
            if self._guard is not None or not (self.pending or self.active):
                return
            handler = getattr(module, GUARD.owner, None)
            if handler is None or not hasattr(handler, GUARD.name):
                _LOG.warning(
                    "%s has no %s.%s: a replacement or reload of the Trainer after apply() will not be noticed",
                    *(GUARD.module, GUARD.owner, GUARD.name),
                )
                return
            self._guard = install([Patch(handler, GUARD.name, self._at_train_begin)], lambda *_: True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Remember the refusal: whoever catches it and imports again meets it when training begins."""
        try:
            yield
        except Exception as error:
            self._state, self._refusal = _State.REFUSED, error
            if self._deferred and not self._quiet:
                # transformers turns an error in its imports into "are this object's requirements defined correctly?".
                _say(f"NOT on: {error}")
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
                    f"got a {type(trainer).__name__} that trains by {base.__module__}.{base.__qualname__}; expected "
                    "the class that apply() patched: transformers.trainer was loaded anew, or the class has moved; "
                    "call revert() and apply(), then make the trainer from the class that is imported now"
                )
            self._check_nothing_was_dropped()
        return wrapped(*args, **kwargs)

    def _say_it_never_came(self) -> None:
        """Warn at the end of a process that used transformers, but never the class that waits to be patched."""
        if self.pending and not self._quiet and "transformers" in sys.modules:
            _say_once_a_job("NOT on: transformers.trainer was never imported, so apply() had no effect in this process")

    def _check_nothing_was_dropped(self) -> None:
        """Refuse to train where a patcher has run the original source again and so dropped our wrappers silently."""
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
            # A bound method or a foreign wrapper may keep ours beyond revert(): then ours acts as the original.
            if not self.active:
                return wrapped(*args, **kwargs)
            if name == "train":
                self._check_nothing_was_dropped()
            return override(wrapped, instance, args, kwargs, options=self.options)

        return call


@shows_options
def apply(*, quiet: bool = False, **options: Any) -> PatchHandle:
    """Patch transformers.Trainer, for every subclass there is or will be.

    Before transformers.trainer is imported the handle is pending, and the import applies it (or raises).
    While the patch is on, apply() returns the same handle and counts: it stays on until each has been reverted.
    With HF_ACCUM_FIX=0 in the environment it does nothing.

    Args:
        quiet: leave out the line on stderr that says, once a job, that the patch is on; HF_ACCUM_FIX_QUIET=1 does, too.
        options: the fields of `Options`, by name.

    Returns:
        The handle: revert(), or a with block, undoes this one call; hf_accum_fix.revert() undoes all.

    Raises:
        UnsupportedVersionError: if transformers is missing or older than 4.41.
        SeamError: if a method to be wrapped, an attribute that we use, or the module transformers.trainer, is missing,
            or a method has another signature.
        ForeignPatchError: if somebody else replaced one, and allow_foreign does not name them.
        OptionsError: if an option is invalid, or differs from those already applied.
        UnsupportedSetupError: if a Trainer trains meanwhile.
    """
    from wrapt import register_post_import_hook

    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan
    from hf_accum_fix.upstream.seams import GUARD, TRAINER_MODULE

    decided = options_from(options)
    if not enabled():
        _LOG.info("hf-accum-fix is switched off by %s: transformers.Trainer stays as it is", SWITCH)
        return PatchHandle(decided, make_plan(detect(), decided), off=True)
    while True:
        handle = _claim(decided, quiet or _hushed())
        if not handle.active:
            # They fire at once where the module is imported. A caller that shares the handle of another thread
            # registers too, so that nobody returns to an import that could slip past.
            try:
                register_post_import_hook(handle._watch, GUARD.module)
                register_post_import_hook(handle._install, TRAINER_MODULE)
            except AccumFixError:
                handle._take_off()  # The caller of apply() itself gets the error, and decides how to go on.
                raise
            if handle.pending and not handle._deferred:
                handle._deferred = True
                atexit.register(handle._say_it_never_came)
        if handle.active or handle.pending:
            return handle


def revert() -> None:
    """Take the live patch back, whoever applied it, or forget a refusal; without either, do nothing."""
    handle = _MEMORY.get("handle")
    if handle is not None:
        # An earlier load of this package may have left it.
        getattr(handle, "_take_off", handle.revert)()


def active_handle() -> PatchHandle | None:
    """The live handle, pending or applied; None without one."""
    handle: PatchHandle | None = _MEMORY.get("handle")
    return handle if handle is not None and (handle.active or handle.pending) else None


def report() -> Report:
    """What is installed, what is wrong in it, what was done, and what the training runs so far showed."""
    from hf_accum_fix import __version__
    from hf_accum_fix.reporting import Report
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    with _LOCK:
        handle: PatchHandle | None = _MEMORY.get("handle")
        environment = detect()
        state = _State.REVERTED if handle is None else handle._state
        if not enabled() and state in (_State.REVERTED, _State.APPLIED):
            state = _State.OFF
        return Report(
            version=__version__,
            state=state.value,
            environment=environment,
            plan=make_plan(environment, Options() if handle is None else handle.options),
            missing=() if handle is None else handle.missing(),
            runs=recorded(),
        )


def _claim(options: Options, quiet: bool) -> PatchHandle:
    """The live handle, counted once more, or a new pending one where the installed versions allow it."""
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    with _LOCK:
        handle = active_handle()
        # Left by a refusal, by an earlier load of this package, or on a Trainer that was loaded anew.
        if handle is None or not isinstance(handle, PatchHandle) or handle._is_stale():
            revert()
            plan = make_plan(detect(), options)
            if plan.refusal is not None:
                raise plan.refusal
            handle = _MEMORY["handle"] = PatchHandle(options, plan, quiet=quiet)
            return handle
        if handle.options != options:
            raise OptionsError(
                f"got {options}; expected {handle.options}, which are applied already; call revert() first to change "
                "them"
            )
        handle._applications += 1
        return handle


def on_line(environment: Environment, plan: Plan) -> str:
    """What is on, in one line."""
    from hf_accum_fix import __version__

    line = f"{__version__} is on: transformers {environment.transformers}, {len(plan.fixed)} defects fixed"
    return line if plan.untested is None else f"{line}, UNTESTED: {plan.untested}"


def _hushed() -> bool:
    return os.environ.get(QUIET, "").strip().lower() not in ("", "0", "off", "false", "no")


def _say_once_a_job(line: str) -> None:
    if _SAID not in os.environ:
        _say(line)
        os.environ[_SAID] = "1"


def _say(line: str) -> None:
    """Print a line on stderr, if there is one and this is the first rank."""
    if sys.stderr is not None and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        sys.stderr.write(f"hf-accum-fix: {line}\n")


def _announce(environment: Environment, plan: Plan) -> None:
    """The one line that says what was patched and what changes for the user's run."""
    from hf_accum_fix import __version__

    felt = "; ".join(f"{defect.name} ({defect.gradient})" for defect in plan.fixed if defect.gradient)
    _LOG.info(
        "hf-accum-fix %s on transformers %s: wrapped Trainer.%s; %d defects of this release are fixed. "
        "Where one of these met your model, the stock gradient was off by the factor in brackets, and clipping and "
        "learning rate felt it: %s%s",
        __version__,
        environment.transformers,
        ", ".join(state.seam.name for state in environment.seams),
        len(plan.fixed),
        felt,
        "" if plan.untested is None else f". UNTESTED: {plan.untested}",
    )
