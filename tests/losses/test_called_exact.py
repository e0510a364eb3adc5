"""A training is the full batch's in every window, or it says in time that it is not; never wrong and silent."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import hf_accum_fix
from tests.losses import models
from tests.losses.models import classed, drawn, fewer, model_itself, points, texts
from tests.losses.seen import (
    ByNumber,
    Loss,
    Mean,
    Seen,
    TakingPoints,
    around,
    class_weighted,
    even,
    full,
    holding,
    mean_by_hand,
    tokens,
)
from tests.numerics.heads import Batch, TokenModel, bert, seeded, shifted_cross_entropy
from tests.numerics.heads.experts import MAMBA
from tests.numerics.heads.head import TINY, Sample, collate
from tests.numerics.heads.samples import first_is_target, text, without_targets
from tests.numerics.parity import StockRecorder
from tests.ranks import on_ranks
from tests.trainings import (
    CUTS,
    Case,
    Cut,
    FullLoss,
    above,
    as_fetched,
    as_prepared,
    cells,
    computing,
    in_loss,
    in_step,
    train,
)

SEVERAL: tuple[Cut, ...] = ((4, 2), (2, 4))
#: A batch that is changed on its way is wrong without any accumulation, too.
WITH_WHOLE: tuple[Cut, ...] = (*CUTS, (8, 1))


def windows(count: int, make: Any = texts) -> list[list[Sample]]:
    return [make(window) for window in range(count)]


#: Something made of a mean over next tokens: ``(mean, seen, step)``.
Change = Callable[[Tensor, Seen, int], Tensor]


def full_changed(change: Change) -> FullLoss:
    return lambda model, batch, step: full(lambda s: change(s.tokens, s, step))(model, batch, step)


def made_of_super(
    name: str, change: Change, count: int = 2, heads: Sequence[type] = (Mean, ByNumber), **more: Any
) -> list[Case]:
    """By a compute_loss around super's, of every head."""
    trainer = around(lambda loss, s, trainer: change(loss, s, trainer.state.global_step))
    return [Case(f"{name}-{h.__name__}", full_changed(change), h, windows(count), trainer, **more) for h in heads]


def in_forward(name: str, loss: Loss, samples: Any, **more: Any) -> Case:
    """In a model."""
    return Case(name, full(loss), holding(loss, Mean), samples, **more)


def of_points(name: str, loss: Loss, out: int, samples: Any, **more: Any) -> Case:
    """In a model of four numbers, of ``out`` numbers that it makes of them."""
    return Case(name, model_itself, holding(loss, TakingPoints, out=out), samples, **more)


full_mean = full(tokens)


# --- super().compute_loss, and what is made of what it returns --------------------------------------------------


def with_own_count(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    count = (inputs["labels"][:, 1:] != -100).sum()
    return base(model, inputs, return_outputs=True, num_items_in_batch=count)


def models_loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    _, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return outputs["loss"], outputs


SUPER = [
    Case(f"{name}-{head.__name__}", full_mean, head, windows(2), trainer)
    for name, trainer in [
        ("super-without-number", above(lambda loss, *_: loss, number=False)),
        ("super-with-own-count", computing(with_own_count)),
        ("outputs-loss", computing(models_loss)),
        ("from-logits", around(lambda loss, s, _: s.tokens)),
    ]
    for head in (ByNumber, Mean)
]


# --- labels masked on the way -----------------------------------------------------------------------------------


def fewer_labels(batch: Batch) -> Batch:
    return {**batch, "labels": fewer(batch["labels"])}


def full_of_fewer(model: Any, batch: Batch, step: int) -> Tensor:
    return full_mean(model, fewer_labels(batch), step)


MASKED = [
    Case(
        f"{name}-{head.__name__}",
        full_of_fewer,
        head,
        windows(1),
        trainer,
        cuts=WITH_WHOLE,
        # Stock hands on the count from before the labels were masked.
        whole=head is Mean or name.startswith("fetched"),
    )
    for name, trainer in [
        ("step-copies", in_step(fewer_labels)),
        ("step-edits", in_step(fewer_labels, "key")),
        ("step-edits-tensor", in_step(fewer_labels, "tensor")),
        ("fetched-copies", as_fetched(fewer_labels, recount=True)),
        ("fetched-edited", as_fetched(fewer_labels, "key", recount=True)),
    ]
    for head in (Mean, ByNumber)
]


def full_of_first_of_pairs(model: Any, batch: Batch, step: int) -> Tensor:
    return full_mean(model, {key: value[::2] for key, value in batch.items()}, step)


def without_last_row(batch: Batch) -> Batch:
    return {key: value[:-1] for key, value in batch.items()}


DROPPED_ROWS = Case(
    "step-drops-rows", full_of_first_of_pairs, Mean, windows(1), in_step(without_last_row), cuts=[(2, 4)], whole=False
)


# --- terms beside the loss over the items -----------------------------------------------------------------------


def summed_and(change: Change) -> type:
    """The sum over the number, and a term beside it."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        loss = shifted_cross_entropy(logits, inputs["labels"], reduction="sum") / number
        return change(loss, Seen(logits, inputs, models.bare(model)), 0), {"logits": logits}

    return computing(compute)


def and_squares(loss: Tensor, s: Seen, step: int) -> Tensor:
    return loss + s.squares


def and_z(loss: Tensor, s: Seen, step: int) -> Tensor:
    return loss + 0.01 * s.z


def bamba() -> Any:
    config = {
        **TINY, **MAMBA, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
        "attn_layer_indices": [0, 1], "z_loss_coefficient": 0.1,
    }  # fmt: skip
    return hf.BambaForCausalLM(hf.BambaConfig(**config))


def contrastive_summed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    outputs = model(x=inputs["x"])
    return models.supervised_contrastive(outputs["logits"], inputs["labels"]) / number, outputs


def full_contrastive(model: Any, batch: Batch, step: int) -> Tensor:
    labels = batch["labels"]
    return models.supervised_contrastive(model(x=batch["x"])["logits"], labels) / len(labels)


def one_of_three(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor(index % 3)


def some_alike(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor((0, 0, 1, 0, 1, 1, 2, 2)[index])


BESIDE = [
    Case("summed-by-number-and-squares", full_changed(and_squares), Mean, windows(1), summed_and(and_squares)),
    Case("summed-by-number-and-z", full_changed(and_z), Mean, windows(1), summed_and(and_z)),
    Case("head-by-number-with-z", full_changed(and_z), holding(lambda s: 0.01 * s.z, ByNumber), windows(1)),
    in_forward("head-with-mean-and-z", lambda s: and_z(s.tokens, s, 0), windows(1)),
    # The last micro-batch is short, and so is a micro-batch's mean over positions.
    Case("bamba-z", model_itself, bamba, [texts(0, (12,) * 7)], cuts=[(4, 2), (2, 4)], tolerance=1e-6),
    # Nothing is certain before a third window, and a training may have but one.
    *(
        Case(
            f"contrastive-by-number-{count}",
            full_contrastive,
            lambda: TakingPoints(out=3),
            [points(some_alike, window) for window in range(count)],
            computing(contrastive_summed),
            cuts=SEVERAL,
        )
        for count in (1, 3)
    ),
]


# --- what shows only later --------------------------------------------------------------------------------------


def two_columns(window: int) -> list[Sample]:
    """One or both samples of each pair, and two or three of each four, keep a second label, from window 1 on."""
    unlabelled = (1, 2, 6) if window else ()
    return points(
        lambda index, g: {"labels": torch.tensor(index % 3), "second_labels": _second(index, unlabelled)}, window
    )


def _second(index: int, unlabelled: Sequence[int]) -> Tensor:
    return torch.tensor(-100 if index in unlabelled else index % 2)


def of_two_columns(s: Seen) -> Tensor:
    labels, second = s.batch["labels"], s.batch["second_labels"]
    return F.cross_entropy(s.logits[:, :3], labels) + F.cross_entropy(s.logits[:, 3:], second)


def answers(window: int) -> list[Sample]:
    """From window 1 on three answers end beyond the text."""
    samples = []
    for index, sample in enumerate(texts(window, (12,) * 8)):
        end = 400 if window and index in (1, 2, 6) else 6 + index % 5
        positions = {"start_positions": torch.tensor(index % 6), "end_positions": torch.tensor(end)}
        samples.append({"input_ids": sample["input_ids"], "attention_mask": sample["attention_mask"], **positions})
    return samples


def some_minus_one(window: int) -> list[Sample]:
    samples = classed(window)
    for index, sample in enumerate(samples if window else []):
        sample["labels"][: index % 5 + 1] = -1
    return samples


def without_minus_one(s: Seen) -> Tensor:
    """Classes of tokens; what is -1 is left out by indexing."""
    kept = s.batch["labels"] >= 0
    return F.cross_entropy(s.logits[kept], s.batch["labels"][kept])


def some_nan(window: int) -> list[Sample]:
    samples = [{**sample, "labels": sample["labels"].double()} for sample in classed(window)]
    for index, sample in enumerate(samples if window else []):
        sample["labels"][: index % 5 + 1] = torch.nan
    return samples


def without_nan(s: Seen) -> Tensor:
    """A number for every token; what is nan is left out by indexing."""
    kept = ~s.batch["labels"].isnan()
    return F.mse_loss(s.logits[..., 0][kept], s.batch["labels"][kept])


def with_weights(samples: Sequence[Sample], rows: Sequence[int]) -> list[Sample]:
    """All weights are 1, but for these samples."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.rand(len(sample["labels"]), generator=g).double() for sample in samples]
    weights = [weight if row in rows else torch.ones_like(weight) for row, weight in enumerate(drawn)]
    return [{**sample, "weights": weight} for sample, weight in zip(samples, weights, strict=True)]


def weighted(window: int) -> list[Sample]:
    """From window 1 on."""
    return with_weights(texts(window), range(8) if window else ())


def token_weighted(s: Seen) -> Tensor:
    """A weight for each target, and the mean that they weigh."""
    losses, valid = s.each_token
    kept = s.batch["weights"][:, 1:] * valid
    return (losses * kept).sum() / kept.sum()


class OfTargets(Mean):
    """Its labels are called targets."""

    def forward(self, input_ids: Tensor, targets: Any = None, **inputs: Any) -> dict[str, Any]:
        return super().forward(input_ids, labels=targets, **inputs)


def with_targets(samples: Sequence[Sample]) -> Batch:
    batch = collate(samples)
    batch["targets"] = batch.pop("labels")
    return batch


def unshifted(s: Seen) -> Tensor:
    return F.cross_entropy(s.logits.flatten(0, 1), s.batch["labels"].flatten())


def prompts_later(window: int) -> list[Sample]:
    """No prompt is masked in window 0, where targets are the attended tokens."""
    return texts(window) if window else [{**sample, "labels": sample["input_ids"].clone()} for sample in texts()]


def switched_on(loss: Tensor, s: Seen, step: int) -> Tensor:
    return loss + 0.1 * s.z if step >= 2 else loss


def plain_later(make: Any) -> Any:
    """Texts of one length, all of whose tokens are targets, in window 0; then as they are made."""
    return lambda window: make(window) if window else text(lengths=(12,) * 8, masked=first_is_target)


def first_targets(window: int) -> list[Sample]:
    """Every first token is a target from window 1 on, which a loss that shifts leaves out."""
    return text(seed=window, masked=first_is_target) if window else texts()


def flooded(loss: Tensor, s: Seen, step: int) -> Tensor:
    return models.flooding(loss)


def two_tasks(window: int) -> list[Sample]:
    if window % 2 == 0:
        return texts(window)
    labels = (0, -100, -100, 1, 2, 3, -100, 1)
    return [{**sample, "labels": torch.tensor(label)} for sample, label in zip(texts(window), labels, strict=True)]


def of_either_task(s: Seen) -> Tensor:
    """Labels ``[b, L]`` are the next tokens, labels ``[b]`` a class of each text."""
    labels = s.batch["labels"]
    return s.tokens if labels.ndim == 2 else F.cross_entropy(s.logits[:, 0, :4], labels)


class TwoTasks(ByNumber):
    """The same; either is a sum over the number, where there is one."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        if labels.ndim == 2:
            return super().forward(input_ids, labels, num_items_in_batch)
        seen = Seen(self.logits(input_ids), {"labels": labels})
        if num_items_in_batch is None:
            return {"loss": of_either_task(seen), "logits": seen.logits}
        summed = F.cross_entropy(seen.logits[:, 0, :4], labels, reduction="sum")
        return {"loss": summed / num_items_in_batch, "logits": seen.logits}


def class_or_255(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor(255 if index in (1, 2, 5) else int(torch.randint(0, 3, (), generator=g)))


def void_is_255(s: Seen) -> Tensor:
    """Segmentation's: what is void has an index beyond the classes."""
    weight = torch.linspace(0.2, 1.0, s.logits.shape[-1], dtype=s.logits.dtype)
    return F.cross_entropy(s.logits, s.batch["labels"], weight, None, 255)


def with_weight(window: int) -> list[Sample]:
    def label(index: int, g: torch.Generator) -> dict[str, Tensor]:
        value = torch.randn((), generator=g, dtype=torch.float64)
        return {"labels": value, "row_weight": torch.tensor(1.0 if window == 0 else 1.0 + index).double()}

    return points(label, window)


def weighted_squares(s: Seen) -> Tensor:
    return F.mse_loss(s.logits[:, 0], s.batch["labels"], weight=s.batch["row_weight"])


LATER = [
    *(
        of_points(name, loss, out, made, cuts=((4, 2),), whole=False)
        for name, loss, out, made in [
            ("void-is-255", void_is_255, 3, [points(class_or_255, window) for window in (0, 1)]),
            ("squares-weighted-later", weighted_squares, 1, windows(2, with_weight)),
            ("squares-weighted", weighted_squares, 1, [with_weight(window) for window in (1, 2)]),
        ]
    ),
    of_points("second-column", of_two_columns, 5, windows(2, two_columns), cuts=SEVERAL),
    Case("end-beyond-width", model_itself, bert("BertForQuestionAnswering"), windows(2, answers), cuts=SEVERAL),
    in_forward("minus-one-later", without_minus_one, windows(2, some_minus_one)),
    in_forward("nan-later", without_nan, windows(2, some_nan)),
    in_forward("token-weights-later", token_weighted, windows(2, weighted)),
    # Of a mean by hand one micro-batch of a window is looked at; this is the one.
    in_forward("token-weights-in-two", token_weighted, [with_weights(texts(), (0, 1))], cuts=[(2, 4)]),
    *(
        Case(name, model_itself, holding(loss, OfTargets), windows(2, prompts_later), collate=with_targets)
        for name, loss in [("targets-later", unshifted), ("next-targets-later", tokens)]
    ),
    *made_of_super("switched-on", switched_on, 4),
    in_forward("ragged-later", mean_by_hand, windows(2, plain_later(texts))),
    # Stock counts the first tokens of a model that does not say that it shifts.
    *(
        Case(f"first-targets-later-{h.__name__}", full_mean, h, windows(2, first_targets), whole=h is Mean)
        for h in (Mean, ByNumber)
    ),
    # Nothing is changed while the loss is above the level; a micro-batch falls below it before the global batch does.
    *made_of_super("flooding", flooded, 3),
    in_forward("flooding-in-forward", lambda s: models.flooding(s.tokens), windows(3)),
    *(
        Case(f"two-tasks-{name}", model_itself, head, windows(4, two_tasks), cuts=SEVERAL)
        for name, head in [("TwoTasksMean", holding(of_either_task, Mean)), ("TwoTasks", TwoTasks)]
    ),
]


# --- what is zero while it is looked at -------------------------------------------------------------------------


class Dropped(TokenModel):
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

    def forward(self, input_ids: Tensor, labels: Any = None, draw: int = 0, **inputs: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids, draw)
        return (
            {"logits": logits} if labels is None else {"loss": shifted_cross_entropy(logits, labels), "logits": logits}
        )


def of_two_readings(losses: Sequence[Tensor], logits: Sequence[Tensor], batch: Batch) -> Tensor:
    """R-Drop (Liang et al. 2021): the mean of two losses, and how far their logits are apart."""
    one, two, kept = *logits, models.attended(batch)
    both = models.divergence(one, two, kept) + models.divergence(two, one, kept)
    return sum(losses) / 2 + both / 2


def full_r_drop(model: Any, batch: Batch, step: int) -> Tensor:
    logits = [model.logits(batch["input_ids"], draw) for draw in (0, 1)]
    return of_two_readings([shifted_cross_entropy(each, batch["labels"]) for each in logits], logits, batch)


class RDropped(Dropped):
    """In its forward."""

    def forward(self, input_ids: Tensor, labels: Any = None, draw: int = 0, **inputs: Any) -> dict[str, Tensor]:
        loss = full_r_drop(self, {"input_ids": input_ids, "labels": labels, **inputs}, 0)
        return {"loss": loss, "logits": self.logits(input_ids, draw)}


def r_drop(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    other = model(**inputs, draw=1)
    return of_two_readings((loss, other["loss"]), (outputs["logits"], other["logits"]), inputs), outputs


def two_calls(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """R-Drop as it is written most: the model twice, and the base not at all."""
    made = [model(**inputs, draw=draw) for draw in (0, 1)]
    return of_two_readings([each["loss"] for each in made], [each["logits"] for each in made], inputs), made[0]


@functools.cache
def initial() -> Any:
    return seeded(Mean)().requires_grad_(False)


def near_the_initial(loss: Tensor, s: Seen, step: int) -> Tensor:
    others = initial()(input_ids=s.batch["input_ids"])["logits"]
    return loss + 5 * models.divergence(s.logits, others, models.attended(s.batch))


def with_entropy(s: Seen) -> Tensor:
    return s.tokens - 0.1 * models.entropy(s.logits, models.attended(s.batch))


ZERO = [
    Case("r-drop-in-compute-loss", full_r_drop, Dropped, windows(2), computing(r_drop)),
    *made_of_super("near-the-initial", near_the_initial, 3),
    Case("entropy", full(with_entropy), even(with_entropy, Mean), windows(2)),
]


# --- a second backward ------------------------------------------------------------------------------------------


class FGM(StockRecorder):
    """Adds the gradient at an embedding moved along its gradient (Miyato et al. 2017)."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.embed.weight
        before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        again = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(again)
        weight.data = before
        return loss


def adversarial(loss: Tensor, s: Seen, step: int) -> Tensor:
    """The same within compute_loss, by a gradient that is taken there."""
    weight = s.model.embed.weight
    (along,) = torch.autograd.grad(full_mean(s.model, s.batch, 0), weight)
    moved = {"embed.weight": weight + 0.5 * along / along.norm()}
    logits = torch.func.functional_call(s.model, moved, kwargs={"input_ids": s.batch["input_ids"]})["logits"]
    return loss + s.by(logits).tokens


TWICE = [
    *(Case(f"fgm-{head.__name__}", full_changed(adversarial), head, windows(1), FGM) for head in (Mean, ByNumber)),
    *made_of_super("adversarial", adversarial, 1),
]


# --- what is made of a micro-batch's gradient ---------------------------------------------------------------------


class Clamped(Mean):
    """The gradient of its head is clamped in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class ClipsEach(StockRecorder):
    """Clips after every micro-batch, not once before the optimizer."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss


def full_clipped(model: Any, batch: Batch, step: int) -> Tensor:
    loss = full_mean(model, batch, step)
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return loss * (0.5 / (norm + 1e-6)).clamp(max=1)


GRADIENTS = [
    Case("hook-clamps", model_itself, Clamped, windows(1)),
    Case("clips-each", full_clipped, Mean, windows(1), ClipsEach),
]


# --- exact in fact ----------------------------------------------------------------------------------------------


def short_last(label: Any) -> list[list[Sample]]:
    """Two windows of eight and one of seven."""
    return [points(label, window, 8 - (window == 2)) for window in range(3)]


def a_number(index: int, g: torch.Generator) -> Tensor:
    return 2 * torch.randn((), generator=g, dtype=torch.float64)


def a_count(index: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (), generator=g).double()


def one_or_minus_one(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor(1 - 2 * (index % 2))


def three_flags(index: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (3,), generator=g).double()


def focal(s: Seen) -> Tensor:
    log_p, valid = s.log_p
    return (-((1 - log_p.exp()) ** 2) * log_p * valid).sum() / valid.sum()


def focal_of_classes(s: Seen) -> Tensor:
    """Of a class for each sample."""
    p = s.logits.softmax(-1).gather(-1, s.batch["labels"][:, None])
    return (-((1 - p) ** 2) * p.log()).mean()


def classes_by_hand(s: Seen) -> Tensor:
    """Of a class for every token."""
    return -s.logits.log_softmax(-1).gather(-1, s.batch["labels"][..., None]).mean()


def huber(s: Seen) -> Tensor:
    away = (s.logits[:, 0] - s.batch["labels"]).abs()
    return torch.where(away < 1, away.square() / 2, away - 0.5).mean()


def weighted_flags(s: Seen) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=s.logits.dtype)
    return F.binary_cross_entropy_with_logits(s.logits, s.batch["labels"], weight=weight)


OF_POINTS: list[tuple[str, Loss, int, Any]] = [
    ("focal-of-classes", focal_of_classes, 3, one_of_three),
    ("huber", huber, 1, a_number),
    (
        "gaussian-nll",
        lambda s: F.gaussian_nll_loss(s.logits[:, 0], s.batch["labels"], F.softplus(s.logits[:, 1])),
        2,
        a_number,
    ),
    ("poisson-nll", lambda s: F.poisson_nll_loss(s.logits[:, 0], s.batch["labels"]), 1, a_count),
    (
        "cosine-embedding",
        lambda s: F.cosine_embedding_loss(s.logits[:, :3], s.logits[:, 3:], s.batch["labels"]),
        6,
        one_or_minus_one,
    ),
    ("multi-margin", lambda s: F.multi_margin_loss(s.logits, s.batch["labels"]), 3, one_of_three),
    ("weighted-flags", weighted_flags, 3, three_flags),
]

#: At G = 2 a coefficient, or the trainer's own division for the window: no number tells.
HALVED = made_of_super("half", lambda loss, s, step: 0.5 * loss, 1)


def row_by_row(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["input_ids"]))]
    losses = [base(model, row, num_items_in_batch=number) for row in rows]
    return sum(losses[1:], losses[0]), None


def func_none(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, _ = Seen(outputs["logits"], {"labels": labels}).each_token
    return losses.sum() / num_items_in_batch


def func_of_classes(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="none").sum() / num_items_in_batch


def full_classes(model: Any, batch: Batch, step: int) -> Tensor:
    return F.cross_entropy(model(x=batch["x"])["logits"], batch["labels"])


EXACT = [
    in_forward("focal", focal, windows(3)),
    in_forward("log-softmax", classes_by_hand, windows(3, classed)),
    *(of_points(name, loss, out, short_last(label)) for name, loss, out, label in OF_POINTS),
    *made_of_super("three-tenths", lambda loss, s, step: 0.3 * loss, 3),
    *made_of_super("by-step", lambda loss, s, step: loss / (1 + step), 3),
    *made_of_super("and-squares", and_squares, 3),
    # Alone a row has no number to divide by but what it is handed.
    Case("row-by-row", full_mean, ByNumber, windows(3), computing(row_by_row)),
    Case(
        "func-of-classes",
        full_classes,
        lambda: TakingPoints(out=3),
        short_last(one_of_three),
        given={"compute_loss_func": func_of_classes},
    ),
    Case("func-with-none", full_mean, Mean, windows(3), given={"compute_loss_func": func_none}),
    # Two draws are apart only under dropout, which is why the loss is observed under it as well.
    Case("r-drop-in-forward", full_r_drop, RDropped, windows(2)),
    # Its halves are as likely 1/G at G = 2: said there.
    Case("r-drop-of-two-calls", full_r_drop, Dropped, windows(2), computing(two_calls), cuts=((2, 4), (1, 8))),
]


# --- a counted or weighted mean is there to be found ------------------------------------------------------------


def models_own(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    outputs = model(**inputs)
    return outputs["loss"], outputs


def of_chosen(s: Seen) -> Tensor:
    """The mean over the labels below 24 alone."""
    log_p, valid = s.log_p
    chosen = valid & (s.batch["labels"][:, 1:] < 24)
    # A graph, too, where none is chosen.
    return -(log_p * chosen).sum() / chosen.sum().clamp(min=1)


#: Exact once their counts, or the sums of their weights, are found.
EXACT_LATER = [
    in_forward("class-weights", class_weighted, windows(2)),
    in_forward("token-weights", token_weighted, [weighted(window) for window in (1, 2)]),
    *(Case(f"models-own-{h.__name__}", full_mean, h, windows(2), computing(models_own)) for h in (Mean, ByNumber)),
    in_forward("minus-one", without_minus_one, [some_minus_one(window) for window in (1, 2)]),
    in_forward("nan", without_nan, [some_nan(window) for window in (1, 2)]),
    in_forward("chosen-labels", of_chosen, windows(2)),
]


# --- as public code writes them: each once trained wrong --------------------------------------------------------


def with_kinds(window: int, *lengths: int) -> list[Sample]:
    """Texts with a class each and a tag for every third token, whose column is not called a label."""
    return [
        {
            **sample,
            "kind": torch.tensor((window + row * row) % 4),
            "tags": (sample["input_ids"] % 4).masked_fill(sample["input_ids"] % 3 == 0, -100),
        }
        for row, sample in enumerate(texts(window, lengths) if lengths else texts(window))
    ]


def padded_tags(samples: Sequence[Sample]) -> Batch:
    tags = nn.utils.rnn.pad_sequence([sample["tags"] for sample in samples], batch_first=True, padding_value=-100)
    return {**collate(samples), "tags": tags}


#: ``(trainer, seen, number)`` -> the loss of a micro-batch.
Public = Callable[[Any, Seen, Any], Tensor]


def public(
    name: str, loss: Public, whole: Callable[[Seen, int], Tensor] | None = None, count: int = 2, **more: Any
) -> Case:
    """``whole``: of the global batch, by step; None: the same loss, which needs no trainer or number."""

    def computed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        return loss(trainer, Seen(logits, inputs, models.bare(model)), number), {}

    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        return full(lambda s: loss(None, s, None) if whole is None else whole(s, step))(model, batch, step)

    return Case(name, reference, Mean, windows(count, with_kinds), computing(computed), collate=padded_tags, **more)


def size(trainer: Any) -> int:
    return int(trainer.args.per_device_train_batch_size)


def steps(trainer: Any) -> int:
    return int(trainer.args.gradient_accumulation_steps)


def tagged(s: Seen) -> Tensor:
    return F.cross_entropy(s.logits[..., :4].transpose(1, 2), s.batch["tags"])


def summed(s: Seen) -> Tensor:
    return s.each_token[0].sum()


def of_one_class(s: Seen) -> Tensor:
    """Of no sample of some micro-batches."""
    its = s.batch["kind"] == 1
    return (s.each_class * its).sum() / its.sum().clamp(min=1)


def in_chunks(t: Any, s: Seen, number: Any) -> Tensor:
    return sum((each.sum() / number for each in s.each_token[0].flatten().split(7)), torch.zeros(()))


def in_parts(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return sum((each.sum() for each in losses.flatten().split(7)), torch.zeros(())) / valid.sum()


def products(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return torch.einsum("bt,bt->", losses, valid.double()) / valid.sum()


def near(s: Seen) -> Tensor:
    return F.cosine_similarity(s.logits[:, 0], s.logits[:, 1], dim=-1)


PUBLIC_EXACT = [
    # A temperature squared, that is G by chance; a trainer's own division would be in both terms.
    public("four-times-one-term", lambda t, s, n: s.tokens + 4.0 * s.classes, cuts=((2, 4),)),
    public("half-of-one-term", lambda t, s, n: s.tokens + 0.5 * s.classes, cuts=((4, 2),)),
    public("one-less-a-cosine-and-tokens", lambda t, s, n: s.tokens + 1.0 - near(s).mean()),
    public("one-less-a-cosine-and-tags", lambda t, s, n: 1.0 - near(s).mean() + tagged(s), cuts=((2, 4), (1, 8))),
    public("chunks-over-the-number", in_chunks, lambda s, _: s.tokens, cuts=((2, 4), (1, 8))),
    public("a-sum-in-parts", lambda t, s, n: in_parts(s)),
    public("a-sum-of-products", lambda t, s, n: products(s)),
    public("a-mean-over-samples-of-sums", lambda t, s, n: s.classes + s.logits[:, :2].square().mean(0).sum()),
    public("tags-beside-classes", lambda t, s, n: tagged(s) + s.classes),
    public("of-one-class", lambda t, s, n: of_one_class(s), cuts=((4, 2),)),
    public("a-vector-of-one", lambda t, s, n: s.tokens.unsqueeze(0).mean()),
    Case(
        "few-targets-at-first",
        full_mean,
        ByNumber,
        # Of one sample alone.
        [without_targets(texts(), {*range(8)} - {3}), texts(1), texts(2)],
        cuts=((4, 2), (1, 8)),
    ),
]


class SumOver(torch.autograd.Function):
    """A fused kernel that divides by the number within."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, number: Any) -> Tensor:
        ctx.number, ctx.count = number, losses.shape
        return losses.sum() / number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (gradients[0] / ctx.number).expand(ctx.count), None


def of_added_key(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"] / inputs["temperature"]
    return summed(Seen(logits, inputs)) / number, {}


class PlusOne(ByNumber):
    """A model whose loss depends on its number, and does not divide by it."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return self.mean(input_ids, labels, count + 1)


class AddsKey(computing(of_added_key)):  # type: ignore[misc]
    """A step that adds what the loss reads, so that the loss cannot be observed before it."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(model, {**inputs, "temperature": 1.0}, *args, **kwargs)


AS_STOCK = [
    Case("a-key-that-the-step-adds", full_mean, Mean, [texts(0), texts(1)], AddsKey),
    public(
        "number-plus-one",
        lambda t, s, n: summed(s) / (n + 1),
        lambda s, _: summed(s) / ((s.batch["labels"] != -100).sum() + 1),
    ),
    public("number-in-a-kernel", lambda t, s, n: SumOver.apply(s.each_token[0].flatten(), n), lambda s, _: s.tokens),
    Case("a-models-number-plus-one", model_itself, PlusOne, [texts(0), texts(1)]),
]


def balanced(s: Seen) -> Tensor:
    """Weights by how often a class is in this batch."""
    kinds = s.batch["kind"]
    counts = torch.bincount(kinds, minlength=4).double()
    return (s.each_class * len(kinds) / (4 * counts[kinds])).mean()


def alike_later(s: Seen, step: int) -> Tensor:
    """From the second window on also of every text to the others of its batch."""
    found = F.normalize(s.logits[:, 0], dim=-1)
    return s.tokens + min(1.0, step / 2) * (found @ found.T).logsumexp(1).mean()


def guarded(s: Seen) -> Tensor:
    return s.classes * (0.1 if float(s.classes) > 3.0 else 1.0)


def contrasted(s: Seen) -> Tensor:
    """A pair of texts shows no coupling unless both have one class."""
    z = s.logits[:, 0]
    return s.classes + models.supervised_contrastive(z, s.batch["kind"]) / len(z)


def hardest(s: Seen) -> Tensor:
    """A third of a micro-batch's tokens, at least one."""
    losses, valid = s.each_token
    found = losses[valid].sort(descending=True)[0]
    return found[: max(1, len(found) // 3)].mean()


def smallest_in_order(s: Seen) -> Tensor:
    """Half a micro-batch's samples, of the smallest losses."""
    return s.each_class[s.each_class.detach().argsort()[: len(s.each_class) // 2]].mean()


def below_quantile(s: Seen) -> Tensor:
    return s.each_class[s.each_class.detach() <= s.each_class.detach().quantile(0.7)].mean()


def trimmed(s: Seen) -> Tensor:
    """Without the greatest of each eight, at least one sample's."""
    return s.each_class.sort()[0][: len(s.each_class) - 1].mean()


def over_first(trainer: Any, s: Seen, number: Any) -> Tensor:
    """Over its first value, which the trainer keeps."""
    if not hasattr(trainer, "first_loss"):
        trainer.first_loss = float(s.tokens.detach())
    return s.tokens / trainer.first_loss


def with_backward(trainer: Any, s: Seen, number: Any) -> Tensor:
    trainer.accelerator.backward(0.5 * s.tokens / steps(trainer), retain_graph=True)
    return s.classes


def over_greatest(s: Seen) -> Tensor:
    """Weights over the greatest of the batch, which most micro-batches hold."""
    weights = 1.0 + s.batch["kind"] % 2
    return (s.each_class * weights / weights.max()).mean()


def over_last(trainer: Any, s: Seen, number: Any) -> Tensor:
    """Over the value before, from a list."""
    before = trainer.__dict__.setdefault("losses_before", [2.0])
    before.append(float(s.tokens.detach()))
    return s.tokens / before[-2]


def normed_weights(s: Seen) -> Tensor:
    """Weights over their mean, of a policy's ratios, which begin at 1."""
    weights = 1.0 + s.batch["kind"]
    ratio = (s.each_class - s.each_class.detach()).exp()
    return -(weights / weights.double().mean() * ratio).mean()


def now_and_then(trainer: Any, s: Seen, number: Any) -> Tensor:
    """A penalty in one micro-batch of two."""
    trainer.calls = getattr(trainer, "calls", 0) + 1
    return s.tokens + 0.01 * models.squares(s.model) if trainer.calls % 2 else s.tokens


SAID = [
    public("a-penalty-now-and-then", now_and_then, lambda s, _: s.tokens + 0.01 * models.squares(s.model)),
    public("normed-weights-of-ratios", lambda t, s, n: normed_weights(s)),
    # At G = 2 a half may be the trainer's own division, beside the batch size too.
    public(
        "half-a-sum-over-the-batch-size",
        lambda t, s, n: 0.5 * s.each_class.sum() / size(t),
        lambda s, _: 0.5 * s.classes,
        cuts=((4, 2),),
    ),
    public("balanced-classes", lambda t, s, n: balanced(s), count=3),
    public("coupled-later", lambda t, s, n: alike_later(s, t.state.global_step), alike_later, 3),
    # Padding is no position of its micro-batch alone.
    public("mean-over-padding", lambda t, s, n: s.each_token[0].mean()),
    public("squares-over-padding", lambda t, s, n: s.tokens + s.logits.square().mean()),
    public("contrasted-beside-classes", lambda t, s, n: contrasted(s)),
    public("hardest-third", lambda t, s, n: hardest(s), cuts=((2, 4), (1, 8))),
    public("smallest-in-order", lambda t, s, n: smallest_in_order(s), cuts=((4, 2), (2, 4))),
    public("below-a-quantile", lambda t, s, n: below_quantile(s), cuts=((4, 2), (2, 4))),
    public("trimmed", lambda t, s, n: trimmed(s), cuts=((4, 2), (2, 4))),
    public("over-its-first-value", over_first, lambda s, _: s.tokens / s.tokens.detach(), 1),
    public("spike-guard", lambda t, s, n: guarded(s)),
    # Texts of one length, and of one class, do not show on what it depends.
    replace(
        public("padded-later", lambda t, s, n: F.cross_entropy(s.logits.mean(1)[:, :4], s.batch["kind"])),
        windows=[with_kinds(0, *(12,) * 8), with_kinds(1)],
        cuts=((4, 2), (2, 4)),
    ),
    replace(
        public("greatest-later", lambda t, s, n: over_greatest(s)),
        windows=[[{**sample, "kind": torch.tensor(1)} for sample in with_kinds(0)], with_kinds(1)],
    ),
    public("weights-over-the-greatest", lambda t, s, n: over_greatest(s)),
    public("over-the-value-before", over_last, lambda s, _: s.tokens / s.tokens.detach(), 1),
    public("stacked-dot", lambda t, s, n: torch.dot(torch.tensor([0.3, 0.7]).double(), s.stack)),
    public("backward-in-compute-loss", with_backward, lambda s, _: 0.5 * s.tokens + s.classes),
]


# --- the tests --------------------------------------------------------------------------------------------------


def kto(s: Seen) -> Tensor:
    """TRL's KTO: the mean log-ratio is a baseline without gradient, and zero until the policy has changed."""
    if "reference" not in vars(s.model):
        vars(s.model)["reference"] = deepcopy(s.model).requires_grad_(False)
    of_reference = s.by(vars(s.model)["reference"].logits(s.batch["input_ids"]))
    ratios = sum_of_log_p(s) - sum_of_log_p(of_reference).detach()
    baseline = ratios.mean().detach().clamp(min=0)
    wanted = s.batch["kind"] % 2 == 0
    losses = 1 - torch.sigmoid(0.1 * torch.where(wanted, ratios - baseline, baseline - ratios))
    return (torch.where(wanted, 1.0, 4 / 3) * losses).mean()


def sum_of_log_p(s: Seen) -> Tensor:
    log_p, valid = s.log_p
    return (log_p * valid).sum(1)


def reinforce(s: Seen) -> Tensor:
    """Rewards less their mean over the batch, by their deviation."""
    rewards = s.batch["kind"].to(s.logits.dtype)
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return -(advantages * sum_of_log_p(s)).mean()


EXACT_OR_SAID = [
    public("kto", lambda t, s, n: kto(s), count=3),
    # Neither further off than stock nor silent; what is logged is the loss that was trained.
    public("reinforce", lambda t, s, n: reinforce(s), count=1),
    *SUPER,
    *MASKED,
    DROPPED_ROWS,
    *BESIDE,
    *LATER,
    *ZERO,
    *TWICE,
    *GRADIENTS,
    *EXACT_LATER,
    *HALVED,
    # A divisor of 1 is one item, or none.
    public("of-one-class-or-none", lambda t, s, n: of_one_class(s), cuts=((2, 4), (1, 8))),
    public("of-one-class-changed-in-place", lambda t, s, n: of_one_class(s).add_(s.tokens), cuts=((2, 4), (1, 8))),
    # A model's own, too: padding is a part of the loss.
    in_forward("own-squares-over-padding", lambda s: s.tokens + s.logits.square().mean(), windows(1)),
    Case("r-drop-of-two-calls", full_r_drop, Dropped, windows(1), computing(two_calls), cuts=((4, 2),)),
]


def trained(case: Case, cut: Cut, output: Path) -> Any:
    with hf_accum_fix.apply():
        return train(case, cut, output)


@cells(EXACT_OR_SAID)
def test_exact_or_said(case: Case, cut: Cut, tmp_path: Path) -> None:
    training = trained(case, cut, tmp_path)
    assert not training.silent(case.tolerance), training
    if len(case.windows) == 1:
        stock = train(case, cut, tmp_path)
        assert training.errors[0] <= max(case.tolerance, 1.000001 * stock.errors[0])


@cells([*EXACT, *PUBLIC_EXACT])
def test_exact_and_nothing_said(case: Case, cut: Cut, tmp_path: Path) -> None:
    training = trained(case, cut, tmp_path)
    assert training.worst <= 1e-12 and training.log_error <= 1e-3 and training.exact
    said = [words for _, words in training.said]
    if case.name == "few-targets-at-first":
        said = [words for words in said if "no target" not in words]
    assert not said, training


@cells(AS_STOCK)
def test_a_hidden_number_keeps_stocks_scale(case: Case, cut: Cut, tmp_path: Path) -> None:
    stock, training = train(case, cut, tmp_path), trained(case, cut, tmp_path)
    assert stock.worst <= 1e-2
    assert training.errors == pytest.approx(stock.errors, abs=1e-12) and training.said and not training.exact


def on_two_ranks(name: str, cut: Cut) -> list[tuple[list[float], list[float], bool]]:
    """Of stock and of ours: the errors, and whether it is called exact."""
    [found] = [each for each in AS_STOCK if each.name == name]
    with tempfile.TemporaryDirectory() as folder:
        stock, ours = train(found, cut, Path(folder)), trained(found, cut, Path(folder))
    return [([*stock.errors], [*ours.errors], bool(ours.exact))]


@pytest.mark.parametrize("name", [each.name for each in AS_STOCK])
def test_a_hidden_number_on_two_ranks_is_as_far_off_as_stock(name: str) -> None:
    for [(stock, ours, exact)] in on_ranks(on_two_ranks, name, (1, 4)):
        assert all(o <= max(1.000001 * s, 1e-12) for o, s in zip(ours, stock, strict=True)) and not exact


@cells(SAID)
def test_said_and_no_worse_than_stock(case: Case, cut: Cut, tmp_path: Path) -> None:
    stock, training = train(case, cut, tmp_path), trained(case, cut, tmp_path)
    assert stock.worst > 1e-3
    assert not training.silent(1e-9), training
    assert all(ours <= max(1.01 * theirs, 1e-9) for ours, theirs in zip(training.errors, stock.errors, strict=True))


@pytest.mark.parametrize("head", [Mean, ByNumber])
@pytest.mark.parametrize(
    "trainer", [as_prepared(fewer_labels), in_loss(fewer_labels)], ids=["prepare-inputs", "compute-loss"]
)
def test_no_chance_makes_labels_masked_on_the_way_exact(trainer: type, head: Any, tmp_path: Path) -> None:
    """Masked labels may by chance be as many as some way of counting counts."""
    silent = {}
    for seed in range(24):
        training = trained(Case("", full_of_fewer, head, [drawn(seed)], trainer), (2, 4), tmp_path)
        if training.silent(1e-9):
            silent[seed] = training.errors[0]
    assert not silent


@pytest.mark.parametrize("case", [c for c in (*EXACT_OR_SAID, *EXACT) if c.whole], ids=lambda case: case.name)
def test_the_reference_is_one_micro_batch_of_stock(case: Case, tmp_path: Path) -> None:
    """Held against stock without accumulation, so that no reference is of another loss."""
    training = train(case, (8, 1), tmp_path)
    assert max(training.errors) <= max(case.tolerance, 1e-12)
