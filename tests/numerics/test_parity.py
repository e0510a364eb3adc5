"""The promise on one rank: every head, every cut, by the patch and by the subclass, beside the float64 full batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_two_ranks import REDUCED
from tests.logged import Said
from tests.numerics.heads import HEADS, Head
from tests.numerics.heads.detection import LW_DETR
from tests.numerics.heads.head import of_class
from tests.numerics.heads.samples import boxes, images
from tests.numerics.heads.vision import frozen_batch_norm
from tests.numerics.parity import Step, contract_of, cut, reference_step, reference_windows, take_step

SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
#: The everyday tests run one sample to a micro-batch of a head of each reduction, "slow" that of the others, and the
#: first in several; the rest, which shows nothing new, is "thorough".
ONE, SEVERAL = (1, 8), (4, 2)
#: The everyday tests run these by the subclass as well, the others by the patch.
BY_SUBCLASS = ("llama", "bert-classes", "mixtral", "lora", "wav2vec2-ctc-sum", "func-with-mean", "no-kwargs")
BY_PATCH = [n for n, head in HEADS.items() if head.everyday and not head.in_zoo and n not in BY_SUBCLASS]


def every_cut() -> Iterator[Any]:
    """Every head and cut, as parameters."""
    for name, head in HEADS.items():
        for split in SPLITS:
            marks = [] if split == ONE and name in REDUCED else [pytest.mark.slow]
            stands_alone = head.in_zoo or not head.everyday
            if split not in (ONE, SEVERAL) or (stands_alone and split != ONE):
                marks = [pytest.mark.thorough]
            yield pytest.param(name, split, id=f"{name}-{split[0]}x{split[1]}", marks=marks)


def assert_same_step(step: Step, reference: Step, tolerance: float) -> None:
    """Parameter change, loss and gradient norm within a relative tolerance; a loss computed in float32 within 1e-6."""
    assert step.error(reference) <= tolerance
    assert step.loss == pytest.approx(reference.loss, rel=max(tolerance, 1e-6), abs=1e-12)
    assert step.norm == pytest.approx(reference.norm, rel=tolerance, abs=1e-12)


#: What stock raises where it takes no step: its ``loss *=`` changes what backward needs; what a loss function returns
#: for a micro-batch without a target has no gradient; a forward does not take the number.
STOCK_RAISES = (
    (RuntimeError, "has been modified by an inplace operation"),
    (RuntimeError, "does not require grad and does not have a grad_fn"),
    (TypeError, "got an unexpected keyword argument 'num_items_in_batch'"),
)


def is_wrong(head: Head, reference: Step, per_device: int, accumulate: int, output: Path) -> bool:
    """Whether the stock step is off by more than 0.1 %, or ends in one of the errors that stock is known for."""
    try:
        stock = take_step(head, head.samples, per_device, accumulate, "stock", output)
    except (RuntimeError, TypeError) as error:
        if any(isinstance(error, kind) and words in str(error) for kind, words in STOCK_RAISES):
            return True
        raise
    return stock.error(reference) > 1e-3


@pytest.mark.parametrize(("name", "split"), [*every_cut()])
def test_every_cut_takes_the_full_batch_step(name: str, split: tuple[int, int], tmp_path: Path) -> None:
    head, (per_device, accumulate) = HEADS[name], split
    reference = reference_step(head, cut(head.samples, per_device))
    if split == ONE:
        assert is_wrong(head, reference, per_device, accumulate, tmp_path) == head.stock_wrong
    patched = take_step(head, head.samples, per_device, accumulate, "apply", tmp_path)
    assert_same_step(patched, reference, head.tolerance)
    assert contract_of(patched).exact == head.exact
    if split != ONE or name not in BY_PATCH:
        assert_same_bits(patched, take_step(head, head.samples, per_device, accumulate, "trainer", tmp_path))


def assert_same_bits(patched: Step, subclass: Step) -> None:
    assert all(torch.equal(patched.change[key], subclass.change[key]) for key in patched.change)
    assert patched.loss == subclass.loss and patched.norm == subclass.norm


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_PATCH)
def test_the_subclass_takes_the_same_step(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    assert_same_bits(*(take_step(head, head.samples, *ONE, path, tmp_path) for path in ("apply", "trainer")))


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "uses-tensor"])
def test_patch_and_subclass_together_change_nothing_further(name: str, tmp_path: Path) -> None:
    from tests.numerics.parity import ClassRecorder

    head = HEADS[name]
    alone = take_step(head, head.samples, 2, 4, "trainer", tmp_path)
    both = take_step(head, head.samples, 2, 4, "apply", tmp_path, trainer_class=ClassRecorder)
    assert all(torch.equal(alone.change[key], both.change[key]) for key in alone.change)
    assert alone.loss == both.loss


@pytest.mark.parametrize("name", ["no-kwargs", "bert-classes", "llama-smoothing"])
def test_short_last_window(name: str, tmp_path: Path) -> None:
    """Eight samples as 2 x 3: windows of three micro-batches and of one, each its own global batch."""
    head = HEADS[name]

    def taken(path: str, steps: int) -> Step:
        return take_step(head, head.samples, 2, 3, path, tmp_path, steps=steps, learning_rate=1e-3)

    one, two = taken("apply", 1), taken("apply", 2)
    first, second = reference_windows(head, [cut(head.samples[:6], 2), [head.samples[6:]]], 1e-3)
    wanted = Step({key: 1e-3 * (first.change[key] + second.change[key]) for key in first.change}, 0.0, 0.0)
    assert one.norm == pytest.approx(first.norm, rel=1e-6)
    # The difference of two parameters keeps about 12 digits of a change of 1e-3.
    assert two.error(wanted) <= max(head.tolerance, 1e-11)
    assert 2 * two.loss == pytest.approx(first.loss + second.loss, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["llama", "bert-mlm", "no-kwargs", "llama-smoothing", "func-with-mean", "bert-answers"]
)
def test_window_without_a_target(name: str, tmp_path: Path, said: Said) -> None:
    head = HEADS[name]
    blank = [dict(sample) for sample in head.samples]
    for sample in blank:
        for key in ("labels", "start_positions", "end_positions"):
            if key in sample:
                sample[key] = torch.full_like(sample[key], -100 if key == "labels" else 99)
    step = take_step(head, [*head.samples, *blank, *blank], *SEVERAL, "apply", tmp_path, steps=3, learning_rate=0.0)
    log = step.trainer.state.log_history
    assert [entry["loss"] for entry in log if "loss" in entry][1:] == [0.0, 0.0]
    norms = next(callback.norms for callback in step.trainer.callback_handler.callbacks if hasattr(callback, "norms"))
    assert norms[1:] == [0.0, 0.0] and norms[0] > 0
    assert len(said("no target")) == 1


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if not head.exact])
def test_what_cannot_be_exact_is_said_once_and_never_called_exact(name: str, tmp_path: Path, said: Said) -> None:
    head = HEADS[name]
    step = take_step(head, [*head.samples, *head.samples], 4, 2, "trainer", tmp_path, steps=2)
    assert not contract_of(step).exact
    assert len(said("plain mean over micro-batches")) == 1
    assert math.isfinite(step.loss)


def test_the_sum_warns_that_it_grows(tmp_path: Path, said: Said) -> None:
    head = HEADS["wav2vec2-ctc-sum"]
    take_step(head, [*head.samples, *head.samples], 2, 4, "trainer", tmp_path, steps=2)
    assert len(said("grows with the global batch")) == 1


@pytest.mark.slow
def test_a_micro_batch_without_boxes_under_groups_of_queries(tmp_path: Path) -> None:
    """LW-DETR divides by boxes x groups, but by at least one box of all groups together."""

    def some_without(index: int, g: torch.Generator) -> dict[str, Tensor]:
        return {key: value[:0] if index in (2, 3) else value for key, value in boxes(index, g).items()}

    samples, config = images(some_without, 64, torch.float32), {**LW_DETR, "group_detr": 8}
    head = of_class("LwDetrForObjectDetection", config, samples, 1e-5, dtype=torch.float32, prepare=frozen_batch_norm)
    wanted = reference_step(head, [samples])
    for split in ((2, 4), (1, 8)):
        stock, patched = (take_step(head, samples, *split, path, tmp_path) for path in ("stock", "apply"))
        assert stock.error(wanted) > 0.01
        assert patched.error(wanted) <= head.tolerance and contract_of(patched).exact
