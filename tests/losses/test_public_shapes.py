"""Losses as public code writes them, each of which once trained wrong: exact, as stock has it, or said."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hf_accum_fix
from tests.losses.models import ByNumber, Mean, full_mean, supervised_contrastive, texts
from tests.numerics.heads import Batch, shifted_cross_entropy
from tests.numerics.heads.head import Sample
from tests.numerics.heads.samples import without_targets
from tests.ranks import on_ranks
from tests.trainings import Case, Cut, cells, computing, train


def windows(count: int) -> list[list[Sample]]:
    """Texts with a class each and a tag for every third token, whose column is not called a label."""
    found = []
    for window in range(count):
        kinds = [(window + row * row) % 4 for row in range(8)]
        samples = texts(window)
        tags = [sample["input_ids"] % 4 for sample in samples]
        for row, (sample, kind) in enumerate(zip(samples, kinds, strict=True)):
            tag = tags[row].masked_fill(sample["input_ids"] % 3 == 0, -100)
            samples[row] = {**sample, "kind": torch.tensor(kind), "tags": tag}
        found.append(samples)
    return found


def few_targets(window: list[Sample]) -> list[Sample]:
    """Of one sample alone."""
    return without_targets(window, {*range(8)} - {3})


def collated(samples: Any) -> Batch:
    batch = {key: [sample[key] for sample in samples] for key in samples[0]}
    fill = {"labels": -100, "tags": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        key: torch.stack(each) if each[0].ndim == 0 else pad(each, batch_first=True, padding_value=fill.get(key, 0))
        for key, each in batch.items()
    }


def kinds(model: Any, batch: Batch, reduction: str = "mean", **given: Any) -> Tensor:
    """The cross entropy of each text's class by its first token."""
    logits = model(input_ids=batch["input_ids"])["logits"][:, 0, :4]
    return F.cross_entropy(logits, batch["kind"], reduction=reduction, **given)


def tokens(model: Any, batch: Batch, reduction: str = "mean", **given: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"])["logits"][:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction=reduction, **given)


def tagged(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["input_ids"])["logits"][..., :4].transpose(1, 2), batch["tags"])


