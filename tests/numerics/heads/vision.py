"""Images: classes, numbers, segments, masked patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.numerics.heads.head import (
    FLOAT64,
    NO_DROPOUT,
    TINY,
    VOCABULARY,
    Batch,
    Head,
    Origin,
    Sample,
    collate,
    of_class,
    of_classes,
)
from tests.numerics.heads.samples import alike, generator, images, masked_images, segments, videos
from tests.numerics.heads.text import GPT2

VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8, **NO_DROPOUT,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 4, **NO_DROPOUT,
}  # fmt: skip


class FrozenBatchNorm(nn.BatchNorm2d):
    """Keeps its statistics, as fine-tuning with small batches does.

    Written out, because torch 2.13.0 on a CPU returns a wrong gradient for its own where a micro-batch is one sample.
    """

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)

    def forward(self, input: Tensor) -> Tensor:
        def by_channel(values: Tensor) -> Tensor:
            return values.view(1, -1, 1, 1)

        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        return (input - by_channel(self.running_mean)) * by_channel(scale) + by_channel(self.bias)


def frozen_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = FrozenBatchNorm


def frozen_and_without_dropout(model: nn.Module) -> None:
    """For heads that drop out a tenth whatever their config says."""
    frozen_batch_norm(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


#: Classes of the library, and their configs.
Rows = dict[str, Mapping[str, Any]]

STAGES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
SWIN = {
    **STAGES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
    "window_size": 2,
}  # fmt: skip
PYRAMID = {
    **STAGES, "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
CLIP_PAIR = {"vision_config": {**VIT, "num_hidden_layers": 1}, "text_config": TINY}
MOBILE_VIT = {
    **STAGES, "image_size": 32, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
    "aspp_out_channels": 8, "aspp_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
}  # fmt: skip
CONVNEXT = {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "drop_path_rate": 0.0}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
BEIT = {
    **VIT, "num_hidden_layers": 4, "drop_path_rate": 0.0, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2],
    "semantic_loss_ignore_index": 255, "use_auxiliary_head": True, "auxiliary_channels": 8,
}  # fmt: skip
DPT = {
    **VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8],
    "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5], "use_batch_norm_in_fusion_residual": False,
    "is_hybrid": False, "semantic_classifier_dropout": 0.0,
}  # fmt: skip
UPERNET = {
    "backbone_config": {
        "model_type": "convnext", "hidden_sizes": [8] * 4, "depths": [1] * 4,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "hidden_size": 8, "pool_scales": [1, 2], "auxiliary_channels": 8, "auxiliary_in_channels": 8,
}  # fmt: skip
BIT = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2}
VIDEO = {**VIT, "image_size": 16, "num_hidden_layers": 1, "num_frames": 2, "tubelet_size": 2}
VJEPA = {
    **VIDEO, "crop_size": 16, "frames_per_clip": 2, "mlp_ratio": 2.0, "num_pooler_layers": 1, "pred_hidden_size": 16,
    "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "drop_path_rate": 0.0,
}  # fmt: skip

CVT = {
    "embed_dim": [8, 16], "depth": [1, 2], "num_heads": [1, 2], "patch_sizes": [7, 3], "patch_stride": [4, 2],
    "patch_padding": [2, 1], "drop_path_rate": [0.0, 0.0], "cls_token": [False, True], "mlp_ratio": [2.0, 2.0],
    "drop_rate": [0.0, 0.0], "attention_drop_rate": [0.0, 0.0], "num_labels": 3,
}  # fmt: skip

CLASSES: Rows = {
    "BeitForImageClassification": {**VIT, "drop_path_rate": 0.0},
    "SiglipForImageClassification": CLIP_PAIR,
    "CLIPForImageClassification": CLIP_PAIR,
    "Swinv2ForImageClassification": SWIN,
    "DonutSwinForImageClassification": SWIN,
    "HieraForImageClassification": {
        "image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": [3, 3],
        "patch_stride": [2, 2], "patch_padding": [1, 1], "query_stride": [2, 2], "num_query_pool": 1,
        "masked_unit_size": [8, 8], "masked_unit_attention": [True, False], "drop_path_rate": 0.0,
    },
    "FocalNetForImageClassification": {
        **STAGES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
        "focal_levels": [1, 1], "focal_windows": [1, 1],
    },
    "PvtForImageClassification": {**PYRAMID, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]},
    "PvtV2ForImageClassification": {**PYRAMID, "patch_sizes": [7, 3], "sr_ratios": [2, 1]},
    "PoolFormerForImageClassification": {
        "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
        "strides": [4, 2], "padding": [2, 1], "mlp_ratio": 2.0, "drop_path_rate": 0.0,
    },
    "MobileViTForImageClassification": MOBILE_VIT,
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25, "image_size": 32, "classifier_dropout_prob": 0.0},
    "ResNetForImageClassification": RESNET,
}  # fmt: skip
#: Right in stock as long as all images are labelled: as many items in every micro-batch.
BY_NUMBER: Rows = {
    "Dinov2ForImageClassification": {**VIT, "drop_path_rate": 0.0},
    "SwinForImageClassification": SWIN,
    "SegformerForImageClassification": {**SEGFORMER, "num_labels": 3},
}
SEGMENTS: Rows = {
    "BeitForSemanticSegmentation": BEIT,
    "MobileViTForSemanticSegmentation": MOBILE_VIT,
    "UperNetForSemanticSegmentation": UPERNET,
}
DECLARED_FALSE: Rows = {f"ConvNext{version}ForImageClassification": CONVNEXT for version in ("", "V2")}


def with_flat_labels(samples: Sequence[Sample]) -> Batch:
    """One label for each masked patch of the batch, without a sample axis."""
    batch = collate([{key: value for key, value in sample.items() if key != "labels"} for sample in samples])
    return {**batch, "labels": torch.cat([sample["labels"] for sample in samples])}


def heads() -> list[Head]:
    vit = {"model": "ViTForImageClassification", "tolerance": FLOAT64, "origin": Origin.LOSS_TYPE_DROPS}
    number = images(lambda i, g: torch.tensor(0.3 * i, dtype=torch.float64))
    several = images(lambda i, g: torch.tensor([i % 2, 1, i % 3], dtype=torch.float64).clamp(max=1))
    labelled = images(lambda i, g: torch.tensor(i % 3))
    some = images(lambda i, g: torch.tensor(-100 if i in (1, 4, 6) else i % 3))
    pixels = [{"input_ids": s["input_ids"], "labels": s["labels"]} for s in alike()]
    picture = [{"input_ids": s["input_ids"], "labels": torch.tensor(i % 3)} for i, s in enumerate(pixels)]
    g = generator(12)
    visual_words = [
        {**s, "labels": torch.randint(0, VOCABULARY, (int(s["bool_masked_pos"].sum()),), generator=g)}
        for s in masked_images()
    ]
    three, four = {"num_labels": 3}, {"num_labels": 4}
    frozen, loose = {"prepare": frozen_batch_norm}, {"origin": Origin.LOSS_TYPE_DROPS, "stock_wrong": False}
    multi_label = {**VIT, "num_labels": 3, "problem_type": "multi_label_classification"}
    patches = {"num_hidden_layers": 1, "encoder_stride": 8}
    some_masked = [{**s, "bool_masked_pos": torch.arange(64) % (2 + i % 3) == 0} for i, s in enumerate(masked_images())]
    segmented = images(segments)
    segformer: Any = {"model": "SegformerForSemanticSegmentation", "config": SEGFORMER, "tolerance": FLOAT64}
    words = {**VIT, "vocab_size": VOCABULARY, "use_mask_token": True, "drop_path_rate": 0.0}
    own_dropout = {"prepare": frozen_and_without_dropout}
    return [
        of_class(config={**VIT, "num_labels": 3}, samples=labelled, name="vit", stock_wrong=False, **vit),
        of_class(config={**VIT, "num_labels": 1}, samples=number, name="vit-regression", **vit),
        of_class(config=multi_label, samples=several, name="vit-multi-label", **vit),
        of_class(samples=segmented, name="segformer", **segformer, **frozen),
        of_class(samples=segmented, name="segformer-batch-norm", exact=False, **segformer),
        of_class("CvtForImageClassification", CVT, labelled, FLOAT64, everyday=False, **frozen),
        # Its denominator is the count plus 1e-5.
        of_class("ViTForMaskedImageModeling", {**VIT, **patches}, masked_images(), name="masked-patches", origin=None),
        of_class("DeiTForMaskedImageModeling", {**VIT, **patches}, masked_images()),
        of_class("SwinForMaskedImageModeling", {**SWIN, "encoder_stride": 8}, some_masked),
        *of_classes(CLASSES, three, labelled, FLOAT64, **frozen),
        *of_classes(BY_NUMBER, three, labelled, FLOAT64, **loose),
        *of_classes(DECLARED_FALSE, three, some, FLOAT64, origin=Origin.DECLARES_FALSE),
        of_class("VJEPA2ForVideoClassification", {**VJEPA, **three}, videos("pixel_values_videos"), FLOAT64),
        of_class("VideoMAEForVideoClassification", {**VIDEO, **three}, videos(), FLOAT64, **loose),
        of_class("ImageGPTForImageClassification", {**GPT2, **three}, picture, FLOAT64),
        of_class("ImageGPTForCausalImageModeling", {**GPT2, "vocab_size": VOCABULARY + 1}, pixels, FLOAT64),
        *of_classes(SEGMENTS, four, segmented, FLOAT64, **frozen),
        of_class("DPTForSemanticSegmentation", {**DPT, **four}, segmented, FLOAT64, **own_dropout),
        of_class("BitForImageClassification", {**BIT, **three}, labelled, FLOAT64),
        of_class("BeitForMaskedImageModeling", words, visual_words, FLOAT64, collate=with_flat_labels),
    ]
