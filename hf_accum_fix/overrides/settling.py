"""How a trainer's loss is reduced: given by hand, or observed through the very call that training makes."""

from __future__ import annotations

import copy
import logging
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    SCALED_BESIDE,
    SEVERAL_FIT,
    SHIFT_UNKNOWN,
    Coupling,
    Divides,
    LossContract,
    Reduction,
)
from hf_accum_fix.accumulation.declared import (
    inside_ddp,
    is_compiled,
    products_are_rounded,
    router_coefficients,
    takes_number,
)
from hf_accum_fix.accumulation.evidence.forwards import HIGH
from hf_accum_fix.accumulation.evidence.own_loss import divides_by
from hf_accum_fix.accumulation.evidence.rules import composing_rules, counted_alike
from hf_accum_fix.accumulation.loss_calls import LossCalls
from hf_accum_fix.accumulation.observe import Forward, observe
from hf_accum_fix.accumulation.per_sample import by_sample, weighed_by_sample
from hf_accum_fix.accumulation.second_look import ATTEMPTS, as_before, is_due, look, several_fit, trained_wrongly
from hf_accum_fix.accumulation.share import loss_among
from hf_accum_fix.accumulation.window import Items, sample_count
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.errors import ContractError, RankError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import (
    accepts_number,
    data_ranks,
    hands_number,
    head_name,
    loss_func,
    place,
    scales_itself,
)
from hf_accum_fix.overrides.loader import check_dealing
from hf_accum_fix.overrides.session import SESSION, Response, Session, session_of
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")

#: What the base's loss is multiplied by in one forward, to see what an override makes of it.
_FACTOR = 3.0


