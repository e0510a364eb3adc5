"""One optimizer step under the Trainer: its window is counted, its micro-batches weighted, and its gradient checked.

`training_step` of the Trainer runs inside ours; in it `MicroBatch.compute_loss` weights what the trainer's own returns,
and `MicroBatch.backward` gives the engine the weighted loss, whatever the step made of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_accum_fix.counting.items import ZeroWeightBatch
from hf_accum_fix.data.whole_windows import is_placeholder
from hf_accum_fix.engines.engine import engine_divisor, set_last_micro_batch, sharing_no_buffers
from hf_accum_fix.engines.watched import plain
from hf_accum_fix.errors import AccumFixError, SeamError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.session import TRAINING, Args, Kwargs, Original, Session, session_of
from hf_accum_fix.reading.values import Captured
from hf_accum_fix.trace.preserve import overridden
from hf_accum_fix.upstream.presence import require_in_loop
from hf_accum_fix.weighing.part import differ
from hf_accum_fix.weighing.weigh import Weighed
from hf_accum_fix.window.window import Window


def get_batch_samples(wrapped: Original, trainer: Any, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Upstream's window, and its number of this rank, which `counted` needs."""
    session = session_of(trainer, options)
    if session not in TRAINING:
        return wrapped(*args, **kwargs)
    # Upstream's gather would be a second collective, which a rank without micro-batches does not join.
    with overridden(trainer.args, "average_tokens_across_devices", False):
        fetched, number = wrapped(*args, **kwargs)
    session.upstream_numbers = [number]
    return fetched, number


