"""Observing a loss: what it does with the number it is handed, how it composes, and what it counts.

Signatures, class names and declared loss types mislead, so the loss is run a few times, without gradient, on samples of
the first window. Three kinds of evidence are put together:

- *the number*: the loss with 8 and with 16.5 handed in. If it moves it is ``S / number + x``, and where no loss call
  tells S, a third and a fourth call, without a number and with 8.5, give the count it would use itself and tell whether
  it cuts the number to 8;
- *the parts*: for a mean over items  L(AB) n(AB) = L(A) n(A) + L(B) n(B),  whatever the items are, and for no other;
  for a sum that is divided by the number  S(AB) = S(A) + S(B);
- *the loss call*: thin wrappers (`loss_calls`) see which of cross_entropy, mse_loss, ctc_loss ... was called, with
  which targets, weights, ignored index and reduction.

Every way of counting that the inputs offer is held against this evidence; the first that fits it all is the rule.
"""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hf_accum_fix.accumulation.contract import Composition, Coupling, Divides, LossContract, Reduction, router_loss
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.loss_calls import LossCall, LossCalls
from hf_accum_fix.accumulation.preserve import Preserved
from hf_accum_fix.accumulation.random_states import random_states_kept
from hf_accum_fix.accumulation.window import Items, sample_count
from hf_accum_fix.errors import ContractError

#: One forward: (inputs, number or None) -> (loss, outputs); no outputs where the loss is a trainer's own, of which
#: nothing but the loss is known.
Forward = Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]]

logger = logging.getLogger("hf_accum_fix")

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout,
}  # fmt: skip
_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}
_RANDOM_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_}

#: Why a contract could not be observed yet: nothing was there to be learnt from.
NO_TARGET_SEEN = "no target was seen yet"

#: Why a loss is not weighed yet: its samples' losses are the same (a policy that is still its reference).
ALIKE = "the samples seen have one loss, which does not tell by what it is weighed"

#: Why a loss that no call shows is not settled: what fits counts the window's micro-batches differently.
SEVERAL_FIT = "several ways of counting fit the samples seen, and count the window's micro-batches differently"

#: Why a loss is not exact whose gradient is corrected by the items that its calls count.
SCALED_BESIDE = "a term stands beside a mean whose items are known only as it is made, and is scaled with it"

#: Windows that are observed before an inconclusive contract is taken as it is.
ATTEMPTS = 3

#: The numbers handed in: small, so that a cut fraction shows; not multiples, so that it shows in one call.
_NUMBERS = (8.0, 16.5, 8.5)
HIGH = _NUMBERS[1]


@dataclass(frozen=True)
class WatchedLoss:
    """One call of a loss function of torch, read (see `LossCall`)."""

    reduction: str
    value: float
    items: float
    targets: float
    weighted: bool
    ignore_index: int | None

    @classmethod
    def read(cls, call: LossCall) -> WatchedLoss:
        """Wait for the device, and read it."""
        counts = float(call.items), float(call.targets)
        return cls(call.reduction, float(call.value.detach()), *counts, call.weighted, call.ignore_index)

    @property
    def mean(self) -> bool:
        """Whether it returned a mean over items."""
        return self.reduction == "mean"


class WithoutNoise(TorchFunctionMode):
    """Make the forward a function of its inputs: no dropout, one noise for all rows.

    Args:
        dropout: let it drop, the same of every row: a term that is zero without it (R-Drop's) is then seen.
        alike: noise is a function of its shape, so that a row meets the same in every batch (points in a mask).
    """

    def __init__(self, *, dropout: bool = False, alike: bool = False) -> None:
        super().__init__()
        self.dropout, self.alike = dropout, alike

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.dropout and func is F.dropout and args[0].ndim > 1:
            kept = func(torch.ones_like(args[0][:1]), *args[1:], **{**kwargs, "inplace": False})
            return args[0] * kept
        if func in _DROPOUTS:
            args, kwargs = _without_dropout(args, kwargs, position=1, name="p")
        elif func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs, position=4, name="dropout_p")
        if self.alike and (func in _RANDOM or func in _RANDOM_IN_PLACE):
            with random_states_kept():
                torch.manual_seed(0)
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if func in _RANDOM and isinstance(out, Tensor) and out.ndim > 1:
            out = out[:1].expand_as(out).clone()
        elif func in _RANDOM_IN_PLACE and out.ndim > 1:
            out.copy_(out[:1].expand_as(out).clone())
        return out


