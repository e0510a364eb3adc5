"""Observe a loss once: what it is divided by is read from its graph, and what is a count is seen by three forwards.

One batch is run whole and in two parts. A factor that adds up over the parts is a count, one that is the same in all
three a constant. For every count the rules that count so from the inputs predict it in later windows; a wrong
prediction costs a correction at the window's end, never a wrong gradient. One equation finds coupled samples,

    L(AB) n(AB) = L(A) n(A) + L(B) n(B),

which holds for a weighted mean over the items of a batch, whatever they are.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    Coupling,
    How,
    LossContract,
    Reduction,
    TermSpec,
)
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.loss_graph import Term, read
from hf_accum_fix.accumulation.noise import WithoutNoise
from hf_accum_fix.accumulation.preserve import undisturbed
from hf_accum_fix.accumulation.rules import is_padded, listed_targets, matching_rules, ways_of_counting
from hf_accum_fix.accumulation.samples import splits
from hf_accum_fix.accumulation.values import Heard, listening
from hf_accum_fix.accumulation.window import Items, sample_count
from hf_accum_fix.errors import ContractError

#: One forward: (inputs, number or None) -> loss.
Forward = Callable[[Mapping[str, Any], Tensor | None], Tensor]
#: What the three forwards are handed: no sums, multiples or counts of one another, with a fraction.
NUMBERS = (1237.5, 4111.5, 2053.5)
#: What a trainer's own ``compute_loss`` is handed then, an integer as upstream's.
OWN_NUMBERS = {1237.5: 7919, 4111.5: 3571, 2053.5: 5557}
#: Losses of other libraries that are known to be means over targets, though their graph does not show it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: What hides a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
#: What two values that were computed alike may differ by, relative, by the bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}

logger = logging.getLogger("hf_accum_fix")


@dataclass(frozen=True)
class Seen:
    """One term in one forward; attributes as those of `loss_graph.Term`.

    Attributes:
        value: its part of the loss; None: it could not be followed.
        named: the rules whose targets are those that the leaf has kept.
        shift: the loss drops position 0 of the labels; None: the leaf does not show it.
        within: numbers stand inside of the leaf's sum.
        added: something without a gradient is added to it.
        total: the weight of its targets, of a cross entropy; 0.0: the leaf does not show it.
    """

    name: str
    shape: tuple[Any, ...]
    factors: tuple[float, ...]
    value: float | None
    readable: bool
    divides: bool
    rows: int
    router: str
    ignored: int | None
    named: tuple[Items, ...]
    shift: bool | None
    within: bool
    added: bool
    total: float


@dataclass(frozen=True)
class Reading:
    """One forward.

    Attributes:
        batch: its inputs.
        number: that it was handed; None: none.
        loss, dtype: of the loss.
        terms: stacked numbers taken for rows.
        inside: stacked numbers taken for terms.
        drew: it drew at random, dropout aside.
    """

    batch: Mapping[str, Any]
    number: float | None
    loss: float
    dtype: torch.dtype
    terms: list[Seen]
    inside: list[Seen]
    drew: bool


@dataclass(frozen=True)
class Setting:
    """What is known of a training before its loss is observed.

    Attributes:
        hands_number: the model, or a function of the user's, is handed the number in training.
        hands_own: a trainer's own ``compute_loss`` is.
        only_shows: the number is handed in the last forward alone, to see what the loss would do with it.
        custom: a trainer's own ``compute_loss`` makes the loss.
        func: a function of the user's makes it of the model's outputs.
        multiplies: a custom loss that divides by the number may multiply by the number of ranks.
        steps: G.
        world_size: W.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products keep fewer than float32's digits.
        alone: the loss has one term.
        apart: what was run were a batch and its parts.
        by_number: the model would divide by the number, if it were handed it.
    """

    hands_number: bool = False
    only_shows: bool = False
    hands_own: bool = False
    custom: bool = False
    func: bool = False
    multiplies: bool = False
    steps: int = 1
    world_size: int = 1
    upstream_number: float | None = None
    rounded: bool = False
    alone: bool = True
    apart: bool = True
    by_number: bool = False


def observe(
    call: Forward,
    window: Sequence[Mapping[str, Any]],
    model: nn.Module,
    setting: Setting,
    *,
    device: torch.device,
    head: nn.Module | None = None,
    others: Sequence[object] = (),
    leave: Sequence[object] = (),
    more_steps: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LossContract:
    """Observe how a loss is reduced, on samples of one window; nothing is left behind (see `undisturbed`).

    Args:
        call: one forward of the training's own loss.
        window: the micro-batches, as the loader gave them.
        model: the model whose modes, buffers, parameters and BatchNorm layers are looked after.
        setting: of the training.
        device: where the number is put.
        head: the model whose outputs carry a router's loss; None: there is none.
        others: objects beside the model whose attributes are put back, such as the trainer.
        leave: objects that nothing is noted on, such as data sets.
        more_steps: a context in which the arguments say other accumulation steps.
    """
    sharded = holds_shards(model)
    alike = any(next(listed_targets(batch), None) is not None for batch in window)
    kept = [id(batch) for batch in window]

    with undisturbed(model, *others, leave=leave, sharded=sharded) as state:
        writes = False

        def run(batch: Mapping[str, Any], number: float | None, within: Any = nullcontext) -> Reading:
            nonlocal writes
            try:
                first = read_of(batch, number, within)
                # What it has written may change what it is: a queue, a centre, a moving average.
                if not sharded and not writes and state.wrote():
                    writes = read_of(batch, number, within).loss != first.loss
                return first
            finally:
                state.restore()
                model.train()

        def read_of(batch: Mapping[str, Any], number: float | None, within: Any) -> Reading:
            try:
                return _read(call, batch, number, setting, device, head, within, alike=alike, keep=False)
            except ContractError as error:
                if str(error) != _FORGOTTEN:
                    raise
                # The loss takes a gradient itself (a penalty on it, adversarial noise).
                state.restore()
                return _read(call, batch, number, setting, device, head, within, alike=alike, keep=True)

        norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
        numbers: tuple[float | None, ...] = NUMBERS if setting.hands_number or setting.hands_own else (None, None, None)
        if setting.only_shows:
            numbers = (None, None, NUMBERS[2])
        found, whole, trouble = None, None, None
        for split in splits(window):
            if found is not None and not split.tells and (found.conclusive or found.reason == NO_TARGET_SEEN):
                break
            try:
                handed = (None, None, None) if setting.only_shows and not split.apart else numbers
                readings = [run(batch, number) for batch, number in zip(split[:3], handed, strict=True)]
                if setting.only_shows and len(readings[2].terms) != len(readings[1].terms):
                    readings[2] = run(split.other, None)
            except Exception as error:
                trouble = trouble or error
                # Memory that ends in a micro-batch as it is ends it in training.
                if sharded or (out_of_memory(error) and id(split.whole) in kept):
                    raise
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
                continue
            latest = _conclude(readings, window, replace(setting, apart=split.apart))
            if found is not None and found.is_guess:
                # A sum, or a count that no rule knows, fits one split by chance: another one has to show the same.
                found = (
                    found
                    if [each.form for each in latest.terms] == [each.form for each in found.terms]
                    else _doubted(found)
                )
                break
            if found is None or (latest.conclusive and not _may_be_the_split(latest)):
                found, whole = latest, readings[0]
            shows = found.conclusive or found.reason == NO_TARGET_SEEN
            if sharded or (shows and not _may_be_the_split(found) and not found.is_guess):
                break
        if found is None and trouble is not None:
            raise trouble
        assert found is not None and whole is not None
        if (setting.custom or setting.func) and (suspects := _suspects(found, whole, setting)):
            found = _own_division(found, suspects, whole, run(whole.batch, whole.number, more_steps), setting)
    if writes and norm is None:
        reason = "its forward writes state that the loss depends on, and so on the order of micro-batches"
        found = replace(found, doubt=found.doubt or reason)
    if norm is not None:
        reason = f"BatchNorm in training mode ({norm}): its statistics come from one micro-batch"
        terms = tuple(replace(each, how=How.PLAIN) if each.how is How.MEAN else each for each in found.terms)
        reduction = found.reduction if found.by_number and setting.custom else Reduction.PLAIN
        found = replace(
            found,
            reduction=reduction,
            items=found.items if found.by_number else None,
            terms=terms,
            doubt=reason,
            reason=reason,
        )
    return replace(found, custom=setting.custom, hands_number=setting.hands_number)


def _may_be_the_split(found: LossContract) -> bool:
    """Whether rows that belong together may have been taken apart, so that another split shows another loss."""
    return found.coupling is Coupling.COUPLED or found.doubt.endswith(_NO_COUNT)


def _doubted(found: LossContract) -> LossContract:
    """A contract whose guesses another split of the samples did not confirm."""
    terms = tuple(replace(each, how=How.PLAIN, counts=()) if each.is_guess else each for each in found.terms)
    reason = "what it divides by is hidden: its terms add up in one split of the samples, and not in another"
    if all(each.how is How.PLAIN for each in terms):
        return replace(found, reduction=Reduction.PLAIN, items=None, terms=terms, doubt=reason, reason=reason)
    return replace(found, terms=terms, doubt=found.doubt or reason)


def shift_of(call: Forward, window: Sequence[Mapping[str, Any]], model: nn.Module, *, sharded: bool) -> bool | None:
    """Whether a model's own loss drops position 0 of its labels; None: its graph does not show it.

    Args:
        call: one forward of the model's own loss.
        window: the micro-batches.
        model: that is run.
        sharded: as for `undisturbed`.
    """
    batch = max(window, key=lambda each: float(next(ways_of_counting(each)).count(each)))
    with undisturbed(model, sharded=sharded), torch.enable_grad(), saved_tensors_hooks(_kept_small, _unpacked):
        shown = [_is_shifted(term, batch) for term in read(call(dict(batch), None))]
    return next((shift for shift in shown if shift is not None), None)


# --- one forward ------------------------------------------------------------------------------------------------------

_FORGOTTEN = "got a gradient inside of a forward that kept nothing for one; expected none: run it with one"


def _read(
    call: Forward,
    batch: Mapping[str, Any],
    number: float | None,
    setting: Setting,
    device: torch.device,
    head: nn.Module | None,
    within: Any,
    *,
    alike: bool,
    keep: bool,
) -> Reading:
    """Run a batch with gradient, and read the loss; unless ``keep``, what a backward would need is forgotten."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = _random_state()
    handed = None if number is None else torch.tensor(number, device=device)
    with (
        WithoutNoise(alike=alike),
        listening(None, head) as heard,
        within(),
        torch.enable_grad(),
        nullcontext() if keep else saved_tensors_hooks(_kept_small, _unpacked),
    ):
        loss = call(dict(batch), handed)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ContractError(f"got {type(loss).__name__} as the loss of a micro-batch; expected a tensor of one number")
    total = float(loss.detach())
    read_terms = [
        _filled([_seen(term, heard, batch, total if _is_alone(terms) else None) for term in terms], total)
        for terms in (read(loss, heard.routers, deep=True), read(loss, heard.routers, inside=True, deep=True))
    ]
    return Reading(batch, number, total, loss.dtype, read_terms[0], read_terms[1], _random_state() != before)


