"""Observe a loss in a window: look at joined and narrowed batches, and learn from them how it is reduced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.agreement import SyncedRanks
from hf_accum_fix.accumulation.compare import Comparison, Setting
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, How, LossContract
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import ZeroWeightBatch
from hf_accum_fix.accumulation.join import Split, splits
from hf_accum_fix.accumulation.learn import learn, number_rule
from hf_accum_fix.accumulation.look import Look, LossRun, look, out_of_memory
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.own_scale import own_scale, terms_of, with_kept_size, with_own_steps
from hf_accum_fix.accumulation.preserve import PythonState, preserved_state
from hf_accum_fix.accumulation.rules import listed_targets, targets_padding, ways_of_counting

logger = logging.getLogger("hf_accum_fix")

#: num_items_in_batch in the three looks of a split: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: Why a loss that is exact in one split is not believed.
_OF_ONE = "its terms add up in one micro-batch, and not with more samples or less padding: it depends on the split"
#: The number in one look, to see whether the loss divides by it: no count, and small enough for 16 bits.
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
class Choice:
    """What several splits of the samples show.

    Attributes:
        sharded: every forward is a collective, so one split is enough.
        found: the contract so far; None: no split was run.
        whole: the forward that it was concluded from.
        failure: the first error of a split.
    """

    sharded: bool
    found: LossContract | None = None
    whole: Look | None = None
    failure: Exception | None = None
    _blocks: int = 0
    _adds_up: bool = False
    #: By the rows alone: whether it added up each time.
    _narrowed: dict[int, bool] = field(default_factory=dict)
    _seen: list[LossContract] = field(default_factory=list)

    def note_failure(self, split: Split, error: Exception) -> None:
        """Note the error of a split, but of a narrowed one: a model may need batches as wide as its collator's."""
        # Without the frames of the forward, which hold its tensors: the next one may need their memory.
        self.failure = self.failure or (None if split.group else error.with_traceback(None))

    def needs(self, split: Split) -> bool:
        """Whether a split may show something new."""
        if self.found is None or self.sharded:
            return self.found is None
        if not self._adds_up:
            # Samples of one value have shown nothing; other rows may.
            blank = not self.found.conclusive and self.found.reason != NO_TARGET_SEEN and split.shows_coupling
            return split.blocks > 0 or blank
        # Rows that belong together cannot stand alone: more of them, next to one another.
        smaller = [held for rows, held in self._narrowed.items() if rows < split.group]
        return split.group > 0 and self._blocks <= 1 and not any(smaller) and self._narrowed.get(split.group, True)

    def take(self, split: Split, latest: LossContract, whole: Look) -> None:
        """Take the contract of one more split; ``whole`` as in `Choice`."""
        self._seen.append(latest)
        adds_up = latest.conclusive and latest.adds_up
        if split.group and self._adds_up:
            held = latest.adds_up or not latest.conclusive
            self._narrowed[split.group] = self._narrowed.get(split.group, True) and held
        elif self.found is None or (adds_up and (split.blocks or self.found.cause is not Cause.PADDING)):
            self.found, self.whole, self._blocks, self._adds_up = latest, whole, split.blocks, adds_up

    def made(self) -> tuple[LossContract, Look]:
        """The contract, and the forward it was concluded from; raises the error of the splits if none was run."""
        if self.found is None or self.whole is None:
            assert self.failure is not None
            raise self.failure
        found = self.found
        for each in self._seen:
            found = found.fitting_as_well(each)
        if found.exact and self._narrowed and not any(self._narrowed.values()):
            found = replace(found, doubt=_OF_ONE, cause=Cause.PADDING)
        return found, self.whole


