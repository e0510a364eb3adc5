"""``compute_loss`` and ``training_step``: a micro-batch's loss for the engine and for the log."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.scaling import run_by_rule
from hf_accum_fix.accumulation.values import Captured, capture
from hf_accum_fix.accumulation.weigh import Part, Weighed, WindowCheck
from hf_accum_fix.accumulation.window import ZeroWeightBatch, count_dtype
from hf_accum_fix.core.state import ATTEMPTS
from hf_accum_fix.core.window import Window
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.engines.engine import engine_divisor, inputs_are_rounded, reduced_in, set_last_micro_batch
from hf_accum_fix.errors import AccumFixError, SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.live import (
    averages_tokens,
    counts_itself,
    gradient_versions,
    is_custom,
    scales_itself,
)
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, session_of
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.presence import require_in_loop
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")

#: Cached at import: the look-up costs more than a micro-batch.
_LAST_NOT_REDUCED = is_present("last-micro-batch-not-reduced", transformers.__version__)
#: Stock passes no count to heads that would divide by it, so they return their own mean.
_NUMBER_DROPPED = is_present("item-count-dropped-again", transformers.__version__)
#: Methods between a micro-batch and the base's loss.
_BETWEEN = ("compute_loss", "_prepare_inputs", "_prepare_input", "training_step", "get_batch_samples")


def compute_loss(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """The loss of one micro-batch, whose plain mean over micro-batches and ranks is the global batch's.

    Outside of a window (evaluation, the user's own calls) the original runs.
    """
    session = session_of(trainer, options)
    running = session.running
    if running is None:
        result = wrapped(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if session.window is not None and isinstance(loss, Tensor) and loss.requires_grad:
            session.warn_inexact(
                "second loss",
                f"{type(trainer).__name__} computes a loss with gradient outside Trainer.training_step; it is not "
                "weighted, and the step is reported as not exact",
            )
        return result

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = running.base_loss(model, inputs, num_items_in_batch)
        owns_labels = session.func is not None or trainer.label_smoother is not None
        if owns_labels and isinstance(inputs, MutableMapping):
            # Stock removes them from the caller's batch.
            inputs.pop("labels", None)
        if return_outputs and isinstance(outputs, MutableMapping) and outputs.get("loss", loss) is not loss:
            # A caller may use either.
            outputs = copy.copy(outputs)
            outputs["loss"] = loss
        return (loss, outputs) if return_outputs else loss

    return bind(*args, **kwargs)


def training_step(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Run the original step with the scaled loss for accelerate, and return the loss to log.

    Summed over the window and averaged over ranks, both are the global batch's.
    """
    session = session_of(trainer, options)
    # The inner call of a class that is also patched passes through, as does a step that is only observed.
    if session.running is not None or (session.window is None and not (enabled() and trainer.is_in_train)):
        return wrapped(*args, **kwargs)
    window = _window_of(session)
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if isinstance(inputs, PlaceholderBatch):
        return torch.zeros((), device=session.device)
    _check_gradients(session, window)
    micro_batch = MicroBatch(session, window, inputs)
    with micro_batch.running(kwargs["model"] if "model" in kwargs else args[0]):
        result = wrapped(*args, **kwargs)
    window.done += 1
    micro_batch.check_reported()
    loss = micro_batch.reported
    if loss is not None:
        window.add(loss)
    if window.done < len(window.batches):
        _keep_gradients(session, window)
    elif window.done == len(window.batches):
        summed, times = window.value, window.close(trainer.model_wrapped)
        if times is not None and loss is not None and summed is not None:
            # The last micro-batch corrects the window's logged loss.
            loss = loss + (times - 1) * summed
        # Reading waits for the device, so there only in the first window and at the end of training.
        if session.readable or session.state.opened == 1:
            session.warn_routing()
    loss = result if loss is None else loss
    if session.loss_log is not None:
        session.loss_log.add(loss)
    return loss


def _window_of(session: Session) -> Window:
    """The window that is open.

    Raises:
        SeamError: if none was counted.
    """
    trainer, window = session.trainer, session.window
    if window is None:
        raise SeamError(
            f"got a step without a counted window: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples; expected a call to the original; call super().get_batch_samples, or revert()"
        )
    if session.state.opened == 1 and not window.done:
        session.warn_off(require_in_loop(trainer))
    return window


def _keep_gradients(session: Session, window: Window) -> None:
    """Remember the gradients' versions, in the first windows of trainers that override a step."""
    looks = session.state.opened <= ATTEMPTS and is_custom(session.trainer, *_BETWEEN)
    window.gradients = gradient_versions(session.trainer.model_wrapped) if looks else None


def _check_gradients(session: Session, window: Window) -> None:
    """Warn if the gradients have changed since the last micro-batch."""
    trainer, kept = session.trainer, window.gradients
    if kept is not None and kept != gradient_versions(trainer.model_wrapped):
        session.warn_inexact(
            "gradients",
            f"{type(trainer).__name__} changes gradients between the micro-batches of a window (clipping?); "
            "the step is reported as not exact",
        )


class MicroBatch:
    """One forward and backward, while its step runs: the loss it computes, and the one that accelerate gets.

    Attributes:
        session: of the trainer.
        window: that contains it.
        batch: as fetched.
        part: of its loss.
        zero_weight: it counts nothing.
        weighed: its loss, summed over the window and averaged over ranks the global batch's; None: not computed yet.
        reported: the same for the log, once the engine has got the loss.
    """

    def __init__(self, session: Session, window: Window, inputs: Any) -> None:
        self.session, self.window = session, window
        self._is_own = any(batch is inputs for batch in window.batches)
        # If the step gets another object, take the batch at its place.
        self.batch = inputs if self._is_own else (window.batches[window.done :] or window.batches[-1:])[0]
        self.part = window.part_of(self.batch)
        self.zero_weight = isinstance(inputs, ZeroWeightBatch)
        self.weighed: Weighed | None = None
        self.reported: Tensor | None = None
        self._inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self._node: Any = None
        self._captured: Captured | None = None
        self._inside = False
        self._losses = 0
        trainer = session.trainer
        self._compute_loss, self._backward = trainer.compute_loss, trainer.accelerator.backward
        self._overrides = (
            overridden(session, "running", self),
            overridden(trainer, "compute_loss", self.compute_loss),
            overridden(trainer.accelerator, "backward", self.backward),
        )

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its window."""
        return self.window.done + 1 == len(self.window.batches)

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Around the trainer's step."""
        session, window = self.session, self.window
        with ExitStack() as stack:
            if session.own_step is not None:
                self._captured = stack.enter_context(self._capture())
            for each in self._overrides:
                stack.enter_context(each)
            stack.enter_context(self._reduced_in_the_last(model))
            stack.enter_context(session.adding(model, len(window.batches), window.done + 1))
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around forwards in its midst that do not belong to it."""
        for each in self._overrides:
            each.__exit__()
        try:
            yield
        finally:
            for each in self._overrides:
                each.__enter__()

    def _capture(self) -> AbstractContextManager[Captured]:
        return capture(self.part.contract, self.session.bare())

    def _reduced_in_the_last(self, model: nn.Module) -> AbstractContextManager[None]:
        """Reduce over ranks in the last micro-batch of a window only; 4.46.2 reduces in all but that one."""
        if not _LAST_NOT_REDUCED or self.session.world_size == 1:
            return nullcontext()
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedSetupError(
                f"got transformers {transformers.__version__}, which does not reduce the last micro-batch's gradients, "
                f"under {type(model).__name__}; expected DistributedDataParallel, where it can be corrected; install "
                "4.46.3"
            )
        return overridden(model, "require_backward_grad_sync", self.is_last)

    def base_loss(self, model: nn.Module, inputs: Mapping[str, Any], given: Any) -> tuple[Tensor, Any]:
        """The base's loss: unchanged if its graph is read later, else scaled by its rule."""
        session, trainer = self.session, self.session.trainer
        contract, normalizer = self.part.contract, self.part.normalizer
        if not (contract.terms or contract.custom):
            return run_by_rule(
                contract,
                ZeroWeightBatch(inputs) if self.zero_weight else inputs,
                self.window.count_of(self.batch) if self._is_own else None,
                normalizer,
                lambda inputs, number: session.unscaled_loss(model, inputs, number),
                own_loss=session.func is not None,
                rounded=inputs_are_rounded(session.accelerator),
            )
        number = normalizer.number.ceil() if contract.reduction is Reduction.INTEGER else normalizer.number
        as_given = normalizer.is_whole and (not contract.by_number or counts_itself(trainer))
        if given is not None and (as_given or contract.hides_number):
            number = given
        asks = given is not None if contract.custom else contract.hands_number
        passed = number if asks or session.func is not None else None
        loss, outputs = session.unscaled_loss(model, inputs, passed)
        if contract.hides_number and passed is not None and session.data_ranks > 1 and averages_tokens(trainer):
            # As upstream does before the engine's mean over ranks.
            loss = loss * session.data_ranks
        if loss.requires_grad or contract.items is None:
            return loss, outputs
        # A constant without a graph: with a dummy target every parameter gets a zero gradient.
        self.zero_weight = True
        return session.unscaled_loss(model, contract.items.with_target(inputs), passed)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's ``compute_loss``, whose result is weighted."""
        if self._inside:
            return self._compute_loss(*args, **kwargs)
        session, given = self.session, kwargs["inputs"] if "inputs" in kwargs else args[1]
        # A copy, since a ``compute_loss`` may remove the labels.
        self._inputs = dict(given) if isinstance(given, Mapping) else {}
        captures = self._capture() if session.own_step is None else nullcontext()
        # A backward within shows in the gradients, which an engine that shards swaps in every forward.
        first = session.state.opened <= ATTEMPTS and not session.shards
        looks, model = self.part.contract.custom and first, session.trainer.model_wrapped
        before = gradient_versions(model) if looks else 0
        try:
            self._inside = True
            with session.router.micro_batch(self.window.done), captures as captured:
                result = self._compute_loss(*args, **kwargs)
            if looks and before != gradient_versions(model):
                session.warn_inexact(
                    "gradients in compute_loss",
                    f"{type(session.trainer).__name__}.compute_loss changes gradients (a backward of its own?); they "
                    "are not weighted, and the step is reported as not exact",
                )
            if captured is not None:
                # Now, since 4.46.0 scales the loss in place; and in a new tensor, since DeepSpeed (stage 0) sets hooks
                # on the model's output that divide once more.
                self._weigh(result[0] if isinstance(result, tuple) else result, captured)
        except AccumFixError as error:
            session.refused = error
            raise
        finally:
            self._inside = False
        return result

    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """``accelerator.backward`` with the scaled loss instead of the trainer's."""
        session, accelerator = self.session, self.session.trainer.accelerator
        if self._inside:
            session.warn_inexact(
                "backward in compute_loss",
                f"{type(session.trainer).__name__} calls accelerator.backward inside compute_loss; that gradient "
                "is not weighted, and the step is reported as not exact",
            )
            return self._backward(loss, **kwargs)
        try:
            loss = self._scaled(loss)
            set_last_micro_batch(accelerator, self.is_last)
            if self.reported is not None:
                # The engine may divide by another number than in other micro-batches.
                divided = engine_divisor(accelerator, **kwargs) / self.part.normalizer.engine_divisor
                loss = loss if divided == 1 else loss * divided
            return self._backward(loss, **kwargs)
        except AccumFixError as error:
            session.refused = error
            raise

    def _scaled(self, loss: Tensor) -> Tensor:
        """The scaled loss of one that reached the engine."""
        session, window = self.session, self.window
        if self._captured is not None:
            self._weigh(loss, self._captured)
        weighed = self.weighed
        if weighed is None:
            return loss
        if self.reported is not None:
            session.warn_inexact(
                "two losses",
                f"{type(session.trainer).__name__} passes two losses of one micro-batch to accelerator.backward; "
                "the step is reported as not exact",
            )
        steps, keeps_scale = len(window.batches), weighed.as_stock is not None
        is_news = window.done == 0 and not session.state.recorded
        stock = _factor_over(loss, self._node) if is_news or keeps_scale else 1.0
        # Some terms may keep the stock Trainer's scale.
        scaled, self.reported = weighed.scaled(stock, steps) if keeps_scale else (weighed.loss, weighed.value)
        if is_news:
            _announce(session, window, self.part, stock * steps)
        return scaled

    def _weigh(self, loss: Tensor, captured: Captured) -> None:
        """Set ``weighed`` for a loss."""
        session, window, part = self.session, self.window, self.part
        contract, steps = part.contract, len(window.batches)
        self._node = loss.grad_fn
        if contract.terms:
            self.weighed = window.weigh(loss, self.batch, captured, self._inputs, zero_weight=self.zero_weight)
            if part.check.is_unlike:
                # It may have been counted again.
                self.part = window.part_of(self.batch)
            return
        if session.own_step is not None:
            divided = _names(loss, {steps, session.steps})
        else:
            divided = contract.custom and scales_itself(session.trainer)
        if contract.by_divisor:
            loss = _as_the_first(loss, part.check, session, self._losses)
            self._losses += 1
        loss = loss * 0.0 if self.zero_weight and contract.custom else loss
        self.weighed = window.average(loss, steps if divided else 1)

    def check_reported(self) -> None:
        """Check that the loss has reached the engine.

        Raises:
            SeamError: if a loss was computed that never reached ``accelerator.backward``.
        """
        session, name = self.session, type(self.session.trainer).__name__
        if self.reported is not None:
            return
        if self.weighed is not None:
            raise SeamError(
                f"got a step of {name} that did not pass its loss to accelerator.backward; expected that, since "
                "otherwise the gradient is not corrected; use accelerator.backward, or revert()"
            )
        if session.own_step is not None and len(self.window.batches) * session.world_size > 1:
            session.warn_inexact(
                "no loss",
                f"{name}.training_step passed no loss of a micro-batch to accelerator.backward; "
                "the step is reported as not exact",
            )


def _as_the_first(loss: Tensor, check: WindowCheck, session: Session, place: int) -> Tensor:
    """An unobserved loss, weighted by its divisor relative to the first micro-batch's: on several ranks to their mean.

    ``place``: how many losses of its micro-batch came before it.

    At its end the window is corrected by the sums of both, as for every loss that no rule counts.
    """
    terms = read(loss)
    divisor: Tensor | float | None = None
    if len(terms) == 1 and terms[0].readable:
        divisor = 1.0
        for each in terms[0].factors:
            divisor = each.value * divisor if each.divides and not each.learnt else divisor
    if check.is_corrected and session.data_ranks > 1 and session.first_divisor is None:
        # The mean over the ranks that have one: a collective.
        zero = torch.zeros((), dtype=count_dtype(session.device), device=session.device)
        known = torch.stack([zero, zero] if divisor is None else [zero + divisor, zero + 1])
        total, ranks = session.summed(known).unbind()
        session.first_divisor = torch.where(ranks > 0, total / ranks.clamp(min=1), torch.ones_like(total))
    if divisor is None:
        check.changed = "the number it divides by cannot be read: " + ", ".join(sorted({each.name for each in terms}))
        return loss
    first = session.first_divisor if session.first_divisor is not None and not place else check.first(place, divisor)
    check.note(place, divisor, first)
    times = divisor / first
    return loss * (times.to(loss) if isinstance(times, Tensor) else times) if check.is_corrected else loss


def _names(loss: Tensor, steps: set[int]) -> bool:
    """Whether a loss has a factor 1/G: then the trainer may have divided by the accumulation steps already."""
    numbers = {float(each) for each in steps if each > 1}
    return any(
        float(each.value) in numbers or (each.value and 1 / float(each.value) in numbers)
        for term in read(loss)
        for each in (term.factors[:-1] if term.divides else term.factors)
        if not each.learnt
    )


def _factor_over(loss: Tensor, node: Any) -> float:
    """The factor on a loss since a node returned it."""
    factor = 1.0
    for term in read(loss, (node,)):
        for each in term.factors if term.leaf is node else ():
            factor = factor / float(each.value) if each.divides else factor * float(each.value)
    return factor


def _announce(session: Session, window: Window, part: Part, stock_scale: float) -> None:
    """Log and record the observed contract, once per run; ``part``: of the first micro-batch.

    ``stock_scale``: G times the installed Trainer's factor on the loss that it passes to accelerate.
    """
    trainer, contract = session.trainer, part.contract
    factor, router_factor = _stock_factors(session, window, part, stock_scale)
    steps, world_size = len(window.batches), part.normalizer.world_size
    words = "" if factor is None else f" The stock Trainer would train at about {factor:.3g}x this gradient."
    if factor is not None and abs(factor - 1) > 0.02:
        words += " Learning rate and clipping were tuned at that scale."
    if router_factor is not None:
        words = f" The stock Trainer would train its router loss at about {router_factor:.3g}x."
    session.record(
        contract,
        steps,
        trainer=type(trainer).__name__,
        router_loss=session.router.in_force.value,
        reduced_in=reduced_in(trainer.accelerator, trainer.model_wrapped) if world_size > 1 else [],
        stock_gradient_factor=factor,
        stock_router_factor=router_factor,
    )
    if session.rank == 0:
        router = f", {session.router.in_force}" if contract.has_router_loss else ""
        logger.info("%s: the loss %s%s; G=%d, W=%d.%s", session.head, contract, router, steps, world_size, words)


def _stock_factors(session: Session, window: Window, part: Part, scale: float) -> tuple[float | None, float | None]:
    """The approximate factors of the installed Trainer on the exact gradient, and on the router loss; None: unknown.

    Its own division is read from the loss that it passes on, accelerate's from the live object, its count from what it
    returned; the multiplication by W follows the condition that all releases share.
    """
    trainer, contract, number = session.trainer, part.contract, window.counts.number
    if contract.custom or trainer.label_smoother is not None:
        return None, None
    undivided = scale / session.accelerator.gradient_accumulation_steps
    passed = session.passes_number or session.func is not None
    averaged = averages_tokens(trainer) and passed and number is not None
    of_means = undivided * (part.normalizer.world_size if averaged else 1)
    if contract.has_router_loss and contract.by_number:
        # Two terms with different factors.
        return None, of_means
    by_number = contract.reduction is Reduction.NUMBER
    if by_number and not _NUMBER_DROPPED and number is not None and float(number):
        # Unless upstream averages, a rank divides by its own count, about 1/W of the total.
        return undivided / len(window.batches) * float(window.counts.total) / float(number), None
    is_mean = contract.reduction is Reduction.MEAN or (by_number and _NUMBER_DROPPED)
    return of_means if is_mean else None, None
