"""A training script that knows nothing of this package: one SGD step (lr 1, no clipping) of BERT's masked LM.

plain_training.py OUTPUT.pt PER_DEVICE ACCUMULATE
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from tests.numerics.heads import HEADS

HEAD = HEADS["bert-mlm"]


class InOrder(Trainer):
    def _get_train_sampler(self, *args: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main(output: str, per_device: int, accumulate: int) -> None:
    model = HEAD.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    args = TrainingArguments(
        f"{output}.trainer", per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulate,
        max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=1e30, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, remove_unused_columns=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = InOrder(model=model, args=args, train_dataset=list(HEAD.samples), data_collator=HEAD.batch)
    trainer.train()
    if args.process_index == 0:
        change = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        logged = trainer.state.log_history[0]
        found = {"change": change, "loss": logged["loss"], "norm": logged["grad_norm"], "ranks": args.world_size}
        torch.save(found, output)
    if args.world_size > 1:
        torch.distributed.barrier()
        # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
