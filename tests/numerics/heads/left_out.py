"""Classes of the library that are tried and are not held to the exact step: why, and what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.numerics.heads.detection import ONE_FORMER, masked, two_lists
from tests.numerics.heads.experts import ROUTED
from tests.numerics.heads.head import FLOAT64, NO_DROPOUT, VOCABULARY, Batch, Head, Sample, collate, of_class
from tests.numerics.heads.multimodal import CLIP, VILT, pictured
from tests.numerics.heads.samples import (
    alike,
    generator,
    images,
    masked_tokens,
    one_class,
    pairs,
    series,
    speech,
    text,
    token_classes,
    with_labels,
    with_return_loss,
)
from tests.numerics.heads.seq2seq import BART
from tests.numerics.heads.signals import SPEECH_T5, TIME_SERIES, WAV2VEC2
from tests.numerics.heads.text import ENCODER
from tests.numerics.heads.vision import DPT, frozen_batch_norm


@dataclass(frozen=True)
class LeftOut:
    """A class that is not in the zoo.

    Attributes:
        head: how it was tried.
        reason: why it is left out.
        error: what building it or its full batch ends with; None: it runs, but its loss is no mean over items.
        words: that error's words.
        needs: the package without which it ends so; empty: always.
    """

    head: Head
    reason: str
    error: type[Exception] | None = None
    words: str = ""
    needs: str = ""


NEGATIVES = "the other samples of its micro-batch are its negatives"
CODES = "its codes are drawn at random, and their diversity is taken over all samples of a micro-batch together"
ACROSS = "its attention looks at delays chosen over all samples of a micro-batch together"
BATCH_NORM = "BatchNorm in training mode: its statistics come from one micro-batch"
NO_TRAINING = "the library has no loss for it"
NO_FLOAT64 = "it makes float32 of its own inside a float64 model, so that there is no float64 reference"

LEVIT = {
    "image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8], "drop_path_rate": 0, "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2],
}  # fmt: skip
HGNET = {
    "embedding_size": 8, "stem_channels": [3, 4, 8], "hidden_sizes": [8, 8], "depths": [1, 1],
    "stage_in_channels": [8, 8], "stage_mid_channels": [4, 4], "stage_out_channels": [8, 8],
    "stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_light_block": [False, False],
    "stage_kernel_size": [3, 3], "stage_numb_of_layers": [1, 1],
}  # fmt: skip
TEXTNET = {
    "stem_out_channels": 8, "hidden_sizes": [8] * 5, "conv_layer_kernel_sizes": [[[3, 3]]] * 4,
    "conv_layer_strides": [[2]] * 4, "image_size": [32, 32],
}  # fmt: skip
GLPN = {
    "num_encoder_blocks": 4, "depths": [1] * 4, "sr_ratios": [2, 1, 1, 1], "hidden_sizes": [8] * 4,
    "patch_sizes": [3] * 4, "strides": [2] * 4, "num_attention_heads": [1] * 4, "mlp_ratios": [2] * 4,
    "decoder_hidden_size": 8, "drop_path_rate": 0.0, **NO_DROPOUT,
}  # fmt: skip
QUANTIZED = {
    **WAV2VEC2, "mask_time_prob": 0.5, "mask_time_length": 2, "codevector_dim": 8, "proj_codevector_dim": 8,
    "num_codevectors_per_group": 4, "num_codevector_groups": 2, "num_negatives": 3, "feat_quantizer_dropout": 0.0,
    "contrastive_logits_temperature": 1.0,
}  # fmt: skip
AUTOFORMER = {
    **TIME_SERIES, "moving_average": 3, "label_length": 4, "context_length": 12, "prediction_length": 6,
    "autocorrelation_factor": 1,
}  # fmt: skip
SPOKEN = {
    **SPEECH_T5, "num_mel_bins": 8, "reduction_factor": 2, "speech_decoder_prenet_units": 8,
    "speech_decoder_prenet_layers": 1, "speech_decoder_prenet_dropout": 0.0, "speaker_embedding_dim": 6,
    "speech_decoder_postnet_layers": 1, "speech_decoder_postnet_units": 8, "speech_decoder_postnet_kernel": 3,
    "speech_decoder_postnet_dropout": 0.0, "max_speech_positions": 64, "max_text_positions": 64,
}  # fmt: skip
OWL = {
    "text_config": {**CLIP["text_config"], "max_position_embeddings": 16},
    "vision_config": {**CLIP["vision_config"]}, "projection_dim": 8,
}  # fmt: skip
ROC_BERT = {**ENCODER, "shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY}
SIGLIP = {**CLIP, "text_config": {**CLIP["text_config"], "projection_size": 16}}
VITDET = {
    "model_type": "vitdet", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def heard_codes() -> list[Sample]:
    g = generator(15)
    return [
        {
            "input_values": sample["input_values"],
            "mask_time_indices": torch.arange(39) % (3 + index % 3) == 0,
            "sampled_negative_indices": torch.randint(0, 39, (39, 3), generator=g),
        }
        for index, sample in enumerate(speech())
    ]


def with_own_negatives(samples: Sequence[Sample]) -> Batch:
    """Negatives are places in the flattened batch, taken from the sample itself."""
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    batch["sampled_negative_indices"] += 39 * torch.arange(len(samples))[:, None, None]
    return batch


def attacked() -> list[Sample]:
    """Words to be restored, the words themselves, and those that look like them."""
    return [
        {
            "input_ids": sample["input_ids"],
            "labels_input_ids": sample["input_ids"].flip(0),
            "attack_input_ids": sample["input_ids"].roll(1),
        }
        for sample in alike()
    ]


def in_float32() -> list[Sample]:
    """Series of 14 steps and 6 more, which the class computes in float32 whatever its parameters are in."""
    g = generator(19)
    return [
        {
            key: torch.randn(14 if "past" in key else 6, *value.shape[1:], generator=g)
            if "mask" not in key
            else torch.ones(14 if "past" in key else 6)
            for key, value in sample.items()
        }
        for sample in series()
    ]


def with_task(samples: Sequence[Sample]) -> Batch:
    """A task for each image, and four texts that tell its queries from the other images'."""
    g = generator(18)
    tasks = torch.randint(1, 20, (len(samples), 4), generator=g)
    return {
        **two_lists(samples),
        "task_inputs": tasks,
        "text_inputs": torch.randint(1, 20, (len(samples), 4, 4), generator=g),
    }