def _kept_small(tensor: Tensor) -> Tensor | None:
    """Keep counts and labels, and nothing of activations."""
    return tensor if tensor.numel() <= 1 or not tensor.is_floating_point() else None


def _unpacked(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ContractError(_FORGOTTEN)
    return tensor


def _seen(term: Term, heard: Heard, batch: Mapping[str, Any], alone: float | None) -> Seen:
    with _disable_current_modes():
        factors = tuple(_float(each.value) for each in term.factors)
        value = alone
        if value is None and heard.values is not None and (kept := heard.values.of(term.path.top)) is not None:
            above = [(each.divides, number) for each, number in zip(term.factors, factors, strict=True)]
            value = float(kept) * _product(above[: term.path.above])
        ignored, named = _targets(term, batch)
        total = float(getattr(term.leaf, "_saved_total_weight", 0.0))
    return Seen(
        term.name,
        term.shape,
        factors,
        value,
        term.readable,
        term.divides,
        term.rows,
        heard.routers.get(term.leaf, ""),
        ignored,
        named,
        _is_shifted(term, batch),
        term.within > 0,
        term.path.added,
        total,
    )


def _is_alone(terms: Sequence[Term]) -> bool:
    return len(terms) == 1 and not terms[0].path.added


def _float(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _filled(terms: list[Seen], loss: float) -> list[Seen]:
    """Give what is left of a loss to the only term without a value."""
    if sum(each.value is None for each in terms) != 1 or any(each.added for each in terms):
        return terms
    rest = loss - math.fsum(each.value or 0.0 for each in terms)
    return [replace(each, value=rest) if each.value is None else each for each in terms]


def _targets(term: Term, batch: Mapping[str, Any]) -> tuple[int | None, tuple[Items, ...]]:
    """The ignored index of a cross entropy, and the rules whose targets it has kept."""
    if not term.name.startswith("NllLoss"):
        return None, ()
    ignored = int(term.leaf._saved_ignore_index)
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    target = term.leaf._saved_target
    kept = target[target != ignored].cpu()
    named = []
    for rule in ways_of_counting(batch, (ignored,)):
        value = batch.get(rule.keys[0]) if rule.keys and rule.entry is None else None
        labels = isinstance(value, Tensor) and not value.is_floating_point() and "label" in rule.keys[0]
        if labels and torch.equal(value[rule.targets(batch)].cpu(), kept):  # type: ignore[index]
            named.append(rule)
    return ignored, tuple(named)


def _is_shifted(term: Term, batch: Mapping[str, Any]) -> bool | None:
    """Whether a cross entropy drops position 0 of the labels; None: what it has kept does not show it."""
    labels = batch.get("labels")
    if not term.name.startswith("NllLoss") or not isinstance(labels, Tensor) or labels.ndim < 2:
        return None
    target = term.leaf._saved_target.flatten().to(labels)
    moved = torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), -100)], dim=-1)
    shifted = any(torch.equal(target, each.flatten()) for each in (labels[..., 1:], moved))
    return shifted if shifted != torch.equal(target, labels.flatten()) else None


