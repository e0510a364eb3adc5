"""Losses whose gradient their values do not tell, rebuilt as small as they get; each with the verdict that it must get.

Numbers before a name are of the rows of trainings that broke the package; shapes of our own around a row share its
number. A loss is a function of what is `Seen` in a forward, so that it can stand in the model, in a compute_loss, in a
compute_loss_func, beside super()'s, and in a loop. `alone` has the parts of the random trainings, `wild` what public
code writes, `clamps` counts that are kept from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from hf_accum_fix import Items, LossContract, Reduction
from tests.losses import alone, clamps, models, wild
from tests.losses.models import fewer, model_itself, points
from tests.losses.rows import (
    AVERAGED,
    EITHER,
    EVEN,
    EXACT,
    GRADIENT,
    INEXACT,
    NAMED,
    THREE,
    attack,
    by_super,
    in_func,
    in_model,
    in_own,
    of_points,
    several,
    texts,
)
from tests.losses.seen import (
    ByNumber,
    Loss,
    Mean,
    Points,
    Seen,
    TakingPoints,
    Texts,
    both,
    class_weighted,
    full,
    holding,
    tokens,
)
from tests.losses.verdicts import HALVES, PAIRS, SINGLES, UNEVEN, Verdict
from tests.numerics.heads import Batch, Sample, TokenModel, bert, shifted_cross_entropy
from tests.numerics.heads.experts import MAMBA
from tests.numerics.heads.head import TINY, collate
from tests.numerics.heads.samples import LENGTHS, generator, without_targets
from tests.numerics.parity import StockRecorder
from tests.trainers import custom
from tests.trainings import Case, Cut, as_fetched, computing, in_step, pieces

# --- 1, 3, 5: constants that equal 1/G, stop-gradients, micro-batches of other sizes; most of these are `alone` ------


def by_probability(s: Seen) -> Tensor:
    """DFT: each token by the probability that it has now."""
    losses, valid = s.each_token
    return ((-losses).exp().detach() * losses * valid).sum() / valid.sum()


READ = [
    in_own("1-quarter-tensor", EXACT, lambda s: s.tokens * torch.tensor(0.25), cuts=(PAIRS, UNEVEN)),
    in_own("1-mean-of-two", INEXACT, lambda s: s.stack.mean(), cuts=(HALVES,)),
    in_model("3-by-probability", EXACT, by_probability, cuts=THREE),
    in_func("5-both", EXACT, both, cuts=THREE),
]


# --- 8, 9, 11: windows and micro-batches without labels, means of sample means, row by row ------------------------


def unlabelled_at_first(window: int) -> list[Sample]:
    return texts(window) if window else without_targets(texts(window))


def sample_means(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return ((losses * valid).sum(1) / valid.sum(1)).mean()


def listed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """super() for each row, and the mean by hand."""
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["input_ids"]))]
    return sum(base(model, row) for row in rows) / len(rows), None


BY_SAMPLES = [
    in_func("8-classes-first", EITHER, lambda s: s.guarded + s.classes, windows=several(3, unlabelled_at_first)),
    by_super("11-listed", EITHER, computing(listed), sample_means, right=EVEN, cuts=THREE),
]


# --- 10: heads that take the number, and a term beside ------------------------------------------------------------


def own_count(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    return base(model, inputs, return_outputs=True, num_items_in_batch=(inputs["labels"][:, 1:] != -100).sum())


def and_z(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """A sum over the number, and a mean over positions."""
    s = Seen(model(input_ids=inputs["input_ids"])["logits"], inputs)
    return shifted_cross_entropy(s.logits, inputs["labels"], reduction="sum") / number + 0.01 * s.z, {}


def contrastive_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    outputs = model(x=inputs["x"])
    return models.supervised_contrastive(outputs["logits"], inputs["labels"]) / number, outputs


def contrastive(model: Any, batch: Batch, step: int) -> Tensor:
    return models.supervised_contrastive(model(x=batch["x"])["logits"], batch["labels"]) / len(batch["labels"])


def some_alike(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor((0, 0, 1, 0, 1, 1, 2, 2)[index])


def bamba() -> Any:
    more = {"attn_layer_indices": [0, 1], "z_loss_coefficient": 0.1, "num_key_value_heads": 1, "pad_token_id": 0}
    return hf.BambaForCausalLM(hf.BambaConfig(**TINY, **MAMBA, **more, max_position_embeddings=64))


def share_of_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The mean times n / N."""
    s = Seen(model(input_ids=inputs["input_ids"])["logits"], inputs)
    return s.tokens * (s.flat[1] != -100).sum() / number, {"logits": s.logits}


