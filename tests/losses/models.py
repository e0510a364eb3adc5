"""Samples, and what losses are put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.heads import Batch, Sample
from tests.numerics.heads.samples import LENGTHS, generator, text

# --- samples ----------------------------------------------------------------------------------------------------


def texts(window: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Eight ragged texts whose prompts are masked, their first token at least, which the stock Trainer would count."""
    turn = window % len(lengths)
    return _ending(text(seed=window, lengths=(*lengths[turn:], *lengths[:turn])))


def _ending(samples: list[Sample]) -> list[Sample]:
    """Each ends with a 4, which `fewer` keeps, so that none is without a target."""
    for sample in samples:
        sample["labels"][0] = -100
        sample["input_ids"][-1] = sample["labels"][-1] = 4
    return samples


def points(label: Callable[[int, torch.Generator], Any], window: int = 0, count: int = 8) -> list[Sample]:
    """Four numbers each, and what ``label(index, generator)`` says of them: a tensor, or several by name."""
    g = generator(window)
    samples = []
    for index in range(count):
        x, labels = torch.randn(4, generator=g, dtype=torch.float64), label(index, g)
        samples.append({"x": x, **(labels if isinstance(labels, dict) else {"labels": labels})})
    return samples


def fewer(labels: Tensor) -> Tensor:
    """A third of the labels masked, never a text's last."""
    return labels.masked_fill(labels % 3 == 0, -100)


# --- parts of losses --------------------------------------------------------------------------------------------


def model_itself(model: Any, batch: Batch, step: int) -> Tensor:
    return model(**batch)["loss"]


def bare(model: Any) -> Any:
    return getattr(model, "module", model)


def attended(batch: Batch) -> Tensor:
    return batch["attention_mask"].bool()


def z_loss(logits: Tensor, kept: Tensor) -> Tensor:
    return logits.logsumexp(-1).square()[kept].mean()


def entropy(logits: Tensor, kept: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)[kept].mean()


def divergence(logits: Tensor, others: Tensor, kept: Tensor) -> Tensor:
    """KL(others || logits), the mean over the tokens that are kept."""
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)[kept].mean()


def squares(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def flooding(loss: Tensor, level: float = 10.0) -> Tensor:
    """Ishida et al. 2020: below the level the gradient turns round."""
    return (loss - level).abs() + level


def supervised_contrastive(z: Tensor, labels: Tensor) -> Tensor:
    """Of every sample against the others of its batch (Khosla et al. 2020), summed."""
    z = F.normalize(z, dim=-1)
    itself = torch.eye(len(z), dtype=torch.bool)
    similar = (z @ z.T / 0.5).masked_fill(itself, -1e9)
    alike = (labels[:, None] == labels) & ~itself
    log_p = similar - similar.logsumexp(1, keepdim=True)
    return -((log_p * alike).sum(1) / alike.sum(1).clamp(min=1)).sum()


class Fused(torch.autograd.Function):
    """A cross entropy whose gradient is taken in the forward, as kernels do that keep no logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = F.cross_entropy(leaf, labels)
            (gradient,) = torch.autograd.grad(loss, leaf)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradient * kept, None


class Reverse(torch.autograd.Function):
    """Ganin and Lempitsky 2015."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient
