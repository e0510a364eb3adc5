"""Sound and time series."""

from __future__ import annotations

from tests.numerics.heads.head import Head, Origin, of_class
from tests.numerics.heads.samples import series, speech

WAV2VEC2 = {
    "vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
    "feat_proj_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
    "pad_token_id": 0, "ctc_zero_infinity": True,
}  # fmt: skip
TIME_SERIES = {
    "prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 8,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip


def heads() -> list[Head]:
    ctc = {"model": "Wav2Vec2ForCTC", "samples": speech(), "origin": Origin.LOSS_TYPE_DROPS}
    return [
        of_class(config={**WAV2VEC2, "ctc_loss_reduction": "mean"}, name="wav2vec2-ctc-mean", **ctc),
        of_class(config={**WAV2VEC2, "ctc_loss_reduction": "sum"}, name="wav2vec2-ctc-sum", stock_wrong=False, **ctc),
        of_class("TimeSeriesTransformerForPrediction", TIME_SERIES, series(), name="time-series", origin=None),
    ]
