"""What cannot be verified, or cannot be exact, gets a clear verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.verify.trainers import Contrastive, Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")


def test_a_loss_that_is_random_with_dropout_off(tmp_path: Path) -> None:
    report = verify(small(Regression(noise=0.5), tmp_path, points(8)))
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "the loss is random" in report.verdict.words
    assert not report.results


def test_dropout_alone_is_turned_off_and_noted(tmp_path: Path) -> None:
    report = verify(small(Regression(dropout=0.5), tmp_path, points(8)), splits=[2, 8])
    assert report.verdict.kind is Kind.EXACT and "dropout was turned off for the comparison" in report.notes


def test_batch_norm_is_named(tmp_path: Path) -> None:
    report = verify(small(Regression(batch_norm=True), tmp_path, points(8)), splits=[2, 8])
    for mode in ("stock", "apply()"):
        verdict = report.verdict_of(mode)
        assert verdict.kind is Kind.OFF
        assert "BatchNorm in training mode (norm)" in verdict.words and "no split can equal" in verdict.words


def test_in_batch_negatives_are_not_decomposable(tmp_path: Path) -> None:
    report = verify(small(Contrastive(), tmp_path, points(8)), splits=[2, 8])
    for mode in ("stock", "apply()"):
        verdict = report.verdict_of(mode)
        assert verdict.kind is Kind.OFF
        assert "in-batch negatives" in verdict.words and "no split can equal the full batch" in verdict.words


class Rewindable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(points(20))


class OneWay(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rest = iter(points(20))

    def __iter__(self) -> Iterator[Any]:
        return self.rest


def test_a_stream_that_starts_anew(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, Rewindable(), max_steps=2), splits=[2, 8])
    assert report.verdict.kind is Kind.EXACT and report.samples == (8,)


def test_a_stream_that_cannot_is_refused_untouched_or_given_its_own_sample(tmp_path: Path) -> None:
    stream = OneWay()
    trainer = small(Regression(), tmp_path, stream, max_steps=2)
    refused = verify(trainer)
    assert (
        refused.verdict.kind is Kind.COULD_NOT_TELL
        and "pass some of its samples: samples=[...]" in refused.verdict.words
    )
    assert verify(trainer, [2, 8], samples=points(8)).verdict.kind is Kind.EXACT
    assert len(list(stream.rest)) == 20


def test_fewer_samples_than_a_global_batch(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(5)))
    # Two, two and one: the stock Trainer weighs the last one as much as the two before.
    assert report.verdict.kind is Kind.OFF and report.verdict_of("apply()").kind is Kind.EXACT
    assert report.samples == (5,)
    assert any("5 samples" in note and "fewer than the 8 requested" in note for note in report.notes)


def test_one_sample(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(1)))
    assert report.verdict.kind is Kind.EXACT and {each.split for each in report.results} == {"1 x 1"}


def test_no_labels(tmp_path: Path) -> None:
    without = [{"x": sample["x"]} for sample in points(8)]
    report = verify(small(Regression(), tmp_path, without))
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "without a loss" in report.verdict.words


def test_data_parallel(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, points(8))
    trainer.args._n_gpu = 2
    report = verify(trainer)
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "DataParallel" in report.verdict.words


def test_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small(Regression(), tmp_path, points(8))
    monkeypatch.setattr("hf_accum_fix.verification.verify.data_ranks", lambda _: 0)
    report = verify(trainer)
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "tensor-parallel" in report.verdict.words


def test_nothing_to_train(tmp_path: Path) -> None:
    report = verify(small(Regression().requires_grad_(False), tmp_path, points(8)))
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "trainable" in report.verdict.words
