"""Samples cut over ranks, by DeepSpeed's Ulysses ("sp") or accelerate's context parallelism ("cp"): the step, the log,
the norm and clipping of the global batch; and what is trained so.

Context parallelism's attention needs a GPU; another one takes its place (`tests.backends.sequence_parallel.OverRanks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import MixtralConfig, MixtralForCausalLM, Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_accum_fix import observations
from hf_accum_fix.engines import sample_shards
from tests.backends import sequence_parallel as cut
from tests.backends.rows import DEEPSPEED, LAUNCHED_DEEPSPEED, Backend, zero
from tests.backends.trajectory import attempted, furthest, gathered, variables, without_compiling
from tests.logged import logged
from tests.numerics.parity import PATHS, StockRecorder, applied, recorder, relative, trainable, training_arguments
from tests.ranks import on_ranks

_whole = cut.samples
#: Where the second document of a sample begins, over and over.
SECOND = (5, 9, 3)


def packed(targets: Sequence[tuple[int, int]], count: int) -> list[dict[str, Tensor]]:
    """Two documents in each sample, by positions that begin again."""
    rows = _whole(targets, count)
    for at, row in enumerate(rows):
        second, length = SECOND[at % len(SECOND)], len(row["input_ids"])
        row["labels"][second] = -100
        row["position_ids"] = torch.cat([torch.arange(second), torch.arange(length - second)])
    return rows


def within_documents(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention as flash attention has it, which needs a GPU: documents begin where positions do."""
    document, place = (given["position_ids"] == 0).cumsum(-1), torch.arange(q.shape[2])
    seen = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)
    scores = (q @ k.transpose(-1, -2) * given["scaling"]).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


@contextmanager
def of_documents() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": within_documents}))
        stack.enter_context(mock.patch.object(cut, "samples", packed))
        yield


def copying(trainer: Any, model: nn.Module, inputs: Any, *rest: Any) -> Any:
    """A step of one's own that hands on copies, which are not to be cut again."""
    return Trainer.training_step(trainer, model, {key: each.clone() for key, each in inputs.items()}, *rest)


EXPERTS, CHOSEN, WEIGHT, ROWS = 4, 2, 0.5, 2


def mixtral(_: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
    router = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT, "head_dim": 8}
    return MixtralForCausalLM(MixtralConfig(**cut.SIZES, **experts, **router))


def with_router(model: nn.Module, rows: Sequence[dict[str, Tensor]]) -> Tensor:
    """The mean over all targets, and the router's loss of the global batch."""
    total, targets, every = torch.zeros(()), 0, []
    for at in range(0, len(rows), ROWS):
        batch = cut.stacked(rows[at : at + ROWS])
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        labels, logits = batch["labels"][:, 1:].flatten(), out.logits[:, :-1].flatten(0, 1)
        total, targets = total + cross_entropy(logits, labels, reduction="sum"), targets + int((labels >= 0).sum())
        every.append(out.router_logits)
    routing = tuple(map(torch.cat, zip(*every, strict=True)))
    return total / targets + WEIGHT * load_balancing_loss_func(routing, EXPERTS, CHOSEN)


@dataclass(frozen=True)
class Training:
    """What is trained."""

    given: Mapping[str, Any] = field(default_factory=dict)  # to `cut.under_ulysses` or `cut.under_context`
    #: what is put in the place of something else meanwhile
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    paths: Sequence[str] = PATHS  # by which it is trained
    right: bool = False  # stock is


CHECKPOINTS = {"arguments": {"gradient_checkpointing": True}}
OF_ULYSSES = {
    "plain": Training(),
    "clips": Training({"max_norm": cut.CLIPPED}),
    "targets on the first": Training({"targets": cut.ON_THE_FIRST}),
    "targets on the second": Training({"targets": cut.ON_THE_SECOND}),
    "LoRA": Training({"adapt": cut.lora}),
    "checkpoints": Training(CHECKPOINTS),
    "smooths labels": Training(cut.SMOOTHING),
    "packed documents": Training(around=of_documents),
}
OWN_MEAN = {"hands_number": False}
ROUTED = {"adapt": mixtral, "reference": cut.along(with_router), "options": {"router_loss": "exact"}}
#: Upstream counts before it cuts, and hands that to a model that takes it.
OF_CONTEXT = {
    "takes the number": Training(right=True),
    "returns its own mean": Training(OWN_MEAN),
    "clips": Training({"max_norm": cut.CLIPPED}, right=True),
    "LoRA": Training({"adapt": cut.lora}, right=True),
    "checkpoints": Training({**CHECKPOINTS, **OWN_MEAN}),
    "few targets": Training({"targets": cut.ON_THE_FIRST, **OWN_MEAN}),
    "smooths labels": Training({**cut.SMOOTHING, **OWN_MEAN}),
    "copies its samples": Training(
        OWN_MEAN, lambda: mock.patch.object(StockRecorder, "training_step", copying, create=True), ("stock", "apply")
    ),
    "has a router's loss": Training(ROUTED, paths=("stock", "apply")),
}

