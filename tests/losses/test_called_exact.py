"""A training is the full batch's in every window, or it says in time that it is not; never wrong and silent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import hf_accum_fix
from tests.losses import models
from tests.losses.models import ByNumber, Mean, Points, classed, drawn, fewer, full_mean, model_itself, points, texts
from tests.losses.seen import Seen, around, full
from tests.numerics.heads import Batch, bert, seeded, shifted_cross_entropy
from tests.numerics.heads.experts import MAMBA
from tests.numerics.heads.head import TINY, Sample
from tests.numerics.heads.samples import first_is_target, text
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


def in_forward(name: str, loss: Callable[[Tensor, Tensor], Tensor], samples: Any, **more: Any) -> Case:
    """In a model, of its logits and labels."""
    return Case(name, models.of_tokens(loss), models.mean_of(loss), samples, **more)


def of_points(name: str, loss: Callable[..., Tensor], out: int, samples: Any, **more: Any) -> Case:
    """In a model of four numbers, of ``out`` numbers that it makes of them."""
    return Case(name, model_itself, lambda: Points(loss, out), samples, **more)


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
        ("from-logits", above(lambda loss, logits, batch, _: shifted_cross_entropy(logits, batch["labels"]))),
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


def no_loss(logits: Tensor, labels: Tensor | None, **kwargs: Any) -> Tensor:
    return logits.sum() * 0.0


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
    Case("head-by-number-with-z", full_changed(and_z), models.ByNumberWithZ, windows(1)),
    Case("head-with-mean-and-z", full_changed(and_z), models.MeanWithZ, windows(1)),
    # The last micro-batch is short, and so is a micro-batch's mean over positions.
    Case("bamba-z", model_itself, bamba, [texts(0, (12,) * 7)], cuts=[(4, 2), (2, 4)], tolerance=1e-6),
    # Nothing is certain before a third window, and a training may have but one.
    *(
        Case(
            f"contrastive-by-number-{count}",
            full_contrastive,
            lambda: Points(no_loss, 3),
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


def of_two_columns(logits: Tensor, labels: Tensor, second_labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits[:, :3], labels) + F.cross_entropy(logits[:, 3:], second_labels)


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


def some_nan(window: int) -> list[Sample]:
    samples = [{**sample, "labels": sample["labels"].double()} for sample in classed(window)]
    for index, sample in enumerate(samples if window else []):
        sample["labels"][: index % 5 + 1] = torch.nan
    return samples


def with_weights(samples: Sequence[Sample], rows: Sequence[int]) -> list[Sample]:
    """All weights are 1, but for these samples."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.rand(len(sample["labels"]), generator=g).double() for sample in samples]
    weights = [weight if row in rows else torch.ones_like(weight) for row, weight in enumerate(drawn)]
    return [{**sample, "weights": weight} for sample, weight in zip(samples, weights, strict=True)]


def weighted(window: int) -> list[Sample]:
    """From window 1 on."""
    return with_weights(texts(window), range(8) if window else ())


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


