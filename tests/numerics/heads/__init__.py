"""Tiny heads of every kind the promise is made for, with ragged samples and a reference that knows no Trainer.

A head's reference is the loss of the whole global batch in one forward, in float64. Dropout is off in every config, so
that training mode is a function of its inputs.
"""

from __future__ import annotations

from tests.numerics.heads import detection, experts, multimodal, own, seq2seq, signals, text, vision
from tests.numerics.heads.head import FLOAT32_LOSS, VOCABULARY, Batch, Head, Origin, Sample, before, seeded
from tests.numerics.heads.left_out import LEFT_OUT
from tests.numerics.heads.losses import log_likelihoods, over_number, shifted_cross_entropy
from tests.numerics.heads.own import DropsKwargs, NoKwargs, TokenModel, UsesTensor, func_with_constant
from tests.numerics.heads.text import bert, llama, llama_config

__all__ = [
    "FLOAT32_LOSS", "HEADS", "LEFT_OUT", "VOCABULARY", "Batch", "DropsKwargs", "Head", "NoKwargs", "Origin", "Sample",
    "TokenModel", "UsesTensor", "before", "bert", "func_with_constant", "llama", "llama_config", "log_likelihoods",
    "over_number", "seeded", "shifted_cross_entropy",
]  # fmt: skip

HEADS: dict[str, Head] = {
    head.name: head
    for module in (text, seq2seq, experts, multimodal, vision, detection, signals, own)
    for head in module.heads()
}