class SumOver(torch.autograd.Function):
    """A fused kernel that divides by the number within."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, number: Any) -> Tensor:
        ctx.number, ctx.count = number, losses.shape
        return losses.sum() / number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (gradients[0] / ctx.number).expand(ctx.count), None


class PlusOne(ByNumber):
    """A model whose loss depends on its number, and does not divide by it."""

    def loss(self, logits: Tensor, labels: Tensor, *, num_items_in_batch: Any = None, **inputs: Any) -> Tensor:
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return shifted_cross_entropy(logits, labels, reduction="sum") / (count + 1)


def chunked(model: Any, batch: Batch, number: Any) -> Tensor:
    losses = tokens(model, batch, "none").flatten()
    return torch.stack([each.sum() / number for each in losses.split(7)]).sum()


def size(trainer: Any) -> int:
    return int(trainer.args.per_device_train_batch_size)


def steps(trainer: Any) -> int:
    return int(trainer.args.gradient_accumulation_steps)


Loss = Any  # (trainer, model, batch, number) -> the loss


def case(name: str, loss: Loss, whole: Any = None, count: int = 2, head: type = Mean, **more: Any) -> Case:
    """``whole``: of the global batch, (model, batch, step); None: the same loss, which needs no trainer or number."""

    def computed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        return loss(trainer, model, inputs, number), {}

    more = {"cuts": ((4, 2), (2, 4), (1, 8)), **more}
    full = whole or (lambda model, batch, step: loss(None, model, batch, None))
    return Case(name, full, head, windows(count), computing(computed), collate=collated, **more)


def full_kinds(model: Any, batch: Batch, step: int) -> Tensor:
    return kinds(model, batch)


def full_by_tokens(model: Any, batch: Batch, step: int) -> Tensor:
    return tokens(model, batch)


EXACT = [
    case("sum-over-the-batch-size", lambda t, m, b, n: kinds(m, b, "sum") / size(t), full_kinds),
    case("sum-over-the-global-batch", lambda t, m, b, n: kinds(m, b, "sum") / (size(t) * steps(t)), full_kinds),
    case(
        "a-mean-beside-a-sum-over-the-batch-size",
        lambda t, m, b, n: tokens(m, b) + kinds(m, b, "sum") / size(t),
        lambda m, b, step: tokens(m, b) + kinds(m, b),
    ),
    case(
        "over-the-mean-number",
        lambda t, m, b, n: tokens(m, b, "sum") / (n / steps(t)) / steps(t),
        full_by_tokens,
    ),
    case("tags-beside-classes", lambda t, m, b, n: tagged(m, b) + kinds(m, b)),
    case("a-vector-of-one", lambda t, m, b, n: tokens(m, b).unsqueeze(0).mean(), full_by_tokens),
    Case(
        "few-targets-at-first", full_mean, ByNumber, [few_targets(texts()), texts(1), texts(2)], cuts=((4, 2), (1, 8))
    ),
]

AS_STOCK = [
    case("number-plus-one", lambda t, m, b, n: tokens(m, b, "sum") / (n + 1),
         lambda m, b, s: tokens(m, b, "sum") / ((b["labels"] != -100).sum() + 1)),
    case("number-in-a-kernel", lambda t, m, b, n: SumOver.apply(tokens(m, b, "none").flatten(), n), full_by_tokens),
    Case("a-models-number-plus-one", lambda m, b, s: m(**b)["loss"], PlusOne, [texts(0), texts(1)]),
    case("chunks-over-the-number", lambda t, m, b, n: chunked(m, b, n), full_by_tokens, cuts=((2, 4), (1, 8))),
]  # fmt: skip


def balanced(model: Any, batch: Batch) -> Tensor:
    """Weights by how often a class is in this batch."""
    counts = torch.bincount(batch["kind"], minlength=4).double()
    return (kinds(model, batch, "none") * len(batch["kind"]) / (4 * counts[batch["kind"]])).mean()


def alike(model: Any, batch: Batch) -> Tensor:
    """Of every text to the others of its batch."""
    found = F.normalize(model(input_ids=batch["input_ids"])["logits"][:, 0], dim=-1)
    return (found @ found.T).logsumexp(1).mean()


def guarded(model: Any, batch: Batch) -> Tensor:
    loss = kinds(model, batch)
    return loss * (0.1 if float(loss) > 3.0 else 1.0)


def contrasted(model: Any, batch: Batch) -> Tensor:
    """A pair of texts shows no coupling unless both have one class."""
    z = logits(model, batch)[:, 0]
    return kinds(model, batch) + supervised_contrastive(z, batch["kind"]) / len(z)


def hardest(model: Any, batch: Batch) -> Tensor:
    """A third of a micro-batch's tokens, at least one."""
    losses = tokens(model, batch, "none")[batch["labels"][:, 1:] != -100].sort(descending=True)[0]
    return losses[: max(1, len(losses) // 3)].mean()


def logits(model: Any, batch: Batch) -> Tensor:
    found: Tensor = model(input_ids=batch["input_ids"])["logits"]
    return found


def over_first(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Over its first value, which the trainer keeps."""
    loss = tokens(model, batch)
    if not hasattr(trainer, "first_loss"):
        trainer.first_loss = float(loss.detach())
    return loss / trainer.first_loss


def with_backward(trainer: Any, model: Any, batch: Batch) -> Tensor:
    trainer.accelerator.backward(0.5 * tokens(model, batch) / steps(trainer), retain_graph=True)
    return kinds(model, batch)


SAID = [
    # At G = 2 a half may be the trainer's own division, beside the batch size too.
    case(
        "half-a-sum-over-the-batch-size",
        lambda t, m, b, n: 0.5 * kinds(m, b, "sum") / size(t),
        lambda m, b, s: 0.5 * kinds(m, b),
        cuts=((4, 2),),
    ),
    case("balanced-classes", lambda t, m, b, n: balanced(m, b), count=3),
    case(
        "coupled-later",
        lambda t, m, b, n: tokens(m, b) + min(1.0, t.state.global_step / 2) * alike(m, b),
        lambda m, b, s: tokens(m, b) + min(1.0, s / 2) * alike(m, b),
        3,
    ),
    # Padding is no position of its micro-batch alone.
    case("mean-over-padding", lambda t, m, b, n: tokens(m, b, "none").mean()),
    case("squares-over-padding", lambda t, m, b, n: tokens(m, b) + logits(m, b).square().mean()),
    case("contrasted-beside-classes", lambda t, m, b, n: contrasted(m, b)),
    case("hardest-third", lambda t, m, b, n: hardest(m, b), cuts=((2, 4), (1, 8))),
    case(
        "over-its-first-value",
        lambda t, m, b, n: over_first(t, m, b),
        lambda m, b, s: tokens(m, b) / tokens(m, b).detach(),
        1,
    ),
    case("spike-guard", lambda t, m, b, n: guarded(m, b)),
    case(
        "backward-in-compute-loss",
        lambda t, m, b, n: with_backward(t, m, b),
        lambda m, b, s: 0.5 * tokens(m, b) + kinds(m, b),
    ),
]


@cells(EXACT)
def test_exact_and_nothing_said(case: Case, cut: Cut, tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        training = train(case, cut, tmp_path)
    assert training.worst <= 1e-12 and training.log_error <= 1e-3
    assert training.exact and [words for _, words in training.said if "no target" not in words] == []


@cells(AS_STOCK)
def test_a_hidden_number_keeps_stocks_scale(case: Case, cut: Cut, tmp_path: Path) -> None:
    stock = train(case, cut, tmp_path)
    with hf_accum_fix.apply():
        training = train(case, cut, tmp_path)
    assert stock.worst <= 1e-2
    assert training.errors == pytest.approx(stock.errors, abs=1e-12) and training.said and not training.exact


def on_two_ranks(name: str, cut: Cut) -> list[tuple[list[float], list[float], bool]]:
    """Of stock and of ours: the errors, and whether it is called exact."""
    [found] = [each for each in (*EXACT, *AS_STOCK) if each.name == name]
    with tempfile.TemporaryDirectory() as folder:
        stock = train(found, cut, Path(folder))
        with hf_accum_fix.apply():
            ours = train(found, cut, Path(folder))
    return [([*stock.errors], [*ours.errors], bool(ours.exact))]


@pytest.mark.parametrize("name", [each.name for each in AS_STOCK])
def test_a_hidden_number_on_two_ranks_is_as_far_off_as_stock(name: str) -> None:
    for [(stock, ours, exact)] in on_ranks(on_two_ranks, name, (1, 4)):
        assert all(o <= max(1.000001 * s, 1e-12) for o, s in zip(ours, stock, strict=True)) and not exact


@cells(SAID)
def test_said_and_no_worse_than_stock(case: Case, cut: Cut, tmp_path: Path) -> None:
    stock = train(case, cut, tmp_path)
    with hf_accum_fix.apply():
        training = train(case, cut, tmp_path)
    assert stock.worst > 1e-3
    assert not training.silent(1e-9), training
    assert all(ours <= max(1.01 * theirs, 1e-9) for ours, theirs in zip(training.errors, stock.errors, strict=True))
