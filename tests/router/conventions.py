"""The auxiliary part of a step under each convention, beside the full batch's.

What a router's loss adds to a step is held against the library's own full batch, whose sums are float32, and against a
twin of the formula in float64 that shares no line with the package.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hf_accum_fix
from tests.loop.steps import take_steps
from tests.numerics.heads import HEADS, Batch, Head, Sample
from tests.numerics.heads.head import VOCABULARY, before, collate, declared_false, seeded
from tests.numerics.parity import ClassRecorder, Step, reference_step, take_step

COEFFICIENT = 3.0
SAMPLES = 32
#: Experts to a token, in every family here.
TOP_K = 2

#: Against the library's own full batch, whose sums are float32, and against the twin.
LIBRARY, TWIN = 1e-6, 1e-12


class InFloat64(TorchFunctionMode):
    """What the library computes in float32 inside a float64 model (losses, routers, its own sums) in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wider, **kwargs)


def in_float64_again() -> tuple[Any, Any]:
    """For the forward and for what the backward pass recomputes, in a thread of its own that knows no mode."""
    return nullcontext(), InFloat64()


def domains(count: int = SAMPLES) -> list[Sample]:
    """Ragged samples of four domains, each with its own words, so that they are routed apart."""
    g = torch.Generator().manual_seed(11)
    words = (VOCABULARY - 4) // 4
    samples = []
    for index in range(count):
        length = int(torch.randint(3, 24, (), generator=g))
        ids = 4 + (index % 4) * words + torch.randint(0, words, (length,), generator=g)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - 1, (), generator=g))] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def padded_without_mask(samples: Sequence[Sample]) -> Batch:
    """Every batch as wide as the widest: without a mask the padding is routed and counted like the rest."""
    batch = collate(samples)
    batch.pop("attention_mask")
    width = 24 - batch["input_ids"].shape[1]
    return {
        "input_ids": nn.functional.pad(batch["input_ids"], (0, width)),
        "labels": nn.functional.pad(batch["labels"], (0, width), value=-100),
    }


def lora(head: Head) -> Callable[[], nn.Module]:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return seeded(lambda: peft.get_peft_model(head.build(), config))


def families() -> dict[str, Head]:
    """What the proof is made on."""
    mixtral = replace(HEADS["mixtral"], samples=domains())
    checkpointing = {"use_reentrant": False, "context_fn": in_float64_again}
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": checkpointing}
    qwen = HEADS["qwen3-moe"]
    found = {
        "Mixtral": mixtral, "Qwen2-MoE": HEADS["Qwen2MoeForCausalLM"], "Qwen3-MoE": qwen,
        "OLMoE": HEADS["OlmoeForCausalLM"], "GPT-OSS": HEADS["GptOssForCausalLM"], "Jamba": HEADS["JambaForCausalLM"],
        "GraniteMoE": HEADS["GraniteMoeForCausalLM"], "DBRX": HEADS["DbrxForCausalLM"],
        "Mixtral, LoRA": replace(mixtral, build=lora(mixtral)),
        "Mixtral, checkpointing": replace(mixtral, arguments=checkpoints),
        "Mixtral, label smoothing": HEADS["mixtral-smoothing"],
        "Mixtral, no mask": replace(mixtral, collate=padded_without_mask),
        "Qwen3-MoE, declared false": replace(qwen, build=declared_false(qwen.build)),
    }  # fmt: skip
    return {name: replace(head, samples=domains(), router=COEFFICIENT) for name, head in found.items()}


def with_coefficient(head: Head, coefficient: float) -> Head:
    """The same head, its router's loss multiplied by another number."""

    def build() -> nn.Module:
        model = head.build()
        for each in model.modules():
            config = getattr(each, "config", None)
            for holder in (each, config, getattr(config, "ffn_config", None)):
                for name in ("router_aux_loss_coef", "moe_loss_weight"):
                    if hasattr(holder, name):
                        setattr(holder, name, coefficient)
        return model

    return replace(head, build=build)


