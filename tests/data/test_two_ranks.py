"""Epochs that do not fill two gloo ranks: accelerate's repeated samples are reported, and left out on request."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.data.two_ranks import CASES, EPOCHS
from tests.numerics.heads import HEADS
from tests.torchrun import found_by

pytestmark = pytest.mark.slow

#: Repeated samples of a last round, over both ranks; a dispatched one is only evened out.
REPEATED = {
    "one repeated row": 1, "nothing to repeat": 0, "drop_last": 0, "dispatch_batches": 1, "dispatched stream": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return dict(found_by("tests.data.two_ranks", folder / "found.json", folder))


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_take_the_reference_steps(case: str, found: dict[str, Any]) -> None:
    row, (_, count, per_device, _, arguments) = found[case], CASES[case]
    repeated = REPEATED.get(case, 3)
    tolerance = HEADS[CASES[case][0]].tolerance
    assert row["without duplicates"] <= tolerance and row["same bits"]
    # Logs were rounded to four digits up to 4.57.
    assert row["losses"] <= 6e-5
    # As accelerate deals them, repeated samples counted twice, it is the full batch's step as well.
    assert row["with duplicates"] <= tolerance
    assert len(row["epochs"]) == EPOCHS
    dropped = count % (2 * per_device) if arguments.get("dataloader_drop_last") else 0
    for epoch in row["epochs"]:
        places = list(chain.from_iterable(epoch))
        assert len(places) == len(set(places)) == count - dropped
    # Nothing is dropped but what an epoch has had.
    assert row["same order"][0] == row["same order"][1]
    if repeated and count > 1:
        assert row["plain beside exact"] > 1e-3 and row["stock beside exact"] > 1e-3
    # Once a run: by patch and by subclass.
    assert (len(row["warned"]), len(row["told"])) == ((1, 2) if repeated else (0, 0))
    assert row["reported"] == ([False, True, True] if repeated else [None] * 3)
    assert all(f"repeat {repeated} samples" in message for message in (*row["warned"], *row["told"]))
    assert all("drop_duplicates=True" in message for message in row["warned"])


def test_resumed_in_the_middle_of_an_epoch_they_are_left_out_as_well(found: dict[str, Any]) -> None:
    assert found["resumed"]["same bits"]
    assert found["resumed"]["windows"][0] == found["resumed"]["windows"][1]
