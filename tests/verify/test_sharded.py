"""verify() where an engine shards the model: on copies of it, by projections, and nothing is left changed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor

import hf_accum_fix
from hf_accum_fix.engines import ranks
from hf_accum_fix.verification.copies import PROOF
from hf_accum_fix.verification.gradients import Gradient, distance, dots
from hf_accum_fix.verification.projection import named, projections_of
from tests.backends.rows import DEEPSPEED, FSDP1, FSDP2, LAUNCHED_DEEPSPEED, TENSOR_PARALLEL, Backend
from tests.backends.trajectory import gathered
from tests.numerics.heads import HEADS, before
from tests.ranks import on_ranks
from tests.verify import proof_script

pytestmark = pytest.mark.skipif(before("5.23"), reason="what the newest release does")

ENGINES = ("fsdp1", "fsdp2", "tp", "zero0", "zero2", "zero3", "zero2-offloaded")
WRAPPED = {"fsdp1": FSDP1, "fsdp2": FSDP2, "tp": TENSOR_PARALLEL}
SPLITS = [(2, 2), (1, 4)]
#: The communicator that DeepSpeed makes at its first engine, and keeps for every other.
KEPT = "groups _WORLD_GROUP"


def engines(*shown: str, of: Sequence[str] = ENGINES) -> list[Any]:
    """Engines as cases: these in every CI, the others, which take a minute each, in the thorough one."""
    marks = {each: pytest.mark.deepspeed if each.startswith("zero") else pytest.mark.slow for each in of}
    return [pytest.param(e, marks=[mark, *(() if e in shown else [pytest.mark.thorough])]) for e, mark in marks.items()]


def of(engine: str, *words: str) -> Any:
    if engine.startswith("zero"):
        os.environ.update(LAUNCHED_DEEPSPEED)
    trainer = proof_script.trainer_of(["--engine", engine, "--size", "2", "--steps", "2", *words])
    if engine.startswith("zero"):
        # What the Trainer fills in as it trains.
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = "auto"
    return trainer


def state_of(trainer: Any) -> dict[str, Any]:
    """Whatever a verification could change, as values that can be compared."""
    model, found = trainer.model, dict[str, Any]()
    for name, each in model.state_dict(keep_vars=True).items():
        found[f"tensor {name}"] = (id(each), each.data_ptr(), hash_of(each), each.grad is None)
    for name, each in model.named_modules():
        hooks = [(key, len(value)) for key, value in vars(each).items() if key.endswith("hooks")]
        found[f"module {name}"] = (id(each), type(each), each.training, sorted(vars(each)), hooks)
    for what, holder in (("trainer", trainer), ("accelerator", trainer.accelerator)):
        found |= {f"{what} {name}": (id(each), shown(each)) for name, each in vars(holder).items()}
    for cls in (AcceleratorState, PartialState, GradientState):
        found |= {f"{cls.__name__} {name}": (id(each), shown(each)) for name, each in cls._shared_state.items()}
    found |= {f"environment {name}": text for name, text in os.environ.items()}
    found["random"] = [hash_of(torch.get_rng_state()), repr(np.random.get_state()), random.getstate()]
    found["files"] = sorted(map(str, Path(trainer.args.output_dir).rglob("*")))
    if trainer.is_deepspeed_enabled:
        from deepspeed.utils import groups
        from transformers.integrations import deepspeed

        found["config of transformers"] = id(deepspeed._hf_deepspeed_config_weak_ref())
        values = {name: each for name, each in vars(groups).items() if not callable(each) and name[:2] != "__"}
        found |= {f"groups {name}": (id(each), str(each)) for name, each in values.items()}
    return found


def hash_of(tensor: Tensor) -> str:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(here.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def shown(value: Any) -> str:
    """With the attributes of a plugin, and of the config it holds."""
    if isinstance(value, dict):
        return str({name: shown(each) for name, each in value.items()})
    if dataclasses.is_dataclass(value) or type(value).__name__.endswith("DeepSpeedConfig"):
        return str({name: shown(each) for name, each in sorted(vars(value).items())})
    return str(value)


def trained(engine: str, verifies: bool) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The report, what it has left changed, and the hashes of the weights after two steps."""
    trainer, report, changed = of(engine), dict[str, Any](), list[str]()
    trainer.args.max_steps = 2
    torch.manual_seed(5)
    if verifies:
        at_first = state_of(trainer)
        report = hf_accum_fix.verify(trainer, SPLITS).to_dict()
        after = state_of(trainer)
        names = [name for name in {**at_first, **after} if at_first.get(name) != after.get(name) and name != KEPT]
        changed = [f"{name}: {at_first.get(name)} -> {after.get(name)}" for name in names]
    trainer.train()
    weights = gathered(trainer.model_wrapped, Backend(engine, WRAPPED.get(engine, DEEPSPEED)))
    if verifies and engine != "tp":
        again = hf_accum_fix.verify(trainer, SPLITS)
        assert "an engine holds already" in str(again.verdict), again
    return report, changed, {name: hash_of(each) for name, each in weights.items()}


def found(engine: str) -> dict[str, Any]:
    """Reports on a right head, one that stock has G x W times too large, a fault of the engine, and later steps."""
    report, changed, weights = trained(engine, True)
    reports = {"right": report}
    for name, words in {"classes": ["--classes"], "fault": ["--fault", "engine"]}.items():
        reports[name] = hf_accum_fix.verify(of(engine, *words), SPLITS).to_dict()
    reports["later"] = hf_accum_fix.verify(of(engine), SPLITS, step=3).to_dict()
    return {"reports": reports, "changed": changed, "as without": trained(engine, False)[2] == weights}


