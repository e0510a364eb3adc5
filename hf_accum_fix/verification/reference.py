"""The gradient and the loss of the whole global batch, without accumulation, and how exactly they can be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.errors import ContractError, OptionsError, UnsupportedSetupError
from hf_accum_fix.overrides.settling import loss_alone
from hf_accum_fix.verification.gradients import Gradient, distance, dots, on_cpu, take
from hf_accum_fix.verification.sample import Collate
from hf_accum_fix.verification.traceless import seed

FULL = "full batch in one forward"
STREAMED = "streamed sample by sample, from sums and counts"
MODES = ("auto", "full", "streamed")

#: Two halves that miss the whole by more than any rounding: the loss does not decompose.
_DOES_NOT_DECOMPOSE = 0.05


@dataclass(frozen=True)
class Reference:
    """What every cut of a global batch ought to give; a router's loss apart.

    Attributes:
        gradient: one for each trainable parameter, on the CPU.
        loss: of the full batch.
        floor: relative difference to the same in another order.
        words: how it was computed.
        decomposes: whether two halves of the batch add up to it.
        dtype: of the loss.
    """

    gradient: list[Tensor | None]
    loss: float
    floor: float
    words: str
    decomposes: bool
    dtype: torch.dtype


def _as_it_is(_: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Scene:
    """Everything a gradient is computed from.

    Attributes:
        trainer: an understudy, whose contract is settled.
        parameters: the trainable ones.
        contract: of its loss.
        collate: samples to a batch.
    """

    trainer: Any
    parameters: Sequence[nn.Parameter]
    contract: LossContract
    collate: Collate

    def count(self, rows: Sequence[Any]) -> float | None:
        """Items of some samples; None where the loss has none."""
        items = self.contract.items
        return None if items is None else float(items.count(self.collate(list(rows))))

    def losses(self, inputs: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch, and the router's part of it with its coefficient."""
        loss, outputs = loss_alone(self.trainer, self.trainer.model, inputs)
        if not isinstance(loss, Tensor) or loss.ndim > 0:
            raise ContractError(f"the loss of a batch is {loss!r}; needed is one number")
        router = self.contract.carried(outputs)
        return loss, None if router is None else router.to(loss.device)

    def backward(self, inputs: Any, weight: float = 1.0) -> float:
        """Add the gradient of a batch's loss times a weight, and return that loss; both without the router's."""
        seed(0)
        loss, router = self.losses(inputs)
        main = loss if router is None else loss - router
        torch.autograd.backward(main * weight)
        return float(main.detach())

    def router(
        self, micro_batches: Sequence[Any], share: Callable[[int], AbstractContextManager[None]] = _as_it_is
    ) -> tuple[list[Tensor | None], float]:
        """Gradient and value of the router's loss as it is meant: the mean over micro-batches, of this rank.

        Args:
            micro_batches: whose; the whole global batch as one is the whole's own.
            share: around the forward of each, by its place.
        """
        total = 0.0
        summed: list[Tensor | None] = [None] * len(self.parameters)
        for index, inputs in enumerate(micro_batches):
            seed(0)
            with share(index):
                _, router = self.losses(inputs)
            assert router is not None
            part = router / len(micro_batches)
            found = torch.autograd.grad(part, list(self.parameters), allow_unused=True)
            summed = [_sum(one, each) for one, each in zip(summed, found, strict=True)]
            total += float(part.detach())
        return summed, total


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of a device that is full."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def compute(scene: Scene, rows: Sequence[Any], mode: str) -> Reference:
    """The reference of one global batch.

    Args:
        scene: what it is computed from.
        rows: the samples of all ranks.
        mode: "full", "streamed", or "auto": streamed where the full batch does not fit.

    Raises:
        OptionsError: for another mode.
        ContractError: if a loss that does not decompose is to be streamed.
        UnsupportedSetupError: if the batch has no target, or its gradient is not finite.
    """
    if mode not in MODES:
        raise OptionsError(f"reference={mode!r}; needed is one of {', '.join(MODES)}")
    if scene.count(rows) == 0:
        raise UnsupportedSetupError("the global batch has not one target; needed is one, look at the label masking")
    scene.trainer.model.train()
    _refuse_randomness(scene, rows)
    if mode != "streamed":
        try:
            return _full(scene, rows)
        except RuntimeError as error:
            if mode == "full" or not out_of_memory(error):
                raise
            take(scene.parameters)
    return _streamed(scene, rows)