def counted(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Count what ``get_batch_samples`` returns, custom or not, over all ranks; give N instead of upstream's number."""
    session.upstream_numbers, error = (), None
    try:
        fetched, number = original(*args, **kwargs)
    except Exception as caught:
        # Raised once the other ranks have it.
        fetched, number, error = [], None, caught
    if not session.upstream_numbers and error is None:
        return fetched, number
    session.is_counted, upstreams = number is not None, next(iter(session.upstream_numbers), None)
    session.open(fetched, upstreams, error)
    return fetched, _number_of(session, number, is_own=number is not upstreams)


def _number_of(session: Session, number: Any, *, is_own: bool = False) -> Any:
    """num_items_in_batch, where ``get_batch_samples`` returned ``number``, its own or the one that upstream counted.

    Where a model divides by it, it has to be the window's, or the training is stock's. The base's loss gets N, if it
    has items; a custom one that divides by it N if it multiplies by W, else N / W. All others get what stock gives.
    """
    window, trainer, several = session.window, session.trainer, session.world.size > 1
    averages = getattr(trainer.args, "average_tokens_across_devices", False)
    if window is None:
        sums = several and averages and number is not None and not is_own
        return session.summed(torch.as_tensor(number, device=session.world.device)) if sums else number
    part, total, of_all = window.part, window.part.total, number if is_own else window.number
    window.stock_number = of_all.long() if averages and of_all is not None and not is_own else number
    custom, divides = part.contract.custom, session.source.passes_number or session.source.func is not None
    # Other ranks may not know of a number that a custom ``get_batch_samples`` has returned.
    may_count = divides and not custom and (session.source.counts_items if not is_own else not several)
    if may_count and of_all is not None and differ(of_all, total):
        words = f"counts {float(of_all):g} items of a window that has {float(total):g}"
        session.not_exact("own number", f"{words}, by which its model divides in stock")
        session.state.aside, session.window = True, None
        return _number_of(session, number, is_own=is_own)
    if is_own or of_all is None or not (part.contract.by_number if custom else part.contract.items is not None):
        return number
    if custom and part.is_whole:
        if differ(of_all, total):
            session.report_inexact(f"its loss has {float(total):g} items, num_items_in_batch counts {float(of_all):g}")
        return number
    # If it is unknown whether a custom loss multiplies by W: where tokens are averaged across devices.
    multiplies = averages if part.contract.takes_world_size is None else part.contract.takes_world_size
    return total.long() if multiplies or not custom else total / part.world_size


def training_step(wrapped: Original, trainer: Any, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Run the original step with the scaled loss for accelerate, and return the loss to log.

    Summed over the window and averaged over ranks, both are the global batch's.

    Raises:
        SeamError: if no window was counted.
    """
    session = session_of(trainer, options)
    window, inputs = session.window, kwargs["inputs"] if "inputs" in kwargs else args[1]
    if is_placeholder(inputs):
        return torch.zeros((), device=session.world.device)
    # The inner call of a class that is also patched passes through, as does a step that is only observed.
    if session.state.aside or session.base_loss is not None:
        return wrapped(*args, **kwargs)
    if window is None:
        if enabled() and trainer.is_in_train:
            raise SeamError(
                f"got a step without a counted window: {session.name} (or a library that patched it) replaces Trainer."
                "get_batch_samples; expected a call to the original; call super().get_batch_samples, or revert()"
            )
        if enabled():
            session.warn_once(
                "by hand",
                f"got {session.name}.training_step outside of train(): this step is stock's, and nothing is "
                "corrected; expected a call by train(); call that, or use accumulation_windows in a loop of your own",
            )
        return wrapped(*args, **kwargs)
    if session.state.opened == 1 and not window.done:
        session.warn_off(require_in_loop(trainer))
        if (coupled := session.coupled) is not None and trainer.state.global_step:
            # Upstream loads a checkpoint's random state after it has fetched a window: the vectors are made anew.
            session.contained("resuming a coupled loss", partial(coupled.open, session, window.batches), None)

    def run(inputs: Any, begun: int, of: int) -> Any:
        micro_batch = MicroBatch(session, window, inputs)
        given = (args, {**kwargs, "inputs": inputs}) if "inputs" in kwargs else ((args[0], inputs, *args[2:]), kwargs)
        with (
            session.capturing(window.part.contract, trainer.model) as micro_batch.captured,
            overridden(session, "base_loss", micro_batch.base_loss),
            overridden(trainer, "compute_loss", micro_batch.compute_loss),
            overridden(trainer.accelerator, "backward", micro_batch.backward),
            session.delivery.micro_batch(session, trainer.model_wrapped, of, begun),
        ):
            result = wrapped(*given[0], **given[1])
        loss = micro_batch.logged()
        return result if loss is None else loss

    pieces, of = session.in_pieces, len(window.batches)
    loss = run(inputs, window.done + 1, of) if pieces is None else pieces.run(window, inputs, run)
    window.done += 1
    return _closed(session, window, loss) if window.done == len(window.batches) else loss


def _closed(session: Session, window: Window, loss: Any) -> Any:
    """Close a window after its last micro-batch, whose logged loss corrects the window's."""
    summed, times = window.value, window.close(session.trained)
    if times is not None and summed is not None:
        loss = loss + (times - 1) * summed
    if window.value is not None:
        session.finite = session.finite + window.value * 0.0
    return loss


def compute_loss(wrapped: Original, trainer: Any, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """The base's loss: inside a micro-batch, or an observed forward, its own; outside (evaluation) the original."""
    session = session_of(trainer, options)
    if session.base_loss is not None:
        return _base_loss(session, *args, **kwargs)
    result = wrapped(*args, **kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    counts = session.window is not None and not session.state.told.troubled
    if counts and isinstance(loss, Tensor) and loss.requires_grad:
        session.not_exact("second loss", "computes a loss with gradient outside Trainer.training_step, unweighted")
    return result


def _base_loss(
    session: Session, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """``Trainer.compute_loss``, as its caller expects it."""
    assert session.base_loss is not None
    loss, outputs = session.base_loss(model, inputs, num_items_in_batch)
    if session.source.owns_labels and isinstance(inputs, MutableMapping):
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
        batch: as fetched; if the step got another object, the one at its place.
        part: of the window.
        zero_weight: it counts nothing.
    """

    captured: Captured  # of its forward
    inputs: Mapping[str, Any]  # of its forward, as a ``compute_loss`` got them
    #: the last of them, summed over the window and averaged over ranks the global batch's.
    weighed: Weighed | None = None
    value: Tensor | None = None  # its part of the logged loss, once the engine has got the loss
    _inside = False

    def __init__(self, session: Session, window: Window, inputs: Any) -> None:
        self.session, self.window, self.part = session, window, window.part
        at = inputs if self.part.share < 1 else window.batches[min(window.done, len(window.batches) - 1)]
        self.batch = at if at is inputs else next((each for each in window.batches if each is inputs), at)
        self.zero_weight = isinstance(inputs, ZeroWeightBatch)
        trainer, self._engine = session.trainer, session.trainer.accelerator
        self._compute_loss, self._backward = trainer.compute_loss, self._engine.backward

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's ``compute_loss``, whose result is weighted."""
        session = self.session
        if self._inside:
            return self._compute_loss(model, inputs, *args, **kwargs)
        # A copy, since a ``compute_loss`` may remove the labels.
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self._inside = True
        try:
            inputs = inputs if session.coupled is None else session.coupled.inputs(inputs)
            with session.around_forward(self.window.done, self.part.share):
                result = self._compute_loss(model, inputs, *args, **kwargs)
            # Now, since 4.46.0 scales the loss in place.
            loss = result[0] if isinstance(result, tuple) else result
            self.weighed = session.contained("weighting the loss of a micro-batch", partial(self._weigh, loss), None)
            if self.weighed is not None:
                return result
            # As the stock Trainer computes it, once more.
            if "num_items_in_batch" in kwargs:
                kwargs["num_items_in_batch"] = self.window.stock_number
            with overridden(session, "base_loss", None):
                return self._compute_loss(sharing_no_buffers(model), dict(self.inputs), *args, **kwargs)
        except AccumFixError as error:
            session.refused = error
            raise
        finally:
            self._inside = False

    def base_loss(self, model: nn.Module, inputs: Mapping[str, Any], given: Any) -> tuple[Tensor, Any]:
        """The base's loss: unchanged if its graph is read later, else scaled by its rule.

        ``given``: the number that a custom ``compute_loss`` passed on.
        """
        session, part, contract = self.session, self.part, self.part.contract
        if not (contract.terms or contract.custom):
            inputs = ZeroWeightBatch(inputs) if self.zero_weight else inputs
            run, own_loss = partial(session.unscaled_loss, model), session.source.func is not None
            return self.window.run_by_rule(inputs, None, run, own_loss=own_loss)
        # Without a number a model returns its own mean.
        passed = (given if contract.custom else part.number) if contract.hands_number else None
        if part.is_whole and session.source.counts_items:
            passed = given
        loss, outputs = session.unscaled_loss(model, inputs, passed)
        if loss.requires_grad or contract.items is None or not torch.is_grad_enabled():
            return loss, outputs
        # A constant without a graph: with a dummy target every parameter gets a zero gradient.
        self.zero_weight = True
        return session.unscaled_loss(sharing_no_buffers(model), contract.items.with_target(inputs), passed)

    def _weigh(self, loss: Tensor) -> Weighed:
        """Weight a loss of this micro-batch, by its graph, or as it was scaled by its rule."""
        window, contract = self.window, self.part.contract
        if contract.terms:
            inputs = ZeroWeightBatch(self.inputs) if self.zero_weight else self.inputs
            return window.weigh(loss, self.batch, self.captured, inputs)
        return window.average(loss * 0.0 if self.zero_weight and contract.custom else loss)

    def backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """``accelerator.backward`` with the weighted loss instead of the trainer's."""
        session = self.session
        if self._inside or self.value is not None:
            session.not_exact("second backward", "calls accelerator.backward more than once in a micro-batch")
        if self._inside:
            return self._backward(loss, **kwargs)
        try:
            if self.weighed is not None:
                loss, self.value = self.weighed
                if self.window.done == 0 and not session.state.recorded:
                    session.contained("reporting a loss", partial(session.announce, self.part.contract), None)
                # The engine may divide by another number than in other micro-batches.
                divided = engine_divisor(self._engine, **kwargs) / self.part.engine_divisor
                divided *= 1.0 if session.world.over_ranks is None else session.world.over_ranks
                loss = loss if divided == 1 else loss * divided
            set_last_micro_batch(self._engine, self.window.done + 1 == len(self.window.batches))
            return self._backward(loss, **kwargs)
        except AccumFixError as error:
            session.refused = error
            raise

    def logged(self) -> Tensor | None:
        """The loss to log after its step; None: the step passed none to the engine.

        Raises:
            SeamError: if a loss was computed that never reached ``accelerator.backward``.
        """
        loss = self.value
        if loss is None and self.weighed is not None:
            raise SeamError(
                f"got a step of {self.session.name} that did not pass its loss to accelerator.backward; "
                "expected that, since otherwise the gradient is not corrected; use accelerator.backward, or revert()"
            )
        if loss is not None:
            self.window.add(loss)
        return loss


def backward(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.backward``, which warns of gradients from outside of a micro-batch."""
    if session.base_loss is None and session.window is not None and not session.state.aside:
        if session.accelerator.sync_gradients:
            # The engine now reduces what is in .grad.
            session.delivery.gradient.finish()
        if session.is_split:
            session.not_exact("second backward", "calls accelerator.backward outside Trainer.training_step")
    if session.state.opened == 1:
        session.delivery.ask(session.delivery.listen, session, original, *args, **kwargs)
    return original(*args, **kwargs)


def clip(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.clip_grad_norm_``, which first closes a window whose last micro-batch was skipped."""
    if session.base_loss is None:
        _close_unfinished(session)
    return original(*args, **kwargs)


def _close_unfinished(session: Session) -> None:
    """Close a window whose last micro-batch was skipped, on every rank."""
    if (window := session.window) is not None and window.done and not window.ended:
        window.close(session.trained)


def check_step(session: Session, optimizer: Optimizer, *_: Any) -> None:
    """Refuse an optimizer step without a micro-batch that came through its wrapped step, before it is taken.

    No gradient (of skipped micro-batches), zeros (by which DeepSpeed and FSDP2 make states) and what is not split pass.
    """
    window = session.window
    session.delivery.ask(session.delivery.steps.stepped, session, optimizer)
    # DeepSpeed and layerwise optimizers step inside a micro-batch.
    if session.base_loss is not None or session.state.aside:
        return
    if session.refused is not None:
        raise session.refused
    outer: Any = session.trainer.optimizer  # engines (accelerate, DeepSpeed) wrap it
    while outer is not None and outer is not optimizer:
        outer = vars(outer).get("optimizer")
    if outer is None:
        return
    gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
    refuses = session.steps * session.world.size > 1 and not session.state.told.troubled
    if window is not None and (window.value is not None or not window.batches):
        _close_unfinished(session)
    elif refuses and any(each is not None and plain(each).any() for each in gradients):
        raise SeamError(
            "got a gradient that came through neither Trainer.training_step nor accelerator.backward; expected one "
            "of them, since otherwise nothing is corrected; call super().training_step or accelerator.backward in "
            f"the step or loop of {session.name}, or revert()"
        )
