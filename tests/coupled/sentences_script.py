"""A user's script, which does not know this package: ``python sentences_script.py FOLDER ROWS STEPS OUT``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer


def main(folder: str, rows: str, steps: str, out: str) -> None:
    from tests.clients.words import prompts_and_answers

    encoder = Transformer(folder)
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    given: dict[str, Any] = {
        "max_steps": 1,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    args = SentenceTransformerTrainingArguments(
        out, per_device_train_batch_size=int(rows), gradient_accumulation_steps=int(steps), **given
    )
    data = Dataset.from_list([{"anchor": row["prompt"], "positive": row["good"]} for row in prompts_and_answers()])
    loss = MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss).train()
    torch.save({name: each.detach() - before[name] for name, each in model.named_parameters()}, f"{out}/moved.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
