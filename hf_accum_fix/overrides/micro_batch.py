"""One micro-batch of a Trainer, while its step runs: the loss it computes, and the one that accelerate gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.scaling import of_window, run_by_rule
from hf_accum_fix.accumulation.values import Captured, capture
from hf_accum_fix.accumulation.weigh import Counted, Weighed, WindowCheck, weigh
from hf_accum_fix.accumulation.window import ZeroWeightBatch, count_dtype
from hf_accum_fix.core.window import Window
from hf_accum_fix.engines.engine import engine_divisor, set_last_micro_batch
from hf_accum_fix.errors import AccumFixError, SeamError, UnsupportedSetupError
from hf_accum_fix.overrides.announcing import announce
from hf_accum_fix.overrides.forward import base_loss
from hf_accum_fix.overrides.live import bare_model, counts_itself, loss_func, scales_itself
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.upstream.defects import is_present

#: Cached at import: the look-up costs more than a micro-batch.
_LAST_NOT_REDUCED = is_present("last-micro-batch-not-reduced", transformers.__version__)


def _keep_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an error of ours for the optimizer step, since a custom training_step may catch it."""

    @wraps(method)
    def keeping(self: MicroBatch, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except AccumFixError as error:
            self.session.refused = error
            raise

    return keeping


class MicroBatch:
    """One forward and backward.

    Attributes:
        session: of the trainer.
        window: that contains it.
        part: of its loss.
        counts: its items, 0-dim, by each rule; None: it is not one of the window's.
        zero_weight: it counts nothing.
        scaled_loss: summed over the window and averaged over ranks, the global batch's loss.
        value: ``scaled_loss`` for the log, without a graph.
        reported: ``value``, once the engine has got the loss.
    """

    def __init__(self, session: Session, window: Window, inputs: Any) -> None:
        self.session, self.window = session, window
        # If the step gets another object, take the batch at its place.
        its = next((batch for batch in window.batches if batch is inputs), None)
        self.part = window.part_of((window.batches[window.done :] or window.batches[-1:])[0] if its is None else its)
        self.counts = window.counts_of(inputs)
        self.zero_weight = isinstance(inputs, ZeroWeightBatch)
        self.scaled_loss: Tensor | None = None
        self.value: Tensor | None = None
        self.reported: Tensor | None = None
        self._inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self._node: Any = None
        self._weighed: Weighed | None = None
        self._captured: Captured | None = None
        self._inside = False
        trainer = session.trainer
        self._compute_loss, self._backward = trainer.compute_loss, trainer.accelerator.backward
        self._overrides = (
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
        session.micro_batch, session.base_loss = self, self.base_loss
        try:
            with (
                self._capture() if session.own_step is not None else nullcontext() as self._captured,
                self._overrides[0],
                self._overrides[1],
                self._reduced_in_the_last(model),
                session.adding(model, len(window.batches), window.done + 1),
            ):
                yield
        finally:
            session.micro_batch = session.base_loss = None

    def _capture(self) -> AbstractContextManager[Captured]:
        return capture(self.part.contract, bare_model(self.session.trainer))

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
        if not (contract.is_read or contract.custom):
            return run_by_rule(
                contract,
                ZeroWeightBatch(inputs) if self.zero_weight else inputs,
                None if self.counts is None or contract.items is None else self.counts.get(contract.items),
                normalizer,
                lambda inputs, number: base_loss(session, model, inputs, number),
                own_loss=loss_func(trainer) is not None,
                rounded=session.rounds_inputs,
            )
        number = normalizer.number.ceil() if contract.reduction is Reduction.INTEGER else normalizer.number
        if normalizer.is_whole and given is not None and (not contract.by_number or counts_itself(trainer)):
            number = given
        asks = given is not None if contract.custom else contract.hands_number
        passed = number if asks or loss_func(trainer) is not None else None
        loss, outputs = base_loss(session, model, inputs, passed)
        if loss.requires_grad or contract.items is None:
            return loss, outputs
        # A constant without a graph: with a dummy target every parameter gets a zero gradient.
        self.zero_weight = True
        return base_loss(session, model, contract.items.with_target(inputs), passed)

    @_keep_error
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's ``compute_loss``, whose result is weighted."""
        if self._inside:
            return self._compute_loss(*args, **kwargs)
        given = kwargs["inputs"] if "inputs" in kwargs else args[1]
        # A copy, since a ``compute_loss`` may remove the labels.
        self._inputs = dict(given) if isinstance(given, Mapping) else {}
        self._inside = True
        try:
            with (
                self.session.router.micro_batch(self.window.done),
                nullcontext() if self.session.own_step is not None else self._capture() as captured,
            ):
                result = self._compute_loss(*args, **kwargs)
        finally:
            self._inside = False
        if captured is not None:
            # Now, since 4.46.0 scales the loss in place; and in a new tensor, since DeepSpeed (stage 0) sets hooks on
            # the model's output that divide once more.
            self._weigh(result[0] if isinstance(result, tuple) else result, captured)
        return result

    @_keep_error
    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """``accelerator.backward`` with the scaled loss instead of the trainer's."""
        session, window, accelerator = self.session, self.window, self.session.trainer.accelerator
        set_last_micro_batch(accelerator, self.is_last)
        if self._captured is not None:
            self._weigh(loss, self._captured)
        if self.scaled_loss is None:
            return self._backward(loss, **kwargs)
        if self.reported is not None:
            session.warn_inexact(
                "two losses",
                f"{type(session.trainer).__name__} passes two losses of one micro-batch to accelerator.backward; "
                "the step is reported as not exact",
            )
        scaled_loss, weighed, steps = self.scaled_loss, self._weighed, len(window.batches)
        keeps_scale, first = weighed is not None and weighed.as_stock is not None, window.done == 0
        stock = _factor_over(loss, self._node) if first or keeps_scale else 1.0
        if weighed is not None and keeps_scale:
            # These terms keep the stock Trainer's scale.
            scaled_loss, self.value = weighed.scaled(stock, steps)
        self.reported = self.value
        if first:
            announce(session, window, self.part, stock * steps)
        divided = engine_divisor(accelerator, kwargs) / self.part.normalizer.engine_divisor
        return self._backward(scaled_loss if divided == 1 else scaled_loss * divided, **kwargs)

    def _weigh(self, loss: Tensor, captured: Captured) -> None:
        """Set ``scaled_loss`` and ``value`` for a loss."""
        session, window, part = self.session, self.window, self.part
        contract, steps = part.contract, len(window.batches)
        self._node = loss.grad_fn
        if contract.is_read:
            weighed = self._by_terms(loss, captured)
            if part.check.other_terms and self._observed_again(captured):
                weighed = self._by_terms(loss, captured)
            self._weighed, self.scaled_loss, self.value = weighed, weighed.loss, weighed.value
            return
        if session.own_step is not None:
            divided = _names(loss, {steps, session.steps})
        else:
            divided = contract.custom and scales_itself(session.trainer)
        if contract.by_divisor:
            loss = _as_the_first(loss, part.check, session)
        loss = loss * 0.0 if self.zero_weight and contract.custom else loss
        self.value = of_window(loss.detach(), steps, steps if divided else 1)
        self.scaled_loss = of_window(loss, steps, part.normalizer.engine_divisor * (steps if divided else 1))

    def _by_terms(self, loss: Tensor, captured: Captured) -> Weighed:
        window, predicted = self.window, self.counts
        if predicted is None:
            predicted = window.counts[min(window.done, len(window.counts) - 1)] if window.counts else {}
        return weigh(loss, self.part, Counted(self._inputs, predicted, self.zero_weight), captured)

    def _observed_again(self, captured: Captured) -> bool:
        """See `Window.observed_again`, as outside of a micro-batch."""
        session, window = self.session, self.window
        for each in self._overrides:
            each.__exit__()
        session.micro_batch = session.base_loss = None
        try:
            again = window.observed_again(self.part.check, captured)
        finally:
            session.micro_batch, session.base_loss = self, self.base_loss
            for each in self._overrides:
                each.__enter__()
        if again:
            batch = window.batches[window.done]
            self.part, self.counts = window.part_of(batch), window.counts_of(batch)
        return again

    def check_reported(self) -> None:
        """Check that the loss has reached the engine.

        Raises:
            SeamError: if a loss was computed that never reached ``accelerator.backward``.
        """
        session, name = self.session, type(self.session.trainer).__name__
        if self.reported is not None:
            return
        if self.scaled_loss is not None:
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


def _as_the_first(loss: Tensor, check: WindowCheck, session: Session) -> Tensor:
    """An unobserved loss, weighted by its divisor relative to the first micro-batch's: on several ranks to their mean.

    At its end the window is corrected by the sums of both, as for every loss that no rule counts.
    """
    terms = read(loss)
    divisor: Tensor | float | None = None
    if len(terms) == 1 and terms[0].readable:
        divisor = 1.0
        for each in terms[0].factors:
            divisor = each.value * divisor if each.divides and not each.learnt else divisor
    if check.is_corrected and session.data_ranks > 1 and session.first_divisor is None:
        session.first_divisor = _mean_over_ranks(divisor, session)
    if divisor is None:
        check.changed = "the number it divides by cannot be read: " + ", ".join(sorted({each.name for each in terms}))
        return loss
    first = check.first(divisor) if session.first_divisor is None else session.first_divisor
    check.note(0, divisor, first)
    times = divisor / first
    return loss * (times.to(loss) if isinstance(times, Tensor) else times) if check.is_corrected else loss


def _mean_over_ranks(divisor: Tensor | float | None, session: Session) -> Tensor:
    """The mean over the ranks that have a divisor, 0-dim: a collective."""
    zero = torch.zeros((), dtype=count_dtype(session.device), device=session.device)
    numbers = torch.stack([zero, zero] if divisor is None else [zero + divisor, zero + 1])
    total, ranks = session.summed(numbers).unbind()
    return torch.where(ranks > 0, total / ranks.clamp(min=1), torch.ones_like(total))


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
