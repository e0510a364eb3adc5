"""One line on stderr, once per job, says that a training goes by this package: also without apply()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accum_fix
from hf_accum_fix import GlobalBatchTrainer, accumulation_windows, verify
from hf_accum_fix.confirmation import QUIET
from tests.verify.trainers import Regression, points, small

ANNOUNCED = "PYTHON_HF_ACCUM_FIX_ANNOUNCED"
VERSION = hf_accum_fix.__version__


class MyTrainer(GlobalBatchTrainer):
    pass


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ANNOUNCED, "1")  # so that it is restored
    monkeypatch.delenv(ANNOUNCED)
    for name in (QUIET, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-accum-fix: ")]


def of_class(tmp_path: Path) -> Any:
    return small(Regression(), tmp_path, points(8), cls=MyTrainer)


def test_a_loop_confirms_once(capsys: pytest.CaptureFixture[str]) -> None:
    accumulation_windows([], steps=2)
    assert said(capsys) == [f"hf-accum-fix: {VERSION} is on in accumulation_windows: torch {torch.__version__}"]
    accumulation_windows([], steps=2)
    assert not said(capsys)


@pytest.mark.parametrize(
    ("name", "value"), [(QUIET, "1"), ("HF_ACCUM_FIX", "0"), ("RANK", "1"), (ANNOUNCED, "1")], ids=str
)
def test_it_is_silent_where_apply_is(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = of_class(tmp_path)
    monkeypatch.setenv(name, value)
    accumulation_windows([], steps=2)
    if name != "RANK":
        trainer.train()
    assert not said(capsys)


def test_a_verification_is_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = of_class(tmp_path)
    assert verify(trainer, splits=[(2, 4)]).ok and not said(capsys)
    trainer.train()
    assert len(said(capsys)) == 1
