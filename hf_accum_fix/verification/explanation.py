"""Explain a wrong gradient: a factor, a mean of means, a router loss; and name the defect that causes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import transformers
from packaging.version import Version

from hf_accum_fix.engines.difference import factors_near, factors_of
from hf_accum_fix.learning.contract import Reduction
from hf_accum_fix.overrides.trainer_facts import data_ranks
from hf_accum_fix.upstream.defects import DEFECTS, Factor
from hf_accum_fix.verification.gradients import Gradient, dots, fit, relative
from hf_accum_fix.verification.reference import WIDEST, Reference, SceneSplit

_ANY_HEAD: Final = "head-drops-item-count"
_MEANS: Final = "mean-of-micro-batch-means"
_RANK_MEANS: Final = "rank-means-averaged"
_MEANS_IN_WORDS: Final = {_MEANS: "mean of micro-batch means", _RANK_MEANS: "mean of rank means"}

#: The defects of the installed release, by name.
_PRESENT: Final = {defect.name: defect for defect in DEFECTS if defect.is_in(Version(transformers.__version__))}

#: Largest distance of a factor from its symbol, in tolerances; and the smallest such limit, relative.
NEAR: Final = 8.0
_NEAREST: Final = 1e-5

#: What a factor's letters do not say.
_ABOUT: Final = {
    Factor.SHORT: "r/G times, a short window divided by G",
    Factor.MORE_BY_ROWS: "N/(N + rows), position 0 counted",
    Factor.LESS_BY_ROWS: "N/(N - rows), a target at position 0 not counted",
    Factor.MORE_BY_IGNORED: "N/(N + ignored), ignored labels counted",
}


#: The cause of a wrong gradient, in words, and the defects of the installed release that are.
Explanation: TypeAlias = tuple[str, tuple[str, ...]]


class _Facts(NamedTuple):
    """Of a split and the trainer that ran it."""

    factors: Mapping[Factor, float]  # values of the measurable factors, the simplest first, without those of 1
    traits: frozenset[str]  # words of `_CONDITIONS` that hold for the trainer, its model and its data
    precision: float  # relative difference within which a factor is recognised

    def symbols(self, factor: float) -> list[Factor]:
        """The factors with this value; on several ranks those of this release's defects first."""
        found = factors_near(factor, self.factors, self.precision)
        here = {each for defect in _PRESENT.values() for each in defect.factors}
        return sorted(found, key=lambda symbol: symbol not in here) if Factor.W in self.factors else found

    def holds(self, condition: str) -> bool:
        """Whether the trainer has every trait in a condition, and none of those after a minus."""
        known = self.traits.union(_PRESENT)
        return all((word[1:] not in known) if word.startswith("-") else (word in known) for word in condition.split())


def explain(
    split: SceneSplit, reference: Reference, gradient: Gradient, router: Gradient | None, logged: float
) -> Explanation:
    """Try the possible causes, the cheap ones first.

    Args:
        split: that was run.
        reference: of its global batch.
        gradient: of the split.
        router: the right gradient of the router loss; None: there is none.
        logged: the logged loss over the right one.
    """
    if not torch.isfinite(dots(gradient)).all():
        if not all(split.items()):
            return "not finite, as a micro-batch has no target", ("window-without-items-is-nan",)
        return "not finite, an overflow", ()
    if router is None and split.narrow and relative(gradient, split.averaged(split.parts())) <= reference.tolerance:
        return rounding(split), ()
    precision = min(max(NEAR * reference.tolerance, _NEAREST), WIDEST)
    facts = _facts(split, logged, precision)
    inherent = _inherent(split, reference)
    for name, base in _bases(split, reference):
        (factor, *aux), rest = fit(gradient, base, *([] if router is None else [router]))
        if rest <= precision:
            if not name:
                return _of_router(factor, aux[0], facts) if aux else _of_factor(factor, facts)
            words, defects = _of_means(name, factor, facts)
            return f"{words}; {inherent}" if inherent and name == _MEANS else words, defects
    return inherent or "no known cause", ()


def rounding(split: SceneSplit) -> str:
    """The cause of a difference from the same micro-batches, summed in 32 bits."""
    named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in split.narrow))
    return f"rounding, by summing micro-batches in {named}; set accumulate_in='float32'"


def _bases(split: SceneSplit, reference: Reference) -> Iterator[tuple[str, Gradient]]:
    """Gradients of which the wrong one may be a multiple: the right one, and the means of means, by name."""
    yield "", reference.gradient
    items = split.items()
    if split.scene.world_size > 1 and split.scene.contract.by_number:
        yield _RANK_MEANS, split.averaged(split.parts(sum(each or 0.0 for each in items)))
    yield _MEANS, split.averaged([0.0 if each == 0 else 1 / split.count for each in items])


