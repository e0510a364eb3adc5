"""A training is the full batch's in every window, or it says in time that it is not; never wrong and silent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    full,
    holding,
    tokens,
)
from tests.numerics.heads import Batch, TokenModel, bert, seeded, shifted_cross_entropy
from tests.numerics.heads.experts import MAMBA
from tests.numerics.heads.head import TINY, Sample, collate
from tests.numerics.heads.samples import without_targets
from tests.numerics.parity import StockRecorder
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
    for name, trainer, head in [
        ("super-without-number", above(lambda loss, *_: loss, number=False), ByNumber),
        ("super-with-own-count", computing(with_own_count), Mean),
        ("outputs-loss", computing(models_loss), ByNumber),
        ("from-logits", around(lambda loss, s, _: s.tokens), Mean),
    ]
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
    for name, trainer, head in [
        ("step-copies", in_step(fewer_labels), Mean),
        ("step-edits-tensor", in_step(fewer_labels, "tensor"), ByNumber),
        ("fetched-edited", as_fetched(fewer_labels, "key", recount=True), Mean),
    ]
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
    Case("head-by-number-with-z", full_changed(and_z), holding(lambda s: 0.01 * s.z, ByNumber), windows(1)),
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
        for count in (1,)
    ),
]


# --- what shows only later --------------------------------------------------------------------------------------


def answers(window: int) -> list[Sample]:
    """From window 1 on three answers end beyond the text."""
    samples = []
    for index, sample in enumerate(texts(window, (12,) * 8)):
        end = 400 if window and index in (1, 2, 6) else 6 + index % 5
        positions = {"start_positions": torch.tensor(index % 6), "end_positions": torch.tensor(end)}
        samples.append({"input_ids": sample["input_ids"], "attention_mask": sample["attention_mask"], **positions})
    return samples


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


def switched_on(loss: Tensor, s: Seen, step: int) -> Tensor:
    return loss + 0.1 * s.z if step >= 2 else loss


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
        ]
    ),
    Case("end-beyond-width", model_itself, bert("BertForQuestionAnswering"), windows(2, answers), cuts=SEVERAL),
    in_forward("token-weights-later", token_weighted, windows(2, weighted)),
    *made_of_super("switched-on", switched_on, 4),
    # Nothing is changed while the loss is above the level; a micro-batch falls below it before the global batch does.
    *made_of_super("flooding", flooded, 3),
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


ZERO = made_of_super("near-the-initial", near_the_initial, 3, (Mean,))


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


def three_flags(index: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (3,), generator=g).double()


def focal_of_classes(s: Seen) -> Tensor:
    """Of a class for each sample."""
    p = s.logits.softmax(-1).gather(-1, s.batch["labels"][:, None])
    return (-((1 - p) ** 2) * p.log()).mean()


def weighted_flags(s: Seen) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=s.logits.dtype)
    return F.binary_cross_entropy_with_logits(s.logits, s.batch["labels"], weight=weight)


OF_POINTS: list[tuple[str, Loss, int, Any]] = [
    ("focal-of-classes", focal_of_classes, 3, one_of_three),
    ("weighted-flags", weighted_flags, 3, three_flags),
]


def row_by_row(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["input_ids"]))]
    losses = [base(model, row, num_items_in_batch=number) for row in rows]
    return sum(losses[1:], losses[0]), None


def func_none(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, _ = Seen(outputs["logits"], {"labels": labels}).each_token
    return losses.sum() / num_items_in_batch


EXACT = [
    *(of_points(name, loss, out, short_last(label)) for name, loss, out, label in OF_POINTS),
    # Alone a row has no number to divide by but what it is handed.
    Case("row-by-row", full_mean, ByNumber, windows(3), computing(row_by_row)),
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


#: Exact once their counts, or the sums of their weights, are found.
EXACT_LATER = [
    in_forward("class-weights", class_weighted, windows(2)),
    in_forward("token-weights", token_weighted, [weighted(window) for window in (1, 2)]),
    Case("models-own", full_mean, Mean, windows(2), computing(models_own)),
    in_forward("nan", without_nan, [some_nan(window) for window in (1, 2)]),
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


def summed(s: Seen) -> Tensor:
    return s.each_token[0].sum()


def of_one_class(s: Seen) -> Tensor:
    """Of no sample of some micro-batches."""
    its = s.batch["kind"] == 1
    return (s.each_class * its).sum() / its.sum().clamp(min=1)


def in_parts(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return sum((each.sum() for each in losses.flatten().split(7)), torch.zeros(())) / valid.sum()


PUBLIC_EXACT = [
    # A temperature squared, that is G by chance; a trainer's own division would be in both terms.
    public("four-times-one-term", lambda t, s, n: s.tokens + 4.0 * s.classes, cuts=((2, 4),)),
    public("a-sum-in-parts", lambda t, s, n: in_parts(s)),
    public("a-mean-over-samples-of-sums", lambda t, s, n: s.classes + s.logits[:, :2].square().mean(0).sum()),
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


def alike_later(s: Seen, step: int) -> Tensor:
    """From the second window on also of every text to the others of its batch."""
    found = F.normalize(s.logits[:, 0], dim=-1)
    return s.tokens + min(1.0, step / 2) * (found @ found.T).logsumexp(1).mean()


def guarded(s: Seen) -> Tensor:
    return s.classes * (0.1 if float(s.classes) > 3.0 else 1.0)


def hardest(s: Seen) -> Tensor:
    """A third of a micro-batch's tokens, at least one."""
    losses, valid = s.each_token
    found = losses[valid].sort(descending=True)[0]
    return found[: max(1, len(found) // 3)].mean()


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


def normed_weights(s: Seen) -> Tensor:
    """Weights over their mean, of a policy's ratios, which begin at 1."""
    weights = 1.0 + s.batch["kind"]
    ratio = (s.each_class - s.each_class.detach()).exp()
    return -(weights / weights.double().mean() * ratio).mean()


SAID = [
    public("normed-weights-of-ratios", lambda t, s, n: normed_weights(s)),
    # At G = 2 a half may be the trainer's own division, beside the batch size too.
    public(
        "half-a-sum-over-the-batch-size",
        lambda t, s, n: 0.5 * s.each_class.sum() / size(t),
        lambda s, _: 0.5 * s.classes,
        cuts=((4, 2),),
    ),
    public("coupled-later", lambda t, s, n: alike_later(s, t.state.global_step), alike_later, 3),
    # Padding is no position of its micro-batch alone.
    public("squares-over-padding", lambda t, s, n: s.tokens + s.logits.square().mean()),
    public("hardest-third", lambda t, s, n: hardest(s), cuts=((2, 4), (1, 8))),
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
    public("stacked-dot", lambda t, s, n: torch.dot(torch.tensor([0.3, 0.7]).double(), s.stack)),
    public("backward-in-compute-loss", with_backward, lambda s, _: 0.5 * s.tokens + s.classes),
]


# --- the tests --------------------------------------------------------------------------------------------------


EXACT_OR_SAID = [
    *SUPER,
    *MASKED,
    DROPPED_ROWS,
    *BESIDE,
    *LATER,
    *ZERO,
    *TWICE,
    *GRADIENTS,
    *EXACT_LATER,
    # A divisor of 1 is one item, or none.
    public("of-one-class-or-none", lambda t, s, n: of_one_class(s), cuts=((2, 4), (1, 8))),
    public("of-one-class-changed-in-place", lambda t, s, n: of_one_class(s).add_(s.tokens), cuts=((2, 4), (1, 8))),
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