def _without_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > position:
        return (*args[:position], 0.0, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


@contextmanager
def undisturbed(
    model: nn.Module, *others: object, leave: Iterable[object] = (), sharded: bool = False
) -> Iterator[Preserved]:
    """Run forwards as training does, without gradient, and leave everything as it was; arguments as `Preserved`'s."""
    stance = getattr(torch.compiler, "set_stance", None)
    eager: AbstractContextManager[Any] = stance("force_eager") if stance is not None else nullcontext()
    with (
        random_states_kept(),
        torch.no_grad(),
        eager,
        warnings.catch_warnings(),
        Preserved(model, *others, leave=leave, sharded=sharded) as state,
    ):
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
        model.train()
        yield state


#: Of a router's load-balancing loss and of its z-loss: the two values, or what they are multiplied by.
RouterPair = tuple[float, float]


@dataclass(frozen=True)
class _Seen:
    """One forward: its loss, the router losses its outputs carry, the loss calls in it, whether it drew at random.

    Attributes:
        own: a trainer computed the loss by itself.
    """

    loss: float
    dtype: torch.dtype
    router: RouterPair
    calls: tuple[WatchedLoss, ...]
    random: bool
    own: bool

    @property
    def rounding(self) -> float:
        """Relative error of what is computed from losses that are alike but for their last digits."""
        return 1e-2 if self.dtype.itemsize < 4 else 1e-5 if self.dtype.itemsize == 4 else 1e-6


def observe(
    call: Forward,
    window: Sequence[Mapping[str, Any]],
    model: nn.Module,
    *,
    device: torch.device,
    passes_number: bool,
    needs_number: bool = False,
    router_coefficients: RouterPair = (0.0, 0.0),
    world_size: int = 1,
    low_precision: bool = False,
    others: Sequence[object] = (),
    leave: Sequence[object] = (),
    more_steps: Callable[[], AbstractContextManager[Any]] | None = None,
    again: int = 0,
) -> LossContract:
    """Observe the contract of a loss on samples of one window.

    Every rank runs the same number of forwards whatever it sees, so that sharded models stay in step: one where a
    BatchNorm trains; six of a trainer's own loss; else four where a number is passed and three where none is, and two
    more on one rank where the loss divides by the number by hand. Nothing is left behind (see `undisturbed`).

    Args:
        call: one forward of the training's own loss.
        window: the micro-batches, as the loader gave them.
        model: the model whose modes, buffers, parameters and BatchNorm layers are looked after.
        device: where the number is put.
        passes_number: whether training hands the number over at all.
        needs_number: the loss is somebody's own and may not do without one.
        router_coefficients: what the configuration multiplies the router's ``aux_loss`` and ``z_loss`` by; 0.0: it
            names none.
        world_size: W; a trainer that scales its loss itself multiplies by it when it is given a number.
        low_precision: matrix products keep fewer than float32's digits, so two batch sizes agree to 2 % only.
        others: objects beside the model whose attributes are put back, such as the trainer.
        leave: objects that nothing is noted on, such as data sets.
        more_steps: a context in which the arguments say twice the accumulation steps, and the trainer three times those
            of the window; None: no ``compute_loss`` of its own could look.
        again: how often it was observed before in this window: then other samples are, taken apart in another way, and
            under dropout (see `WithoutNoise`).
    """
    inputs, stacked = _probe(window, again=again)
    sharded = holds_shards(model)
    # Heads with listed targets match them by loss functions, once a sample, and log others: neither has a gradient.
    graded = not sharded and next(listed_targets(inputs), None) is not None

    with undisturbed(model, *others, leave=leave, sharded=sharded) as state:

        def run(batch: Mapping[str, Any], number: float | None, setting: Any = nullcontext) -> _Seen:
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            before = _rng_state()
            handed = None if number is None else torch.tensor(number, device=device)
            try:
                with (
                    WithoutNoise(dropout=again > 0, alike=graded),
                    LossCalls(graded=graded) as calls,
                    setting(),
                    torch.set_grad_enabled(with_gradient or graded),
                    # Nothing goes back through it, and so nothing is kept.
                    nullcontext() if with_gradient else saved_tensors_hooks(_forget, _forgotten),
                ):
                    loss, outputs = call(dict(batch), handed)
                aux, z = (router_loss(outputs, kind) for kind in ("aux_loss", "z_loss"))
                return _Seen(
                    float(loss.detach()),
                    loss.dtype,
                    (0.0 if aux is None else float(aux.detach()), 0.0 if z is None else float(z.detach())),
                    tuple(map(WatchedLoss.read, calls.seen)),
                    # Dropout draws as much for any number of rows, and so the same in every forward.
                    not again and _rng_state() != before,
                    own=outputs is None,
                )
            finally:
                # The next forward starts where this one did.
                state.restore()
                model.train()

        def tried(batch: Mapping[str, Any], number: float | None, setting: Any = nullcontext) -> _Seen | None:
            """None where this loss cannot be run so; memory that ends in a micro-batch as it is ends it in training."""
            try:
                return run(batch, number, setting)
            except Exception as error:
                if out_of_memory(error) and not (stacked and batch is inputs):
                    raise
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
                return None

        with_gradient = False
        low, high, between = _NUMBERS
        batch_norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
        normalised = f"BatchNorm in training mode ({batch_norm}): its statistics come from one micro-batch"
        number = low if passes_number else None
        # Two micro-batches of one sample that were put together may be more than a model can run.
        together = tried(inputs, number) if stacked else None
        if stacked and together is None:
            stacked = False
            inputs = _with_telling_labels(max(window, key=_target_count))
        if together is None and not sharded and (together := tried(inputs, number)) is None:
            # A loss may take a gradient itself (a penalty on it, adversarial noise).
            with_gradient = True
        first = together or run(inputs, number)
        if batch_norm is not None and not first.own:
            # Taken apart it may not run at all: the statistics of one sample may come from one number.
            return LossContract(Reduction.PLAIN, dtype=first.dtype, reason=normalised)
        second = run(inputs, high) if passes_number else first
        moves = abs(first.loss - second.loss) > 1e-6 * abs(first.loss)
        place = _summing_call(first, second) if moves and not needs_number else None
        by_hand = moves and place is None
        others_seen: tuple[_Seen | None, _Seen | None] = (None, None)
        if by_hand:
            third = tried(_without_first_label(inputs), low) if needs_number else tried(inputs, None)
            others_seen = (run(inputs, between), third)
        if more_steps is not None and not (by_hand and first.own):
            asked = (tried(inputs, number, more_steps), tried(inputs, None))
            others_seen = asked if first.own else others_seen
        one, other, sliced = _parts(inputs, first, router_coefficients, again=again)
        parts: tuple[_Seen | None, _Seen | None] = (None, None)
        if world_size == 1 and one is inputs:
            parts = (first, first)
        elif not by_hand or needs_number or world_size == 1:
            parts = (tried(one, number), tried(other, number))
        if first.own and None in parts and not sharded and (pairs := _pairs(inputs)) is not None:
            # The chosen rows may stand before the rejected ones.
            (one, other), sliced = pairs, True
            parts = (tried(one, number), tried(other, number))
        if None in parts and sliced and world_size == 1 and not by_hand:
            # What looks like rows may be none (three axes of positions beside three samples).
            one, other, sliced = _masked_parts(inputs, first, router_coefficients)
            parts = (tried(one, number), tried(other, number))
        tolerance = 2e-2 if first.dtype.itemsize < 4 or (low_precision and sliced) else first.rounding
        if None in parts:
            one, other, sliced = inputs, inputs, False
        evidence = _Evidence(
            (inputs, one, other),
            (first, *(part or first for part in parts)),
            sliced=sliced,
            tolerance=tolerance,
            configured=router_coefficients,
            world_size=world_size,
        )
        if moves:
            found = _by_number(evidence, second, *others_seen, needs_number)
        elif first.own:
            found = _owned(evidence, len(window), *others_seen)
            if found.reason == ALIKE and not sharded:
                moved = [tried(batch, number, lambda: _moved(model)) for batch in evidence.batches]
                seen = tuple(each for each in moved if each is not None)
                told = _owned_mean(replace(evidence, seen=seen)) if len(seen) == len(moved) else None
                found = found if told is None else replace(told, divides=found.divides)
        else:
            found = _by_parts(evidence)
    if batch_norm is not None and found.by_number:
        # Its trainer divides by the number, and goes on doing so.
        found = replace(found, conclusive=False, reason=normalised)
    if (made_of := found.made_of) is not None:
        if not made_of.counted and (made_of.rest or made_of.rest_terms):
            found = replace(found, beside=True, reason=SCALED_BESIDE)
        found = replace(found, made_of=replace(made_of, graded=graded))
    return replace(found, dtype=first.dtype, owned_by_trainer=first.own, random=first.random)


def _forget(_: object) -> None:
    """Keep nothing of a tensor."""


def _forgotten(_: object) -> Tensor:
    raise ContractError("got a gradient inside of a forward that kept nothing for one; expected none: run it with one")


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left, however the error is spelled."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


@dataclass(frozen=True)
class _Evidence:
    """What was run of a loss: a batch, its two parts, and what each showed.

    Attributes:
        batches: the batch and its two parts; the same one three times where it cannot be taken apart.
        seen: their forwards.
        sliced: the parts are rows of the batch.
        tolerance: relative, of two losses that are the same.
        configured: coefficients of the router losses.
        world_size: W.
    """

    batches: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    seen: tuple[_Seen, ...]
    sliced: bool
    tolerance: float
    configured: RouterPair
    world_size: int

    @property
    def whole(self) -> _Seen:
        return self.seen[0]

    @property
    def in_parts(self) -> bool:
        """Whether the parts are parts, and their losses numbers."""
        return self.batches[1] is not self.batches[0] and all(np.isfinite(each.loss) for each in self.seen)

    def without(self, coefficients: RouterPair) -> list[float]:
        """The losses without the router's."""
        return [each.loss - _weighed(coefficients, each.router) for each in self.seen]

    def adds_up(self, losses: Sequence[float], rest: float = 0.0) -> bool:
        """Whether the parts' losses are the batch's, each with the same ``rest`` in it."""
        error = losses[1] + losses[2] - losses[0] - rest
        return abs(error) <= self.tolerance * max(abs(loss) for loss in losses)


def divides_by(ratio: float, *, with_number: bool) -> Divides:
    """How a trainer divides its loss for the window, from what `observe`'s ``more_steps`` multiply it by."""
    if abs(ratio - 1) < 1e-4 and not with_number:
        return Divides.NEVER
    # By a number of its own, that no window changes, is by the arguments' too.
    if min(abs(ratio - 1), abs(ratio - 1 / 2)) < 1e-3:
        return Divides.WITH_NUMBER_BY_ARGUMENT if with_number else Divides.BY_ARGUMENT
    if abs(ratio - 1 / 3) < 1e-3:
        return Divides.WITH_NUMBER if with_number else Divides.ALWAYS
    return Divides.UNKNOWN


def _owned(evidence: _Evidence, steps: int, more_steps: _Seen | None, without_number: _Seen | None) -> LossContract:
    """A trainer's own loss that does not move with the number, which labels without a target cannot show."""
    inputs, seen = evidence.batches[0], evidence.whole
    blind, finite = _label_count(inputs) == 0, np.isfinite(seen.loss)
    if (blind or not finite or seen.loss == 0.0) and isinstance(inputs.get("labels"), Tensor):
        rule = next(_rules(inputs, seen.calls))
        # Stock trains on the nan too, and the log shows it.
        reason = (
            NO_TARGET_SEEN if blind and finite else f"the loss of the samples seen is {seen.loss:g}, and shows nothing"
        )
        return LossContract(Reduction.NUMBER, rule, conclusive=False, reason=reason)
    divides = Divides.NEVER
    ratio = 1.0 if more_steps is None or seen.loss == 0.0 else more_steps.loss / seen.loss
    if without_number is not None and not _close(without_number.loss, seen.loss, 1e-4):
        came = _close(without_number.loss, seen.loss * steps, 1e-3)
        divides = divides_by(ratio, with_number=True) if came else Divides.UNKNOWN
    elif not abs(ratio - 1) < 1e-4:
        divides = divides_by(ratio, with_number=False)
    elif steps > 1 and any(_close(call.value, seen.loss * steps) for call in seen.calls if call.mean):
        divides = Divides.BY_ARGUMENT
    if divides is not Divides.UNKNOWN and (found := _owned_mean(evidence)) is not None:
        return replace(found, divides=divides)
    losses = [each.loss for each in evidence.seen]
    if evidence.in_parts and evidence.sliced and not evidence.whole.random and _alike(losses, evidence.tolerance):
        return LossContract(Reduction.PLAIN, divides=divides, conclusive=False, reason=ALIKE)
    reason = "the trainer computes the loss by itself and takes no item count"
    # A part without a target may be nan, and tells no ways of counting apart.
    conclusive = all(np.isfinite(each.loss) for each in evidence.seen) and 0 not in map(_label_count, evidence.batches)
    rules, means = list(_rules(inputs, seen.calls)), [c for c in seen.calls if c.mean and _close(c.value, seen.loss)]
    counted = _counting_as(means, rules, inputs)
    named = counted or [rule for rule in rules if means and _counts(rule, inputs) == means[0].targets]
    if not conclusive and named and divides is Divides.NEVER:
        reason = "the loss call is the mean over these items"
        return LossContract(
            Reduction.MEAN, named[0], alternatives=tuple(named), divides=divides, conclusive=False, reason=reason
        )
    coupling = _coupling(evidence)
    return LossContract(Reduction.PLAIN, divides=divides, coupling=coupling, conclusive=conclusive, reason=reason)


def _owned_mean(evidence: _Evidence) -> LossContract | None:
    """A trainer's own loss as a mean over items, or a sum of such means; None: it is none, or not for certain."""
    if not (evidence.in_parts and evidence.sliced) or evidence.whole.random:
        return None
    losses = [each.loss for each in evidence.seen]
    # A head that a trainer calls by itself averages its number of listed targets over ranks.
    alone = evidence.world_size == 1
    rules = [rule for rule in _rules(evidence.batches[0], evidence.whole.calls) if rule.entry is None or alone]
    fitting = [rule for rule in rules if _composes(rule, evidence.batches, losses, evidence.tolerance)]
    found = _reduced(evidence, losses, rules, fitting)
    if found.reduction is Reduction.SUM:
        return found
    if found.reduction is not Reduction.MEAN or not found.conclusive:
        return None
    if found.made_of is None:
        told = _told_apart(sorted(fitting, key=_how_far_fetched), evidence.batches, losses, evidence.tolerance)
        return replace(found, items=told[0], alternatives=told) if told else None
    return found


def _how_far_fetched(rule: Items) -> int:
    """In which order ways of counting that fit are taken: labels that may be ignored, samples, anything else.

    Every batch that may come has samples.
    """
    if rule.keys == ("labels",) and rule.ignore_index is not None:
        return 0
    return 2 if rule.keys else 1


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Move small parameters that train, so that samples with one loss get different ones; `Preserved` undoes it."""
    generator = torch.Generator().manual_seed(0)
    left = 2**22
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() <= min(left, 2**20):
                left -= parameter.numel()
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * (0.1 + 0.1 * parameter.abs().mean()))
    yield


def _coupling(evidence: _Evidence) -> Coupling:
    """What another cut does to the plain mean of a loss over micro-batches."""
    if not (evidence.in_parts and evidence.sliced) or evidence.whole.random:
        return Coupling.UNKNOWN
    losses = [each.loss for each in evidence.seen]
    if _composes(Items(), evidence.batches, losses, evidence.tolerance):
        return Coupling.SAMPLES
    rules = list(_rules(evidence.batches[0], evidence.whole.calls))
    if any(_composes(rule, evidence.batches, losses, evidence.tolerance) for rule in rules):
        return Coupling.ITEMS
    counted = _call_counts(evidence, [1.0 if call.mean else 0.0 for call in evidence.whole.calls])
    if counted is not None and _weighs_up(losses, counted, evidence.tolerance):
        return Coupling.ITEMS
    return Coupling.COUPLED


def _summed(at_low: float, at_high: float, cut: bool) -> float:
    """S of  L(k) = S / k + x  from the losses with the first two numbers, as handed in or cut to integers."""
    low, high, _ = _NUMBERS
    return (at_low - at_high) / (1 / low - 1 / (int(high) if cut else high))


def _summing_call(first: _Seen, second: _Seen) -> int | None:
    """Place of the loss call that made the sum which the number divides; it tells the count, and rows apart."""
    sums = [_summed(first.loss, second.loss, cut) for cut in (False, True)]
    sought = ((i, s) for i, c in enumerate(first.calls) for s in sums if c.reduction == "sum")
    return next((i for i, s in sought if _close(first.calls[i].value, s, first.rounding)), None)


def _rng_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=True)
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2], torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


def _by_number(
    evidence: _Evidence, second: _Seen, fourth: _Seen | None, third: _Seen | None, needs_number: bool
) -> LossContract:
    """The loss moves with the number: L(k) = S / k + x, with k as handed in or cut to an integer.

    The first two forwards were made with the first two numbers. The fourth, with the number between, is None where a
    loss call tells S, and so whether the number is cut. The third is without a number, or without the labels at
    position 0; it is None where neither was run.
    """
    low, _, between = _NUMBERS
    inputs, first = evidence.batches[0], evidence.whole
    sums = [call for call in first.calls if call.reduction in ("sum", "none")]

    def telling(summed: float) -> list[tuple[WatchedLoss, int]]:
        ways = dict.fromkeys((1, evidence.world_size))
        return [(each, w) for each in sums for w in ways if _close(each.value * w, summed, first.rounding)]

    cut = fourth.loss == first.loss if fourth is not None else not telling(_summed(first.loss, second.loss, False))
    summed = _summed(first.loss, second.loss, cut)
    rest = first.loss - summed / low
    if not cut and fourth is not None and not _close(summed / between + rest, fourth.loss, 10 * first.rounding):
        return LossContract(Reduction.PLAIN, reason="the loss moves with the number handed in, but is no sum over it")
    rules = list(_rules(inputs, first.calls))
    called = telling(summed)
    counts: list[float] = [call.items for call, _ in called]
    if not counts and not needs_number and third is not None and third.loss != rest:
        counts = [summed / (third.loss - rest), summed / (third.loss - rest) / evidence.world_size]
    fitting = next((near for count in counts if (near := _nearest(rules, inputs, count))), [])
    conclusive = bool(fitting or called)
    if not fitting:
        # No count to compare with: whether position 0 of "labels" moves the loss tells if they are shifted.
        of_labels = [rule for rule in rules if rule.keys == ("labels",)]
        conclusive = conclusive or (needs_number and any(rule.shift for rule in of_labels))
        # Up to its last digits, which may be others on another rank.
        shifted = needs_number and third is not None and _close(third.loss, first.loss, first.rounding)
        fitting = [rule for rule in of_labels if rule.shift == shifted] or of_labels or rules
    aux, z = (0.0, 0.0)
    if abs(rest) > 1e-5 * abs(summed / low) and any(first.router):
        aux, z = _coefficients(rest, first, evidence.configured)
    found = LossContract(
        Reduction.INTEGER if cut else Reduction.NUMBER,
        fitting[0],
        alternatives=tuple(fitting),
        router_coefficient=aux,
        router_z_coefficient=z,
        takes_world_size=called[0][1] > 1 if called and evidence.world_size > 1 else None,
        made_of=_of_sums(evidence, called[0][0] if called else None, (aux, z), fitting[0]),
        conclusive=conclusive,
        reason="the loss moves with the number handed in" + ("" if conclusive else ", what it counts was not seen"),
    )
    losses = evidence.without((aux, z))
    beside = losses[0] - summed / low
    beside = 0.0 if abs(beside) <= evidence.tolerance * abs(losses[0]) else beside
    if beside and any(evidence.configured) and not any(first.router):
        # A router's loss that the outputs do not carry: its mean over micro-batches is the convention.
        return found
    comparable = evidence.in_parts and evidence.sliced and not first.random
    if comparable and not evidence.adds_up(losses, beside):
        if not beside:
            reason = "the rows of a batch change one another's loss, so that no cut of it adds up to the whole"
            return replace(
                found, reduction=found.reduction if first.own else Reduction.PLAIN, beside=True, reason=reason
            )
        if (with_rest := _with_rest(evidence, called[0][0] if called else None, found, losses, rules)) is not None:
            return with_rest
        reason = "a term beside the sum that the number divides is no function of single items"
        return replace(found, beside=True, reason=reason)
    if beside and (first.own or not comparable or (called and found.made_of is None)):
        # A trainer's own is taken as often as there are micro-batches, since nothing divides it.
        return replace(found, beside=True, reason="a term stands beside the sum that the number divides")
    return found


def _of_sums(evidence: _Evidence, call: WatchedLoss | None, router: RouterPair, rule: Items) -> Composition | None:
    """How a loss that divides by the number is made of the call that made its sum; None: no call shows it."""
    whole = evidence.whole
    if call is None or call.reduction != "sum" or whole.own:
        return None
    place = whole.calls.index(call)
    values = [each.calls[place].value / _NUMBERS[0] if place < len(each.calls) else np.nan for each in evidence.seen]
    rests = [loss - value for loss, value in zip(evidence.without(router), values, strict=True)]
    made_of = Composition(tuple(float(at == place) for at in range(len(whole.calls))))
    limit = made_of.rounding(whole.dtype) * max(abs(each.loss) for each in evidence.seen)
    if not all(abs(rest - rests[0]) <= limit for rest in rests):
        return None
    return replace(made_of, rest=abs(rests[0]) > limit, counted=_counts(rule, evidence.batches[0]) == call.items)


def _with_rest(
    evidence: _Evidence,
    call: WatchedLoss | None,
    found: LossContract,
    losses: Sequence[float],
    rules: Sequence[Items],
) -> LossContract | None:
    """A sum that the number divides, as a call shows it, beside a mean over items of its own; None: it is no such."""
    whole = evidence.whole
    if call is None or call.reduction != "sum" or whole.own or len({len(each.calls) for each in evidence.seen}) > 1:
        return None
    place = whole.calls.index(call)
    rests = [each - seen.calls[place].value / _NUMBERS[0] for each, seen in zip(losses, evidence.seen, strict=True)]
    rest_terms = composing_rules(evidence.batches, rests, rules, evidence.tolerance)
    if not rest_terms or found.items is None:
        return None
    factors = tuple(float(at == place) for at in range(len(whole.calls)))
    terms = tuple(found.alternatives if factor else () for factor in factors)
    counted = _counts(found.items, evidence.batches[0]) == call.items
    made_of = Composition(factors, counted=counted, terms=terms, rest_terms=rest_terms)
    return replace(found, made_of=made_of, reason="a sum that the number divides, beside a mean over other items")


def _by_parts(evidence: _Evidence) -> LossContract:
    """The loss does not move with the number: a mean over something, a sum, or neither."""
    inputs, whole, configured = evidence.batches[0], evidence.whole, evidence.configured
    rules = list(_rules(inputs, whole.calls))
    listed = [rule for rule in rules if rule.entry is not None]
    if listed and not any(_counts(rule, inputs) for rule in listed):
        # Divided by 1 where there is none, such a loss looks like a sum.
        return LossContract(Reduction.MEAN, listed[0], conclusive=False, reason=NO_TARGET_SEEN)
    if not np.isfinite(whole.loss) or _close(whole.loss, _weighed(configured, whole.router), 1e-6):
        # Weighed by its items, of which there are none, such a window is an exact zero whatever the loss does.
        aux, z = (c if value else 0.0 for c, value in zip(configured, whole.router, strict=True))
        # Where every rule counts targets, they were taken out on the way.
        empty = min(_counts(rule, inputs) for rule in rules) == 0.0
        reason = NO_TARGET_SEEN if empty else "the loss of samples with targets is nan or zero, and shows nothing"
        return LossContract(Reduction.MEAN, rules[0], aux, z, conclusive=False, reason=reason)
    for coefficients in _router_terms(whole, configured):
        losses = evidence.without(coefficients)
        fitting = [rule for rule in rules if _composes(rule, evidence.batches, losses, evidence.tolerance)]
        if fitting:
            break
    found = _reduced(evidence, losses, rules, fitting)
    if found.reduction is Reduction.PLAIN:
        return replace(found, coupling=_coupling(evidence))
    return replace(found, router_coefficient=coefficients[0], router_z_coefficient=coefficients[1])


def _reduced(
    evidence: _Evidence, losses: Sequence[float], rules: Sequence[Items], fitting: Sequence[Items]
) -> LossContract:
    """How a loss is reduced that its loss calls and its parts are known of, without its router losses.

    Args:
        evidence: what was run.
        losses: of the batch and its parts, without the router's.
        rules: every way of counting there is.
        fitting: those by which the parts' losses compose to the batch's.
    """
    inputs, whole = evidence.batches[0], evidence.whole
    means = [call for call in whole.calls if call.mean]
    named = _counting_as([call for call in means if _close(call.value, losses[0])], rules, inputs)
    summed = any(call.reduction == "sum" and _close(call.value, losses[0]) for call in whole.calls)
    if evidence.in_parts:
        # A part without a target adds nothing to a sum, and weighs nothing in a mean.
        adds_up = _close(losses[1] + losses[2], losses[0], evidence.tolerance) and (summed or 0.0 not in losses)
        if (adds_up and (not fitting or summed)) or (summed and whole.random):
            return LossContract(Reduction.SUM, reason="the losses of two parts add up")
        made_of = _of_means(evidence, losses)
        if made_of is not None:
            counts = _call_counts(evidence, made_of.factors)
            assert counts is not None
            found = _counted_at_the_call(evidence, made_of, counts, rules, fitting)
            # Factors that were estimated may fit by chance where no rule counts as the calls do.
            if found is not None:
                return found
        if (of_terms := _of_terms(evidence, losses, rules)) is not None:
            return of_terms
        if not fitting and named and (whole.random or not evidence.sliced):
            # Noise differs from part to part, and masked labels may be inputs too (a decoder's): the call decides.
            reason = "the loss call is the mean over these items"
            return LossContract(Reduction.MEAN, named[0], alternatives=tuple(named), reason=reason)
        if not fitting:
            return LossContract(
                Reduction.PLAIN,
                reason="the loss of a batch is no weighted mean of the losses of its parts (in-batch negatives, the "
                "root of a mean, or several terms with different counts)",
            )
        # A loss made of several terms equals no call: what all calls count alike tells as well.
        alike = len({call.items for call in means}) == 1
        telling = named or (_counting_as(means, rules, inputs) if alike else [])
        agreed = [rule for rule in fitting if rule in telling]
        return LossContract(
            Reduction.MEAN,
            (agreed or fitting)[0],
            alternatives=tuple(agreed or fitting),
            conclusive=not means
            or (bool(agreed) and (whole.random or len(means) > 2))
            or fitting[0].width_of is not None,
            reason="the losses of two parts compose to the whole's as the mean over these items",
        )
    if summed:
        return LossContract(Reduction.SUM, reason="the loss call is a sum")
    if named:
        reason = "the loss call is the mean over these items"
        return LossContract(Reduction.MEAN, named[0], alternatives=tuple(named), conclusive=False, reason=reason)
    return LossContract(Reduction.PLAIN, conclusive=False, reason="the samples seen do not tell how it is reduced")


def _of_means(evidence: _Evidence, losses: Sequence[float]) -> Composition | None:
    """A loss as a combination of mean calls that reduce over the same items, and compose; None: it is none."""
    if len({len(each.calls) for each in evidence.seen}) > 1 or evidence.whole.random:
        return None
    values = np.array([[_mean_of(call) for call in each.calls] for each in evidence.seen]).reshape(len(losses), -1)
    wanted = np.array(losses)
    for factors, rest in _combinations(values, wanted):
        made_of = Composition(tuple(map(float, factors)))
        limit = made_of.rounding(evidence.whole.dtype) * max(map(abs, losses))
        used = np.where(factors == 0, 0, values)
        if not np.isfinite(factors).all() or not np.abs(used @ factors + rest - wanted).max() <= limit:
            continue
        counts = _call_counts(evidence, factors)
        if counts is None or not _weighs_up(list(wanted - rest), counts, evidence.tolerance):
            continue
        return replace(made_of, rest=abs(rest) > limit)
    return None


def _of_terms(evidence: _Evidence, losses: Sequence[float], rules: Sequence[Items]) -> LossContract | None:
    """A loss as a sum of mean calls over items of their own, and perhaps of a mean that no call shows.

    Each call has to compose by what it counts, a rule has to count that before a window is run, and a rest has to
    compose by a rule. None: it is no such sum.
    """
    calls = len(evidence.whole.calls)
    if not calls or {len(each.calls) for each in evidence.seen} != {calls} or evidence.whole.random:
        return None
    values = np.array([[_mean_of(call) for call in each.calls] for each in evidence.seen])
    wanted = np.array(losses)
    limit = evidence.tolerance * max(map(abs, losses))
    terms = [_rules_of_call(evidence, place, rules) for place in range(calls)]
    listed = tuple(rule for rule in rules if rule.entry is not None)
    # A part that lists nothing has nothing of such a term.
    shown = [not listed or any(_counts(rule, batch) for rule in listed) for batch in evidence.batches]
    sums = _sums_of_calls(values, wanted, [bool(each) for each in terms], bool(listed))
    others = (*_times_of_calls(evidence, values, wanted, terms, listed), *_means_of_calls(terms))
    for factors, rest_composes in (*sums, *others):
        made_of = Composition(tuple(map(float, factors)), terms=tuple(terms))
        rests = wanted - np.where(factors == 0, 0, values) @ factors
        near = made_of.rounding(evidence.whole.dtype) * max(map(abs, losses))
        if np.abs(rests - rests[0]).max() <= near:
            made_of = replace(made_of, rest=bool(abs(rests[0]) > near))
        elif rest_composes and evidence.sliced and np.abs(rests[shown]).min() > limit:
            # What is not made of any call is taken for a mean only where a list of targets is counted.
            offered = rules if factors.any() else listed
            found = composing_rules(evidence.batches, list(rests), offered, evidence.tolerance)
            made_of = replace(made_of, rest_terms=found)
            if not made_of.rest_terms:
                continue
        else:
            continue
        used = tuple(each if factor else () for each, factor in zip(terms, factors, strict=True))
        main = next((each for each in used if each), made_of.rest_terms)
        return LossContract(
            Reduction.MEAN,
            main[0],
            alternatives=main,
            made_of=replace(made_of, terms=used),
            reason="the loss is a sum of terms, each a mean over items of its own",
        )
    return None


def _sums_of_calls(values: Any, wanted: Any, countable: Sequence[bool], alone: bool) -> Iterator[tuple[Any, bool]]:
    """Factors of the calls that might make the losses, and whether a rest may stand beside them; the fullest first.

    Args:
        values: of the calls, a row for each forward.
        wanted: the losses.
        countable: whether a rule counts what a call reduces over.
        alone: a rest may be all there is.
    """
    places = [place for place, each in enumerate(countable) if each and np.isfinite(values[:, place]).all()]
    several = values.shape[1] > 1
    singles = [{place} for place in places if several]

    def taken(subset: Iterable[int]) -> Any:
        return np.array([float(place in subset) for place in range(values.shape[1])])

    for subset in [set(places), *singles] if places else []:
        yield taken(subset), False
    for one, other in itertools.permutations(places, 2):
        factors = taken([one])
        if values[0, other]:
            factors[other] = (wanted[0] - values[0, one]) / values[0, other]
            yield factors, False
    # A call that is only logged (a detector's count of boxes) may compose as the rest does: fewest calls first there.
    for subset in [*singles, set(places)] if places else []:
        yield taken(subset), True
    if alone:
        yield np.zeros(values.shape[1]), True
    if 0 < len(places) < len(wanted):
        factors = np.zeros(values.shape[1])
        factors[places] = np.linalg.lstsq(values[:, places], wanted, rcond=None)[0]
        if np.abs(factors).max() < 1e6:
            yield np.where(np.abs(factors) < 1e-9, 0.0, factors), False


def _means_of_calls(terms: Sequence[tuple[Items, ...]]) -> Iterator[tuple[Any, bool]]:
    """As `_sums_of_calls`, but the loss holds the mean of the calls over the same items: R-Drop's, of two draws."""
    for rules in dict.fromkeys(each for each in terms if each):
        alike = np.array([each == rules for each in terms])
        if alike.sum() > 1:
            yield alike / alike.sum(), True


def _times_of_calls(
    evidence: _Evidence, values: Any, wanted: Any, terms: Sequence[tuple[Items, ...]], listed: Sequence[Items]
) -> Iterator[tuple[Any, bool]]:
    """As `_sums_of_calls`, but the loss holds the calls several times: Mask2Former's takes its cross entropies twice.

    The one equation that a batch and its parts give is no evidence for just any factor; it is for a whole number, where
    the next one would be 50 roundings away.
    """
    rounding = 16 * torch.finfo(evidence.whole.dtype).eps * max(map(abs, wanted))
    for rule in listed:
        whole, *parts = [_counts(rule, batch) for batch in evidence.batches]
        signed = np.array([whole, *(-each for each in parts)])
        others = [bool(each) and rule not in each for each in terms]
        once = float(signed @ values[:, others].sum(axis=1)) if any(others) else 0.0
        if abs(once) < 50 * rounding * whole:
            continue
        times = float(signed @ wanted) / once
        if abs(times - round(times)) * abs(once) <= rounding * whole:
            yield np.where(others, float(round(times)), 0.0), True


def _rules_of_call(evidence: _Evidence, place: int, rules: Sequence[Items]) -> tuple[Items, ...]:
    """The rules that count what a mean call reduces over, where it composes by that."""
    calls = [each.calls[place] for each in evidence.seen]
    counts = [call.items for call in calls]
    if not _weighs_up([_mean_of(call) for call in calls], counts, evidence.tolerance):
        return ()
    by_rule = {rule: [_counts(rule, batch) for batch in evidence.batches] for rule in rules}
    found = tuple(rule for rule in rules if by_rule[rule] == counts)
    if found or not calls[0].weighted:
        return found
    return tuple(_mixed(by_rule, counts))


def _mixed(by_rule: Mapping[Items, Sequence[float]], weights: Sequence[float]) -> Iterator[Items]:
    """What a call weighs its targets by, as a sum of rows listed for each sample and of samples.

    Every target of a list is matched, and has a weight of its own kind; the others share what is left of a sample's.
    """
    for rule, counts in by_rule.items():
        if rule.entry is None:
            continue
        rows = np.array([counts, by_rule[Items()]]).T
        factors, _, rank, _ = np.linalg.lstsq(rows, np.array(weights), rcond=None)
        # Samples with as many rows each do not tell the two apart.
        if rank == 2 and np.abs(rows @ factors - weights).max() <= 1e-5 * max(weights):
            # Weights in float32 have other last digits on another rank.
            of_rows, of_samples = (round(float(factor), 6) for factor in factors)
            yield Items(mix=((of_rows, rule), (of_samples, Items())))


def composing_rules(
    batches: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    rules: Sequence[Items] | None = None,
    tolerance: float = 1e-5,
) -> tuple[Items, ...]:
    """The rules by which the loss of a batch is the mean of its two parts' losses, positions of text among them.

    Args:
        batches: the batch and its parts.
        losses: of the three.
        rules: the ways of counting; None: all that the inputs offer.
        tolerance: relative, of two losses that are the same.
    """
    positions = [
        Items((key,), ignore_index=None)
        for key, value in batches[0].items()
        if isinstance(value, Tensor) and value.ndim > 1 and not value.is_floating_point()
    ]
    every = dict.fromkeys((*(_rules(batches[0], ()) if rules is None else rules), *positions))
    return _told_apart(
        [rule for rule in every if _composes(rule, batches, losses, tolerance)], batches, losses, tolerance
    )


def told_apart_in(rules: Sequence[Items], window: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every rule counts the same shares of a window, so that it does not matter which is the right one."""
    counts = [[_counts(rule, batch) for batch in window] for rule in rules]
    shares = [[count / (sum(each) or 1.0) for count in each] for each in counts]
    return all(abs(a - b) <= 1e-9 for each in shares for a, b in zip(each, shares[0], strict=True))


def _alike(losses: Sequence[float], tolerance: float) -> bool:
    """Whether the losses of a batch and its parts are too near to tell to 1 % by what they are weighed."""
    return 0.01 * (max(losses) - min(losses)) <= tolerance * max(map(abs, losses))


def _told_apart(
    rules: Sequence[Items], batches: Sequence[Mapping[str, Any]], losses: Sequence[float], tolerance: float
) -> tuple[Items, ...]:
    """The rules by which losses compose, if that tells them from others: two parts that are alike fit any rule."""
    if _alike(losses, tolerance):
        return ()
    shares = [_counts(rule, batches[1]) / _counts(rule, batches[0]) for rule in rules]
    return tuple(rules) if all(abs(share - shares[0]) <= 1e-9 for share in shares) else ()


def _combinations(values: Any, wanted: Any) -> Iterator[tuple[Any, float]]:
    """Factors of the calls, and a constant beside them, that might make the losses; the simplest first.

    Args:
        values: of the calls, a row for each forward.
        wanted: the losses.
    """
    runs, calls = values.shape
    units = [np.eye(calls)[place] for place in range(calls)]
    masks = [*units, *([np.ones(calls)] if calls > 1 else [])]
    usable = [mask for mask in masks if (values @ mask != 0).all() and np.isfinite(values @ mask).all()]
    yield from ((unit, 0.0) for unit in units)
    for mask in usable:
        yield mask * (wanted[0] / (values[0] @ mask)), 0.0
    if 1 < calls < runs and np.isfinite(values).all():
        factors = np.linalg.lstsq(values, wanted, rcond=None)[0]
        # Calls that compose as the loss does fit it by factors that all but cancel each other.
        if np.abs(values * factors).max() <= 10 * np.abs(wanted).max():
            yield factors, 0.0
    # A factor estimated beside a constant would fit whatever composes by the same items.
    yield from ((mask, float(wanted[0] - values[0] @ mask)) for mask in usable)


def _mean_of(call: WatchedLoss) -> float:
    """A call's mean over its items, whether it took it or not; nan for a sum."""
    if call.mean:
        return call.value
    return call.value / call.items if call.reduction == "none" and call.items else float("nan")


def _call_counts(evidence: _Evidence, factors: Sequence[float]) -> list[float] | None:
    """What the calls with a factor reduced over, in each forward; None where they differ or there are none."""
    counts = []
    for each in evidence.seen:
        if len(each.calls) != len(factors):
            return None
        items = {call.items for call, factor in zip(each.calls, factors, strict=True) if abs(factor) > 1e-12}
        if len(items) != 1:
            return None
        counts.append(items.pop())
    return counts


def _targets(evidence: _Evidence, factors: Sequence[float]) -> list[float]:
    """The targets of the first call with a factor, in each forward."""
    place = next(place for place, factor in enumerate(factors) if abs(factor) > 1e-12)
    return [each.calls[place].targets for each in evidence.seen]


def _weighs_up(losses: Sequence[float], counts: Sequence[float], tolerance: float) -> bool:
    """Whether  L(AB) n(AB) = L(A) n(A) + L(B) n(B)  for counts given."""
    if 0.0 in counts:
        return False
    error = losses[0] - (losses[1] * counts[1] + losses[2] * counts[2]) / counts[0]
    return abs(error) <= tolerance * max(abs(loss) for loss in losses)


def _counted_at_the_call(
    evidence: _Evidence,
    made_of: Composition,
    counts: Sequence[float],
    rules: Sequence[Items],
    fitting: Sequence[Items],
) -> LossContract | None:
    """A mean whose loss calls tell what it is made of: which rule counts their items before a window is run."""
    by_rule = {rule: [_counts(rule, batch) for batch in evidence.batches] for rule in rules}

    def per_item(rule: Items) -> float | None:
        if 0.0 in by_rule[rule]:
            return None
        ratios = [count / items for count, items in zip(counts, by_rule[rule], strict=True)]
        return ratios[0] if all(_close(ratio, ratios[0], 1e-9) for ratio in ratios) else None

    alike = [rule for rule in rules if by_rule[rule] == list(counts)]
    scaled = [rule for rule in rules if per_item(rule) is not None]
    if alike or scaled:
        agreed = tuple([rule for rule in alike or scaled if rule in fitting] or alike or scaled)
        reason = "the losses of two parts compose to the whole's as the mean over these items"
        made_of = replace(made_of, per_item=1.0 if alike else per_item(agreed[0]) or 1.0)
        return LossContract(Reduction.MEAN, agreed[0], alternatives=agreed, made_of=made_of, reason=reason)
    if made_of.rest or any(factor not in (0.0, 1.0) for factor in made_of.factors):
        return None
    # What tells a micro-batch without a target: the rule that counts targets as the call does, whatever they weigh.
    counting = [rule for rule in rules if by_rule[rule] == _targets(evidence, made_of.factors)]
    whole = [rule for rule in rules if not rule.shift and rule.mask is None]
    agreed = tuple(counting or fitting or whole or rules)
    return LossContract(
        Reduction.MEAN,
        agreed[0],
        alternatives=agreed,
        made_of=replace(made_of, counted=False),
        reason="the loss call is a mean over items, or weights, that are counted as it is made",
    )


# --- router terms --------------------------------------------------------------------------------------------------


def _router_terms(seen: _Seen, configured: RouterPair) -> list[RouterPair]:
    """What the coefficients of the router losses inside a loss that is otherwise a mean may be, likeliest first."""
    if not any(seen.router):
        return [(0.0, 0.0)]
    rests = [seen.loss - call.value for call in seen.calls if call.mean]
    if not rests:
        return [configured, (0.0, 0.0)]
    expected = _weighed(configured, seen.router)
    nearest = min(rests, key=lambda rest: abs(rest - expected))
    return [_coefficients(nearest, seen, configured) if abs(nearest) > 1e-6 * abs(seen.loss) else (0.0, 0.0)]


def _coefficients(rest: float, seen: _Seen, configured: RouterPair) -> RouterPair:
    """What router losses are multiplied by to make the rest of a loss: as configured, else the ``aux_loss`` alone.

    A loss in 16 bits cannot tell so small a rest from its own rounding: there it is as configured.
    """
    router, expected = seen.router, _weighed(configured, seen.router)
    rounded = seen.dtype.itemsize < 4 and abs(rest - expected) <= seen.rounding * abs(seen.loss)
    if rounded or _close(rest, expected, 1e-2):
        aux, z = configured
        return (aux if router[0] else 0.0, z if router[1] else 0.0)
    return (rest / router[0] if router[0] else 0.0, 0.0)


def _weighed(coefficients: RouterPair, router: RouterPair) -> float:
    return coefficients[0] * router[0] + coefficients[1] * router[1]


# --- ways of counting, and the evidence they are held against -----------------------------------------------------


def _rules(inputs: Mapping[str, Any], calls: Sequence[WatchedLoss]) -> Iterator[Items]:
    """Every way of counting that the inputs offer, the more telling first."""
    ignored = list(dict.fromkeys([c.ignore_index for c in calls if c.ignore_index is not None] + [-100]))
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim > 0}
    tokens = tensors.get("input_ids")
    if "start_positions" in tensors and tokens is not None and tokens.ndim > 1 and tokens.shape[1] in ignored:
        yield Items(("start_positions", "end_positions"), ignore_index=None, width_of="input_ids")
    labels = [key for key in tensors if "label" in key]
    labels.sort(key=lambda key: (key != "shift_labels", key != "labels"))
    for key in labels:
        value = tensors[key]
        if value.is_floating_point():
            yield Items((key,), ignore_index=None)
            continue
        mask = "attention_mask" if _same_shape(tensors.get("attention_mask"), value) else None
        for ignore in ignored:
            if value.ndim == 2 and key != "shift_labels":
                yield Items((key,), ignore, shift=True)
            yield Items((key,), ignore)
            if value.ndim == 2 and mask is not None:
                yield Items((key,), ignore, shift=True, mask=mask)
                yield Items((key,), ignore, mask=mask)
    yield from listed_targets(inputs)
    masks = [key for key in tensors if "mask" in key and (_is_mask(tensors[key]) or "observed" in key)]
    telling = [key for key in masks if "attention" not in key]
    yield from (Items((key,), ignore_index=0) for key in sorted(telling, key=lambda key: "past" in key))
    yield Items()
    yield from (Items((key,), ignore_index=0) for key in masks if key not in telling)


def listed_targets(inputs: Mapping[str, Any]) -> Iterator[Items]:
    """Ways of counting the rows of what is listed for each sample: the boxes of an image, or its masks."""
    for key, value in inputs.items():
        if "label" not in key or not isinstance(value, (list, tuple)) or not value:
            continue
        if isinstance(value[0], Tensor):
            yield Items((key,), None, entry="")
        elif isinstance(value[0], Mapping):
            yield from (Items((key,), None, entry=each) for each in value[0] if "label" in each)


def _is_mask(value: Tensor) -> bool:
    return not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())


