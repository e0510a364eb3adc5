"""Choose a contract from what several splits of the samples show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, How, LossContract, Reduction
from hf_accum_fix.accumulation.elements import picks_elements
from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.reading import Reading
from hf_accum_fix.accumulation.samples import Split

#: Why a loss that is exact in one split is not believed.
_OF_ONE = "its terms add up in one micro-batch, and not with more samples or less padding: it depends on the split"


@dataclass
class Choice:
    """The contract so far.

    Attributes:
        sharded: every forward is a collective, so one split is enough.
        found: None: no split was run.
        whole: the forward that it was concluded from.
        failure: the first error of a split.
    """

    sharded: bool
    found: LossContract | None = None
    whole: Reading | None = None
    failure: Exception | None = None
    _of_kind: dict[str, tuple[LossContract, Reading]] = field(default_factory=dict)
    _kind: str = ""
    #: What every split shows.
    _seen: list[tuple[Split, LossContract]] = field(default_factory=list)
    #: Kinds of splits that a divisor tells of, which come first; the splits that they have overtaken.
    _likely: set[str] = field(default_factory=set)
    _waiting: list[Split] = field(default_factory=list)

    def note_failure(self, split: Split, error: Exception) -> None:
        """Note the error of a split, but of a narrowed one: a model may need batches as wide as its collator's."""
        # Without the frames of the forward, which hold its tensors: the next one may need their memory.
        self.failure = self.failure or (None if split.narrowed else error.with_traceback(None))

    def take(self, split: Split, latest: LossContract, whole: Reading) -> bool:
        """Take the contract of one more split; returns whether it needs no other. ``whole`` as in `Choice`."""
        self._seen.append((split, latest))
        if _may_be_the_split(latest):
            self._likely |= _groupings(whole)
        if split.narrowed and (_does_not_add_up(latest) or not _is_clear(latest, split)):
            # Splits of one micro-batch, as wide as it is, show whether its rows belong together.
            return False
        if split.kind:
            latest, whole = self._of_kind[split.kind] = _of_one_kind(self._of_kind.get(split.kind), latest, whole)
        decides = split.decides or self.is_decided(split.kind)
        if not (decides or self.found is None or not _may_be_the_split(self.found)):
            return False
        # After a failure the splits of one kind are judged together, by `_of_one_kind`; so are those that show
        # coupled samples in a loss with weights.
        together = self.failure is not None or (latest.weighted and _may_be_the_split(latest))
        is_same_kind = together and bool(split.kind) and split.kind == self._kind
        found = latest if is_same_kind or self.found is None else _better(self.found, latest, split)
        if self.found is None or found.terms == latest.terms:
            self.whole, self._kind = whole, split.kind
        self.found = found
        # If a split failed, one of another kind may look clear; weights may be statistics of the batch.
        decides = decides or not (self.failure or found.weighted)
        is_enough = decides and _is_clear(found, split)
        halves = f"groups of {sample_count(whole.batch) // 2}"
        if is_enough and found.is_guess and found.weighted and halves not in self._likely:
            # A rank in the batch may hide from a row alone, and not from halves.
            self._likely.add(halves)
            is_enough = False
        return self.sharded or is_enough

    def is_decided(self, kind: str) -> bool:
        """Whether another split of this kind would change nothing, since one has shown that the split matters."""
        shown = kind in self._of_kind and _may_be_the_split(self._of_kind[kind][0])
        return shown or any(split.kind == kind and _does_not_add_up(each) for split, each in self._narrowed)

    def following(self, left: Iterator[Split]) -> Split | None:
        """Of the splits left the next; first those of the groups of rows that a term's divisor tells of."""
        for split in left if self._likely else ():
            if split.kind in self._likely and not self.is_decided(split.kind):
                return split
            self._waiting.append(split)
        while self._waiting:
            if not self.is_decided((waited := self._waiting.pop(0)).kind):
                return waited
        return next((split for split in left if not self.is_decided(split.kind)), None)

    def needs_no(self, following: Split) -> bool:
        """Whether the next split, which cannot show coupled samples, would show nothing new."""
        return self.found is not None and not following.shows_coupling and _has_shown(self.found)

    @property
    def _narrowed(self) -> list[tuple[Split, LossContract]]:
        """What splits with samples of other micro-batches, or less padding, have shown."""
        return [(split, each) for split, each in self._seen if split.narrowed]

    def made(self) -> tuple[LossContract, Reading]:
        """The contract, and the forward it was concluded from; raises the error of the splits if none was run."""
        if self.found is None or self.whole is None:
            assert self.failure is not None
            raise self.failure
        found = self.found
        for _, each in self._seen:
            found = found.fitting_as_well(each)
        # Of some samples the loss was zero, or not finite: another window may show more.
        is_blank = any(not each.conclusive and each.reason != NO_TARGET_SEEN for _, each in self._seen)
        found = replace(found, unseen=found.unseen or (found.conclusive and is_blank))
        varies = (each.doubt for split, each in self._narrowed if each.cause is Cause.TERMS and not split.tasks)
        if found.exact and found.is_guess:
            # As many in fewer samples, which no rule confirms.
            found = replace(found, doubt=next(varies, ""))
        is_open = any(_does_not_add_up(each) for _, each in self._narrowed)
        in_groups = (each for split, each in self._seen if split.kind.startswith("groups"))
        if found.exact and found.is_guess and any(map(_does_not_add_up, in_groups)):
            found = replace(found, doubt="its terms add up in one split of its samples, and not in another")
        # If rows belong together, that was the cause.
        picks = any(picks_elements(each.term.leaf) for each in self.whole.terms)
        if is_open and found.exact and (picks or self._kind in ("narrowed", "rows")):
            found = replace(found, doubt=_OF_ONE)
            if found.reduction is Reduction.SUM:
                terms = tuple(replace(each, how=How.PLAIN) for each in found.terms)
                found = replace(found, reduction=Reduction.PLAIN, terms=terms, reason=_OF_ONE)
        return found, self.whole


