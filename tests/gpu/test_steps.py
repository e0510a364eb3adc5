"""The promise on a GPU: heads at four cuts, in three precisions; kernels a step may run by; options and verify()."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from transformers.models.llama import modeling_llama

import hf_accum_fix
from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.balancing.trainings import BALANCE, dealt
from tests.numerics.heads import HEADS, Batch, Head, Sample, llama_config, seeded
from tests.numerics.parity import Step, StockRecorder, cut, reference_step, take_step
from tests.precision import gradients
from tests.precision.test_gradients import NOISE
from tests.router import conventions as routers
from tests.verify.trainers import trainer_of

#: Cuts of eight samples.
SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
#: A cut may be as far off as twice the full batch in the same precision; float32 sums differ by this much anyway.
FLOORS, FLOAT32_SUMS = 2.0, 1e-6
#: Large, so that a step is not rounded to the digits of float32 parameters; a power of two, which rounds nothing.
RATE = 2.0**10


def in_float32(head: Head, device: str = "cpu") -> Head:
    """Weights and inputs in float32; for a forward by hand, on the device."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, torch.float32 if value.is_floating_point() else value.dtype)

    def collated(samples: Sequence[Sample]) -> Batch:
        return tree_map(moved, head.batch(samples))

    return replace(head, build=lambda: head.build().float().to(device), collate=collated)


def in_float64(head: Head) -> Head:
    """The same rounded weights, on the CPU, in float64."""
    return replace(head, build=lambda: head.build().float().double())


def by_trainer(head: Head, device: str, split: tuple[int, int], path: str, output: Path, **arguments: Any) -> Step:
    """A step of the Trainer in float32, or in the mixed precision that the arguments say."""
    given = {"learning_rate": RATE, "use_cpu": device == "cpu", **arguments}
    step = take_step(in_float32(head), head.samples, *split, path, output, **given)
    return replace(step, change={name: each / RATE for name, each in step.change.items()})


def full_batch(head: Head, device: str, split: tuple[int, int], autocast: torch.dtype | None = None) -> Step:
    """The whole batch in one forward in the precision of the training: what this precision can do."""
    with torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False):
        return reference_step(in_float32(head, device), cut(head.samples, split[0]))


def exact(head: Head, split: tuple[int, int]) -> Step:
    # A test may allow one kernel alone, which has no float64.
    with sdpa_kernel(SDPBackend.MATH):
        return reference_step(in_float64(head), cut(head.samples, split[0]))


def assert_every_cut(
    head: Head, device: str, output: Path, *, autocast: torch.dtype | None = None,
    splits: Sequence[tuple[int, int]] = SPLITS, **arguments: Any,
) -> None:  # fmt: skip
    """Every cut is as near to float64 as the full batch in the same precision."""
    for split in splits:
        wanted = exact(head, split)
        tolerance = max(FLOORS * full_batch(head, device, split, autocast).error(wanted), FLOAT32_SUMS)
        step = by_trainer(head, device, split, "apply", output, **arguments)
        assert step.error(wanted) <= tolerance, (head.name, split, step.error(wanted), tolerance)
        assert abs(step.loss / wanted.loss - 1) <= tolerance, (head.name, split, step.loss, wanted.loss)


# --- heads ------------------------------------------------------------------------------------------------------------

#: One of each way in which a loss is reduced and items are counted; LoRA, convolutions and pictures are among them.
NAMES = (
    *("llama", "llama-smoothing", "lora", "llama-classification", "bert-mlm", "bert-tokens", "bert-answers", "t5"),
    *("llava", "wav2vec2-ctc-mean", "masked-patches", "no-kwargs"),
)
#: A stock step that is off by this much is wrong, not rounded.
WRONG = 0.05


def test_the_stand_in_passes(tmp_path: Path) -> None:
    """What the tests below do, on the CPU, so that they do not rot where there is no GPU."""
    assert_every_cut(HEADS["bert-mlm"], "cpu", tmp_path, splits=SPLITS[-1:])


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cut(name: str, half: bool, device: str, tmp_path: Path) -> None:
    """By autocast, as ``bf16=True`` trains; the parameters stay float32."""
    head = HEADS[name]
    assert_every_cut(head, device, tmp_path, autocast=torch.bfloat16 if half else None, bf16=half)
    stock = by_trainer(head, device, SPLITS[-1], "stock", tmp_path, bf16=half)
    assert (stock.error(exact(head, SPLITS[-1])) > (WRONG if half else 1e-3)) == head.stock_wrong


