"""Defects of engines: each row shown on the DeepSpeed that is installed, and corrected there; the mending by itself.

python recipes/in_release.py newest@deepspeed==0.18.4 -- pytest -m deepspeed tests/backends/test_engine_defects.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accum_fix
from hf_accum_fix.engines.mend import mend
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS, engine_defects_of
from tests.backends.loops import LOOP_HEADS
from tests.backends.loops import train as train_loop
from tests.backends.rows import BACKENDS
from tests.backends.test_reached import unnamed
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, reference, train
from tests.numerics.parity import pass_over_imports
from tests.ranks import on_ranks

DROPS, KEEPS_LAST = (row.name for row in ENGINE_DEFECTS)
#: On one rank: DeepSpeed 0.18 gathers parameters in a way that torch 2.13 refuses on several CPU ranks.
BACKEND = replace(BACKENDS["deepspeed-zero-2-offloaded"], data_ranks=1)


def trainings() -> dict[str, Any]:
    """Errors of three windows by head and path."""
    rows: dict[str, Any] = {}
    for name, head in HEADS.items():
        wanted = reference(head, UNCLIPPED, BACKEND)
        rows[f"{name} noise"] = reference(head, UNCLIPPED, BACKEND, by=1, order=-1).error(wanted)
        for path in ("stock", "apply", "trainer"):
            pass_over_imports()
            found = train(head, BACKEND, SPLITS[0], path, UNCLIPPED, Path(tempfile.gettempdir()) / "engines")
            rows[f"{name} {path}"] = found.error(wanted)
        rows[f"{name} exact"] = hf_accum_fix.report().to_dict()["runs"][-1]["exact"]
    head = LOOP_HEADS["llama"][0]
    found = train_loop(head, BACKEND, (1, 8), UNCLIPPED, told=1)
    rows["loop"] = found.error(reference(head, UNCLIPPED, BACKEND))
    return rows


@pytest.fixture(scope="module")
def rows() -> Any:
    return on_ranks(trainings, ranks=1)[0]


def installed() -> set[str]:
    import deepspeed

    return {row.name for row in engine_defects_of("deepspeed", deepspeed.__version__)}


@pytest.mark.deepspeed
@pytest.mark.timeout(300)
def test_every_micro_batch_reaches_the_optimizer(rows: Any) -> None:
    for name in HEADS:
        tolerance = 2 * rows[f"{name} noise"]
        assert rows[f"{name} apply"] <= tolerance and rows[f"{name} trainer"] <= tolerance, rows
        assert rows[f"{name} exact"], rows
    assert (rows["llama stock"] > 0.1) == (DROPS in installed()), rows
    assert rows["loop"] <= 2 * rows["llama noise"], rows


@pytest.mark.deepspeed
@pytest.mark.timeout(300)
def test_lost_micro_batches_are_found_without_a_row() -> None:
    """By the comparison of what autograd delivered with what the optimizer uses."""
    run = on_ranks(unnamed, ranks=1)[0]
    known = DROPS in installed()
    assert run["reached_optimizer"].startswith("no, " if known else "yes, "), run
    assert run["exact"] != known and ("micro-batches or ranks are lost" in run["reached_optimizer"]) == known, run


def test_a_release_has_the_defects_of_its_range() -> None:
    none, both = set[str](), {DROPS, KEEPS_LAST}
    found = {"0.15.0": none, "0.15.1": {KEEPS_LAST}, "0.15.2": both, "0.18.9+abcdef": both, "0.19.0": none, "": none}
    for release, expected in found.items():
        assert {row.name for row in engine_defects_of("deepspeed", release)} == expected, release
        assert engine_defects_of("another", release) == ()


class Optimizer:
    """What DeepSpeed 0.18.9 does to the gradient of one parameter, one window at a time."""

    cpu_offload = partition_gradients = True
    is_gradient_accumulation_boundary = False
    micro_step_id = -1
    saved: Tensor | None = None
    stepped: Tensor | None = None

    def __init__(self, steps: int) -> None:
        self.gradient_accumulation_steps = steps

    def async_accumulate_grad_in_cpu_via_gpu(self, param: Tensor) -> None:
        assert param.grad is not None
        if self.micro_step_id > 0 and self.saved is not None:
            param.grad += self.saved
        else:
            self.saved = param.grad.clone()

    def window(self, gradients: list[float]) -> float:
        for place, gradient in enumerate(gradients):
            parameter = torch.nn.Parameter(torch.zeros(()))
            parameter.grad = torch.tensor(gradient)
            self.micro_step_id = place
            self.is_gradient_accumulation_boundary = place == len(gradients) - 1
            if self.gradient_accumulation_steps > 1:
                self.async_accumulate_grad_in_cpu_via_gpu(parameter)
        assert parameter.grad is not None
        return float(parameter.grad)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.18.9"))


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(("told", "stock"), [(4, 9.0), (1, 8.0)])
def test_the_sum_is_saved_after_every_micro_batch(told: int, stock: float) -> None:
    optimizer = Optimizer(told)
    assert optimizer.window([1.0, 2.0, 4.0, 8.0]) == stock
    mend(optimizer)
    mend(optimizer)
    for gradients in ([1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0], [128.0], [256.0, 512.0]):
        assert optimizer.window(gradients) == sum(gradients)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("change", ["no method", "another signature", "another boundary"])
def test_what_cannot_be_corrected_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "async_accumulate_grad_in_cpu_via_gpu"
    if change == "no method":
        monkeypatch.delattr(Optimizer, method)
    elif change == "another signature":
        monkeypatch.setattr(Optimizer, method, lambda self, param, group: None)
    else:
        monkeypatch.setattr(Optimizer, "is_gradient_accumulation_boundary", lambda self: False)
    with pytest.raises(
        hf_accum_fix.UnsupportedSetupError, match=r"got DeepSpeed 0\.18\.9.*expected DeepSpeed 0\.19\.0"
    ) as no:
        mend(Optimizer(4))
    assert DROPS in str(no.value) and "pip install 'deepspeed>=0.19.0'" in str(no.value)
