"""Tiny models, samples and losses; a loss of ``(logits, labels)`` shifts, as causal models do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.heads import Batch, Sample, TokenModel, log_likelihoods, over_number, shifted_cross_entropy
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import LENGTHS, generator, text

# --- samples ----------------------------------------------------------------------------------------------------


def texts(window: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Eight ragged texts whose prompts are masked, their first token at least, which the stock Trainer would count."""
    turn = window % len(lengths)
    return _ending(text(seed=window, lengths=(*lengths[turn:], *lengths[:turn])))


def drawn(seed: int) -> list[Sample]:
    """Eight texts of random lengths with prompts of random lengths."""
    g = generator(seed)
    lengths = torch.randint(3, 24, (8,), generator=g).tolist()
    prompts = [int(torch.randint(1, length, (), generator=g)) for length in lengths]
    return _ending(text(seed=seed, lengths=lengths, masked=lambda index, length: prompts[index]))


def _ending(samples: list[Sample]) -> list[Sample]:
    """Each ends with a 4, which `fewer` keeps, so that none is without a target."""
    for sample in samples:
        sample["labels"][0] = -100
        sample["input_ids"][-1] = sample["labels"][-1] = 4
    return samples


def classed(window: int = 0) -> list[Sample]:
    """Eight texts of one length with a class for every token, and nothing masked."""
    samples = text(seed=window, lengths=(12,) * 8)
    g = generator(window + 100)
    return [{**sample, "labels": torch.randint(0, 4, (12,), generator=g)} for sample in samples]


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


def with_targets(samples: Sequence[Sample]) -> Batch:
    """The same texts, their labels under another key."""
    batch = collate(samples)
    batch["targets"] = batch.pop("labels")
    return batch


# --- losses -----------------------------------------------------------------------------------------------------


def of_tokens(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Batch, int], Tensor]:
    """A loss of logits and labels as a case's reference."""
    return lambda model, batch, step: loss(model.logits(batch["input_ids"]), batch["labels"])


full_mean = of_tokens(shifted_cross_entropy)


def model_itself(model: Any, batch: Batch, step: int) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


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


def mean_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """No loss function of torch in it."""
    log_p, valid = log_likelihoods(logits, labels)
    return -(log_p * valid).sum() / valid.sum()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    log_p, valid = log_likelihoods(logits, labels)
    return (-((1 - log_p.exp()) ** 2) * log_p * valid).sum() / valid.sum()


def focal_of_classes(logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
    """Of a class for each sample."""
    p = logits.softmax(-1).gather(-1, labels[:, None])
    return (-((1 - p) ** 2) * p.log()).mean()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def class_weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.2, 1.0, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weight)


def without_minus_one(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes of tokens; what is -1 is left out by indexing."""
    kept = labels >= 0
    return F.cross_entropy(logits[kept], labels[kept])


def without_nan(logits: Tensor, labels: Tensor) -> Tensor:
    """A number for every token; what is nan is left out by indexing."""
    kept = ~labels.isnan()
    return F.mse_loss(logits[..., 0][kept], labels[kept])


def of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels below 24 alone."""
    log_p, valid = log_likelihoods(logits, labels)
    chosen = valid & (labels[:, 1:] < 24)
    # A graph, too, where none is chosen.
    return -(log_p * chosen).sum() / chosen.sum().clamp(min=1)


def supervised_contrastive(z: Tensor, labels: Tensor) -> Tensor:
    """Of every sample against the others of its batch (Khosla et al. 2020), summed."""
    z = F.normalize(z, dim=-1)
    itself = torch.eye(len(z), dtype=torch.bool)
    similar = (z @ z.T / 0.5).masked_fill(itself, -1e9)
    alike = (labels[:, None] == labels) & ~itself
    log_p = similar - similar.logsumexp(1, keepdim=True)
    return -((log_p * alike).sum(1) / alike.sum(1).clamp(min=1)).sum()


# --- models -----------------------------------------------------------------------------------------------------


class Mean(TokenModel):
    """Returns the mean over its own targets, whatever it is handed."""

    def loss(self, logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        return shifted_cross_entropy(logits, labels)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels, **kwargs), "logits": logits}


