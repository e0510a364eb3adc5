"""The gradient that the optimizer sees, of 16-bit models, by the Trainer and by loops; its reference in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import hf_accum_fix
from hf_accum_fix import Items, LossContract, Options, Reduction, accumulation_windows
from tests.loop.steps import epoch
from tests.numerics.parity import ClassRecorder, StockRecorder, training_arguments

Gradient = dict[str, Tensor]
SAMPLES = 256
VOCABULARY = 64


def samples(count: int = SAMPLES) -> list[dict[str, Any]]:
    """Ragged: 2 to 6 tokens."""
    drawn = torch.Generator().manual_seed(0)
    lengths = [2 + index % 5 for index in range(count)]
    rows = [torch.randint(1, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def batch(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": padded("labels", -100)}


TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


def llama(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**TINY, "num_key_value_heads": 2, "pad_token_id": 0, **given}))


def bert() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForTokenClassification(hf.BertConfig(**TINY, **dropout, num_labels=VOCABULARY))


class Bigram(nn.Module):
    """Small enough for 1,024 micro-batches; divides by the number, as stock gets right."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(input_ids)).relu())
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


HEADS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "bert": bert}


class Keep(torch.optim.Optimizer):
    """Keeps every step's gradient, and takes none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([each for each in model.parameters() if each.requires_grad], {"lr": 0.0})
        self.named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.seen: list[Gradient] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(
            {name: each.grad.to("cpu", torch.float64) for name, each in self.named.items() if each.grad is not None}
        )


def left_on(model: nn.Module) -> int:
    """Hooks on its parameters."""
    named = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(each, name, None) or ()) for each in model.parameters() for name in named)


def error(found: Gradient, wanted: Gradient) -> float:
    """Relative."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    far = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return float((far / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5)


def reference(model: nn.Module, rows: Sequence[dict[str, Any]]) -> Gradient:
    """In float64, at the same rounded weights, in one piece."""
    exact = copy.deepcopy(model).double()
    exact(**batch(rows))["loss"].backward()
    return {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}


def asking(accumulate_in: str) -> type:
    """The subclass."""
    return type("Asking", (ClassRecorder,), {"global_batch_options": Options(accumulate_in=accumulate_in)})


def by_trainer(
    model: nn.Module, rows: Sequence[dict[str, Any]], steps: int, accumulate_in: str, folder: Path, *, ranks: int = 1,
    trainer: type = StockRecorder, **arguments: Any,
) -> Keep:  # fmt: skip
    """By ``apply()``, or by the subclass where ``trainer`` is one; "stock" is the installed Trainer."""
    optimizer = Keep(model)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    given = training_arguments(folder, len(rows) // steps // ranks, steps, **arguments)
    patched = accumulate_in != "stock" and trainer is StockRecorder
    trainer = asking(accumulate_in) if trainer is ClassRecorder else trainer
    with hf_accum_fix.apply(accumulate_in=accumulate_in, quiet=True) if patched else nullcontext():
        trainer(
            model=model, args=given, train_dataset=list(rows), data_collator=batch, optimizers=(optimizer, scheduler)
        ).train()
    return optimizer


def by_loop(model: nn.Module, rows: Sequence[dict[str, Any]], steps: int, accumulate_in: str) -> Keep:
    model.train()
    optimizer = Keep(model)
    size = len(rows) // steps
    loader = [batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    list(epoch(accumulation_windows(loader, steps=steps, accumulate_in=accumulate_in), model, optimizer))
    return optimizer


CONTRACT = LossContract(Reduction.MEAN, Items(("labels",)))


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body, self.rare, self.never = (nn.Linear(32, 32) for _ in range(3))

    def logits(self, input_ids: Tensor) -> Tensor:
        hidden = self.body(self.embed(input_ids)).relu()
        # Rows of 6 tokens come last, with 5 others: whole windows of them end without this branch.
        if int((input_ids > 0).sum()) % 3:
            hidden = hidden + self.rare(hidden)
        return hidden @ self.embed.weight.T

    def summed(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}