#: By name: the ZeRO stage, None under context parallelism; ranks; b and G; the training.
Row = tuple[int | None, int, tuple[int, int], str]


def named(*rows: Row) -> dict[str, Row]:
    return {f"{'cp' if z is None else f'sp, ZeRO {z}'}, {r} ranks, {b} x {g}, {t}": (z, r, (b, g), t)
            for z, r, (b, g), t in rows}  # fmt: skip


SHOWN = named(
    *((2, 2, (1, 8), name) for name in ("plain", "clips", "targets on the first")),
    *((3, 2, (2, 4), name) for name in OF_ULYSSES if name not in ("plain", "targets on the first")),
    *((2, 4, (1, 4), name) for name in ("plain", "targets on the second")),
    *((None, 2, (2, 2), name) for name in ("copies its samples", "has a router's loss")),
    *((None, 2, (1, 4), "few targets"), (None, 4, (1, 4), "returns its own mean")),
)
#: Before a release.
THOROUGH = named(
    *((stage, 2, split, "plain") for stage in range(4) for split in ((1, 1), (2, 8))),
    *((stage, 4, (1, 4), "clips") for stage in range(4)),
    *((2, 2, (2, 4), name) for name in ("LoRA", "checkpoints", "smooths labels", "packed documents")),
    *((None, 2, (1, 4), name) for name in ("takes the number", "LoRA", "checkpoints", "clips", "smooths labels")),
    *((None, 4, (1, 4), name) for name in ("takes the number", "clips", "LoRA", "smooths labels")),
)
CASES = SHOWN | THOROUGH


def training_of(case: str) -> Training:
    stage, *_, name = CASES[case]
    return (OF_CONTEXT if stage is None else OF_ULYSSES)[name]


