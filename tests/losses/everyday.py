"""Losses as libraries and tutorials write them, each named by its own: exact at every split, and none is warned of.

Those of `clamps` count as well. A sum over a batch is no row: it is exact, and said to grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, NegativeBinomial, Normal, StudentT

from tests.losses.cases import by_role, groups, log_p_of_rows
from tests.losses.clamps import three
from tests.losses.models import points, texts
from tests.losses.rows import EXACT, of_points
from tests.losses.seen import Loss, Points, Seen, even, full, own
from tests.numerics.heads import Batch, Sample
from tests.numerics.heads.samples import generator
from tests.trainings import Case

CUTS = ((2, 4), (4, 2), (1, 8))


def normal(g: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=g, dtype=torch.float64)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


# --- six numbers a sample: scores of classes, values of places, pixels or actions, a latent ---------------------------


def sixes(number: int) -> list[Sample]:
    def label(index: int, g: torch.Generator) -> Sample:
        found = torch.randperm(6, generator=g) < 2 + index % 3
        its = {"labels": torch.randint(0, 6, (), generator=g), "wanted": normal(g, 6), "observed_mask": found.long()}
        return {**its, "timesteps": torch.randint(0, 100, (), generator=g)}

    return points(label, number)


def of(key: str) -> Callable[[Seen], Tensor]:
    return lambda s: s.batch[key]


y, wanted, found = of("labels"), of("wanted"), of("observed_mask")
WEIGHTS, KEPT = torch.linspace(0.3, 1.9, 6).double(), torch.linspace(0.999, 0.01, 100).double()
RANKS, MARGINS = torch.arange(6), 0.5 * torch.tensor([1, 2, 4, 8, 16, 32]).double() ** -0.25


def ce(s: Seen) -> Tensor:
    return F.cross_entropy(s.logits, y(s), reduction="none")


def bce(s: Seen, **more: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(s.logits, found(s).double(), **more)


def error(s: Seen) -> Tensor:
    return s.logits - wanted(s)


def kept(s: Seen) -> Tensor:
    return KEPT[s.batch["timesteps"]][:, None]


def asymmetric(s: Seen) -> Tensor:
    targets, p = found(s), s.logits.sigmoid()
    log_p = targets * p.clamp(min=1e-8).log() + (1 - targets) * (1.05 - p).clamp(1e-8, 1).log()
    return -(log_p * (1 - p * targets - (1.05 - p).clamp(max=1) * (1 - targets)) ** (4 * (1 - targets))).mean()


def of_levels(s: Seen) -> Tensor:
    """A finer class where the coarse one has some."""
    coarse, fine = (y(s) > 1).long(), (y(s) - 2).masked_fill(y(s) < 2, -100)
    finer = F.cross_entropy(s.logits[:, 2:], fine, reduction="sum") / coarse.sum().clamp(min=1)
    return F.cross_entropy(s.logits[:, :2], coarse) + finer


def r_drop(s: Seen) -> Tensor:
    one, other = s.logits.log_softmax(-1), s.logits.tanh().log_softmax(-1)
    kls = [F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((one, other), (other, one))]
    return 0.5 * (F.nll_loss(one, y(s)) + F.nll_loss(other, y(s))) + 4 * sum(kls) / 2


def crps(s: Seen) -> Tensor:
    spread = (s.logits[:, :, None] - s.logits[:, None]).abs().mean((1, 2))
    return ((s.logits - wanted(s)[:, :1]).abs().mean(1) - 0.5 * spread).mean()


def dice(s: Seen) -> Tensor:
    """Of each image."""
    inputs, targets = s.logits.sigmoid(), found(s)
    return 1 - (2 * (inputs * targets).sum(1) + 1) / (inputs.sum(-1) + targets.sum(-1) + 1)


def lovasz(s: Seen) -> Tensor:
    losses = []
    for scores, labels in zip(s.logits, found(s).double(), strict=True):
        errors, order = torch.sort(1 - scores * (2.0 * labels - 1.0), dim=0, descending=True)
        union = labels.sum() + (1 - labels[order]).cumsum(0)
        jaccard = 1 - (labels.sum() - labels[order].cumsum(0)) / union
        losses.append(torch.dot(F.relu(errors), torch.cat([jaccard[:1], jaccard.diff()])))
    return torch.stack(losses).mean() + 0.1 * sum(losses) / len(losses)


def giou(s: Seen) -> Tensor:
    """Of intervals around the places that are matched, by their ends."""
    matched = found(s)[:, ::2] > 0
    (a, b), (left, right) = (each.view(-1, 3, 2)[matched].exp().T for each in (s.logits, wanted(s)))
    inner, hull = torch.min(a, left) + torch.min(b, right), torch.max(a, left) + torch.max(b, right)
    union = a + b + left + right - inner
    return (1 - inner / union + (hull - union) / hull).sum() / matched.sum().clamp(min=1)


def min_snr(s: Seen) -> Tensor:
    snr = (kept(s) / (1 - kept(s))).squeeze(1)
    weights = torch.stack([snr, 5 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
    return (F.mse_loss(s.logits, wanted(s), reduction="none").mean(dim=[1]) * weights).mean()


def beta_vae(s: Seen) -> Tensor:
    mu, log_var = s.logits[:, 2:4], s.logits[:, 4:]
    kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
    return F.mse_loss(s.logits[:, :2], wanted(s)[:, :2]) + 0.5 * kld


def vlb(s: Seen) -> Tensor:
    (mu, log_var), true = s.logits.chunk(2, dim=1), wanted(s)[:, :3]
    kl = 0.5 * (log_var - 1 + torch.exp(-log_var) + (true - mu.detach()) ** 2 * torch.exp(-log_var))
    return F.mse_loss(mu, true) + 1e-3 * (kl.mean(dim=1) / math.log(2.0)).mean()


def value(s: Seen) -> Tensor:
    return s.logits.gather(1, y(s)[:, None]).squeeze(1)


SIXES: dict[str, Loss] = {
    "torch/class-weights": lambda s: F.cross_entropy(s.logits, y(s), weight=WEIGHTS),
    "torch/smoothed-weights": lambda s: F.cross_entropy(s.logits, y(s), weight=WEIGHTS, label_smoothing=0.1),
    "timm/label-smoothing": lambda s: (0.9 * ce(s) - 0.1 * s.logits.log_softmax(-1).mean(-1)).mean(),
    "timm/soft-targets": lambda s: torch.sum(-wanted(s).softmax(-1) * s.logits.log_softmax(-1), dim=-1).mean(),
    "kornia/focal": lambda s: (0.25 * (1 - torch.exp(-ce(s))) ** 2 * ce(s)).mean(),
    "PolyLoss/poly-1": lambda s: (ce(s) + 1 - torch.exp(-ce(s))).mean(),
    "LDAM-DRW/ldam": lambda s: F.cross_entropy(30 * (s.logits - F.one_hot(y(s), 6) * MARGINS), y(s), weight=WEIGHTS),
    "torch/pos-weight": lambda s: bce(s, pos_weight=WEIGHTS),
    "ASL/asymmetric": asymmetric,
    "coral-pytorch/coral": lambda s: (s.logits * (y(s)[:, None] <= RANKS) - F.logsigmoid(s.logits)).sum(1).mean(),
    "HMCN/levels": of_levels,
    "R-Drop/kl": r_drop,
    "mixup-cifar10/mixup": lambda s: 0.3 * ce(s).mean() + 0.7 * F.cross_entropy(s.logits, 5 - y(s)),
    "torch/huber": lambda s: F.huber_loss(s.logits, wanted(s), delta=0.5),
    "pytorch-forecasting/log-cosh": lambda s: torch.mean(error(s) + F.softplus(-2 * error(s)) - math.log(2.0)),
    "pytorch-forecasting/quantile": lambda s: torch.max(-0.9 * error(s), 0.1 * error(s)).mean(),
    "torch/gaussian-nll": lambda s: F.gaussian_nll_loss(s.logits[:, 0], wanted(s)[:, 0], F.softplus(s.logits[:, 1])),
    "gluonts/student-t": lambda s: -StudentT(3.0, s.logits, s.logits.exp()).log_prob(wanted(s)).mean(),
    "gluonts/weighted-nll": lambda s: mean(-Normal(s.logits, 1.0).log_prob(wanted(s)), found(s)),
    "scvi-tools/nb": lambda s: -NegativeBinomial(s.logits.exp(), logits=s.logits).log_prob(y(s)[:, None]).mean(),
    "properscoring/crps": crps,
    "N-BEATS/mean-of-masked": lambda s: error(s).abs().mul(found(s)).mean(),
    "mmsegmentation/avg-non-ignore": lambda s: bce(s, reduction="none")[found(s) != 0].sum() / (found(s) != 0).sum(),
    "DETR/dice": lambda s: dice(s).mean(),
    "monai/dice-focal": lambda s: dice(s).mean() + ((1 - torch.exp(-ce(s))) ** 2 * ce(s)).mean(),
    "boundary-loss/boundary": lambda s: (s.logits.sigmoid() * wanted(s)).mean() + dice(s).sum() / len(s.logits),
    "LovaszSoftmax/per-image": lovasz,
    "MAE/patches": lambda s: mean(error(s) ** 2, found(s)),
    "ActionFormer/giou": giou,
    "HRNet/hard-joints": lambda s: (error(s).view(-1, 2, 3) ** 2).topk(2, dim=-1).values.mean(),
    "YOLOv5/objects": lambda s: 0.05 * (1 - s.logits[found(s) > 0].tanh()).mean() + bce(s),
    "HRNet/joints": lambda s: 0.5 * F.mse_loss(s.logits.mul(found(s)), wanted(s).mul(found(s))),
    "diffusers/epsilon": lambda s: F.mse_loss(s.logits, wanted(s), reduction="mean"),
    "diffusers/velocity": lambda s: F.mse_loss(s.logits, kept(s) ** 0.5 * wanted(s) - (1 - kept(s)) ** 0.5),
    "diffusers/min-snr": min_snr,
    "guided-diffusion/vlb": vlb,
    "LLaDA/masked": lambda s: (bce(s, reduction="none") * found(s) / (1.01 - kept(s))).sum() / found(s).numel(),
    "PyTorch-VAE/beta": beta_vae,
    "stable-baselines3/dqn": lambda s: F.smooth_l1_loss(value(s), wanted(s)[:, 0] + 0.99 * wanted(s).amax(1)),
    "CQL/gap": lambda s: (torch.logsumexp(s.logits, 1) - value(s)).mean() + F.mse_loss(value(s), wanted(s)[:, 0]),
    "IQL/expectile": lambda s: (torch.where(error(s) < 0, 0.7, 0.3) * error(s) ** 2).mean(),
    "PaddleNLP/fixed-weights": lambda s: ce(s).mean() + 0.5 * F.mse_loss(s.logits, wanted(s)) + 0.2 * bce(s),
}


class Tasks(Points):
    def __init__(self) -> None:
        super().__init__(out=6)
        self.s = nn.Parameter(torch.tensor([0.2, -0.3]))


def uncertain(s: Seen) -> Tensor:
    loss = torch.zeros(())
    for log_var, each in zip(s.learnt, (ce(s).mean(), mean(error(s) ** 2, found(s))), strict=True):
        loss = loss + 0.5 * torch.exp(-log_var) * each + 0.5 * log_var
    return loss


TASKS: dict[str, Loss] = {
    "Kendall/uncertainty": uncertain,
    "fairseq/softmax": lambda s: (
        s.learnt.softmax(0)[0] * ce(s).mean() + s.learnt.softmax(0)[1] * (error(s) ** 2).mean()
    ),
}

# --- texts ------------------------------------------------------------------------------------------------------------


def of_texts(number: int) -> list[Sample]:
    g = generator(number)
    added = [(each, normal(g, len(each["labels"])), normal(g, len(each["labels"]))) for each in texts(number)]
    return [
        {**each, "old": -math.log(48) + 0.1 * old, "gains": gains, "loss_mask": (gains > -0.5).long()}
        for each, old, gains in added
    ]


def teacher(s: Seen) -> Tensor:
    return torch.cos(s.batch["input_ids"][:, :-1, None] * torch.arange(1, 49)).double()


def reverse_kl(s: Seen) -> Tensor:
    log_p = s.logits[:, :-1].log_softmax(-1)
    return mean((log_p.exp() * (log_p - teacher(s).log_softmax(-1))).sum(-1), s.each_token[1])


def distilled(s: Seen) -> Tensor:
    student, given = (each[s.each_token[1]] / 2.0 for each in (s.logits[:, :-1], teacher(s)))
    return 2.0 * s.tokens + 5.0 * 4 * F.kl_div(student.log_softmax(-1), given.softmax(-1), reduction="batchmean")


def pretrained(s: Seen) -> Tensor:
    masked = F.cross_entropy(s.logits.flatten(0, 1), y(s).masked_fill(y(s) % 2 == 0, -100).flatten())
    return masked + F.cross_entropy(s.logits[:, 0, :2], s.batch["input_ids"][:, 0] % 2)


def clipped(s: Seen) -> tuple[Tensor, Tensor]:
    (log_p, valid), gains = s.log_p, s.batch["gains"][:, :1]
    ratio = torch.exp(log_p - s.batch["old"][:, 1:])
    return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains), valid


def ppo(s: Seen) -> Tensor:
    losses, valid = clipped(s)
    squares = (s.logits[:, :-1, 0] - s.batch["gains"][:, 1:]) ** 2
    return mean(losses, valid) + 0.05 * mean(squares, valid) - 0.01 * entropy(s)


def entropy(s: Seen) -> Tensor:
    return Categorical(logits=s.logits[:, :-1]).entropy()[s.each_token[1]].mean()


def grpo(s: Seen) -> Tensor:
    (losses, valid), apart = clipped(s), s.batch["old"][:, 1:] - s.log_p[0]
    losses = losses + 0.04 * (torch.exp(apart) - apart - 1)
    return ((losses * valid).sum(-1) / valid.sum(-1).clamp(min=1.0)).mean()


def kto(s: Seen) -> Tensor:
    good, ratios = s.batch["input_ids"][:, 0] % 3 != 0, 0.1 * (log_p_of_rows(s)[0] + 40)
    return torch.cat((1 - torch.sigmoid(ratios[good]), 1.5 * (1 - torch.sigmoid(-ratios[~good]))), 0).mean()


TEXTS: dict[str, Loss] = {
    "Megatron-LM/loss-mask": lambda s: mean(s.each_token[0], s.batch["loss_mask"][:, 1:]),
    "axolotl/token-weights": lambda s: mean(s.each_token[0], s.each_token[1] * s.batch["gains"][:, 1:].abs()),
    "MiniLLM/reverse-kl": reverse_kl,
    "DistilBERT/kl": distilled,
    "BERT/mlm-and-nsp": pretrained,
    "PaLM/z-loss": lambda s: s.tokens + 1e-2 * mean(s.logits[:, :-1].logsumexp(-1) ** 2, s.each_token[1]),
    "verl/entropy": lambda s: s.tokens - 0.01 * entropy(s),
    "TRL/ppo": ppo,
    "TRL/grpo": grpo,
    "TRL/dr-grpo": lambda s: math.prod(clipped(s)).sum() / (len(s.logits) * 64),
    "TRL/kto-without-kl": kto,
}


def margins(s: Seen) -> Tensor:
    """How much more likely the chosen ones are."""
    chosen, rejected = log_p_of_rows(s)[1].chunk(2)
    return chosen - rejected


def rewards(s: Seen) -> tuple[Tensor, ...]:
    last = s.batch["attention_mask"].sum(1) - 1
    return s.logits[torch.arange(len(last)), last, 0].chunk(2)


PAIRS: dict[str, Loss] = {
    "TRL/robust-dpo": lambda s: ((0.1 * F.logsigmoid(-margins(s)) - 0.9 * F.logsigmoid(margins(s))) / 0.8).mean(),
    "TRL/ipo": lambda s: ((margins(s) - 1 / (2 * 0.1)) ** 2).mean(),
    "TRL/simpo": lambda s: -F.logsigmoid(2.0 * margins(s) - 1.0).mean(),
    "TRL/reward": lambda s: -F.logsigmoid(rewards(s)[0] - rewards(s)[1]).mean() + 0.01 * (sum(rewards(s)) ** 2).mean(),
}

# --- sounds, and graphs -----------------------------------------------------------------------------------------------


def sounds(number: int) -> list[Sample]:
    g = generator(number)
    sizes = [(6 + (index * 5 + number) % 7, 1 + (index + number) % 3) for index in range(8)]
    return [
        {"x": normal(g, n, 4), "mask": torch.ones(n), "labels": torch.randint(1, 5, (m,), generator=g)}
        for n, m in sizes
    ]


def padded(samples: Sequence[Sample]) -> Batch:
    return {
        key: nn.utils.rnn.pad_sequence([s[key] for s in samples], True, -100 * (key == "labels")) for key in samples[0]
    }


def ctc(s: Seen, reduction: str = "mean") -> Tensor:
    labels, widths = y(s)[y(s) >= 0], (s.batch["mask"].sum(-1).long(), (y(s) >= 0).sum(-1))
    return F.ctc_loss(s.logits[..., :5].log_softmax(-1).transpose(0, 1), labels, *widths, reduction=reduction)


SOUNDS: dict[str, Loss] = {
    "transformers/ctc-mean": ctc,
    "NeMo/ctc-mean-batch": lambda s: ctc(s, "none").mean(),
    "ESPnet/ctc-sum": lambda s: ctc(s, "sum") / len(s.logits),
    "FastSpeech2/mel": lambda s: F.l1_loss(*(each[..., :4][s.batch["mask"] > 0] for each in (s.logits, s.batch["x"]))),
}


def graphs(number: int) -> list[Sample]:
    g = generator(number)
    xs = [normal(g, 3 + (index * 3 + number) % 5, 4) for index in range(8)]
    edges = [torch.randint(0, len(x), (2, 2 * len(x)), generator=g) for x in xs]
    its = [{"x": x, "edge_index": e, "y": e[0, : len(x)] % 6} for x, e in zip(xs, edges, strict=True)]
    return [{**each, "train_mask": each["x"][:, 0] > -0.5} for each in its]


def batched(samples: Sequence[Sample]) -> Batch:
    """As PyG's Batch."""
    sizes = torch.tensor([len(each["x"]) for each in samples])
    ptr = F.pad(sizes.cumsum(0), (1, 0))
    edges = torch.cat([each["edge_index"] + start for each, start in zip(samples, ptr[:-1], strict=True)], 1)
    rows = {key: torch.cat([each[key] for each in samples]) for key in ("x", "y", "train_mask")}
    return {**rows, "edge_index": edges, "batch": torch.arange(len(sizes)).repeat_interleave(sizes), "ptr": ptr}


