"""Explain a wrong gradient: a factor, a mean of means, a router loss; and name the defect that causes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from hf_accum_fix.upstream.defects import Defect, Factor

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
        world_size: W.
        factors: values of the measurable factors for this split, without those of 1.
        present: the defects of the installed release, by name.
        traits: words of `_CONDITIONS` that hold for the trainer, its model and its data.
    """

    world_size: int
    factors: Mapping[Factor, float]
    present: Mapping[str, Defect]
    traits: frozenset[str]

    def holds(self, condition: str) -> bool:
        """Whether the trainer has every trait in a condition, and none of those after a minus."""
        known = self.traits.union(self.present)
        return all((word[1:] not in known) if word.startswith("-") else (word in known) for word in condition.split())


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
    """Explain a multiple of the right gradient; ``logged`` is the logged loss over the right one.

    ``precision`` is the relative difference within which a symbol is recognised.
    """
    symbols = _symbols(factor, facts, precision)
    words = _WORDS[symbols[0]] if symbols else f"{factor:.4g} times"
    if f"{factor:.4g}" == "1":
        words = "right length, wrong direction"
    if abs(logged - 1) < 10 * precision:
        facts = replace(facts, traits=facts.traits | {"right-log"})
    return Explanation(words, _defects(symbols, facts))


def of_means(name: str, factor: float, logged: float, facts: Facts, precision: float) -> Explanation:
    """Explain a multiple of the mean of micro-batch means (`MEANS`), or of rank means (`RANK_MEANS`)."""
    words = _MEANS[name]
    here = (name,) if name in facts.present else ()
    if abs(factor - 1) <= precision:
        return Explanation(words, here)
    times = of_factor(factor, logged, facts, precision)
    return Explanation(f"{times.words}, and the {words}", (*times.defects, *here))


def of_router(main: float, router: float, facts: Facts, precision: float) -> Explanation:
    """Explain a multiple of the right gradient plus a multiple of the router's gradient."""
    symbols = _symbols(router, facts, precision)
    times = _WORDS[symbols[0]].removesuffix(" times") if symbols else f"{router:.4g}"
    words = f"aux loss times {times}"
    named = tuple(name for name, defect in facts.present.items() if Factor.ROUTER in defect.factors)
    if abs(main - 1) > precision:
        rest = of_factor(main, 0.0, facts, precision)
        return Explanation(f"{words}, the rest {rest.words}", (*named, *rest.defects))
    return Explanation(words, named)


def _symbols(factor: float, facts: Facts, precision: float) -> list[Factor]:
    """The factors with this value, first those of this release's defects."""
    found = [symbol for symbol, value in facts.factors.items() if abs(factor - value) <= precision * abs(value)]
    if facts.world_size == 1:
        return found
    here = {each for defect in facts.present.values() for each in defect.factors}
    return sorted(found, key=lambda symbol: symbol not in here)


def _defects(symbols: list[Factor], facts: Facts) -> tuple[str, ...]:
    """The defects of the installed release with this factor, if their condition holds."""
    found = tuple(
        name
        for name, defect in facts.present.items()
        if not set(defect.factors).isdisjoint(symbols) and name in _CONDITIONS and facts.holds(_CONDITIONS[name])
    )
    by_head = {Factor.G, Factor.G_W} & set(symbols) and facts.holds(f"{ANY_HEAD} {_HEAD}")
    return (ANY_HEAD,) if by_head and not found else found


_HEAD: Final = "mean declares -own-loss -smoothing"
_LIBRARY: Final = f"{_HEAD} library -compiled"

#: Traits with which a row with this factor is the cause, "-" before those that exclude it; a row's name is a trait of
#: its releases. Setups that are refused have no row here.
_CONDITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "loss-times-steps": "",
        "undivided-gradient-right-log": "right-log",
        "undivided-as-if-counted": "-declares -right-log",
        "item-count-dropped": "declares -own-loss",
        "item-count-dropped-again": "declares -own-loss",
        "loss-without-labels-undivided": "-labels",
        "short-epoch-divisor": "",
        "short-window-divisor": "",
        "gradient-divided-twice": "right-log",
        "generic-head-drops-item-count": f"{_LIBRARY} generic",
        "classic-head-drops-item-count": f"{_LIBRARY} -generic -other-classes",
        "regression-and-multi-label-mean": f"{_LIBRARY} -generic other-classes",
        "undivided-mean-times-ranks": f"{_HEAD} one-step",
        "llava-mean-loss": f"{_LIBRARY} llava",
        "loss-func-mean-not-divided": "own-loss",
        "loss-func-not-times-ranks": "own-loss",
        "ctc-sum-divided-by-accelerate": "sum",
        "ctc-sum-divided": "sum",
        "label-smoothing-mean": "smoothing",
        "first-label-counted": "number",
        "first-label-still-counted": "number -first-label-counted",
        "first-column-not-counted": "",
        "virtual-tokens-undercounted": "peft",
        "aligned-targets-undercounted": "-peft",
        "ignore-index-miscounted": "",
    }
)