class Scaled(StockRecorder):
    """Begins with a scale that no gradient here overflows at, since a step that overflows is not taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.accelerator.scaler is not None
        self.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**6)


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "lora", "no-kwargs"])
def test_float16_with_a_scaler(name: str, cuda: str, tmp_path: Path) -> None:
    """accelerate scales the loss on a GPU alone."""
    head = HEADS[name]
    assert_every_cut(head, cuda, tmp_path, autocast=torch.float16, fp16=True, trainer_class=Scaled)


# --- kernels ----------------------------------------------------------------------------------------------------------

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


IN_BF16: dict[str, Any] = {"autocast": torch.bfloat16, "splits": TWO, "bf16": True}


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
def test_sdpa(kernel: SDPBackend, device: str, tmp_path: Path) -> None:
    with sdpa_kernel(kernel):
        assert_every_cut(llama_with("sdpa"), device, tmp_path, **IN_BF16)


@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str)
def test_sdpa_of_cuda(kernel: SDPBackend, cuda: str, tmp_path: Path) -> None:
    """Kernels that torch has for CUDA alone."""
    with sdpa_kernel(kernel):
        assert_every_cut(llama_with("sdpa"), cuda, tmp_path, **IN_BF16)


@pytest.fixture
def without_liger() -> Iterator[None]:
    """Takes out of the library's module again what Liger puts there for one model, and every later one gets."""
    before = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(before)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_liger(half: bool, cuda: str, without_liger: None, tmp_path: Path) -> None:
    """Triton kernels: a loss that is fused with the last layer, beside the library's own full batch."""
    how = {"use_liger_kernel": True, "bf16": half, "autocast": torch.bfloat16 if half else None}
    assert_every_cut(llama_with("sdpa"), cuda, tmp_path, **how)


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


# --- options, and verify() --------------------------------------------------------------------------------------------


def test_router_loss_exact(device: str, tmp_path: Path) -> None:
    """What the router's loss adds to a step of 32 samples, 4 at a time; "mean" is off."""
    head = routers.FAMILIES["Mixtral"]
    wanted = routers.full_batch(in_float64(head))
    floor = _off(routers.full_batch(in_float32(head, device)).cpu(), wanted)
    how = {"use_cpu": device == "cpu", "learning_rate": RATE}

    def added(convention: str) -> Tensor:
        taken = (routers.step(in_float32(head), convention, 4, each, **how) for each in (routers.COEFFICIENT, 0.0))
        with_it, without = (routers.flat(each.change) for each in taken)
        return (with_it - without) / RATE

    assert _off(added("exact"), wanted) <= max(FLOORS * floor, FLOAT32_SUMS)
    assert _off(added("mean"), wanted) > 0.3


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "wav2vec2-ctc-mean"])
def test_dealt_windows(name: str, device: str, tmp_path: Path) -> None:
    head = HEADS[name]
    pieces = dealt(head, 4, 1, 2)
    assert sorted(map(len, pieces)) != [2, 2, 2, 2]
    wanted = reference_step(in_float64(head), pieces)
    floor = full_batch(head, device, (2, 4)).error(wanted)
    with hf_accum_fix.apply(balance_windows=BALANCE):
        found = by_trainer(head, device, (2, 4), "stock", tmp_path)
    assert found.error(wanted) <= max(FLOORS * floor, FLOAT32_SUMS)


def test_accumulate_in(device: str, tmp_path: Path) -> None:
    """Bfloat16 parameters, 64 micro-batches: to the noise of one; in the parameter's own type it is lost."""
    rows = gradients.samples(64)
    wanted = gradients.reference(gradients.llama().bfloat16(), rows)

    def off(steps: int, mode: str) -> float:
        model, how = gradients.llama().bfloat16(), {"use_cpu": device == "cpu"}
        return gradients.error(gradients.by_trainer(model, rows, steps, mode, tmp_path, **how).seen[0], wanted)

    floor, found, stock = off(1, "parameter"), off(64, "float32"), off(64, "parameter")
    assert found <= NOISE * floor and found < stock / 1.3, (found, floor, stock)


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_eval_loss(name: str, device: str, tmp_path: Path) -> None:
    """The mean over the items of seven samples, by evaluation batches of 1, 3 and 7."""
    head = in_float32(HEADS[name])
    exactly = in_float64(HEADS[name])
    wanted = float(exactly.reference_loss(exactly.build().eval(), exactly.batch(head.samples[:7])).detach())
    how = {"evaluated": head.samples[:7], "use_cpu": device == "cpu"}
    with hf_accum_fix.apply(eval_loss=True):
        found = [
            float(trainer_of(head, tmp_path, per_device_eval_batch_size=size, **how).evaluate()["eval_loss"])
            for size in (1, 3, 7)
        ]
    assert found == pytest.approx([wanted] * 3, rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_verify(precision: str, device: str, tmp_path: Path) -> None:
    """A BERT classifier: wrong as the release trains it, exact with apply()."""
    how = {"use_cpu": device == "cpu", "bf16": precision == "bfloat16"}
    report = verify(trainer_of(in_float32(HEADS["bert-classes"]), tmp_path, **how))
    assert report.verdict.kind is Kind.OFF and report.verdict_of("apply()").kind is Kind.EXACT, str(report)
