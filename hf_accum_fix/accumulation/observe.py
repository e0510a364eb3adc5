"""Observe a loss in a window: look at joined and narrowed batches, and learn from them how it is reduced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.agreement import SyncedRanks
from hf_accum_fix.accumulation.choose import Choice
from hf_accum_fix.accumulation.compare import Comparison, Setting
from hf_accum_fix.accumulation.contract import How, LossContract, Reduction
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import ZeroWeightBatch
from hf_accum_fix.accumulation.join import Split, splits
from hf_accum_fix.accumulation.learn import learn, number_rule, upstream_first
from hf_accum_fix.accumulation.look import (
    Look,
    LossRun,
    look,
    out_of_memory,
)
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.own_scale import RANKS, own_scale, scale_candidates, terms_of, with_kept_size
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.python_state import PythonState
from hf_accum_fix.accumulation.rules import listed_targets, targets_padding, ways_of_counting

logger = logging.getLogger("hf_accum_fix")

#: num_items_in_batch in the three looks of a split: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: The number in one look, to see whether the loss divides by it: no count, and small, so that 16 bits keep what is
#: divided by it.
SHOWN = 37.5


def observe(
    loss: LossRun, window: Sequence[Mapping[str, Any]], setting: Setting, ranks: SyncedRanks | None = None
) -> LossContract:
    """Observe how a loss is reduced, on samples of one window, and restore all state (see `preserved_state`).

    ``window``: the micro-batches; ``setting``: of the training; ``ranks``: all that observe; None: this one alone.
    """
    # Repeated samples serve as well as any.
    batches = [dict(batch) if isinstance(batch, ZeroWeightBatch) else batch for batch in window]
    # By their own targets the ranks would choose different ones.
    batches = batches[:1] if setting.is_cut else batches
    sharded = holds_shards(loss.model)
    with preserved_state(loss.model, *loss.others, leave=loss.leave, sharded=sharded) as state:
        return _Observation(loss, batches, setting, state, ranks or SyncedRanks(), sharded).contract()


@dataclass
class _Observation:
    """The looks at a loss; all ranks take equally many, since a custom loss may run collectives.

    Attributes:
        sharded: an engine shards the parameters, so that every forward is a collective.
        whole: the look at the batch that the contract was learnt from.
        writes: the loss depends on state that its forward writes; None: not tested.
        by_number: it divides a term by the number, if it gets one; None: not tested.
        divides: without the number it is a mean, and with it the sum over the number, though the graph hides that.
        moves: it depends on the number in any way.
        draws: random numbers change it; None: not tested.
        before: the looks so far, of the splits.
    """

    loss: LossRun
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    state: PythonState
    ranks: SyncedRanks
    sharded: bool
    whole: Look = field(init=False)
    writes: bool | None = None
    by_number: bool | None = None
    divides: bool = False
    moves: bool = False
    draws: bool | None = None
    before: list[Look] = field(default_factory=list)

    def contract(self) -> LossContract:
        """How the loss is reduced."""
        model = self.loss.model
        norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
        # BatchNorm writes its statistics; shards are not copied.
        self.writes = False if self.sharded or norm is not None else None
        found = self._learnt()
        if self.ranks.any(self._needs_number(found)):
            self.loss.hand_on()
            self.setting = replace(self.setting, hands_number=True)
            found = self._learnt()
        hows = {each.how for each in found.terms}
        if self.setting.custom and How.PLAIN in hows and hows & {How.NUMBER, How.SUM}:
            # A part that is averaged does not go with one that is summed over the global batch.
            found = replace(found, keeps_scale=True)
        found = self._with_rule_of_number(found)
        found = self._with_own_scale(found)
        found = self._with_number_seen(found)
        found = self._as_stock_divides(found)
        return self._with_doubts(found, norm)

    # ------------------------------------------------------------------------------------------------- looks

    def _learnt(self) -> LossContract:
        """The contract by the splits of the samples."""
        choice = Choice(self.sharded)
        self.before.clear()
        # Where the ranks meet in every forward, a part that a model cannot run would end the training.
        every = splits(self.window, has_decoder=self.setting.decoder_pad is not None)
        left = (
            split for split in every if not ((self.sharded and split.group) or (self.setting.is_cut and split.apart))
        )
        split, is_open = next(left), True
        while self.ranks.any(is_open):
            looks = list[Look]()
            try:
                looks = self._three(split)
            except Exception as error:
                # Running out of memory on an unchanged micro-batch would happen in training, too.
                if self.sharded or (out_of_memory(error) and any(split.whole is batch for batch in self.window)):
                    raise
                choice.note_failure(split, error)
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
            self._note_number(split, looks)
            self._note_writes(split, looks)
            self._note_draws(split, looks)
            self._restore()
            if looks and is_open:
                compared = Comparison(looks, split, self.window, self.setting, bool(self.by_number))
                choice.take(split, learn(compared), looks[0])
            following = next((each for each in left if choice.needs(each)), None) if is_open else None
            split, is_open = following or split, following is not None
        found, self.whole = choice.made()
        return found

    def _three(self, split: Split) -> list[Look]:
        """The looks at a batch and its two parts."""
        looks = list[Look]()
        for number, batch in zip(NUMBERS, split[:3], strict=True):
            given = number if self.setting.handed == "all" else None
            # A batch or a part of the splits before; several ranks take equally many looks.
            known = (each for each in self.before if each.batch is batch and each.number == given)
            seen = next(known, None) if self.ranks.alone else None
            if seen is None:
                self._restore()
                seen = self._look(batch, given)
                self.before.append(seen)
            looks.append(seen)
            blank = not looks[0].shows_terms or (len(looks) == 2 and not any(each.loss for each in looks))
            if blank and self.ranks.alone:
                # Its parts would show nothing either.
                return [looks[0]] * 3
        return looks

    def _look(
        self,
        batch: Mapping[str, Any],
        number: float | None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seed: int = 0,
    ) -> Look:
        listed = any(next(listed_targets(each), None) is not None for each in self.window)
        run = partial(look, self.loss, batch, number, within, listed=listed, seed=seed)
        try:
            return run(keep=False)
        except NotSavedError:
            # A penalty on the gradient, adversarial noise.
            self._restore()
            return run(keep=True)

    def _restore(self) -> None:
        self.state.restore()
        self.loss.model.train()

    # --------------------------------------------------------------------------------------- what one more shows

    def _note_number(self, split: Split, looks: Sequence[Look]) -> None:
        """Test whether a model that gets the number divides by it."""
        plain = next((each for each in looks[::-1] if each.shows_terms and each.loss), None)
        if not self.ranks.any(self.setting.handed == "once" and self.by_number is None and plain is not None):
            return
        self._restore()
        shown = self._look(split.one if plain is None else plain.batch, SHOWN)
        if plain is not None and self.by_number is None:
            self.by_number, self.moves = _shows_number(shown), shown.loss != plain.loss
            items = SHOWN * shown.loss / plain.loss
            self.divides = not self.by_number and items >= 1 and abs(items - round(items)) <= 1e-3

    def _note_writes(self, split: Split, looks: Sequence[Look]) -> None:
        """Test whether the loss depends on state that its forward writes: a queue, a centre, a moving average."""
        if self.ranks.any(self.writes is None and bool(looks) and self.state.wrote()):
            # Another batch than the one that wrote: a loss over its own first value is one.
            again = self._look(split.one, looks[1].number if looks else None)
            self.writes = bool(self.writes or (looks and again.numbers != looks[1].numbers))

    def _note_draws(self, split: Split, looks: list[Look]) -> None:
        """Test whether random numbers change the loss, if it draws any: it may only print now and then."""
        if self.ranks.any(self.draws is None and bool(looks) and looks[0].drew):
            self._restore()
            again = self._look(split.whole, looks[0].number if looks else None, seed=1)
            self.draws = bool(self.draws or (looks and again.numbers != looks[0].numbers))
        if looks:
            looks[0] = replace(looks[0], drew=bool(self.draws and looks[0].drew))

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
        hidden = any(spec.how is How.NUMBER and not seen.targets for spec, seen in terms)
        if not self.ranks.any(hidden and not self.setting.func):
            return found
        divisors, batch = set[float](), self.whole.batch
        try:
            for term in self._look(batch, None).terms:
                divisors |= {value for at, value in enumerate(term.factors) if term.divides(at)}
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

    def _with_own_scale(self, found: LossContract) -> LossContract:
        """The contract with the divisions by steps and ranks that the arguments cause."""
        setting, whole = self.setting, self.whole
        by_user = setting.custom or setting.func
        at = scale_candidates(found, whole, setting) if by_user else []
        by_number = setting.custom and any(each.how is How.NUMBER for each in found.terms)
        wider = self.ranks.any(setting.world_size > 1 and by_number)
        if wider or self.ranks.any(bool(at)):
            more = self._with_more_ranks() if wider else None
            more = more or self._look(whole.batch, whole.number, partial(self.loss.more_steps, 1))
            found = own_scale(found, at, whole, more, setting)
        return with_kept_size(found, whole, self.window) if by_user else found

    def _with_more_ranks(self) -> Look | None:
        """A look with more steps and ranks; None: a loss that gathers metrics cannot run so."""
        try:
            return self._look(self.whole.batch, self.whole.number, partial(self.loss.more_steps, RANKS))
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
            self.moves = self._look(self.whole.batch, number).loss != self.whole.loss
        if not (unread and self.moves and self.setting.has_stock) or self.divides:
            return found
        doubt = "it depends on num_items_in_batch in a way that cannot be read"
        return replace(found, keeps_scale=True, doubt=doubt, reason=doubt)

    # -------------------------------------------------------------------------------------------- what is said

    def _as_stock_divides(self, found: LossContract) -> LossContract:
        """The contract of a model that divides by the number in a way that its looks do not show."""
        setting, whole = self.setting, self.whole
        if self.divides and found.reduction is Reduction.MEAN:
            found = replace(found, reduction=Reduction.NUMBER)
        elif self.divides and found.reduction is Reduction.PLAIN and setting.has_stock:
            # Its kernel divides by the number, so it gets one, as from stock; loops pass none.
            rule = number_rule(whole.batch, self.window, setting)
            found = replace(found, reduction=Reduction.NUMBER, items=rule, terms=(), hands_number=True)
        drops = any(
            each.how is How.MEAN and not (each.rules or seen.named or seen.by_classes)
            for each, seen in zip(found.terms, terms_of(found, whole), strict=True)
        )
        if drops and setting.has_stock and not setting.custom and found.by_number and setting.upstream_number:
            # By the number, as from stock, it trains as it does there.
            doubt = "its model drops targets that num_items_in_batch counts; the stock Trainer's scale is kept"
            found = replace(found, keeps_scale=True, doubt=found.doubt or doubt)
        return found

    def _with_doubts(self, found: LossContract, norm: str | None) -> LossContract:
        """The contract, with what makes any loss depend on the split; ``norm``: a BatchNorm in training mode."""
        doubt = found.doubt
        if self.writes:
            doubt = doubt or "its forward changes state that the loss depends on, so the order of micro-batches matters"
        items, pad = found.items, self.setting.decoder_pad
        if items is not None and any(targets_padding(items, batch, pad) for batch in self.window):
            where = "attention_mask is 0" if pad is None else f"they are padded by {pad}"
            padding = f"padding is among its targets (labels are not -100 where {where})"
            doubt = f"{padding}, so the loss depends on the split"
        found = replace(found, doubt=doubt)
        if norm is not None:
            found = _with_batch_norm(found, norm)
        if found.items is None and found.hands_number:
            # Its number counts as upstream's does.
            found = replace(found, items=number_rule(self.whole.batch, self.window, self.setting))
        return found


def _shows_number(seen: Look) -> bool:
    """Whether a term is divided by the number that was passed; a model in 16 bits rounds it."""
    forms = {float(torch.tensor(seen.number, dtype=each)) for each in (torch.float64, torch.bfloat16, torch.float16)}
    return any(value in forms for each in seen.terms if each.readable and not each.router for value in each.factors)


def _with_batch_norm(found: LossContract, norm: str) -> LossContract:
    """The contract of a model with BatchNorm in training mode."""
    reason = f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch"
    terms = tuple(replace(each, how=How.PLAIN) if each.how is How.MEAN else each for each in found.terms)
    reduction = found.reduction if found.by_number and found.custom else Reduction.PLAIN
    items = found.items if found.by_number else None
    return replace(found, reduction=reduction, items=items, terms=terms, doubt=reason, reason=reason)