def _does_not_add_up(found: LossContract) -> bool:
    """Whether a split has shown terms that do not add up, and not only other ones."""
    return bool(found.doubt) and found.cause not in (Cause.TERMS, Cause.HIDDEN)


def _is_clear(found: LossContract, split: Split) -> bool:
    """Whether a contract needs no further split."""
    other_tasks = split.tasks and found.cause is Cause.TERMS
    return other_tasks or (_has_shown(found) and not _may_be_the_split(found))


def _of_one_kind(
    before: tuple[LossContract, Reading] | None, latest: LossContract, whole: Reading
) -> tuple[LossContract, Reading]:
    """Of two splits of a kind, the contract that shows that the split matters: the other may by chance not show it.

    ``whole``: the forward that it was concluded from.
    """
    if before is not None and not latest.terms:
        # Its loss is zero, which shows nothing.
        return before
    if before is not None and before[0].terms:
        first, _ = before
        if _may_be_the_split(first):
            return before
        if [(each.shape, each.place) for each in first.terms] != [(each.shape, each.place) for each in latest.terms]:
            doubt = "another split of the samples shows other terms in a batch and its parts"
            latest = latest if latest.doubt else replace(latest, doubt=doubt, cause=Cause.TERMS)
    return latest, whole


def _better(found: LossContract, latest: LossContract, split: Split) -> LossContract:
    """The better of two contracts, from one more split of the samples."""
    if (found.unseen or not found.terms) and latest.conclusive and not latest.unseen and split.apart:
        return latest
    if not latest.conclusive or _may_be_the_split(latest) or (found.terms and not split.shows_coupling):
        return found
    if found.cause is Cause.TERMS and latest.needs_forwards:
        # Terms that come and go, and that no rule tells apart, were as many in this split by chance.
        return found
    # In a doubled batch all factors that are no counts look constant.
    latest = replace(latest, grouped=found.coupled)
    is_open = bool(latest.doubt) or split.shows_coupling
    return latest if is_open else replace(latest, doubt=found.doubt, cause=found.cause)


def _groupings(whole: Reading) -> set[str]:
    """The kinds of splits of pairs, triples or groups of rows, if a term divides by as many."""
    rows = sample_count(whole.batch)
    divisors = {value for each in whole.terms for value in each.divisors}
    sizes = [size for size in range(2, rows // 2 + 1) if rows / size in divisors]
    return {kind for size in sizes for kind in (f"{size} blocks", f"groups of {size}", "interleaved")}


def _has_shown(found: LossContract) -> bool:
    """Whether a loss was observed, or its samples have no targets."""
    return found.conclusive or found.reason == NO_TARGET_SEEN


def _may_be_the_split(found: LossContract) -> bool:
    """Whether the split may have separated rows that belong together."""
    return found.coupled or (found.cause is not None and found.cause.may_be_the_split)
