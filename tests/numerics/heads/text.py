"""Text: causal, masked, and everything that classifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.numerics.heads.head import (
    FLOAT64,
    NO_DROPOUT,
    TINY,
    VOCABULARY,
    Head,
    Origin,
    Sample,
    of_class,
    of_classes,
    plain,
    seeded,
)
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import (
    alike,
    answers,
    choices,
    double,
    first_is_target,
    masked_tokens,
    next_sentence,
    one_class,
    replaced_tokens,
    right_or_wrong,
    some_unlabelled,
    text,
    token_classes,
    with_boxes,
    with_labels,
    with_padded_choices,
    with_padded_texts,
    with_shift_labels,
)

ENCODER = {**TINY, **NO_DROPOUT, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**TINY, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


#: The words of a column and a row of a table each, and one of three ways to put the chosen cells together.
TAPAS = {
    **ENCODER, "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 10], "num_aggregation_labels": 3, "aggregation_loss_weight": 2.0,
}  # fmt: skip


def cells() -> list[Sample]:
    places = torch.arange(12)
    of_table = torch.stack([places > 3, places % 3 + 1, places // 3, *[places * 0] * 4], dim=-1).long()
    of_table[:4] = 0
    return [
        {
            **sample,
            "token_type_ids": of_table,
            "labels": ((places % 3 + 1 == 1 + index % 3) & (places // 3 == 1 + index % 2)).long(),
            "aggregation_labels": torch.tensor(index % 3),
        }
        for index, sample in enumerate(alike())
    ]


def llama_config(**overrides: Any) -> Any:
    return hf.LlamaConfig(**{**DECODER, **overrides})


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(llama_config())


def bert(head: str, **overrides: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, head)(hf.BertConfig(**{**ENCODER, **overrides}))


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    llama_tokens = hf.LlamaForTokenClassification(hf.LlamaConfig(**DECODER, num_labels=4, classifier_dropout=0.0))
    return peft.get_peft_model(llama_tokens, config)


def prompt_tuning() -> nn.Module:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(llama(), config)


#: Classes of the library, and what their configs say besides their family's.
Rows = dict[str, Mapping[str, Any]]

SMALL_MOBILE = {"embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 1}
MASKED: Rows = {
    **plain("Roberta Deberta Ernie IBert LayoutLM MegatronBert MPNet NomicBert", "ForMaskedLM"),
    "AlbertForMaskedLM": {"embedding_size": 8},
    "ElectraForMaskedLM": {"embedding_size": 8},
    "MobileBertForMaskedLM": SMALL_MOBILE,
    "RemBertForMaskedLM": {"input_embedding_size": 8, "output_embedding_size": 8},
    "RoCBertForMaskedLM": {
        f"{side}_{size}": 8 for side in ("pronunciation", "shape") for size in ("vocab_size", "embed_dim")
    },
    "RoFormerForMaskedLM": {"embedding_size": 8},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
}
#: The loss of a row moves with the padding beside it: convolutions, Fourier transforms, blocks and hashes of attention.
MASKED_ALIKE: Rows = {
    "ConvBertForMaskedLM": {"embedding_size": 16},
    "FNetForMaskedLM": {},
    "LongformerForMaskedLM": {"attention_window": 4},
    "YosoForMaskedLM": {"use_expectation": True},
    "SqueezeBertForMaskedLM": {
        "embedding_size": 16,
        **{f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention", "intermediate", "output")},
    },
    "ReformerForMaskedLM": {
        "is_decoder": False, "axial_pos_embds": False, "attn_layers": ["local", "local"], "feed_forward_size": 24,
        "local_attn_chunk_length": 4, "attention_head_size": 8, "local_attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
TOKENS: Rows = {
    **plain("Camembert DebertaV2 ModernBert", "ForTokenClassification"),
    "EuroBertForTokenClassification": {"attention_dropout": 0.0},
    "LukeForTokenClassification": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "BioGptForTokenClassification": {"activation_dropout": 0.0, "layerdrop": 0.0},
    "FalconForTokenClassification": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
#: The same in float32 arithmetic somewhere: rotary positions, softmax, or the logits themselves.
TOKENS_FLOAT32: Rows = {
    **plain("Mistral Phi3", "ForTokenClassification"),
    "Gemma2ForTokenClassification": {"head_dim": 8},
    "Qwen3ForTokenClassification": {"head_dim": 8},
    "GptOssForTokenClassification": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "DiffLlamaForTokenClassification": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "GPTNeoXForTokenClassification": {"hidden_dropout": 0.0},
}
#: Masked tokens, and whether the second sentence follows the first: two terms, each a mean over items of its own.
PRETRAINING: Rows = {
    **plain("Ernie MegatronBert", "ForPreTraining"),
    "BigBirdForPreTraining": {"attention_type": "original_full"},
    "MobileBertForPreTraining": SMALL_MOBILE,
}
MARKUP: Rows = {"MarkupLMForTokenClassification": {"max_depth": 2, "xpath_unit_hidden_size": 4}}
LAYOUT: Rows = {
    "LiltForTokenClassification": {"hidden_size": 24, "channel_shrink_ratio": 2},
    "LayoutLMv3ForTokenClassification": {"visual_embed": False, "coordinate_size": 2, "shape_size": 4},
}
CLASSES: Rows = {
    "Qwen2ForSequenceClassification": {},
    "GemmaForSequenceClassification": {"head_dim": 8},
    "OPTForSequenceClassification": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "JambaForSequenceClassification": {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 2,
        "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
}  # fmt: skip


def heads() -> list[Head]:
    mlm = with_labels(masked_tokens)
    tokens = with_labels(token_classes)
    classes = with_labels(one_class)
    multi = [{**s, "labels": torch.tensor([i % 2, 1, i % 3 == 0], dtype=torch.float64)} for i, s in enumerate(text())]
    empty = text(masked=lambda index, length: length if index in (1, 2, 3, 6) else 2)
    smooth: Any = {"loss": smoothing_reference(0.1), "arguments": {"label_smoothing_factor": 0.1}}
    small, electra = {**ENCODER, "embedding_size": 8}, {**ENCODER, "embedding_size": 16}
    choosing, texts = {"collate": with_padded_choices}, {"collate": with_padded_texts}
    decoding = {**ENCODER, "is_decoder": True}
    three = {**ENCODER, "num_labels": 3}
    four = {**ENCODER, "num_labels": 4}
    decoder = {**DECODER, "attention_dropout": 0.0, "classifier_dropout": 0.0, "experts_implementation": "eager"}
    mlm_alike = with_labels(masked_tokens, alike())
    tokens_alike = with_labels(token_classes, alike())
    named = [
        {
            **s,
            "entity_ids": torch.tensor([1 + i % 5, 2]),
            "entity_position_ids": torch.tensor([[place] + [-1] * 29 for place in (0, 1)]),
            "entity_attention_mask": torch.tensor([1, 1]),
            "entity_labels": torch.tensor([i % 8, 3 if i % 2 else -100]),
        }
        for i, s in enumerate(mlm)
    ]
    in_order = [{**s, "sentence_order_label": torch.tensor(i % 2)} for i, s in enumerate(mlm)]
    first = text(masked=first_is_target)
    gpt = {**GPT2, "classifier_dropout": 0.0, "summary_first_dropout": 0.0, "pad_token_id": 0}
    xlnet = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0}
    ctrl = {**GPT2, "dff": 24, "pad_token_id": 0}
    xlm = {
        "vocab_size": VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
        "max_position_embeddings": 64, "n_langs": 1, "pad_index": 0,
    }  # fmt: skip
    bloom = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "classifier_dropout": 0.0, "num_labels": 4,
    }  # fmt: skip
    funnel = {
        "vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "d_head": 8,
        "n_head": 2, "d_inner": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0,
    }  # fmt: skip
    perceiver = {
        "vocab_size": VOCABULARY, "d_latents": 16, "d_model": 16, "num_latents": 4, "num_blocks": 1,
        "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
        "qk_channels": 16, "v_channels": 16, "max_position_embeddings": 12, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    distilbert = {
        "vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "dropout": 0.0,
        "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    position_0: Any = {"origin": Origin.POSITION_0}
    declares_false: Any = {"origin": Origin.DECLARES_FALSE}
    return [
        Head("llama", seeded(llama), text(), stock_wrong=False),
        Head("llama-position-0", seeded(llama), first, stock_wrong=False),
        Head("llama-empty-micro-batches", seeded(llama), empty, stock_wrong=False),
        Head("llama-shift-labels", seeded(llama), text(), stock_wrong=False, collate=with_shift_labels),
        Head("llama-smoothing", seeded(llama), text(), stock_wrong=False, **smooth),
        Head("lora", seeded(lora), tokens),
        Head("prompt-tuning", seeded(prompt_tuning), first),
        of_class("GPT2LMHeadModel", GPT2, first, name="gpt2-position-0", **position_0),
        of_class("LlamaForSequenceClassification", {**DECODER, "num_labels": 3}, classes, name="llama-classification"),
        of_class("BertForMaskedLM", ENCODER, mlm, FLOAT64, name="bert-mlm"),
        of_class("BertForMaskedLM", ENCODER, empty, FLOAT64, name="bert-empty-micro-batches"),
        of_class("BertForTokenClassification", four, tokens, FLOAT64, name="bert-tokens"),
        of_class("BertForSequenceClassification", three, classes, FLOAT64, name="bert-classes"),
        of_class("BertForSequenceClassification", three, multi, FLOAT64, name="bert-multi-label"),
        of_class("BertForQuestionAnswering", ENCODER, answers(), FLOAT64, name="bert-answers"),
        of_class("BertForPreTraining", ENCODER, next_sentence(mlm), FLOAT64, name="bert-pretraining"),
        *of_classes(PRETRAINING, ENCODER, next_sentence(mlm), FLOAT64),
        of_class("LukeForMaskedLM", {**ENCODER, "entity_vocab_size": 8, "entity_emb_size": 8}, named, FLOAT64),
        of_class("FNetForPreTraining", ENCODER, next_sentence(mlm_alike), FLOAT64),
        *of_classes({"AlbertForPreTraining": {"classifier_dropout_prob": 0.0}}, small, in_order, FLOAT64),
        of_class("ElectraForPreTraining", electra, with_labels(replaced_tokens), name="electra"),
        *of_classes(MASKED, ENCODER, mlm, FLOAT64),
        *of_classes(MASKED_ALIKE, ENCODER, mlm_alike, FLOAT64),
        of_class("FunnelForMaskedLM", funnel, mlm_alike, FLOAT64),
        of_class("FunnelForPreTraining", funnel, with_labels(replaced_tokens, alike())),
        of_class("PerceiverForMaskedLM", perceiver, mlm_alike, FLOAT64),
        of_class("XLNetLMHeadModel", xlnet, mlm, FLOAT64),
        *of_classes(TOKENS, four, tokens, FLOAT64),
        *of_classes(TOKENS_FLOAT32, {**decoder, "num_labels": 4}, tokens),
        *of_classes(MARKUP, four, tokens_alike, FLOAT64),
        of_class("EsmcForTokenClassification", {**four, "classifier_dropout": 0.0}, tokens_alike),
        *of_classes(LAYOUT, four, with_boxes(tokens_alike), FLOAT64),
        of_class("DistilBertForTokenClassification", {**distilbert, "num_labels": 4}, tokens, FLOAT64),
        *of_classes(plain("GPT2 GPTBigCode", "ForTokenClassification"), {**gpt, "num_labels": 4}, tokens, FLOAT64),
        of_class("XLMForTokenClassification", {**xlm, "num_labels": 4}, tokens),
        of_class("BloomForTokenClassification", bloom, tokens),
        *of_classes(CLASSES, {**decoder, "num_labels": 3}, classes),
        *of_classes(plain("XLMRoberta Tapas", "ForSequenceClassification"), three, classes, FLOAT64),
        of_class("TapasForQuestionAnswering", TAPAS, cells(), FLOAT64, everyday=False),
        of_class("OpenAIGPTForSequenceClassification", {**gpt, "num_labels": 3}, classes, FLOAT64),
        of_class("CTRLForSequenceClassification", {**ctrl, "num_labels": 3}, classes, FLOAT64),
        of_class("BertForNextSentencePrediction", ENCODER, with_labels(right_or_wrong), FLOAT64),
        *of_classes(plain("Bert Roberta", "ForMultipleChoice"), ENCODER, choices(), FLOAT64, **choosing),
        of_class("DebertaForQuestionAnswering", ENCODER, answers(), FLOAT64),
        of_class("GPT2ForQuestionAnswering", gpt, answers(), FLOAT64),
        of_class("EsmForMaskedLM", ENCODER, mlm, FLOAT64, **declares_false),
        of_class("EsmForTokenClassification", four, tokens, FLOAT64, **declares_false),
        of_class("EsmForSequenceClassification", three, with_labels(some_unlabelled), FLOAT64, **declares_false),
        *of_classes(plain("BertLMHeadModel BertGenerationDecoder"), decoding, first, **position_0),
        of_class("OpenAIGPTLMHeadModel", GPT2, first, **position_0),
        # Three axes of labels, which no rule counts: the loss call does. The loss of the choices stands beside it.
        *of_classes(plain("GPT2 OpenAIGPT", "DoubleHeadsModel"), {**GPT2, "num_labels": 1}, double(), FLOAT64, **texts),
        of_class("CTRLLMHeadModel", ctrl, first, **position_0),
    ]
