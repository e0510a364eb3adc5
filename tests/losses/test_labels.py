"""Micro-batches with other labels than most of the first window are averaged, and said; `test_two_ranks`: on two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses.fates import SAME
from tests.losses.models import texts
from tests.losses.verdicts import Verdict, by_trainer, faults
from tests.numerics.heads import Batch, Sample, TokenModel, shifted_cross_entropy
from tests.numerics.heads.head import collate
from tests.trainings import Case, Cut, pieces

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


def case(turns: str, keys: tuple[str, str], cut: Cut, ranks: int = 1) -> Case:
    """Its reference is the mean over the micro-batches of all ranks."""
    window = mixed(turns, keys)

    def averaged(model: Any, batch: Batch, step: int) -> Tensor:
        parts = pieces(window, (cut[0], cut[1] * ranks))
        return torch.stack([model(**in_common(part))["loss"] for part in parts]).mean()

    given = {"collate": in_common, "verdict": Verdict.AVERAGED, "tolerance": SAME, "cuts": (cut,)}
    return Case(f"{turns}-{keys[0]}", averaged, Tasks, [window], **given)


@pytest.mark.parametrize("cut", [(2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("keys", KEYS, ids=[keys[0] for keys in KEYS])
@pytest.mark.parametrize("turns", TURNS)
def test_other_labels_are_averaged_and_said(turns: str, keys: tuple[str, str], cut: Cut) -> None:
    row = case(turns, keys, cut)
    stock, ours = (by_trainer(row, cut, path) for path in ("stock", "apply"))
    assert not faults(ours, row, stock, cut) and any("labels" in words for _, words in ours.said)
