"""Explain a wrong gradient: a factor, a mean of means, a router loss; and name the defect that causes it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.upstream.defects import DEFECTS, Factor, is_present

MEANS: Final = "mean-of-micro-batch-means"
RANK_MEANS: Final = "rank-means-averaged"
LOST: Final = "epoch-tail-not-trained"
ANY_HEAD: Final = "head-drops-item-count"

_MEANS: Final = MappingProxyType({MEANS: "mean of micro-batch means", RANK_MEANS: "mean of rank means"})

#: Measurable factors in words, the simplest first.
_WORDS: Final[Mapping[Factor, str]] = MappingProxyType(
    {
        Factor.G: "G times",
        Factor.W: "W times",
        Factor.G_W: "G x W times",
        Factor.PER_G: "1/G",
        Factor.PER_W: "1/W",
        Factor.PER_G_W: "1/(G x W)",
        Factor.SHORT: "r/G times, a short window divided by G",
        Factor.MORE_BY_ROWS: "N/(N + rows), position 0 counted",
        Factor.LESS_BY_ROWS: "N/(N - rows), a target at position 0 not counted",
        Factor.MORE_BY_IGNORED: "N/(N + ignored), ignored labels counted",
    }
)


@dataclass(frozen=True)
class Facts:
    """Facts about a split and the trainer that ran it.

    Attributes:
        micro_batches: of the window on one rank; G in a full window.
        steps: gradient_accumulation_steps.
        world_size: W.
        items: N, counted by the contract.
        labels: number of labels other than -100, at all positions.
        labels_shifted: the same without position 0.
        reduction: of the loss.
        head: name of the model's class.
        release: of transformers.
        ignore_index: of the contract's items.
        declares: whether the release passes num_items_in_batch to the head.
        own_loss_func, smoothing, compiled, classification, has_labels: of the trainer, its model and its data.
        library, generic, text: whether the head is transformers' own, is one of its generic classifiers, reads tokens.
    """

    micro_batches: int
    steps: int
    world_size: int
    items: float | None
    labels: float | None
    labels_shifted: float | None
    reduction: Reduction
    head: str
    release: str
    ignore_index: int | None
    declares: bool
    own_loss_func: bool
    smoothing: bool
    compiled: bool
    classification: bool
    has_labels: bool
    library: bool
    generic: bool
    text: bool

    def factors(self) -> dict[Factor, float]:
        """The values of the measurable factors, for this split."""
        g, w = self.micro_batches, self.world_size
        known = {
            Factor.G: float(g),
            Factor.W: float(w),
            Factor.G_W: float(g * w),
            Factor.PER_G: 1 / self.steps,
            Factor.PER_W: 1 / w,
            Factor.PER_G_W: 1 / (self.steps * w),
            Factor.SHORT: g / self.steps,
        }
        if self.items and self.labels and self.labels > self.items:
            counted = Factor.MORE_BY_ROWS if self.ignore_index in (None, -100) else Factor.MORE_BY_IGNORED
            known[counted] = self.items / self.labels
        if self.items and self.labels_shifted and self.labels_shifted < self.items:
            known[Factor.LESS_BY_ROWS] = self.items / self.labels_shifted
        return {factor: value for factor, value in known.items() if value != 1.0}


@dataclass(frozen=True)
class Explanation:
    """The cause of a wrong gradient.

    Attributes:
        words: the factor or the cause, in words.
        defects: names of the installed release's defects that cause it.
    """

    words: str
    defects: tuple[str, ...] = ()


def of_factor(factor: float, logged: float, facts: Facts, precision: float) -> Explanation:
    """Explain a multiple of the right gradient.

    Args:
        factor: gradient over the right gradient.
        logged: logged loss over the right loss.
        facts: of the split.
        precision: relative difference within which a symbol is recognised.
    """
    symbols = _symbols(factor, facts, precision)
    words = _WORDS[symbols[0]] if symbols else f"{factor:.4g} times"
    if f"{factor:.4g}" == "1":
        words = "right length, wrong direction"
    log_is_right = abs(logged - 1) < 10 * precision
    return Explanation(words, _defects(symbols, facts, log_is_right))


def of_means(name: str, factor: float, logged: float, facts: Facts, precision: float) -> Explanation:
    """Explain a multiple of the mean of micro-batch means (`MEANS`), or of rank means (`RANK_MEANS`)."""
    words = _MEANS[name]
    here = (name,) if is_present(name, facts.release) else ()
    if abs(factor - 1) <= precision:
        return Explanation(words, here)
    times = of_factor(factor, logged, facts, precision)
    return Explanation(f"{times.words}, and the {words}", (*times.defects, *here))


def of_router(main: float, router: float, facts: Facts, precision: float) -> Explanation:
    """Explain a multiple of the right gradient plus a multiple of the router's gradient."""
    symbols = _symbols(router, facts, precision)
    times = _WORDS[symbols[0]].removesuffix(" times") if symbols else f"{router:.4g}"
    words = f"aux loss times {times}"
    named = tuple(
        each.name for each in DEFECTS if Factor.ROUTER in each.factors and is_present(each.name, facts.release)
    )
    if abs(main - 1) > precision:
        rest = of_factor(main, 0.0, facts, precision)
        return Explanation(f"{words}, the rest {rest.words}", (*named, *rest.defects))
    return Explanation(words, named)


