"""Mixtures of experts, whose loss carries a router loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.numerics.heads.head import VOCABULARY, Batch, Head, Origin, Sample, collate, of_class, of_classes
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import text
from tests.numerics.heads.seq2seq import BART, T5
from tests.numerics.heads.text import DECODER

ROUTER = 0.3
ROUTED = {**DECODER, "output_router_logits": True, "router_aux_loss_coef": ROUTER, "experts_implementation": "eager"}


LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
#: So many that no token is dropped for want of room, which would depend on the batch.
ROOM = 4096

CAUSAL: dict[str, Mapping[str, Any]] = {
    "Qwen2MoeForCausalLM": {**QWEN, "shared_expert_intermediate_size": 12},
    **dict.fromkeys(("OlmoeForCausalLM", "FlexOlmoForCausalLM", "LagunaForCausalLM", "MellumForCausalLM"), QWEN),
    "GptOssForCausalLM": {**LOCAL, "head_dim": 8},
    "PhimoeForCausalLM": {**LOCAL, "head_dim": 8, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "GraniteMoeForCausalLM": LOCAL,
    "GraniteMoeSharedForCausalLM": {**LOCAL, "shared_intermediate_size": 12},
    "GraniteMoeSWAForCausalLM": LOCAL,
    "GraniteMoeHybridForCausalLM": {
        **LOCAL, **MAMBA, "shared_intermediate_size": 12, "layer_types": ["attention", "attention"],
    },
    "JambaForCausalLM": {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 4,
        "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "JetMoeForCausalLM": {**LOCAL, "kv_channels": 8, "aux_loss_coef": ROUTER, "num_key_value_heads": 2},
    "MiniMaxForCausalLM": {**LOCAL, **FULL_ATTENTION, "head_dim": 8, "block_size": 8},
    "MiniMaxM2ForCausalLM": {**LOCAL, "head_dim": 8},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_interval": 1,
    },
    "Qwen3NextForCausalLM": {
        **QWEN, **FULL_ATTENTION, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "Qwen3_5MoeForCausalLM": {**QWEN, **FULL_ATTENTION, "shared_expert_intermediate_size": 12},
}  # fmt: skip
DBRX = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
    "output_router_logits": True, "experts_implementation": "eager",
    "ffn_config": {
        "ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": ROUTER, "moe_jitter_eps": None,
    },
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
}  # fmt: skip
NLLB = {
    **BART, "num_experts": 4, "expert_capacity": ROOM, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "moe_token_dropout": 0.0, "output_router_logits": True,
    "router_aux_loss_coef": ROUTER,
}  # fmt: skip
SWITCH = {
    **T5, "num_decoder_layers": 2, "num_experts": 4, "expert_capacity": ROOM, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0, "router_aux_loss_coef": ROUTER,
    "router_z_loss_coef": 0.001,
}  # fmt: skip


def routers_in_float64(model: nn.Module) -> None:
    """Their config knows no float64, and they cast their weights in the first forward, under DDP's hands."""
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.dtype = torch.float64


def with_router_logits(samples: Sequence[Sample]) -> Batch:
    return {**collate(samples), "output_router_logits": True}


def both_sides(outputs: Any) -> Tensor:
    return outputs["encoder_aux_loss"] + outputs["decoder_aux_loss"]


def both_sides_with_z(outputs: Any) -> Tensor:
    z = outputs["encoder_z_loss"] + outputs["decoder_z_loss"]
    return both_sides(outputs) + SWITCH["router_z_loss_coef"] / ROUTER * z


def square_of_log_partition(outputs: Any) -> Tensor:
    """Bamba's z-loss, over every position of the logits."""
    return outputs["logits"].logsumexp(dim=-1).pow(2).mean()


def heads() -> list[Head]:
    mixtral, bamba = (
        {**ROUTED, **LOCAL},
        {**ROUTED, **MAMBA, "attn_layer_indices": [0, 1], "z_loss_coefficient": ROUTER},
    )
    smooth: Any = {"loss": smoothing_reference(0.1), "arguments": {"label_smoothing_factor": 0.1}}
    router = {"router": ROUTER, "origin": Origin.ROUTER}
    targets = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(text())]
    both = {**router, "router_loss": both_sides, "prepare": routers_in_float64}
    with_z = {**both, "router_loss": both_sides_with_z, "collate": with_router_logits}
    return [
        of_class("MixtralForCausalLM", mixtral, text(), name="mixtral", **router),
        of_class("MixtralForCausalLM", mixtral, text(), name="mixtral-smoothing", **smooth, **router),
        of_class("Qwen3MoeForCausalLM", {**ROUTED, **QWEN}, text(), name="qwen3-moe", **router),
        *of_classes(CAUSAL, ROUTED, text(), **router),
        of_class("DbrxForCausalLM", DBRX, text(), **router),
        of_class("NllbMoeForConditionalGeneration", NLLB, targets, **both),
        of_class("SwitchTransformersForConditionalGeneration", SWITCH, targets, **with_z),
        # Its z-loss is in no output; it is a mean per micro-batch all the same.
        of_class("BambaForCausalLM", bamba, text(), router_loss=square_of_log_partition, **router),
    ]
