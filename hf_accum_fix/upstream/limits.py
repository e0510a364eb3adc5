"""DATA: properties of torch that make a finer split train another gradient in every release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Limit:
    """One property of the library below transformers.

    Attributes:
        name: kebab-case, stable: what users search for.
        owner: the library.
        summary: the effect, in one line.
        who: the affected runs, in one clause.
        remedy: the setting that avoids it.
        source: links.
    """

    name: str
    owner: str
    summary: str
    who: str
    remedy: str
    source: tuple[str, ...]


LIMITS: Final = (
    Limit(
        name="gradient-added-in-16-bits",
        owner="torch",
        summary="adding a micro-batch to a 16-bit .grad rounds the sum; the finer the split, the larger the error",
        who="trainable bfloat16 or float16 parameters (the default dtype of checkpoints since transformers 5.0); bf16 "
        "mixed precision under FSDP, which sums in the dtype in which it computes or reduces",
        remedy="accumulate_in='float32' (4 bytes more per parameter) or 'compensated' (2); under DeepSpeed "
        '"data_types": {"grad_accum_dtype": "fp32"}',
        source=(
            "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
            "https://www.deepspeed.ai/docs/config-json/#data-type-options",
        ),
    ),
)
