"""A training script whose layout is its arguments: samples, accumulation steps, engine, and a fault."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_accum_fix
from hf_accum_fix.verification.projection import named
from tests.backends.rows import by_tp_plan, fsdp_argument, zero
from tests.backends.sequence_parallel import stacked, ulysses
from tests.backends.trajectory import offloading_on_a_cpu, sharding_on

SAMPLES, SIZES = 20, {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def samples() -> list[dict[str, Tensor]]:
    """Ragged ones."""
    draws = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (3 + 5 * at % 9,), generator=draws) for at in range(SAMPLES)]
    return [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(len(ids))} for ids in rows]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of one width, since gloo gathers equal ones alone."""
    widest = {"input_ids": torch.zeros(12).long(), "labels": torch.full((12,), -100), "position_ids": torch.arange(12)}
    return {key: value[: len(rows)] for key, value in stacked([*rows, widest]).items()}


def collate_classes(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same, each with a class."""
    return {**collate(rows), "labels": torch.tensor([len(row["input_ids"]) % 3 for row in rows])}


class Faulty(Trainer):
    """A trainer with a fault."""

    fault = ""
    _calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Drop the second micro-batch; clip the gradient after each; or scale one in the engine."""
        self._calls += 1
        if self._calls == 2 and self.fault == "drop":
            kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            loss = super().training_step(*args, **kwargs)
            for parameter, gradient in zip(self.model.parameters(), kept, strict=True):
                parameter.grad = gradient
            return loss
        scaled = dict(named(self.model_wrapped)).get("model.layers.1.mlp.up_proj.weight")
        steps_inside = hasattr(self.model_wrapped, "is_gradient_accumulation_boundary")
        if self.fault == "engine" and steps_inside and self._calls == 1:
            assert scaled is not None
            scaled.register_hook(lambda gradient: 1.01 * gradient)
        loss = super().training_step(*args, **kwargs)
        if self.fault == "engine" and not steps_inside and scaled is not None and scaled.grad is not None:
            scaled.grad.mul_(1.01)
        if self.fault == "clip":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Twice as large."""
        found = super().compute_loss(*args, **kwargs)
        factor = 2 if self.fault == "twice" else 1
        return (factor * found[0], found[1]) if isinstance(found, tuple) else factor * found


def trainer_of(given: Sequence[str] | None = None) -> Trainer:
    """What the arguments of the command line, or these, describe."""
    parser = argparse.ArgumentParser()
    for name, usual in {"size": 8, "steps": 1, "seed": 0, "engine": "", "fault": "", "dtype": "float32"}.items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    for name in ("apply", "classes"):
        parser.add_argument(f"--{name}", action="store_true")
    words = parser.parse_args(given)
    if words.apply:
        hf_accum_fix.apply()
    # Before the arguments are: a config of ZeRO-3 makes some models sharded ones.
    unset_hf_deepspeed_config()
    torch.manual_seed(words.seed)
    head = LlamaForSequenceClassification if words.classes else LlamaForCausalLM
    model: Any = head(LlamaConfig(**SIZES, **HEADS, **TOKENS, num_labels=3)).to(getattr(torch, words.dtype))
    more: dict[str, Any] = {}
    if words.engine.startswith(("zero", "sp")):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        more = zero(int(words.engine.lstrip("zerosp")[0]), *(["optimizer"] if "offloaded" in words.engine else []))
        stack = contextlib.ExitStack()
        stack.enter_context(offloading_on_a_cpu())
        # It outlives this function.
        stack.pop_all()
    if words.engine.startswith("sp"):
        deepspeed.init_distributed("gloo")
        more |= ulysses(2)
    if words.engine.startswith("fsdp"):
        more = fsdp_argument(int(words.engine[4]))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=words.size, gradient_accumulation_steps=words.steps,
        use_cpu=True, report_to="none", save_strategy="no", remove_unused_columns=False, **more,
    )  # fmt: skip
    if words.engine.startswith("fsdp") or words.engine == "tp":
        sharding_on(arguments)
    model = by_tp_plan(model) if words.engine == "tp" else model
    if words.fault == "layer":
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 1.01 * gradient)
    if words.fault == "frozen":
        model.lm_head.weight.register_hook(torch.zeros_like)
    collator = collate_classes if words.classes else collate
    trainer = Faulty(model=model, args=arguments, train_dataset=samples(), data_collator=collator)
    trainer.fault = words.fault
    return trainer


if __name__ == "__main__":
    trainer_of().train()
    print("trained")
