"""One training of a Trainer, as a host of windows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_accum_fix.accumulation.agreement import SyncedRanks
from hf_accum_fix.accumulation.conclude import Setting, own_number
from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    SHIFT_UNKNOWN,
    LossContract,
    Reduction,
    router_loss,
)
from hf_accum_fix.accumulation.declared import (
    has_parameter,
    holds_shards,
    inside_ddp,
    is_compiled,
    products_are_rounded,
    requires_number,
    router_coefficients,
    takes_number,
)
from hf_accum_fix.accumulation.observe import observe, shift_of
from hf_accum_fix.accumulation.own_division import BATCH_SIZE
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.python_state import PythonState
from hf_accum_fix.accumulation.reading import LossRun
from hf_accum_fix.accumulation.scaling import loss_among
from hf_accum_fix.core.contracts import remarks, settle
from hf_accum_fix.core.host import Host
from hf_accum_fix.core.window import Window
from hf_accum_fix.data.balancing import unfit
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.errors import AccumFixError, ContractError, UnsupportedSetupError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import (
    averages_tokens,
    compute_loss_of,
    data_ranks,
    declares_scale,
    hands_number,
    is_custom,
    names,
    own_step,
    scales_itself,
)
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.router.load_balancing import LENDER
from hf_accum_fix.router.router_loss import Forward
from hf_accum_fix.upstream.protocols import AcceleratorLike, TrainerLike
from hf_accum_fix.upstream.seams import VERIFY

logger = logging.getLogger("hf_accum_fix")

#: The trainer's attribute for its session.
SESSION = "_hf_accum_fix_session"
#: A method as it was, and the arguments of a call of it.
Original: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
#: Why a loss is not observed: only what training runs is run.
MADE_LATER = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
MADE_BY_STEP = "its training_step computes the loss without compute_loss, and is not run except to train"


class Session(Host):
    """One training of a Trainer: its ranks and engine, its loss, and its state between windows.

    Attributes:
        trainer: the one that trains.
        window: the open one; None: there is none.
        func: the compute_loss_func of that window.
        running: the micro-batch that runs, or an observed forward, whose ``base_loss`` replaces the base's
            ``compute_loss``; None: upstream's.
        observed_for: what computed the loss when it was observed.
        shift: labels are shifted as they are smoothed; None: unknown.
        deferred: upstream's numbers for a custom ``get_batch_samples``, whose result is not counted yet.
        busy: running overrides, so that a nested call passes through.
        own_step: see `live.own_step`; None: the base's step runs micro-batches.
        refused: an error of ours in a micro-batch, which a custom training_step may have caught.
        loss_log: the logged loss; None: upstream filters nothing.
        first_divisor: what the first micro-batch of the training divided by, the mean over ranks, 0-dim; None: unknown.
    """

    accelerator: AcceleratorLike
    window: Window | None = None
    func: Callable[..., Any] | None = None
    running: Any = None
    observed_for: tuple[Any, ...] = ()
    shift: bool | None = None
    deferred: list[Any] | None = None
    busy: frozenset[str] = frozenset()
    refused: AccumFixError | None = None
    loss_log: LossLog | None = None
    first_divisor: Tensor | None = None

    def __init__(self, trainer: TrainerLike, options: Options) -> None:
        super().__init__(options)
        self.trainer, self.accelerator, args = trainer, trainer.accelerator, trainer.args
        self.rank, self.world_size, self.device = args.process_index, args.world_size, args.device
        self.data_ranks, self.shards = data_ranks(trainer), is_sharded(trainer.accelerator)
        self.own_step = own_step(trainer)

    @property
    def head(self) -> str:
        return type(self.bare()).__name__

    @property
    def where(self) -> str:
        return f"window {self.state.opened} (step {self.trainer.state.global_step + 1})"

    @property
    def steps(self) -> int:
        return int(self.trainer.args.gradient_accumulation_steps)

    @property
    def shows(self) -> bool:
        # The mean of a single micro-batch is exact over any items.
        return self.is_split or (self.contract is not None and self.contract.depends_on_number)

    def bare(self, model: nn.Module | None = None) -> nn.Module:
        # DeepSpeed's wrapper has its own config.
        return self.trainer.accelerator.unwrap_model(self.trainer.model)  # type: ignore[no-any-return]

    def summed(self, numbers: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(numbers, reduction="sum")  # type: ignore[no-any-return]

    def outside_micro_batch(self) -> AbstractContextManager[Any]:
        return self.running.outside()  # type: ignore[no-any-return]

    def warn_off(self, off: Mapping[str, str]) -> None:
        """Warn once of each feature that is off in this training."""
        for what, why in off.items():
            if what != VERIFY:
                self.warn_once(what, why)

    def inside(self, what: str) -> overridden:
        """Let a nested call of the same override pass through."""
        return overridden(self, "busy", self.busy | {what})

    # --- its loss ----------------------------------------------------------------------------------------------------

    def unscaled_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None, *, smooth: bool = True
    ) -> tuple[Tensor, Any]:
        """The base Trainer's loss, before any release's scaling.

        Source: ``Trainer.compute_loss`` in all releases: a model that accepts the number gets it, ``compute_loss_func``
        computes its own loss, and the label smoother hides the labels from the model.
        """
        trainer, given, inputs, labels = self.trainer, inputs, dict(inputs), None
        func, smoother = self.func, trainer.label_smoother if smooth else None
        if func is not None or smoother is not None:
            labels = inputs.pop("labels", None)
        if self.passes_number and number is not None:
            inputs["num_items_in_batch"] = number
        with own_counts(given) if self.world_size > 1 else nullcontext():
            outputs = model(**inputs)
            if (past := getattr(trainer.args, "past_index", -1)) >= 0:
                vars(trainer)["_past"] = outputs[past]
            if func is not None:
                return func(outputs, labels, num_items_in_batch=number), outputs
        if smoother is None or labels is None:
            return loss_among(outputs, inputs, model), outputs
        loss: Tensor = smoother(outputs, labels, shift_labels=bool(self.shift))
        # The smoothed loss uses the logits alone.
        for name, coefficient in zip(("aux_loss", "z_loss"), router_coefficients(self.bare()), strict=True):
            if coefficient and (router := router_loss(outputs, name)) is not None:
                loss = loss + coefficient * router.to(loss.device)
        return loss, outputs

    def custom_loss(self) -> Callable[..., Any] | None:
        """The custom loss that is trained; None: it is the base's.

        With a ``training_step`` that never calls the base's, it is the loss that this passes to
        ``accelerator.backward``.
        """
        trainer, step = self.trainer, self.own_step
        if step is None:
            return compute_loss_of(trainer)
        original = trainer.compute_loss

        def compute_loss(
            model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> tuple[Tensor, Any]:
            passed: list[Tensor] = []
            caught: list[Exception] = []
            outputs: Any = None

            def kept(*args: Any, **kwargs: Any) -> Any:
                nonlocal outputs
                try:
                    result = original(*args, **kwargs)
                except Exception as error:
                    # The step may catch it.
                    caught.append(error)
                    raise
                outputs = result[1] if isinstance(result, tuple) else outputs
                return result

            given = {"num_items_in_batch": num_items_in_batch} if has_parameter(step, "num_items_in_batch") else {}
            with (
                overridden(trainer, "compute_loss", kept),
                overridden(trainer.accelerator, "backward", lambda loss, **_: passed.append(loss)),
            ):
                step(model, inputs, **given)
            if caught:
                raise caught[0]
            if not passed:
                raise RuntimeError(f"{type(trainer).__name__}.training_step passed no loss to accelerator.backward")
            return passed[0], outputs

        return compute_loss

    def loss_in_training(
        self,
        module: nn.Module,
        compute_loss: Callable[..., Any] | None,
        inputs: Mapping[str, Any],
        number: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        """The loss of one micro-batch as in training; ``own``: the number that a custom ``compute_loss`` gets."""
        trainer, by_itself = self.trainer, self.own_step is not None

        def base(model: nn.Module, inputs: Mapping[str, Any], given: Any) -> tuple[Tensor, Any]:
            # A ``compute_loss`` that passes on no number gets none.
            asks = given is not None or self.func is not None
            return self.unscaled_loss(model, inputs, number if asks else None)

        # A custom training_step prepares them itself.
        inputs = inputs if by_itself else trainer._prepare_inputs(inputs)
        with nullcontext() if by_itself else trainer.compute_loss_context_manager():
            if compute_loss is None:
                return self.unscaled_loss(module, inputs, number)[0]
            given = {"num_items_in_batch": own} if hands_number(compute_loss) else {}
            with overridden(self, "running", SimpleNamespace(base_loss=base)):
                result = compute_loss(module, inputs, **given)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    # --- as a host ---------------------------------------------------------------------------------------------------

    def look(self, batches: Sequence[Any]) -> None:
        trainer, state, given = self.trainer, self.state, self.options.contract
        self.accelerator, self.func = trainer.accelerator, getattr(trainer, "compute_loss_func", None)
        accepts = bool(getattr(trainer, "model_accepts_loss_kwargs", False))
        computed_by = (accepts, self.func, trainer.label_smoother)
        if self.observed_for == computed_by:
            return
        state.first.contract, state.first.attempts, self.observed_for = None, 0, computed_by
        self.passes_number = accepts and takes_number(trainer.model_wrapped)
        state.corrects, self.router.form = False, None
        if given is not None and given.by_number and not self.passes_number and self.func is None:
            raise ContractError(
                f"got a contract by which the loss {given.reduction.words}, but {self.head} gets no "
                "num_items_in_batch; expected Reduction.MEAN, or set model_accepts_loss_kwargs = True"
            )
        if given is not None and not given.by_number:
            # A head that would divide by the number returns its own mean without it.
            self.passes_number = False

    def settled(self, contract: LossContract, micro_batches: int) -> None:
        trainer, first = self.trainer, self.state.first
        # A rank without targets cannot see it.
        self.shift = contract.shift if self.shift is None else self.shift
        if first.is_settled and self.options.balance_windows and (reason := unfit(contract)) is not None:
            raise UnsupportedSetupError(
                f"balance_windows: got {self.head}: {reason}; length-balancing would change its loss; expected a mean "
                "over items or a sum; omit balance_windows"
            )
        if contract.reason == MADE_LATER and declares_scale(trainer):
            # The trainer handles windows itself, and each is checked.
            return
        if contract.reason == NO_TARGET_SEEN and not first.is_settled:
            return
        # Even a global batch of one micro-batch may have a wrong number or shift.
        unknown_shift = SHIFT_UNKNOWN in (contract.reason, contract.doubt)
        matters = self.is_split or unknown_shift or (contract.by_number and not contract.conclusive)
        itself = contract.custom and scales_itself(trainer)
        stays = itself or contract.hides_number
        outcome = "stays as the trainer scales it" if stays else "gets the plain mean over micro-batches"
        for name, message in remarks(self.head, contract, first.attempts, outcome=outcome):
            if name == "sum" or matters:
                self.warn_once(name, message)

    def observe(self, batches: Sequence[Any], number: Any) -> LossContract | None:
        trainer, step, compute_loss = self.trainer, self.own_step, self.custom_loss()
        custom = compute_loss is not None
        # A custom loss may run collectives, and so does every forward of a sharded model.
        gather = self.gather if self.world_size > 1 and (custom or self.shards) else None
        if not batches:
            with SyncedRanks(gather):
                return None
        if not all(isinstance(batch, Mapping) for batch in batches):
            by_divisor = declares_scale(trainer)
            return LossContract(Reduction.PLAIN, custom=custom, by_divisor=by_divisor, reason=MADE_LATER)
        if step is not None and not all(names(inspect.unwrap(step), each) for each in ("compute_loss", "accelerator")):
            return LossContract(Reduction.PLAIN, custom=custom, reason=MADE_BY_STEP, by_divisor=True)
        # A forward through DDP without gradient would switch off the next one's buffer sync.
        module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped
        setting = self._setting(module, compute_loss, number)
        try:
            self._settle_shift(module, batches)
            with self.loss_run(batches) as loss:
                found = observe(loss, batches, setting, gather)
        except Exception:
            logger.error(
                "%s: the forward that observes the loss failed. If training itself runs, pass the contract: "
                "apply(contract=LossContract(...))",
                self.head,
            )
            raise
        if any(parameter._backward_hooks for parameter in module.parameters()):
            reason = "gradient hooks run in every micro-batch; one that is not linear makes another sum"
            found = replace(found, doubt=reason, reason=reason)
        if custom and scales_itself(trainer) and found.reduction in (Reduction.MEAN, Reduction.SUM):
            reason = "the trainer declares that it scales the loss itself"
            return replace(found, reduction=Reduction.PLAIN, items=None, terms=(), doubt=reason, reason=reason)
        if trainer.label_smoother is not None and not setting.func:
            found = replace(found, shift=self.shift, doubt=found.doubt or SHIFT_UNKNOWN * (self.shift is None))
        return found.by_rule() if is_compiled(module) else found

    @contextmanager
    def loss_run(self, batches: Sequence[Any]) -> Iterator[LossRun]:
        trainer, compute_loss = self.trainer, self.custom_loss()
        module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped

        def forward(inputs: Mapping[str, Any], number: Tensor | None) -> Tensor:
            own = None if number is None else torch.tensor(own_number(float(number)), device=number.device)
            return self.loss_in_training(module, compute_loss, inputs, number, own)

        leave = (trainer.train_dataset, trainer.eval_dataset, trainer.data_collator)
        head, more_steps = self.bare(), self._more_steps
        with self._window_of(batches):
            yield LossRun(forward, module, self.device, head, others=(trainer,), leave=leave, more_steps=more_steps)

    def _setting(self, module: nn.Module, compute_loss: Callable[..., Any] | None, number: Any) -> Setting:
        """Facts about the training that are known beforehand."""
        trainer, custom, passes = self.trainer, compute_loss is not None, self.passes_number
        func = self.func is not None
        required = func or (passes and requires_number(module))
        # Where nothing is counted, training passes None.
        counts = number is not None or is_custom(trainer, "get_batch_samples") or not trainer.is_in_train
        return Setting(
            hands_number=required or (custom and passes),
            hands_own=compute_loss is not None and hands_number(compute_loss) and counts,
            only_shows=not (custom or required) and passes,
            custom=custom,
            func=func,
            multiplies=averages_tokens(trainer),
            has_stock=True,
            steps=self.steps,
            world_size=self.data_ranks,
            upstream_number=None if number is None else float(number),
            rounded=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
        )

    def _settle_shift(self, module: nn.Module, batches: Sequence[Any]) -> None:
        """Set whether labels are shifted as they are smoothed, as in the model's own loss."""
        trainer = self.trainer
        if trainer.label_smoother is None or self.func is not None:
            return
        self.shift = None
        if all(getattr(batch.get("labels"), "ndim", 2) < 2 for batch in batches):
            self.shift = False
            return

        def call(inputs: Mapping[str, Any], _: Tensor | None) -> Tensor:
            with trainer.compute_loss_context_manager():
                return self.unscaled_loss(module, trainer._prepare_inputs(inputs), None, smooth=False)[0]

        self.shift = shift_of(call, batches, module, sharded=holds_shards(module))

    @contextmanager
    def routing(self, batches: Sequence[Any]) -> Iterator[tuple[Forward, nn.Module | None]]:
        trainer, compute_loss = self.trainer, self.custom_loss()
        # Other libraries bind its name only once it is imported.
        import_module(LENDER)
        module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped
        number = torch.ones((), device=self.device)
        module.train()
        # A schedule-free optimizer evaluates at other weights than it trains at.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        leave = (trainer.train_dataset, trainer.eval_dataset, trainer.data_collator)
        kept = nullcontext() if compute_loss is None else PythonState(trainer, leave=leave)
        with kept, self._window_of(batches):
            yield lambda inputs: self.loss_in_training(module, compute_loss, inputs, number, number), module

    @contextmanager
    def _window_of(self, batches: Sequence[Any]) -> Iterator[None]:
        """Around forwards before a window is run, which log nothing: a custom loss may divide by its length."""
        steps = len(batches)
        # The loop sets the length only after fetching a window.
        with (
            overridden(self.trainer, "log", _silent),
            overridden(self.trainer, "current_gradient_accumulation_steps", steps),
        ):
            yield

    @contextmanager
    def _more_steps(self, ranks: int) -> Iterator[None]:
        """Double the steps in the arguments, triple the trainer's window, and multiply the ranks."""
        trainer, processes = self.trainer, ranks * PartialState().num_processes
        steps, size = trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size
        window = getattr(trainer, "current_gradient_accumulation_steps", steps)
        with (
            overridden(trainer.args, "gradient_accumulation_steps", 2 * steps),
            overridden(trainer, "current_gradient_accumulation_steps", 3 * window),
            overridden(trainer.args, "per_device_train_batch_size", BATCH_SIZE * size),
            overridden(trainer, "_train_batch_size", BATCH_SIZE * trainer._train_batch_size),
            overridden(PartialState(), "num_processes", processes),
            overridden(trainer.accelerator.state, "num_processes", processes),
        ):
            yield

    @property
    def router_loss_depends_on_split(self) -> bool:
        """Whether the router loss depends on the split; known once the first window is counted."""
        if self.router.form is not None and self.router.form.pools:
            return self.router.depends_on_split
        return self.contract is not None and self.contract.has_router_loss


def _silent(*_: Any, **__: Any) -> None:
    """Log nothing."""


def settled_contract(trainer: TrainerLike, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    session = session_of(trainer, options)
    settle(session, window)
    assert session.contract is not None
    return session.contract


def session_of(trainer: TrainerLike, options: Options) -> Session:
    """The session of a trainer, made at its first use."""
    return known_session(trainer) or new_session(trainer, options)


def known_session(trainer: TrainerLike) -> Session | None:
    """The session of a trainer; None: it has none, or one copied from another trainer."""
    session: Session | None = trainer.__dict__.get(SESSION)
    return session if session is not None and session.trainer is trainer else None


def new_session(trainer: TrainerLike, options: Options) -> Session:
    """Replace the session of a trainer."""
    session = trainer.__dict__[SESSION] = Session(trainer, options)
    return session