def _product(factors: Sequence[tuple[bool, float]]) -> float:
    result = 1.0
    for divides, value in factors:
        result = result * value if not divides else result / value if value else math.nan
    return result


def _random_state() -> tuple[Any, ...]:
    words = np.random.get_state(legacy=True)
    return random.getstate(), words[1].tobytes(), words[2], torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left, however the error is spelled."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()


# --- what three forwards show -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One term, or the rows of one mean, in the three forwards."""

    spec: TermSpec
    seen: tuple[Seen, Seen, Seen]
    counts: tuple[float, ...]
    values: tuple[float | None, ...]
    trouble: str = ""
    shows: bool = True


def _conclude(readings: Sequence[Reading], window: Sequence[Mapping[str, Any]], setting: Setting) -> LossContract:
    whole = readings[0]
    rules = list(ways_of_counting(whole.batch))
    listed = next(listed_targets(whole.batch), None)
    if listed is not None and not float(listed.count(whole.batch)):
        return replace(_nothing_seen(whole, [listed]), reason=NO_TARGET_SEEN)
    if not whole.terms or not math.isfinite(whole.loss) or not any(each.loss for each in readings):
        return _nothing_seen(whole, rules)
    found = _concluded(readings, window, setting, rules, inside=False)
    if found.doubt and any(each.rows for each in whole.terms):
        # Stacked numbers are rows of one mean, or several terms.
        inner = _concluded(readings, window, setting, rules, inside=True)
        found = found if inner.doubt else inner
    return found


