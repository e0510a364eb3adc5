"""A micro-batch's way under the Trainer, from top to bottom: its step, its loss, its backward, its end.

training_step                       of the Trainer, around one micro-batch
  MicroBatch.running                what the step calls is overridden
    MicroBatch.compute_loss         the trainer's loss is computed, and weighted by its graph
      compute_loss                  of the Trainer, which a custom one may call
        MicroBatch.base_loss        the model runs
    MicroBatch.backward             the engine gets the weighted loss, whatever the step made of it
  MicroBatch.end                    the window is closed after its last; the loss to log is returned
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.items import ZeroWeightBatch
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.scaling import run_by_rule
from hf_accum_fix.accumulation.values import capture
from hf_accum_fix.accumulation.weigh import Weighed
from hf_accum_fix.core.window import Window
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.engines.engine import engine_divisor, set_last_micro_batch
from hf_accum_fix.errors import AccumFixError, SeamError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, session_of
from hf_accum_fix.overrides.trainer_facts import counts_itself
from hf_accum_fix.upstream.presence import require_in_loop
from hf_accum_fix.upstream.protocols import TrainerLike


def training_step(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Run the original step with the scaled loss for accelerate, and return the loss to log.

    Summed over the window and averaged over ranks, both are the global batch's.

    Raises:
        SeamError: if no window was counted.
    """
    session = session_of(trainer, options)
    window = session.window
    # The inner call of a class that is also patched passes through, as does a step that is only observed.
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if session.state.aside:
        placeholder = isinstance(inputs, PlaceholderBatch)
        return torch.zeros((), device=session.device) if placeholder else wrapped(*args, **kwargs)
    if session.base_loss is not None or (window is None and not (enabled() and trainer.is_in_train)):
        if session.base_loss is None and enabled():
            session.warn_once(
                "by hand",
                f"got {type(trainer).__name__}.training_step outside of train(): this step is stock's, and nothing is "
                "corrected; expected a call by train(); call that, or use accumulation_windows in a loop of your own",
            )
        return wrapped(*args, **kwargs)
    if window is None:
        raise SeamError(
            f"got a step without a counted window: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples; expected a call to the original; call super().get_batch_samples, or revert()"
        )
    if session.state.opened == 1 and not window.done:
        session.warn_off(require_in_loop(trainer))
    if isinstance(inputs, PlaceholderBatch):
        return torch.zeros((), device=session.device)
    micro_batch = MicroBatch(session, window, inputs)
    with micro_batch.running():
        result = wrapped(*args, **kwargs)
    loss = micro_batch.end()
    if window.ended and window.value is not None:
        session.finite = session.finite + window.value * 0.0
    return result if loss is None else loss


