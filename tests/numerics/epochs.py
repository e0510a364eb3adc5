"""Whole trajectories over several epochs whose last window is short, beside plain SGD over the global batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from tests.numerics import parity
from tests.numerics.heads import Head, Sample
from tests.numerics.parity import Trained, recorder, trainer_of

#: Seven micro-batches of one sample on every rank: windows of three, three and one an epoch.
EPOCHS, WINDOWS, RATE = 3, 3, 1e-2


class Stream(IterableDataset[Sample]):
    """The samples without a length."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def epoch_samples(head: Head, world_size: int = 1) -> list[Sample]:
    """Seven samples for every rank."""
    return [*head.samples, *head.samples][: 7 * world_size]


def reference(head: Head, world_size: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """Plain SGD over the global batches in their order, in float64: parameter changes and the loss of each step."""
    samples = epoch_samples(head, world_size)
    windows = [samples[at : at + 3 * world_size] for at in range(0, len(samples), 3 * world_size)]
    return plain_sgd(head, windows * EPOCHS)


def plain_sgd(head: Head, windows: Sequence[Sequence[Sample]]) -> tuple[dict[str, Tensor], list[float]]:
    """Each window in one forward: the change of the parameters and the loss of each step."""
    return parity.plain_sgd(head.build(), lambda model, w: head.reference_loss(model, head.batch(w)), windows, RATE)


def train(head: Head, path: str, output: Path, *, stream: bool, world_size: int = 1) -> Trained:
    """All epochs."""
    samples = epoch_samples(head, world_size)
    given: dict[str, Any] = {"max_steps": EPOCHS * WINDOWS} if stream else {"num_train_epochs": EPOCHS, "max_steps": -1}
    # A dispatching loader would have to concatenate ragged samples.
    given["accelerator_config"] = {"dispatch_batches": False} if stream else None
    given |= {"per_device": 1, "accumulate": 3, "learning_rate": RATE}
    data = Stream(samples) if stream else samples

    def make() -> Any:
        return trainer_of(head, output, recorder(path), samples=data, **given)

    return parity.train(make, path)
