"""What verify() found: as values, as text, as data, as a picture. Pure: knows neither torch nor a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NoReturn

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.reporting import table

STOCK: Final = "stock"
MENDED: Final = "apply()"

_COLUMNS: Final = ("window", "cut", "mode", "norm ratio", "error", "cosine", "log ratio", "verdict")
_EVAL_COLUMNS: Final = ("eval batch", "mode", "eval_loss", "item mean", "error")


class Kind(IntEnum):
    """The three answers, as exit codes."""

    EXACT = 0
    OFF = 1
    COULD_NOT_TELL = 3


@dataclass(frozen=True)
class Verdict:
    """An answer in words; it has no truth value, because "could not tell" is neither.

    Attributes:
        kind: which of the three answers.
        words: "exact to the floor ...", "off, relative error ...: why" or "could not tell: reason".
    """

    kind: Kind
    words: str

    def __str__(self) -> str:
        return self.words

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a verdict is not true or false, it is {self.words!r}; ask verdict.kind is Kind.EXACT")


def could_not_tell(reason: str) -> Verdict:
    """A verdict without an answer, and why."""
    return Verdict(Kind.COULD_NOT_TELL, f"could not tell: {reason}")


@dataclass(frozen=True)
class SplitResult:
    """One cut of one global batch, run by the trainer's own loop and compared with the reference.

    Attributes:
        mode: "stock" or "apply()".
        per_device: samples of a micro-batch.
        steps: gradient_accumulation_steps.
        micro_batches: of the window on one rank; fewer than ``steps`` in a short last window.
        window: which global batch, from 0.
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
    def cut(self) -> str:
        """Samples x accumulation steps, as the tables show it."""
        short = f", {self.micro_batches} run" if self.micro_batches != self.steps else ""
        return f"{self.per_device} x {self.steps}{short}"


@dataclass(frozen=True)
class EvalResult:
    """The ``eval_loss`` of a trainer for one eval batch size, beside the mean over the items of the evaluation set.

    Attributes:
        mode: "stock", or "eval_loss=True", the option that makes it the item mean.
        per_device: the eval batch size.
        eval_loss: as reported.
        item_mean: of the same samples, computed one by one.
    """

    mode: str
    per_device: int
    eval_loss: float
    item_mean: float

    @property
    def error(self) -> float:
        """Relative to the item mean."""
        return abs(self.eval_loss - self.item_mean) / abs(self.item_mean) if self.item_mean else abs(self.eval_loss)


