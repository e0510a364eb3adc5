"""Choose a contract from what several splits of the samples show."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, LossContract
from hf_accum_fix.accumulation.join import Split
from hf_accum_fix.accumulation.look import Look

#: Why a loss that is exact in one split is not believed.
_OF_ONE = "its terms add up in one micro-batch, and not with more samples or less padding: it depends on the split"


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