def _concluded(
    readings: Sequence[Reading],
    window: Sequence[Mapping[str, Any]],
    setting: Setting,
    rules: Sequence[Items],
    *,
    inside: bool,
) -> LossContract:
    """The same with stacked numbers taken for rows, or for terms."""
    whole = readings[0]
    dtype, batches = whole.dtype, [each.batch for each in readings]
    seen = [reading.inside if inside else reading.terms for reading in readings]
    by_number = False
    if setting.only_shows and readings[2].number is not None:
        seen[2], by_number = _without_number(seen, readings)
        setting = replace(setting, by_number=by_number)
    candidates, trouble = _matched(seen, readings, setting)
    candidates = _with_values(candidates, readings)
    ignored = list(dict.fromkeys([*(s.ignored for s in seen[0] if s.ignored is not None), -100]))
    tolerance = 2e-2 if setting.rounded else _TOLERANCE.get(dtype.itemsize, 2e-2)
    setting = replace(setting, alone=len(candidates) == 1)
    tested = [_tested(each, batches, ignored, math.inf if whole.drew else tolerance, setting) for each in candidates]
    specs = tuple(each.spec for each in tested)
    troubles = list(dict.fromkeys(each.trouble for each in tested if each.trouble))
    doubt = trouble or next(iter(troubles), "")
    added = any(each.added for each in seen[0])
    if added and not _adds_a_constant(candidates, readings, tolerance):
        doubt = doubt or "what has no gradient is added to it, and is averaged over micro-batches in the log"
    if not setting.apart and not doubt and sample_count(whole.batch) > 1:
        doubt = "its micro-batches cannot be taken apart, so that coupled samples would not show"
    coupled = any(each.trouble == _COUPLED for each in tested)
    means = [each for each in specs if each.how is How.MEAN]
    handed = [each for each in specs if each.handed]
    if len({each.group for each in specs}) > 1 and not all(each.rules for each in means if not each.handed):
        # No one number corrects several terms.
        doubt = doubt or "no rule counts the items of one of its terms beforehand"
        specs = tuple(each if each.rules or each.handed else _uncounted(each) for each in specs)
    common: dict[str, Any] = {
        "terms": specs,
        "dtype": dtype,
        "doubt": doubt,
        "coupling": Coupling.COUPLED if coupled else Coupling.UNKNOWN,
        "router_coefficient": _coefficient(tested, "aux_loss"),
        "router_z_coefficient": _coefficient(tested, "z_loss"),
        "inside": inside,
        "added": added,
        "deep": any(each.within for terms in seen for each in terms),
        "shift": next((each.shift for each in seen[0] if each.shift is not None), None),
    }
    if handed:
        items = next((each.rules[0] for each in (*handed, *means) if each.rules), None)
        items = items or _rule_of_upstream(rules, window, setting) or rules[0]
        common["terms"] = tuple(replace(each, rules=each.rules or (items,)) if each.handed else each for each in specs)
        kind = Reduction.INTEGER if handed[0].whole else Reduction.NUMBER
        takes = any(
            _is_near(value, setting.world_size) for each in tested if each.spec.handed for value in each.seen[0].factors
        )
        takes_world_size = takes and setting.multiplies if setting.custom and setting.world_size > 1 else None
        return LossContract(
            kind, items, takes_world_size=takes_world_size, reason="its graph divides by the number handed in", **common
        )
    if means:
        empty = means[0].count == 0.0 or not all(each.shows for each in tested)
        # Where none counts as the loss does, the nearest is one that counts its targets.
        near = next((each.named[0] for each in seen[0] if each.named), rules[0])
        rule = means[0].rules[0] if means[0].rules else near
        if coupled:
            return LossContract(Reduction.PLAIN, reason=_COUPLED, **common)
        kind = Reduction.NUMBER if by_number else Reduction.MEAN
        return LossContract(
            kind, rule, conclusive=not empty, reason=f"its graph divides {means[0].shape[0]} by them", **common
        )
    if specs and all(each.how is How.SUM for each in specs):
        return LossContract(
            Reduction.SUM, reason="its graph divides by nothing, and the losses of two parts add up", **common
        )
    return LossContract(Reduction.PLAIN, **{**common, "doubt": doubt or _NO_ITEMS}, reason=doubt or _NO_ITEMS)