def over_share(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The sum over the number that is divided by G."""
    logits = model(input_ids=inputs["input_ids"])["logits"]
    summed = shifted_cross_entropy(logits, inputs["labels"], reduction="sum")
    return summed / (number / trainer.args.gradient_accumulation_steps), {"logits": logits}


BY_NUMBER = [
    by_super("10-share", EXACT, computing(share_of_number), tokens, head=ByNumber, right=THREE, cuts=THREE),
    attack("10-share-of-steps", NAMED, full(tokens), Mean, several(1), computing(over_share)),
    by_super("10-own-count", EITHER, computing(own_count), tokens, head=Mean, cuts=THREE),
    attack("10-z", EXACT, full(lambda s: s.tokens + 0.01 * s.z), Mean, several(1), computing(and_z), cuts=THREE),
    # Nothing is certain before a third window, and a training may have but one.
    attack(
        "10-contrastive",
        INEXACT,
        contrastive,
        lambda: TakingPoints(out=3),
        [points(some_alike)],
        computing(contrastive_by_number),
        cuts=(HALVES, PAIRS),
    ),
    # The last micro-batch is short, and so is a micro-batch's mean over positions.
    attack(
        "10-bamba-z", EITHER, model_itself, bamba, [models.texts(0, (12,) * 7)], cuts=(HALVES, PAIRS), tolerance=1e-6
    ),
]


# --- 12: what changes in a later window ---------------------------------------------------------------------------

LATE = 6


class Turns(Texts):
    """Knows the window."""

    step = 0


def from_turn(start: int, loss: Loss, later: Loss, end: int = LATE) -> Loss:
    return lambda s: (later if start <= s.model.step < end else loss)(s)


def late(name: str, verdict: Verdict, loss: Loss, make: Callable[[int], list[Sample]] = texts, **more: Any) -> Case:
    given = {"cuts": (PAIRS,), **more}
    return in_model(f"12-{name}", verdict, loss, head=Turns, windows=several(LATE, make), **given)


def answers(window: int) -> list[Sample]:
    """From window 1 on three answers end beyond the text."""
    samples = []
    for index, sample in enumerate(models.texts(window, (12,) * 8)):
        end = 400 if window and index in (1, 2, 6) else 6 + index % 5
        places = {"start_positions": torch.tensor(index % 6), "end_positions": torch.tensor(end)}
        samples.append({**places, **{key: sample[key] for key in ("input_ids", "attention_mask")}})
    return samples


LATER = [
    # Looked at again in the window after.
    late("term-in-3", EITHER, from_turn(2, tokens, both, 3)),
    attack(
        "12-end-beyond-width",
        EITHER,
        model_itself,
        bert("BertForQuestionAnswering"),
        several(2, answers),
        cuts=(HALVES, PAIRS),
    ),
]


# --- 14: state that a forward writes ------------------------------------------------------------------------------


class OverItsFloat(Texts):
    """A loss over its running average, a Python number."""

    def __init__(self) -> None:
        super().__init__(self.over)
        self.average = 1.0

    def over(self, s: Seen) -> Tensor:
        loss = s.tokens
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average


STATE = [
    attack("14-float", INEXACT, model_itself, OverItsFloat, several(1), looped=True),
]


# --- 15: two steps in one -----------------------------------------------------------------------------------------


def moved_along(model: Any, batch: Batch, step: int) -> Tensor:
    """SAM (Foret et al. 2021): the loss where the parameters are moved along its gradient."""
    names = dict(model.named_parameters())
    along = torch.autograd.grad(full(tokens)(model, batch, step), [*names.values()])
    norm = torch.stack([each.norm() for each in along]).norm()
    moved = {n: p + 0.5 * each / norm for (n, p), each in zip(names.items(), along, strict=True)}
    logits = torch.func.functional_call(model, moved, kwargs={"input_ids": batch["input_ids"]})["logits"]
    return Seen(logits, batch).tokens


class Sam(StockRecorder):
    """By two of super's steps; the gradient of the first is taken back."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        parameters = [*model.parameters()]
        along = self.gradient(model, inputs, num_items_in_batch, parameters)
        norm = torch.stack([each.norm() for each in along]).norm()
        moves = [0.5 * each / norm for each in along]
        self._move(parameters, moves, 1)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._move(parameters, moves, -1)
        return loss

    def gradient(self, model: Any, inputs: Any, number: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        super().training_step(model, dict(inputs), number)
        self.returned.pop()
        pairs = [*zip(parameters, before, strict=True)]
        along = [p.grad if was is None else p.grad - was for p, was in pairs]  # type: ignore[operator, misc]
        for p, was in pairs:
            p.grad = was
        return along

    @torch.no_grad()
    def _move(self, parameters: Sequence[Tensor], moves: Sequence[Tensor], sign: int) -> None:
        for p, move in zip(parameters, moves, strict=True):
            p.add_(sign * move)


class FGM(StockRecorder):
    """Adds the gradient at an embedding moved along its gradient (Miyato et al. 2017)."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.embed.weight
        before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        self.accelerator.backward(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
        weight.data = before
        return loss


def adversarial(model: Any, batch: Batch, step: int) -> Tensor:
    loss, weight = full(tokens)(model, batch, step), model.embed.weight
    (along,) = torch.autograd.grad(loss, weight, retain_graph=True)
    moved = {"embed.weight": weight + 0.5 * along / along.norm()}
    logits = torch.func.functional_call(model, moved, kwargs={"input_ids": batch["input_ids"]})["logits"]
    return loss + Seen(logits, batch).tokens


TWO_STEPS = [
    attack("15-Sam", INEXACT, moved_along, Texts, several(1), Sam),
    attack("15-fgm", EITHER, adversarial, ByNumber, several(1), FGM, whole=False),
]


# --- terms that no input counts, so that forwards count them -------------------------------------------------------


def with_z(chosen: Callable[[Seen], Tensor]) -> Loss:
    return lambda s: s.tokens + 0.1 * models.z_loss(s.logits, chosen(s))


class NumberAndZ(ByNumber):
    """The sum over its tokens by the number, and a mean over positions."""

    def __init__(self) -> None:
        super().__init__(lambda s: 0.1 * s.z)


def masked_later(batch: Batch) -> Batch:
    return {**batch, "labels": batch["labels"].masked_fill(batch["input_ids"] % 4 == 0, -100)}


COUNTED = [
    in_model("terms-weighted", EXACT, lambda s: class_weighted(s) + s.classes, cuts=THREE),
    in_model("terms-hidden", EXACT, with_z(lambda s: s.batch["input_ids"] % 3 == 1), cuts=THREE),
    attack(
        "terms-masked-later",
        INEXACT,
        lambda m, batch, _: m(**masked_later(batch))["loss"],
        NumberAndZ,
        [models.texts()],
        in_step(masked_later),
        whole=False,
    ),
]


# --- 18: terms that some micro-batches hold -----------------------------------------------------------------------


def macro(s: Seen) -> Tensor:
    """The mean over classes that are there of the mean over each."""
    losses, kinds = s.each_class, s.batch["kind"]
    return torch.stack([losses[kinds == k].mean() for k in kinds.unique()]).mean()


SOME_HOLD = [
    # In pairs every class is there once at most: nothing tells it from a mean over samples.
    in_own("18-macro", INEXACT, macro, cuts=(HALVES,)),
]


# --- warned of, though exact: rows that belong together -----------------------------------------------------------


def groups(count: int) -> list[list[Sample]]:
    """One window of eight groups of texts that belong together."""
    members = [models.texts(3 * i, LENGTHS[i:] + LENGTHS[:i]) for i in range(count)]
    return [[{"members": list(group)} for group in zip(*members, strict=True)]]


def interleaved(samples: Sequence[Sample]) -> Batch:
    """One group after another."""
    return collate([member for sample in samples for member in sample["members"]])


def by_role(samples: Sequence[Sample]) -> Batch:
    """The first of every group, then the second of every group."""
    return collate([sample["members"][place] for place in range(len(samples[0]["members"])) for sample in samples])


def log_p_of_rows(s: Seen) -> tuple[Tensor, Tensor]:
    """Of each row: summed, and the mean over its targets."""
    losses, valid = s.each_token
    return -(losses * valid).sum(1), -(losses * valid).sum(1) / valid.sum(1)


def of_fours(s: Seen) -> Tensor:
    """Each text against the three others of its group."""
    scores = log_p_of_rows(s)[1].view(-1, 4)
    return -(scores[:, 0] - scores.logsumexp(1)).mean()


def dpo_plus_answers(s: Seen) -> Tensor:
    """rpo_alpha as TRL adds it: a number to each pair's loss."""
    chosen, rejected = log_p_of_rows(s)[0].chunk(2)
    return (-F.logsigmoid(0.1 * (chosen - rejected)) + s.rows(slice(len(chosen))).tokens).mean()


BELONG = [
    in_model("easy-fours", EXACT, of_fours, right=EVEN, cuts=THREE, windows=groups(4), collate=interleaved),
    in_own("clients-rpo", EXACT, dpo_plus_answers, windows=groups(2), collate=by_role, cuts=THREE),
]


# --- losses that are zero where they are seen first ---------------------------------------------------------------


def scored(*margins: float) -> list[list[Sample]]:
    """Two windows of points whose margin is asked for in these terms."""

    def label(index: int, g: torch.Generator) -> Tensor:
        return torch.tensor(margins[index], dtype=torch.float64)

    return [points(label, window) for window in range(2)]


def margins(s: Seen) -> Tensor:
    return F.relu(s.batch["labels"] - s.logits[:, 0])


def with_graph(s: Seen) -> Tensor:
    """A constant where all is well."""
    return margins(s).mean() if bool((margins(s) > 0).any()) else _float64(0.0).requires_grad_()


def _float64(*values: float) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


#: The first three have nothing to learn.
NOTHING_FIRST = scored(-9.0, -9.0, -9.0, 2.0, 3.0, 1.0, -9.0, 4.0)
ZERO = [
    of_points("zero-constant", EITHER, with_graph, Points, NOTHING_FIRST, right=EVEN),
]


# --- shapes of our own: sums that can be read, and what is none ---------------------------------------------------


def weights_within(s: Seen) -> Tensor:
    """Divided by the count before it is summed."""
    losses, valid = s.each_token
    return (losses * (valid.to(losses) / valid.sum())).sum()


def normalised(s: Seen) -> Tensor:
    """Advantages within the micro-batch, which have no gradient."""
    advantage = s.batch["kind"].double()
    advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-4)
    return (advantage * s.each_class).mean()


SHAPES = [
    # A sum whose divisor stands below it.
    in_own("shape-divided-below", EITHER, weights_within, cuts=THREE),
    in_own("no-sum-normalised", INEXACT, normalised, cuts=(HALVES, PAIRS)),
]


# --- a loss of one's own in a loop, declared by hand --------------------------------------------------------------

#: The mean over next tokens.
OF_TOKENS = {"contract": LossContract(Reduction.MEAN, Items(("labels",), shift=True))}


def scaled(name: str, loss: Loss, learnt: Any = None, **more: Any) -> Case:
    given = {"windows": several(2), "options": OF_TOKENS, "cuts": THREE, "trainer": None, **more}
    return attack(f"scale-{name}", EXACT, full(loss), lambda: Texts(**learnt or {}), **given)


SCALED = [
    # Right as declared, though the count stands below the sum, or with the classes; what cannot be read is believed.
    scaled("divided-below", weights_within),
    scaled("fused", lambda s: models.Fused.apply(*s.flat)),
]


# --- found by attacks ------------------------------------------------------------------------------------------------


def with_teacher(window: int) -> list[Sample]:
    """Each text has what a teacher's layer gives, of three numbers a token, and a number a token; padded by zeros."""
    g = generator(window)
    return [
        {**sample, "hidden": torch.randn(len(sample["input_ids"]), 3, generator=g, dtype=torch.float64)}
        for sample in texts(window)
    ]


def padded_hidden(samples: Sequence[Sample]) -> Batch:
    batch = collate([{key: value for key, value in sample.items() if key != "hidden"} for sample in samples])
    hidden = torch.nn.utils.rnn.pad_sequence([sample["hidden"] for sample in samples], batch_first=True)
    return {**batch, "hidden": hidden}


def of_teacher(s: Seen) -> Tensor:
    """A mean over every position, padding among them."""
    mask = s.batch["attention_mask"][..., None]
    return F.mse_loss(s.logits[..., :3] * mask, s.batch["hidden"])


def free_bits(s: Seen) -> Tensor:
    """A floor that binds in the first two windows, and in the third in some micro-batches."""
    drive = s.batch["drive"][:, None]
    return s.tokens + (drive * s.logits[:, 1, :3].square()).mean(0).clamp(min=0.15).sum()


def driven(window: int) -> list[Sample]:
    return [{**sample, "drive": _float64(0.04 * (window == 2 and n == 0))} for n, sample in enumerate(texts(window))]


TAUGHT = {"windows": several(1, with_teacher), "collate": padded_hidden}
#: A mean over padding by three axes, alone and next to a mean of targets; a floor that stops binding.
FOUND = [
    in_own("found-teacher", EITHER, of_teacher, **TAUGHT),
    in_own("found-tokens-and-teacher", EITHER, lambda s: s.tokens + of_teacher(s), **TAUGHT),
    in_own("found-free-bits", EITHER, free_bits, windows=several(3, driven), cuts=(SINGLES,)),
]


# --- worse than stock once: `test_fates` has which fate each gets --------------------------------------------------


def heatmaps(window: int = 0) -> list[Sample]:
    """Four places each, of which a sample in two has any that are positive."""
    return points(lambda index, g: (torch.rand(4, generator=g) > 0.6).double() * (index % 2), window)


def focal(s: Seen) -> tuple[Tensor, Tensor]:
    """Of each place its loss, and whether it is positive."""
    return F.binary_cross_entropy_with_logits(s.logits, s.batch["labels"], reduction="none"), s.batch["labels"] > 0


def centernet(s: Seen) -> Tensor:
    """Zhou et al. 2019: a sum where there is no positive place."""
    losses, positive = focal(s)
    return losses.sum() / positive.sum() if bool(positive.any()) else losses.sum()


def sum_beside_a_mean(s: Seen) -> Tensor:
    losses, positive = focal(s)
    return losses[positive].sum() / positive.sum().clamp(min=1) + losses[~positive].sum()


class TwoBackwards(StockRecorder):
    """A step of its own, that hands each of two losses to accelerate."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        s = Seen(model(input_ids=inputs["input_ids"])["logits"], inputs, model)
        for loss in (s.tokens, s.classes):
            self.accelerator.backward(loss / self.args.gradient_accumulation_steps, retain_graph=True)
        return both(s).detach() / self.args.gradient_accumulation_steps


def above_a_quantile(s: Seen) -> Tensor:
    losses, valid = s.each_token
    found = losses[valid]
    return found[found > found.detach().quantile(0.7)].mean()


PLACES = {"model": lambda: Points(out=4), "windows": several(4, heatmaps)}
#: Its first two windows are mixtures, further off than stock.
CENTERNET = of_points("fate-centernet", EITHER, centernet, cuts=(SINGLES,), **PLACES)
FATES = [
    of_points("fate-sum-beside-a-mean", GRADIENT, sum_beside_a_mean, cuts=(PAIRS,), **PLACES),
    attack("fate-two-backwards", INEXACT, full(both), Texts, several(2), TwoBackwards),
    in_own("fate-quantile", INEXACT, above_a_quantile, windows=several(2)),
    in_own("fate-padding", INEXACT, lambda s: s.each_token[0].mean(), windows=several(2)),
]


# --- as everyday code writes them ---------------------------------------------------------------------------------


class OwnCount(StockRecorder):
    """Replaces the number: what is attended to, instead of the targets."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, _ = super().get_batch_samples(*args, **kwargs)
        return batches, sum(batch["attention_mask"].sum() for batch in batches)


def of_attended(model: Any, batch: Any, step: int) -> Tensor:
    losses, valid = Seen(model.logits(batch["input_ids"]), batch, model).each_token
    return (losses * valid).sum() / batch["attention_mask"].sum()


class Relabels(ByNumber):
    """Masks labels on a copy, inside the model."""

    def forward(self, input_ids: Tensor, labels: Any = None, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(input_ids, None if labels is None else fewer(labels), **inputs)


def of_fewer_by_all(model: Any, batch: Any, step: int) -> Tensor:
    """What stock trains: the sum over what the model keeps, by what the batch holds."""
    labels = batch["labels"]
    kept, held = (fewer(labels)[:, 1:] != -100).sum(), (labels[:, 1:] != -100).sum()
    return Seen(model.logits(batch["input_ids"]), {**batch, "labels": fewer(labels)}, model).tokens * kept / held


def twice(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """A second forward, for a log."""
    with torch.no_grad():
        base(model, {**inputs}, num_items_in_batch=number)
    return base(model, inputs, return_outputs=True, num_items_in_batch=number)


def more_than_none(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return (losses * valid).sum() / (valid.sum() + 1e-5)


def put_in_one(s: Seen) -> Tensor:
    return torch.cat([s.tokens.view(1), s.classes.view(1)]).mul(_float64(0.7, 0.2)).sum()


EVERYDAY = [
    # A loss of one element, and several in one tensor.
    in_own("everyday-begun", EXACT, lambda s: (torch.zeros(1, dtype=torch.float64) + s.tokens).mean()),
    in_own("everyday-cat", INEXACT, put_in_one),
    in_own("everyday-ceiling", INEXACT, lambda s: s.tokens.clamp(max=13.5) + 0.0 * s.classes, windows=several(2)),
    # Numbers that are replaced, or count what a model drops.
    attack("everyday-own-count", EITHER, of_attended, ByNumber, several(2), OwnCount, right=EVEN),
    attack("everyday-relabels", EITHER, of_fewer_by_all, Relabels, several(1), right=EVEN),
    attack("everyday-twice", EITHER, full(tokens), Mean, several(1), computing(twice)),
    # An epsilon in a divisor: one in 1e-5 of a single target, beside another count, is another count.
    in_own("everyday-1e-5", EXACT, lambda s: more_than_none(s) + 0.5 * s.classes, tolerance=2e-5, cuts=(PAIRS,)),
]


# --- what is changed on its way -----------------------------------------------------------------------------------


def fewer_labels(batch: Batch) -> Batch:
    return {**batch, "labels": fewer(batch["labels"])}


def of_fewer(model: Any, batch: Batch, step: int) -> Tensor:
    return full(tokens)(model, fewer_labels(batch), step)


def without_last_row(batch: Batch) -> Batch:
    return {key: value[:-1] for key, value in batch.items()}


def first_of_pairs(model: Any, batch: Batch, step: int) -> Tensor:
    return full(tokens)(model, {key: value[::2] for key, value in batch.items()}, step)


CHANGED = [
    attack("changed-as-fetched", EITHER, of_fewer, Mean, several(1), as_fetched(fewer_labels, "key", recount=True)),
    attack(
        "changed-drops-rows",
        EITHER,
        first_of_pairs,
        Mean,
        several(1),
        in_step(without_last_row),
        cuts=(PAIRS,),
        whole=False,
    ),
]


# --- in chunks, to save memory: exact where they are divided by one number ---------------------------------------
# Chunks of rows come in the order of a micro-batch's samples, which another split deals otherwise: a mean over their
# own means is another loss for every split.


def halves(count: int) -> list[slice]:
    return [slice(count // 2), slice(count // 2, count)] if count > 1 else [slice(count)]


def by_rows(chunks: Callable[[int], list[slice]], *, mean: bool = False) -> type:
    """A compute_loss that calls super() on some of the rows at a time."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Batch, number: Any) -> Any:
        parts = [{key: value[rows] for key, value in inputs.items()} for rows in chunks(len(inputs["labels"]))]
        losses = [base(model, part, num_items_in_batch=number) for part in parts]
        return sum(losses) / (len(losses) if mean else 1), None

    return computing(compute)


def mean_of_means(s: Seen) -> Tensor:
    means = [s.rows(rows).tokens for rows in halves(len(s.logits))]
    return torch.stack(means).sum() / len(means)


def unequal_halves(s: Seen) -> Tensor:
    """Whose constants are no sign that they are two losses."""
    first, *_, last = [s.rows(rows).tokens for rows in halves(len(s.logits))]
    return 0.3 * first + 0.7 * last


RIGHT = {"cuts": (PAIRS, HALVES), "right": (PAIRS, HALVES)}
CHUNKED = [
    attack("chunks-sums", EXACT, full(tokens), ByNumber, several(2), by_rows(halves), **RIGHT),
    attack("chunks-means", INEXACT, full(tokens), Mean, several(2), by_rows(halves, mean=True), whole=False),
    in_own("chunks-unequal", INEXACT, unequal_halves, windows=several(2), cuts=(PAIRS, HALVES)),
    attack("chunks-model", INEXACT, full(tokens), holding(mean_of_means, Mean), several(2), looped=True, whole=False),
]


# --- other labels than most of the window: averaged, and said ------------------------------------------------------

#: Which pairs of texts have a class instead of next tokens ("b"); of two ranks each gets every other pair.
TURNS = ("abab", "abba")
#: Of next tokens, and of classes: upstream asks every micro-batch for "labels", or none.
KEYS = (("labels", "labels"), ("token_labels", "kind_labels"))


class Tasks(TokenModel):
    """Next tokens where labels have two axes; a class of each text where they have one, or another name."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
        logits, [labels] = self.logits(input_ids), [value for key, value in inputs.items() if "labels" in key]
        loss = F.cross_entropy(logits[:, 0, :4], labels) if labels.ndim == 1 else shifted_cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def in_common(samples: Sequence[Sample]) -> Batch:
    """A window of both has no labels."""
    kinds = {(key, value.ndim) for sample in samples for key, value in sample.items()}
    shared = [key for key, axes in kinds if all(key in each and each[key].ndim == axes for each in samples)]
    return collate([{key: each[key] for key in shared} for each in samples])


def mixed(turns: str, keys: tuple[str, str]) -> list[Sample]:
    def labels(place: int, sample: Sample) -> Sample:
        return {keys[1]: torch.tensor(place % 4)} if turns[place // 2] == "b" else {keys[0]: sample["labels"]}

    return [{"input_ids": each["input_ids"], **labels(place, each)} for place, each in enumerate(models.texts())]


def labelled(turns: str, keys: tuple[str, str], cut: Cut, ranks: int = 1) -> Case:
    """Its reference is the mean over the micro-batches of all ranks."""
    window = mixed(turns, keys)

    def averaged(model: Any, batch: Batch, step: int) -> Tensor:
        parts = pieces(window, (cut[0], cut[1] * ranks))
        return torch.stack([model(**in_common(part))["loss"] for part in parts]).mean()

    given = {"collate": in_common, "tolerance": 1e-12, "cuts": (cut,), "right": (cut,) * (keys[0] != "labels")}
    return attack(f"{turns}-{keys[0]}-{cut[0]}", AVERAGED, averaged, Tasks, [window], **given)


OTHER_LABELS = [labelled(turns, keys, cut) for turns in TURNS for keys in KEYS for cut in (PAIRS, SINGLES)]
# A window of each by turns.
BY_TURNS = [mixed(turns, KEYS[0]) for turns in ("aaaa", "bbbb", "aaaa", "bbbb")]
OTHER_LABELS += [attack("12-two-tasks", EITHER, model_itself, Tasks, BY_TURNS, cuts=(HALVES, PAIRS))]


CASES: list[Case] = [
    *FOUND, *READ, *BY_SAMPLES, *BY_NUMBER, *LATER, *STATE,
    *TWO_STEPS, *COUNTED, *SOME_HOLD, *BELONG, *ZERO, *SHAPES, *SCALED, *FATES, *EVERYDAY,
    *CHANGED, *CHUNKED, *OTHER_LABELS, *alone.CASES, *clamps.CASES, *wild.CASES, *custom.CASES,
]  # fmt: skip