def _inherent(split: SceneSplit, reference: Reference) -> str:
    """Why no split can equal the full batch; empty if splits can."""
    contract = split.scene.contract
    if not contract.is_weighed:
        instead = "; coupled_loss='exact' trains the whole window's" if contract.coupled else ""
        return f"{contract.reason}, so no split can equal the full batch{instead}"
    return "" if reference.decomposes else "the loss does not decompose, so no split can equal the full batch"


def _in_words(symbol: Factor) -> str:
    return _ABOUT.get(symbol) or (symbol.value.replace(" / ", "/") if "/" in symbol.value else f"{symbol.value} times")


def _of_factor(factor: float, facts: _Facts) -> Explanation:
    """Explain a multiple of the right gradient: by this release's defects with this factor, whose condition holds."""
    symbols = facts.symbols(factor)
    words = _in_words(symbols[0]) if symbols else f"{factor:.4g} times"
    if f"{factor:.4g}" == "1":
        words = "right length, wrong direction"
    found = tuple(
        name
        for name, defect in _PRESENT.items()
        if not set(defect.factors).isdisjoint(symbols) and name in _CONDITIONS and facts.holds(_CONDITIONS[name])
    )
    by_head = {Factor.G, Factor.G_W} & set(symbols) and facts.holds(f"{_ANY_HEAD} {_HEAD}")
    return words, (_ANY_HEAD,) if by_head and not found else found


def _of_means(name: str, factor: float, facts: _Facts) -> Explanation:
    """Explain a multiple of a mean of means."""
    words, here = _MEANS_IN_WORDS[name], (name,) if name in _PRESENT else ()
    if abs(factor - 1) <= facts.precision:
        return words, here
    times, defects = _of_factor(factor, facts)
    return f"{times}, and the {words}", (*defects, *here)


def _of_router(main: float, router: float, facts: _Facts) -> Explanation:
    """Explain a multiple of the right gradient plus a multiple of the router's gradient."""
    symbols = facts.symbols(router)
    words = f"aux loss times {_in_words(symbols[0]).removesuffix(' times') if symbols else f'{router:.4g}'}"
    named = tuple(name for name, defect in _PRESENT.items() if Factor.ROUTER in defect.factors)
    if abs(main - 1) <= facts.precision:
        return words, named
    rest, defects = _of_factor(main, facts._replace(traits=facts.traits - {"right-log"}))
    return f"{words}, the rest {rest}", (*named, *defects)


def _facts(split: SceneSplit, logged: float, precision: float) -> _Facts:
    scene, contract, items = split.scene, split.scene.contract, split.scene.count(split.scene.every)
    factors = factors_of(split.steps, data_ranks(scene.trainer), split.count)
    batches = [scene.collate([row]) for row in scene.every]
    labels: list[Any] = [batch.get("labels") if isinstance(batch, Mapping) else None for batch in batches]
    if items and all(isinstance(each, torch.Tensor) and each.ndim > 1 for each in labels):
        counted = sum(int((each != -100).sum()) for each in labels)
        shifted = sum(int((each[..., 1:] != -100).sum()) for each in labels)
        ignored = contract.items is not None and contract.items.ignore_index not in (None, -100)
        if counted > items:
            factors[Factor.MORE_BY_IGNORED if ignored else Factor.MORE_BY_ROWS] = items / counted
        if 0 < shifted < items:
            factors[Factor.LESS_BY_ROWS] = items / shifted
    traits = _traits_of(scene.trainer, contract.reduction, labels)
    traits |= {"one-step": split.steps == 1, "right-log": abs(logged - 1) < 10 * precision}
    return _Facts(factors, frozenset(name for name, holds in traits.items() if holds), precision)


def _traits_of(trainer: Any, reduction: Reduction, labels: Sequence[object]) -> dict[str, bool]:
    """The words of `_CONDITIONS`, and whether they hold for a trainer, its model, and the labels of its samples."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    head, bases = type(model), [base.__name__ for base in type(model).__mro__]
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    reads_text = getattr(model, "main_input_name", "") == "input_ids"
    return {
        reduction.name.lower(): True,
        "declares": bool(getattr(trainer, "model_accepts_loss_kwargs", False)),
        "own-loss": getattr(trainer, "compute_loss_func", None) is not None,
        "smoothing": trainer.label_smoother is not None,
        "compiled": hasattr(trainer.model, "_orig_mod"),
        "labels": all(each is not None for each in labels),
        "library": head.__module__.startswith("transformers."),
        "generic": any(name.startswith("GenericFor") for name in bases),
        "other-classes": not reads_text and problem in ("regression", "multi_label_classification"),
        "llava": "Llava" in head.__name__,
        "peft": head.__name__.startswith("Peft"),
    }


_HEAD: Final = "mean declares -own-loss -smoothing"
_LIBRARY: Final = f"{_HEAD} library -compiled"

#: Traits with which a row with this factor is the cause, "-" before those that exclude it; a row's name is a trait of
#: its releases. Setups that are refused have no row here.
_CONDITIONS: Final[Mapping[str, str]] = {
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