_NO_COUNT = "is neither a count nor a constant"
_NO_ITEMS = "none of its terms is divided by a count"
_COUPLED = "the samples of a batch are coupled: its loss is no weighted mean of its parts' losses (in-batch negatives)"


def _adds_a_constant(candidates: Sequence[Candidate], readings: Sequence[Reading], tolerance: float) -> bool:
    """Whether what is added to the terms without a gradient is the same for every batch."""
    if any(None in each.values for each in candidates):
        return False
    rests = [
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates) for at, reading in enumerate(readings)
    ]
    return max(rests) - min(rests) <= tolerance * max(abs(reading.loss) for reading in readings)


def _uncounted(spec: TermSpec) -> TermSpec:
    return replace(spec, how=How.PLAIN, counts=()) if spec.how is How.MEAN else spec


def _nothing_seen(whole: Reading, rules: Sequence[Items]) -> LossContract:
    """The loss is a constant, zero or not finite: it is observed again in the next window."""
    empty = min(float(rule.count(whole.batch)) for rule in rules if rule.keys == rules[0].keys) == 0.0
    reason = NO_TARGET_SEEN if empty else "the loss of samples with targets is zero, not finite or without gradient"
    return LossContract(Reduction.MEAN, rules[0], dtype=whole.dtype, conclusive=False, reason=reason)


def _without_number(seen: Sequence[list[Seen]], readings: Sequence[Reading]) -> tuple[list[Seen], bool]:
    """The last forward as it would be without the number, and whether it divided by that."""
    number = readings[2].number
    assert number is not None
    shown, by_number = [], False
    for whole, one, other in zip(*seen, strict=True):
        places = [place for place, value in enumerate(other.factors) if _is_near(value, number) or value == int(number)]
        moving = [place for place, (a, b) in enumerate(zip(whole.factors, one.factors, strict=False)) if a != b]
        if places and len(moving) == 1:
            by_number = True
            place = moving[0]
            count = whole.factors[place] - one.factors[place]
            value = None if other.value is None or not count else other.value * other.factors[places[0]] / count
            other = replace(one, factors=(*one.factors[:place], count, *one.factors[place + 1 :]), value=value)
        shown.append(other)
    return shown, by_number