def class_or_255(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor(255 if index in (1, 2, 5) else int(torch.randint(0, 3, (), generator=g)))


def void_is_255(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """Segmentation's: what is void has an index beyond the classes."""
    weight = torch.linspace(0.2, 1.0, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight, None, 255)


def with_weight(window: int) -> list[Sample]:
    def label(index: int, g: torch.Generator) -> dict[str, Tensor]:
        value = torch.randn((), generator=g, dtype=torch.float64)
        return {"labels": value, "row_weight": torch.tensor(1.0 if window == 0 else 1.0 + index).double()}

    return points(label, window)


def weighted_squares(logits: Tensor, labels: Tensor, row_weight: Tensor, **kwargs: Any) -> Tensor:
    return F.mse_loss(logits[:, 0], labels, weight=row_weight)


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
    in_forward("minus-one-later", models.without_minus_one, windows(2, some_minus_one)),
    in_forward("nan-later", models.without_nan, windows(2, some_nan)),
    Case("token-weights-later", model_itself, models.TokenWeighted, windows(2, weighted)),
    # Of a mean by hand one micro-batch of a window is looked at; this is the one.
    Case("token-weights-in-two", model_itself, models.TokenWeighted, [with_weights(texts(), (0, 1))], cuts=[(2, 4)]),
    *(
        Case(name, model_itself, head, windows(2, prompts_later), collate=models.with_targets)
        for name, head in [("targets-later", models.OfTargets), ("next-targets-later", models.OfNextTargets)]
    ),
    *made_of_super("switched-on", switched_on, 4),
    in_forward("ragged-later", models.mean_by_hand, windows(2, plain_later(texts))),
    # Stock counts the first tokens of a model that does not say that it shifts.
    *(
        Case(f"first-targets-later-{h.__name__}", full_mean, h, windows(2, first_targets), whole=h is Mean)
        for h in (Mean, ByNumber)
    ),
    # Nothing is changed while the loss is above the level; a micro-batch falls below it before the global batch does.
    *made_of_super("flooding", flooded, 3),
    Case("flooding-in-forward", full_changed(flooded), models.Flooded, windows(3)),
    *(
        Case(f"two-tasks-{head.__name__}", model_itself, head, windows(4, two_tasks), cuts=SEVERAL)
        for head in (models.TwoTasksMean, models.TwoTasks)
    ),
]


# --- what is zero while it is looked at -------------------------------------------------------------------------


def of_two_readings(loss: Callable[[int], Tensor], logits: Callable[[int], Tensor], kept: Tensor) -> Tensor:
    """R-Drop (Liang et al. 2021): the mean of two losses, and how far their logits are apart."""
    one, two = logits(0), logits(1)
    both = models.divergence(one, two, kept) + models.divergence(two, one, kept)
    return (loss(0) + loss(1)) / 2 + both / 2


def r_drop(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    other = model(**inputs, draw=1)
    losses, logits = (loss, other["loss"]), (outputs["logits"], other["logits"])
    return of_two_readings(losses.__getitem__, logits.__getitem__, models.attended(inputs)), outputs


def two_calls(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """R-Drop as it is written most: the model twice, and the base not at all."""
    made = [model(**inputs, draw=draw) for draw in (0, 1)]
    loss = of_two_readings(lambda d: made[d]["loss"], lambda d: made[d]["logits"], models.attended(inputs))
    return loss, made[0]


def full_r_drop(model: Any, batch: Batch, step: int) -> Tensor:
    logits = [model.logits(batch["input_ids"], draw) for draw in (0, 1)]
    return of_two_readings(
        lambda draw: shifted_cross_entropy(logits[draw], batch["labels"]), logits.__getitem__, models.attended(batch)
    )


@functools.cache
def initial() -> Any:
    return seeded(Mean)().requires_grad_(False)


def near_the_initial(loss: Tensor, s: Seen, step: int) -> Tensor:
    others = initial()(input_ids=s.batch["input_ids"])["logits"]
    return loss + 5 * models.divergence(s.logits, others, models.attended(s.batch))


def with_entropy(loss: Tensor, s: Seen, step: int) -> Tensor:
    return loss - 0.1 * models.entropy(s.logits, models.attended(s.batch))


ZERO = [
    Case("r-drop-in-compute-loss", full_r_drop, models.Dropped, windows(2), computing(r_drop)),
    *made_of_super("near-the-initial", near_the_initial, 3),
    Case("entropy", full_changed(with_entropy), models.WithEntropy, windows(2)),
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
    Case("hook-clamps", model_itself, models.Clamped, windows(1)),
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


def huber(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    away = (logits[:, 0] - labels).abs()
    return torch.where(away < 1, away.square() / 2, away - 0.5).mean()


def gaussian(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.gaussian_nll_loss(logits[:, 0], labels, F.softplus(logits[:, 1]))


def poisson(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.poisson_nll_loss(logits[:, 0], labels)


def cosine(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cosine_embedding_loss(logits[:, :3], logits[:, 3:], labels)


def multi_margin(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.multi_margin_loss(logits, labels)


def weighted_flags(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, weight=weight)


#: At G = 2 a coefficient, or the trainer's own division for the window: no number tells.
HALVED = made_of_super("half", lambda loss, s, step: 0.5 * loss, 1)


def row_by_row(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["input_ids"]))]
    losses = [base(model, row, num_items_in_batch=number) for row in rows]
    return torch.stack(losses).sum(), None


def func_none(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = F.cross_entropy(outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum() / num_items_in_batch


def func_of_classes(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="none").sum() / num_items_in_batch


def full_classes(model: Any, batch: Batch, step: int) -> Tensor:
    return F.cross_entropy(model(x=batch["x"])["logits"], batch["labels"])


EXACT = [
    in_forward("focal", models.focal, windows(3)),
    in_forward("log-softmax", models.by_hand, windows(3, classed)),
    *(
        of_points(name, loss, out, short_last(label))
        for name, loss, out, label in [
            ("focal-of-classes", models.focal_of_classes, 3, one_of_three),
            ("huber", huber, 1, a_number),
            ("gaussian-nll", gaussian, 2, a_number),
            ("poisson-nll", poisson, 1, a_count),
            ("cosine-embedding", cosine, 6, one_or_minus_one),
            ("multi-margin", multi_margin, 3, one_of_three),
            ("weighted-flags", weighted_flags, 3, three_flags),
        ]
    ),
    *made_of_super("three-tenths", lambda loss, s, step: 0.3 * loss, 3),
    *made_of_super("by-step", lambda loss, s, step: loss / (1 + step), 3),
    *made_of_super("and-squares", and_squares, 3),
    # Alone a row has no number to divide by but what it is handed.
    Case("row-by-row", full_mean, ByNumber, windows(3), computing(row_by_row)),
    Case(
        "func-of-classes",
        full_classes,
        lambda: Points(no_loss, 3),
        short_last(one_of_three),
        given={"compute_loss_func": func_of_classes},
    ),
    Case("func-with-none", full_mean, Mean, windows(3), given={"compute_loss_func": func_none}),
    # Two draws are apart only under dropout, which is why the loss is observed under it as well.
    Case("r-drop-in-forward", full_r_drop, models.RDropped, windows(2)),
    # Its halves are as likely 1/G at G = 2: said there.
    Case("r-drop-of-two-calls", full_r_drop, models.Dropped, windows(2), computing(two_calls), cuts=((2, 4), (1, 8))),
]


# --- a counted or weighted mean is there to be found ------------------------------------------------------------


def models_own(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    outputs = model(**inputs)
    return outputs["loss"], outputs


#: Exact once their counts, or the sums of their weights, are found.
EXACT_LATER = [
    in_forward("class-weights", models.class_weighted, windows(2)),
    Case("token-weights", model_itself, models.TokenWeighted, [weighted(window) for window in (1, 2)]),
    *(Case(f"models-own-{h.__name__}", full_mean, h, windows(2), computing(models_own)) for h in (Mean, ByNumber)),
    in_forward("minus-one", models.without_minus_one, [some_minus_one(window) for window in (1, 2)]),
    in_forward("nan", models.without_nan, [some_nan(window) for window in (1, 2)]),
    in_forward("chosen-labels", models.of_chosen, windows(2)),
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
    *HALVED,
    Case("r-drop-of-two-calls", full_r_drop, models.Dropped, windows(1), computing(two_calls), cuts=((4, 2),)),
]


@cells(EXACT_OR_SAID)
def test_exact_or_said(case: Case, cut: Cut, tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        training = train(case, cut, tmp_path)
    assert not training.silent(case.tolerance), training
    if len(case.windows) == 1:
        stock = train(case, cut, tmp_path)
        assert training.errors[0] <= max(case.tolerance, 1.000001 * stock.errors[0])


@cells(EXACT)
def test_exact_and_nothing_said(case: Case, cut: Cut, tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        training = train(case, cut, tmp_path)
    assert max(training.errors) <= 1e-12 and not training.said, training


@pytest.mark.parametrize("head", [Mean, ByNumber])
@pytest.mark.parametrize(
    "trainer", [as_prepared(fewer_labels), in_loss(fewer_labels)], ids=["prepare-inputs", "compute-loss"]
)
def test_no_chance_makes_labels_masked_on_the_way_exact(trainer: type, head: Any, tmp_path: Path) -> None:
    """Masked labels may by chance be as many as some way of counting counts."""
    silent = {}
    with hf_accum_fix.apply():
        for seed in range(24):
            training = train(Case("", full_of_fewer, head, [drawn(seed)], trainer), (2, 4), tmp_path)
            if training.silent(1e-9):
                silent[seed] = training.errors[0]
    assert not silent


@pytest.mark.parametrize("case", [c for c in (*EXACT_OR_SAID, *EXACT) if c.whole], ids=lambda case: case.name)
def test_the_reference_is_one_micro_batch_of_stock(case: Case, tmp_path: Path) -> None:
    """Held against stock without accumulation, so that no reference is of another loss."""
    training = train(case, (8, 1), tmp_path)
    assert max(training.errors) <= max(case.tolerance, 1e-12)
