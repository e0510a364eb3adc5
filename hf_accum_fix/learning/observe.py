"""Observe a loss in a window: look at joined and narrowed batches, and learn from them how it is reduced.

`_Plan` says what to look at next, as if there were one rank; `observe` runs that, alike on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.counting.items import ZeroWeightBatch, sample_count
from hf_accum_fix.counting.rules import is_near, listed_targets, targets_padding, ways_of_counting
from hf_accum_fix.learning.agreement import SyncedRanks
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, Cause, How, LossContract, TermSpec
from hf_accum_fix.learning.join import Split, splits
from hf_accum_fix.learning.learn import learn, number_rule
from hf_accum_fix.learning.look import Comparison, Look, LossRun, Setting, look, out_of_memory
from hf_accum_fix.reading.loss_graph import Term
from hf_accum_fix.reading.nodes import NotSavedError
from hf_accum_fix.trace.preserve import PythonState, preserved_state

logger = logging.getLogger("hf_accum_fix")

#: num_items_in_batch in the three looks of a split: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: Why a loss that is exact in one split is not believed.
_OF_ONE = "its terms add up in one micro-batch, and not with more samples or less padding: it depends on the split"
#: The number in one look, to see whether the loss divides by it: no count, and small enough for 16 bits.
SHOWN = 37.5


class Ask(NamedTuple):
    """A look that is wanted; ``anew``: all state is restored before."""

    batch: Mapping[str, Any]
    number: float | None
    seed: int = 0
    anew: bool = True


Found = TypeVar("Found")
#: Asks for looks, gets each or the error of its forward, and returns what they show.
Asks: TypeAlias = Generator[Ask, "Look | Exception", Found]


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
    listed = any(next(listed_targets(each), None) is not None for each in batches)
    found: LossContract | None = None
    ranks = ranks or SyncedRanks()
    with preserved_state(loss.model, *loss.others, leave=loss.leave, sharded=loss.sharded) as state:
        plan = _Plan(loss, batches, setting, state).contract()
        ask = next(plan)
        # A custom loss may run collectives, so a rank that has found its contract runs its last look again.
        while ranks.any(found is None):
            seen = _run(loss, ask, state, listed=listed)
            try:
                ask = plan.send(seen) if found is None else ask
            except StopIteration as done:
                found = done.value
    assert found is not None
    return found


def _run(loss: LossRun, ask: Ask, state: PythonState, *, listed: bool) -> Look | Exception:
    """One look, or the error of its forward."""
    # A penalty on the gradient, or adversarial noise, needs the tensors that are saved for a backward.
    for keep in (False, True):
        if ask.anew or keep:
            state.restore()
            loss.model.train()
        try:
            return look(loss, ask.batch, ask.number, listed=listed, keep=keep, seed=ask.seed)
        except NotSavedError as error:
            failure: Exception = error
        except Exception as error:
            # Without the frames of the forward, which hold its tensors: the next one may need their memory.
            return error.with_traceback(None)
    return failure


@dataclass
class _Splits:
    """What several splits of the samples show."""

    found: LossContract | None = None  # the contract so far; None: no split was run
    whole: Look | None = None  # the look at the batch that it was learnt from
    failure: Exception | None = None  # the first error of a split
    blocks: int = 0  # of the split that it was learnt from, in which it ``added_up``
    added_up: bool = False
    narrowed: dict[int, bool] = field(default_factory=dict)  # by the rows that stood alone: it added up each time
    shown: set[int] = field(default_factory=set)  # those with which it was seen to add up
    seen: list[LossContract] = field(default_factory=list)  # the contract of each split

    def needs(self, split: Split) -> bool:
        """Whether a split may show something new."""
        if self.found is None:
            return True
        if not self.added_up:
            # Samples of one value have shown nothing; other rows may.
            blank = not self.found.conclusive and self.found.reason != NO_TARGET_SEEN and split.shows_coupling
            return split.blocks > 0 or blank
        # Rows that belong together cannot stand alone: more of them, next to one another.
        smaller = any(held for rows, held in self.narrowed.items() if rows < split.group)
        return split.group > 0 and self.blocks <= 1 and not smaller and self.narrowed.get(split.group, True)

    def take(self, split: Split, latest: LossContract, whole: Look) -> None:
        """Take the contract of one more split; ``whole`` as in the attributes."""
        self.seen.append(latest)
        adds_up = latest.conclusive and latest.adds_up
        if split.group and self.added_up:
            held = (latest.adds_up and not (latest.doubt and latest.cause is None)) or not latest.conclusive
            self.narrowed[split.group] = self.narrowed.get(split.group, True) and held
            self.shown |= {split.group} if adds_up else set()
        elif self.found is None or (adds_up and (split.blocks or self.found.cause is not Cause.PADDING)):
            self.found, self.whole, self.blocks, self.added_up = latest, whole, split.blocks, adds_up

    def made(self) -> tuple[LossContract, Look]:
        """The contract, and the look it was learnt from; raises the error of the splits if none was run."""
        if self.found is None or self.whole is None:
            assert self.failure is not None
            raise self.failure
        found = self.found
        for each in self.seen:
            found = found.fitting_as_well(each)
        if found.exact and self.narrowed and not any(self.narrowed.values()):
            found = replace(found, doubt=_OF_ONE, cause=Cause.PADDING)
        group = min((rows for rows, held in self.narrowed.items() if held and rows in self.shown), default=0)
        cut_by = (self.blocks, group if self.blocks == 1 else 1) if self.added_up and self.blocks else (0, 0)
        return replace(found, cut_by=cut_by), self.whole


@dataclass
class _Plan:
    """What to look at, and what that shows."""

    loss: LossRun  # of shards every forward is a collective, and one split is enough
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    state: PythonState
    whole: Look = field(init=False)  # the look at the batch that the contract was learnt from
    writes: bool | None = None  # the loss depends on state that its forward writes; None: not tested
    by_number: bool | None = None  # it divides a term by the number, if it gets one; None: not tested
    moves: bool = False  # it depends on the number in any way
    draws: bool | None = None  # random numbers change it; None: not tested

    def contract(self) -> Asks[LossContract]:
        """How the loss is reduced."""
        modules = self.loss.model.named_modules()
        norm = next((name for name, each in modules if isinstance(each, _BatchNorm) and each.training), None)
        # BatchNorm writes its statistics; shards are not copied.
        self.writes = False if self.loss.sharded or norm is not None else None
        found = yield from self._learnt()
        if self._needs_number(found):
            self.loss.hand_on()
            self.setting = replace(self.setting, hands_number=True)
            found = yield from self._learnt()
        found = yield from self._with_rule_of_number(found)
        found, scale = _with_own_constants(found, self.whole, self.window, self.setting, self.loss.kept_back() > 0)
        found = self._with_doubts(found, norm, scale)
        if not found.exact and self.whole.number is not None:
            # A maximum may take the term with the number only where that is as small as in training.
            number = int(self.setting.upstream_number or NUMBERS[1])
            self.moves = (yield from self._look(self.whole.batch, number)).loss != self.whole.loss
        depends = self.moves or found.by_number or How.NUMBER in {each.how for each in found.terms}
        # Where nothing has shown yet how it is scaled, a trainer that names the steps may do that by itself.
        takes_number = depends or scale is not None if found.conclusive else bool(self.setting.own_steps)
        # Averaging a sum would be further off than a Trainer that adds it up.
        takes_number |= found.grows and not found.coupled
        found = found.of_two_fates(takes_number=takes_number and self.setting.has_stock)
        if found.items is None and found.hands_number:
            # Its number counts as upstream's does.
            found = replace(found, items=number_rule(self.whole.batch, self.window, self.setting))
        return found

    def _look(self, batch: Mapping[str, Any], number: float | None, seed: int = 0, *, anew: bool = True) -> Asks[Look]:
        seen = yield Ask(batch, number, seed, anew)
        if isinstance(seen, Exception):
            raise seen
        return seen

    def _learnt(self) -> Asks[LossContract]:
        """The contract by the splits of the samples."""
        choice, before = _Splits(), list[Look]()
        for split in splits(self.window, has_decoder=self.setting.decoder_pad is not None):
            # Where the ranks meet in every forward, a part that a model cannot run would end the training.
            one_is_enough = self.loss.sharded and (split.group or choice.found)
            if one_is_enough or (self.setting.is_cut and split.apart) or not choice.needs(split):
                continue
            try:
                looks = yield from self._three(split, before)
            except Exception as error:
                # Running out of memory on an unchanged micro-batch would happen in training, too.
                unchanged = any(split.whole is batch for batch in self.window)
                if self.loss.sharded or (out_of_memory(error) and (self.setting.halves or unchanged)):
                    raise
                # A narrowed one is no failure: a model may need batches as wide as its collator's.
                choice.failure = choice.failure or (None if split.group else error)
                logger.debug("a loss was not observed on a part of its batch", exc_info=error)
                continue
            yield from self._note(split, looks)
            compared = Comparison(looks, split, self.window, self.setting, bool(self.by_number))
            choice.take(split, learn(compared), looks[0])
        found, self.whole = choice.made()
        return found

    def _three(self, split: Split, before: list[Look]) -> Asks[list[Look]]:
        """The looks at a batch and its two parts; ``before``: those of the splits before."""
        looks = list[Look]()
        for number, batch in zip(NUMBERS, split[:3], strict=True):
            given = number if self.setting.handed == "all" else None
            seen = next((each for each in before if each.batch is batch and each.number == given), None)
            if seen is None:
                seen = yield from self._look(batch, given)
                before.append(seen)
            looks.append(seen)
            if not looks[0].shows_terms or (len(looks) == 2 and not any(each.loss for each in looks)):
                # Its parts would show nothing either.
                return [looks[0]] * 3
        return looks

    def _note(self, split: Split, looks: list[Look]) -> Asks[None]:
        """Test once what looks at one batch more than once show."""
        if self.writes is None and self.state.wrote():
            # A queue, a centre, a moving average. Another batch than the one that wrote: a loss over its own first
            # value is one.
            again = yield from self._look(split.one, looks[1].number, anew=False)
            self.writes = again.numbers != looks[1].numbers
        plain = next((each for each in looks[::-1] if each.shows_terms and each.loss), None)
        if self.setting.handed == "once" and self.by_number is None and plain is not None:
            # A model that gets the number may divide by it.
            shown = yield from self._look(plain.batch, SHOWN)
            self.by_number, self.moves = _shows_number(shown), shown.loss != plain.loss
        if self.draws is None and looks[0].drew:
            # It may only print now and then.
            again = yield from self._look(split.whole, looks[0].number, seed=1)
            self.draws = again.numbers != looks[0].numbers
        looks[0] = replace(looks[0], drew=bool(self.draws and looks[0].drew))

    def _needs_number(self, found: LossContract) -> bool:
        """Whether the base's loss has to get the number that a custom loss passes on.

        Its own mean is no substitute if it is called for each row, returns a sum, or is inside what cannot be read.
        """
        kept_back = self.loss.kept_back()
        return kept_back > 1 or (kept_back > 0 and any(each.how in (How.SUM, How.PLAIN) for each in found.terms))

    def _with_rule_of_number(self, found: LossContract) -> Asks[LossContract]:
        """The contract with the rule by which a custom loss over the number would divide, if it got none."""
        pairs, batch = terms_of(found, self.whole), self.whole.batch
        hidden = any(spec.how is How.NUMBER and not seen.targets for spec, seen in pairs)
        if not hidden or not found.custom or self.setting.func:
            return found
        try:
            terms = (yield from self._look(batch, None)).terms
        except Exception:
            logger.debug("a loss needs its number", exc_info=True)
            return found
        divisors = {float(each.value) for term in terms for each in term.factors if each.divides}
        fitting = [rule for rule in ways_of_counting(batch) if float(rule.count(batch)) in divisors]
        upstreams = [number_rule(batch, self.window, self.setting)]
        fitting = [*(each for each in upstreams if each in fitting), *fitting]
        return found.with_rules_of_number([*dict.fromkeys(fitting)]) if fitting else found

    def _with_doubts(self, found: LossContract, norm: str | None, scale: float | None) -> LossContract:
        """The contract, with what makes any loss depend on the split.

        ``norm``: a BatchNorm in training mode; ``scale``: the trainer's own.
        """
        setting, doubt, pad = self.setting, "", self.setting.decoder_pad
        if self.writes:
            doubt = "its forward changes state that the loss depends on, so the order of micro-batches matters"
        if found.items is not None and any(targets_padding(found.items, batch, pad) for batch in self.window):
            where = "attention_mask is 0" if pad is None else f"they are padded by {pad}"
            where = f"labels are not -100 where {where}"
            doubt = f"padding is among its targets ({where}), so the loss depends on the split"
        if norm is not None:
            doubt = f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch"
        if scale is not None:
            doubt = (
                f"the constant {scale:g} multiplies or divides it, and the code of its trainer names the accumulation "
                "steps or the ranks"
            )
        if found.by_number and not setting.custom and setting.has_stock and setting.upstream_number:
            terms = terms_of(found, self.whole)
            if any(each.how is How.MEAN and not (each.rules or t.named or t.by_classes) for each, t in terms):
                doubt = "its model drops targets that num_items_in_batch counts"
        return replace(found, doubt=doubt, cause=None if found.cause is Cause.LOG else found.cause) if doubt else found


def _shows_number(seen: Look) -> bool:
    """Whether a term is divided by the number that was passed; a model in 16 bits rounds it."""
    forms = {float(torch.tensor(seen.number, dtype=each)) for each in (torch.float64, torch.bfloat16, torch.float16)}
    return any(value in forms for each in seen.terms if each.readable and not each.router for value in each.numbers)


def terms_of(found: LossContract, seen: Look) -> list[tuple[TermSpec, Term]]:
    """The terms of a contract, each with that of a forward that has it."""
    alike = ((spec, [each for each in seen.terms if each.shape == spec.shape]) for spec in found.terms)
    return [(spec, its[spec.place or 0]) for spec, its in alike if its[spec.place or 0 :]]


def _with_own_constants(
    found: LossContract, whole: Look, window: Sequence[Mapping[str, Any]], setting: Setting, adds: bool
) -> tuple[LossContract, float | None]:
    """The contract of a custom loss by its constants, and one that its trainer may scale it by; None: there is none.

    G, W or their product, or 1 by it, may be a trainer's own scale where its code names them. Next to a term over
    num_items_in_batch, what divides by the steps is a router's loss that TRL averages by itself; ``adds``: the base's
    loss is such a term. A sum over a constant that equals a micro-batch's samples is a mean over a kept batch size.
    """
    of_number = adds or How.NUMBER in {each.how for each in found.terms}
    sizes = {float(sample_count(batch)) for batch in window} if setting.custom or setting.func else set[float]()
    terms, constants, doubt = list[TermSpec](), list[tuple[int, int, float]](), found.doubt
    for spec, term in terms_of(found, whole):
        places = [at for at in range(len(term.factors)) if at not in spec.counts and not term.is_own_divisor(at)]
        constants += [(len(terms), at, abs(term.product([at]))) for at in places]
        own = [at for at in places if any(is_near(term.product([at]), 1 / steps) for steps in setting.own_steps)]
        terms.append(replace(spec, own=tuple(own[:1])) if of_number and spec.how is not How.NUMBER else spec)
        below = (abs(term.numbers[at]) for at in places if spec.how is How.SUM and term.factors[at].divides)
        if (kept := next((n for n in below if any(is_near(n, size) for size in sizes)), None)) is not None:
            words = f"the constant {kept:g} below a sum equals a micro-batch's samples: it is averaged as a batch size"
            doubt = doubt or words
    if len(terms) < len(found.terms) or all(each.own for each in terms):
        # What divides all of its terms is another scale.
        terms = [*found.terms]
    scales = [ratio for spec in found.terms for ratio in spec.rules.values()]
    scales += [value for place, at, value in constants if at not in terms[place].own]
    # The number may be divided by one.
    numbered = (pair for pair in terms_of(found, whole) if pair[0].how is How.NUMBER)
    scales += [term.numbers[at] / whole.number for spec, term in numbered for at in spec.counts if whole.number]
    # A loss that divides by num_items_in_batch multiplies by W, as upstream documents.
    named = [float(each) for each in setting.own if not (found.takes_world_size and each == setting.world_size)]
    numbers = [scale for each in (*named, math.prod(named)) if each != 1.0 for scale in (each, 1 / each)]
    scale = next((each for each in scales if any(is_near(each, number) for number in numbers)), None)
    return replace(found, terms=tuple(terms), doubt=doubt), scale
