"""What is trained with samples that context parallelism cuts: by a step that copies them, by a loop, in other releases.

Its attention needs a GPU; another one takes its place (`tests.backends.sequence_parallel.OverRanks`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix.engines.sample_shards import check_attention
from hf_accum_fix.errors import UnsupportedSetupError
from tests.backends import sequence_parallel as cut
from tests.backends.test_ulysses_trainings import ROWS, mixtral, sgd_with_router
from tests.logged import logged
from tests.numerics.parity import StockRecorder
from tests.ranks import on_ranks
from tests.releases.test_releases import run_in


def copying(trainer: Any, model: nn.Module, inputs: Any, *rest: Any) -> Any:
    """A step of one's own that hands on copies."""
    return Trainer.training_step(trainer, model, {key: each.clone() for key, each in inputs.items()}, *rest)


def copied(path: str) -> cut.Cut:
    with mock.patch.object(StockRecorder, "training_step", copying, create=True):
        return cut.under_context(cut.CUT, (2, 2), path, hands_number=False)


@pytest.mark.slow
def test_a_step_that_copies_its_samples_does_not_cut_them_again() -> None:
    ours, stock = (on_ranks(copied, path)[0] for path in ("apply", "stock"))
    assert ours.error <= 4e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert stock.error > 0.1, stock


def sample_means(_: Any, model: nn.Module, inputs: Any, *rest: Any, **given: Any) -> Tensor:
    logits, labels = model(**{**inputs, "labels": None})["logits"], inputs["labels"]
    losses, valid = cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != -100
    return ((losses * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


def by_samples() -> tuple[cut.Cut, list[str]]:
    with mock.patch.object(StockRecorder, "compute_loss", sample_means), logged() as said:
        return cut.under_context(cut.CUT, (1, 2), "apply"), said


@pytest.mark.slow
def test_a_mean_of_sample_means_is_not_called_exact() -> None:
    """Each rank divides by the targets that it holds of a sample."""
    ours, said = on_ranks(by_samples)[0]
    assert not ours.report["exact"] and any("counts samples, not the labels that were shifted" in each for each in said)


def routed(path: str) -> cut.Cut:
    reference = partial(sgd_with_router, whole=True)
    return cut.under_context(cut.CUT, (ROWS, 2), path, adapt=mixtral, reference=reference, router_loss="exact")


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


def streamed_loop() -> tuple[cut.Cut, list[str]]:
    # Each rank gets half of them.
    with (
        mock.patch.object(cut, "samples", lambda targets, count: Streamed(_whole(targets, 2 * count))),
        logged() as said,
    ):
        return cut.loop_under_context(cut.CUT, (1, 2), False), said


@pytest.mark.slow
def test_a_loop_whose_ranks_get_other_samples_is_told() -> None:
    """Its loader was made before."""
    found, said = on_ranks(streamed_loop)[0]
    assert found.error > 0.1 and any("got different samples on ranks that share one" in each for each in said)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "split", "cuts_itself", "epochs"),
    [(2, (1, 4), False, 2), (2, (2, 2), True, 1), (4, (1, 2), False, 1)],
)
def test_a_loop_of_ones_own(ranks: int, split: tuple[int, int], cuts_itself: bool, epochs: int) -> None:
    """As it is, and with the context in which accelerate's documentation has a loop cut its samples."""
    ours = on_ranks(cut.loop_under_context, ranks, split, cuts_itself, epochs, ranks=ranks)[0]
    assert ours.error <= 4e-6 and ours.loss <= 1e-6, ours


def test_attention_that_would_see_its_part_alone_is_refused() -> None:
    model = cut.llama()
    check_attention("accumulation_windows", model)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with pytest.raises(UnsupportedSetupError, match="got attention 'eager'"):
        check_attention("accumulation_windows", model)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("release", "layout"),
    [
        pytest.param("5.4.0", "cp", marks=[pytest.mark.releases, pytest.mark.thorough]),
        *[
            pytest.param(f"{release}@deepspeed==0.19.8", layout, marks=pytest.mark.releases_all)
            for release, layout in (("5.0.0", "cp"), ("5.0.0", "sp"), ("5.4.0", "sp"))
        ],
    ],
)
def test_other_releases(release: str, layout: str, tmp_path: Path) -> None:
    """Every layout of the recipe; 5.0.0's own step ends under Ulysses, and 5.4.0 trains at 1/G."""
    run_in(
        release, "python", "recipes/sample_shards.py", "--layouts", layout, "--splits", "1x2", "--output", str(tmp_path)
    )
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ours, stock = ([each for each in rows if each["path"] == path] for path in ("apply", "stock"))
    assert len(ours) == (4 if layout == "cp" else 8)
    assert all(each["error"] <= 4e-6 and each["loss"] <= 1e-6 for each in ours), ours
    assert all("ends" in each or each["error"] > 0.1 or "takes" in each["layout"] for each in stock), stock
