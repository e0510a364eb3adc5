"""The result of verify() as values, text and data. Pure: imports neither torch nor a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from math import inf
from typing import Any, Final

from hf_accum_fix.reporting import table, wrapped

STOCK: Final = "stock"
PATCHED: Final = "apply()"

_COLUMNS: Final = ("split", "mode", "gradient", "error", "logged", "answer")
#: Largest 1 - cosine of a multiple of the right gradient, in squares of its error.
_PARALLEL: Final = 0.05


class Kind(IntEnum):
    """The three answers, as exit codes."""

    EXACT = 0
    OFF = 1
    COULD_NOT_TELL = 3


#: What apply() does to the user's own split, by the answer.
_MAKES: Final = {0: "makes it exact", 1: "leaves it off", 3: "could not be run"}


@dataclass(frozen=True)
class Verdict:
    """An answer in words; true if exact."""

    kind: Kind  # one of the three answers
    words: str  # "exact ...", "off, relative error ...: why" or "could not tell: reason"

    def __str__(self) -> str:
        return self.words

    def __bool__(self) -> bool:
        return self.kind is Kind.EXACT

    def to_dict(self) -> dict[str, str]:
        """As data for JSON."""
        return {"kind": self.kind.name.lower(), "words": self.words}


def could_not_tell(reason: str) -> Verdict:
    """A verdict without an answer, and why."""
    return Verdict(Kind.COULD_NOT_TELL, f"could not tell: {reason}")


def off_by(error: float, why: str) -> Verdict:
    """A verdict of another gradient: its relative error, and the cause."""
    return Verdict(Kind.OFF, f"off, relative error {error:.2g}: {why}")


@dataclass(frozen=True)
class SplitResult:
    """One split of one global batch, run by the trainer's own loop and compared with the reference.

    Attributes:
        mode: "stock" or "apply()".
        per_device: samples per micro-batch.
        steps: gradient_accumulation_steps.
        micro_batches: of the window on one rank; fewer than ``steps`` in a short last window.
        window: number of the global batch, from 0.
        verdict: the answer.
        norm_ratio, error, cosine: gradient norm over the reference's, relative error, cosine; None: not computed.
        loss_ratio: logged loss over the reference's loss.
        defects: names of the defects of the installed release that cause the error.
    """

    mode: str
    per_device: int
    steps: int
    micro_batches: int
    window: int
    verdict: Verdict
    norm_ratio: float | None = None
    error: float | None = None
    cosine: float | None = None
    loss_ratio: float | None = None
    defects: tuple[str, ...] = ()

    @property
    def split(self) -> str:
        """Samples x accumulation steps, as the tables show it."""
        short = "" if self.micro_batches == self.steps else f" ({self.micro_batches} of {self.steps})"
        return f"{self.per_device} x {self.steps}{short}"

    @property
    def amount(self) -> str:
        """The error of the gradient: too large, too small, or another direction; else the words of the verdict."""
        if self.verdict.kind is not Kind.OFF or self.error is None:
            return self.verdict.words
        ratio = self.norm_ratio or 0.0
        if self.cosine is None or self.cosine < 1 - _PARALLEL * self.error**2 or not 0 < ratio < inf:
            return f"relative error {self.error:.2g}"
        return f"{ratio:.4g}x too large" if ratio > 1 else f"{1 / ratio:.4g}x too small"

    @property
    def why(self) -> str:
        """The cause of an error, in words."""
        return self.verdict.words.partition(": ")[2]


@dataclass(frozen=True)
class VerificationReport:
    """Whether a trainer's gradient depends on the split of the global batch; true if the verdict is exact.

    Attributes:
        trainer, head, transformers: the trainer's class, the model's class, the release.
        active: the mode in which this process trains now, "stock" or "apply()".
        verdict: on that mode and the user's own split; on all splits if that was not run.
        world_size: W.
        samples: of each global batch, over all ranks.
        items: N of each global batch; None if the loss has no items.
        contract: the reduction of the loss, in words.
        reference: the computation of the reference, in words.
        floor: relative difference of two references without accumulation: the noise of dtype and kernels.
        tolerance: largest relative error that counts as exact.
        results: one per window, split and mode.
        notes: what was changed for the comparison, and what was not verified.
        own: samples x accumulation steps of the trainer's arguments.
    """

    trainer: str
    head: str
    transformers: str
    active: str
    verdict: Verdict
    world_size: int = 1
    samples: tuple[int, ...] = ()
    items: tuple[float | None, ...] = ()
    contract: str = ""
    reference: str = ""
    floor: float = 0.0
    tolerance: float = 0.0
    results: tuple[SplitResult, ...] = ()
    notes: tuple[str, ...] = ()
    own: tuple[int, int] = (0, 0)

    @property
    def ok(self) -> bool:
        """Whether the verdict is exact; False also if there is no answer."""
        return self.verdict.kind is Kind.EXACT

    def of(self, mode: str) -> tuple[SplitResult, ...]:
        """The results of one mode, "stock" or "apply()"."""
        return tuple(result for result in self.results if result.mode == mode)

    def verdict_of(self, mode: str) -> Verdict:
        """The verdict on one mode: off if one split is off, exact if all splits with an answer are."""
        return judge(self.of(mode)) if self.results else self.verdict

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON."""
        return {
            "ok": self.ok,
            **asdict(self),
            "verdict": self.verdict.to_dict(),
            "results": [{**asdict(result), "verdict": result.verdict.to_dict()} for result in self.results],
        }

    def to_text(self) -> str:
        """The report as text with tables, in 80 columns."""
        about = f"{self.trainer} of {self.head} on transformers {self.transformers}, W = {self.world_size}"
        lines = [str(self.verdict), *also_looked_at(self.of(self.active), self.own), f"{about}: {self.active}"]
        lines += [f"the loss {self.contract}"] if self.contract else []
        if self.reference:
            counts = [
                _number_of(rows, "sample") + ("" if items is None else f" with {_number_of(items, 'item')}")
                for rows, items in zip(self.samples, self.items, strict=True)
            ]
            lines.append(f"global batch: {', '.join(counts)}; reference: {self.reference}")
            lines.append(f"exact: a relative error up to {self.tolerance:.1e}; the noise is {self.floor:.1e}")
        lines = _wrapped(*lines, *(f"note: {note}" for note in self.notes))
        return "\n".join(lines + (["", *_rows(self.results)] if self.results else []))

    __str__ = to_text

    def __bool__(self) -> bool:
        """Whether the verdict is exact."""
        return self.ok


