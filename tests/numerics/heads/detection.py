"""Boxes: what every image of a batch lists as many of as it shows."""

from __future__ import annotations

import torch

from tests.numerics.heads.head import Head, of_class
from tests.numerics.heads.samples import boxes, images
from tests.numerics.heads.vision import VIT, frozen_batch_norm

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
#: Without denoising queries, whose noise is drawn for each micro-batch.
RT_DETR = {
    "backbone_config": {
        "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4,
        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_hidden_dim": 16, "encoder_in_channels": [8] * 3, "encoder_ffn_dim": 16, "encoder_attention_heads": 2,
    "d_model": 16, "num_queries": 4, "decoder_in_channels": [16] * 3, "decoder_ffn_dim": 16, "decoder_n_points": 2,
    "decoder_layers": 2, "decoder_attention_heads": 2, "num_denoising": 0, "num_labels": 3,
}  # fmt: skip
D_FINE = {
    **RT_DETR, "lqe_hidden_dim": 8, "max_num_bins": 8, "decoder_n_points": [2, 2, 2],
    "backbone_config": {
        "model_type": "hgnet_v2", "embedding_size": 8, "stem_channels": [3, 4, 8], "hidden_sizes": [8] * 4,
        "depths": [1] * 4, "stage_in_channels": [8] * 4, "stage_mid_channels": [4] * 4, "stage_out_channels": [8] * 4,
        "stage_num_blocks": [1] * 4, "stage_downsample": [False, True, True, True], "stage_light_block": [False] * 4,
        "stage_kernel_size": [3] * 4, "stage_numb_of_layers": [1] * 4, "out_features": ["stage2", "stage3", "stage4"],
    },
}  # fmt: skip

#: Detection losses build float32 class weights of their own, so the whole head is run in float32.
FLOAT32 = 1e-5


def heads() -> list[Head]:
    found = images(boxes, dtype=torch.float32)
    larger = images(boxes, 64, torch.float32)
    return [
        of_class("YolosForObjectDetection", YOLOS, found, FLOAT32, name="yolos", dtype=torch.float32),
        *(
            of_class(f"{family}ForObjectDetection", DETR, found, FLOAT32, dtype=torch.float32)
            for family in ("Detr", "ConditionalDetr", "DabDetr", "TableTransformer")
        ),
        *(
            of_class(
                f"{family}ForObjectDetection", config, larger, FLOAT32, dtype=torch.float32, prepare=frozen_batch_norm
            )
            for family, config in (("RTDetr", RT_DETR), ("RTDetrV2", RT_DETR), ("DFine", D_FINE))
        ),
    ]