def _counting_as(calls: Sequence[WatchedLoss], rules: Sequence[Items], inputs: Mapping[str, Any]) -> list[Items]:
    """The rules that count what one of these mean loss calls reduced over."""
    means = {call.items for call in calls if call.mean}

    def classes(rule: Items) -> int:
        # Of targets given as one number for each class the call may have taken the largest.
        value = inputs[rule.keys[0]] if rule.keys else None
        return value.shape[-1] if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 else 1

    return [rule for rule in rules if means & {(count := _counts(rule, inputs)), count / classes(rule)}]


def _counts(rule: Items, inputs: Mapping[str, Any]) -> float:
    return float(rule.count(inputs))


def _nearest(rules: Sequence[Items], inputs: Mapping[str, Any], count: float) -> list[Items]:
    """The rules whose count is nearest, if near enough to be that count but for rounding."""
    nearest = min(abs(_counts(rule, inputs) - count) for rule in rules)
    if nearest > max(0.25, 1e-4 * count):
        return []
    return [rule for rule in rules if abs(_counts(rule, inputs) - count) == nearest]


def _composes(
    rule: Items,
    batches: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    tolerance: float,
) -> bool:
    """Whether  L(AB) n(AB) = L(A) n(A) + L(B) n(B)."""
    counts = [rule.count(batch) for batch in batches]
    whole, one, other = (float(rule.divisor(count)) for count in counts)
    if not float(counts[0]) or 0.0 in (one, other):
        return False
    error = abs(losses[0] - (losses[1] * one + losses[2] * other) / whole)
    return error <= tolerance * max(abs(loss) for loss in losses)


