"""Every backend on two gloo ranks: three steps by the Trainer, or a loop, beside plain SGD over the global batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix import SeamError, accumulation_windows, observations
from tests.backends import loops, trajectory
from tests.backends.loops import LOOP_HEADS
from tests.backends.rows import BACKENDS, IN_BF16, Backend, deepspeed
from tests.backends.trajectory import (
    CLIPPED,
    HEADS,
    RATE,
    SPLITS,
    UNCLIPPED,
    Trajectory,
    assert_steps,
    attempted,
    compared,
    furthest,
    reference,
    references,
    train,
)
from tests.numerics.heads import HEADS as NUMERIC_HEADS
from tests.numerics.heads import Batch
from tests.numerics.parity import Step, cut, reference_step, trainable
from tests.ranks import on_ranks, row_of_each
from tests.router.conventions import COEFFICIENT, TOP_K, InFloat64, balance, domains, with_coefficient

FOLDER = Path(tempfile.gettempdir()) / "backends"
#: A head that divides by the number, which the installed release gets right, and one that drops it.
BY_NUMBER, MEAN = "llama", "llama-classification"
#: What else a backend sets does not hang on the head, nor on which of these engines it is of.
ENGINES = (
    *("ddp", "fsdp1-launched", "fsdp2-launched", "fsdp2-bf16", "tensor-parallel-counted-apart"),
    *("deepspeed-zero-0", "deepspeed-zero-2", "deepspeed-zero-3", "deepspeed-zero-2-not-told", "deepspeed-zero-3-bf16"),
)
BOTH_HEADS = ("ddp", "tensor-parallel-counted-apart", "deepspeed-zero-2")
#: Streams end in a short window that stock never steps; it is filled up with blanks that no engine sees.
STREAMED = ("ddp", "fsdp2-launched", "deepspeed-zero-0", "deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3")
#: By loops: one head takes the number, one returns its own mean and drops it. Those with a mark: before a release.
LOOPED = {
    "fsdp1-launched llama": [], "fsdp1-launched bert": [pytest.mark.thorough],
    "fsdp1-bf16 llama": [pytest.mark.thorough], "fsdp2-launched llama": [], "fsdp2-launched bert": [],
    "deepspeed-zero-0 llama": [], "deepspeed-zero-2 llama": [], "deepspeed-zero-3 llama": [],
    "deepspeed-zero-3 bert": [], "deepspeed-zero-3-bf16 llama": [pytest.mark.thorough],
}  # fmt: skip


def every_case() -> Iterator[Any]:
    """Every backend with both heads, some with a stream, and some by a loop, as parameters."""
    for name in BACKENDS:
        yield parameter(name, MEAN)
        yield parameter(name, BY_NUMBER)
        if name in STREAMED:
            yield parameter(name, f"{BY_NUMBER} stream")
    for case, marks in LOOPED.items():
        yield pytest.param(f"{case} loop", marks=[BACKENDS[case.split()[0]].mark, *marks])


def parameter(name: str, what: str) -> Any:
    backend = BACKENDS[name]
    shown = backend.compiles or name in (ENGINES if what == MEAN else BOTH_HEADS)
    return pytest.param(f"{name} {what}", marks=[backend.mark, *([] if shown else [pytest.mark.thorough])])


def row(case: str) -> Any:
    """Every training of a case: its errors, or what it raised."""
    name, head_name, *how = case.split()
    if head_name == "routed":
        return attempted(routed, name)
    backend, head, runs = BACKENDS[name], HEADS.get(head_name), []
    if how == ["loop"]:
        head, layer = LOOP_HEADS[head_name]
        backend = replace(backend, environment={**backend.environment, "FSDP_TRANSFORMER_CLS_TO_WRAP": layer})
    assert head is not None

    def taken(path: str, split: tuple[int, int], max_norm: float) -> Trajectory:
        if how == ["loop"]:
            return loops.train(head, backend, split, max_norm, stock=path == "stock")
        return train(head, backend, split, path, max_norm, FOLDER, stream=how == ["stream"])

    for max_norm in (CLIPPED, UNCLIPPED):
        exact, wanted, noise = references(head, max_norm, backend)
        for path, split in (
            *(("apply", split) for split in SPLITS),
            *((("trainer", SPLITS[0]), ("stock", SPLITS[0])) if max_norm == UNCLIPPED else ()),
        ):
            if path == "trainer" and how == ["loop"]:
                continue
            found = attempted(taken, path, split, max_norm)
            run = {"path": path, "split": split, "max_norm": max_norm, "noise": noise}
            runs.append({**run, **(found if isinstance(found, dict) else compared(found, exact, wanted))})
    return runs


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=1500)


@pytest.mark.timeout(1560)
@pytest.mark.parametrize("case", [*every_case()])
def test_every_step_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    (name, what, *how), runs = case.split(), rows[case]
    backend, looped = BACKENDS[name], how == ["loop"]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if run["path"] != "stock"]
    assert len(ours) == 5 - looped
    assert_steps(ours, backend, 2e-6 if looped and backend.dtype is torch.float32 else 0.0)
    rounding = 2e-6 if backend.dtype == torch.float64 else 4 * ours[0]["noise"]
    for clipped in (True, False):
        norms = [run["norms"] for run in ours if (run["max_norm"] < 1) == clipped]
        assert looped or all(found == pytest.approx(norms[0], rel=rounding) for found in norms)
    assert all(run["norms"] for run in ours) == backend.reports_norm
    (stock,) = (run for run in runs if run["path"] == "stock")
    assert (stock["exact"] > 0.1) == (what != BY_NUMBER or backend.stock_wrong or bool(how)), stock


# --- ranks that differ ------------------------------------------------------------------------------------------------


def looped(backend: Backend, head: Any, batches: Any, steps: int, rate: float, **options: Any) -> dict[str, Any]:
    """The parameter change of a loop over this rank's micro-batches."""
    with trajectory.variables(backend.environment):
        live = loops.accelerator(backend, 1, steps, UNCLIPPED)
        model: Any = trajectory.built(head, backend)
        start = trainable(model)
        model, optimizer = live.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        list(loops.epoch(accumulation_windows(batches, live, **options), model, optimizer, live))
        end = trajectory.gathered(model, backend)
    return {name: end[name] - start[name] for name in start}


