"""Sequence to sequence, and the decoders of such models alone."""

from __future__ import annotations

import torch

from tests.numerics.heads.head import FLOAT64, VOCABULARY, Head, before, of_class
from tests.numerics.heads.samples import text

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


def heads() -> list[Head]:
    targets = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(text())]
    unshifted = [{**s, "labels": torch.cat([s["input_ids"][:1], s["labels"][1:]])} for s in text()]
    return [
        # Before 5.15 its attention weights are float32, and differ with the padding.
        of_class("T5ForConditionalGeneration", T5, targets, 1e-5 if before("5.15") else FLOAT64, name="t5"),
        of_class("BartForConditionalGeneration", BART, targets, FLOAT64, name="bart"),
        of_class("BartForCausalLM", BART, unshifted, FLOAT64, name="bart-causal"),
    ]
