"""A user's script, which does not know this package: ``python sentences_script.py FOLDER ROWS STEPS OUT``."""

from __future__ import annotations

import sys

import sentence_transformers as st
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer


def main(folder: str, rows: str, steps: str, out: str) -> None:
    from tests.clients.words import prompts_and_answers

    encoder = Transformer(folder)
    model = st.SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    args = st.SentenceTransformerTrainingArguments(
        out, per_device_train_batch_size=int(rows), gradient_accumulation_steps=int(steps), max_steps=1, use_cpu=True,
        learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=1e9, report_to="none",
        save_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list([{"anchor": row["prompt"], "positive": row["good"]} for row in prompts_and_answers()])
    loss = MultipleNegativesRankingLoss(model)
    st.SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss).train()
    torch.save({name: each.detach() - before[name] for name, each in model.named_parameters()}, f"{out}/moved.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
