"""The patch after whatever a script imports or makes first: on, exact, and never an error; see `tests.orders`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.cli.processes import ROOT, RUN, environment, start
from tests.orders import FIRST

SCRIPT = Path(__file__).with_name("orders.py")
#: Today's trl needs transformers 5.
SINGLE = [name for name in FIRST if name != "trl" or Version(transformers.__version__) >= Version("5.0")]
PAIRS = ("model,arguments", "peft,model", "accelerate,pipeline", "tokenizer,Trainer", "Trainer,transformers")
#: Of ``verify`` and ``doctor``: the stock Trainer is not exact.
NOT_EXACT = 1


def asked(how: str, *orders: str, under: tuple[str, ...] = ()) -> dict[str, Any]:
    done = start([*under, sys.executable, SCRIPT, how, *orders], environment(ROOT))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [*found] == [*orders] and None not in found.values(), done.stderr[-4000:]
    return found


@pytest.mark.slow
def test_apply_after_each() -> None:
    found = asked("apply", *SINGLE)
    assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("how", "under"), [("apply", ()), ("class", ()), ("stock", RUN)])
def test_every_way_after_each_and_after_two(how: str, under: tuple[str, ...]) -> None:
    found = asked(how, *(SINGLE if how != "apply" else ()), *PAIRS, under=under)
    assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["verify", pytest.param("doctor", marks=pytest.mark.thorough)])
def test_the_questions_after_a_model(how: str) -> None:
    found = asked(how, "model", "peft,model")
    assert {*found.values()} == {NOT_EXACT}, found


@pytest.mark.slow
def test_a_script_that_is_verified() -> None:
    verify = [sys.executable, "-m", "hf_accum_fix", "verify", SCRIPT, "stock", "peft"]
    done = start(verify, environment(ROOT))
    assert done.returncode == NOT_EXACT and "apply() makes it exact" in " ".join(done.stdout.split()), done.stderr[
        -4000:
    ]


@pytest.mark.slow
def test_stock_is_wrong() -> None:
    assert asked("stock", "nothing")["nothing"] > 0.1