@dataclass(frozen=True)
class VerificationReport:
    """Whether a trainer's gradient depends on the cut of the global batch.

    Attributes:
        trainer, head, transformers: the trainer's class, the model's class, the release.
        active: the mode that this process trains in as it is now, "stock" or "apply()".
        verdict: on that mode, and on the user's own cut where it was run; other cuts that are off are named.
        world_size: W.
        samples: of each global batch, over all ranks.
        items: N of each global batch; None where the loss has none.
        contract: how the loss is reduced, in words.
        reference: how the reference was computed, in words.
        floor: relative difference of two references without accumulation: the noise of dtype and kernels.
        tolerance: largest relative error that is called exact.
        results: one for each window, cut and mode.
        evaluation: one for each mode and eval batch size; empty without an evaluation set.
        notes: what was changed for the comparison, and what stands in its way.
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
    evaluation: tuple[EvalResult, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, mode: str) -> tuple[SplitResult, ...]:
        """The results of one mode, "stock" or "apply()"."""
        return tuple(result for result in self.results if result.mode == mode)

    def verdict_of(self, mode: str) -> Verdict:
        """The verdict on one mode: off if one cut is off, exact if all cuts with an answer are."""
        return judge(self.of(mode)) if self.results else self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Everything, as data for JSON."""
        return {
            **asdict(self),
            "verdict": _plain(self.verdict),
            "results": [{**asdict(result), "verdict": _plain(result.verdict)} for result in self.results],
            "evaluation": [{**asdict(each), "error": each.error} for each in self.evaluation],
        }

    def to_text(self) -> str:
        """Everything, as tables to read."""
        lines = [
            f"{self.trainer} of {self.head} on transformers {self.transformers}, W = {self.world_size}: {self.active}",
            f"verdict: {self.verdict}",
        ]
        if self.contract:
            lines.append(f"the loss {self.contract}")
        if self.reference:
            counts = ", ".join(_batch(*each) for each in zip(self.samples, self.items, strict=True))
            lines.append(f"global batch: {counts}; reference: {self.reference}")
            lines.append(f"noise floor {self.floor:.1e}, exact up to {self.tolerance:.1e}")
        lines += [f"note: {note}" for note in self.notes]
        if self.results:
            lines += ["", *table(_COLUMNS, [_cells(result) for result in self.results])]
        if self.evaluation:
            rows = [
                (str(each.per_device), each.mode, f"{each.eval_loss:.6g}", f"{each.item_mean:.6g}", f"{each.error:.1e}")
                for each in self.evaluation
            ]
            lines += ["", *table(_EVAL_COLUMNS, rows)]
        return "\n".join(lines)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"a report is not true or false, it says {str(self.verdict)!r}; ask report.verdict.kind is Kind.EXACT"
        )

    def __str__(self) -> str:
        """The text, so that print(verify(trainer)) shows it."""
        return self.to_text()

    def plot(self, path: str | Path) -> None:
        """Draw the relative gradient error of every cut, on a log scale; the path's ending is the format.

        Raises:
            OptionsError: if matplotlib is not installed, or there is nothing to draw.
        """
        drawn = [result for result in self.results if result.error is not None]
        if not drawn:
            raise OptionsError(f"there is no error to draw: {self.verdict}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise OptionsError("drawing needs matplotlib; pip install matplotlib") from error
        labels = [f"{result.cut}\n{result.mode}" for result in drawn]
        least = max(self.floor, 1e-17)
        figure = Figure(figsize=(max(5.0, 0.9 * len(drawn)), 4.0), layout="constrained")
        axes = figure.subplots()
        colours = ["tab:orange" if result.mode == STOCK else "tab:blue" for result in drawn]
        axes.bar(range(len(drawn)), [max(result.error or 0.0, least / 2) for result in drawn], color=colours)
        axes.axhline(self.tolerance, color="black", linewidth=0.8, linestyle="--", label="exact below")
        axes.set_yscale("log")
        axes.set_xticks(range(len(drawn)), labels, fontsize=8)
        axes.set_ylabel("relative gradient error")
        axes.set_title(f"{self.head}, transformers {self.transformers}", fontsize=10)
        axes.legend(fontsize=8)
        figure.savefig(str(path))


def judge(results: Sequence[SplitResult]) -> Verdict:
    """One verdict on the results of one mode: the verdict on the worst cut that has an answer."""
    told = [result for result in results if result.verdict.kind is not Kind.COULD_NOT_TELL]
    if not told:
        return results[0].verdict if results else could_not_tell("no cut was run")
    off = [result for result in told if result.verdict.kind is Kind.OFF]
    if off:
        worst = max(off, key=lambda result: float("inf") if result.error is None else result.error)
        return Verdict(Kind.OFF, f"{worst.verdict} (cut {worst.cut}; {len(off)} of {len(told)} cuts are off)")
    left = f"; {len(results) - len(told)} cuts have no answer" if len(told) < len(results) else ""
    return Verdict(Kind.EXACT, f"{told[0].verdict} for {len(told)} cuts{left}")


def judge_own(results: Sequence[SplitResult], own: Sequence[SplitResult]) -> Verdict:
    """The verdict on the cut that the user trains with; on all cuts where it is not among the results."""
    every = judge(results)
    if not own:
        return every
    found = judge(own)
    if every.kind is Kind.OFF and found.kind is Kind.EXACT:
        return Verdict(Kind.EXACT, f"your own cut, {own[0].cut}, is {own[0].verdict}; others are not: {every}")
    return found if found.kind is Kind.COULD_NOT_TELL and every.kind is Kind.EXACT else every


def _plain(verdict: Verdict) -> dict[str, str]:
    return {"kind": verdict.kind.name.lower(), "words": verdict.words}


def _batch(samples: int, items: float | None) -> str:
    return f"{samples} samples" if items is None else f"{samples} samples with {items:g} items"


def _cells(result: SplitResult) -> tuple[str, ...]:
    named = f" [{', '.join(result.defects)}]" if result.defects else ""
    return (
        str(result.window),
        result.cut,
        result.mode,
        _number(result.norm_ratio, ".6g"),
        _number(result.error, ".1e"),
        _number(result.cosine, ".6f"),
        _number(result.loss_ratio, ".6g"),
        f"{result.verdict}{named}",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
