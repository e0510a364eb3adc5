"""Images beside text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.numerics.heads.experts import FULL_ATTENTION, QWEN, ROUTER
from tests.numerics.heads.head import (
    FLOAT64,
    NO_DROPOUT,
    TINY,
    VOCABULARY,
    Batch,
    Head,
    Origin,
    Sample,
    before,
    collate,
    freeze,
    of_class,
    of_classes,
    plain,
)
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import (
    alike,
    first_is_target,
    generator,
    heard,
    masked_tokens,
    normal,
    one_class,
    pairs,
    text,
    token_classes,
    with_labels,
    with_return_loss,
    without,
)
from tests.numerics.heads.text import DECODER, ENCODER

IMAGE_TOKEN = 3
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
LLAVA = {
    "vision_config": {**TOWER, "num_hidden_layers": 2, "model_type": "clip_vision_model"},
    "text_config": {**DECODER, "model_type": "llama"}, "image_token_index": IMAGE_TOKEN, "image_seq_length": 4,
}  # fmt: skip
CLIP = {
    "vision_config": {**TOWER, "num_hidden_layers": 1},
    "text_config": {
        **TINY, "num_hidden_layers": 1, "max_position_embeddings": 64,
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    },
    "projection_dim": 8,
}  # fmt: skip
VISION_TOKENS = {
    "image_token_id": IMAGE_TOKEN, "vision_start_token_id": 1, "vision_end_token_id": 2, "video_token_id": 40,
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
    **VISION_TOKENS,
}  # fmt: skip


#: Rotary positions of time, height and width.
MROPE = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
MROPE_TEXT = {**DECODER, "head_dim": 8, "rope_scaling": MROPE, "rope_parameters": MROPE}
QWEN3_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
GLM_VISION = {**QWEN3_VISION, "image_size": 16, "attention_dropout": 0.0}
GLM_TOKENS = {
    **VISION_TOKENS, "image_start_token_id": 1, "image_end_token_id": 2, "video_start_token_id": 41,
    "video_end_token_id": 42,
}  # fmt: skip
QWEN3_EXPERTS = {
    **MROPE_TEXT, **QWEN, **FULL_ATTENTION, "output_router_logits": True, "router_aux_loss_coef": ROUTER,
    "experts_implementation": "eager", "shared_expert_intermediate_size": 12,
}  # fmt: skip
VILT = {**ENCODER, "image_size": 16, "patch_size": 8, "modality_type_vocab_size": 2, "max_image_length": -1}
VISUAL_BERT = {**ENCODER, "visual_embedding_dim": 8}
LXMERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "l_layers": 1,
    "x_layers": 1, "r_layers": 1, "visual_feat_dim": 8, "visual_pos_dim": 4, "num_qa_labels": 4,
    "task_obj_predict": False, "max_position_embeddings": 64, **NO_DROPOUT,
}  # fmt: skip
FLAVA_TOWER = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24, **NO_DROPOUT,
}  # fmt: skip
#: Without the contrast of images and texts, in which the other samples of a micro-batch are the negatives.
FLAVA = {
    "image_config": {**FLAVA_TOWER, "image_size": 16, "patch_size": 8, "vocab_size": VOCABULARY, "mask_token": True},
    "text_config": {**FLAVA_TOWER, "vocab_size": VOCABULARY},
    "multimodal_config": FLAVA_TOWER, "hidden_size": 16, "projection_dim": 8, "init_codebook": False,
    "global_contrastive_weight": 0.0,
}  # fmt: skip
QWEN2_AUDIO = {
    "audio_config": {
        "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16,
        "max_source_positions": 8, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "model_type": "qwen2_audio_encoder",
    },
    "text_config": {**DECODER, "model_type": "qwen2"},
    "audio_token_index": IMAGE_TOKEN, "audio_token_id": IMAGE_TOKEN,
}  # fmt: skip

#: Classes of the library, and their configs.
Rows = dict[str, Mapping[str, Any]]

GLM = {**GLM_TOKENS, "text_config": MROPE_TEXT, "vision_config": GLM_VISION}
DECLARED_FALSE: Rows = {
    "Qwen3VLForConditionalGeneration": {**VISION_TOKENS, "text_config": MROPE_TEXT, "vision_config": QWEN3_VISION},
    "Qwen3_5ForConditionalGeneration": {
        **VISION_TOKENS, "text_config": {**MROPE_TEXT, **FULL_ATTENTION}, "vision_config": QWEN3_VISION,
    },
    "Glm4vForConditionalGeneration": GLM,
    "GlmOcrForConditionalGeneration": GLM,
    "Glm46VForConditionalGeneration": {
        **GLM_TOKENS, "text_config": {**MROPE_TEXT, "model_type": "glm4v_text"},
        "vision_config": {**GLM_VISION, "model_type": "glm4v_vision"},
    },
    "Exaone4_5_ForConditionalGeneration": {
        **VISION_TOKENS, "text_config": {**DECODER, **FULL_ATTENTION, "head_dim": 8, "model_type": "exaone4"},
        "vision_config": {**QWEN_VL["vision_config"], "num_key_value_heads": 2},
    },
}  # fmt: skip
EXPERTS = {
    **VISION_TOKENS, "text_config": QWEN3_EXPERTS, "vision_config": QWEN3_VISION, "experts_implementation": "eager",
}  # fmt: skip


def llava_samples(texts: Sequence[Sample] | None = None) -> list[Sample]:
    g = generator(4)
    # Up to 4.44 the model itself spreads one token over the four patches.
    tokens = 1 if before("4.45") else 4
    samples = []
    for sample in texts or text():
        ids = torch.cat([torch.full((tokens,), IMAGE_TOKEN), sample["input_ids"]])
        labels = torch.cat([torch.full((tokens,), -100), sample["labels"]])
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        samples.append({**row, "pixel_values": normal(g, 3, 16, 16)})
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
                "pixel_values": normal(g, 16, 48),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
            }
        )
    return samples


def with_flat_images(samples: Sequence[Sample]) -> Batch:
    batch = collate(without("pixel_values", without("image_grid_thw", samples)))
    return {**batch, **{key: torch.cat([s[key] for s in samples]) for key in ("pixel_values", "image_grid_thw")}}


def pictured() -> list[Sample]:
    """Texts beside an image of which every pixel counts."""
    mask = torch.ones(16, 16, dtype=torch.long)
    return [{**each, "token_type_ids": torch.zeros_like(each["input_ids"]), "pixel_mask": mask} for each in pairs()]


def with_regions() -> list[Sample]:
    """Texts beside the features of three regions of an image."""
    g = generator(10)
    return [
        {
            **sample,
            "token_type_ids": torch.zeros_like(sample["input_ids"]),
            "visual_embeds": normal(g, 3, 8),
            "visual_attention_mask": torch.ones(3, dtype=torch.long),
            "visual_token_type_ids": torch.ones(3, dtype=torch.long),
        }
        for sample in alike()
    ]


def matched_and_asked() -> list[Sample]:
    """Masked texts beside three regions of an image: whether the two match, and the answer to a question."""
    g = generator(13)
    return [
        {
            **sample,
            "visual_feats": torch.rand(3, 8, generator=g, dtype=torch.float64),
            "visual_pos": torch.rand(3, 4, generator=g, dtype=torch.float64),
            "matched_label": torch.tensor(index % 2),
            "ans": torch.tensor(index % 4),
        }
        for index, sample in enumerate(with_labels(masked_tokens))
    ]


def masked_on_both_sides() -> list[Sample]:
    """Images and texts that match, some patches and some tokens of each masked."""
    g = generator(14)
    places = torch.arange(6)
    return [
        {
            **sample,
            "input_ids_masked": torch.where(places % 3 == index % 3, 1, sample["input_ids"]),
            "mlm_labels": torch.where((places * (index + 1)) % 3 == 0, sample["input_ids"], -100),
            "mim_labels": torch.randint(0, VOCABULARY, (4,), generator=g),
            "bool_masked_pos": torch.arange(4) < 1 + index % 3,
            "itm_labels": torch.tensor(1),
        }
        for index, sample in enumerate(pairs())
    ]


def sounding() -> list[Sample]:
    """What LLaVA is shown, heard."""
    seen = without("pixel_values", llava_samples())
    return [{**one, "input_features": other["input_features"]} for one, other in zip(seen, heard(seen), strict=True)]


def with_feature_mask(samples: Sequence[Sample]) -> Batch:
    return {**collate(samples), "feature_attention_mask": torch.ones(len(samples), 16, dtype=torch.long)}


def heads() -> list[Head]:
    # What the features of the last layer do not reach stays out of the gradient, on one rank and two.
    llava = {"model": "LlavaForConditionalGeneration", "config": LLAVA, "prepare": freeze("vision"), "origin": None}
    smooth: Any = {"loss": smoothing_reference(0.1, shift=False), "arguments": {"label_smoothing_factor": 0.1}}
    g = generator(11)
    answered = [{**s, "labels": torch.rand(3, generator=g, dtype=torch.float64)} for s in pictured()]
    likely = [{**s, "labels": torch.rand(3, generator=g, dtype=torch.float64).softmax(-1)} for s in with_regions()]
    two_images = [
        {**s, "pixel_values": s["pixel_values"].expand(2, -1, -1, -1), "pixel_mask": s["pixel_mask"].expand(2, -1, -1)}
        for s in pictured()
    ]
    phrases = [
        {
            **s,
            "region_to_phrase_position": torch.randint(0, 12, (15,), generator=g),
            "labels": torch.rand(15, 3, generator=g, dtype=torch.float64).softmax(-1),
        }
        for s in without("labels", with_regions())
    ]
    regions = [{**s, "labels": torch.cat([s["labels"], torch.full((3,), -100)])} for s in with_regions()]
    flat: Any = {"origin": Origin.DECLARES_FALSE, "prepare": freeze("visual"), "collate": with_flat_images}
    routed = {**flat, "router": ROUTER}
    coupled: Any = {"origin": None, "stock_wrong": False, "exact": False}
    audio: Any = {"prepare": freeze("audio_tower"), "collate": with_feature_mask}
    vilt, visual_bert = {**VILT, "num_labels": 3}, {**VISUAL_BERT, "num_labels": 3}
    several = {**vilt, "num_images": 2, "modality_type_vocab_size": 3}
    answering = {**ENCODER, "is_decoder": True, "encoder_hidden_size": 16}
    asked, pixels = with_labels(one_class, with_regions()), with_labels(token_classes, pictured())
    return [
        of_class(samples=llava_samples(), name="llava", stock_wrong=before("4.52"), **llava),
        of_class(samples=llava_samples(), name="llava-smoothing", stock_wrong=before("5.15"), **smooth, **llava),
        # Its image patches have no sample axis.
        of_class("Qwen2_5_VLForConditionalGeneration", QWEN_VL, qwen_vl_samples(), name="qwen-vl", **flat),
        of_class("CLIPModel", CLIP, pairs(), FLOAT64, name="clip", collate=with_return_loss, **coupled),
        *of_classes(DECLARED_FALSE, {}, qwen_vl_samples(), **flat),
        *of_classes(plain("Qwen3VLMoe Qwen3_5Moe", "ForConditionalGeneration"), EXPERTS, qwen_vl_samples(), **routed),
        of_class("ViltForQuestionAnswering", vilt, answered, FLOAT64),
        of_class("ViltForMaskedLM", VILT, with_labels(masked_tokens, pictured()), FLOAT64),
        of_class("ViltForTokenClassification", {**VILT, "num_labels": 4}, pixels, FLOAT64),
        of_class("ViltForImagesAndTextClassification", several, with_labels(one_class, two_images), FLOAT64),
        of_class("VisualBertForQuestionAnswering", visual_bert, likely, FLOAT64),
        of_class("VisualBertForVisualReasoning", visual_bert, asked, FLOAT64),
        of_class("VisualBertForRegionToPhraseAlignment", VISUAL_BERT, phrases, FLOAT64),
        # It adds its terms up in float32.
        of_class("LxmertForPreTraining", LXMERT, matched_and_asked()),
        of_class("FlavaForPreTraining", FLAVA, masked_on_both_sides(), FLOAT64, collate=with_return_loss),
        of_class("VisualBertForPreTraining", VISUAL_BERT, regions, FLOAT64),
        of_class("BlipTextLMHeadModel", answering, text(masked=first_is_target), FLOAT64),
        of_class("Qwen2AudioForConditionalGeneration", QWEN2_AUDIO, sounding(), FLOAT64, **audio),
    ]