def passed(s: Seen) -> Tensor:
    """APPNP: scores of nodes, then along the edges."""
    sources, nodes = s.batch["edge_index"]
    return s.logits.index_add(0, nodes, s.logits[sources])


def pooled(s: Seen) -> Tensor:
    size = int(s.batch["batch"].max()) + 1
    return torch.zeros(size, 6).double().index_add(0, s.batch["batch"], passed(s))


GRAPHS: dict[str, Loss] = {
    "PyG/graph-classification": lambda s: F.cross_entropy(pooled(s), s.batch["y"][s.batch["ptr"][:-1]]),
    "PyG/graph-regression": lambda s: F.l1_loss(pooled(s)[:, 0], s.batch["y"][s.batch["ptr"][:-1]].double()),
    "PyG/node-classification": lambda s: F.nll_loss(
        passed(s).log_softmax(1)[s.batch["train_mask"]], s.batch["y"][s.batch["train_mask"]]
    ),
}


def pairs_of_texts(number: int) -> list[Sample]:
    """In another order in each window."""
    [pairs] = groups(2)
    return pairs[number:] + pairs[:number]


def cases(rows: Mapping[str, Loss], samples: Callable[[int], list[Sample]], **more: Any) -> list[Case]:
    return [
        replace(of_points(name, EXACT, loss, lambda: Points(out=6), three(samples), cuts=CUTS), **more)
        for name, loss in rows.items()
    ]


def cases_of_texts(rows: Mapping[str, Loss], samples: Callable[[int], list[Sample]], **more: Any) -> list[Case]:
    windows = [samples(number) for number in range(3)]
    return [Case(name, full(loss), even(), windows, own(loss), cuts=CUTS, **more) for name, loss in rows.items()]


EVERYDAY = [
    *cases(SIXES, sixes),
    *cases(TASKS, sixes, model=Tasks),
    *cases_of_texts(TEXTS, of_texts),
    *cases_of_texts(PAIRS, pairs_of_texts, collate=by_role),
    *cases(SOUNDS, sounds, collate=padded),
    *cases(GRAPHS, graphs, collate=batched),
]
