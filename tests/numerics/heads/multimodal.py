"""Images beside text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.numerics.heads.head import (
    FLOAT64,
    TINY,
    Batch,
    Head,
    Origin,
    Sample,
    before,
    collate,
    freeze,
    of_class,
)
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import generator, pairs, text, with_return_loss
from tests.numerics.heads.text import DECODER

IMAGE_TOKEN = 3
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
LLAVA = {
    "vision_config": {**TOWER, "num_hidden_layers": 2, "model_type": "clip_vision_model"},
    "text_config": {**DECODER, "model_type": "llama"},
    "image_token_index": IMAGE_TOKEN,
    "image_seq_length": 4,
}
CLIP = {
    "vision_config": {**TOWER, "num_hidden_layers": 1},
    "text_config": {
        **TINY, "num_hidden_layers": 1, "max_position_embeddings": 64,
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    },
    "projection_dim": 8,
}  # fmt: skip
QWEN_VL = {
    "text_config": {
        **DECODER, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 16,
        "fullatt_block_indexes": [0],
    },
    "image_token_id": IMAGE_TOKEN, "vision_start_token_id": 1, "vision_end_token_id": 2, "video_token_id": 40,
}  # fmt: skip


def llava_samples() -> list[Sample]:
    g = generator(4)
    # Up to 4.44 the model itself spreads one token over the four patches.
    tokens = 1 if before("4.45") else 4
    samples = []
    for sample in text():
        ids = torch.cat([torch.full((tokens,), IMAGE_TOKEN), sample["input_ids"]])
        labels = torch.cat([torch.full((tokens,), -100), sample["labels"]])
        pixels = torch.randn(3, 16, 16, generator=g, dtype=torch.float64)
        samples.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}
        )
    return samples


def qwen_vl_samples() -> list[Sample]:
    """One image of 4 x 4 patches, merged to 4 tokens, before each text."""
    g = generator(9)
    samples = []
    for sample in text():
        ids = torch.cat([torch.tensor([1] + [IMAGE_TOKEN] * 4 + [2]), sample["input_ids"].clamp(max=39)])
        labels = torch.cat([torch.full((6,), -100), sample["labels"]])
        samples.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": labels,
                "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
                "pixel_values": torch.randn(16, 48, generator=g, dtype=torch.float64),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
            }
        )
    return samples


def with_flat_images(samples: Sequence[Sample]) -> Batch:
    batch = collate([{k: v for k, v in s.items() if k not in ("pixel_values", "image_grid_thw")} for s in samples])
    return {**batch, **{key: torch.cat([s[key] for s in samples]) for key in ("pixel_values", "image_grid_thw")}}


def heads() -> list[Head]:
    # What the features of the last layer do not reach stays out of the gradient, on one rank and two.
    llava = {"model": "LlavaForConditionalGeneration", "config": LLAVA, "prepare": freeze("vision"), "origin": None}
    smooth = {"label_smoothing_factor": 0.1}
    return [
        of_class(samples=llava_samples(), name="llava", stock_wrong=before("4.52"), **llava),
        of_class(
            samples=llava_samples(), name="llava-smoothing", loss=smoothing_reference(0.1), arguments=smooth, **llava
        ),
        # Its image patches have no sample axis.
        of_class(
            "Qwen2_5_VLForConditionalGeneration",
            QWEN_VL,
            qwen_vl_samples(),
            name="qwen-vl",
            origin=Origin.DECLARES_FALSE,
            prepare=freeze("visual"),
            collate=with_flat_images,
        ),
        of_class(
            "CLIPModel",
            CLIP,
            pairs(),
            FLOAT64,
            name="clip",
            origin=None,
            stock_wrong=False,
            collate=with_return_loss,
            exact=False,
        ),
    ]