@pytest.mark.parametrize("engine", engines("zero3"))
def test_nothing_is_left_changed_and_stock_and_the_engine_are_told_apart(engine: str) -> None:
    one, other = on_ranks(found, engine)
    assert not one["changed"] and not other["changed"] and one["as without"] and other["as without"], one["changed"]
    assert one["reports"] == other["reports"]
    right, classes, fault, later = one["reports"].values()
    assert right["ok"] and {each["mode"] for each in right["results"]} == {"stock", "apply()"}, right
    assert all(each["verdict"]["words"] == "exact" and each["error"] < 1e-6 for each in right["results"]), right
    for each in classes["results"]:
        if each["mode"] == "stock":
            # Tensor-parallel ranks share their samples.
            name, ranks = ("G times", 1) if engine == "tp" else ("G x W times", 2)
            assert name in each["verdict"]["words"], each
            assert each["norm_ratio"] == pytest.approx(ranks * each["steps"], rel=1e-5)
        else:
            assert each["verdict"]["words"] == "exact" and each["error"] < 1e-6, each
    assert fault["verdict"]["kind"] == "off", fault["verdict"]
    assert all(1e-4 < each["error"] < 1e-2 for each in fault["results"]), fault
    assert later["ok"] and all(each["error"] < 1e-6 for each in later["results"]), later


def unanswered() -> list[str]:
    """The verdicts on gradients without names, on an engine that fails, and where all ranks run out of memory."""
    nameless = of("fsdp1")
    nameless.accelerator.state.fsdp_plugin.use_orig_params = False
    words = [hf_accum_fix.verify(nameless, SPLITS).verdict.words]
    failing = of("fsdp2")
    weights = hash_of(failing.model.lm_head.weight)

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("of the engine")

    failing.create_optimizer = fails
    words.append(hf_accum_fix.verify(failing, SPLITS).verdict.words)
    assert hash_of(failing.model.lm_head.weight) == weights
    return [*words, out_of_memory()]


def out_of_memory(*alone: int) -> str:
    """What becomes of a verification that runs out of memory, on these ranks alone or, if none are given, on all."""
    trainer, store = of("fsdp2"), dist.distributed_c10d._get_default_store()
    ranks.PATIENCE = timedelta(seconds=3)

    def fails(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    # The package has a function of that name.
    import_module("hf_accum_fix.verification.verify")._verified = fails  # type: ignore[attr-defined]
    if alone and dist.get_rank() not in alone:
        store.wait(["failed"])
        return ""
    try:
        return hf_accum_fix.verify(trainer, SPLITS).verdict.words
    except RuntimeError as error:
        return f"raised {error}"
    finally:
        store.set("failed", "")


@pytest.mark.thorough
def test_what_cannot_be_told_is_said() -> None:
    """Out of memory on one rank is an error, which the others wait for, in a collective."""
    (nameless, failing, full), other = on_ranks(unanswered)
    assert nameless.startswith("could not tell: got FSDP1 with use_orig_params=False"), nameless
    assert failing == "could not tell: this micro-batch cannot be run: 'of the engine'"
    assert full == other[2] == f"could not tell: DefaultCPUAllocator: can't allocate memory{PROOF}"
    assert on_ranks(out_of_memory, 1) == ["", "raised DefaultCPUAllocator: can't allocate memory"]


def changes(gradient: list[Tensor]) -> Iterator[tuple[bool, list[Tensor]]]:
    """The gradient with a factor, with one parameter off by 1 %, and with noise; whether the error is in one alone."""
    draws = torch.Generator().manual_seed(0)
    yield False, [1.01 * each for each in gradient]
    for off in {max(range(len(gradient)), key=lambda at: float(gradient[at].norm())), len(gradient) // 2}:
        yield True, [1.01 * each if at == off else each for at, each in enumerate(gradient)]
    for size in (1e-3, 1e-2, 0.1, 1.0):
        noise = [torch.randn(each.shape, generator=draws, dtype=each.dtype) for each in gradient]
        yield False, [g + size * g.norm() / max(n.norm(), 1e-9) * n for g, n in zip(gradient, noise, strict=True)]


def test_errors_by_projections_are_those_of_the_whole_to_a_third() -> None:
    """On 20 heads; the estimate is worst where one parameter alone is off."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for head in itertools.islice(HEADS.values(), 20):
        model = head.build().double()
        head.reference_loss(model, head.batch(head.samples[:4])).backward()
        names = [name for name, each in named(model) if each.grad is not None]
        gradient = [each.grad for each in model.parameters() if each.grad is not None]

        def projected(gradient: Gradient, names: list[str] = names) -> Gradient:
            return [*projections_of(zip(names, gradient, strict=True)).values()]

        def error(found: Gradient, wanted: Gradient) -> float:
            return distance(found, wanted) / math.sqrt(float(dots(wanted)[0, 0]))

        for alone, other in changes(gradient):
            if whole := error(other, gradient):
                ratios[alone].append(error(projected(other), projected(gradient)) / whole)
    assert len(ratios[True]) + len(ratios[False]) >= 130
    assert all(abs(each - 1) < 1 / 3 for each in (*ratios[True], *ratios[False]))
    assert statistics.stdev(ratios[True]) < 0.125 and statistics.stdev(ratios[False]) < 0.06