def _matched(seen: Sequence[list[Seen]], readings: Sequence[Reading], setting: Setting) -> tuple[list[Candidate], str]:
    """The terms of the three forwards, each beside the same term of the others; in words, what cannot be matched."""
    found: list[Candidate] = []
    trouble = ""
    shapes = [[each.shape for each in terms] for terms in seen]
    for shape in dict.fromkeys(each for terms in shapes for each in terms):
        each = [[term for term in terms if term.shape == shape] for terms in seen]
        whole, one, other = map(len, each)
        if whole == one == other:
            found += [
                _candidate([[term] for term in terms], place, readings, setting)
                for place, terms in enumerate(zip(*each, strict=True))
            ]
        elif _are_rows(whole, one, other, readings):
            found.append(_candidate(each, None, readings, setting))
        else:
            trouble = f"the loss has {whole}, {one} and {other} terms {shape[0]} in a batch and its parts"
            found += [
                Candidate(TermSpec(shape, place, How.PLAIN), (term,) * 3, (), (term.value,) * 3)
                for place, term in enumerate(each[0])
            ]
    return found, trouble


def _are_rows(whole: int, one: int, other: int, readings: Sequence[Reading]) -> bool:
    """Whether a loss has so many terms for every sample: they are the rows of one mean or sum."""
    rows = [sample_count(each.batch) for each in readings]
    return whole == one + other and one * rows[0] == whole * rows[1] and bool(one and other)


def _candidate(
    terms: Sequence[Sequence[Seen]], place: int | None, readings: Sequence[Reading], setting: Setting
) -> Candidate:
    """What is a count, a number or a constant among the factors of one term."""
    first = (terms[0][0], terms[1][0], terms[2][0])
    numbers = [each.number for each in readings]
    rule = next(listed_targets(readings[0].batch), None)
    listed = None if rule is None else [max(float(rule.count(each.batch)), 1.0) for each in readings]
    own: list[int] = []
    handed: list[int] = []
    moving: list[int] = []
    whole = False
    for at, values in enumerate(zip(*(each.factors for each in first), strict=True)):
        if place is None and first[0].divides and at == len(first[0].factors) - 1:
            # The items of a row are its own.
            continue
        if None not in numbers and not setting.only_shows:
            mine = [OWN_NUMBERS[number or 0.0] for number in numbers]
            if _in_proportion(values, mine):
                own.append(at)
                continue
            cut = [float(int(number or 0.0)) for number in numbers]
            if _in_proportion(values, numbers) or _in_proportion(values, cut):
                handed.append(at)
                whole = _in_proportion(values, cut)
                continue
        is_own = first[0].divides and at == len(first[0].factors) - 1
        # A loss function's own count is one, though it may be the same in every micro-batch.
        same = _is_near(values[0], values[1]) and _is_near(values[0], values[2])
        of_list = listed is not None and first[0].shape[2:][at][0] and list(values) == listed
        if not same or of_list or (is_own and not setting.apart):
            moving.append(at)
    divides = [flag for flag, _ in first[0].shape[2:]]
    counts = tuple(
        1 / _product([(divides[at], each.factors[at]) for at in moving])
        if moving and all(each.factors[at] for at in moving)
        else 0.0
        for each in first
    )
    sums = tuple(
        None if any(s.value is None for s in each) else math.fsum(s.value or 0.0 for s in each) for each in terms
    )
    spec = TermSpec(
        first[0].shape, place, How.MEAN if moving else How.PLAIN, tuple(moving), count=counts[0] if moving else 1.0
    )
    if handed or own:
        spec = replace(spec, handed=True, whole=whole, own=tuple(own), counts=tuple(handed), how=How.MEAN)
    return Candidate(spec, first, counts, sums)


def _with_values(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """Give what is left of the loss to the terms without a value, if they share their counts."""
    blank = [each for each in candidates if None in each.values]
    if not blank or len({each.counts for each in blank}) > 1:
        return candidates
    rest = tuple(
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates if each not in blank)
        for at, reading in enumerate(readings)
    )
    nothing = (0.0,) * len(rest)
    given = {id(each): rest if each is blank[0] else nothing for each in blank}
    return [replace(each, values=given.get(id(each), each.values)) for each in candidates]


