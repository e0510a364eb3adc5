"""The gradient and the loss of the global batch without accumulation, and their numerical noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.model import products_are_rounded
from hf_accum_fix.errors import ContractError, OptionsError, UnsupportedSetupError
from hf_accum_fix.evaluation import loss_alone
from hf_accum_fix.learning.contract import How, LossContract, Reduction
from hf_accum_fix.learning.look import out_of_memory
from hf_accum_fix.overrides.trainer_facts import data_ranks
from hf_accum_fix.router.router_loss import weighted_router_loss
from hf_accum_fix.trace.preserve import random_states, seed_generators
from hf_accum_fix.verification.gradients import Gradient, averaged, distance, dots, on_cpu, summed, take
from hf_accum_fix.verification.projection import named, projections_of
from hf_accum_fix.verification.sample import Collate, micro_batches

FULL = "full batch in one forward"
STREAMED = "streamed sample by sample, from sums and counts"
#: accelerate's mixed precisions.
MIXED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

#: Errors up to this many times the reference's noise count as noise: a split runs other kernels than the full batch.
FLOORS: Final = 8.0
#: The largest tolerance: a factor of 1.3 has three times this error.
WIDEST: Final = 0.1
#: Smallest tolerance, in machine epsilons of the coarsest dtype of parameters and loss.
_LEAST: Final = 2.0
#: Largest difference between two halves and the whole that counts as rounding at once, in machine epsilons.
_ROUNDINGS: Final = 16.0
#: Runs with different seeds of a loss that draws random numbers, to see whether they change it.
_DRAWS: Final = 32


@dataclass(frozen=True)
class Noise:
    """Difference of two computations of one gradient: its relative norm, and that in length along one of them.

    Roundings mostly cancel in the length.
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class Reference:
    """The expected gradient (on the CPU) and loss of every split of a global batch, without the router loss.

    ``decomposes``: whether parts of the batch add up to it; ``words``: how it was computed; ``least``: the smallest
    tolerance.
    """

    gradient: list[Tensor | None]
    loss: float
    noise: Noise
    words: str
    decomposes: bool
    least: float
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """The largest relative error that counts as exact."""
        return max(FLOORS * self.noise.floor, self.least)