def _refuse_randomness(scene: Scene, rows: Sequence[Any]) -> None:
    """Refuse a loss that is another one each time although dropout is off."""
    inputs = scene.collate(list(rows[:2]))
    found = []
    with torch.no_grad():
        for number in (0, 0, 1):
            seed(number)
            found.append(float(scene.losses(inputs)[0]))
    noise, change = abs(found[0] - found[1]), abs(found[0] - found[2])
    if noise > 1e-3 * abs(found[0]) or change > 10 * noise + 1e-6 * abs(found[0]):
        raise UnsupportedSetupError(
            f"the loss is random: the same samples gave {found[0]:.6g} and {found[1 if noise > change else 2]:.6g} "
            "with dropout off; give the model a mode without noise (masking, jitter, augmentation), and verify that"
        )


def _full(scene: Scene, rows: Sequence[Any]) -> Reference:
    loss = scene.backward(scene.collate(list(rows)))
    gradient = on_cpu(take(scene.parameters))
    _refuse_infinite(gradient)
    decomposes = True
    if whole_of_parts := len(rows) > 1 and _adds_up(scene, rows):
        _summed(scene, (rows[::-2], rows[-2::-2]))
        floor = _difference(take(scene.parameters), gradient)
        decomposes = floor <= _DOES_NOT_DECOMPOSE
    if not whole_of_parts or not decomposes:
        scene.backward(scene.collate(list(rows[::-1])))
        floor = _difference(take(scene.parameters), gradient)
    return Reference(gradient, loss, floor, FULL, decomposes, scene.contract.dtype)


def _streamed(scene: Scene, rows: Sequence[Any]) -> Reference:
    contract = scene.contract
    if not _adds_up(scene, rows):
        raise ContractError(
            f"the reference cannot be streamed sample by sample, because the loss {contract} ({contract.reason}); "
            "verify with a per_device_train_batch_size x gradient_accumulation_steps that fits in one forward"
        )
    loss = _summed(scene, [[row] for row in rows])
    gradient = on_cpu(take(scene.parameters))
    _refuse_infinite(gradient)
    # Other kernels run on more than one sample at a time, and round otherwise.
    pairs = [rows[max(0, end - 2) : end] for end in range(len(rows), 0, -2)]
    try:
        _summed(scene, pairs)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        take(scene.parameters)
        _summed(scene, [[row] for row in rows[::-1]])
    return Reference(gradient, loss, _difference(take(scene.parameters), gradient), STREAMED, True, contract.dtype)


def _adds_up(scene: Scene, rows: Sequence[Any]) -> bool:
    """Whether the contract says how parts make the whole; of rules that fitted alike, when all count these alike."""
    contract = scene.contract
    if not replace(contract, conclusive=True).exact:
        return False
    if contract.conclusive or contract.items is None:
        return True
    rules = (contract.items, *contract.alternatives)
    return all(
        len({float(rule.count(batch)) for rule in rules}) == 1 for batch in (scene.collate([row]) for row in rows)
    )


def _summed(scene: Scene, groups: Sequence[Sequence[Any]]) -> float:
    """Add up the gradients of groups of samples, each with its share of the items, and return the loss of all."""
    counts = [scene.count(group) or 0.0 for group in groups]
    total = 0.0
    for group, count in zip(groups, counts, strict=True):
        weight = 1.0 if scene.contract.reduction is Reduction.SUM else count / sum(counts)
        if weight:
            total += weight * scene.backward(scene.collate(list(group)), weight)
    return total


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _difference(one: Gradient, other: Gradient) -> float:
    norm = float(dots(other)[0, 0]) ** 0.5
    return distance(one, [other], [1.0]) / norm if norm else 0.0


def _refuse_infinite(gradient: Gradient) -> None:
    if not torch.isfinite(dots(gradient)).all():
        raise UnsupportedSetupError("the gradient of the full batch is not finite; needed is one that can be compared")
