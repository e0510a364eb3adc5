"""Micro-batches with other labels than most of the first window are averaged, and said: on one rank, and on two."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hf_accum_fix
from tests.losses.fates import SAME
from tests.losses.models import texts
from tests.numerics.heads import Batch, Sample, TokenModel, shifted_cross_entropy
from tests.numerics.heads.head import collate
from tests.ranks import on_ranks
from tests.trainings import Case, Cut, pieces, train

#: Which pairs of texts have a class instead of next tokens ("b"); of two ranks each gets every other pair.
TURNS = ("abab", "abba")


class Tasks(TokenModel):
    """Next tokens where labels have two axes; a class of each text where they have one, or another name."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
        logits, [labels] = self.logits(input_ids), [value for key, value in inputs.items() if "labels" in key]
        loss = F.cross_entropy(logits[:, 0, :4], labels) if labels.ndim == 1 else shifted_cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


#: Of next tokens, and of classes: upstream asks every micro-batch for "labels", or none.
KEYS = (("labels", "labels"), ("token_labels", "kind_labels"))


def mixed(turns: str, keys: tuple[str, str]) -> list[Sample]:
    def labels(place: int, sample: Sample) -> Sample:
        return {keys[1]: torch.tensor(place % 4)} if turns[place // 2] == "b" else {keys[0]: sample["labels"]}

    return [{"input_ids": each["input_ids"], **labels(place, each)} for place, each in enumerate(texts())]


def in_common(samples: Sequence[Sample]) -> Batch:
    """A window of both has no labels."""
    kinds = {(key, value.ndim) for sample in samples for key, value in sample.items()}
    shared = [key for key, axes in kinds if all(key in each and each[key].ndim == axes for each in samples)]
    return collate([{key: each[key] for key in shared} for each in samples])


def trained(turns: str, keys: tuple[str, str], cut: Cut, ranks: int = 1) -> tuple[float, bool, list[str]]:
    """How far the gradient is from the mean over the micro-batches of all ranks, and what was said."""
    window = mixed(turns, keys)

    def averaged(model: Any, batch: Batch, step: int) -> Tensor:
        parts = pieces(window, (cut[0], cut[1] * ranks))
        return torch.stack([model(**in_common(part))["loss"] for part in parts]).mean()

    case = Case("labels", averaged, Tasks, [window], collate=in_common)
    with tempfile.TemporaryDirectory() as folder, hf_accum_fix.apply():
        ours = train(case, cut, Path(folder))
    return ours.worst, bool(ours.exact), [words for _, words in ours.said]


@pytest.mark.parametrize("cut", [(2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("turns", TURNS)
def test_other_labels_are_averaged_and_said(turns: str, keys: tuple[str, str], cut: Cut) -> None:
    error, exact, said = trained(turns, keys, cut)
    assert error <= SAME and not exact and any("labels" in words for words in said)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("turns", TURNS)
def test_other_labels_are_averaged_and_said_on_two_ranks(turns: str, keys: tuple[str, str]) -> None:
    """Each rank may have labels of its own alone."""
    found = on_ranks(trained, turns, keys, (2, 2), 2)
    assert all(error <= SAME and not exact for error, exact, _ in found)
    assert any("labels" in words for _, _, said in found for words in said)
