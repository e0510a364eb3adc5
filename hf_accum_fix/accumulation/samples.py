"""The batches that a loss is observed on: a batch, and two parts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.rows import (
    Batch,
    Parts,
    can_divide,
    divide,
    join,
    join_all,
    mappings_in,
    masks_of,
    narrow,
    one_row,
    take_rows,
    widths_of,
)
from hf_accum_fix.accumulation.rules import BLOCKS, listed_targets, ways_of_counting

#: Samples that show that they are coupled, as a pair may not: by classes, ranks, or what is frequent among them.
_ENOUGH = 4


class Split(NamedTuple):
    """A batch, and two parts that hold all of its samples; or three batches.

    Attributes:
        apart: the parts are parts of the whole.
        tasks: the samples may be of two tasks.
        kind: which rows it assumes to belong together; all splits of a kind have to show the same.
        decides: if it is clear, no other of its kind is needed.
        narrowed: the parts are rows, only as wide as their own samples, perhaps of two micro-batches.
    """

    whole: Batch
    one: Batch
    other: Batch
    apart: bool = True
    tasks: bool = False
    kind: str = ""
    decides: bool = True
    narrowed: bool = False

    @property
    def pads(self) -> bool:
        """Whether a part is padded further in the whole."""
        return self.apart and bool(widths_of(self.one) ^ widths_of(self.other))

    @property
    def shows_coupling(self) -> bool:
        """Whether coupled samples would be detected: not by a doubled batch."""
        return self.apart and self.one is not self.other


def splits(window: Sequence[Batch], *, has_decoder: bool = False) -> Iterator[Split]:
    """Splits of a window's samples, most reliable first; a model may be unable to run some of them.

    ``has_decoder``: labels are as wide as a decoder's texts, not as the inputs.

    Rows of its most informative micro-batch, first as narrow as they are; several micro-batches and the batch of all;
    rows in two or three blocks, one of each a sample (DPO, TPO); a doubled micro-batch; and unchanged micro-batches.
    """
    samples = _Samples.of(window, has_decoder=has_decoder)
    if samples.by_row:
        yield from samples.rows_alone()
    yield from samples.micro_batches()
    yield from samples.groups()
    batch, others = samples.batch, samples.others
    if (twice := join(batch, batch)) is not None and any(twice[key] is not batch[key] for key in batch):
        yield Split(twice, batch, batch)
    one, other, *_ = (*others, batch, batch)
    for together in ((batch, one, other), *((each, each, each) for each in samples.ordered)):
        yield Split(*together, apart=False)


@dataclass(frozen=True)
class _Samples:
    """The samples of a window.

    Attributes:
        ordered: its micro-batches, the most informative first.
        others: all but the first, the least similar to it first.
        unseen: values that only these have, of a column that may name tasks.
        has_decoder: as for `splits`.
    """

    ordered: Sequence[Batch]
    others: Sequence[Batch]
    unseen: set[tuple[str, float]]
    has_decoder: bool

    @classmethod
    def of(cls, window: Sequence[Batch], *, has_decoder: bool) -> _Samples:
        """The samples of these micro-batches."""
        batch, *rest = ordered = sorted(window, key=_informative, reverse=True)
        unseen = _unseen(window, batch)
        # Tasks none of whose samples has a target.
        missing = unseen.difference(*(_marks(each) for each in rest if _informative(each)[0]))
        others = [each for each in reversed(rest) if _informative(each)[0] or missing & _marks(each)] or rest
        # One of another width shows whether the loss depends on padding.
        others.sort(key=lambda each: -len(widths_of(batch) ^ widths_of(each)))
        return cls(ordered, others, unseen, has_decoder)

    @property
    def batch(self) -> Batch:
        """The most informative micro-batch."""
        return self.ordered[0]

    @property
    def rows(self) -> int:
        """Its samples."""
        return sample_count(self.batch)

    @property
    def by_row(self) -> bool:
        """Whether it can be split by rows."""
        return self.rows > 1 and can_divide(self.batch, self.rows)

    @property
    def unlike(self) -> list[Batch]:
        """The least similar of the others, and, since tasks are observed together, the one with most unseen values."""
        found = [*self.others[:1]]
        if self.unseen and found:
            of_task = max(self.others, key=lambda each: len(self.unseen & _marks(each)))
            found += [of_task] if of_task is not found[0] else []
        return found

    def rows_alone(self) -> Iterator[Split]:
        """One row and all others, first as narrow as they are."""
        batch, others, tasks = self.batch, self.others, bool(self.unseen)
        narrowed = partial(_narrowed, has_decoder=self.has_decoder, kind="narrowed", narrowed=True)
        more = self.unlike
        shows_padding = any(True for part in mappings_in(batch) for _ in masks_of(part))
        hides_padding = not shows_padding and any(widths_of(batch) ^ widths_of(each) for each in others[:1])
        whole = join_all([batch, *more]) if tasks or hides_padding or self.rows < _ENOUGH else batch
        if more and whole is not None and whole is not batch and can_divide(whole, sample_count(whole)):
            found = [*narrowed(whole, tasks=tasks)]
            if widths_of(batch) ^ widths_of(others[0]) and not any(each.pads for each in found):
                # No mask shows where samples end.
                rest = join_all(more)
                assert rest is not None
                found = [Split(whole, batch, rest, kind="narrowed", narrowed=True, tasks=tasks)]
            yield from found
        else:
            yield from (each for each in narrowed(batch) if each.pads)
        rows = _with_unlike(batch, _least_row(batch, self.rows))
        yield from _of_one_kind("rows", (one_row(batch, row) for row in rows))

    def micro_batches(self) -> Iterator[Split]:
        """Several micro-batches and the batch of all, where one has no rows to split."""
        if self.rows == 1:
            left = [each for each in self.others if not any(each is other for other in self.unlike)]
            chosen = [self.batch, *self.unlike, *left[len(self.unlike) + 1 - _ENOUGH :]]
            yield from _of_several(chosen, tasks=bool(self.unseen))
        # The last one is most similar, so a sum over tasks has fewer terms there.
        for other in () if self.by_row else self.others[:: max(len(self.others) - 1, 1)]:
            if (both := join(self.batch, other)) is not None:
                yield Split(both, self.batch, other, tasks=bool(self.unseen & _marks(other)), kind="micro-batches")

    def _grouped(self, batch: Batch, group_of: Sequence[int], height: int = 0) -> Parts:
        """As `divided`, each part only as wide as its own samples: what adds up as wide as it is may not else."""
        whole, *parts = divide(batch, group_of, height)
        one, other = (narrow(each, has_decoder=self.has_decoder) for each in parts)
        return whole, one, other

    def groups(self) -> Iterator[Split]:
        """Rows that belong together: next to one another, in blocks, or with those of another micro-batch."""
        batch, rows = self.batch, self.rows
        alike = [batch, *(each for each in self.others if sample_count(each) == rows)]
        by_rows = [each for each in alike if self.by_row and can_divide(each, rows)]
        for size in (size for size in range(2, rows // 2 + 1) if rows % size == 0):
            divided = (self._grouped(each, [row // size for row in range(rows)]) for each in by_rows)
            yield from _of_one_kind(f"groups of {size}", divided)
        blocks = [each for each in sorted({blocks for _, blocks in BLOCKS}) if rows % each == 0]
        for number in blocks:
            # A row of every block is a pair (DPO), or a triple (TPO).
            height = rows // number
            flat = [each for each in alike if not any(isinstance(value, Mapping) for value in each.values())]
            in_blocks = [each for each in flat if can_divide(each, rows, height)]
            if height > 1 and in_blocks and in_blocks[0] is batch:
                divided = (self._grouped(each, [row % height for row in range(rows)], height) for each in in_blocks)
                yield from _of_one_kind(f"{number} blocks", divided)
        for kind, fits in (("merged", not self.unseen), ("interleaved", bool(blocks))):
            if self.by_row and fits:
                joined = ((join(batch, other, interleaved=kind == "interleaved"), other) for other in self.others)
                # Where rows alone cannot be run, these are all that shows coupled samples.
                yield from _of_one_kind(kind, ((both, batch, other) for both, other in joined if both is not None), 3)


def _of_one_kind(kind: str, found: Iterable[Parts], most: int = 2) -> Iterator[Split]:
    """Some splits that assume the same rows to belong together: all have to show it."""
    some = list(islice(found, most))
    for place, each in enumerate(some):
        yield Split(*each, kind=kind, decides=place + 1 == len(some))


def _narrowed(whole: Batch, *, has_decoder: bool, **given: Any) -> Iterator[Split]:
    """One row, and all others, as their collator would have padded them, for each row of `_alone`."""
    rows, repeats = _alone(whole, _lengths(whole)), bool(_repeating(whole))
    for place, row in enumerate(rows):
        # Where no numbers repeat, the second is for a loss whose terms the first lacks.
        decides = place + 1 == len(rows) or not repeats
        _, one, other = one_row(whole, row)
        one, other = narrow(one, has_decoder=has_decoder), narrow(other, has_decoder=has_decoder)
        yield Split(whole, one, other, decides=decides, **given)


def _lengths(batch: Batch) -> list[int]:
    """The tokens of each row, as far as masks show them."""
    rows = sample_count(batch)
    masks = (mask for part in mappings_in(batch) for _, mask in masks_of(part) if len(mask) == rows)
    lengths = [[0] * rows, *((mask != 0).sum(1).tolist() for mask in masks)]
    return [sum(each) for each in zip(*lengths, strict=True)]


def _repeating(batch: Batch) -> list[list[float]]:
    """The inputs that are one number for each row, and repeat few: weights of samples may be statistics of these."""
    rows = sample_count(batch)
    columns = [value.tolist() for value in batch.values() if isinstance(value, Tensor) and value.shape == (rows,)]
    return [each for each in columns if 1 < len(set(each)) < rows]


def _alone(batch: Batch, lengths: Sequence[int]) -> list[int]:
    """The two rows that tell most alone: short, with targets, and with other values of the inputs that repeat few.

    A weight over the greatest value of such an input shows in one of them, or in the rest.
    """
    rule = next(ways_of_counting(batch))
    counts = [float(rule.count(take_rows(batch, [row]))) for row in range(sample_count(batch))]
    first, *others = sorted(range(len(counts)), key=lambda row: (not counts[row], lengths[row], counts[row]))
    return _with_unlike(batch, first, others) if _repeating(batch) else [first, others[0]]


def _with_unlike(batch: Batch, row: int, others: Sequence[int] = ()) -> list[int]:
    """A row, and the first of the ``others`` (all) that has most other values of the inputs that repeat few, if any."""
    repeating, others = _repeating(batch), others or [each for each in range(sample_count(batch)) if each != row]
    unlike = min(others, key=lambda other: sum(each[other] == each[row] for each in repeating))
    return [row, unlike] if repeating else [row]


def _of_several(chosen: list[Batch], *, tasks: bool) -> Iterator[Split]:
    """Some micro-batches of one sample as one batch: one of `_alone` and the rest, and the widest and the rest."""
    chosen.sort(key=lambda each: sum(width for _, width in widths_of(each)))
    whole = join_all(chosen)
    if whole is None or len(chosen) < 3:
        return
    telling = _alone(whole, range(len(chosen)))[: 1 + bool(_repeating(whole))]
    for place, alone in enumerate(dict.fromkeys((*telling, len(chosen) - 1))):
        if rest := join_all([each for row, each in enumerate(chosen) if row != alone]):
            decides = place + 1 >= len(telling)
            yield Split(whole, chosen[alone], rest, tasks=tasks, kind="micro-batches", decides=decides)


def _informative(batch: Batch) -> tuple[bool, bool, int, float]:
    """Sort key of micro-batches: how many rules differ in them, and their targets."""
    # Halves differ in any batch, as do masks with and without their first position.
    rules = [rule for rule in ways_of_counting(batch) if not (rule.block or (rule.shift and not rule.ignore_index))]
    counts = [float(rule.count(batch)) for rule in rules]
    return counts[0] > 0, sample_count(batch) > 1, len(set(counts)), counts[0]


def _marks(batch: Batch) -> set[tuple[str, float]]:
    """The values of inputs that are one number for each sample, which may name tasks; what is negative is no label."""
    columns = [(key, value) for key, value in batch.items() if isinstance(value, Tensor) and value.ndim == 1]
    return {(key, each) for key, value in columns if "label" not in key for each in value.tolist() if each >= 0}


def _unseen(window: Sequence[Batch], batch: Batch) -> set[tuple[str, float]]:
    """The values that only other micro-batches have, of columns with few values."""
    marks = set[tuple[str, float]]().union(*map(_marks, window))
    few = {
        key for key, count in Counter(key for key, _ in marks).items() if 2 * count <= sum(map(sample_count, window))
    }
    return {(key, each) for key, each in marks - _marks(batch) if key in few}


def unvaried(window: Sequence[Batch], *, values: bool) -> set[str]:
    """The inputs that are as wide in all micro-batches of a window, so that padding does not show.

    ``values``: also those that are the same number for all samples, of which statistics would not show.
    """
    found = set[str]()
    for key in {key for batch in window for key in batch}:
        each = [batch[key] for batch in window if isinstance(batch.get(key), Tensor)]
        if all(value.ndim == 2 for value in each):
            alike = {value.shape[1] for value in each}
        elif values and all(value.ndim == 1 for value in each):
            alike = {number for value in each for number in value.tolist()}
        else:
            continue
        found |= {key} if len(alike) == 1 else set()
    return found


def _least_row(batch: Batch, rows: int) -> int:
    """The row with the fewest targets above 0; of listed targets the one furthest from the mean."""
    listed = next(listed_targets(batch), None)
    if listed is not None:
        counts = [float(listed.count(take_rows(batch, [row]))) for row in range(rows)]
        return max(range(rows), key=lambda row: abs(counts[row] - sum(counts) / rows))
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        return 0
    counts = (labels != -100).flatten(1).sum(1).tolist() if labels.ndim > 1 else (labels != -100).tolist()
    return min(range(rows), key=lambda row: (counts[row] == 0, counts[row]))
