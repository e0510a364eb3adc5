"""Classes of the library that are tried and are not held to the exact step: why, and what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.numerics.heads.detection import ONE_FORMER, masked, two_lists
from tests.numerics.heads.experts import ROUTED
from tests.numerics.heads.head import FLOAT64, NO_DROPOUT, Batch, Head, Sample, of_class
from tests.numerics.heads.multimodal import CLIP, VILT, pictured
from tests.numerics.heads.samples import (
    generator,
    images,
    masked_tokens,
    one_class,
    pairs,
    series,
    speech,
    text,
    with_labels,
    with_return_loss,
)
from tests.numerics.heads.signals import TIME_SERIES, WAV2VEC2
from tests.numerics.heads.text import ENCODER
from tests.numerics.heads.vision import frozen_batch_norm


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
NEEDS = "needs the package"
NO_TRAINING = "the library has no loss for it"
NO_FLOAT64 = "it makes float32 of its own inside a float64 model, so that there is no float64 reference"

LEVIT = {
    "image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8], "drop_path_rate": 0, "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2],
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
SIGLIP = {**CLIP, "text_config": {**CLIP["text_config"], "projection_size": 16}}


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


def not_decomposable() -> list[LeftOut]:
    """Losses that are no weighted mean over items, one of a reason: each must be recognised as such."""
    labelled = images(lambda i, g: torch.tensor(i % 3))
    depths = images(lambda i, g: (0.1 + torch.rand(128, 128, generator=g, dtype=torch.float64)) * (1 + i), 64)

    def tried(model: str, config: dict[str, Any], samples: Sequence[Sample], **more: Any) -> Head:
        return of_class(model, {"num_labels": 3, **config}, samples, FLOAT64, exact=False, **more)

    doge = {**ROUTED, "is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "keep_window_size": 64}
    float32 = {"dtype": torch.float32, "everyday": False}
    return [
        LeftOut(tried("SiglipModel", SIGLIP, pairs(), collate=with_return_loss), NEGATIVES),
        LeftOut(tried("AutoformerForPrediction", AUTOFORMER, in_float32(), **float32), ACROSS),
        LeftOut(tried("Wav2Vec2ForPreTraining", QUANTIZED, heard_codes(), collate=with_own_negatives), CODES),
        LeftOut(tried("LevitForImageClassification", LEVIT, labelled), BATCH_NORM),
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
    """What ends with an error before there is a loss, one of a reason."""
    mlm = with_labels(masked_tokens)
    labelled = images(lambda i, g: torch.tensor(i % 3))
    needs_natten = of_class("DinatForImageClassification", {}, labelled)
    retrieval = of_class("ViltForImageAndTextRetrieval", VILT, with_labels(one_class, pictured()))
    return [
        LeftOut(needs_natten, f"{NEEDS} natten", ImportError, "natten", needs="natten"),
        LeftOut(of_class("MraForMaskedLM", ENCODER, mlm), NO_FLOAT64, RuntimeError, "Float and Double"),
        LeftOut(retrieval, NO_TRAINING, NotImplementedError, "Training"),
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
#: Tried as well, and left out for the same reasons.
OTHERS = {
    NEGATIVES: "OwlViTModel RoCBertForPreTraining",
    BATCH_NORM: "EfficientNetForImageClassification HGNetV2ForImageClassification MobileViTV2ForImageClassification "
    "RegNetForImageClassification SpeechT5ForTextToSpeech SwiftFormerForImageClassification "
    "TextNetForImageClassification Wav2Vec2ConformerForSequenceClassification",
    NO_TRAINING: "DPTForDepthEstimation SuperPointForKeypointDetection Swin2SRForImageSuperResolution "
    "VitMatteForImageMatting",
    NO_FLOAT64: "FSMTForConditionalGeneration",
    f"{NEEDS} detectron2": "LayoutLMv2ForTokenClassification",
    f"{NEEDS} timm": "TimmWrapperForImageClassification",
}
LEFT_OUT: dict[str, str] = {
    **{name: reason for reason, names in OTHERS.items() for name in names.split()},
    **{case.head.model: case.reason for case in (*NOT_DECOMPOSABLE, *NOT_RUN)},
    # This one is run at every cut, beside the plain mean over micro-batches.
    "CLIPModel": NEGATIVES,
    ONE_FORMER_HEAD.model: "its loss has the shape [1], which the Trainer of 5.23.0 cannot add to its log",
}
