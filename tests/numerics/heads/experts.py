"""Mixtures of experts, whose loss carries a router loss."""

from __future__ import annotations

from tests.numerics.heads.head import Head, Origin, of_class
from tests.numerics.heads.losses import smoothing_reference
from tests.numerics.heads.samples import text
from tests.numerics.heads.text import DECODER

ROUTER = 0.3
ROUTED = {**DECODER, "output_router_logits": True, "router_aux_loss_coef": ROUTER, "experts_implementation": "eager"}


def heads() -> list[Head]:
    mixtral = {**ROUTED, "num_local_experts": 4, "num_experts_per_tok": 2}
    qwen = {**ROUTED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    smooth = {"label_smoothing_factor": 0.1}
    router = {"router": ROUTER, "origin": Origin.ROUTER}
    return [
        of_class("MixtralForCausalLM", mixtral, text(), name="mixtral", **router),
        of_class(
            "MixtralForCausalLM",
            mixtral,
            text(),
            name="mixtral-smoothing",
            loss=smoothing_reference(0.1),
            arguments=smooth,
            **router,
        ),
        of_class("Qwen3MoeForCausalLM", qwen, text(), name="qwen3-moe", **router),
    ]