def _tested(
    candidate: Candidate,
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int],
    tolerance: float,
    setting: Setting,
) -> Candidate:
    """Hold a term against its values: does it compose as its factors say."""
    spec, values, n = candidate.spec, candidate.values, candidate.counts
    whole = candidate.seen[0]
    if whole.router:
        return replace(candidate, spec=replace(spec, how=How.ROUTER, counts=(), rules=()))
    known = None not in values
    named = [rule for rule in whole.named if all(rule in each.named for each in candidate.seen)]
    if not setting.apart:
        tolerance = math.inf
    if spec.handed:
        sums = [(value or 0.0) * _number_of(seen, spec) for value, seen in zip(values, candidate.seen, strict=True)]
        rules: tuple[Items, ...] = ()
        if whole.total:
            rules, _ = matching_rules([each.total for each in candidate.seen], batches, ignored, named)
        trouble = "" if not known or _adds_up(sums, tolerance) else _COUPLED
        return replace(candidate, spec=replace(spec, rules=rules), trouble=trouble)
    if spec.counts:
        rules, times = matching_rules(n, batches, ignored, named)
        if rules and all(is_padded(rule, batches[0]) for rule in rules) and not setting.alone:
            # Over padding, too: a mean per micro-batch whatever the batch, as a router's is (Bamba's z-loss).
            return replace(candidate, spec=replace(spec, how=How.ROUTER, counts=()))
        if not setting.apart and whole.readable and (rules or whole.divides):
            return replace(candidate, spec=replace(spec, rules=rules, times=times))
        rows = [sample_count(batch) for batch in batches]
        if whole.rows and any(
            each.rows * rows[0] != whole.rows * n for each, n in zip(candidate.seen, rows, strict=True)
        ):
            why = "it is a mean over what its samples have, not over the samples"
            return replace(candidate, spec=replace(spec, how=How.PLAIN, counts=()), trouble=why)
        # Lists of targets are divided by 1 where they are empty.
        listed = bool(rules) and rules[0].entry is not None
        if not setting.apart or not (listed or _is_near(n[0], n[1] + n[2], 1e-5)):
            why = f"a factor of {whole.name} {_NO_COUNT}"
            return replace(candidate, spec=replace(spec, how=How.PLAIN, counts=()), trouble=why)
        if not whole.readable:
            return _unreadable(candidate, batches, ignored, tolerance)
        sums = [(value or 0.0) * count if count else 0.0 for value, count in zip(values, n, strict=True)]
        if known and not _adds_up(sums, tolerance):
            # One that stock divides by the number is weighed by its items all the same.
            kept = replace(spec, rules=rules, times=times) if setting.by_number and rules else None
            return replace(candidate, spec=kept or replace(spec, how=How.PLAIN, counts=()), trouble=_COUPLED)
        return replace(candidate, spec=replace(spec, rules=rules, times=times), trouble="" if known else _NOT_FOLLOWED)
    if known and values[0] == values[1] == values[2] and batches[1] is not batches[2]:
        # Zero says nothing, unless it is multiplied by zero.
        shows = bool(values[0]) or 0.0 in whole.factors
        return replace(candidate, spec=replace(spec, how=How.CONSTANT), shows=shows)
    if not whole.readable:
        return _unreadable(candidate, batches, ignored, tolerance)
    # A forward that draws at random has no parts: its sum adds up but for the noise.
    if (
        known
        and setting.apart
        and not whole.rows
        and any(values)
        and _adds_up([value or 0.0 for value in values], min(tolerance, 0.2))
    ):
        return replace(candidate, spec=replace(spec, how=How.SUM))
    return replace(candidate, trouble=f"{whole.name} is {How.PLAIN.value}")


_NOT_FOLLOWED = "the values of two of its terms could not be told from each other"


def _unreadable(
    candidate: Candidate, batches: Sequence[Mapping[str, Any]], ignored: Sequence[int], tolerance: float
) -> Candidate:
    """A term that hides what it divides by: it is weighed by the first rule by which its parts make the whole."""
    name, values = candidate.seen[0].name, candidate.values
    spec = replace(candidate.spec, how=How.PLAIN, counts=())
    trouble = f"{name} stands in the loss: what is under it cannot be read"
    if not name.startswith(OPAQUE) or None in values or batches[1] is batches[2]:
        return replace(candidate, spec=spec, trouble=trouble)
    for rule in dict.fromkeys(ways_of_counting(batches[0], ignored)):
        n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
        if len(n) == 3 and all(n) and _is_near(n[0], n[1] + n[2]):
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=True)]
            if _adds_up(sums, tolerance):
                spec = replace(spec, how=How.MEAN, rules=(rule,), count=n[0])
                return replace(candidate, spec=spec, trouble="" if name.startswith(DECLARED) else trouble)
    return replace(candidate, spec=spec, trouble=trouble)


def _number_of(seen: Seen, spec: TermSpec) -> float:
    divides = [flag for flag, _ in seen.shape[2:]]
    return 1 / _product([(divides[at], seen.factors[at]) for at in (spec.own or spec.counts)])