def _close(a: float, b: float, tolerance: float = 1e-5) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


# --- the samples that are run -------------------------------------------------------------------------------------


def _probe(window: Sequence[Mapping[str, Any]], *, again: int = 0) -> tuple[dict[str, Any], bool]:
    """The micro-batch whose rows tell most ways of counting apart, and of those the one with the most targets.

    ``again``: one after it, if there is one.

    It has at least two samples if they can be had: micro-batches of one are put together by twos; whether they were.
    """
    ordered = sorted(window, key=_target_count, reverse=True)
    several: list[Mapping[str, Any]] = [inputs for inputs in ordered if sample_count(inputs) > 1]
    stacked = False
    if not several:
        pairs = [_stacked(ordered[0], other) for other in ordered[1:] or ordered]
        found = [pair for pair in pairs if pair is not None]
        several, stacked = [*found] or ordered[:1], bool(found)
    telling = sorted(map(_with_telling_labels, several), key=_ways_told_apart, reverse=True)
    # A row without a target would tell nothing.
    usable = [each for each in telling if bool(_ways_told_apart(each)) == bool(_ways_told_apart(telling[0]))]
    return usable[again % len(usable)], stacked


def _ways_told_apart(inputs: Mapping[str, Any]) -> int:
    """How many different shares of a batch its part of one row has, by all the ways of counting.

    None where it has no such part, or one of the two parts has no target.
    """
    if not _has_rows(inputs):
        return 0
    one = _rows(inputs, [_least_row(inputs)])
    counts = [(_counts(rule, one), _counts(rule, inputs)) for rule in _rules(inputs, ())]
    if counts[0][0] in (0.0, counts[0][1]):
        return 0
    return len({round(part / whole, 6) for part, whole in counts if whole})


