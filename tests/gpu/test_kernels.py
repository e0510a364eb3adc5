"""Kernels that a step may run by: attention, fused losses, torch.compile with and without CUDA graphs, checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

from tests.gpu.steps import SPLITS, assert_every_cut
from tests.numerics.heads import HEADS, Batch, Head, Sample, llama_config, seeded

#: Two cuts show what depends on the cut.
TWO = ((2, 4), (1, 8))


def without_mask(samples: Sequence[Sample]) -> Batch:
    """Padded on the right, as wide in every cut: fused kernels take no mask, graphs no second shape."""
    width = max(len(sample["input_ids"]) for sample in HEADS["llama"].samples)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(row[name], (0, width - len(row[name])), value=value) for row in samples])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def llama_with(attention: str) -> Head:
    """Causal, so that what is padded on the right changes nothing before it; no kernel has to repeat heads itself."""

    def build() -> nn.Module:
        config = llama_config(num_key_value_heads=2)
        config._attn_implementation = attention
        return hf.LlamaForCausalLM(config)

    return replace(HEADS["llama"], build=seeded(build), collate=without_mask)


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
def test_sdpa(kernel: SDPBackend, device: str, tmp_path: Path) -> None:
    with sdpa_kernel(kernel):
        assert_every_cut(llama_with("sdpa"), device, tmp_path, autocast=torch.bfloat16, splits=TWO, bf16=True)


@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str)
def test_sdpa_of_cuda(kernel: SDPBackend, cuda: str, tmp_path: Path) -> None:
    """Kernels that torch has for CUDA alone."""
    with sdpa_kernel(kernel):
        assert_every_cut(llama_with("sdpa"), cuda, tmp_path, autocast=torch.bfloat16, splits=TWO, bf16=True)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
def test_flash_attention_2(cuda: str, tmp_path: Path) -> None:
    """Its kernels are CUDA's."""
    head = llama_with("flash_attention_2")
    assert_every_cut(head, cuda, tmp_path, autocast=torch.bfloat16, splits=TWO, bf16=True)


@pytest.fixture
def without_liger() -> Iterator[None]:
    """Takes out of the library's module again what Liger puts there for one model, and every later one gets."""
    before = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(before)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_liger(precision: str, split: tuple[int, int], cuda: str, without_liger: None, tmp_path: Path) -> None:
    """Triton kernels: a loss that is fused with the last layer, beside the library's own full batch."""
    half = precision == "bfloat16"
    how = {"use_liger_kernel": True, "bf16": half}
    autocast = torch.bfloat16 if half else None
    assert_every_cut(llama_with("sdpa"), cuda, tmp_path, autocast=autocast, splits=(split,), **how)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class WithoutTF32(hf.TrainerCallback):
    """accelerate turns TF32 on for a model that is compiled, whatever the Trainer's ``tf32``, and leaves it on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False


class Allocated(hf.TrainerCallback):
    """Gradients that are there before the first backward.

    Else they are outputs of its graph, which the next one overwrites: torch accumulates none (pytorch issue 169545).
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "mode"), [("no-kwargs", "default"), ("no-kwargs", "reduce-overhead"), ("llama", "reduce-overhead")]
)
def test_compiled(name: str, mode: str, device: str, compiler: None, tmp_path: Path) -> None:
    """Reduce-overhead runs CUDA graphs, which write every micro-batch's outputs where the last one's were."""
    build = {"llama": seeded(lambda: hf.LlamaForCausalLM(llama_config(num_hidden_layers=1)))}
    head = replace(HEADS[name], build=build.get(name, HEADS[name].build), collate=without_mask)
    callbacks = [WithoutTF32(), *[Allocated()] * (mode == "reduce-overhead")]
    head = replace(head, trainer={**head.trainer, "callbacks": callbacks})
    # The Trainer turns TF32 on, too, unless it is told not to.
    how = {"torch_compile": True, "torch_compile_mode": mode, "tf32": False}
    assert_every_cut(head, device, tmp_path, splits=((2, 4),), **how)


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoints", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_gradient_checkpointing(name: str, reentrant: bool, device: str, tmp_path: Path) -> None:
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert_every_cut(HEADS[name], device, tmp_path, splits=TWO, **how)
