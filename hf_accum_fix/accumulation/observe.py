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

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.contract import ALIKE, SCALED_BESIDE, LossContract, Reduction, router_loss
from hf_accum_fix.accumulation.declared import holds_shards, least_rows
from hf_accum_fix.accumulation.evidence.by_number import reduced_by_number, summing_call
from hf_accum_fix.accumulation.evidence.by_parts import reduced_by_parts
from hf_accum_fix.accumulation.evidence.forwards import NUMBERS, Evidence, RouterPair, Seen, WatchedLoss
from hf_accum_fix.accumulation.evidence.own_loss import own_mean, reduced_by_trainer
from hf_accum_fix.accumulation.evidence.probe import (
    masked_parts,
    pairs_of,
    parts_of,
    target_count,
    telling_batch,
    with_telling_labels,
    without_first_label,
)
from hf_accum_fix.accumulation.evidence.rules import listed_targets, odds_of
from hf_accum_fix.accumulation.loss_calls import LossCalls
from hf_accum_fix.accumulation.noise import WithoutNoise
from hf_accum_fix.accumulation.preserve import undisturbed
from hf_accum_fix.errors import ContractError

#: One forward: (inputs, number or None) -> (loss, outputs); no outputs where the loss is a trainer's own, of which
#: nothing but the loss is known.
Forward = Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]]

logger = logging.getLogger("hf_accum_fix")


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
    more on one rank where the loss divides by the number by hand. Under shards two more where a ``compute_loss`` asks
    the base, or a ``compute_loss_func`` is used. Nothing is left behind (see `undisturbed`).

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
    inputs, stacked = telling_batch(window, again=again)
    sharded = holds_shards(model)
    # Heads with listed targets match them by loss functions, once a sample, and log others: neither has a gradient.
    graded = not sharded and next(listed_targets(inputs), None) is not None

    with undisturbed(model, *others, leave=leave, sharded=sharded) as state:

        def run(batch: Mapping[str, Any], number: float | None, setting: Any = nullcontext) -> Seen:
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
                return Seen(
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

        def tried(batch: Mapping[str, Any], number: float | None, setting: Any = nullcontext) -> Seen | None:
            """None where this loss cannot be run so; memory that ends in a micro-batch as it is ends it in training."""
            try:
                return run(batch, number, setting)
            except Exception as error:
                if out_of_memory(error) and not (stacked and batch is inputs):
                    raise
                logger.debug("a loss was not observed on a part of its batch", exc_info=True)
                return None

        with_gradient = False
        low, high, between = NUMBERS
        batch_norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
        normalised = f"BatchNorm in training mode ({batch_norm}): its statistics come from one micro-batch"
        number = low if passes_number else None
        # Two micro-batches of one sample that were put together may be more than a model can run.
        together = tried(inputs, number) if stacked else None
        if stacked and together is None:
            stacked = False
            inputs = with_telling_labels(max(window, key=target_count))
        if together is None and not sharded and (together := tried(inputs, number)) is None:
            # A loss may take a gradient itself (a penalty on it, adversarial noise).
            with_gradient = True
        first = together or run(inputs, number)
        if batch_norm is not None and not first.own:
            # Taken apart it may not run at all: the statistics of one sample may come from one number.
            return LossContract(Reduction.PLAIN, dtype=first.dtype, reason=normalised)
        second = run(inputs, high) if passes_number else first
        moves = abs(first.loss - second.loss) > 1e-6 * abs(first.loss)
        place = summing_call(first, second) if moves and not needs_number else None
        by_hand = moves and place is None
        others_seen: tuple[Seen | None, Seen | None] = (None, None)
        # Where samples have no target no number moves the loss: ranks with shards run as many forwards all the same.
        if by_hand or (sharded and needs_number and not first.own):
            third = tried(without_first_label(inputs), low) if needs_number else tried(inputs, None)
            looked = (run(inputs, between), third)
            others_seen = looked if by_hand else others_seen
        if more_steps is not None and not (by_hand and first.own):
            asked = (tried(inputs, number, more_steps), tried(inputs, None))
            others_seen = asked if first.own else others_seen
        one, other, sliced = parts_of(inputs, first, router_coefficients, again=again)
        parts: tuple[Seen | None, Seen | None] = (None, None)
        if world_size == 1 and one is inputs:
            parts = (first, first)
        elif not by_hand or needs_number or world_size == 1:
            parts = (tried(one, number), tried(other, number))
        if first.own and None in parts and not sharded and (pairs := pairs_of(inputs)) is not None:
            # The chosen rows may stand before the rejected ones.
            (one, other), sliced = pairs, True
            parts = (tried(one, number), tried(other, number))
        if None in parts and sliced and world_size == 1 and not by_hand:
            # What looks like rows may be none (three axes of positions beside three samples).
            one, other, sliced = masked_parts(inputs, first, router_coefficients)
            parts = (tried(one, number), tried(other, number))
        tolerance = 2e-2 if first.dtype.itemsize < 4 or (low_precision and sliced) else first.rounding
        if None in parts:
            one, other, sliced = inputs, inputs, False
        evidence = Evidence(
            (inputs, one, other),
            (first, *(part or first for part in parts)),
            sliced=sliced,
            tolerance=tolerance,
            configured=router_coefficients,
            world_size=world_size,
        )
        if moves:
            found = reduced_by_number(evidence, second, *others_seen, needs_number)
        elif first.own:
            found = reduced_by_trainer(evidence, len(window), *others_seen)
            if found.reason == ALIKE and not sharded:
                moved = [tried(batch, number, lambda: _moved(model)) for batch in evidence.batches]
                seen = tuple(each for each in moved if each is not None)
                told = own_mean(replace(evidence, seen=seen)) if len(seen) == len(moved) else None
                found = found if told is None else replace(told, divides=found.divides)
        else:
            found = reduced_by_parts(evidence)
    if batch_norm is not None and found.by_number:
        # Its trainer divides by the number, and goes on doing so.
        found = replace(found, conclusive=False, reason=normalised)
    if (made_of := found.made_of) is not None:
        if not made_of.counted and (made_of.rest or made_of.rest_terms):
            found = replace(found, beside=True, reason=SCALED_BESIDE)
        found = replace(found, made_of=replace(made_of, graded=graded))
    if (by_hand_rules := found.by_hand_rules) and found.conclusive and evidence.in_parts:
        found = replace(found, odds=odds_of(by_hand_rules[0], evidence.batches))
    least = least_rows(model)
    return replace(found, dtype=first.dtype, owned_by_trainer=first.own, random=first.random, least_rows=least)


def _forget(_: object) -> None:
    """Keep nothing of a tensor."""


def _forgotten(_: object) -> Tensor:
    raise ContractError("got a gradient inside of a forward that kept nothing for one; expected none: run it with one")


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left, however the error is spelled."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


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


def _rng_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=True)
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2], torch.get_rng_state().numpy().tobytes()  # type: ignore[index]