def _with_telling_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Labels that tell rules apart.

    A target is put at position 0 and at a padded position of every row of token labels, and rows of one length lose a
    target in one of them: rules that shift, that heed the attention mask, and that count samples then differ.
    """
    inputs = dict(inputs)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point() and labels.shape[1] > 1:
        labels = labels.clone()
        valid = labels.amax(dim=1)
        fill = valid >= 0
        labels[:, 0] = torch.where(fill & (labels[:, 0] < 0), valid, labels[:, 0])
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            padded = (mask == 0) & (torch.arange(labels.shape[1], device=mask.device) > 0)
            first = padded & (padded.cumsum(dim=1) == 1)
            labels = torch.where(first & fill[:, None], valid[:, None].clamp(min=0), labels)
        inputs["labels"] = _with_unequal_rows(labels)
    return inputs


def _with_unequal_rows(labels: Tensor) -> Tensor:
    """Where -100 is in use and every row has as many targets, the last row loses its last one."""
    targets = labels != -100
    per_row = targets.sum(dim=1)
    if len(labels) < 2 or bool(targets.all()) or bool((per_row != per_row[0]).any()) or int(per_row[0]) < 3:
        return labels
    labels = labels.clone()
    labels[-1, int(targets[-1].nonzero()[-1])] = -100
    return labels


def _target_count(inputs: Mapping[str, Any]) -> float:
    """Targets of a micro-batch by the most telling way of counting there is."""
    return float(next(_rules(inputs, ())).count(inputs))


def _label_count(inputs: Mapping[str, Any]) -> int:
    labels = inputs.get("labels")
    return int((labels != -100).sum()) if isinstance(labels, Tensor) else 0


def _stacked(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Two micro-batches of one sample as one of two, padded on the right; None where that cannot be done safely."""
    result: dict[str, Any] = {}
    for key, value in one.items():
        mate = other.get(key)
        if isinstance(value, Tensor) and isinstance(mate, Tensor):
            if value.ndim == 0 or value.ndim != mate.ndim or len(value) != 1 or len(mate) != 1:
                return None
            if value.ndim == 2 or not value.is_floating_point():
                width = max(value.shape[-1], mate.shape[-1])
                fill = -100 if "label" in key else 0
                value, mate = (F.pad(row, (0, width - row.shape[-1]), value=fill) for row in (value, mate))
            if value.shape != mate.shape:
                return None
            result[key] = torch.cat([value, mate])
        elif isinstance(value, list) and isinstance(mate, list):
            result[key] = value + mate
        elif isinstance(value, (bool, str)) or value is None:
            result[key] = value
        else:
            return None
    return result