def _symbols(factor: float, facts: Facts, precision: float) -> list[Factor]:
    """The factors with this value, first those of this release's defects."""
    found = [symbol for symbol, value in facts.factors().items() if abs(factor - value) <= precision * abs(value)]
    if facts.world_size == 1:
        return found
    here = {each for defect in DEFECTS if is_present(defect.name, facts.release) for each in defect.factors}
    return sorted(found, key=lambda symbol: symbol not in here)


def _defects(symbols: list[Factor], facts: Facts, log_is_right: bool) -> tuple[str, ...]:
    """The defects of the installed release with this factor, if their condition holds."""
    found = tuple(
        defect.name
        for defect in DEFECTS
        if not set(defect.factors).isdisjoint(symbols)
        and is_present(defect.name, facts.release)
        and defect.name in _CONDITIONS
        and _CONDITIONS[defect.name](facts, log_is_right)
    )
    by_head = {Factor.G, Factor.G_W} & set(symbols) and _of_a_head(facts) and is_present(ANY_HEAD, facts.release)
    return (ANY_HEAD,) if by_head and not found else found


def _of_a_head(facts: Facts) -> bool:
    return facts.reduction is Reduction.MEAN and facts.declares and not facts.own_loss_func and not facts.smoothing


def _of_the_library(facts: Facts) -> bool:
    return facts.library and _of_a_head(facts) and not facts.compiled


#: Condition under which a row with this factor is the cause. Setups that are refused have no row here.
_CONDITIONS: Final[Mapping[str, Callable[[Facts, bool], bool]]] = MappingProxyType(
    {
        "loss-times-steps": lambda facts, log_is_right: True,
        "undivided-gradient-right-log": lambda facts, log_is_right: log_is_right,
        "undivided-as-if-counted": lambda facts, log_is_right: not facts.declares and not log_is_right,
        "item-count-dropped": lambda facts, log_is_right: facts.declares and not facts.own_loss_func,
        "item-count-dropped-again": lambda facts, log_is_right: facts.declares and not facts.own_loss_func,
        "loss-without-labels-undivided": lambda facts, log_is_right: not facts.has_labels,
        "short-epoch-divisor": lambda facts, log_is_right: True,
        "short-window-divisor": lambda facts, log_is_right: True,
        "gradient-divided-twice": lambda facts, log_is_right: log_is_right,
        "generic-head-drops-item-count": lambda facts, log_is_right: _of_the_library(facts) and facts.generic,
        "classic-head-drops-item-count": lambda facts, log_is_right: (
            _of_the_library(facts) and not facts.generic and (facts.text or not facts.classification)
        ),
        "regression-and-multi-label-mean": lambda facts, log_is_right: (
            _of_the_library(facts) and not facts.generic and not facts.text and facts.classification
        ),
        "undivided-mean-times-ranks": lambda facts, log_is_right: _of_a_head(facts) and facts.steps == 1,
        "llava-mean-loss": lambda facts, log_is_right: _of_the_library(facts) and "Llava" in facts.head,
        "loss-func-mean-not-divided": lambda facts, log_is_right: facts.own_loss_func,
        "loss-func-not-times-ranks": lambda facts, log_is_right: facts.own_loss_func,
        "ctc-sum-divided-by-accelerate": lambda facts, log_is_right: facts.reduction is Reduction.SUM,
        "ctc-sum-divided": lambda facts, log_is_right: facts.reduction is Reduction.SUM,
        "label-smoothing-mean": lambda facts, log_is_right: facts.smoothing,
        "first-label-counted": lambda facts, log_is_right: facts.reduction is Reduction.NUMBER,
        "first-label-still-counted": lambda facts, log_is_right: (
            facts.reduction is Reduction.NUMBER and not is_present("first-label-counted", facts.release)
        ),
        "first-column-not-counted": lambda facts, log_is_right: True,
        "virtual-tokens-undercounted": lambda facts, log_is_right: facts.head.startswith("Peft"),
        "aligned-targets-undercounted": lambda facts, log_is_right: not facts.head.startswith("Peft"),
        "ignore-index-miscounted": lambda facts, log_is_right: True,
    }
)