def uneven(name: str) -> list[str]:
    """What this rank raises where the second one's dataloader has a micro-batch less: at once, later, with routing."""
    found = []
    for head_name, window, router_loss in (("llama", 1, "mean"), ("llama", 2, "mean"), ("mixtral", 2, "exact")):
        head = LOOP_HEADS[head_name][0]
        batches = [head.batch([sample]) for sample in trajectory.samples_of(head)[:4]]
        try:
            looped(BACKENDS[name], head, batches[: 2 * window - dist.get_rank()], 2, RATE, router_loss=router_loss)
            found.append("")
        except SeamError as refusal:
            found.append(str(refusal))
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=BACKENDS[name].mark) for name in ("fsdp2-launched", "deepspeed-zero-2")],
)
def test_ranks_that_would_wait_in_the_middle_of_a_window_are_told(name: str) -> None:
    for rank in on_ranks(uneven, name):
        assert all(each.startswith("got unequal numbers of micro-batches in this window") for each in rank), rank


def unequal() -> float:
    """The error of a window of four micro-batches on the first rank and two on the second."""
    head = LOOP_HEADS["bert"][0]
    pieces = cut(head.samples, 1)[:6]
    mine = pieces[:4] if dist.get_rank() == 0 else pieces[4:]
    change = looped(BACKENDS["deepspeed-zero-1"], head, [head.batch(piece) for piece in mine], 4, 1.0)
    return Step(change, 0.0, 0.0).error(reference_step(head, pieces))


@pytest.mark.deepspeed
def test_ranks_that_meet_once_a_window_may_have_unequal_numbers() -> None:
    assert on_ranks(unequal)[0] <= 1e-6


# --- a router's loss of the global batch, whose pass that counts is run sharded, too ---------------------------------

