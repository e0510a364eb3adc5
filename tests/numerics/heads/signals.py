"""Sound and time series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.numerics.heads.head import FLOAT64, VOCABULARY, Head, Origin, Sample, of_class, of_classes, plain
from tests.numerics.heads.samples import generator, heard, normal, one_class, series, speech, text, with_labels
from tests.numerics.heads.seq2seq import BART

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


WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
SPEECH_T5 = {
    **{key: value for key, value in WAV2VEC2.items() if "layers" not in key and "heads" not in key},
    "vocab_size": VOCABULARY, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "positional_dropout": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH_TO_TEXT = {
    **BART, "input_feat_per_channel": 8, "conv_kernel_sizes": [3], "num_conv_layers": 1, "conv_channels": 16,
    "max_source_positions": 64, "max_target_positions": 32,
}  # fmt: skip

#: Classes of the library, and what their configs say besides wav2vec2's.
Rows = dict[str, Mapping[str, Any]]

WAVLM = {"num_buckets": 8, "max_bucket_distance": 16}
DATA2VEC = {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 1}
CLASSES: Rows = {
    **plain("Wav2Vec2 Hubert UniSpeechSat", "ForSequenceClassification"),
    "WavLMForSequenceClassification": WAVLM,
    "Data2VecAudioForSequenceClassification": DATA2VEC,
    "SEWForSequenceClassification": {"squeeze_factor": 1},
    "SEWDForSequenceClassification": {"squeeze_factor": 1},
}
CTC: Rows = {"HubertForCTC": {}, "WavLMForCTC": WAVLM, "Data2VecAudioForCTC": DATA2VEC}
FRAMES: Rows = {"Wav2Vec2ForAudioFrameClassification": {}, "WavLMForAudioFrameClassification": WAVLM}
X_VECTOR = {"tdnn_dim": [8, 8], "tdnn_kernel": [2, 2], "tdnn_dilation": [1, 1], "xvector_output_dim": 8}


#: Without the attention that looks at keys drawn at random, and the BatchNorm between its layers.
INFORMER = {**TIME_SERIES, "attention_type": "full", "distil": False}
PATCHES = {
    "num_input_channels": 2, "context_length": 8, "prediction_length": 4, "patch_length": 2, "patch_stride": 2,
    "d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "norm_type": "layernorm",
    "attention_dropout": 0.0, "ff_dropout": 0.0, "head_dropout": 0.0, "loss": "mse", "do_mask_input": False,
}  # fmt: skip
MIXER = {
    "num_input_channels": 2, "context_length": 8, "prediction_length": 4, "patch_length": 2, "patch_stride": 2,
    "d_model": 8, "num_layers": 1, "dropout": 0.0, "head_dropout": 0.0, "loss": "mse",
}  # fmt: skip


def with_target(name: str, *shape: int) -> list[Sample]:
    """Eight steps of two channels, and a target of a shape."""
    g = generator(17)
    return [{"past_values": normal(g, 8, 2), **({name: normal(g, *shape)} if name else {})} for _ in range(8)]


def heads() -> list[Head]:
    past = with_target("")
    by_class = [{**sample, "target_values": torch.tensor(index % 3)} for index, sample in enumerate(past)]
    ctc = {"model": "Wav2Vec2ForCTC", "samples": speech(), "origin": Origin.LOSS_TYPE_DROPS}
    spoken = [{**s, "labels": torch.tensor(i % 3)} for i, s in enumerate(speech())]
    frames = [{**s, "labels": F.one_hot(torch.arange(i, i + 39) % 3, 3).double()} for i, s in enumerate(speech())]
    targets = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(text())]
    by_time = [
        {**s, "input_features": s["input_features"].T, "attention_mask": torch.ones(16, dtype=torch.long)}
        for s in heard(targets)
    ]
    voiced = [
        {"input_values": s["input_values"], "labels": t["labels"]} for s, t in zip(speech(), targets, strict=True)
    ]
    whisper = {**WHISPER, "num_labels": 3, "classifier_proj_size": 8}
    mean = {**WAV2VEC2, "ctc_loss_reduction": "mean"}
    three = {**WAV2VEC2, "num_labels": 3, "classifier_proj_size": 8}
    return [
        of_class(config=mean, name="wav2vec2-ctc-mean", **ctc),
        of_class(config={**WAV2VEC2, "ctc_loss_reduction": "sum"}, name="wav2vec2-ctc-sum", stock_wrong=False, **ctc),
        of_class("TimeSeriesTransformerForPrediction", TIME_SERIES, series(), name="time-series", origin=None),
        *(
            of_class(name, config, samples, FLOAT64, origin=None, stock_wrong=name.startswith("Inf"), everyday=False)
            for name, config, samples in (
                ("InformerForPrediction", INFORMER, series()),
                ("PatchTSTForPretraining", {**PATCHES, "do_mask_input": True, "mask_type": "forecast"}, past),
                ("PatchTSTForPrediction", PATCHES, with_target("future_values", 4, 2)),
                ("PatchTSTForClassification", {**PATCHES, "num_targets": 3}, by_class),
                ("PatchTSMixerForPretraining", {**MIXER, "mask_type": "forecast"}, past),
                ("PatchTSMixerForPrediction", MIXER, with_target("future_values", 4, 2)),
                ("PatchTSMixerForTimeSeriesClassification", {**MIXER, "num_targets": 3}, by_class),
            )
        ),
        *of_classes(CTC, mean, speech(), origin=Origin.LOSS_TYPE_DROPS),
        *of_classes(CLASSES, three, spoken, FLOAT64),
        *of_classes(FRAMES, three, frames, FLOAT64),
        of_class("Wav2Vec2ForXVector", {**three, **X_VECTOR}, spoken, FLOAT64, origin=None),
        of_class("WhisperForConditionalGeneration", WHISPER, heard(targets), FLOAT64),
        of_class("WhisperForAudioClassification", whisper, heard(with_labels(one_class)), FLOAT64),
        of_class("Speech2TextForConditionalGeneration", SPEECH_TO_TEXT, by_time, FLOAT64),
        of_class("SpeechT5ForSpeechToText", SPEECH_T5, voiced, FLOAT64),
    ]