def _without_first_label(inputs: Mapping[str, Any]) -> dict[str, Any]:
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return dict(inputs)
    labels = labels.clone()
    labels[:, 0] = -100
    return {**inputs, "labels": labels}


def _parts(
    inputs: Mapping[str, Any], whole: _Seen, configured: RouterPair, *, again: int
) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """Two parts of a batch, and whether rows were taken apart; ``again``: so many rows on.

    Where rows cannot be taken apart (one sample, image patches without a row axis), the targets are: the labels of the
    other part are masked with what the loss call ignores. The batch itself, twice: neither can be done.
    """
    if _has_rows(inputs):
        least = _least_row(inputs)
        least = (least + again) % sample_count(inputs)
        others = [row for row in range(sample_count(inputs)) if row != least]
        return _rows(inputs, [least]), _rows(inputs, others), True
    return _masked_parts(inputs, whole, configured)


def _pairs(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Two parts of a batch whose second half stands beside its first, row by row; None: it has too few rows."""
    half, odd = divmod(sample_count(inputs), 2)
    if odd or half < 2:
        return None
    rows = [*range(1, half), *range(half + 1, 2 * half)]

    def taken(rows: list[int]) -> dict[str, Any]:
        # What has a row for each pair is taken by pairs.
        each = {key: value for key, value in inputs.items() if _length(value) == half}
        every = {key: value for key, value in inputs.items() if key not in each}
        return {**_rows(every, rows), **_rows(each, [row for row in rows if row < half])}

    return taken([0, half]), taken(rows)


def _length(value: Any) -> int | None:
    """Rows of a value; None: it has none."""
    if isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0):
        return len(value)
    return None


def _masked_parts(
    inputs: Mapping[str, Any], whole: _Seen, configured: RouterPair
) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """The parts of a batch whose rows cannot be taken apart: the same rows, each with some of the targets."""
    labels = inputs.get("labels")
    losses = [whole.loss - _weighed(coefficients, whole.router) for coefficients in _router_terms(whole, configured)]
    calls = [c for c in whole.calls if any(_close(c.value, loss) for loss in losses)]
    ignored = [c.ignore_index for c in calls if c.ignore_index is not None]
    if ignored and isinstance(labels, Tensor) and labels.numel() > 1 and not labels.is_floating_point():
        order = (labels != ignored[0]).flatten().cumsum(0).view_as(labels)
        first_third = order <= (order.max() // 3).clamp(min=1)
        one, other = (torch.where(keep, labels, ignored[0]) for keep in (first_third, ~first_third))
        return {**inputs, "labels": one}, {**inputs, "labels": other}, False
    return inputs, inputs, False


def _has_rows(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch can be taken apart: more than one sample, and every input has as many rows."""
    rows = sample_count(inputs)
    return rows > 1 and all(_is_plain(value) and len(value) == rows for value in _sized(inputs))


def _is_plain(value: Any) -> bool:
    """Whether a value can be indexed by rows: sparse and nested tensors cannot."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)


def _sized(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """The values that may have a row for each sample, also inside nested inputs."""
    for value in inputs.values():
        if isinstance(value, Mapping):
            yield from _sized(value)
        elif isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0):
            yield value


def _least_row(inputs: Mapping[str, Any]) -> int:
    """The row with the fewest labels, but some; the first where there are none.

    Of targets listed for each sample, the row whose number of them is furthest from the others'.
    """
    listed = next(listed_targets(inputs), None)
    if listed is not None:
        targets = [_counts(listed, _rows(inputs, [row])) for row in range(sample_count(inputs))]
        return max(range(len(targets)), key=lambda row: abs(targets[row] - sum(targets) / len(targets)))
    labels = inputs.get("labels")
    rows = labels if isinstance(labels, Tensor) else [None] * sample_count(inputs)
    counts = [_label_count({"labels": row}) for row in rows]
    return min(range(len(counts)), key=lambda row: (counts[row] == 0, counts[row]))


def _rows(inputs: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    def taken(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _rows(value, rows)
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
            return value[rows]
        return type(value)(value[row] for row in rows) if type(value) in (list, tuple) else value

    return {key: taken(value) for key, value in inputs.items()}


def _same_shape(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape
