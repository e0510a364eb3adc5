"""apply(), revert() and report(): detect, plan and patch, once, for the whole process."""

from __future__ import annotations

import logging
from enum import Enum
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

from hf_accum_fix.errors import ForeignPatchError, OptionsError, SeamError
from hf_accum_fix.observations import recorded
from hf_accum_fix.options import SWITCH, BalanceOptions, Options, enabled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, TracebackType

    from hf_accum_fix.accumulation.contract import LossContract
    from hf_accum_fix.reporting import Report
    from hf_accum_fix.upstream.environment import Environment
    from hf_accum_fix.upstream.patch import Installation, Wrapper
    from hf_accum_fix.upstream.plan import Plan

_LOG = logging.getLogger("hf_accum_fix")
# Never held while transformers.trainer may be imported: its import runs our hook, which takes this lock.
_LOCK = RLock()


class _State(str, Enum):
    OFF = "switched off"
    PENDING = "pending"
    APPLIED = "applied"
    REVERTED = "not applied"


class PatchHandle:
    """One application of the patch, to be taken back by revert() or at the end of a with block.

    Attributes:
        options: what the user decided.
        plan: what was decided about every defect; made again, with the methods known, when a pending handle
            is applied.
    """

    def __init__(self, options: Options, plan: Plan, *, off: bool = False) -> None:
        """Made by apply() alone."""
        self.options = options
        self.plan = plan
        self._state = _State.OFF if off else _State.PENDING
        self._applications = 1
        self._installation: Installation | None = None

    @property
    def active(self) -> bool:
        """Whether the Trainer's methods are wrapped."""
        return self._state is _State.APPLIED

    @property
    def pending(self) -> bool:
        """Whether the wrapping waits for the import of transformers.trainer."""
        return self._state is _State.PENDING

    def missing(self) -> tuple[str, ...]:
        """Names of the methods that somebody else replaced since, so that they no longer lead to us."""
        with _LOCK:
            return () if self._installation is None else tuple(self._installation.replacements())

    def revert(self) -> None:
        """Put the identical original methods back, or cancel what is pending; a second call has no effect.

        Raises:
            ForeignPatchError: if somebody else replaced a method since; then nothing is touched.
        """
        with _LOCK:
            if self._installation is not None:
                self._installation.restore()
                self._installation = None
            if self._state is not _State.OFF:
                self._state = _State.REVERTED
            if _Active.handle is self:
                _Active.handle = None

    def __enter__(self) -> PatchHandle:
        """The handle itself; apply() has done the work."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo one apply(); the methods come back with the last one."""
        with _LOCK:
            self._applications -= 1
            if self._applications <= 0:
                self.revert()

    def _install(self, _: ModuleType) -> None:
        """Wrap the methods if this handle still waits for it: the hook at the Trainer's import."""
        if not self.pending:
            return
        # Another thread may be in the midst of that import. This waits for it; in the hook itself it is done.
        import_module("transformers.trainer")
        from hf_accum_fix.evaluation import evaluation_loop
        from hf_accum_fix.overrides import OVERRIDES
        from hf_accum_fix.upstream.environment import detect, imported_trainer, is_pristine
        from hf_accum_fix.upstream.patch import Patch, install
        from hf_accum_fix.upstream.plan import make_plan
        from hf_accum_fix.upstream.seams import EVALUATION

        with _LOCK:
            if not self.pending:
                return
            try:
                environment = detect()
                self.plan = make_plan(environment, self.options)
                if self.plan.refusal is not None:
                    raise self.plan.refusal
                trainer = imported_trainer()
                if trainer is None:
                    raise SeamError(
                        "transformers.trainer holds no class Trainer; needed is that class; apply before or "
                        "after that module is imported, not while it is"
                    )
                names = [state.seam.name for state in environment.seams]
                patches = [Patch(trainer, name, self._wrapper(name, OVERRIDES[name])) for name in names]
                if self.options.eval_loss:
                    loops = [name for name in EVALUATION if hasattr(trainer, name)]
                    patches += [Patch(trainer, name, self._wrapper(name, evaluation_loop)) for name in loops]
                self._installation = install(patches, is_pristine, self.options.allow_foreign)
                self._state = _State.APPLIED
            finally:
                if not self.active:
                    self.revert()
        _announce(environment, self.plan)

    def _check_nothing_was_dropped(self) -> None:
        """Some patchers run the original source again and so drop wrappers silently; training must not start so."""
        from hf_accum_fix.upstream.chain import author
        from hf_accum_fix.upstream.environment import imported_trainer
        from hf_accum_fix.upstream.patchers import known_patcher

        with _LOCK:
            dropped = {} if self._installation is None else self._installation.replacements()
        trainer = imported_trainer()
        if not dropped or trainer is None:
            return
        authors = {name: author(replacement) for name, replacement in dropped.items()}
        known = (known_patcher(replacement, authors[name], trainer) for name, replacement in dropped.items())
        patcher = next((each for each in known if each is not None), None)
        by_method = {f"Trainer.{name}": found for name, found in authors.items()}
        raise ForeignPatchError.dropped(by_method, "" if patcher is None else patcher.advice)

    def _wrapper(self, name: str, override: Callable[..., Any]) -> Wrapper:
        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A bound method or a foreign wrapper may keep ours beyond revert(): then it is the original.
            if not self.active:
                return wrapped(*args, **kwargs)
            if name == "train":
                self._check_nothing_was_dropped()
            return override(wrapped, instance, args, kwargs, options=self.options)

        return call


class _Active:
    """The one live handle of the process, pending or applied."""

    handle: PatchHandle | None = None


def apply(
    *,
    contract: LossContract | None = None,
    allow_foreign: tuple[str, ...] = (),
    eval_loss: bool = False,
    drop_duplicates: bool = False,
    router_loss: str = "mean",
    balance_windows: bool | BalanceOptions = False,
) -> PatchHandle:
    """Patch transformers.Trainer, for every subclass there is or will be.

    Before transformers.trainer is imported the handle is pending, and the import applies it (or raises).
    While one handle lives, apply() returns that one. With HF_ACCUM_FIX=0 in the environment it does nothing.

    Args:
        contract: how the model reduces its loss, where it must not be observed.
        allow_foreign: names ("module.qualname") of other people's replacements of Trainer methods to wrap
            around.
        eval_loss: whether ``eval_loss`` becomes the mean over the items of the evaluation set, whatever the eval batch
            size and the ranks; off by default, because it changes a reported number.
        drop_duplicates: whether the samples are left out that accelerate repeats at the end of an epoch so that every
            rank has as many; off by default, because stock counts them twice, too.
        router_loss: what the load-balancing loss of a mixture of experts is: "mean", over micro-batches and ranks;
            "window", by the running counts of the window; "exact", that of the whole global batch, by one more forward.
        balance_windows: deal the samples of a global batch into micro-batches by length: the same gradient, with
            almost nothing padded. True, or `BalanceOptions`; off by default.

    Returns:
        The handle: revert(), or a with block, takes the patch back.

    Raises:
        UnsupportedVersionError: if transformers is missing or older than 4.41.
        SeamError: if a method to be wrapped is missing or has another signature.
        ForeignPatchError: if somebody else replaced one, and allow_foreign does not name them.
        OptionsError: if an option is invalid, or differs from those already applied.
    """
    from wrapt import register_post_import_hook

    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    options = Options(contract, allow_foreign, eval_loss, drop_duplicates, router_loss, balance_windows)
    if not enabled():
        _LOG.info("hf-accum-fix is switched off by %s: transformers.Trainer stays as it is", SWITCH)
        return PatchHandle(options, make_plan(detect(), options), off=True)
    while True:
        handle = _claim(options)
        if not handle.active:
            # Fires at once where the module is imported. A caller that shares the handle of another thread
            # registers too, so that nobody returns to an import that could slip past.
            register_post_import_hook(handle._install, "transformers.trainer")
        if handle.active or handle.pending:
            return handle


def revert() -> None:
    """Take the live patch back, whoever applied it; without one nothing happens."""
    handle = active_handle()
    if handle is not None:
        handle.revert()


def active_handle() -> PatchHandle | None:
    """The live handle, pending or applied; None without one."""
    return _Active.handle


def report() -> Report:
    """What is installed, what is wrong in it, what was done, and what the training runs so far showed."""
    from hf_accum_fix import __version__
    from hf_accum_fix.reporting import Report
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    with _LOCK:
        handle = active_handle()
        environment = detect()
        idle = _State.REVERTED if enabled() else _State.OFF
        return Report(
            version=__version__,
            state=(idle if handle is None else handle._state).value,
            environment=environment,
            plan=make_plan(environment, Options() if handle is None else handle.options),
            missing=() if handle is None else handle.missing(),
            runs=recorded(),
        )


def _claim(options: Options) -> PatchHandle:
    """The live handle, counted once more, or a new pending one where the installed versions allow it."""
    from hf_accum_fix.upstream.environment import detect
    from hf_accum_fix.upstream.plan import make_plan

    with _LOCK:
        handle = _Active.handle
        if handle is None:
            plan = make_plan(detect(), options)
            if plan.refusal is not None:
                raise plan.refusal
            handle = _Active.handle = PatchHandle(options, plan)
            return handle
        if handle.options != options:
            raise OptionsError(
                f"already applied with {handle.options}, now asked for {options}; needed are the same; "
                "revert() first to change them"
            )
        handle._applications += 1
        return handle


def _announce(environment: Environment, plan: Plan) -> None:
    """The one line that says what was patched and what changes for the user's run."""
    from hf_accum_fix import __version__

    felt = "; ".join(f"{defect.name} ({defect.gradient})" for defect in plan.mended if defect.gradient)
    _LOG.info(
        "hf-accum-fix %s on transformers %s: wrapped Trainer.%s; %d defects of this release are mended. "
        "Where one of these met your model, the stock gradient was off by the factor in brackets, and clipping and "
        "learning rate felt it: %s%s",
        __version__,
        environment.transformers,
        ", ".join(state.seam.name for state in environment.seams),
        len(plan.mended),
        felt,
        "" if plan.untested is None else f". UNTESTED: {plan.untested}",
    )
