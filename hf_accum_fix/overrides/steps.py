"""``compute_loss`` and ``training_step``: a micro-batch's loss, to the engine and to the log."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.accumulation.contract import Divides, LossContract, Reduction
from hf_accum_fix.accumulation.loss_calls import LossCall, LossCalls
from hf_accum_fix.accumulation.micro_batch import run_micro_batch, weigh, weighed_terms
from hf_accum_fix.accumulation.second_look import ATTEMPTS
from hf_accum_fix.accumulation.share import Cut, Share, of_window
from hf_accum_fix.accumulation.window import Items, Weightless, count_by_rules
from hf_accum_fix.data.whole_windows import Blank
from hf_accum_fix.engines.engine import engine_divisor, inputs_are_rounded, tell_last
from hf_accum_fix.errors import SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.announcing import announce
from hf_accum_fix.overrides.certifying import end_window, gradient_versions
from hf_accum_fix.overrides.forward import base_loss
from hf_accum_fix.overrides.live import loss_func, remakes_inputs, scales_itself
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
        return wrapped(*args, **kwargs)

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if session.observing:
            # Whatever number an override hands on: in training the base's own goes to the model.
            number = num_items_in_batch if session.observed_number is None else session.observed_number
            with session.base_calls.resumed() if session.base_calls is not None else nullcontext():
                loss, outputs = base_loss(trainer, model, inputs, number, smooth=False)
            before = session.base_loss
            session.base_loss = (loss if before is None else before[0] + loss, outputs)
            loss = loss * session.base_factor
        else:
            assert session.micro_batch is not None
            loss, outputs = _loss_in_window(trainer, session, session.micro_batch, model, inputs)
        owns_labels = loss_func(trainer) is not None or trainer.label_smoother is not None
        if owns_labels and isinstance(inputs, MutableMapping):
            # Stock takes them out of the caller's batch.
            inputs.pop("labels", None)
        return (loss, _with_loss(outputs, loss)) if return_outputs else loss

    return bind(*args, **kwargs)


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The outputs of a model, whose loss is the one that is returned beside them: a caller may take either."""
    if isinstance(outputs, MutableMapping) and "loss" in outputs and outputs["loss"] is not loss:
        outputs = copy.copy(outputs)
        outputs["loss"] = loss
    return outputs


