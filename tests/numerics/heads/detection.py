"""Boxes: what every image of a batch lists as many of as it shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.numerics.heads.head import Batch, Head, Sample, of_class, of_classes, plain
from tests.numerics.heads.samples import boxes, generator, images
from tests.numerics.heads.vision import VIT, frozen_batch_norm

DETR = {
    "hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
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

TINY_RESNET = {"model_type": "resnet", "embedding_size": 8, "layer_type": "basic"}
PYRAMID = {
    **TINY_RESNET, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
SEGMENTING = {
    **DETR, "backbone_config": PYRAMID, "hidden_size": 32, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
}  # fmt: skip
DEFORMABLE = {
    **DETR, "hidden_size": 32, "decoder_layers": 2, "encoder_n_points": 2, "decoder_n_points": 2,
    "num_feature_levels": 2, "disable_custom_kernels": True,
}  # fmt: skip
LW_DETR = {
    "backbone_config": {
        "model_type": "lw_detr_vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 64, "pretrain_image_size": 64, "patch_size": 16, "num_windows": 4, "out_indices": [1, 2],
        "window_block_indices": [0],
    },
    "projector_scale_factors": [1.0], "d_model": 32, "decoder_ffn_dim": 16, "decoder_layers": 1, "decoder_n_points": 2,
    "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "num_queries": 4, "group_detr": 2,
    "c2f_num_blocks": 1, "num_labels": 3,
}  # fmt: skip
SWIN = {
    "model_type": "swin", "embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2, "image_size": 32,
    "patch_size": 2, "drop_path_rate": 0.0, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
MASKS = {"backbone_config": SWIN, "mask_feature_size": 8, "num_labels": 3}
MASK_FORMER = {
    **MASKS, "fpn_feature_size": 32,
    "decoder_config": {key: value for key, value in DETR.items() if "backbone" not in key} | {"model_type": "detr"},
}  # fmt: skip
MASK2FORMER = {
    **MASKS, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16,
    "dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 4,
    "train_num_points": 16,
}  # fmt: skip
ONE_FORMER = {
    "backbone_config": SWIN, "mask_dim": 64, "conv_dim": 64, "hidden_dim": 64, "encoder_feedforward_dim": 16,
    "dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, "query_dec_layers": 1, "num_attention_heads": 2,
    "num_queries": 6, "dropout": 0.0, "train_num_points": 16, "task_seq_len": 4, "is_training": True,
    "text_encoder_width": 64, "text_encoder_context_length": 4, "text_encoder_num_layers": 1,
    "text_encoder_vocab_size": 32, "text_encoder_n_ctx": 2,
}  # fmt: skip
GROUNDING_DINO = {
    "backbone_config": {**SWIN, "out_features": ["stage2", "stage3"]},
    "text_config": {
        "model_type": "bert", "vocab_size": 1100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "num_queries": 4, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_layers": 1,
    "decoder_ffn_dim": 16, "decoder_attention_heads": 2, "d_model": 32, "dropout": 0.0, "fusion_droppath": 0.0,
    "num_feature_levels": 2, "encoder_n_points": 2, "decoder_n_points": 2, "max_text_len": 16,
    "disable_custom_kernels": True, "decoder_bbox_embed_share": False,
}  # fmt: skip

#: Detection losses build float32 class weights of their own, so the whole head is run in float32.
FLOAT32 = 1e-5


class SameDraws(TorchFunctionMode):
    """Draw points by their number alone, so that a mask meets the same ones in every cut."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.rand:
            return func(*args, **(kwargs or {}))
        rows, *shape = args
        return torch.rand(1, *shape, generator=generator(0)).expand(rows, *shape).clone()


def same_draws(model: nn.Module) -> None:
    forward = model.forward

    @wraps(forward)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with SameDraws():
            return forward(*args, **kwargs)

    model.forward = drawn  # type: ignore[method-assign]


def with_masks(index: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    listed = boxes(index, g)
    return {**listed, "masks": (torch.rand(len(listed["boxes"]), 32, 32, generator=g) < 0.3).float()}


def masked(index: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    """Classes and masks of an image, which MaskFormer's kin take as two lists."""
    listed = with_masks(index, g)
    return {"class_labels": listed["class_labels"], "mask_labels": listed["masks"]}


def prompted() -> list[Sample]:
    """Every image under the same three words, each between full stops, as class names."""
    words = torch.tensor([101, 5, 1012, 6, 7, 1012, 8, 1012, 102])
    return [
        {**sample, "input_ids": words, "attention_mask": torch.ones_like(words)}
        for sample in images(boxes, dtype=torch.float32)
    ]


def two_lists(samples: Sequence[Sample]) -> Batch:
    listed = [sample["labels"] for sample in samples]
    images = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": images, **{key: [each[key] for each in listed] for key in ("class_labels", "mask_labels")}}


def heads() -> list[Head]:
    found = images(boxes, dtype=torch.float32)
    larger = images(boxes, 64, torch.float32)
    lists = images(masked, dtype=torch.float32)
    often: dict[str, Any] = {"tolerance": FLOAT32, "dtype": torch.float32}
    rarely = {**often, "everyday": False}
    listed = {**rarely, "collate": two_lists}
    frozen: Any = {"prepare": frozen_batch_norm}
    auxiliary = {**DETR, "auxiliary_loss": True, "decoder_layers": 2}
    return [
        of_class("YolosForObjectDetection", YOLOS, found, name="yolos", **often),
        *of_classes(plain("Detr ConditionalDetr DabDetr TableTransformer", "ForObjectDetection"), DETR, found, **often),
        *of_classes(plain("RTDetr RTDetrV2", "ForObjectDetection"), RT_DETR, larger, **frozen, **often),
        of_class("DFineForObjectDetection", D_FINE, larger, **frozen, **often),
        of_class("LwDetrForObjectDetection", LW_DETR, larger, **frozen, **rarely),
        of_class("GroundingDinoForObjectDetection", GROUNDING_DINO, prompted(), **rarely),
        of_class("Mask2FormerForUniversalSegmentation", MASK2FORMER, lists, prepare=same_draws, **listed),
        of_class("DeformableDetrForObjectDetection", DEFORMABLE, found, **rarely),
        of_class("DetrForObjectDetection", auxiliary, found, name="detr-auxiliary", **rarely),
        of_class("DetrForSegmentation", SEGMENTING, images(with_masks, dtype=torch.float32), **rarely),
        of_class("MaskFormerForInstanceSegmentation", MASK_FORMER, lists, **listed),
    ]
