"""ms-swift's real trainers: no cut is further from the full batch than it is in stock, and most are exact.

They divide their loss by the steps of the window themselves where they are handed a number (``if num_items_in_batch is
not None and self.model_accepts_loss_kwargs``), look for labels that the base has popped from their batch, and count
their items on every rank.

    python recipes/in_release.py 5.19.0@ms-swift==4.6.0 -- pytest -m swift
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_accum_fix import observations
from tests.clients.ms_swift import KINDS, answered, swift_step, weights
from tests.numerics.parity import Step
from tests.ranks import on_ranks

pytestmark = [pytest.mark.swift, pytest.mark.filterwarnings("ignore::FutureWarning")]

WHOLE = (8, 1)
TWO_RANK_SPLITS = ((4, 1), (2, 2), (1, 4))
#: Whether the ranks agree on what counts as an item hung on the last bit of two losses, and so on the data.
SEEDS = range(4)
CASES = {
    **{f"sft, data {seed}": replace(KINDS["sft"], rows=partial(answered, seed)) for seed in SEEDS},
    **{name: kind for name, kind in KINDS.items() if not name.startswith("sft")},
}
THOROUGH = ((4, 2), (1, 8))
WITH_SHORT_MICRO_BATCH = (3, 3)
Reference = Callable[[str], Step]
names = pytest.mark.parametrize("name", KINDS)


def shape(split: tuple[int, int]) -> str:
    return "x".join(map(str, split))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("ms_swift"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """By case: the stock trainer's full-batch step, which no cut has touched."""

    @functools.cache
    def step_of(name: str) -> Step:
        kind = CASES.get(name) or KINDS[name]
        with kind.as_configured():
            step = swift_step(kind, "stock", *WHOLE, folder)
        return Step(step.change, step.loss, step.norm)

    return step_of


@pytest.mark.parametrize("path", ["apply", pytest.param("trainer", marks=pytest.mark.thorough)])
@names
def test_the_full_batch_is_left_bit_for_bit(name: str, path: str, folder: Path, reference: Reference) -> None:
    kind, wanted = KINDS[name], reference(name)
    with kind.as_configured():
        step = swift_step(kind, path, *WHOLE, folder)
    assert all(torch.equal(step.change[key], wanted.change[key]) for key in wanted.change)
    assert step.loss == wanted.loss


@pytest.mark.parametrize(
    "split", [(2, 4), *(pytest.param(each, marks=pytest.mark.thorough) for each in THOROUGH)], ids=shape
)
@names
def test_no_cut_is_further_from_the_full_batch_than_in_stock(
    name: str, split: tuple[int, int], folder: Path, reference: Reference
) -> None:
    kind, wanted = KINDS[name], reference(name)
    with kind.as_configured():
        stock = swift_step(kind, "stock", *split, folder)
        observations.clear()
        step = swift_step(kind, "apply", *split, folder)
        (run,) = observations.recorded()
    if kind.item_mean:
        assert stock.error(wanted) <= kind.tolerance
        assert step.error(wanted) <= kind.tolerance
        assert step.loss == pytest.approx(wanted.loss, rel=kind.tolerance)
    else:
        assert step.error(wanted) <= stock.error(wanted) + kind.tolerance
        assert not run["exact"] or step.error(wanted) <= kind.tolerance


@names
def test_a_short_micro_batch_is_no_worse_than_in_stock(name: str, folder: Path, reference: Reference) -> None:
    """Three, three and two samples: stock is off by 0.1 to 0.3 wherever the loss is a mean over samples."""
    kind, wanted = KINDS[name], reference(name)
    with kind.as_configured():
        stock = swift_step(kind, "stock", *WITH_SHORT_MICRO_BATCH, folder)
        observations.clear()
        step = swift_step(kind, "apply", *WITH_SHORT_MICRO_BATCH, folder)
        (run,) = observations.recorded()
    assert step.error(wanted) <= stock.error(wanted) + kind.tolerance
    if run["exact"]:
        assert step.error(wanted) <= kind.tolerance


def rows_of(folder: Path, wanted: Mapping[str, Step]) -> dict[tuple[str, tuple[int, int]], dict[str, Any]]:
    """On each rank: stock and patched, beside the full batch's step."""
    rows = {}
    for (name, kind), split in product(CASES.items(), TWO_RANK_SPLITS):
        row: dict[str, Any] = {}
        for path in ("stock", "apply") if split == (2, 2) or not kind.item_mean else ("apply",):
            try:
                with kind.as_configured():
                    step = swift_step(kind, path, *split, folder, ddp_backend="gloo")
                row[path] = {"gradient": step.error(wanted[name]), "loss": abs(step.loss / wanted[name].loss - 1)}
            # What we raise is raised on every rank alike; anything else ends both in time.
            except Exception as error:
                row[path] = {"raised": repr(error)}
        rows[name, split] = row
    return rows


@pytest.fixture(scope="module")
def rows(folder: Path, reference: Reference) -> dict[tuple[str, tuple[int, int]], dict[str, Any]]:
    return on_ranks(rows_of, folder, {name: reference(name) for name in CASES}, timeout=500)[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", TWO_RANK_SPLITS, ids=shape)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_no_further_from_the_full_batch_than_in_stock(
    case: str, split: tuple[int, int], rows: dict[tuple[str, tuple[int, int]], dict[str, Any]]
) -> None:
    kind, row = CASES[case], rows[case, split]
    assert "raised" not in row["apply"], row["apply"]["raised"]
    if kind.item_mean and "stock" in row:
        assert row["stock"]["gradient"] <= kind.tolerance, row
    bound = kind.tolerance + (0.0 if kind.item_mean else row["stock"]["gradient"])
    assert row["apply"]["gradient"] <= bound, row
