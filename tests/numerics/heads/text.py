"""Text: causal, masked, and everything that classifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.numerics.heads.head import FLOAT64, NO_DROPOUT, TINY, VOCABULARY, Head, Origin, of_class, seeded
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import (
    answers,
    first_is_target,
    masked_tokens,
    next_sentence,
    one_class,
    replaced_tokens,
    text,
    token_classes,
    with_labels,
    with_shift_labels,
)

ENCODER = {**TINY, **NO_DROPOUT, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**TINY, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def bert(head: str, **overrides: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, head)(hf.BertConfig(**{**ENCODER, **overrides}))


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    llama_tokens = hf.LlamaForTokenClassification(hf.LlamaConfig(**DECODER, num_labels=4, classifier_dropout=0.0))
    return peft.get_peft_model(llama_tokens, config)


def prompt_tuning() -> nn.Module:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(llama(), config)


def heads() -> list[Head]:
    mlm = with_labels(masked_tokens)
    tokens = with_labels(token_classes)
    classes = with_labels(one_class)
    multi = [{**s, "labels": torch.tensor([i % 2, 1, i % 3 == 0], dtype=torch.float64)} for i, s in enumerate(text())]
    empty = text(masked=lambda index, length: length if index in (1, 2, 3, 6) else 2)
    smooth = {"label_smoothing_factor": 0.1}
    three = {**ENCODER, "num_labels": 3}
    four = {**ENCODER, "num_labels": 4}
    return [
        Head("llama", seeded(llama), text(), stock_wrong=False),
        Head("llama-position-0", seeded(llama), text(masked=first_is_target), stock_wrong=False),
        Head("llama-empty-micro-batches", seeded(llama), empty, stock_wrong=False),
        Head("llama-shift-labels", seeded(llama), text(), stock_wrong=False, collate=with_shift_labels),
        Head(
            "llama-smoothing", seeded(llama), text(), stock_wrong=False, loss=smoothing_reference(0.1), arguments=smooth
        ),
        Head("lora", seeded(lora), tokens),
        Head("prompt-tuning", seeded(prompt_tuning), text(masked=first_is_target)),
        of_class(
            "GPT2LMHeadModel", GPT2, text(masked=first_is_target), name="gpt2-position-0", origin=Origin.POSITION_0
        ),
        of_class("LlamaForSequenceClassification", {**DECODER, "num_labels": 3}, classes, name="llama-classification"),
        of_class("BertForMaskedLM", ENCODER, mlm, FLOAT64, name="bert-mlm"),
        of_class("BertForMaskedLM", ENCODER, empty, FLOAT64, name="bert-empty-micro-batches"),
        of_class("BertForTokenClassification", four, tokens, FLOAT64, name="bert-tokens"),
        of_class("BertForSequenceClassification", three, classes, FLOAT64, name="bert-classes"),
        of_class("BertForSequenceClassification", three, multi, FLOAT64, name="bert-multi-label"),
        of_class("BertForQuestionAnswering", ENCODER, answers(), FLOAT64, name="bert-answers"),
        of_class("BertForPreTraining", ENCODER, next_sentence(mlm), FLOAT64, name="bert-pretraining", exact=False),
        of_class(
            "ElectraForPreTraining", {**ENCODER, "embedding_size": 16}, with_labels(replaced_tokens), name="electra"
        ),
    ]
