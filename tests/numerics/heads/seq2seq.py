"""Sequence to sequence, and the decoders of such models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.numerics.heads.head import FLOAT64, VOCABULARY, Head, before, of_class, of_classes, plain
from tests.numerics.heads.samples import alike, answers, one_class, text, token_classes, with_end, with_labels
from tests.numerics.heads.text import ENCODER

T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip


#: Classes of the library, and what their configs say besides their family's.
Rows = dict[str, Mapping[str, Any]]

LIKE_BART: Rows = {
    **plain("MBart Pegasus Blenderbot Mvp PLBart", "ForConditionalGeneration"),
    "MarianMTModel": {},
    "M2M100ForConditionalGeneration": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "BigBirdPegasusForConditionalGeneration": {"attention_type": "original_full"},
}
#: Their attention is by blocks of the padded width.
LIKE_BART_ALIKE: Rows = {
    "PegasusXForConditionalGeneration": {"num_global_tokens": 2, "block_size": 4},
    "LEDForConditionalGeneration": {
        "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    },
}  # fmt: skip
LOCAL_T5: Rows = {"LongT5ForConditionalGeneration": {"local_radius": 4, "encoder_attention_type": "local"}}


def heads() -> list[Head]:
    targets = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(text())]
    targets_alike = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(alike())]
    unshifted = [{**s, "labels": torch.cat([s["input_ids"][:1], s["labels"][1:]])} for s in text()]
    tokens = with_labels(token_classes)
    classes = with_labels(one_class, with_end(text()))
    t5 = {**T5, "classifier_dropout": 0.0, "eos_token_id": 2}
    bert = {**ENCODER, "model_type": "bert"}
    decoder = {**bert, "is_decoder": True, "add_cross_attention": True}
    pair = {"encoder": bert, "decoder": decoder, "decoder_start_token_id": 1, "pad_token_id": 0}
    return [
        # Before 5.15 its attention weights are float32, and differ with the padding.
        of_class("T5ForConditionalGeneration", T5, targets, 1e-5 if before("5.15") else FLOAT64, name="t5"),
        of_class("BartForConditionalGeneration", BART, targets, FLOAT64, name="bart"),
        of_class("BartForCausalLM", BART, unshifted, FLOAT64, name="bart-causal"),
        *of_classes(plain("MT5 UMT5", "ForConditionalGeneration"), T5, targets, FLOAT64),
        *of_classes(LOCAL_T5, T5, targets_alike, FLOAT64),
        of_class("T5ForSequenceClassification", {**t5, "num_labels": 3}, classes, FLOAT64),
        of_class("T5ForTokenClassification", {**t5, "num_labels": 4}, tokens, FLOAT64),
        of_class("T5ForQuestionAnswering", T5, answers(), FLOAT64),
        *of_classes(LIKE_BART, BART, targets, FLOAT64),
        *of_classes(LIKE_BART_ALIKE, BART, targets_alike, FLOAT64),
        # Decoders whose own cross entropy does not shift.
        *of_classes(plain("MBart TrOCR Blenderbot", "ForCausalLM"), BART, unshifted, FLOAT64),
        of_class("BartForSequenceClassification", {**BART, "num_labels": 3}, classes, FLOAT64),
        of_class("MBartForQuestionAnswering", BART, answers(), FLOAT64),
        of_class("EncoderDecoderModel", pair, targets, FLOAT64),
    ]
