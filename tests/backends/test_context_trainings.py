"""What is trained with samples that context parallelism cuts: by a step that copies them, by a loop, in other releases.

Its attention needs a GPU; another one takes its place (`tests.backends.sequence_parallel.OverRanks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from tests.backends import sequence_parallel as cut
from tests.backends.test_ulysses_trainings import ROWS, mixtral, sgd_with_router
from tests.logged import logged
from tests.numerics.parity import StockRecorder
from tests.ranks import on_ranks


def copying(trainer: Any, model: nn.Module, inputs: Any, *rest: Any) -> Any:
    """A step of one's own that hands on copies."""
    return Trainer.training_step(trainer, model, {key: each.clone() for key, each in inputs.items()}, *rest)


def copied() -> list[cut.Cut]:
    with mock.patch.object(StockRecorder, "training_step", copying, create=True):
        return [cut.under_context(cut.CUT, (2, 2), path, hands_number=False) for path in ("apply", "stock")]


@pytest.mark.slow
def test_a_step_that_copies_its_samples_does_not_cut_them_again() -> None:
    ours, stock = on_ranks(copied)[0]
    assert ours.error <= 4e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert stock.error > 0.1, stock


def routed(path: str) -> cut.Cut:
    return cut.under_context(
        cut.CUT, (ROWS, 2), path, adapt=mixtral, reference=sgd_with_router, options={"router_loss": "exact"}
    )


@pytest.mark.slow
def test_the_routers_loss_of_the_global_batch() -> None:
    ours = on_ranks(routed, "apply")[0]
    assert ours.error <= 4e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours


class Streamed(IterableDataset[Any]):
    """Samples that have no length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __getitem__(self, of_window: slice) -> list[Any]:
        return self.rows[of_window]


_whole = cut.samples


def streamed(path: str, dispatches: bool | None) -> tuple[cut.Cut, list[str]]:
    """With the warnings."""
    arguments = {"accelerator_config": {"dispatch_batches": dispatches}}
    with mock.patch.object(cut, "samples", lambda *given: Streamed(_whole(*given))), logged() as said:
        return cut.under_context(cut.CUT, (1, 2), path, arguments=arguments), said


@pytest.mark.slow
def test_a_stream_gives_ranks_that_share_a_sample_the_same() -> None:
    """accelerate's dispatcher, stock's default for a stream, gives each of them another, whose parts are mixed."""
    (stock, _), (ours, said), (dispatched, warned) = (
        on_ranks(streamed, *given)[0] for given in (("stock", None), ("apply", None), ("apply", True))
    )
    assert ours.error <= 4e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert any("dispatch_batches, the Trainer's default for a stream, is off" in each for each in said), said
    assert stock.error > 0.1 and dispatched.error > 0.1 and not dispatched.report["exact"], (stock, dispatched)
    assert any("got different samples on ranks that share one" in each for each in warned), warned