class ByNumber(Mean):
    """Divides by the number, where there is one."""

    def loss(self, logits: Tensor, labels: Tensor, *, num_items_in_batch: Any = None, **inputs: Any) -> Tensor:
        return over_number(logits, labels, num_items_in_batch)


def mean_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A model that returns this loss of its logits and labels."""

    class Of(Mean):
        def loss(self, logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
            return loss(logits, labels)

    return Of


def bare(model: Any) -> Any:
    return getattr(model, "module", model)


class MeanWithZ(Mean):
    """A z-loss over attended tokens beside the mean over targets."""

    def loss(self, logits: Tensor, labels: Tensor, *, attention_mask: Tensor, **inputs: Any) -> Tensor:
        return super().loss(logits, labels, **inputs) + 0.01 * z_loss(logits, attention_mask.bool())


class ByNumberWithZ(ByNumber):
    def loss(self, logits: Tensor, labels: Tensor, *, attention_mask: Tensor, **inputs: Any) -> Tensor:
        return super().loss(logits, labels, **inputs) + 0.01 * z_loss(logits, attention_mask.bool())


class Flooded(Mean):
    def loss(self, logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        return flooding(super().loss(logits, labels))


class Clamped(Mean):
    """The gradient of its head is clamped in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class WithEntropy(Mean):
    """Starts with even probabilities, so that its entropy is hardly another for one token than for the next."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight.mul_(0.01)
            self.head.bias.zero_()

    def loss(self, logits: Tensor, labels: Tensor, *, attention_mask: Tensor, **inputs: Any) -> Tensor:
        return super().loss(logits, labels) - 0.1 * entropy(logits, attention_mask.bool())


class TokenWeighted(Mean):
    """A weight for each target, and the mean that they weigh."""

    def loss(self, logits: Tensor, labels: Tensor, *, weights: Tensor, **inputs: Any) -> Tensor:
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        kept = weights[:, 1:] * (labels[:, 1:] != -100)
        return (losses * kept).sum() / kept.sum()


class OfTargets(Mean):
    """Its labels are called targets, one for each token."""

    def loss(self, logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, targets)


class OfNextTargets(OfTargets):
    """Each is the token before's."""

    def loss(self, logits: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        return shifted_cross_entropy(logits, labels)


class TwoTasks(ByNumber):
    """Labels ``[b, L]`` are the next tokens, labels ``[b]`` a class of each text."""

    by_number = True

    def loss(self, logits: Tensor, labels: Tensor, *, num_items_in_batch: Any = None, **inputs: Any) -> Tensor:
        number = num_items_in_batch if self.by_number else None
        if labels.ndim == 2:
            return super().loss(logits, labels, num_items_in_batch=number)
        losses = F.cross_entropy(logits[:, 0, :4], labels, reduction="mean" if number is None else "sum")
        return losses if number is None else losses / number


class TwoTasksMean(TwoTasks):
    by_number = False


class Dropped(Mean):
    """With dropout that a text and the draw decide, so that it is the same however texts are put together."""

    def logits(self, input_ids: Tensor, draw: int = 0) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + torch.tanh(self.mix(hidden)).cumsum(dim=1) / 4
        masks = []
        for ids in input_ids:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2 * int(ids.sum()) + draw)
                masks.append(F.dropout(torch.ones(32, 16, dtype=hidden.dtype), 0.1, self.training)[: len(ids)])
        return self.head(hidden * torch.stack(masks))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, draw: int = 0, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits = self.logits(input_ids, draw)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels, **kwargs), "logits": logits}


class RDropped(Dropped):
    """R-Drop (Liang et al. 2021) in its forward."""

    def forward(self, input_ids: Tensor, labels: Any = None, draw: int = 0, **kwargs: Any) -> dict[str, Tensor]:
        one, other = (self.logits(input_ids, draw) for draw in (0, 1))
        losses = [shifted_cross_entropy(logits, labels) for logits in (one, other)]
        kept = kwargs["attention_mask"].bool()
        both = divergence(one, other, kept) + divergence(other, one, kept)
        return {"loss": sum(losses) / 2 + both / 2, "logits": one}


class Points(nn.Module):
    """Of four numbers each, and a loss of what it makes of them."""

    def __init__(self, loss: Callable[..., Tensor], out: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, out)
        self.of = loss

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": self.of(logits, labels, **kwargs), "logits": logits}


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
