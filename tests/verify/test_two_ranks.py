"""verify() on two gloo ranks: errors of the world size show, and every rank reads the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_accum_fix import verify
from tests.numerics.heads import before
from tests.ranks import on_ranks
from tests.verify.trainers import trainer_of

pytestmark = pytest.mark.skipif(before("5.23"), reason="what the newest release does")

GLOO = {"ddp_backend": "gloo", "per_device": 2, "accumulate": 2}


def reports_of(output: Path) -> dict[str, Any]:
    """On each rank."""
    found = {name: verify(trainer_of(name, output, **GLOO), with_apply=True).to_dict() for name in STOCK}
    trainer = trainer_of("llama", output, **GLOO)
    trainer.model_wrapped = trainer.model
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    verify(trainer)
    same = all((one == other).all() for one, other in zip(before, trainer.model.parameters(), strict=True))
    trainer.train()
    found["trained"] = {"same": bool(same), "loss": trainer.state.log_history[0]["loss"]}
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = on_ranks(reports_of, tmp_path_factory.mktemp("two_ranks"), group=False)
    assert first == second
    return first


#: What is said of stock at 1 x 4.
STOCK = {
    "llama": "exact",
    "bert-classes": "G x W times",
    "bert-mlm": "G x W times, and the mean of micro-batch means",
    "mixtral": "aux loss times G x W",
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_is_explained_and_apply_is_exact(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["world_size"] == 2 and report["samples"] == (8,)
    (stock,) = (each for each in report["results"] if (each["mode"], each["per_device"]) == ("stock", 1))
    assert stock["steps"] == 4 and stock["verdict"]["words"].endswith(STOCK[name])
    fixed = [each for each in report["results"] if each["mode"] == "apply()"]
    assert len(fixed) == 4 and {each["verdict"]["kind"] for each in fixed} == {"exact"}
    assert all(each["error"] < 1e-6 for each in fixed)


def test_the_training_that_follows_is_undisturbed(reports: dict[str, Any]) -> None:
    assert reports["trained"]["same"] and reports["trained"]["loss"] > 0