def _adds_up(sums: Sequence[float], tolerance: float) -> bool:
    return abs(sums[0] - sums[1] - sums[2]) <= tolerance * max(map(abs, sums))


def _in_proportion(values: Sequence[float], numbers: Sequence[float | None]) -> bool:
    """Whether values are the numbers handed in, perhaps times a constant (the classes of a smoothed loss)."""
    times = [value / number if number else 0.0 for value, number in zip(values, numbers, strict=True)]
    return bool(times[0]) and all(_is_near(each, times[0]) for each in times)


def _is_near(a: float, b: float | None, tolerance: float = 1e-6) -> bool:
    return b is not None and abs(a - b) <= tolerance * max(abs(a), abs(b))


def _coefficient(candidates: Sequence[Candidate], kind: str) -> float:
    """What a router's loss is multiplied by inside the loss."""
    seen = next((each.seen[0] for each in candidates if each.seen[0].router == kind), None)
    if seen is None:
        return 0.0
    return _product([(flag, value) for (flag, _), value in zip(seen.shape[2:], seen.factors, strict=True)])


def _rule_of_upstream(rules: Sequence[Items], window: Sequence[Mapping[str, Any]], setting: Setting) -> Items | None:
    """The rule that counts a window as the installed release does, whose number the loss was written for."""
    for rule in rules if setting.upstream_number else ():
        counted = [float(rule.count(batch)) for batch in window if rule.has_targets(batch)]
        if len(counted) == len(window) and sum(counted) == setting.upstream_number:
            return rule
    return None


# --- a trainer's own division for the window --------------------------------------------------------------------------


def _suspects(found: LossContract, whole: Reading, setting: Setting) -> list[tuple[int, int]]:
    """Constants that may hang on the accumulation steps: places of terms, and of their factors."""
    if setting.steps * setting.world_size == 1:
        return []
    terms = _terms_of(found, whole)
    return [
        (at, place)
        for at, (spec, seen) in enumerate(zip(found.terms, terms, strict=True))
        for place, value in enumerate(seen.factors)
        if place not in (*spec.counts, *spec.own) and value and not _is_near(abs(value), 1.0)
    ]


def _terms_of(found: LossContract, reading: Reading) -> list[Seen]:
    """The terms of a forward in the order of a contract's."""
    terms = reading.inside if found.inside else reading.terms
    return [[each for each in terms if each.shape == spec.shape][spec.place or 0] for spec in found.terms]


def _own_division(
    found: LossContract, suspects: Sequence[tuple[int, int]], whole: Reading, more: Reading, setting: Setting
) -> LossContract:
    """Which of the suspects moved with the steps that the arguments name: those are the trainer's division.

    A constant that does not move is a coefficient, unless it is 1/G or 1/W: that may be either.
    """
    steps, ranks = setting.steps, setting.world_size
    telling = {float(number) for number in (steps, ranks, steps * ranks) if number > 1}
    telling |= {1 / number for number in telling}
    terms, doubt = list(found.terms), found.doubt
    before, after = _terms_of(found, whole), _terms_of(found, more)
    for at, place in suspects:
        value, moved = before[at].factors[place], after[at].factors[place]
        divides = before[at].shape[2:][place][0]
        times = moved / value if divides else value / moved
        if _is_near(times, 2.0) or _is_near(times, 3.0):
            terms[at] = replace(terms[at], own=(*terms[at].own, place))
        elif not _is_near(value, moved):
            terms[at] = replace(terms[at], as_stock=True)
            doubt = doubt or "it is scaled by the accumulation steps in a way that is not recognised, and stays so"
        elif any(_is_near(value, number) for number in telling) and not (terms[at].handed and found.takes_world_size):
            terms[at] = replace(terms[at], as_stock=True)
            doubt = doubt or _either(value)
    for at, spec in enumerate(terms):
        kept = [
            value for place, value in enumerate(before[at].factors) if (at, place) in suspects and place not in spec.own
        ]
        flags = [
            before[at].shape[2:][place][0]
            for place in range(len(before[at].factors))
            if (at, place) in suspects and place not in spec.own
        ]
        product = _product(list(zip(flags, kept, strict=True)))
        if len(kept) > 1 and not spec.as_stock and any(_is_near(product, number) for number in telling):
            terms[at] = replace(spec, as_stock=True)
            doubt = doubt or _either(product)
    return replace(found, terms=tuple(terms), doubt=doubt)


def _either(value: float) -> str:
    return (
        f"the constant {value:g} in it may be a coefficient, or the trainer's own division for the window; "
        "it keeps the scale that the stock Trainer hands to the engine"
    )