def voices() -> list[Sample]:
    g = generator(16)
    return [
        {
            "input_ids": sample["input_ids"],
            "attention_mask": sample["attention_mask"],
            "labels": torch.rand(2 * (3 + index), 8, generator=g, dtype=torch.float64),
            "speaker_embeddings": torch.rand(6, generator=g, dtype=torch.float64),
        }
        for index, sample in enumerate(text())
    ]


def with_padded_frames(samples: Sequence[Sample]) -> Batch:
    batch = collate([{key: value for key, value in sample.items() if key != "labels"} for sample in samples])
    frames = [sample["labels"] for sample in samples]
    return {**batch, "labels": nn.utils.rnn.pad_sequence(frames, batch_first=True, padding_value=-100.0)}


def not_decomposable() -> list[LeftOut]:
    """Losses that are no weighted mean over items: each must be recognised as such."""
    labelled = images(lambda i, g: torch.tensor(i % 3))
    depths = images(lambda i, g: (0.1 + torch.rand(128, 128, generator=g, dtype=torch.float64)) * (1 + i), 64)
    spoken = [{**s, "labels": torch.tensor(i % 3)} for i, s in enumerate(speech())]
    conformer = {**WAV2VEC2, "classifier_proj_size": 8, "conformer_conv_dropout": 0.0, "conv_depthwise_kernel_size": 3}

    def tried(model: str, config: dict[str, Any], samples: Sequence[Sample], **more: Any) -> Head:
        return of_class(model, {"num_labels": 3, **config}, samples, FLOAT64, exact=False, **more)

    classes = {
        "LevitForImageClassification": LEVIT,
        "TextNetForImageClassification": TEXTNET,
        "HGNetV2ForImageClassification": HGNET,
        "RegNetForImageClassification": {
            "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8,
        },
        "SwiftFormerForImageClassification": {
            "image_size": 32, "depths": [1, 1], "embed_dims": [8, 16], "drop_path_rate": 0.0,
        },
        "EfficientNetForImageClassification": {
            "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320,
            "dropout_rate": 0.0, "drop_connect_rate": 0.0,
        },
    }  # fmt: skip
    mobile = {"image_size": 64, "width_multiplier": 0.1, "n_attn_blocks": [1] * 3, "base_attn_unit_dims": [16] * 3}
    doge = {**ROUTED, "is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "keep_window_size": 64}
    float32 = {"dtype": torch.float32, "everyday": False}
    return [
        LeftOut(tried("SiglipModel", SIGLIP, pairs(), collate=with_return_loss), NEGATIVES),
        LeftOut(tried("OwlViTModel", OWL, pairs(), collate=with_return_loss, everyday=False), NEGATIVES),
        LeftOut(tried("RoCBertForPreTraining", ROC_BERT, attacked(), everyday=False), NEGATIVES),
        LeftOut(tried("AutoformerForPrediction", AUTOFORMER, in_float32(), **float32), ACROSS),
        LeftOut(tried("Wav2Vec2ForPreTraining", QUANTIZED, heard_codes(), collate=with_own_negatives), CODES),
        LeftOut(tried("SpeechT5ForTextToSpeech", SPOKEN, voices(), collate=with_padded_frames), BATCH_NORM),
        *(LeftOut(tried(name, config, labelled), BATCH_NORM) for name, config in classes.items()),
        LeftOut(
            tried("MobileViTV2ForImageClassification", mobile, images(lambda i, g: torch.tensor(i % 3), 64)), BATCH_NORM
        ),
        LeftOut(tried("Wav2Vec2ConformerForSequenceClassification", conformer, spoken), BATCH_NORM),
        LeftOut(
            tried("GLPNForDepthEstimation", GLPN, depths, prepare=frozen_batch_norm),
            "the root of a mean and the square of one, over all pixels of a micro-batch",
        ),
        LeftOut(
            tried("DogeForCausalLM", doge, text()),
            "modeling_doge.py line 413 of 5.23.0 views the router's two halves over tokens instead of features, so "
            "that the rows of a batch route one another",
        ),
    ]


def not_run() -> list[LeftOut]:
    """What ends with an error before there is a loss."""
    mlm = with_labels(masked_tokens)
    labelled = images(lambda i, g: torch.tensor(i % 3))
    matte = images(lambda i, g: torch.rand(1, 32, 32, generator=g))
    larger = images(lambda i, g: torch.rand(3, 32, 32, generator=g), 16)
    fsmt = {**BART, "langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
    vitmatte = {
        "backbone_config": VITDET, "hidden_size": 16, "fusion_hidden_sizes": [8] * 4,
        "convstream_hidden_sizes": [8] * 3,
    }  # fmt: skip
    swin2sr = {"image_size": 16, "embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 4}
    super_point = {"encoder_hidden_sizes": [8] * 4, "decoder_hidden_size": 8}
    packages: list[tuple[str, str, Any, Any]] = [
        ("detectron2", "LayoutLMv2ForTokenClassification", ENCODER, with_labels(token_classes)),
        ("natten", "DinatForImageClassification", {}, labelled),
        ("timm", "TimmWrapperForImageClassification", {"architecture": "resnet18"}, labelled),
    ]
    untrained: list[tuple[str, Any, Any]] = [
        ("DPTForDepthEstimation", DPT, matte),
        ("Swin2SRForImageSuperResolution", swin2sr, larger),
        ("VitMatteForImageMatting", vitmatte, matte),
        ("ViltForImageAndTextRetrieval", VILT, with_labels(one_class, pictured())),
    ]
    return [
        *(
            LeftOut(of_class(*head), f"needs the package {package}", ImportError, package, needs=package)
            for package, *head in packages
        ),
        LeftOut(of_class("MraForMaskedLM", ENCODER, mlm), NO_FLOAT64, RuntimeError, "Float and Double"),
        LeftOut(of_class("FSMTForConditionalGeneration", fsmt, mlm), NO_FLOAT64, RuntimeError, "without overflow"),
        *(LeftOut(of_class(*head), NO_TRAINING, NotImplementedError, "Training") for head in untrained),
        LeftOut(
            of_class("SuperPointForKeypointDetection", super_point, labelled),
            NO_TRAINING,
            ValueError,
            "does not support training",
        ),
    ]


#: Built and run without a Trainer.
ONE_FORMER_HEAD = of_class(
    "OneFormerForUniversalSegmentation",
    ONE_FORMER,
    images(masked, dtype=torch.float32),
    dtype=torch.float32,
    collate=with_task,
    everyday=False,
)
NOT_DECOMPOSABLE = not_decomposable()
NOT_RUN = not_run()
LEFT_OUT: dict[str, str] = {
    **{case.head.model: case.reason for case in (*NOT_DECOMPOSABLE, *NOT_RUN)},
    # This one is run at every cut, beside the plain mean over micro-batches.
    "CLIPModel": NEGATIVES,
    ONE_FORMER_HEAD.model: "its loss has the shape [1], which the Trainer of 5.23.0 cannot add to its log",
}
