"""sentence-transformers' trainers on a tiny BERT, and one step of each.

It is imported where a trainer is built only, so that the tests of other libraries do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.clients.words import prompts_and_answers, tokenizer
from tests.numerics.heads import bert
from tests.numerics.parity import Returned, Step, step_of, training_arguments

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Objective:
    """One loss of sentence-transformers.

    Attributes:
        loss: its class, by name.
        rows: its data set.
        item_mean: its loss of a full batch is the mean over samples; the others couple the samples of a micro-batch.
        crossed: a model reads both sentences at once, and gives a score.
    """

    loss: str
    rows: Callable[[], Rows]
    item_mean: bool = True
    crossed: bool = False


def rated() -> Rows:
    return [
        {"first": row["good"], "second": row["bad"], "label": 0.1 * index}
        for index, row in enumerate(prompts_and_answers())
    ]


def answered() -> Rows:
    return [{"anchor": row["prompt"], "positive": row["good"]} for row in prompts_and_answers()]


OBJECTIVES = {
    "cosine similarity": Objective("CosineSimilarityLoss", rated),
    "in-batch negatives": Objective("MultipleNegativesRankingLoss", answered, item_mean=False),
    "order of similarities": Objective("CoSENTLoss", rated, item_mean=False),
    "cross-encoder": Objective("BinaryCrossEntropyLoss", rated, crossed=True),
}


def weights(folder: Path) -> Path:
    """A folder with a tiny encoder and its tokenizer."""
    torch.manual_seed(0)
    bert("BertModel")().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sentences_step(
    objective: Objective, path: str, per_device: int, accumulate: int, folder: Path, **arguments: Any
) -> Step:
    """One step, or more, from the `weights` in a folder: stock, by the patch or by the subclass."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers import cross_encoder
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    stock, config, place = (
        (cross_encoder.CrossEncoderTrainer, cross_encoder.CrossEncoderTrainingArguments, cross_encoder.losses)
        if objective.crossed
        else (st.SentenceTransformerTrainer, st.SentenceTransformerTrainingArguments, losses)
    )
    args = training_arguments(folder, per_device, accumulate, kind=config, **arguments)
    bases = (Returned, stock, GlobalBatchTrainer) if path == "trainer" else (Returned, stock)

    def make() -> Any:
        # The head of a cross-encoder is not in the folder.
        torch.manual_seed(0)
        if objective.crossed:
            model = st.CrossEncoder(str(folder), num_labels=1, device="cpu")
        else:
            encoder = Transformer(str(folder))
            modules = [encoder, Pooling(encoder.get_embedding_dimension())]
            model = st.SentenceTransformer(modules=modules, device="cpu")
        model = model.double()
        return type(stock.__name__, bases, {})(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([dict(row) for row in objective.rows()]),
            loss=getattr(place, objective.loss)(model),
        )

    return step_of(make, path)
