"""What is trained with samples that Ulysses cuts: adapters, packed documents, smoothed labels, in bfloat16, resumed,
by a loop, by a launched script.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_accum_fix import observations
from tests.backends import sequence_parallel as cut
from tests.backends.rows import DEEPSPEED, LAUNCHED_DEEPSPEED, Backend, zero
from tests.backends.trajectory import furthest, gathered, variables, without_compiling
from tests.numerics.parity import applied, recorder, relative, trainable, training_arguments
from tests.ranks import on_ranks

#: What is given to `cut.under_ulysses`.
ASKED: dict[str, dict[str, Any]] = {
    "LoRA": {"adapt": cut.lora},
    "gradient checkpointing": {"arguments": {"gradient_checkpointing": True}},
    "smoothed labels": cut.SMOOTHING,
    "packed documents": {},
}


def asked(stage: int, what: str) -> list[cut.Cut]:
    """Two steps by the patch and by stock."""
    packs = "packed documents" in what
    attention = mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": within_documents} if packs else {})
    with attention, mock.patch.object(cut, "samples", packed if packs else cut.samples):
        return [cut.under_ulysses(stage, 2, (2, 4), path, **ASKED[what]) for path in ("apply", "stock")]


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("what", ASKED)
def test_what_trains_long_samples(stage: int, what: str) -> None:
    ours, stock = on_ranks(asked, stage, what)[0]
    # The change of adapters is small beside what float32 keeps of them.
    assert ours.error <= 8e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert stock.error > 0.3


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
        pytest.param(3, SHARED, ALONE, marks=pytest.mark.thorough),
        pytest.param(3, SHARED, SHARED, marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_is_resumed_with_as_many_ranks_to_a_sample_or_others(
    stage: int, before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    """Stock ends under Ulysses: 'UlyssesSPDataLoaderAdapter' object has no attribute 'dataset'."""
    for layout, resumes in ((before, False), (after, True)):
        error, loss, exact = on_ranks(leg, stage, layout, tmp_path, resumes)[0]
        assert error <= 4e-6 and loss <= 1e-6 and exact, (layout, error, loss)


EXPERTS, CHOSEN, WEIGHT, ROWS = 4, 2, 0.5, 2


def mixtral(_: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
    router = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "sdpa"}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts, **router, **tokens))


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


sgd_with_router = cut.along(with_router)
