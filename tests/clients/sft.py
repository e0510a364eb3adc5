"""TRL's SFTTrainer on tiny models: the ways of using it, and one step of each.

TRL's fused head computes log-probabilities in float32 whatever the model's type, so its steps agree with the float64
full batch to float32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.clients.words import prompts_and_answers, tokenizer
from tests.numerics.heads import HEADS, Batch, Head, Sample, llama, seeded
from tests.numerics.heads.head import declared_false
from tests.numerics.heads.samples import text
from tests.numerics.parity import Recorder, Step, cut, reference_step, step_of, training_arguments

datasets.disable_progress_bars()

SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))


@dataclass(frozen=True)
class Way:
    """One way of using SFTTrainer.

    Attributes:
        head: model, samples, and the loss of a batch of documents.
        rows: what SFTTrainer is given: columns of a data set.
        config: further arguments of SFTConfig.
        own_collator: the head's batches in place of TRL's collator; a row then holds the index of its sample.
        stock_wrong: the stock step is off by more than 1e-3 for the split (2, 4).
    """

    head: Head
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    own_collator: bool = False
    stock_wrong: bool = False


class StockSFT(Recorder, SFTTrainer):
    """SFTTrainer as it is; patched when apply() is active."""


class OurSFT(Recorder, SFTTrainer, GlobalBatchTrainer):
    """The subclass, put last."""


def tokens(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{key: sample[key].tolist() for key in ("input_ids", "labels")} for sample in samples]


def indices(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Rows of tokens, each with the index under which the collator finds the whole sample."""
    return [{**row, "index": index} for index, row in enumerate(tokens(samples))]


def completions() -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "completion": row["good"]} for row in prompts_and_answers()]


def dft(model: nn.Module, batch: Batch) -> Tensor:
    """Dynamic fine-tuning: every token's loss times its own probability, without gradient through that."""
    labels = batch.pop("labels")[:, 1:]
    log_p = model(**batch)["logits"][:, :-1].double().log_softmax(-1)
    log_p = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    valid = labels != -100
    return -(log_p * log_p.exp().detach() * valid).sum() / valid.sum()


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def ways() -> dict[str, Way]:
    plain, moe = HEADS["llama"], HEADS["qwen3-moe"]
    ragged = tokens(plain.samples)
    twice = text(lengths=(5, 17, 9, 3, 22, 11, 6, 14) * 2, seed=1)
    packed = {"packing": True, "max_length": 24}
    smooth, blank, vl, llava = (HEADS[n] for n in ("llama-smoothing", "llama-empty-micro-batches", "qwen-vl", "llava"))
    as_given = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    return {
        "tokens": Way(plain, ragged),
        "prompt and completion": Way(plain, completions()),
        # TRL's own preparation would drop them.
        "micro-batches without a target": Way(blank, indices(blank.samples), as_given, own_collator=True),
        "padding-free": Way(plain, ragged, {"padding_free": True, "max_length": None}),
        "packed": Way(plain, tokens(twice), packed),
        "packed, wrapped": Way(plain, tokens(twice), {**packed, "packing_strategy": "wrapped"}),
        "dft": Way(replace(plain, loss=dft), ragged, {"loss_type": "dft"}),
        "label smoothing": Way(smooth, ragged, smooth.arguments),
        "LoRA": Way(replace(plain, build=seeded(lora)), ragged),
        "mixture of experts": Way(moe, tokens(moe.samples)),
        "mixture of experts, declared false": Way(
            replace(moe, build=declared_false(moe.build)), tokens(moe.samples), stock_wrong=True
        ),
        "LLaVA": Way(llava, indices(llava.samples), as_given, own_collator=True),
        "Qwen-VL, declared false": Way(vl, indices(vl.samples), as_given, own_collator=True, stock_wrong=True),
    }


WAYS = ways()


def sft_step(way: Way, path: str, per_device: int, accumulate: int, output: Path, **config: Any) -> Step:
    """One step, or more, of SFTTrainer: stock, by the patch or by the subclass."""
    given = {"bf16": False, "gradient_checkpointing": False, **way.config, **config}
    args = training_arguments(output, per_device, accumulate, kind=SFTConfig, **given)

    def make() -> Any:
        cls = OurSFT if path == "trainer" else StockSFT
        return cls(
            model=way.head.build(),
            args=args,
            train_dataset=Dataset.from_list(list(way.rows)),
            processing_class=tokenizer(),
            data_collator=_collator(way.head) if way.own_collator else None,
        )

    return step_of(make, path)


def sft_reference(way: Way, trainer: Any, per_device: int) -> Step:
    """The full-batch step over what TRL made of the rows, every document by itself."""
    samples = list(way.head.samples) if way.own_collator else documents(trainer.train_dataset)
    return reference_step(way.head, cut(samples, per_device))


def documents(rows: Any) -> list[Sample]:
    """The documents of prepared rows, of which a packed row holds several."""
    found = []
    for row in rows:
        lengths = row.get("seq_lengths") or [len(row["input_ids"])]
        ids = torch.tensor(row["input_ids"]).split(lengths)
        labels = torch.tensor(row.get("labels", row["input_ids"])).split(lengths)
        found += [
            {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": label}
            for one, label in zip(ids, labels, strict=True)
        ]
    return found


def _collator(head: Head) -> Callable[[Sequence[Any]], Batch]:
    return lambda rows: head.batch([head.samples[row["index"]] for row in rows])