@dataclass(frozen=True)
class Scene:
    """A copy of the trainer without accumulation, its trainable parameters, and the samples of one global batch.

    ``rows`` are this rank's samples, ``every`` those of all ranks.
    """

    trainer: Any
    parameters: Sequence[nn.Parameter]
    contract: LossContract
    collate: Collate
    rows: Sequence[Any]
    every: Sequence[Any]

    def compared(self, gradient: Gradient) -> list[Tensor | None]:
        """What is compared of a gradient: all of it, or its projections where an engine shards it."""
        sharded = is_sharded(self.trainer.accelerator)
        return [*self.projected(gradient).values()] if sharded else list(gradient)

    def projected(self, gradient: Gradient) -> dict[str, Tensor]:
        """The projections of a gradient, by parameter."""
        names = [name for name, each in named(self.trainer.model) if each.requires_grad]
        return projections_of(zip(names, gradient, strict=True))

    def count(self, rows: Sequence[Any]) -> float | None:
        """The items of some samples; None if the loss has no items."""
        items = self.contract.items
        return None if items is None else float(items.count(self.collate(list(rows))))

    def losses(self, inputs: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch, and the router loss in it, times its coefficient."""
        loss, outputs = loss_alone(self.trainer, self.trainer.model, inputs)
        if not isinstance(loss, Tensor) or loss.ndim > 0:
            raise ContractError(f"got {loss!r} as the loss of a batch; expected one number")
        router = weighted_router_loss(self.contract, outputs)
        return loss, None if router is None else router.to(loss.device)

    @property
    def world_size(self) -> int:
        """The ranks of the training."""
        return int(self.trainer.args.world_size)

    @property
    def eps(self) -> float:
        """Machine epsilon of the coarsest dtype of loss and parameters."""
        types = {self.contract.dtype, *(parameter.dtype for parameter in self.parameters)}
        return max(torch.finfo(dtype).eps for dtype in types)

    @property
    def rounding(self) -> float:
        """The same with matrix products, of which TF32 has as many digits as float16."""
        rounded = self.trainer.args.device.type == "cuda" and products_are_rounded(self.trainer.model)
        products = MIXED.get(self.trainer.accelerator.mixed_precision, torch.float16 if rounded else None)
        return max(self.eps, torch.finfo(products).eps) if products is not None else self.eps

    def backward(self, inputs: Any, weight: float = 1.0, number: int = 0) -> float:
        """Add the gradient of a batch's loss times a weight, and return the loss; both without the router loss.

        ``number`` is the seed of all random numbers.
        """
        seed_generators(number)
        loss, router = self.losses(inputs)
        main = loss if router is None else loss - router
        torch.autograd.backward(main * weight)
        return float(main.detach())

    def gradient(
        self, batches: Iterable[Any], weights: Sequence[float], *, wide: bool = True
    ) -> tuple[float, list[Tensor | None]]:
        """Loss and gradient of a weighted sum of batches; those of weight 0 do not run.

        ``wide``: sum in at least 32 bits, whatever the dtype of the parameters.
        """
        total, sums = 0.0, None
        for inputs, weight in zip(batches, weights, strict=True):
            if weight:
                total += weight * self.backward(inputs, weight)
                sums = summed(self.parameters, sums) if wide else None
        taken = take(self.parameters)
        return total, taken if sums is None else [
            own if more is None else more for own, more in zip(taken, sums, strict=True)
        ]

    def router(self, micro_batches: Sequence[Any]) -> tuple[list[Tensor | None], float]:
        """Gradient and value of the router loss by its convention: the mean over this rank's micro-batches.

        A single one with the whole global batch gives the exact loss.
        """
        total = 0.0
        for inputs in micro_batches:
            seed_generators(0)
            _, router = self.losses(inputs)
            assert router is not None
            part = router / len(micro_batches)
            torch.autograd.backward(part)
            total += float(part.detach())
        return take(self.parameters), total


@dataclass(frozen=True)
class SceneSplit:
    """A split of this rank's samples: ``per_device`` samples x ``steps`` accumulation steps."""

    scene: Scene
    per_device: int
    steps: int

    @property
    def count(self) -> int:
        """G, the micro-batches of this rank's window."""
        return -(-len(self.scene.rows) // self.per_device)

    def micro_batches(self) -> list[Any]:
        """The samples split and collated; the last micro-batch may be short."""
        return micro_batches(self.scene.rows, self.per_device, self.scene.collate)

    def items(self) -> list[float | None]:
        """The items of each micro-batch; None if the loss has no items."""
        items = self.scene.contract.items
        return [None if items is None else float(items.count(inputs)) for inputs in self.micro_batches()]

    def parts(self, total: float | None = None) -> list[float]:
        """The weight of each micro-batch in the mean over all items, times W; or over another total."""
        if total is None:
            total = (self.scene.count(self.scene.every) or 0.0) / data_ranks(self.scene.trainer)
        return [counted / total if counted else 0.0 for counted in self.items()]

    def averaged(self, weights: Sequence[float], *, wide: bool = False) -> Gradient:
        """The sum of this rank's micro-batches, each times its weight; the mean over ranks."""
        scene = self.scene
        own = scene.gradient(self.micro_batches(), weights, wide=wide)[1]
        return scene.compared(averaged(own, scene.parameters, scene.world_size))

    @property
    def narrow(self) -> set[torch.dtype]:
        """The 16-bit dtypes of the parameters; empty if the micro-batches cannot be summed again."""
        dtypes = {each.dtype for each in self.scene.parameters if each.dtype.itemsize < 4}
        return dtypes if self.scene.contract.items is not None else set()


def without_outputs(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``compute_loss`` that cannot return outputs, so that it accepts return_outputs."""

    @functools.wraps(compute_loss)
    def wrapped(*args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not return_outputs:
            return compute_loss(*args, **kwargs)
        try:
            found = compute_loss(*args, return_outputs=True, **kwargs)
        except (NotImplementedError, TypeError, ValueError):
            found = compute_loss(*args, **kwargs)
        return found if isinstance(found, tuple) else (found, None)

    return wrapped


def compute(scene: Scene, mode: str, own: int) -> Reference:
    """The reference of one global batch; ``own``: the user's samples per micro-batch, which fit in memory.

    Raises:
        OptionsError: for another mode.
        ContractError: if a loss that does not decompose would be streamed.
        UnsupportedSetupError: if the batch has no target, its gradient is random or not finite, or its noise would
            hide a factor of 1.3.
    """
    if mode not in ("auto", "full", "streamed"):
        raise OptionsError(f"got reference={mode!r}; expected one of auto, full, streamed")
    if scene.count(scene.every) == 0:
        raise UnsupportedSetupError("got a global batch without a target; expected one or more; check the label mask")
    scene.trainer.model.train()
    if mode != "streamed":
        try:
            return _full(scene)
        except RuntimeError as error:
            if mode == "full" or not out_of_memory(error):
                raise
            take(scene.parameters)
    return _streamed(scene, own)


def _full(scene: Scene) -> Reference:
    rows = scene.every
    loss, gradient, notes = _of_one_batch(scene, rows)
    _check(scene, gradient)
    noise, decomposes = Noise(0.0, 0.0), True
    parts = len(rows) > 1 and _adds_up(scene)
    if parts:
        noise = _difference(_summed(scene, (rows[::-2], rows[-2::-2]))[1], gradient)
        decomposes = _is_rounding(scene, noise, rows)
    if not parts or not decomposes:
        noise = _again(scene, rows, gradient)
        doubled = _doubled(scene, rows)
        # If samples are coupled, a batch that holds them twice differs by more than noise.
        if doubled.floor * FLOORS <= WIDEST:
            noise = max(noise, doubled, key=lambda each: each.floor)
    return Reference(gradient, loss, noise, FULL, decomposes, _LEAST * scene.eps, notes)


def _streamed(scene: Scene, own: int) -> Reference:
    contract, rows = scene.contract, scene.every
    if not _adds_up(scene):
        raise ContractError(
            f"got a loss that {contract} ({contract.reason}); expected a mean or a sum, to stream the reference by "
            "samples; set per_device_train_batch_size x gradient_accumulation_steps to fit in one forward"
        )
    notes = _of_one_batch(scene, rows[:own])[2]  # Not its gradient, which is as large as the model.
    loss, summed = _summed(scene, [[row] for row in rows])
    gradient = on_cpu(summed)
    del summed
    _check(scene, gradient)
    if own > 1:
        # Batches of two samples run other kernels, with other roundings.
        pairs = [rows[max(0, end - 2) : end] for end in range(len(rows), 0, -2)]
        noise = _difference(_summed(scene, pairs)[1], gradient)
        rounded = _is_rounding(scene, noise, rows[:2])
    else:
        noise, rounded = _difference(_summed(scene, [[row] for row in rows[::-1]])[1], gradient), True
    if not rounded:
        raise ContractError(
            f"got gradients of single samples and of pairs that differ by {noise.floor:.2g}; expected the same sum, to "
            "stream the reference; verify a global batch that fits in one forward"
        )
    return Reference(gradient, loss, noise, STREAMED, True, _LEAST * scene.eps, notes)


# --- noise ----------------------------------------------------------------------------------------------------------


def _is_rounding(scene: Scene, noise: Noise, rows: Sequence[Any]) -> bool:
    """Whether parts differ from the whole by rounding only.

    A batch that holds its samples twice measures the rounding: the mean of every term is the same, whatever it counts.

    Raises:
        UnsupportedSetupError: if the rounding would hide a factor of 1.3.
    """
    if noise.floor <= min(_ROUNDINGS * scene.rounding, WIDEST / FLOORS):
        return True
    doubled = _doubled(scene, rows)
    if noise.floor > FLOORS * doubled.floor:
        return False
    if noise.floor * FLOORS <= WIDEST:
        return True
    if doubled.floor <= 4 * _ROUNDINGS * scene.rounding:
        raise UnsupportedSetupError(
            f"got a noise floor of {noise.floor:.2g}; expected one that does not hide a factor of 1.3; verify in "
            "float32, or with a larger batch"
        )
    return False


def _doubled(scene: Scene, rows: Sequence[Any]) -> Noise:
    """Noise between half of the samples and a batch that holds the same samples twice."""
    halves = (rows[::-2], rows[-2::-2] or rows)
    half = max(halves, key=lambda each: scene.count(each) or 0.0)
    once = on_cpu(_of_whole(scene, half))
    # A sum doubles.
    weight = 0.5 if scene.contract.reduction is Reduction.SUM else 1.0
    return _difference(_of_whole(scene, [*half, *half], weight), once)


def _again(scene: Scene, rows: Sequence[Any], gradient: Gradient) -> Noise:
    """Noise between two runs of the same batch with different seeds.

    Raises:
        UnsupportedSetupError: if the gradient is random.
    """
    noise = _difference(_of_whole(scene, rows, number=1), gradient)
    if not noise.floor * FLOORS <= WIDEST:
        raise UnsupportedSetupError(
            f"the gradient is random: got two that differ by {noise.floor:.2g} for the same samples without dropout; "
            "expected one; switch masking, jitter and augmentation off"
        )
    return noise


def _of_whole(scene: Scene, rows: Sequence[Any], weight: float = 1.0, number: int = 0) -> list[Tensor | None]:
    scene.backward(scene.collate(list(rows)), weight, number)
    return take(scene.parameters)


def _of_one_batch(scene: Scene, rows: Sequence[Any]) -> tuple[float, list[Tensor | None], tuple[str, ...]]:
    """Loss and gradient of one batch, and notes; refuse a loss that is random without dropout.

    A loss that draws is run often, to find rare differences.
    """
    inputs = scene.collate(list(rows))
    seed_generators(0)
    before = random_states()
    loss = scene.backward(inputs)
    drew, gradient = before.drew(), on_cpu(take(scene.parameters))
    if not drew:
        return loss, gradient, ()
    found = []
    with torch.no_grad():
        for number in (0, *range(_DRAWS)):
            seed_generators(number)
            found.append(float(scene.losses(inputs)[0]))
    noise = abs(found[0] - found[1])
    other = max(found, key=lambda each: abs(found[0] - each))
    if noise > 1e-3 * abs(found[0]) or abs(found[0] - other) > 10 * noise + 1e-6 * abs(found[0]):
        raise UnsupportedSetupError(
            f"the loss is random: got {found[0]:.6g} and {other:.6g} for the same samples without dropout; expected "
            "one value; switch masking, jitter and augmentation off"
        )
    _again(scene, rows, gradient)
    return loss, gradient, (f"the model draws random numbers in its forward; {_DRAWS} seeds gave the same loss",)


# --- parts ----------------------------------------------------------------------------------------------------------


def _adds_up(scene: Scene) -> bool:
    """Whether parts weighted by their items add up to the whole: one mean or sum, apart from router losses."""
    contract = scene.contract
    groups = {each.group for each in contract.terms if each.how is not How.ROUTER}
    if contract.reduction is Reduction.WINDOW:
        # Its samples are coupled.
        return False
    return replace(contract, conclusive=True).exact and len(groups) <= 1 and contract.is_counted


def _summed(scene: Scene, groups: Sequence[Sequence[Any]]) -> tuple[float, list[Tensor | None]]:
    """Loss and gradient summed over groups of samples, each weighted by its part of the items."""
    counts = [scene.count(group) or 0.0 for group in groups]
    added = scene.contract.reduction is Reduction.SUM
    weights = [1.0 if added else count / sum(counts) for count in counts]
    return scene.gradient((scene.collate(list(group)) for group in groups), weights)


def _difference(one: Gradient, other: Gradient) -> Noise:
    products = dots(one, other)
    square = float(products[1, 1])
    if not square:
        return Noise(0.0, 0.0)
    return Noise(distance(one, other) / square**0.5, abs(float(products[0, 1]) / square - 1))


def _check(scene: Scene, gradient: Gradient) -> None:
    square = float(dots(gradient)[0, 0])
    if not math.isfinite(square):
        raise UnsupportedSetupError(
            "got a gradient of the full batch that is not finite (overflow or nan); expected a finite one; check the "
            "data, the dtype and the size of the loss"
        )
    if square == 0 and not scene.contract.has_router_loss:
        raise UnsupportedSetupError(
            "got a gradient of the full batch that is zero, as is any multiple of it; expected another; check the "
            "loss, or verify a later step: step=N, --step N"
        )