#: Of what the router's loss adds to three steps, where sums are made in float64 from end to end.
FLOAT64 = 1e-12
MIXTRAL = with_coefficient(replace(NUMERIC_HEADS["mixtral"], samples=domains(), router=COEFFICIENT), COEFFICIENT)
#: Those without a mark: before a release.
ROUTED = {
    "fsdp1-launched": [pytest.mark.thorough], "fsdp2-launched": [], "fsdp2-launched-offloaded": [pytest.mark.thorough],
    "deepspeed-zero-1": [pytest.mark.thorough], "deepspeed-zero-2": [], "deepspeed-zero-3": [],
}  # fmt: skip


def of_twin(backend: Backend) -> Trajectory:
    """Plain SGD along the formula's twin, in the precision of a backend."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(**batch)
        router = balance(outputs["router_logits"], TOP_K, batch["attention_mask"])
        return outputs["loss"] - COEFFICIENT * outputs["aux_loss"] + COEFFICIENT * router

    with in_precision_of(backend):
        return reference(replace(MIXTRAL, loss=loss), UNCLIPPED, backend)


def in_precision_of(backend: Backend) -> AbstractContextManager[Any]:
    return InFloat64() if backend.dtype is torch.float64 else nullcontext()


def routed(name: str) -> dict[str, Any]:
    """Of three steps the error of what the router's loss adds, what the backend's precision makes of it, and the log's.

    Exact by both splits and by a loop, and the mean over micro-batches.
    """
    backend, wanted = BACKENDS[name], of_twin(BACKENDS["ddp"])
    with InFloat64():
        without = reference(replace(with_coefficient(MIXTRAL, 0.0), router=0.0), UNCLIPPED, BACKENDS["ddp"])
    added = without.error(wanted)
    found: dict[str, Any] = {"floor": of_twin(backend).error(wanted) / added}
    for convention, split in (*(("exact", split) for split in SPLITS), ("mean", SPLITS[0]), ("loop", SPLITS[0])):
        with in_precision_of(backend):
            if convention == "loop":
                steps = loops.train(MIXTRAL, backend, split, UNCLIPPED, router_loss="exact")
            else:
                steps = train(MIXTRAL, backend, split, "apply", UNCLIPPED, FOLDER, router_loss=convention)
        found[f"{convention} {split}"] = steps.error(wanted) / added, furthest(steps.losses, wanted.losses)
    return found


@pytest.mark.timeout(1560)
@pytest.mark.parametrize(
    "case", [pytest.param(f"{name} routed", marks=[BACKENDS[name].mark, *marks]) for name, marks in ROUTED.items()]
)
def test_a_routers_loss_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    found = rows[case]
    assert "raised" not in found, found
    # A float32 backend is held to what float32 makes of the same formula.
    tolerance = max(FLOAT64, 2 * found.pop("floor"))
    mean, _ = found.pop(f"mean {SPLITS[0]}")
    assert mean > 0.1 and len(found) == 3
    assert all(error <= tolerance and loss <= 1e-6 for error, loss in found.values()), found


BF16_0 = deepspeed(0, "-bf16", reports_norm=False, **IN_BF16)


def losses(path: str) -> tuple[list[float], dict[str, Any]]:
    """As logged in three steps; the weights in float32 are its optimizer's alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory, "gathered", lambda model, _: dict(model.module.named_parameters()))
        found = train(HEADS["llama"], BF16_0, (1, 4), path, UNCLIPPED, FOLDER)
    return found.losses, dict(observations.recorded()[-1])


@pytest.mark.deepspeed
@pytest.mark.parametrize("path", ["apply", "trainer"])
def test_without_zero_in_bfloat16_it_trains(path: str) -> None:
    """DeepSpeed then steps the optimizer on zeros as it makes its states, before the first window."""
    ours, report = on_ranks(losses, path)[0]
    wanted = reference(HEADS["llama"], UNCLIPPED, BF16_0).losses
    # bfloat16 has 8 bits; the second and the third step begin from other weights.
    assert furthest(ours, wanted) < 2e-2, (ours, wanted)
    assert report["reached_optimizer"].startswith(("yes", "not checked")), report
