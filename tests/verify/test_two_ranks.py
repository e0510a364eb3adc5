"""verify() on two gloo ranks: errors of the world size show, and every rank reads the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.heads import before
from tests.torchrun import found_by

pytestmark = [pytest.mark.slow, pytest.mark.skipif(before("5.23"), reason="what the newest release does")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reports of the first rank."""
    output = tmp_path_factory.mktemp("two_ranks") / "reports.json"
    first, second = found_by("tests.verify.two_ranks", output)
    assert first == second
    return dict(first)


def words(report: dict[str, Any], mode: str, cut: tuple[int, int]) -> str:
    for each in report["results"]:
        if (each["mode"], each["per_device"], each["steps"]) == (mode, *cut):
            return str(each["verdict"]["words"])
    raise KeyError(cut)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", "exact to the floor"),
        ("bert-classes", "G x W times"),
        ("bert-mlm", "G x W times, and the mean of micro-batch means"),
        ("mixtral", "aux loss times G x W"),
        ("lora", "G x W times, and the mean of micro-batch means"),
    ],
)
def test_stock_is_explained_and_apply_is_exact(name: str, wanted: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["world_size"] == 2 and report["samples"] == [8]
    assert words(report, "stock", (1, 4)).endswith(wanted)
    fixed = [each for each in report["results"] if each["mode"] == "apply()"]
    assert len(fixed) == 4 and {each["verdict"]["kind"] for each in fixed} == {"exact"}
    assert all(each["error"] < 1e-6 for each in fixed)


def test_the_evaluation_is_the_item_mean_with_the_option(reports: dict[str, Any]) -> None:
    errors = {(each["mode"], each["per_device"]): each["error"] for each in reports["evaluated"]["evaluation"]}
    assert errors["stock", 1] > 1e-3
    assert errors["eval_loss=True", 1] < 1e-6 and errors["eval_loss=True", 8] < 1e-6


def test_in_batch_negatives(reports: dict[str, Any]) -> None:
    assert reports["contrastive"]["verdict"]["kind"] == "off"
    assert "no split can equal the full batch" in reports["contrastive"]["verdict"]["words"]


def test_the_training_that_follows_is_undisturbed(reports: dict[str, Any]) -> None:
    assert reports["trained"]["same"] and reports["trained"]["loss"] > 0
