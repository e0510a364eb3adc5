"""Hand-written loops of one pattern, by accumulation windows and as stock: what `trainings` is of Trainers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_accum_fix import accumulation_windows, observations
from tests.numerics.heads import Batch, Sample, seeded
from tests.random_trainings.trainings import RATE, Case, Parameters, Training, Warnings

#: One optimizer step: ``(model, micro-batches)``, whose gradients are left in the model.
Windows = Callable[[nn.Module, Sequence[Batch], int], Iterator[None]]


def ours(model: nn.Module, batches: Sequence[Batch], steps: int) -> Iterator[None]:
    for window in accumulation_windows(batches, steps=steps):
        for batch in window:
            with window.micro_batch(model):
                window.loss(model, batch).backward()
        yield


def by_hand(model: nn.Module, batches: Sequence[Batch], steps: int) -> Iterator[None]:
    """As loops are written: the mean over micro-batches of what the model returns."""
    for start in range(0, len(batches), steps):
        window = batches[start : start + steps]
        for batch in window:
            (model(**batch)["loss"] / len(window)).backward()
        yield


def loop(
    case: Case, model: Callable[[], nn.Module], cut: Sequence[Sequence[Sequence[Sample]]], windows: Windows
) -> Training:
    """Train by a loop.

    Args:
        model: as it is trained, where that is not the case's, of the same parameters.
        cut: the samples of every micro-batch of every window; no window but the last has fewer micro-batches.
    """
    trained, parameters = seeded(model)(), Parameters()
    batches = [case.collate(samples) for window in cut for samples in window]
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    warnings, logger = Warnings(parameters), logging.getLogger("hf_accum_fix")
    observations.clear()
    logger.addHandler(warnings)
    told: dict[str, Any] = {"args": None, "state": None, "control": None, "model": trained}
    parameters.on_train_begin(**told)
    trained.train()
    try:
        parameters.on_step_begin(**told)
        for _ in windows(trained, batches, len(cut[0])):
            optimizer.step()
            optimizer.zero_grad()
            parameters.on_step_end(**told)
            if len(parameters.after) < len(cut):
                parameters.on_step_begin(**told)
    finally:
        logger.removeHandler(warnings)
    assert len(parameters.after) == len(cut)
    runs = observations.recorded()
    return Training(parameters.errors(case, seeded(case.model)()), warnings.said, runs[-1]["exact"] if runs else None)
