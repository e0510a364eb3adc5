"""Observe a loss again where no loss call shows in training what it is weighed by.

One micro-batch may fit a wrong way of counting by chance. So such a loss is observed twice at first, on other samples
and under dropout, and up to four times where it seems to be weighed by none of the labels of its tokens, or samples
show nothing, fit more ways of counting than the first, or weigh so much alike that another way might fit as well;
again in windows 2, 3, 4, 8, 16 and so on; and on one rank wherever the ways of counting that have fitted so far count
the micro-batches of a window differently. What is still open then is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SEVERAL_FIT, SHIFT_UNKNOWN, LossContract, Reduction
from hf_accum_fix.accumulation.evidence.rules import count_by, in_proportion, ways_of_counting
from hf_accum_fix.accumulation.window import Items

#: Observe a loss, after so many times: what this rank sees, None if it has no window; and the trouble that it met.
Observe = Callable[[int], tuple[LossContract | None, Exception | None]]

#: Windows that are observed before an inconclusive contract is taken as it is.
ATTEMPTS = 3

#: How often a loss is observed in one window at most.
LOOKS = 4

#: How many to one it is against chance (see `odds_of`) from which on nothing more is looked at.
ENOUGH = 100


def look(
    observe: Observe, anywhere: Callable[[bool, Exception | None], bool], window: Sequence[Any], *, matters: bool
) -> tuple[LossContract | None, Exception | None]:
    """What this rank sees of the loss of a window, and the trouble that it met; every rank runs as many forwards.

    Args:
        observe: observes the loss; takes how often that was done before.
        anywhere: whether any rank says so, of a rank's own answer and trouble; raises where one is in trouble.
        window: its micro-batches.
        matters: the way of counting changes what is trained; for the only micro-batch of a global batch none does.
    """
    seen, trouble = observe(0)
    confirmed, fitting_too, odds = False, set[Items](), 1 if seen is None else seen.odds
    for before in range(1, LOOKS):
        is_open = _is_far_fetched(seen, window) or (shows_no_call(seen) and not (confirmed and odds >= ENOUGH))
        # Ranks may meet in every forward.
        if not anywhere((is_open and matters) or _shows_nothing(seen), trouble):
            break
        again, trouble = observe(before)
        if seen is not None and again is not None:
            # Samples that fit more ways of counting tell less.
            fitting_too = _fitting(again)
            confirmed = confirmed or (again.conclusive and fitting_too <= _fitting(seen))
            odds *= again.odds
            seen = as_both_show(seen, again)
    by_hand = seen is not None and (seen.made_of is None or bool(seen.rest_terms or seen.extra))
    if seen is not None and by_hand and seen.conclusive and not (confirmed or _tells_alone(seen, fitting_too, window)):
        seen = replace(seen, conclusive=False, reason=SEVERAL_FIT)
    if seen is not None and seen.conclusive and several_fit(seen, window):
        seen = replace(seen, conclusive=False, reason=SEVERAL_FIT)
    return seen and replace(seen, counted=counted_in(window, seen)), trouble


def shows_no_call(found: LossContract | None) -> bool:
    """Whether something in a loss is, or may be under dropout, weighed by its items that no loss call shows."""
    if found is None or found.extra:
        return found is not None
    if any(rule.entry is not None or rule.mix for rule in found.rules):
        # Lists of targets that are nearly alike do not tell the terms of a matcher's loss apart.
        return False
    if found.made_of is not None:
        return bool(found.rest_terms) or found.made_of.has_several_calls
    return found.reduction is Reduction.MEAN and not found.random


def _shows_nothing(found: LossContract | None) -> bool:
    """Whether the samples seen do not tell how a loss is reduced, though they have targets; others may."""
    if found is None or found.conclusive or found.reason == NO_TARGET_SEEN:
        return False
    return found.reduction is Reduction.PLAIN


def _tells_alone(found: LossContract, fitting_too: Iterable[Items], window: Sequence[Any]) -> bool:
    """Whether one look is enough for what no call shows, where every other look fitted more ways of counting.

    Args:
        found: what that look has shown.
        fitting_too: the ways of counting that the others fitted; none: there was no other.
        window: its micro-batches.
    """
    return not several_fit(replace(found, made_of=None, extra=(), alternatives=tuple(fitting_too)), window)


def _fitting(found: LossContract) -> set[Items]:
    """The ways of counting that fit what no call shows."""
    return {*found.extra, *(found.rest_terms or found.alternatives)}


def _is_far_fetched(found: LossContract | None, window: Sequence[Any]) -> bool:
    """Whether a loss of labelled tokens seems to be weighed by something else: what it chooses of them may be alike."""
    if found is None or found.made_of is not None or not found.conclusive or found.random:
        return False
    if not (found.reduction is Reduction.MEAN or found.by_number):
        return False
    return any(isinstance(batch, Mapping) and found.leaves_labels_out(batch) for batch in window)


def as_both_show(found: LossContract, again: LossContract) -> LossContract:
    """What was observed, if other samples under dropout show the same; a term that only they show makes it another."""
    if found.extra and again.reason != NO_TARGET_SEEN:
        extra = _in_both(found.extra, again.extra)
        found, again = (replace(each, extra=extra, changed_by_trainer=not extra) for each in (found, again))
    by_hand = found.by_number and found.made_of is None and not found.extra
    if by_hand and found.conclusive and again.reason != NO_TARGET_SEEN:
        common = _in_both(found.alternatives, again.alternatives)
        if again.conclusive and common:
            return replace(found, items=common[0], alternatives=common)
        return replace(again if again.by_number else found, conclusive=False, reason=SEVERAL_FIT)
    if not again.conclusive:
        return found
    if not found.conclusive:
        # A part of the first samples had no target, or none of them.
        return again
    if found.items is None:
        return found
    if again.reduction is found.reduction:
        if again.rest_terms and not found.rest_terms and found.items in again.rules:
            # Two draws of one model are apart only under dropout.
            return again
        common, rest = _in_both(found.alternatives, again.alternatives), _in_both(found.rest_terms, again.rest_terms)
        same_terms = bool(rest) == bool(found.rest_terms)
        if not same_terms and set(again.rules) == set(found.rules):
            # The same items weigh it, whatever it is made of.
            return found
        if same_terms and common:
            if found.made_of is None:
                # What drew at random at its first run (a teacher that is made then) shows no calls.
                changed = found.changed_by_trainer or again.changed_by_trainer
                found = replace(again, changed_by_trainer=changed, extra=() if changed else again.extra)
            made_of = found.made_of and replace(found.made_of, rest_terms=rest)
            return replace(found, items=common[0], alternatives=common, made_of=made_of)
    reason = "a term that no loss call shows is another one in other samples, or under dropout"
    return replace(found, reduction=Reduction.PLAIN, items=None, alternatives=(), made_of=None, reason=reason)


def is_due(known: LossContract, number: int, window: Sequence[Any], *, alone: bool) -> bool:
    """Whether a settled loss is observed again.

    Args:
        known: what was observed.
        number: of the window, from 1.
        window: its micro-batches.
        alone: this is the only rank: several would have to agree on it.
    """
    is_certified = known.made_of is not None and not (known.rest_terms or known.extra)
    if is_certified or (known.reduction is Reduction.PLAIN and known.conclusive):
        return False
    return number in (2, 3) or number & (number - 1) == 0 or (alone and several_fit(known, window))


def several_fit(known: LossContract, window: Sequence[Any]) -> bool:
    """Whether the ways of counting that fit what no call shows count the micro-batches of a window differently.

    On several ranks, or differently from the window in which the ranks agreed, so that no rank has to ask the others.
    Looked at where the window is held by the host, so that it waits for no device.
    """
    if not window or not all(_is_countable(rules, window) for rules in known.open_rules):
        return False
    before = dict(known.counted)
    for rules in known.open_rules:
        counts = [[count_by(rule, batch) for batch in window] for rule in rules]
        agreed = [[before[rule], *each] for rule, each in zip(rules, counts, strict=True) if rule in before]
        if not in_proportion(counts) or not in_proportion([[each[0], sum(each[1:])] for each in agreed]):
            return True
    return False


def counted_in(window: Sequence[Any], found: LossContract) -> tuple[tuple[Items, float], ...]:
    """What every way of counting makes of a window, which other ranks may hold theirs against."""
    if not window or not isinstance(window[0], Mapping):
        return ()
    rules = dict.fromkeys((*(rule for rules in found.open_rules for rule in rules), *ways_of_counting(window[0], ())))
    return tuple(
        (rule, sum(count_by(rule, batch) for batch in window)) for rule in rules if _is_countable([rule], window)
    )


def _is_countable(rules: Sequence[Items], window: Sequence[Any]) -> bool:
    """Whether a window is held by the host, and has what the rules count."""
    if not all(isinstance(batch, Mapping) and rule.has_targets(batch) for batch in window for rule in rules):
        return False
    values = [value for batch in window for value in batch.values() if isinstance(value, Tensor)]
    return all(value.device.type == "cpu" for value in values)


def trained_wrongly(known: LossContract | None, found: LossContract) -> bool:
    """Whether windows before this one, or this one, are trained by what may not be so.

    Args:
        known: what they were trained by; None: this is the first.
        found: what is observed now.
    """
    if found.reason == SEVERAL_FIT:
        return True
    if known is None or known.reason == NO_TARGET_SEEN:
        return False
    return (known.reduction, known.rules, known.made_of) != (found.reduction, found.rules, found.made_of)


def as_before(known: LossContract, found: LossContract) -> LossContract | None:
    """What was known, narrowed down to what a later window shows as well; None: that shows another loss."""
    if found.reason == NO_TARGET_SEEN or not (found.conclusive or found.reason == SEVERAL_FIT):
        # It shows nothing.
        return known
    if known.reduction is Reduction.PLAIN or found.reduction is not known.reduction:
        return None
    common = _in_both(known.alternatives, found.alternatives)
    extra, rest = _in_both(known.extra, found.extra), _in_both(known.rest_terms, found.rest_terms)
    if known.items is not None and not common:
        return None
    # Now it is known that no rule counts what its calls reduce over.
    if found.beside and not known.beside and found.reason != SHIFT_UNKNOWN:
        return None
    if bool(extra) != bool(known.extra) or bool(rest) != bool(known.rest_terms):
        return None
    made_of = known.made_of
    if made_of is not None and rest:
        made_of = replace(made_of, rest_terms=rest)
    return replace(known, items=common[0] if common else known.items, alternatives=common, extra=extra, made_of=made_of)


def _in_both(one: Sequence[Items], other: Sequence[Items]) -> tuple[Items, ...]:
    return tuple(rule for rule in one if rule in other)