def compute_loss(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """The base's loss: inside a micro-batch, or an observed forward, its own; outside (evaluation) the original."""
    session = session_of(trainer, options)
    if session.base_loss is not None:
        return _base_loss(session, *args, **kwargs)
    result = wrapped(*args, **kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    if session.window is not None and not session.state.troubled and isinstance(loss, Tensor) and loss.requires_grad:
        session.not_exact("second loss", "computes a loss with gradient outside Trainer.training_step, unweighted")
    return result


def _base_loss(
    session: Session, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """``Trainer.compute_loss``, as its caller expects it."""
    assert session.base_loss is not None
    loss, outputs = session.base_loss(model, inputs, num_items_in_batch)
    if session.owns_labels and isinstance(inputs, MutableMapping):
        # Stock removes them from the caller's batch.
        inputs.pop("labels", None)
    if return_outputs and isinstance(outputs, MutableMapping) and outputs.get("loss", loss) is not loss:
        # A caller may use either.
        outputs = copy.copy(outputs)
        outputs["loss"] = loss
    return (loss, outputs) if return_outputs else loss


class MicroBatch:
    """One forward and backward, while its step runs: the loss it computes, and the one that accelerate gets.

    Attributes:
        batch: as fetched.
        is_own: the step got it, not another object.
        part: of the window.
        inputs: of its forward, as a ``compute_loss`` got them.
        zero_weight: it counts nothing.
        weighed: the last of them, summed over the window and averaged over ranks the global batch's.
        value: its part of the logged loss, once the engine has got the loss.
    """

    def __init__(self, session: Session, window: Window, inputs: Any) -> None:
        self.session, self.window = session, window
        # If the step gets another object, take the batch at its place.
        at_its_place = window.batches[min(window.done, len(window.batches) - 1)]
        self.batch = next((batch for batch in window.batches if batch is inputs), at_its_place)
        self.is_own, self.part = self.batch is inputs, window.part
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self.zero_weight = isinstance(inputs, ZeroWeightBatch)
        self.weighed: Weighed | None = None
        self.value: Tensor | None = None
        self._inside = False
        trainer, self._engine = session.trainer, session.trainer.accelerator
        self._model = trainer.model_wrapped
        self._compute_loss, self._backward = trainer.compute_loss, self._engine.backward

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its window."""
        return self.window.done + 1 == len(self.window.batches)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the trainer's step."""
        session, window = self.session, self.window
        with (
            capture(self.part.contract, session.bare(session.trainer.model)) as self._captured,
            overridden(session, "base_loss", self.base_loss),
            overridden(session.trainer, "compute_loss", self.compute_loss),
            overridden(self._engine, "backward", self.backward),
            session.adding(self._model, len(window.batches), window.done + 1),
        ):
            yield

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's ``compute_loss``, whose result is weighted."""
        session = self.session
        if self._inside:
            return self._compute_loss(model, inputs, *args, **kwargs)
        # A copy, since a ``compute_loss`` may remove the labels.
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
        with self._refusing():
            inputs = inputs if session.coupled is None else session.coupled.inputs(inputs)
            with overridden(self, "_inside", True), session.around_forward(self.window.done):
                result = self._compute_loss(model, inputs, *args, **kwargs)
            # Now, since 4.46.0 scales the loss in place; and in a new tensor, since DeepSpeed (stage 0) sets hooks
            # on the model's output that divide once more.
            weighed = partial(self._weigh, result[0] if isinstance(result, tuple) else result)
            if session.contained("weighting the loss of a micro-batch", weighed, False):
                return result
        return self._as_stock(model, *args, **kwargs)

    def _as_stock(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The loss as the stock Trainer computes it, once more, since ours could not be weighted."""
        if "num_items_in_batch" in kwargs:
            kwargs["num_items_in_batch"] = self.window.stock_number
        self.weighed = None
        with overridden(self, "_inside", True), overridden(self.session, "base_loss", None):
            return self._compute_loss(model, dict(self.inputs), *args, **kwargs)

    def base_loss(self, model: nn.Module, inputs: Mapping[str, Any], given: Any) -> tuple[Tensor, Any]:
        """The base's loss: unchanged if its graph is read later, else scaled by its rule.

        ``given``: the number that a custom ``compute_loss`` passed on.
        """
        session = self.session
        part, contract = self.part, self.part.contract
        if not (contract.terms or contract.custom):
            return run_by_rule(
                part,
                ZeroWeightBatch(inputs) if self.zero_weight else inputs,
                self.window.items_of(self.batch) if self.is_own else None,
                lambda inputs, number: session.unscaled_loss(model, inputs, number),
                own_loss=session.func is not None,
            )
        # Without a number a model returns its own mean.
        passed = (given if contract.custom else part.number) if contract.hands_number else None
        if part.is_whole and counts_itself(session.trainer):
            passed = given
        loss, outputs = session.unscaled_loss(model, inputs, passed)
        if loss.requires_grad or contract.items is None or not torch.is_grad_enabled():
            return loss, outputs
        # A constant without a graph: with a dummy target every parameter gets a zero gradient.
        self.zero_weight = True
        return session.unscaled_loss(model, contract.items.with_target(inputs), passed)

    def _weigh(self, loss: Tensor) -> bool:
        """Weight a loss of this micro-batch; True: that is done."""
        window, contract = self.window, self.part.contract
        if contract.terms:
            inputs = ZeroWeightBatch(self.inputs) if self.zero_weight else self.inputs
            with overridden(self, "_inside", True):
                self.weighed = window.weigh(loss, self.batch, self._captured, inputs)
        else:
            self.weighed = window.average(loss * 0.0 if self.zero_weight and contract.custom else loss)
        return True

    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """``accelerator.backward`` with the weighted loss instead of the trainer's."""
        if self._inside or self.value is not None:
            self.session.not_exact("second backward", "calls accelerator.backward more than once in a micro-batch")
        if self._inside:
            return self._backward(loss, **kwargs)
        with self._refusing():
            if self.weighed is not None:
                session, (loss, self.value) = self.session, self.weighed
                if self.window.done == 0 and not session.state.recorded:
                    announce = partial(session.announce, self.part.contract, len(self.window.batches))
                    session.contained("reporting a loss", announce, None)
                # The engine may divide by another number than in other micro-batches.
                divided = engine_divisor(self._engine, **kwargs) / self.part.engine_divisor
                if session.over_ranks is not None:
                    divided *= session.over_ranks
                loss = loss if divided == 1 else loss * divided
            set_last_micro_batch(self._engine, self.is_last)
            return self._backward(loss, **kwargs)

    def end(self) -> Tensor | None:
        """End it after its step, and with the last one the window.

        Returns:
            The loss to log; None: the step passed none to the engine.

        Raises:
            SeamError: if a loss was computed that never reached ``accelerator.backward``.
        """
        session, window, loss = self.session, self.window, self.value
        if loss is None and self.weighed is not None:
            raise SeamError(
                f"got a step of {type(session.trainer).__name__} that did not pass its loss to accelerator.backward; "
                "expected that, since otherwise the gradient is not corrected; use accelerator.backward, or revert()"
            )
        if loss is not None:
            window.add(loss)
        window.done += 1
        if window.done == len(window.batches):
            summed, times = window.value, window.close(self._model)
            if times is not None and loss is not None and summed is not None:
                # The last micro-batch corrects the window's logged loss.
                loss = loss + (times - 1) * summed
        return loss

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep an error of ours, which a custom step may catch."""
        try:
            yield
        except AccumFixError as error:
            self.session.refused = error
            raise
