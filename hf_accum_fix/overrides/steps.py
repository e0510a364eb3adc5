"""``compute_loss`` and ``training_step``: a micro-batch's loss, to the engine and to the log."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.share import of_window, run_by_rule
from hf_accum_fix.accumulation.values import Heard, listening
from hf_accum_fix.accumulation.weigh import weigh
from hf_accum_fix.accumulation.window import Weightless
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.engines.engine import engine_divisor, inputs_are_rounded, tell_last
from hf_accum_fix.errors import AccumFixError, SeamError, UnsupportedSetupError
from hf_accum_fix.known import ATTEMPTS
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.announcing import announce
from hf_accum_fix.overrides.certifying import end_window, gradient_versions
from hf_accum_fix.overrides.forward import base_loss, compute_loss_of
from hf_accum_fix.overrides.live import (
    bare_model,
    counts_itself,
    declares_scale,
    loss_func,
    remakes_inputs,
    scales_itself,
)
from hf_accum_fix.overrides.observing import MADE_BY_STEP, MADE_LATER
from hf_accum_fix.overrides.precision import adding
from hf_accum_fix.overrides.routing import in_the_window, note_routing
from hf_accum_fix.overrides.session import MicroBatch, Session, Window, session_of
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.presence import require_in_loop
from hf_accum_fix.upstream.protocols import TrainerLike

#: Asked here, as looking it up takes longer than all that is done in a micro-batch.
_LAST_NOT_REDUCED = is_present("last-micro-batch-not-reduced", transformers.__version__)


def compute_loss(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """The loss of one micro-batch, such that its plain mean over micro-batches and ranks is the global batch's.

    The original runs outside of a window: evaluation, and calls by hand.
    """
    session = session_of(trainer, options)
    if not session.observing and session.micro_batch is None:
        result = wrapped(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if session.window is not None and isinstance(loss, Tensor) and loss.requires_grad:
            session.windows.note_inexact()
            session.warn_once(
                "second loss",
                f"{type(trainer).__name__} computes a loss with gradient beside Trainer.training_step: what it makes "
                "of it is not weighed, so that the step is not called exact",
            )
        return result

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if session.observing:
            loss, outputs = base_loss(trainer, model, inputs, _handed(trainer, session, num_items_in_batch))
        else:
            assert session.micro_batch is not None
            loss, outputs = _loss_in_window(trainer, session, session.micro_batch, model, inputs, num_items_in_batch)
        owns_labels = loss_func(trainer) is not None or trainer.label_smoother is not None
        if owns_labels and isinstance(inputs, MutableMapping):
            # Stock takes them out of the caller's batch.
            inputs.pop("labels", None)
        return (loss, _with_loss(outputs, loss)) if return_outputs else loss

    return bind(*args, **kwargs)


def _handed(trainer: TrainerLike, session: Session, given: Any) -> Tensor | None:
    """What the base hands on while a loss is observed: a ``compute_loss`` that asks for no number gets none."""
    custom = session.own_step is not None or compute_loss_of(trainer) is not None
    return session.observed_number if not custom or given is not None or loss_func(trainer) is not None else None


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The outputs of a model, whose loss is the one that is returned beside them: a caller may take either."""
    if isinstance(outputs, MutableMapping) and "loss" in outputs and outputs["loss"] is not loss:
        outputs = copy.copy(outputs)
        outputs["loss"] = loss
    return outputs


def _loss_in_window(
    trainer: TrainerLike,
    session: Session,
    micro_batch: MicroBatch,
    model: nn.Module,
    inputs: Mapping[str, Any],
    given: Any,
) -> tuple[Tensor, Any]:
    """The base's loss: as it is where it is read at the end, else weighed by its rule."""
    window = session.window
    assert window is not None
    contract, cut = window.contract, window.cut
    if contract.is_read or contract.custom:
        number = cut.number.ceil() if contract.reduction is Reduction.INTEGER else cut.number
        if cut.is_whole and given is not None and (not contract.by_number or counts_itself(trainer)):
            number = given
        asks = given is not None if contract.custom else contract.hands_number
        handed = number if asks or loss_func(trainer) is not None else None
        loss, outputs = base_loss(trainer, model, inputs, handed)
        if loss.requires_grad or contract.items is None:
            return loss, outputs
        # A constant, where there is no target: with one its gradient is zero, and touches every parameter.
        micro_batch.weightless = True
        return base_loss(trainer, model, contract.items.with_target(inputs), handed)
    items = None if micro_batch.counts is None else micro_batch.counts.get(contract.items)  # type: ignore[arg-type]
    return run_by_rule(
        contract,
        Weightless(inputs) if micro_batch.weightless else inputs,
        items,
        cut,
        lambda given, number: base_loss(trainer, model, given, number),
        own_loss=loss_func(trainer) is not None,
        rounded=inputs_are_rounded(trainer.accelerator),
    )


