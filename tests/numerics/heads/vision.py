"""Images: classes, numbers, segments, masked patches, boxes."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from tests.numerics.heads.head import FLOAT64, NO_DROPOUT, Head, Origin, of_class, seeded
from tests.numerics.heads.samples import boxes, images, masked_images, segments

VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8, **NO_DROPOUT,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 4, **NO_DROPOUT,
}  # fmt: skip
YOLOS = {
    **VIT, "num_hidden_layers": 1, "image_size": [32, 32], "num_detection_tokens": 5, "num_labels": 3,
}  # fmt: skip


class FrozenBatchNorm(nn.BatchNorm2d):
    """Keeps its statistics, as fine-tuning with small batches does."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


def frozen_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = FrozenBatchNorm


def heads() -> list[Head]:
    vit = {"model": "ViTForImageClassification", "tolerance": FLOAT64, "origin": Origin.LOSS_TYPE_DROPS}
    number = images(lambda i, g: torch.tensor(0.3 * i, dtype=torch.float64))
    several = images(lambda i, g: torch.tensor([i % 2, 1, i % 3], dtype=torch.float64).clamp(max=1))
    multi_label = {**VIT, "num_labels": 3, "problem_type": "multi_label_classification"}
    return [
        of_class(
            config={**VIT, "num_labels": 3},
            samples=images(lambda i, g: torch.tensor(i % 3)),
            name="vit",
            stock_wrong=False,
            **vit,
        ),
        of_class(config={**VIT, "num_labels": 1}, samples=number, name="vit-regression", **vit),
        of_class(config=multi_label, samples=several, name="vit-multi-label", **vit),
        of_class(
            "SegformerForSemanticSegmentation",
            SEGFORMER,
            images(segments),
            FLOAT64,
            name="segformer",
            prepare=frozen_batch_norm,
        ),
        of_class(
            "SegformerForSemanticSegmentation",
            SEGFORMER,
            images(segments),
            FLOAT64,
            name="segformer-batch-norm",
            exact=False,
        ),
        # Its denominator is the count plus 1e-5.
        of_class(
            "ViTForMaskedImageModeling",
            {**VIT, "num_hidden_layers": 1, "encoder_stride": 8},
            masked_images(),
            name="masked-patches",
            origin=None,
        ),
        # Detection losses build float32 class weights of their own, so the whole head is run in float32.
        Head(
            "yolos",
            seeded(lambda: hf.YolosForObjectDetection(hf.YolosConfig(**YOLOS)), torch.float32),
            images(boxes, dtype=torch.float32),
            1e-5,
            model="YolosForObjectDetection",
            origin=Origin.DROPS,
            stock_wrong=False,
            exact=False,
        ),
    ]
