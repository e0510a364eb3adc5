"""Defects of engines: each row shown on the DeepSpeed that is installed, and said there.

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
from accelerate.utils import DistributedType

import hf_accum_fix
from hf_accum_fix.engines.engine import check_engine_adds
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS, engine_defects_of
from tests.backends.loops import LOOP_HEADS
from tests.backends.loops import train as train_loop
from tests.backends.rows import BACKENDS
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
        run = hf_accum_fix.report().to_dict()["runs"][-1]
        rows[f"{name} exact"], rows["reached"] = run["exact"], run["reached_optimizer"]
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
def test_every_micro_batch_reaches_the_optimizer_or_is_said(rows: Any) -> None:
    loses = DROPS in installed()
    for name in HEADS:
        assert rows[f"{name} exact"] is not loses, rows
        for path in ("apply", "trainer"):
            assert (rows[f"{name} {path}"] <= 2 * rows[f"{name} noise"]) is not loses, rows
    assert (rows["llama stock"] > 0.1) == loses, rows
    assert (rows["loop"] <= 2 * rows["llama noise"]) is not loses, rows
    reached = rows["reached"]
    assert reached.startswith("no, " if loses else "yes, ") and ("micro-batches or ranks are lost" in reached) is loses


def test_a_release_has_the_defects_of_its_range() -> None:
    none, both = set[str](), {DROPS, KEEPS_LAST}
    found = {"0.15.0": none, "0.15.1": {KEEPS_LAST}, "0.15.2": both, "0.18.9+abcdef": both, "0.19.0": none, "": none}
    for release, expected in found.items():
        assert {row.name for row in engine_defects_of("deepspeed", release)} == expected, release
        assert engine_defects_of("another", release) == ()


@pytest.mark.parametrize(
    ("release", "offloads", "warns"), [("0.18.9", True, True), ("0.18.9", False, False), ("0.19.0", True, False)]
)
def test_a_release_that_loses_micro_batches_is_named(
    release: str, offloads: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=release))
    optimizer = SimpleNamespace(cpu_offload=offloads, partition_gradients=True)
    engine = SimpleNamespace(optimizer=optimizer, get_data_types=lambda: (torch.float32, torch.float32))
    wrapped = SimpleNamespace(engine=engine)
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_engine_wrapped=wrapped)
    found = check_engine_adds(accelerator, "parameter") or ""
    assert (DROPS in found and "pip install 'deepspeed>=0.19.0'" in found) is warns
