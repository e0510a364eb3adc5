"""Observe a loss in a window: read its divisors from the graph, and compare forwards to see which of them count."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.agreement import SyncedRanks
from hf_accum_fix.accumulation.choose import Choice
from hf_accum_fix.accumulation.comparison import Comparison, Setting
from hf_accum_fix.accumulation.conclude import conclude
from hf_accum_fix.accumulation.contract import How, LossContract, Reduction
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import ZeroWeightBatch
from hf_accum_fix.accumulation.join import Split, splits
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.number import (
    NUMBERS,
    SHOWN,
    divides_unseen,
    number_rule,
    shows_number,
    upstream_first,
)
from hf_accum_fix.accumulation.own_division import RANKS, own_division, step_candidates, terms_of, with_kept_size
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.python_state import PythonState
from hf_accum_fix.accumulation.reading import (
    Forward,
    LossRun,
    Reading,
    is_shifted,
    kept_small,
    read_batch,
    unpacked,
)
from hf_accum_fix.accumulation.rules import listed_targets, targets_padding, ways_of_counting

logger = logging.getLogger("hf_accum_fix")


def observe(
    loss: LossRun, window: Sequence[Mapping[str, Any]], setting: Setting, ranks: SyncedRanks | None = None
) -> LossContract:
    """Observe how a loss is reduced, on samples of one window, and restore all state (see `preserved_state`).

    ``window``: the micro-batches; ``setting``: of the training; ``ranks``: all that observe; None: this one alone.
    """
    # Repeated samples serve as well as any.
    batches = [dict(batch) if isinstance(batch, ZeroWeightBatch) else batch for batch in window]
    sharded = holds_shards(loss.model)
    with preserved_state(loss.model, *loss.others, leave=loss.leave, sharded=sharded) as state:
        return _Observation(loss, batches, setting, state, ranks or SyncedRanks(), sharded).contract()


@dataclass
class _Observation:
    """The forwards that observe a loss; all ranks run equally many, since a custom loss may run collectives.

    Attributes:
        sharded: an engine shards the parameters, so that every forward is a collective.
        whole: the forward of the batch that the contract was concluded from.
        writes: the loss depends on state that its forward writes; None: not tested.
        by_number: it divides a term by the number, if it gets one; None: not tested.
        divides: without the number it is a mean, and with it the sum over the number, though the graph hides that.
        moves: it depends on the number in any way.
        draws: random numbers change it; None: not tested.
        _run_before: the forwards so far, of the splits.
    """

    loss: LossRun
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    state: PythonState
    ranks: SyncedRanks
    sharded: bool
    whole: Reading = field(init=False)
    writes: bool | None = None
    by_number: bool | None = None
    divides: bool = False
    moves: bool = False
    draws: bool | None = None
    _run_before: list[Reading] = field(default_factory=list)

    def contract(self) -> LossContract:
        """How the loss is reduced."""
        model, window = self.loss.model, self.window
        norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
        # BatchNorm writes its statistics; shards are not copied.
        self.writes = False if self.sharded or norm is not None else None
        found = self._compared()
        if self.ranks.any(self._needs_number(found)):
            self.loss.hand_on()
            self.setting = replace(self.setting, hands_number=True)
            found = self._compared()
        hows = {each.how for each in found.terms}
        if self.setting.custom and How.PLAIN in hows and hows & {How.NUMBER, How.SUM}:
            # A part that is averaged does not go with one that is summed over the global batch.
            found = replace(found, keeps_scale=True)
        found = self._with_number_seen(self._with_own_division(self._with_rule_of_number(found)))
        setting = self.setting
        if self.divides and found.reduction is Reduction.MEAN:
            found = replace(found, reduction=Reduction.NUMBER)
        elif self.divides and found.reduction is Reduction.PLAIN and setting.has_stock:
            # Its kernel divides by the number, so it gets one, as from stock; loops pass none.
            rule = number_rule(self.whole.batch, window, setting)
            found = replace(found, reduction=Reduction.NUMBER, items=rule, terms=(), hands_number=True)
        dropped = any(
            each.how is How.MEAN and not each.rules and seen.named == () and not seen.is_weighted
            for each, seen in zip(found.terms, terms_of(found, self.whole), strict=True)
        )
        if dropped and self._divides_by_number(found):
            # By the number, as from stock, it trains as it does there.
            doubt = "its model drops targets that num_items_in_batch counts; the stock Trainer's scale is kept"
            found = replace(found, keeps_scale=True, doubt=found.doubt or doubt)
        doubt = found.doubt
        if self.writes:
            doubt = doubt or "its forward changes state that the loss depends on, so the order of micro-batches matters"
        items, pad = found.items, setting.decoder_pad
        if items is not None and any(targets_padding(items, batch, pad) for batch in window):
            where = "attention_mask is 0" if pad is None else f"they are padded by {pad}"
            padding = f"padding is among its targets (labels are not -100 where {where})"
            doubt = f"{padding}, so the loss depends on the split"
        found = replace(found, doubt=doubt)
        if norm is not None:
            found = _with_batch_norm(found, norm)
        if found.items is None and found.hands_number:
            # Its number counts as upstream's does.
            found = replace(found, items=number_rule(self.whole.batch, window, setting))
        return found

    def _divides_by_number(self, found: LossContract) -> bool:
        """Whether a model of a Trainer would divide by the number, which counts the window's labels."""
        setting = self.setting
        return setting.has_stock and not setting.custom and found.by_number and bool(setting.upstream_number)

    def _compared(self) -> LossContract:
        """The contract by the first split of the samples that shows the loss."""
        choice = Choice(self.sharded)
        self._run_before.clear()
        # Where the ranks meet in every forward, a part that a model cannot run would end the training.
        every = splits(self.window, has_decoder=self.setting.decoder_pad is not None)
        left = (split for split in every if not (self.sharded and split.group))
        split, is_open = next(left), True
        while self.ranks.any(is_open):
            readings = list[Reading]()
            try:
                readings = self._three(split)
            except Exception as error:
                # Running out of memory on an unchanged micro-batch would happen in training, too.
                if self.sharded or (out_of_memory(error) and any(split.whole is batch for batch in self.window)):
                    raise
                choice.note_failure(split, error)
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
            self._note_number(split, readings)
            self._note_writes(split, readings)
            self._note_draws(split, readings)
            self._restore()
            if readings and is_open:
                again = choice.found is not None
                by_number = bool(self.by_number)
                compared = Comparison(readings, self.window, self.setting, split.apart, again, by_number, split.pads)
                choice.take(split, conclude(compared), readings[0])
            following = next((each for each in left if choice.needs(each)), None) if is_open else None
            split, is_open = following or split, following is not None
        found, self.whole = choice.made()
        return found

    def _three(self, split: Split) -> list[Reading]:
        """The forwards of a batch and its two parts."""
        readings = list[Reading]()
        for number, batch in zip(NUMBERS, split[:3], strict=True):
            given = number if self.setting.handed == "all" else None
            # A batch or a part of the splits before; several ranks run equally many forwards.
            known = (each for each in self._run_before if each.batch is batch and each.number == given)
            seen = next(known, None) if self.ranks.alone else None
            if seen is None:
                self._restore()
                seen = self._run(batch, given)
                # A graph that keeps all tensors is not held for longer than it has to be.
                self._run_before += [] if seen.keeps else [seen]
            readings.append(seen)
            if self.ranks.alone and (
                not readings[0].shows_terms or (len(readings) == 2 and not any(r.loss for r in readings))
            ):
                # Its parts would show nothing either.
                return [readings[0]] * 3
        return readings

    def _note_number(self, split: Split, readings: Sequence[Reading]) -> None:
        """Test whether a model that gets the number divides by it."""
        shows = any(each.shows_terms and each.loss for each in readings)
        if not self.ranks.any(self.setting.handed == "once" and self.by_number is None and shows):
            return
        plain = next((each for each in readings[::-1] if each.shows_terms and each.loss), None)
        self._restore()
        shown = self._run(split.one if plain is None else plain.batch, SHOWN)
        if plain is not None and self.by_number is None:
            self.by_number, self.moves = shows_number(shown), shown.loss != plain.loss
            self.divides = not self.by_number and divides_unseen(plain, shown)

    def _note_draws(self, split: Split, readings: list[Reading]) -> None:
        """Test whether random numbers change the loss, if it draws any: it may only print now and then."""
        if self.ranks.any(self.draws is None and bool(readings) and readings[0].drew):
            self._restore()
            again = self._run(split.whole, readings[0].number if readings else None, seed=1)
            self.draws = bool(self.draws or (readings and again.numbers != readings[0].numbers))
        if readings:
            readings[0] = replace(readings[0], drew=bool(self.draws and readings[0].drew))

    def _note_writes(self, split: Split, readings: Sequence[Reading]) -> None:
        """Test whether the loss depends on state that its forward writes: a queue, a centre, a moving average."""
        if self.ranks.any(self.writes is None and bool(readings) and self.state.wrote()):
            # Another batch than the one that wrote: a loss over its own first value is one.
            again = self._run(split.one, readings[1].number if readings else None)
            self.writes = bool(self.writes or (readings and again.numbers != readings[1].numbers))

    def _needs_number(self, found: LossContract) -> bool:
        """Whether the base's loss has to get the number that a custom loss passes on.

        Its own mean is no substitute if it is called for each row, returns a sum without the number, or is inside what
        cannot be read.
        """
        kept_back = self.loss.kept_back()
        return kept_back > 1 or (kept_back > 0 and any(each.how in (How.SUM, How.PLAIN) for each in found.terms))

    def _with_rule_of_number(self, found: LossContract) -> LossContract:
        """The contract with the rule by which a custom loss would divide, if it got no number."""
        terms = zip(found.terms, terms_of(found, self.whole), strict=True) if found.custom else ()
        hidden = any(spec.how is How.NUMBER and not seen.total for spec, seen in terms)
        if not self.ranks.any(hidden and not self.setting.func):
            return found
        divisors, batch = set[float](), self.whole.batch
        try:
            for term in self._run(batch, None).terms:
                divisors |= {*term.divisors}
        except Exception:
            logger.debug("a loss needs its number", exc_info=True)
        self._restore()
        if not hidden:
            # It ran to keep step with a rank that needs it.
            return found
        fitting = [rule for rule in ways_of_counting(batch) if float(rule.count(batch)) in divisors]
        if divisors and not fitting:
            return replace(found, doubt=found.doubt or "its divisor cannot be predicted from the inputs")
        rules = upstream_first(fitting, batch, self.window, self.setting)
        return found.with_rules_of_number(rules) if fitting else found

    def _with_own_division(self, found: LossContract) -> LossContract:
        """The contract with the divisions by steps and ranks that the arguments cause."""
        setting, whole = self.setting, self.whole
        candidates = step_candidates(found, whole, setting) if setting.custom or setting.func else []
        by_number = setting.custom and any(each.how is How.NUMBER for each in found.terms)
        wider = self.ranks.any(setting.world_size > 1 and by_number)
        if not (wider or self.ranks.any(bool(candidates))):
            return with_kept_size(found, whole, self.window) if setting.custom or setting.func else found
        more = self._with_more_ranks() if wider else None
        more = more or self._run(whole.batch, whole.number, partial(self.loss.more_steps, 1))
        found = own_division(found, candidates, whole, more, setting)
        return with_kept_size(found, whole, self.window) if setting.custom or setting.func else found

    def _with_more_ranks(self) -> Reading | None:
        """A forward with more steps and ranks; None: a loss that gathers metrics cannot run so."""
        try:
            return self._run(self.whole.batch, self.whole.number, partial(self.loss.more_steps, RANKS))
        except Exception:
            logger.debug("a loss was not run with other ranks", exc_info=True)
            self._restore()
            return None

    def _with_number_seen(self, found: LossContract) -> LossContract:
        """Test whether a loss that cannot be read depends on the number: then it keeps stock's scale."""
        is_plain = found.reduction is Reduction.PLAIN or any(each.how is How.PLAIN for each in found.terms)
        unread = is_plain and not found.by_number
        if self.ranks.any(unread and self.whole.number is not None):
            self._restore()
            # A maximum may take the term with the number only where that is as small as in training.
            number = int(self.setting.upstream_number or NUMBERS[1])
            self.moves = self._run(self.whole.batch, number).loss != self.whole.loss
        if not (unread and self.moves and self.setting.has_stock) or self.divides:
            return found
        doubt = "it depends on num_items_in_batch in a way that cannot be read"
        return replace(found, keeps_scale=True, doubt=doubt, reason=doubt)

    def _run(self, batch: Mapping[str, Any], number: float | None, within: Any = nullcontext, seed: int = 0) -> Reading:
        listed = any(next(listed_targets(each), None) is not None for each in self.window)
        run = partial(read_batch, self.loss, batch, number, within, listed=listed, seed=seed)
        try:
            return run(keep=False)
        except NotSavedError:
            # A penalty on the gradient, adversarial noise.
            self._restore()
            return run(keep=True)

    def _restore(self) -> None:
        self.state.restore()
        self.loss.model.train()


def _with_batch_norm(found: LossContract, norm: str) -> LossContract:
    """The contract of a model with BatchNorm in training mode."""
    reason = f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch"
    terms = tuple(replace(each, how=How.PLAIN) if each.how is How.MEAN else each for each in found.terms)
    reduction = found.reduction if found.by_number and found.custom else Reduction.PLAIN
    items = found.items if found.by_number else None
    return replace(found, reduction=reduction, items=items, terms=terms, doubt=reason, reason=reason)


def shift_of(call: Forward, window: Sequence[Mapping[str, Any]], model: nn.Module, *, sharded: bool) -> bool | None:
    """Whether a model's own loss, by ``call``, drops position 0 of its labels; None: unknown."""
    batch = max(window, key=lambda each: float(next(ways_of_counting(each)).count(each)))
    with preserved_state(model, sharded=sharded), torch.enable_grad(), saved_tensors_hooks(kept_small, unpacked):
        shown = [is_shifted(term, batch) for term in read(call(dict(batch), None))]
    return next((shift for shift in shown if shift is not None), None)


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()