def judge(results: Sequence[SplitResult]) -> Verdict:
    """One verdict on the results of one mode: that on the worst split with an answer."""
    known = [result for result in results if result.verdict.kind is not Kind.COULD_NOT_TELL]
    if not known:
        return results[0].verdict if results else could_not_tell("no split was run")
    if off := [result for result in known if result.verdict.kind is Kind.OFF]:
        worst, number = _worst(off), f"{len(off)} of {len(known)} splits {'is' if len(off) == 1 else 'are'} off"
        return Verdict(Kind.OFF, f"{worst.verdict} (split {worst.split}; {number})")
    unanswered = len(results) - len(known)
    left = f"; {_number_of(unanswered, 'split')} without an answer" if unanswered else ""
    return Verdict(Kind.EXACT, f"{known[0].verdict} for {_number_of(len(known), 'split')}{left}")


def judge_own(
    results: Sequence[SplitResult], owns: Sequence[SplitResult], active: str, own: tuple[int, int]
) -> Verdict:
    """The verdict on the user's own split, and on the same split with ``apply()``; on all if their own was not run."""
    here = [each for each in owns or results if each.mode == active]
    found = judge(here)
    if found.kind is Kind.COULD_NOT_TELL:
        return found
    shown = _worst([each for each in here if each.verdict.kind is found.kind])
    place = f"at your {shown.split}" if owns else f"at {shown.split}"
    left_out = "" if owns else f"; your own {own[0]} x {own[1]} is not among the splits"
    if found:
        return Verdict(Kind.EXACT, shown.amount.replace("exact", f"exact {place}", 1) + left_out)
    words = f"{shown.amount} {place}" + (f" ({shown.why})" if shown.why else "")
    if active != PATCHED and (patched := [each for each in owns or results if each.mode == PATCHED]):
        words += f"; apply() {_MAKES[judge(patched).kind]}"
    return Verdict(Kind.OFF, words + left_out)


def also_looked_at(results: Sequence[SplitResult], own: tuple[int, int]) -> list[str]:
    """One line on the splits of one mode that are not the user's own."""
    found: dict[str, dict[str, None]] = {}
    for each in results:
        if (each.per_device, each.steps) != own:
            amount = "no answer" if each.verdict.kind is Kind.COULD_NOT_TELL else each.amount.partition(",")[0]
            found.setdefault(amount, {})[each.split] = None
    words = [f"{amount} at {' and '.join(splits)}" for amount, splits in found.items()]
    several = len({(each.per_device, each.steps) for each in results}) > 1
    return [f"also looked at: {'; '.join(words)}"] if words and several else []


def _worst(results: Sequence[SplitResult]) -> SplitResult:
    return max(results, key=lambda result: inf if result.error is None else result.error)


def _number_of(count: float, what: str) -> str:
    return f"{count:g} {what}{'' if count == 1 else 's'}"


def _rows(results: Sequence[SplitResult]) -> list[str]:
    """The table, each reason below its row."""
    several = len({each.window for each in results}) > 1
    cells = [(*(str(each.window),) * several, *_cells(each)) for each in results]
    head, rule, *rows = table((*("window",) * several, *_COLUMNS), cells)
    lines = [head, rule]
    for row, result in zip(rows, results, strict=True):
        lines += [row, *_wrapped(_reason(result), indent=4)]
    if any(each.micro_batches != each.steps for each in results):
        lines += wrapped("(k of G): a short last window, k micro-batches at G accumulation steps")
    return lines


def _wrapped(*paragraphs: str, indent: int = 0) -> list[str]:
    """Lines of at most 80 columns; a split such as 2 x 8 stays together."""
    together = (each.replace(" x ", "\xa0x\xa0") for each in paragraphs)
    return [line.replace("\xa0", " ") for line in wrapped(*together, indent=indent)]


def _reason(result: SplitResult) -> str:
    """What the row does not show; empty for an exact one."""
    words, kind = result.verdict.words, result.verdict.kind
    if kind is not Kind.OFF:
        return words.removeprefix("exact").lstrip(",; ") if kind is Kind.EXACT else words
    parallel = result.cosine is None or result.cosine > 0.9995
    turned = "" if parallel else f"another direction, cosine {result.cosine:.3g}: "
    return f"{turned}{result.why}" + (f" [{', '.join(result.defects)}]" if result.defects else "")


def _cells(result: SplitResult) -> tuple[str, ...]:
    numbers = ((result.norm_ratio, ".4g"), (result.error, ".1e"), (result.loss_ratio, ".4g"))
    answer = {Kind.EXACT: "exact", Kind.OFF: "off"}.get(result.verdict.kind, "-")
    return (result.split, result.mode, *("-" if each is None else format(each, form) for each, form in numbers), answer)
