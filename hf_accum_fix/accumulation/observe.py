"""Observe a loss once: read its divisors from the graph, and compare three forwards to see which of them count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.agreement import Gather, SyncedRanks
from hf_accum_fix.accumulation.conclude import (
    NUMBERS,
    OF_THE_SPLIT,
    OPAQUE,
    OTHER_TERMS,
    Setting,
    conclude,
    number_rule,
    with_rules,
)
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Coupling, How, LossContract, Reduction
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.own_division import RANKS, own_division, step_candidates
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.reading import (
    ForgottenError,
    Forward,
    Reading,
    is_shifted,
    kept_small,
    read_batch,
    unpacked,
)
from hf_accum_fix.accumulation.rules import listed_targets, targets_padding, ways_of_counting
from hf_accum_fix.accumulation.samples import Split, splits
from hf_accum_fix.accumulation.window import ZeroWeightBatch

logger = logging.getLogger("hf_accum_fix")


def observe(
    call: Forward,
    window: Sequence[Mapping[str, Any]],
    model: nn.Module,
    setting: Setting,
    *,
    device: torch.device,
    head: nn.Module | None = None,
    others: Sequence[object] = (),
    leave: Sequence[object] = (),
    more_steps: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    gather: Gather | None = None,
) -> LossContract:
    """Observe how a loss is reduced, on samples of one window, and restore all state (see `preserved_state`).

    Args:
        call: one forward of the trained loss.
        window: the micro-batches.
        model: its modes, buffers and parameters are restored.
        setting: of the training.
        device: of the number.
        head: the model whose outputs have a router loss; None: there is none.
        others: more objects whose attributes are restored, such as the trainer.
        leave: objects that are not restored, such as data sets.
        more_steps: (factor) -> context in which the arguments have more accumulation steps, and factor times the ranks.
        gather: as for `SyncedRanks`.
    """
    # Repeated samples serve as well as any.
    window = [dict(batch) if isinstance(batch, ZeroWeightBatch) else batch for batch in window]
    sharded = holds_shards(model)
    listed = any(next(listed_targets(batch), None) is not None for batch in window)
    numbers: tuple[float | None, ...] = NUMBERS if setting.hands_number or setting.hands_own else (None, None, None)
    if setting.only_shows:
        numbers = (None, None, NUMBERS[2])

    with (
        preserved_state(model, *others, leave=leave, sharded=sharded) as state,
        SyncedRanks(gather) as ranks,
    ):
        norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)

        def put_back() -> None:
            state.restore()
            model.train()

        def run(batch: Mapping[str, Any], number: float | None, within: Any = nullcontext) -> Reading:
            try:
                return read_batch(call, batch, number, device, head, within, listed=listed, keep=False)
            except ForgottenError:
                # A penalty on the gradient, adversarial noise.
                put_back()
                return read_batch(call, batch, number, device, head, within, listed=listed, keep=True)

        def run_all(split: Split) -> tuple[list[Reading], float | None]:
            """The three forwards; and a loss with the number, if the number hides the divisor."""
            passed = (None, None, None) if setting.only_shows and not split.apart else numbers
            readings: list[Reading] = []
            for batch, number in zip(split[:3], passed, strict=True):
                if readings:
                    put_back()
                readings.append(run(batch, number))
            hidden = any(each.name.startswith(OPAQUE) for each in readings[2].terms)
            other_terms = len({(len(each.terms), len(each.inside)) for each in readings}) > 1
            if not setting.only_shows or not (hidden or other_terms):
                return readings, None
            by_number = readings[2].loss
            put_back()
            readings[2] = run(split.other, None)
            return readings, by_number

        def run_wider(batch: Mapping[str, Any], number: float | None) -> Reading | None:
            """With more steps and ranks; None: a loss that gathers metrics cannot run so."""
            try:
                return run(batch, number, partial(more_steps, RANKS))
            except Exception:
                logger.debug("a loss was not run with other ranks", exc_info=True)
                put_back()
                return None

        found, whole, failure = None, None, None
        wrote, writes, settled, divides = False, False, False, False
        search = splits(window)
        split = next(search)
        # All ranks run equally many forwards, since a custom loss may run collectives.
        while ranks.any(not settled):
            readings: list[Reading] = []
            by_number: float | None = None
            try:
                readings, by_number = run_all(split)
            except Exception as error:
                failure = failure or error
                # Running out of memory on an unchanged micro-batch would happen in training, too.
                if sharded or (out_of_memory(error) and any(split.whole is batch for batch in window)):
                    raise
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
            # The loss may depend on written state: a queue, a centre, a moving average.
            if ranks.any(not wrote and bool(readings) and norm is None and not sharded and state.wrote()):
                wrote = True
                again = run(split.other, readings[2].number if readings else None)
                writes = writes or bool(readings and again.numbers != readings[2].numbers)
            put_back()
            if by_number is not None:
                divides = _divides_unseen(readings[2].loss, by_number)
            if readings and not settled:
                latest = conclude(readings, window, replace(setting, apart=split.apart, again=found is not None))
                was_guess = found is not None and found.is_guess and latest.conclusive
                better = _better(found, latest, shows_coupling=split.shows_coupling)
                found, whole = better, readings[0] if better is latest else whole
                other_tasks = split.tasks and found.doubt.endswith(OTHER_TERMS)
                shows = _has_shown(found) and not _may_be_the_split(found) and not found.is_guess
                settled = sharded or was_guess or other_tasks or shows
            following = None if settled else next(search, None)
            settled = following is None or bool(found and not following.shows_coupling and _has_shown(found))
            split = split if settled or following is None else following
        if found is None and failure is not None:
            raise failure
        assert found is not None and whole is not None
        hidden = any(each.by_number and not each.rules for each in found.terms)
        alone = None
        if ranks.any(hidden and setting.custom and not setting.func):
            try:
                alone = run(whole.batch, None)
            except Exception:
                logger.debug("a loss needs its number", exc_info=True)
            put_back()
        if found.by_number and any(each.by_number for each in found.terms):
            found = with_rules(found, alone)
        candidates = step_candidates(found, whole, setting) if setting.custom or setting.func else []
        wider = ranks.any(setting.world_size > 1 and any(each.number for each in found.terms))
        if wider or ranks.any(bool(candidates)):
            more = run_wider(whole.batch, whole.number) if wider else None
            more = more or run(whole.batch, whole.number, partial(more_steps, 1))
            found = own_division(found, candidates, whole, more, setting)
        unread = any(each.how is How.PLAIN for each in found.terms) and not found.by_number
        uncut = setting.steps * setting.world_size == 1
        if ranks.any(unread and uncut and whole.number is not None):
            put_back()
            found = replace(found, hides_number=run(whole.batch, NUMBERS[1]).loss != whole.loss)
    if divides and found.reduction is Reduction.PLAIN:
        # Its kernel divides by the number, so it gets one, as from stock.
        rule = number_rule(whole.batch, window, setting)
        found = replace(found, reduction=Reduction.NUMBER, items=rule, terms=())
        setting = replace(setting, hands_number=True)
    doubt = found.doubt
    if writes:
        doubt = doubt or "its forward changes state that the loss depends on, so the order of micro-batches matters"
    if found.items is not None and any(targets_padding(found.items, batch) for batch in window):
        padding = "padding is among its targets (labels are not -100 where attention_mask is 0)"
        doubt = doubt or f"{padding}, so the loss depends on the split"
    found = replace(found, doubt=doubt)
    if norm is not None:
        found = _with_batch_norm(found, norm, setting)
    if found.items is None and setting.hands_number:
        # Its number counts as upstream's does.
        found = replace(found, items=number_rule(whole.batch, window, setting))
    return replace(found, custom=setting.custom, hands_number=setting.hands_number)


def _divides_unseen(alone: float, passed: float) -> bool:
    """Whether a loss with a hidden divisor is a mean without the number, and the sum over the number with it."""
    items = NUMBERS[2] * passed / alone if alone else 0.0
    return items >= 1 and abs(items - round(items)) <= 1e-3


def _better(found: LossContract | None, latest: LossContract, *, shows_coupling: bool) -> LossContract:
    """The better of two contracts, from one more split of the samples."""
    if found is None:
        return latest
    if found.is_guess and not latest.conclusive:
        return found
    if found.is_guess:
        # A sum, or a count without a rule, may fit one split by chance: a second one has to confirm it.
        alike = [each.form for each in latest.terms] == [each.form for each in found.terms]
        return found if alike else _doubted(found)
    if not latest.conclusive or _may_be_the_split(latest):
        return found
    # In a doubled batch all factors that are no counts look constant.
    return latest if shows_coupling else replace(latest, doubt=latest.doubt or found.doubt)


def _has_shown(found: LossContract) -> bool:
    """Whether a loss was observed, or its samples have no targets."""
    return found.conclusive or found.reason == NO_TARGET_SEEN


def _with_batch_norm(found: LossContract, norm: str, setting: Setting) -> LossContract:
    """The contract of a model with BatchNorm in training mode."""
    reason = f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch"
    terms = tuple(replace(each, how=How.PLAIN) if each.how is How.MEAN else each for each in found.terms)
    reduction = found.reduction if found.by_number and setting.custom else Reduction.PLAIN
    items = found.items if found.by_number else None
    return replace(found, reduction=reduction, items=items, terms=terms, doubt=reason, reason=reason)


def _may_be_the_split(found: LossContract) -> bool:
    """Whether the split may have separated rows that belong together."""
    return found.coupling is Coupling.COUPLED or found.doubt.endswith(OF_THE_SPLIT)


def _doubted(found: LossContract) -> LossContract:
    """A contract whose guesses a second split did not confirm."""
    terms = tuple(replace(each, how=How.PLAIN) if each.is_guess else each for each in found.terms)
    reason = "the number it divides by is hidden: its terms add up in one split of the samples, and not in another"
    if all(each.how is How.PLAIN for each in terms):
        return replace(found, reduction=Reduction.PLAIN, items=None, terms=terms, doubt=reason, reason=reason)
    return replace(found, terms=terms, doubt=found.doubt or reason)


def shift_of(call: Forward, window: Sequence[Mapping[str, Any]], model: nn.Module, *, sharded: bool) -> bool | None:
    """Whether a model's own loss, by ``call``, drops position 0 of its labels; None: unknown."""
    batch = max(window, key=lambda each: float(next(ways_of_counting(each)).count(each)))
    with preserved_state(model, sharded=sharded), torch.enable_grad(), saved_tensors_hooks(kept_small, unpacked):
        shown = [is_shifted(term, batch) for term in read(call(dict(batch), None))]
    return next((shift for shift in shown if shift is not None), None)


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()
