"""TRL's preference and reinforcement trainers on tiny models, and one step of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers as hf
from datasets import Dataset
from torch import nn
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.clients.words import prompts_and_answers, tokenizer
from tests.numerics.heads import llama, llama_config, seeded
from tests.numerics.parity import Recorder, Returned, Step, step_of, training_arguments

datasets.disable_progress_bars()

LLAMA = seeded(llama)


@dataclass(frozen=True)
class Preference:
    """One trainer of TRL.

    Attributes:
        stock, ours: the trainer as it is, and our subclass of it.
        config: the class of its arguments.
        rows: its data set.
        build: its model.
        arguments: further arguments of its config.
        given: further arguments of the trainer.
        sampled: it samples its answers in groups as it trains, in whole groups only.
    """

    stock: type
    ours: type
    config: type
    rows: Sequence[Mapping[str, Any]]
    build: Callable[[], nn.Module]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[], Mapping[str, Any]] = dict
    sampled: bool = False


def preference(
    trainer: type,
    config: type,
    rows: Sequence[Mapping[str, Any]],
    build: Callable[[], nn.Module] = LLAMA,
    sampled: bool = False,
    **further: Any,
) -> Preference:
    # Groups of answers come from a sampler of their trainer's own.
    recorder = Returned if sampled else Recorder
    stock = type(f"Stock{trainer.__name__}", (recorder, trainer), {})
    ours = type(f"Our{trainer.__name__}", (recorder, trainer, GlobalBatchTrainer), {})
    return Preference(stock, ours, config, rows, build, sampled=sampled, **further)


def another() -> dict[str, Any]:
    """A reference model that differs, so that the loss is not the same for every pair."""
    model = LLAMA()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return {"ref_model": model}


def letters(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs between answers."""
    return [float(len(completion) % 7) for completion in completions]


def _preferences() -> dict[str, Preference]:
    rows = prompts_and_answers()
    pairs = [{"prompt": r["prompt"], "chosen": r["good"], "rejected": r["bad"]} for r in rows]
    rated = [{"prompt": r["prompt"], "completion": r["good"], "label": bool(i % 2)} for i, r in enumerate(rows)]
    texts = [{key: r["prompt"] + r[answer] for key, answer in (("chosen", "good"), ("rejected", "bad"))} for r in rows]
    prompts = [{"prompt": r["prompt"]} for r in rows]
    answers = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
    sampled: dict[str, Any] = {"sampled": True, "given": lambda: {"reward_funcs": letters}}
    return {
        "DPO": preference(DPOTrainer, DPOConfig, pairs, given=another),
        "KTO": preference(KTOTrainer, KTOConfig, rated, given=another, arguments={"loss_type": "apo_zero_unpaired"}),
        "Reward": preference(
            RewardTrainer,
            RewardConfig,
            texts,
            build=seeded(lambda: hf.LlamaForSequenceClassification(llama_config(num_labels=1))),
        ),
        "GRPO": preference(GRPOTrainer, GRPOConfig, prompts, arguments={**answers, "loss_type": "grpo"}, **sampled),
        "GRPO by tokens": preference(
            GRPOTrainer, GRPOConfig, prompts, arguments={**answers, "loss_type": "dapo"}, **sampled
        ),
        "Distillation": preference(
            DistillationTrainer,
            DistillationConfig,
            prompts,
            arguments={"max_completion_length": 6},
            given=lambda: {"teacher_model": another()["ref_model"]},
            sampled=True,
        ),
        "OnlineDPO": preference(
            OnlineDPOTrainer,
            OnlineDPOConfig,
            prompts,
            arguments={"max_new_tokens": 6, "missing_eos_penalty": None},
            **sampled,
        ),
        "RLOO": preference(RLOOTrainer, RLOOConfig, prompts, arguments=answers, **sampled),
    }


PREFERENCES = _preferences()


def _two_means() -> dict[str, Preference]:
    rows = prompts_and_answers()
    pairs = [{"prompt": r["prompt"], "chosen": r["good"], "rejected": r["bad"]} for r in rows]
    triples = [{**pair, "reference": row["good"] + " w1"} for pair, row in zip(pairs, rows, strict=True)]
    both = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}
    return {
        "CPO": preference(CPOTrainer, CPOConfig, pairs),
        "ORPO": preference(ORPOTrainer, ORPOConfig, pairs),
        "TPO": preference(TPOTrainer, TPOConfig, triples),
        "DPO and SFT": preference(DPOTrainer, DPOConfig, pairs, given=another, arguments=both),
    }


#: A mean over pairs and a mean over tokens, as two terms.
TWO_MEANS = _two_means()


def preference_step(
    kind: Preference, path: str, per_device: int, accumulate: int, output: Path, **arguments: Any
) -> Step:
    """One step, or more: stock, by the patch or by the subclass."""
    given = {"bf16": False, "gradient_checkpointing": False, **kind.arguments, **arguments}
    args = training_arguments(output, per_device, accumulate, kind=kind.config, **given)

    def make() -> Any:
        cls = kind.ours if path == "trainer" else kind.stock
        trainer = cls(
            model=kind.build(),
            args=args,
            train_dataset=Dataset.from_list(list(kind.rows)),
            processing_class=tokenizer(),
            **kind.given(),
        )
        # Answers are sampled as training goes, others on every rank.
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        return trainer

    return step_of(make, path)
