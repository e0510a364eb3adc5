"""Liger's fused linear cross entropy, by its own kernels, which Triton's interpreter runs on a CPU.

    TRITON_INTERPRET=1 python recipes/in_release.py newest@liger-kernel==0.8.5 -- pytest -m liger

The kernels compute in float32: parameter changes are held to 2e-6 of a float64 full batch that knows no Liger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import hf_accum_fix
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text
from tests.numerics.parity import relative, trainable, training_arguments
from tests.trainers.runs import Cut, Ordered

pytestmark = pytest.mark.liger

SAMPLES = text()
CUTS: tuple[Cut, ...] = ((8, 1), (2, 4), (1, 8))
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


class Masking(hf.LlamaForCausalLM):  # type: ignore[misc]
    """Leaves every fifth class out of its loss, which no rule counts."""

    def forward(self, labels: Any = None, **kwargs: Any) -> Any:
        labels = labels if labels is None else labels.masked_fill(labels % 5 == 1, -100)
        return super().forward(labels=labels, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def _fused() -> Iterator[None]:
    """Liger's forward in the place of the library's."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "without a GPU the kernels need TRITON_INTERPRET=1 from the start"
    with pytest.MonkeyPatch.context() as patch:
        from liger_kernel.transformers.model.llama import lce_forward

        patch.setattr(hf.LlamaForCausalLM, "plain_forward", hf.LlamaForCausalLM.forward, raising=False)
        patch.setattr(hf.LlamaForCausalLM, "forward", lce_forward)
        yield


def built(head: type) -> Any:
    torch.manual_seed(0)
    return head(hf.LlamaConfig(vocab_size=96, num_hidden_layers=1, **SIZES))


def full_batch(head: type) -> dict[str, Tensor]:
    """The gradient of one forward in float64, by the library's own loss."""
    model, batch = built(head).double(), collate(SAMPLES)
    labels = batch["labels"]
    batch["labels"] = labels.masked_fill(labels % 5 == 1, -100) if head is Masking else labels
    model.plain_forward(**batch).loss.backward()
    return {name: -parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("head", [hf.LlamaForCausalLM, Masking])
def test_a_fused_loss_is_exact_where_a_rule_counts_it(head: type, cut: Cut, tmp_path: Path) -> None:
    wanted, errors = full_batch(head), {}
    for path in ("stock", "apply"):
        with hf_accum_fix.apply() if path == "apply" else pytest.MonkeyPatch.context():
            args = training_arguments(tmp_path, *cut, max_steps=1)
            trainer: Any = Ordered(model=built(head), args=args, train_dataset=SAMPLES, data_collator=collate)
            before = trainable(trainer.model)
            trainer.train()
            runs = hf_accum_fix.report().to_dict()["runs"]
        after = trainable(trainer.model)
        errors[path] = relative({name: after[name] - value for name, value in before.items()}, wanted)
    if head is Masking:
        # Its kernel hides what it divides by, and no rule counts what the model masks.
        assert errors["stock"] > 0.05 and not runs[-1]["exact"]
        assert errors["apply"] <= 1.5 * errors["stock"]
        return
    assert errors["stock"] < 2e-6 and errors["apply"] < 2e-6 and runs[-1]["exact"]
