"""DATA: why a finer split trains another gradient in every release: properties of torch, not defects of one release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Limit:
    """One property of the arithmetic below transformers.

    Attributes:
        name: kebab-case, stable: what users search for.
        owner: the library.
        summary: what happens, in one line.
        who: whose runs it affects, in one clause.
        remedy: what to set.
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
        summary="every micro-batch rounds the 16-bit .grad that it is added to; a finer split, a larger error",
        who="trainable bfloat16 or float16 parameters (loaded so by default since transformers 5.0); bf16 mixed "
        "precision under FSDP, which adds in the dtype that it computes or reduces in",
        remedy="accumulate_in='float32' (4 bytes more per parameter) or 'compensated' (2); under DeepSpeed "
        '"data_types": {"grad_accum_dtype": "fp32"}',
        source=(
            "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
            "https://www.deepspeed.ai/docs/config-json/#data-type-options",
        ),
    ),
)
