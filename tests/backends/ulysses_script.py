"""A user's script, which does not know this package: ``accelerate launch ... ulysses_script.py OUT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from tests.backends.sequence_parallel import RAGGED, RATE, llama, samples, stacked


def main(out: str) -> None:
    # What a CPU needs: DeepSpeed's own collectives would be compiled, and accelerate would see one process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    given: dict[str, Any] = {
        "max_steps": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e30,
        "logging_steps": 1,
        "remove_unused_columns": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }
    args = TrainingArguments(out, per_device_train_batch_size=2, gradient_accumulation_steps=4, **given)
    model = llama()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer = Trainer(model=model, args=args, train_dataset=samples(RAGGED, 48), data_collator=stacked)
    trainer.train()
    if dist.get_rank() == 0:
        change = {name: each.detach() - before[name] for name, each in trainer.model.named_parameters()}
        torch.save((change, trainer.state.log_history[0]), Path(out) / "moved.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