@dataclass
class _Observation:
    """The looks at a loss; all ranks take equally many, since a custom loss may run collectives.

    Attributes:
        sharded: an engine shards the parameters, so that every forward is a collective.
        whole: the look at the batch that the contract was learnt from.
        writes: the loss depends on state that its forward writes; None: not tested.
        by_number: it divides a term by the number, if it gets one; None: not tested.
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
        found = self._with_rule_of_number(found)
        found = with_kept_size(found, self.whole, self.window) if self.setting.custom or self.setting.func else found
        found = with_own_steps(found, self.whole, self.setting, adds=self.loss.kept_back() > 0)
        scale = own_scale(found, self.whole, self.setting)
        found = self._with_doubts(found, norm, scale)
        depends = self._depends_on_number(found) or found.by_number or How.NUMBER in {each.how for each in found.terms}
        # Where nothing has shown yet how it is scaled, a trainer that names the steps may do that by itself.
        takes_number = depends or scale is not None if found.conclusive else bool(self.setting.own_steps)
        found = found.of_two_fates(takes_number=takes_number and self.setting.has_stock)
        if found.items is None and found.hands_number:
            # Its number counts as upstream's does.
            found = replace(found, items=number_rule(self.whole.batch, self.window, self.setting))
        return found

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

    def _look(self, batch: Mapping[str, Any], number: float | None, seed: int = 0) -> Look:
        listed = any(next(listed_targets(each), None) is not None for each in self.window)
        run = partial(look, self.loss, batch, number, listed=listed, seed=seed)
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

        Its own mean is no substitute if it is called for each row, returns a sum, or is inside what cannot be read.
        """
        kept_back = self.loss.kept_back()
        return kept_back > 1 or (kept_back > 0 and any(each.how in (How.SUM, How.PLAIN) for each in found.terms))

    def _with_rule_of_number(self, found: LossContract) -> LossContract:
        """The contract with the rule by which a custom loss over the number would divide, if it got none."""
        pairs = terms_of(found, self.whole) if found.custom and not self.setting.func else []
        hidden, batch = any(spec.how is How.NUMBER and not seen.targets for spec, seen in pairs), self.whole.batch
        if not self.ranks.any(hidden):
            return found
        self._restore()
        divisors = set[float]()
        try:
            for term in self._look(batch, None).terms:
                divisors |= {value for at, value in enumerate(term.factors) if term.divides(at)}
        except Exception:
            logger.debug("a loss needs its number", exc_info=True)
        fitting = [rule for rule in ways_of_counting(batch) if float(rule.count(batch)) in divisors]
        upstreams = [number_rule(batch, self.window, self.setting)]
        fitting = [*(each for each in upstreams if each in fitting), *fitting]
        return found.with_rules_of_number([*dict.fromkeys(fitting)]) if hidden and fitting else found

    def _depends_on_number(self, found: LossContract) -> bool:
        """Whether a loss that is not exact depends on the number, which no term shows."""
        if self.ranks.any(not found.exact and self.whole.number is not None):
            self._restore()
            # A maximum may take the term with the number only where that is as small as in training.
            number = int(self.setting.upstream_number or NUMBERS[1])
            self.moves = self._look(self.whole.batch, number).loss != self.whole.loss
        return self.moves

    # -------------------------------------------------------------------------------------------- what is said

    def _with_doubts(self, found: LossContract, norm: str | None, scale: float | None) -> LossContract:
        """The contract, with what makes any loss depend on the split.

        ``norm``: a BatchNorm in training mode; ``scale``: the trainer's own.
        """
        setting, doubts = self.setting, list[str]()
        if self.writes:
            doubts.append("its forward changes state that the loss depends on, so the order of micro-batches matters")
        if found.items is not None and any(
            targets_padding(found.items, batch, setting.decoder_pad) for batch in self.window
        ):
            where = (
                "attention_mask is 0" if setting.decoder_pad is None else f"they are padded by {setting.decoder_pad}"
            )
            padding = f"padding is among its targets (labels are not -100 where {where})"
            doubts.append(f"{padding}, so the loss depends on the split")
        if norm is not None:
            doubts.append(f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch")
        if scale is not None:
            doubts.append(
                f"the constant {scale:g} multiplies or divides it, and the code of its trainer names the accumulation "
                "steps or the ranks"
            )
        if found.by_number and not setting.custom and setting.has_stock and setting.upstream_number:
            terms = terms_of(found, self.whole)
            if any(each.how is How.MEAN and not (each.rules or t.named or t.by_classes) for each, t in terms):
                doubts.append("its model drops targets that num_items_in_batch counts")
        cause = None if found.cause is Cause.LOG else found.cause
        return replace(found, doubt=doubts[-1], cause=cause) if doubts else found


def _shows_number(seen: Look) -> bool:
    """Whether a term is divided by the number that was passed; a model in 16 bits rounds it."""
    forms = {float(torch.tensor(seen.number, dtype=each)) for each in (torch.float64, torch.bfloat16, torch.float16)}
    return any(value in forms for each in seen.terms if each.readable and not each.router for value in each.factors)