def _loss_in_window(
    trainer: TrainerLike, session: Session, micro_batch: MicroBatch, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[Tensor, Any]:
    window = session.window
    assert window is not None
    contract = window.contract
    if contract.owned_by_trainer and not contract.by_number:
        # What it makes of the base's answer is weighed as a whole.
        return base_loss(trainer, model, inputs, None)
    cut, predicted = window.cut, micro_batch.counts
    counts = predicted or {}
    if contract.rules and not micro_batch.weightless and (predicted is None or remakes_inputs(trainer)):
        # What is run is counted, whatever was fetched.
        counts = count_by_rules(contract.rules, [inputs], cut.mean.device)[0][0]
        if window.certificate is not None:
            window.certificate.note_inputs(inputs, cut.mean.device)
        if cut.micro_batches * cut.world_size == 1:
            total, *beside = counts.values()
            cut = Cut.of(contract, total, 1, 1, beside)
    ran = run_micro_batch(
        contract,
        inputs,
        counts,
        cut,
        lambda given, number: base_loss(trainer, model, given, number),
        window.certificate,
        own_loss=loss_func(trainer) is not None,
        rounded=inputs_are_rounded(trainer.accelerator),
        smoothed=trainer.label_smoother is not None and loss_func(trainer) is None,
    )
    loss = ran.loss
    micro_batch.run_counts = counts
    _note_counts(window, counts, predicted)
    micro_batch.base_calls += 1
    if ran.items is not None and contract.items is not None:
        at_its_place = window.counts[min(window.steps_run, len(window.counts) - 1)]
        items = counts[contract.items]
        known = items if cut is not window.cut else at_its_place if predicted is None else predicted[contract.items]
        as_counted = micro_batch.base_calls == 1 and not micro_batch.weightless
        micro_batch.seen = (ran.items if as_counted else known, known)
    micro_batch.base = loss if micro_batch.base is None else micro_batch.base + loss
    return loss, ran.outputs


def _note_counts(window: Window, counts: Mapping[Items, Tensor], predicted: Mapping[Items, Tensor] | None) -> None:
    """Hold what a micro-batch with several terms was computed from against what was fetched at its place."""
    if window.certificate is None or len(counts) < 2 or window.cut.is_whole or not window.by_rule:
        return
    at_its_place = window.by_rule[min(window.steps_run, len(window.by_rule) - 1)]
    fetched = at_its_place if predicted is None else predicted
    window.certificate.note_counts(counts, fetched)
    for rule in [*counts][:1]:
        window.certificate.note_items(counts[rule], fetched[rule])


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
    if session.micro_batch is not None:
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
    if isinstance(inputs, Blank):
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
    depth = 0

    def record_loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        if depth == 1:
            given = loss_kwargs.get("num_items_in_batch", loss_args[3] if len(loss_args) > 3 else None)
            micro_batch.number_came = given is not None
            loss_args, loss_kwargs = _count_own(session, window, micro_batch, loss_args, loss_kwargs)
        listens = depth == 1 and contract.owned_by_trainer and contract.made_of is not None
        try:
            with (
                in_the_window(session, window) if depth == 1 else nullcontext(),
                LossCalls(graded=contract.graded) if listens else nullcontext() as calls,
            ):
                result = original_loss(*loss_args, **loss_kwargs)
        finally:
            depth -= 1
        if depth == 0:
            loss = result[0] if isinstance(result, tuple) else result
            # Now: 4.46.0 scales in place what it is handed. And never the model's output itself: DeepSpeed hangs hooks
            # on that, which divide once more (stage 0).
            seen = None if calls is None else calls.seen
            micro_batch.share = _share_of_window(trainer, session, micro_batch, window, loss, seen)
        return result

    def set_loss(loss: Tensor, **backward_kwargs: Any) -> Any:
        tell_last(accelerator, window.steps_run + 1 == len(window.batches))
        if micro_batch.share is None:
            return original_backward(loss, **backward_kwargs)
        micro_batch.reported = micro_batch.share.detach()
        if window.steps_run == 0:
            announce(trainer, session, window, passed=loss, right=micro_batch.reported)
        divisor = engine_divisor(accelerator, backward_kwargs)
        return original_backward(micro_batch.share if divisor == 1 else micro_batch.share * divisor, **backward_kwargs)

    try:
        with (
            shadow(trainer, "compute_loss", record_loss),
            shadow(accelerator, "backward", set_loss),
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


def _count_own(
    session: Session, window: Window, micro_batch: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Count what a trainer's own mean is about to be computed from, before it takes labels out of it.

    Returns:
        Its arguments, with a dummy target where there is none: the mean over nothing is nan.
    """
    contract = window.contract
    if not contract.owned_by_trainer or contract.reduction is not Reduction.MEAN or micro_batch.weightless:
        return args, kwargs
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    counts = micro_batch.run_counts = count_by_rules(contract.rules, [inputs], window.cut.mean.device)[0][0]
    if window.cut.is_whole:
        return args, kwargs
    run = copy.copy(inputs)
    for rule in contract.rules:
        run.update({key: value for key, value in rule.with_target(run, counts[rule]).items() if key in rule.keys})
    return (args, {**kwargs, "inputs": run}) if "inputs" in kwargs else ((args[0], run, *args[2:]), kwargs)


def _own_mean(
    contract: LossContract, micro_batch: MicroBatch, window: Window, loss: Tensor, calls: Sequence[LossCall] | None
) -> Tensor:
    """The share of the global batch's loss of a mean that a trainer computed by itself."""
    assert contract.items is not None
    cut, counts = window.cut, micro_batch.run_counts
    _note_counts(window, counts, None)
    items = counts[contract.items]
    share = Share({}, None, None if cut.is_whole else items / cut.mean)
    certificate = window.certificate
    loss, seen = weigh(contract, loss, calls, counts, cut, share, certificate)
    if certificate is not None and not cut.is_whole and window.counts:
        predicted = window.counts[min(window.steps_run, len(window.counts) - 1)]
        certificate.note_items(items if seen is None else seen, predicted)
    return loss


def _share_of_window(
    trainer: TrainerLike,
    session: Session,
    micro_batch: MicroBatch,
    window: Window,
    loss: Tensor,
    calls: Sequence[LossCall] | None = None,
) -> Tensor | None:
    """What a micro-batch's loss adds to the window's; averaged over ranks the sum is the global batch's loss.

    None: it is not known how the trainer scales it, and what it hands on is left as it is.
    """
    contract, steps = window.contract, len(window.batches)
    response = window.response or session.response
    if not contract.owned_by_trainer and micro_batch.base is not None:
        if window.certificate is not None:
            if micro_batch.seen is not None:
                window.certificate.note_items(*micro_batch.seen)
            if loss is not micro_batch.base and not contract.extra:
                window.certificate.note_override(loss, micro_batch.base, response.factor, constant=response.constant)
        if contract.extra and not window.cut.is_whole:
            rule = contract.extra[0]
            ratio = 0.0 if micro_batch.weightless else micro_batch.run_counts[rule] / window.cut.means[rule]
            loss = weighed_terms(loss, ratio, [(micro_batch.base * response.factor, 1.0)])
        return of_window(loss, steps, _divided_by(trainer, response.divides, micro_batch, steps))
    if micro_batch.weightless:
        return loss * 0.0
    if contract.owned_by_trainer and contract.reduction is Reduction.MEAN:
        loss = _own_mean(contract, micro_batch, window, loss, calls)
    if contract.owned_by_trainer and contract.by_number:
        return loss * 1.0
    if contract.divides is Divides.UNKNOWN and not scales_itself(trainer):
        return None
    if contract.owned_by_trainer and contract.reduction is Reduction.SUM:
        # Engines take the mean over ranks; nothing else divides a sum.
        return loss * (window.cut.world_size * _divided_by(trainer, contract.divides, micro_batch, steps))
    if scales_itself(trainer):
        return loss * 1.0
    return of_window(loss, steps, _divided_by(trainer, contract.divides, micro_batch, steps))


def _divided_by(trainer: TrainerLike, divides: Divides, micro_batch: MicroBatch, steps: int) -> int:
    """What the trainer has divided a loss by for the window; ``steps``: G of the window."""
    if divides in (Divides.WITH_NUMBER, Divides.WITH_NUMBER_BY_ARGUMENT) and not micro_batch.number_came:
        return 1
    if divides in (Divides.ALWAYS, Divides.WITH_NUMBER):
        return steps
    if divides in (Divides.BY_ARGUMENT, Divides.WITH_NUMBER_BY_ARGUMENT):
        return int(trainer.args.gradient_accumulation_steps)
    return 1