@dataclass
class Auxiliary:
    """What the router's loss added to one step: to all trainable parameters, flat, and to the logged loss."""

    change: Tensor
    value: float
    step: Step

    def error(self, wanted: Tensor) -> float:
        """Relative to the change wanted."""
        return float((self.change - wanted).norm() / wanted.norm())


class Exact(ClassRecorder):
    """The subclass with the option."""

    global_batch_options = hf_accum_fix.Options(router_loss="exact")


def step(head: Head, convention: str, per_device: int, coefficient: float, ranks: int = 1, **arguments: Any) -> Step:
    """One step of the stock Trainer, of the patch under a convention, of the subclass ("trainer") or of a loop."""
    accumulate = len(head.samples) // per_device // ranks
    cut: dict[str, Any] = {"per_device": per_device, "accumulate": accumulate, **arguments}
    given = with_coefficient(head, coefficient)
    if convention == "loop":
        return take_steps(given, head.samples, per_device, accumulate, "windows", router_loss="exact")[0]
    patched = convention not in ("stock", "trainer")
    cut |= {"trainer_class": Exact} if convention == "trainer" else {}
    applied: Any = hf_accum_fix.apply(router_loss=convention) if patched else nullcontext()
    with tempfile.TemporaryDirectory() as output, applied:
        return take_step(given, head.samples, path="stock", output=Path(output), **cut)


def auxiliary(head: Head, convention: str, per_device: int, ranks: int = 1, **arguments: Any) -> Auxiliary:
    """What the router's loss adds to a step: the step, less the full batch's without it. Called `InFloat64`."""
    taken = step(head, convention, per_device, COEFFICIENT, ranks, **arguments)
    main = reference_step(replace(with_coefficient(head, 0.0), router=0.0), [head.samples])
    return Auxiliary(flat(taken.change) - flat(main.change), taken.loss - main.loss, taken)


def flat(change: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([change[name].flatten() for name in sorted(change)])


def library(head: Head, weights: Callable[[Sequence[Batch]], Sequence[float]], per_device: int = SAMPLES) -> Tensor:
    """The step along the library's own loss of each micro-batch, weighed; one of all samples is the full batch."""
    model = with_coefficient(head, COEFFICIENT).build().train()
    cuts = [head.samples[at : at + per_device] for at in range(0, len(head.samples), per_device)]
    pieces = [head.batch(samples) for samples in cuts]
    for weight, piece in zip(weights(pieces), pieces, strict=True):
        (weight * COEFFICIENT * model(**piece)["aux_loss"]).backward()
    return _along_gradient(model)


def full_batch(head: Head) -> Tensor:
    return library(head, lambda pieces: [1.0])


def twin(head: Head) -> tuple[Tensor, float]:
    """The step along the formula in float64, and its value, over all samples in one forward."""
    model = head.build().train()
    batch = head.batch(head.samples)
    # On 4.57 DBRX returns probabilities by that name.
    softmax = head.model != "DbrxForCausalLM" or not before("5.0")
    loss = balance(model(**batch)["router_logits"], TOP_K, batch.get("attention_mask"), softmax)
    (COEFFICIENT * loss).backward()
    return _along_gradient(model), COEFFICIENT * float(loss.detach())


def balance(router_logits: Sequence[Tensor], top_k: int, mask: Tensor | None, softmax: bool = True) -> Tensor:
    """``E sum_i F_i Q_i``, written out: every routed token of every router is one row."""
    logits = torch.cat(list(router_logits)).double()
    tokens = torch.ones(len(logits), dtype=torch.bool)
    if mask is not None:
        tokens = mask.bool().flatten().repeat(len(router_logits))
    probabilities = logits[tokens].softmax(-1) if softmax else logits[tokens]
    chosen = nn.functional.one_hot(probabilities.topk(top_k, dim=-1).indices, logits.shape[-1])
    shares = chosen.sum(dim=1).double().mean(dim=0)
    return logits.shape[-1] * (shares * probabilities.mean(dim=0)).sum()


def _along_gradient(model: nn.Module) -> Tensor:
    trainable = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return -flat({name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in trainable})


FAMILIES = families()