def settle(trainer: TrainerLike, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    return settle_contract(trainer, session_of(trainer, options), window, options)


def settle_contract(
    trainer: TrainerLike, session: Session, window: list[Any], options: Options, trouble: Exception | None = None
) -> LossContract:
    """The contract of this trainer's loss as it is now; observed where it has not been, on every rank alike."""
    computed_by = (accepts_number(trainer), loss_func(trainer), trainer.label_smoother)
    if session.observed_for != computed_by:
        session.contract, session.observed_for, session.attempts = None, computed_by, 0
        session.passes_number = accepts_number(trainer) and takes_number(trainer.model_wrapped)
        session.response, session.closing.corrects = Response(shown=False), False
    known = session.contract
    settled = known is not None and (known.conclusive or session.attempts >= ATTEMPTS)
    alone = data_ranks(trainer) == 1
    # A rank whose data have ended counts this window as the others do.
    number = session.windows.opened + (not window)
    given = options.contract is not None
    if settled and known is not None and (given or not is_due(known, number, window, alone=alone)):
        _say_if_several_fit(trainer, session, known, window)
        return known
    if options.contract is not None:
        found = _given(trainer, session, options.contract)
    else:
        _check_alike(trainer, window, trouble)
        seen, trouble = look(
            lambda again: _observed(trainer, session, window, again=again),
            lambda mine, trouble: any(ranks.agreed(mine, trouble, **place(trainer))),
            window,
            # Labels are smoothed where they are observed to be, even if nothing is cut.
            matters=_is_cut(trainer) or trainer.label_smoother is not None,
        )
        found = _agreed(trainer, seen, trouble, window, session)
        if options.per_sample:
            found = by_sample(found)
        if settled and known is not None:
            return _still(trainer, session, known, found, window)
        session.attempts += found.reason != NO_TARGET_SEEN
    if trained_wrongly(known, found):
        session.windows.note_inexact()
    session.contract = found
    if not found.conclusive and session.attempts < ATTEMPTS:
        if found.reason != NO_TARGET_SEEN:
            _warn(trainer, session, found)
        return found
    check_dealing(trainer, found, options)
    session.closing.corrects = found.made_of is not None and not found.made_of.counted
    _warn(trainer, session, found)
    return found


def _is_cut(trainer: TrainerLike) -> bool:
    return trainer.args.gradient_accumulation_steps * data_ranks(trainer) > 1


def _observed(
    trainer: TrainerLike, session: Session, window: list[Any], *, again: int
) -> tuple[LossContract | None, Exception | None]:
    """What this rank sees of the loss; None: it has no window, or the trouble that it met."""
    if not window:
        return None, None
    response = session.response
    try:
        # The loop notes the length of a window once it was fetched; a loss of one's own may divide a term by it.
        with shadow(trainer, "current_gradient_accumulation_steps", len(window)):
            return _observe(trainer, session, window, again=again), None
    except Exception as error:
        return None, error
    finally:
        if response.shown and (again > 0 or not session.response.shown):
            session.response = response


def _still(
    trainer: TrainerLike, session: Session, known: LossContract, found: LossContract, window: Sequence[Any]
) -> LossContract:
    """The contract after a later window was observed too: as it was, narrowed down, or with a warning another one."""
    narrowed = as_before(known, found)
    session.contract = narrowed or (
        found if known.reduction is Reduction.PLAIN else replace(found, changed_by_trainer=True)
    )
    if narrowed is None or narrowed.rules != known.rules:
        # The windows before counted by a rule that this one rules out.
        session.windows.note_inexact()
    if narrowed is not None:
        _say_if_several_fit(trainer, session, narrowed, window)
    elif known.reduction is not Reduction.PLAIN:
        session.warn_once(
            "inexact",
            f"{head_name(trainer)}: window {session.windows.opened}: the loss {found}; it was observed as: {known}. "
            "The windows since then may not be exact; look at what changes in the data, or give "
            "contract=LossContract(...).",
        )
    return session.contract


def _say_if_several_fit(trainer: TrainerLike, session: Session, known: LossContract, window: Sequence[Any]) -> None:
    if known.conclusive and several_fit(known, window):
        session.windows.note_inexact()
        session.warn_once("inexact", f"{head_name(trainer)}: window {session.windows.opened}: {SEVERAL_FIT}.")


def _warn(trainer: TrainerLike, session: Session, found: LossContract) -> None:
    """Say once why a loss is not exact, where it shows."""
    head = head_name(trainer)
    if found.reduction is Reduction.SUM:
        session.warn_once("sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch.")
    # A number, or a shift, may be wrong even then.
    wrong_when_whole = found.reason == SHIFT_UNKNOWN or (found.by_number and not found.conclusive)
    if found.exact or (not _is_cut(trainer) and not wrong_when_whole):
        return
    if found.reduction is Reduction.PLAIN:
        if found.owned_by_trainer and (scales_itself(trainer) or found.divides is not Divides.NEVER):
            outcome = "stays as the trainer scales it"
        elif found.items is None:
            outcome = "gets the plain mean over micro-batches"
        else:
            outcome = "gets each micro-batch weighed by its items"
        words = f"{head}: {found.reason}. It {outcome}: {found.coupling.value}."
        if found.coupling is Coupling.COUPLED:
            session.warn_once(
                "inexact", f"{words} Keep per_device_train_batch_size large: one sample may teach nothing."
            )
        else:
            session.warn_once("inexact", words)
    elif found.changed_by_trainer:
        words = f"{type(trainer).__name__}.compute_loss changes the base's loss, so that it is not called exact."
        session.warn_once("inexact", f"{head}: {words}")
    elif found.beside:
        session.warn_once("inexact", f"{head}: {found.reason}, so that it is not called exact.")
    else:
        told = f"the loss {found}, as far as {session.attempts} windows tell: {found.reason}"
        session.warn_once("inexact", f"{head}: {told}.")


def _check_alike(trainer: TrainerLike, window: list[Any], trouble: Exception | None) -> None:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does."""
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    gathered = ranks.agreed((len(window), bool(labels), told), trouble, **place(trainer))
    if len({bool(length) for length, _, _ in gathered}) > 1:
        raise ranks.uneven({rank: length for rank, (length, _, _) in enumerate(gathered)})
    if len({labelled for _, labelled, _ in gathered}) > 1:
        raise RankError(
            f"got {ranks.by_rank([each for _, _, each in gathered])}; expected labels on every rank or on none; look "
            "at the collator, and at what it was given on the rank without"
        )


def _given(trainer: TrainerLike, session: Session, contract: LossContract) -> LossContract:
    """A contract given by hand, held against what can be known without a forward."""
    if contract.by_number and not session.passes_number and loss_func(trainer) is None:
        raise ContractError(
            f"the contract given says that the loss {contract.reduction.words}, but {head_name(trainer)} is not "
            "handed the number; give Reduction.MEAN, or let model_accepts_loss_kwargs be True"
        )
    if not contract.by_number:
        # A head that would divide by the number returns its own mean without it.
        session.passes_number = False
    return contract


def _observe(trainer: TrainerLike, session: Session, window: list[Any], *, again: int = 0) -> LossContract:
    """Observe the loss through the very call that training makes."""
    model = trainer.model_wrapped
    # A forward through DDP without gradient would switch off the next one's buffer sync.
    module: nn.Module = inside_ddp(model) or model
    # DeepSpeed's engine has a config of its own.
    bare: nn.Module = trainer.accelerator.unwrap_model(model)
    compute_loss = compute_loss_of(trainer)
    if not all(isinstance(batch, Mapping) for batch in window):
        reason = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
        return LossContract(Reduction.PLAIN, owned_by_trainer=compute_loss is not None, reason=reason)

    def observed(owned: bool) -> tuple[LossContract, list[_Asked]]:
        responses: list[_Asked] = []
        forward = as_in_training(trainer, module, compute_loss)

        def call(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
            session.base_loss, session.observed_number = None, number
            session.base_factor = _FACTOR if number is not None and float(number) == HIGH and not owned else 1.0
            listens = None if owned or compute_loss is None else LossCalls.listening()
            session.base_calls = listens
            with LossCalls(graded=listens.graded) if listens is not None else nullcontext() as beside:
                loss, outputs = forward(inputs, number)
            if listens is not None and beside is not None and session.base_loss is None:
                listens.seen.extend(beside.seen)
            if session.base_loss is None or owned:
                return loss, None if compute_loss is not None else outputs
            base, outputs = session.base_loss
            asked = (session.base_factor * float(base.detach()), float(loss.detach()))
            responses.append(_Asked(inputs, *asked, more_steps=session.more_steps, number_came=number is not None))
            return base, outputs

        found = observe(
            call,
            window,
            module,
            device=trainer.args.device,
            passes_number=compute_loss is not None or session.passes_number or loss_func(trainer) is not None,
            needs_number=loss_func(trainer) is not None or compute_loss is not None,
            router_coefficients=(0.0, 0.0) if loss_func(trainer) is not None else router_coefficients(bare),
            world_size=data_ranks(trainer),
            low_precision=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
            others=(trainer,),
            leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator),
            more_steps=None if compute_loss is None else lambda: _more_steps(trainer, session),
            again=again,
        )
        return found, responses

    session.observing = True
    try:
        # What it logs while it is observed is not training's.
        with shadow(trainer, "log", silent):
            found, responses = observed(owned=False)
            response = _response_of(responses, len(window))
            if response is not None and response.factor == 0.0:
                # The base is asked, but the loss is not made of its answer.
                found, _ = observed(owned=True)
    except Exception:
        logger.error(
            "%s: its loss could not be run to be observed. Where training itself would run, give the contract by hand: "
            "apply(contract=LossContract(...))",
            head_name(trainer),
        )
        raise
    finally:
        session.observing, session.base_loss, session.observed_number, session.base_factor = False, None, None, 1.0
        session.base_calls = None
    if any(parameter._backward_hooks for parameter in module.parameters()):
        reason = "hooks on gradients run in every micro-batch, and one that is not linear makes another sum of them"
        found = replace(found, beside=True, reason=reason)
    if found.owned_by_trainer:
        session.response = Response()
        if found.reduction in (Reduction.MEAN, Reduction.SUM) and scales_itself(trainer):
            reason = "the trainer says that it scales the loss by itself"
            return replace(found, reduction=Reduction.PLAIN, items=None, made_of=None, reason=reason)
        return found
    session.response = response or Response()
    if response is None or response.divides is Divides.UNKNOWN:
        found = replace(found, changed_by_trainer=True)
    elif response.extra and counted_alike(response.extra, window):
        found = replace(found, extra=response.extra)
    elif response.extra:
        found = replace(found, changed_by_trainer=True)
    if is_compiled(module):
        found = found.without_calls()
    made_of = found.made_of
    if made_of is not None and not made_of.counted and (found.extra or session.response.constant):
        found = replace(found, beside=True, reason=SCALED_BESIDE)
    axes = {batch["labels"].ndim for batch in window if isinstance(batch.get("labels"), Tensor)}
    if trainer.label_smoother is not None and loss_func(trainer) is None and axes:
        return _smoothed(found, trainer.label_smoother.ignore_index, of_tokens=axes != {1})
    return found


def _smoothed(found: LossContract, ignore_index: int, *, of_tokens: bool) -> LossContract:
    """The contract of the smoothed loss of a model: a mean over labels, shifted where the model's own are."""
    known = (*found.alternatives, *found.rules)
    # As stock smooths them comes first.
    shifts = sorted({rule.shift for rule in known if rule.keys == ("labels",)})
    rules = tuple(Items(("labels",), ignore_index, shift=shift) for shift in shifts or [False])
    smooth = replace(found, reduction=Reduction.MEAN, items=rules[0], alternatives=rules, made_of=None)
    if of_tokens and len(shifts) != 1:
        return replace(smooth, beside=True, reason=SHIFT_UNKNOWN)
    return replace(smooth, beside=True) if found.reduction is Reduction.PLAIN else smooth


@dataclass(frozen=True)
class _Asked:
    """One forward of a ``compute_loss`` that asked the base: the base's loss, and what was made of it."""

    inputs: Mapping[str, Any]
    base: float
    loss: float
    more_steps: bool
    number_came: bool


def _response_of(responses: Sequence[_Asked], steps: int) -> Response | None:
    """What a ``compute_loss`` makes of the base's loss; None: nothing linear.

    One of the base's losses was multiplied by `_FACTOR`, which tells a factor from what is added.

    Args:
        responses: in the order of forwards, the first two of one batch.
        steps: G.
    """
    seen = [each for each in responses if math.isfinite(each.base) and math.isfinite(each.loss)]
    plain = [each for each in seen if each.number_came and not each.more_steps]
    if responses and not any(each.base for each in plain):
        return Response(shown=False)
    if all(each.loss == each.base for each in seen) or len(plain) < 2:
        return Response()
    one, other = plain[:2]
    if one.base == other.base:
        return Response() if one.loss == one.base else None
    factor = (other.loss - one.loss) / (other.base - one.base)
    added = one.loss - factor * one.base
    limit = 1e-5 * max(abs(each.loss) for each in plain)
    if abs(factor) < 1e-9:
        return Response(0.0)
    if any(abs(each.loss - factor * each.base - added) > limit for each in plain):
        extra = _extra(plain, factor)
        return Response(round(factor, 12), extra=extra, divides=_divides(seen, factor, added, steps)) if extra else None
    constant = abs(added) > limit
    if constant and all(_alike(each.inputs, plain[0].inputs) for each in plain):
        # Seen on other samples too, it would be a constant.
        return None
    return Response(round(factor, 12), constant, divides=_divides(seen, factor, added, steps))


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two forwards were of the same samples."""
    return all(one[key] is other.get(key) for key in one)


def _extra(plain: Sequence[_Asked], factor: float) -> tuple[Items, ...]:
    """The rules by which what is added to the base's loss composes from the parts of a batch; none: it does not."""
    whole, *parts = (plain[0], *plain[-2:])
    rows = [sample_count(each.inputs) for each in (whole, *parts)]
    if len(plain) < 4 or rows[0] != rows[1] + rows[2]:
        return ()
    added = [each.loss - factor * each.base for each in (whole, *parts)]
    return composing_rules([each.inputs for each in (whole, *parts)], added)


def _divides(seen: Sequence[_Asked], factor: float, added: float, steps: int) -> Divides:
    """When an override divides the base's loss for the window, from what it does with more steps and no number."""

    def compared(each: _Asked | None) -> float:
        return 1.0 if each is None or each.base == 0.0 else (each.loss - added) / each.base / factor

    more_steps = compared(next((each for each in seen if each.more_steps), None))
    without = compared(next((each for each in seen if not each.number_came), None))
    if abs(without - 1) > 1e-4 and abs(without - steps) >= 1e-3 * steps:
        return Divides.UNKNOWN
    return divides_by(more_steps, with_number=abs(without - 1) > 1e-4)


def silent(*_: Any, **__: Any) -> None:
    """Log nothing."""


@contextmanager
def _more_steps(trainer: TrainerLike, session: Session) -> Iterator[None]:
    """Let the arguments say twice the accumulation steps, and the trainer three times the window's."""
    steps = trainer.args.gradient_accumulation_steps
    window = getattr(trainer, "current_gradient_accumulation_steps", steps)
    before = vars(trainer.args).get("gradient_accumulation_steps", steps)
    vars(trainer.args)["gradient_accumulation_steps"] = 2 * steps
    session.more_steps = True
    try:
        with shadow(trainer, "current_gradient_accumulation_steps", 3 * window):
            yield
    finally:
        session.more_steps = False
        vars(trainer.args)["gradient_accumulation_steps"] = before


def _agreed(
    trainer: TrainerLike,
    found: LossContract | None,
    trouble: Exception | None = None,
    window: Sequence[Any] = (),
    session: Session | None = None,
) -> LossContract:
    """The ranks' one contract; None: this rank had no window to observe."""
    axes = {
        (key, value.ndim)
        for batch in window
        if isinstance(batch, Mapping)
        for key, value in batch.items()
        if "label" in key and isinstance(value, Tensor)
    }
    response = None if session is None else session.response
    gathered = ranks.agreed((found, axes, response), trouble, **place(trainer))
    agreed = agree([each for each, *_ in gathered if each is not None])
    if session is not None and not session.response.shown:
        # A rank without a target takes what the others have seen.
        session.response = next((each for *_, each in gathered if each is not None and each.shown), session.response)
    held = set().union(*(each for _, each, _ in gathered))
    if len(gathered) > 1 and len({key for key, _ in held}) < len(held) and not agreed.owned_by_trainer:
        reason = "the ranks train different tasks, on labels with and without an axis of tokens"
        return LossContract(Reduction.PLAIN, dtype=agreed.dtype, reason=reason)
    return agreed


def as_in_training(trainer: TrainerLike, module: nn.Module, compute_loss: Callable[..., Any] | None) -> Forward:
    """The forward that training makes of a micro-batch, unsmoothed; without outputs where the loss is the trainer's."""
    handed = compute_loss is not None and hands_number(compute_loss)

    def forward(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            if compute_loss is None:
                return base_loss(trainer, module, inputs, number, smooth=False)
            result = compute_loss(module, inputs, **({"num_items_in_batch": number} if handed else {}))
        return (result[0] if isinstance(result, tuple) else result), None

    return forward


def base_loss(
    trainer: TrainerLike, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None, *, smooth: bool = True
) -> tuple[Tensor, Any]:
    """The loss as the base Trainer comes by it, before any release's scaling.

    Source: the contract of ``Trainer.compute_loss``, which the releases share: the number goes to a model that accepts
    it; ``compute_loss_func`` owns its loss; the label smoother takes the labels out of the model's sight.
    """
    given, inputs, labels = inputs, dict(inputs), None
    func, smoother = loss_func(trainer), trainer.label_smoother if smooth else None
    if func is not None or smoother is not None:
        labels = inputs.pop("labels", None)
    session: Session = trainer.__dict__[SESSION]
    if session.passes_number and number is not None:
        inputs["num_items_in_batch"] = number
    with own_counts(given):
        outputs = model(**inputs)
        if (past := getattr(trainer.args, "past_index", -1)) >= 0:
            vars(trainer)["_past"] = outputs[past]
        if func is not None:
            return func(outputs, labels, num_items_in_batch=number), outputs
    if smoother is not None and labels is not None:
        contract = session.contract
        shift = contract is not None and contract.items is not None and contract.items.shift
        return smoother(outputs, labels, shift_labels=shift), outputs
    return loss_among(outputs, inputs, model), outputs


def loss_alone(trainer: TrainerLike, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The loss of a batch that is not part of a larger one, and the model's outputs; `settle` comes first.

    It is the mean over the batch's own items (or the sum), by the head itself, which is handed no number, or by the
    trainer's own ``compute_loss``; a ``compute_loss_func`` is handed the batch's own item count.
    """
    session: Session = trainer.__dict__[SESSION]
    contract = session.contract
    assert contract is not None
    inputs = trainer._prepare_inputs(inputs)
    compute_loss = compute_loss_of(trainer)
    with (
        trainer.accelerator.autocast(),
        trainer.compute_loss_context_manager(),
        weighed_by_sample(contract.items, inputs),
    ):
        if compute_loss is not None:
            own: dict[str, Any] = {}
            if contract.by_number and contract.items is not None and hands_number(compute_loss):
                # It may not do without; W ranks make W times this of it, where it multiplies by them.
                own["num_items_in_batch"] = contract.items.count(inputs) * (
                    data_ranks(trainer) if contract.takes_world_size else 1
                )
            return compute_loss(model, inputs, return_outputs=True, **own)  # type: ignore[no-any-return]
        counted = loss_func(trainer) is not None and contract.items is not None
        number = contract.items.count(inputs) if counted and contract.items is not None else None
        loss, outputs = base_loss(trainer, model, inputs, None if number is None else contract.as_number(number))
    router = contract.carried(outputs)
    # A smoothed loss is made from the logits alone.
    smoothed = trainer.label_smoother is not None and loss_func(trainer) is None
    return (loss + router.to(loss.device) if smoothed and router is not None else loss), outputs


def compute_loss_of(trainer: TrainerLike) -> Callable[..., Any] | None:
    """The trainer's own ``compute_loss`` where something overrides the base; None where the base is all there is."""
    if "compute_loss" in vars(trainer):
        return trainer.compute_loss
    ours = ("hf_accum_fix.trainer", Trainer.__module__)
    defining = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return None if defining.__module__ in ours else trainer.compute_loss


def unshared(trainer: TrainerLike) -> Any:
    """A copy of a trainer: the same model and data, but containers, and containers in them, are its own."""
    copied = object.__new__(type(trainer))  # copy.copy would leave a note on the class
    vars(copied).update((name, _without_sharing(value)) for name, value in vars(trainer).items())
    return copied


def _without_sharing(value: Any) -> Any:
    """The same, but containers, and containers in them, are new ones."""
    if type(value) in (dict, defaultdict, OrderedDict):
        copied = copy.copy(value)
        copied.update((key, _without_sharing(each)) for key, each in value.items())
        return copied
    if type(value) in (list, deque, set):
        copied = copy.copy(value)
        if type(value) is list:
            copied[:] = map(_without_sharing, value)
        return copied
    return value