def training_step(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """Run the original step, with the loss that reaches accelerate set right, and return the one to log.

    Summed over the window and averaged over ranks, as gradients are and as the Trainer logs, both are the global
    batch's.
    """
    session = session_of(trainer, options)
    if session.micro_batch is not None or session.observing:
        return wrapped(*args, **kwargs)
    window = session.window
    if window is None:
        if not enabled() or not trainer.is_in_train:
            return wrapped(*args, **kwargs)
        raise SeamError(
            f"no window was counted before this step: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples without calling it; call super().get_batch_samples, or revert()"
        )
    if not session.entered:
        session.say_off(require_in_loop(trainer))
    session.entered = True
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if isinstance(inputs, PlaceholderBatch):
        return torch.zeros((), device=trainer.args.device)
    model = kwargs["model"] if "model" in kwargs else args[0]
    window.turn_to(inputs)
    if window.gradients is not None and window.gradients != gradient_versions(trainer.model_wrapped):
        session.windows.note_inexact()
        session.warn_once(
            "gradients",
            f"{type(trainer).__name__} changes gradients between the micro-batches of a window (clips them?), so that "
            "the step is not called exact",
        )
    micro_batch = session.micro_batch = MicroBatch(window.counts_of(inputs), isinstance(inputs, Weightless))
    accelerator, contract = trainer.accelerator, window.contract
    original_loss, original_backward = trainer.compute_loss, accelerator.backward
    depth, own, head = 0, session.own_step is not None, bare_model(trainer)
    run = dict(inputs) if isinstance(inputs, Mapping) else {}

    def record_loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
        nonlocal depth, run
        if depth:
            return original_loss(*loss_args, **loss_kwargs)
        given = loss_kwargs["inputs"] if "inputs" in loss_kwargs else loss_args[1]
        # Before a ``compute_loss`` takes labels out of it.
        run = dict(given) if isinstance(given, Mapping) else {}
        depth = 1
        try:
            with in_the_window(session, window), nullcontext() if own else listening(contract, head) as heard:
                result = original_loss(*loss_args, **loss_kwargs)
        finally:
            depth = 0
        loss = result[0] if isinstance(result, tuple) else result
        if heard is not None:
            # Now: 4.46.0 scales in place what it is handed. And never the model's output itself: DeepSpeed hangs hooks
            # on that, which divide once more (stage 0).
            _weigh(trainer, session, window, micro_batch, loss, run, heard)
        return result

    def set_loss(loss: Tensor, **backward_kwargs: Any) -> Any:
        tell_last(accelerator, window.steps_run + 1 == len(window.batches))
        if heard_in_step is not None:
            _weigh(trainer, session, window, micro_batch, loss, run, heard_in_step)
        share = micro_batch.share
        if share is None:
            return original_backward(loss, **backward_kwargs)
        if micro_batch.reported is not None:
            session.windows.note_inexact()
            session.warn_once(
                "two losses",
                f"{type(trainer).__name__} hands two losses of one micro-batch to accelerator.backward: "
                "the step is not called exact",
            )
        weighed, stock = micro_batch.weighed, 1.0
        keeps_scale = weighed is not None and weighed.as_stock is not None
        if window.steps_run == 0 or keeps_scale:
            stock = _factor_over(loss, micro_batch.node)
        if weighed is not None and keeps_scale:
            # What stock hands over, with its own division or without it.
            share, micro_batch.value = weighed.scaled(stock, len(window.batches))
        micro_batch.reported = micro_batch.value
        if window.steps_run == 0:
            announce(trainer, session, window, stock * len(window.batches))
        divided = engine_divisor(accelerator, backward_kwargs) / window.cut.engine_divisor
        return original_backward(share if divided == 1 else share * divided, **backward_kwargs)

    try:
        with (
            listening(contract, head) if own else nullcontext() as heard_in_step,
            shadow(trainer, "compute_loss", _refusing(session, record_loss)),
            shadow(accelerator, "backward", _refusing(session, set_loss)),
            _reduced_in_the_last(trainer, window, model),
            adding(trainer, session, window, model),
        ):
            result = wrapped(*args, **kwargs)
    finally:
        session.micro_batch = None
    window.steps_run += 1
    # Looked at in the first windows of trainers that have a step of their own around ours.
    looks = session.windows.opened <= ATTEMPTS and remakes_inputs(trainer) and window.steps_run < len(window.batches)
    window.gradients = gradient_versions(trainer.model_wrapped) if looks else None
    reported = micro_batch.reported
    if micro_batch.share is not None and reported is None:
        raise SeamError(
            f"the step of {type(trainer).__name__} computed a loss but did not hand it to accelerator.backward; "
            "its gradient was not mended: use accelerator.backward, or revert()"
        )
    if own and reported is None and len(window.batches) * trainer.args.world_size > 1:
        session.windows.note_inexact()
        session.warn_once(
            "no loss",
            f"the training_step of {type(trainer).__name__} handed no loss of a micro-batch to accelerator.backward: "
            "the step is not called exact",
        )
    if reported is not None:
        window.reported = reported if window.reported is None else window.reported + reported
    if window.steps_run == len(window.batches):
        times = end_window(trainer, session, window)
        if times is not None and reported is not None and window.reported is not None:
            # The window's loss for the log, by its last micro-batch.
            reported = reported + (times - 1) * window.reported
        # To look at a number waits for the device: there, only in the first window, and when training ends.
        if trainer.args.device.type == "cpu" or "routing" not in session.said:
            note_routing(trainer, session)
        session.said.add("routing")
    return _logged(session, result if reported is None else reported)


def _refusing(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an error of ours for the optimizer's step, since the step of a trainer's own may catch it."""

    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AccumFixError as error:
            session.refused = error
            raise

    return refusing


def _logged(session: Session, loss: Tensor) -> Tensor:
    if session.loss_log is not None:
        session.loss_log.add(loss)
    return loss


def _reduced_in_the_last(trainer: TrainerLike, window: Window, model: nn.Module) -> AbstractContextManager[None]:
    """Reduce over ranks in the last micro-batch of a window alone; 4.46.2 does so in every other one."""
    if not _LAST_NOT_REDUCED or trainer.args.world_size == 1:
        return nullcontext()
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedSetupError(
            f"transformers {transformers.__version__} leaves the gradients of the last micro-batch on each rank, and "
            f"only under DistributedDataParallel can that be mended, not under {type(model).__name__}; take 4.46.3"
        )
    last = window.steps_run + 1 == len(window.batches)
    return shadow(model, "require_backward_grad_sync", last)


def _weigh(
    trainer: TrainerLike,
    session: Session,
    window: Window,
    micro_batch: MicroBatch,
    loss: Tensor,
    inputs: Mapping[str, Any],
    heard: Heard,
) -> None:
    """Keep what a micro-batch's loss adds to the window's; averaged over ranks the sum is the global batch's loss."""
    contract, steps, cut = window.contract, len(window.batches), window.cut
    micro_batch.node = loss.grad_fn
    if not contract.is_read:
        own = session.own_step is not None
        itself = _is_divided(trainer, loss, steps) if own else contract.custom and scales_itself(trainer)
        if contract.reason == MADE_BY_STEP or (contract.reason == MADE_LATER and declares_scale(trainer)):
            loss = _as_the_first(loss, window)
        loss = loss * 0.0 if micro_batch.weightless and contract.custom else loss
        micro_batch.value = of_window(loss.detach(), steps, steps if itself else 1)
        micro_batch.share = of_window(loss, steps, steps * cut.engine_divisor if itself else cut.engine_divisor)
        return
    assert window.check is not None
    predicted = micro_batch.counts
    if predicted is None:
        at_its_place = min(window.steps_run, len(window.by_rule) - 1)
        predicted = window.by_rule[at_its_place] if window.by_rule else {}
    weightless = micro_batch.weightless
    weighed = weigh(loss, contract, cut, window.check, inputs, predicted, heard, weightless=weightless)
    micro_batch.share, micro_batch.value = weighed.loss, weighed.value
    micro_batch.weighed = weighed


def _as_the_first(loss: Tensor, window: Window) -> Tensor:
    """A loss that is not observed, weighed by what it divides by over what the first one of its window does.

    The end of the window divides by the sum of both, as it does for every loss whose items no rule counts.
    """
    terms, check = read(loss), window.check
    assert check is not None
    if len(terms) != 1 or not terms[0].readable:
        check.changed = "what it divides by cannot be read: " + ", ".join(sorted({each.name for each in terms}))
        return loss
    divisor: Tensor | float = 1.0
    for each in terms[0].factors:
        divisor = each.value * divisor if each.divides and not each.learnt else divisor
    first = check.first(divisor)
    check.note(0, divisor, first)
    times = divisor / first
    return loss * (times.to(loss) if isinstance(times, Tensor) else times) if check.is_corrected else loss


def _is_divided(trainer: TrainerLike, loss: Tensor, micro_batches: int) -> bool:
    """Whether a loss names the micro-batches of a window: then the trainer may have divided by them already."""
    numbers = {float(each) for each in (micro_batches, trainer.args.gradient_accumulation_steps) if each > 1}
    return any(
        float(each.value) in numbers or (each.value and 1 / float(each.value) in numbers)
        for term in read(loss)
        for each in (term.factors[:-1] if term.divides else term.factors)
        if not each.learnt
    )


def _factor_over(loss: Tensor, node: Any) -> float:
    """What a loss was multiplied by since a node returned it."""
    factor = 1.0
    for term in read(loss, (node,)):
        for each in term.factors if term.leaf is node else ():
            factor = factor / float(each.value) if each.divides else factor * float(each.value)
    return factor
