"""One training of a trainer of somebody else's, stock and patched, beside full-batch steps in plain torch."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix.overrides.session import SESSION
from tests.logged import logged
from tests.numerics.heads import Batch, Head, Sample, seeded
from tests.numerics.heads.samples import text
from tests.numerics.parity import Recorder, Trained, applied, moved, plain_sgd, trainable, trainer_of
from tests.trainings import computing

#: Samples of a micro-batch x micro-batches of a window: eight samples a step on one rank.
Cut = tuple[int, int]
WHOLE, PAIRS, SINGLES = (8, 1), (2, 4), (1, 8)

#: Relative error of a parameter change that rounding in float64 leaves at most.
FLOOR = 1e-9

#: The loss of a batch as the full batch has it.
FullLoss = Callable[[nn.Module, Batch], Tensor]


class Ordered(Trainer):
    """Takes the samples in their order."""

    _get_train_sampler = Recorder._get_train_sampler


def owning(loss: Callable[..., tuple[Tensor, Any]]) -> Any:
    """An `Ordered` one whose ``compute_loss`` is ``loss(trainer, base, model, inputs, number)``, with the outputs."""
    return computing(loss, Ordered)


def of_texts(model: type[nn.Module], **changes: Any) -> Head:
    """A model of eight ragged texts."""
    return replace(Head(model.__name__, seeded(model), text()), **changes)


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """A trainer of somebody else's with what it trains.

    Attributes:
        head: model, samples and collator.
        trainer: an `Ordered` one.
        loss: of the full batch; None: what the model returns for it.
        given: further arguments of the trainer.
        arguments: further TrainingArguments.
        cuts: where it means the same thing at every one of them.
        right: the stock Trainer is right at all of these cuts.
        floor: relative error that rounding leaves; larger where the library computes in float32.
    """

    name: str
    head: Head
    trainer: type[Trainer]
    loss: FullLoss | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = (PAIRS, SINGLES)
    right: bool = False
    floor: float = FLOOR


@dataclass(repr=False)
class Run(Trained):
    """What a training made of its model, or what it raised.

    Attributes:
        raised: by ``train()``.
        exact: what the observed contract calls itself; None: nothing was observed.
        warned: by this package.
    """

    raised: Exception | None
    exact: bool | None
    warned: list[str]

    @property
    def logged_loss(self) -> float:
        """Of the first step."""
        self._ended_well()
        return float(self.losses[0])

    def error(self, reference: Mapping[str, Tensor]) -> float:
        """Relative, of the parameter change."""
        self._ended_well()
        return super().error(reference)

    def same_bits(self, other: Run) -> bool:
        self._ended_well()
        ours, theirs = (trainable(run.trainer.model) for run in (self, other))
        return all(torch.equal(ours[name], value) for name, value in theirs.items())

    def _ended_well(self) -> None:
        if self.raised is not None:
            raise AssertionError(f"training ended with {type(self.raised).__name__}") from self.raised


def run(
    case: Case, cut: Cut, path: str, *, steps: int = 1, samples: Sequence[Sample] | None = None, **arguments: Any
) -> Run:
    """Train: path is "stock" or "apply"; what is raised is kept, so that it can be seen what moved before."""
    data = list(case.head.samples) * steps if samples is None else samples
    given = {"per_device": cut[0], "accumulate": cut[1], "max_steps": steps, **case.arguments, **arguments}
    torch.manual_seed(0)
    raised: Exception | None = None
    with tempfile.TemporaryDirectory() as output, applied(path), logged() as warned:
        trainer = trainer_of(case.head, Path(output), case.trainer, samples=data, given=case.given, **given)
        before = trainable(trainer.model)
        try:
            trainer.train()
        except Exception as error:
            if path == "stock":
                raise
            raised = error
    session = trainer.__dict__.get(SESSION)
    contract = getattr(session, "contract", None)
    exact = None if contract is None else contract.exact and not session.state.inexact
    return Run(moved(trainer.model, before), trainer, raised, exact, warned)


@functools.cache
def full_batch(case: Case, steps: int = 1) -> dict[str, Tensor]:
    """The parameter change of steps over the full batch, in plain torch."""
    torch.manual_seed(0)
    loss = case.loss or case.head.reference_loss
    windows = [case.head.samples] * steps
    return plain_sgd(case.head.build(), lambda model, samples: loss(model, case.head.batch(samples)), windows, 1.0)[0]


@functools.cache
def full_batch_loss(case: Case) -> float:
    """The loss of the full batch before any step."""
    torch.manual_seed(0)
    model = case.head.build()
    model.train()
    return float((case.loss or case.head.reference_loss)(model, case.head.batch(case.head.samples)).detach())
