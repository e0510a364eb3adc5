"""The promise on two real gloo ranks under torchrun: unequal items, and a rank with none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.two_ranks import LEFT_OUT, SPLITS, WITHOUT_ITEMS
from tests.numerics.heads import HEADS
from tests.torchrun import found_by

#: One of each way that a loss is reduced, at a cut that stock and the subclass take, too.
EVERYDAY = (
    *("llama", "llama-smoothing", "lora", "bert-mlm", "bert-classes", "bert-pretraining", "t5", "mixtral", "llava"),
    *("no-kwargs", "uses-tensor", "func-with-mean", "wav2vec2-ctc-sum", "mean-of-sample-means"),
)


def every_case() -> Iterator[Any]:
    """Every head and cut, and some of them with a rank that has no item, as parameters."""
    for name, head in HEADS.items():
        for split in SPLITS if name not in LEFT_OUT else ():
            marks = [] if split == (2, 2) and name in EVERYDAY else [pytest.mark.slow]
            # One rank shows the losses of heads that stand for a class alone.
            if head.in_zoo or not head.everyday or (split != (1, 4) and marks):
                marks = [pytest.mark.thorough]
            yield pytest.param(f"{name} {split[0]}x{split[1]}", marks=marks)
    for name in WITHOUT_ITEMS:
        yield f"{name} 1x4 without items"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The rows of the cases that were selected, by one start of torchrun."""
    asking = [item for item in request.session.items if item.path == request.path]
    output = tmp_path_factory.mktemp("two_ranks") / "rows.json"
    cases = [item.callspec.params["case"] for item in asking]
    found = found_by("tests.distributed.two_ranks", output, *cases, timeout=1500)
    return {row["case"]: row for row in found}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*every_case()])
def test_two_ranks_take_the_full_batch_step(case: str, rows: Any) -> None:
    check(rows[case])


def check(row: dict[str, Any]) -> None:
    for path in {"apply", "trainer"} & row.keys():
        assert "raised" not in row[path], row
        assert row[path]["gradient"] <= row["tolerance"], row
        assert row[path]["loss"] <= max(row["tolerance"], 1e-6), row
        assert row[path]["norm"] <= row["tolerance"], row
    assert row["ranks_agree"] and row.get("same_bits", True), row
    if row["stock_wrong"] and "stock" in row:
        assert "raised" in row["stock"] or row["stock"]["gradient"] > 1e-3, row
