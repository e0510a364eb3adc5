"""What verify() costs: samples run, and memory in addition to the model's."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.verify.trainers import Regression, points, small

#: Of a layer, above what the first window watches, which is at most a megabyte.
WIDTH, LAYERS = 256, 32
LAYER_BYTES = 4 * WIDTH * WIDTH


class Live(TorchDispatchMode):
    """The bytes of tensors that were made since, and their highest number at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage() for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        found = func(*args, **(kwargs or {}))
        for each in tree_iter(found):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage not in self.seen and storage not in before:
                self.seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return found

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


class Deep(nn.Module):
    """Layers whose parameters outweigh all that runs through them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.down, self.up = nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.down(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.up(hidden)[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@pytest.mark.parametrize("reference", ["full", "streamed"])
def test_one_gradient_beside_the_models_own(reference: str, tmp_path: Path) -> None:
    """The reference, the gradient at hand, and of one layer at a time some rows in float64: 14 times its bytes."""
    rows = [{key: value.float() for key, value in each.items()} for each in points(4)]
    trainer = small(Deep(), tmp_path, rows, per_device=1)
    with Live() as live:
        report = verify(trainer, splits=[1, 2, 4], reference=reference)
    assert report.verdict.kind is Kind.EXACT
    gradients = live.peak / (LAYERS * LAYER_BYTES)
    assert 2 <= gradients < 2.5


class Counted(Regression):
    """Tells how many samples it is run on, with or without gradient; of more than `most` its device is full."""

    def __init__(self, ran: Any = None, most: int = 100) -> None:
        super().__init__()
        self.most, self.ran = most, ran

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if len(x) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.ran is not None:
            self.ran((torch.is_grad_enabled(), len(x)))
        return super().forward(x, labels)


def test_two_steps_for_each_split_and_two_for_the_reference(tmp_path: Path) -> None:
    samples: list[tuple[bool, int]] = []
    report = verify(small(Counted(samples.append), tmp_path, points(8)), splits=[1, 2, 4])
    assert report.verdict.kind is Kind.EXACT
    # The contract of each fixed split, and once more: two micro-batches, alone and joined; of four samples two alone,
    # in turn, and the rest. With one, two and four samples a micro-batch:
    by_ones, by_twos, by_fours = 1 + 1 + 2 + 4 + 2 * 4, 2 + 2 + 4 + 4 + 2 * 4, 4 + 4 + 8 + 2 * 4
    observed = by_ones + 2 * by_twos + by_fours
    assert sum(count for graded, count in samples if graded) == (2 * 3 + 2) * 8 + observed
    # Without gradient: whether the loss is random.
    assert sum(count for graded, count in samples if not graded) <= 3 * 2


def test_a_full_batch_that_does_not_fit_is_streamed_and_reported(tmp_path: Path) -> None:
    report = verify(small(Counted(most=4), tmp_path, points(8)))
    assert report.reference.startswith("streamed") and report.verdict_of("apply()").kind is Kind.EXACT
    found = {(each.mode, each.split): each.verdict for each in report.results}
    assert "cannot be run: CUDA out of memory" in found["stock", "8 x 1"].words
    assert "1 split without an answer" in report.verdict_of("apply()").words