def each(cases: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """By case and path the steps, or what was raised."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for case in cases:
        (stage, ranks, split, _), training, found[case] = CASES[case], training_of(case), {}
        for path in training.paths:
            if path == "stock" and stage is not None and ranks > cut.CUT:
                # Some ranks end, and the others wait for them.
                continue
            with training.around():
                under: Any = (cut.under_context,) if stage is None else (cut.under_ulysses, stage)
                step = attempted(*under, ranks, split, path, **training.given)
            found[case][path] = step if isinstance(step, dict) else vars(step)
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return cut.rows_of(request, each, lambda case: CASES[case][1])


def marked(case: str) -> Any:
    mark = pytest.mark.slow if CASES[case][0] is None else pytest.mark.deepspeed
    return pytest.param(case, marks=[mark, *[pytest.mark.thorough] * (case not in SHOWN)])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_every_step_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    (stage, _, split, name), training, row = CASES[case], training_of(case), rows[case]
    assert not [each for each in row.values() if "raised" in each], row
    # Of two float32 steps; under Ulysses the change of adapters is small beside what float32 keeps of them.
    tolerance = 8e-6 if name == "LoRA" and stage is not None else 4e-6
    for one in (row[path] for path in ("apply", "trainer") if path in row):
        assert one["error"] <= tolerance and one["loss"] <= 1e-6 and one["report"]["exact"], one
        assert one["norm"] is None if stage == 0 else one["norm"] <= tolerance, one
        assert name != "plain" or one["report"]["reached_optimizer"].startswith("yes, "), one
    if "stock" in row:
        # A mean of means, which stage 3 divides by all ranks and the others by those that share no sample.
        right = training.right or (stage == 3 and split[1] == 1)
        assert row["stock"]["error"] <= 4e-6 if right else row["stock"]["error"] > 0.1, row["stock"]


# --- Ulysses alone ----------------------------------------------------------------------------------------------------


def unmeasured() -> tuple[cut.Cut, cut.Cut]:
    """A training whose engine cannot be measured, and stock's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_shards, "measured_divisor", lambda *_: 1 / 0)
        ours = cut.under_ulysses(2, 2, (1, 8), "apply")
    return ours, cut.under_ulysses(2, 2, (1, 8), "stock")


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
def test_an_engine_that_cannot_be_measured_trains_as_stock_and_says_so() -> None:
    ours, stock = on_ranks(unmeasured, ranks=2, timeout=120)[0]
    assert not ours.report["exact"]
    assert (ours.error, ours.loss) == pytest.approx((stock.error, stock.loss), rel=1e-4)


def in_bfloat16(stage: int, of_engine: dict[str, Any]) -> list[cut.Cut]:
    given = {"bf16": True, "deepspeed": zero(stage, **of_engine)["deepspeed"]}
    return [cut.under_ulysses(stage, 2, (2, 4), path, arguments=given) for path in ("apply", "stock")]


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_bfloat16(stage: int) -> None:
    """Its own precision; where DeepSpeed adds micro-batches in bfloat16, its default, it is reported as not exact."""
    for of_engine, exact in (({"data_types": {"grad_accum_dtype": "fp32"}}, True), ({}, False)):
        ours, stock = on_ranks(in_bfloat16, stage, of_engine)[0]
        assert ours.error <= 2e-2 and ours.report["exact"] == exact and stock.error > 0.3, (ours, stock)
        assert not exact or abs(ours.factor - 1) <= 1e-3, ours


#: sp_size, b and G of what loads the same samples in a window.
SHARED, ALONE = (2, 2, 4), (1, 2, 2)


def leg(stage: int, layout: tuple[int, int, int], folder: Path, resumes: bool) -> tuple[float, float, bool]:
    """Train three steps, or the last two from a checkpoint: errors of change and losses, and whether it says exact."""
    (sp, *split), model = layout, cut.llama()
    rows = cut.samples(cut.RAGGED, 48)
    windows = [cut.of_window(rows, 2, SHARED[1:], at, each_loads=True) for at in range(3)]
    change, losses, _ = cut.plain_sgd(model, windows, cut.UNCLIPPED)
    start = trainable(model)
    around = cut.registered() if sp > 1 else nullcontext()
    with variables(LAUNCHED_DEEPSPEED), applied("apply"), around:
        without_compiling()
        layout_of = cut.ulysses(2) if sp > 1 else {}
        saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "learning_rate": cut.RATE}
        given = {"ddp_backend": "gloo", "max_grad_norm": cut.UNCLIPPED, **saved, **zero(stage), **layout_of}
        args = training_arguments(folder, *split, **given)
        trainer = recorder("apply")(model=model, args=args, train_dataset=rows, data_collator=cut.stacked)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resumes else None)
        end = gathered(trainer.model_wrapped, Backend("", DEEPSPEED))
    unset_hf_deepspeed_config()
    found = {name: (end[name] - start[name]).double() for name in start}
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return relative(found, change), furthest(logged, losses), bool(observations.recorded()[-1]["exact"])


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        (2, ALONE, SHARED),
        *(pytest.param(3, SHARED, after, marks=pytest.mark.thorough) for after in (ALONE, SHARED)),
    ],
)
def test_a_checkpoint_is_resumed_with_as_many_ranks_to_a_sample_or_others(
    stage: int, before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    """Stock ends under Ulysses: 'UlyssesSPDataLoaderAdapter' object has no attribute 'dataset'."""
    for layout, resumes in ((before, False), (after, True)):
        error, loss, exact = on_ranks(leg, stage, layout, tmp_path, resumes)[0]
        assert error <= 4e-6 and loss <= 1e-6 and exact, (layout, error, loss)


# --- context parallelism alone ----------------------------------------------------------------------------------------


class Streamed(IterableDataset[Any]):
    """Samples that have no length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __getitem__(self, of_window: slice) -> list[Any]:
        return self.rows[of_window]


def streamed() -> list[tuple[cut.Cut, list[str]]]:
    """With the warnings: stock, ours, and ours where accelerate dispatches."""
    found = []
    for path, dispatches in (("stock", None), ("apply", None), ("apply", True)):
        arguments = {"accelerator_config": {"dispatch_batches": dispatches}}
        with mock.patch.object(cut, "samples", lambda *given: Streamed(_whole(*given))), logged() as said:
            found.append((cut.under_context(cut.CUT, (1, 2), path, arguments=arguments), said))
    return found


@pytest.mark.slow
def test_a_stream_gives_ranks_that_share_a_sample_the_same() -> None:
    """accelerate's dispatcher, stock's default for a stream, gives each of them another, whose parts are mixed."""
    (stock, _), (ours, said), (dispatched, warned) = on_ranks(streamed)[0]
    assert ours.error <= 4e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert any("dispatch_batches, the Trainer's default for a stream, is off" in each for each in said), said
    assert stock.error > 0.1 and dispatched.error > 0.1 and not dispatched.report["exact"], (stock, dispatched)
    assert any("got different samples on ranks that share one" in each for each in warned), warned
