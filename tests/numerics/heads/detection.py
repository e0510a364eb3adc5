"""Boxes: what every image of a batch lists as many of as it shows."""

from __future__ import annotations

import torch

from tests.numerics.heads.head import Head, of_class
from tests.numerics.heads.samples import boxes, images
from tests.numerics.heads.vision import VIT

DETR = {
    "d_model": 16, "hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 4, "num_labels": 3,
    "dropout": 0.0, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "out_features": ["stage2"],
    },
}  # fmt: skip
YOLOS = {**VIT, "num_hidden_layers": 1, "image_size": [32, 32], "num_detection_tokens": 5, "num_labels": 3}

#: Detection losses build float32 class weights of their own, so the whole head is run in float32.
FLOAT32 = 1e-5


def heads() -> list[Head]:
    found = images(boxes, dtype=torch.float32)
    return [
        of_class("YolosForObjectDetection", YOLOS, found, FLOAT32, name="yolos", dtype=torch.float32),
        *(
            of_class(f"{family}ForObjectDetection", DETR, found, FLOAT32, dtype=torch.float32)
            for family in ("Detr", "ConditionalDetr", "TableTransformer")
        ),
    ]
