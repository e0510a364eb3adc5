"""Micro-batches weighed one by one, beside the gradient and the loss of the whole batch worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.counting.items import Items, ZeroWeightBatch
from hf_accum_fix.learning.contract import How, LossContract, Reduction, TermSpec
from hf_accum_fix.reading.loss_graph import read
from hf_accum_fix.reading.values import capture
from hf_accum_fix.weighing.part import Part
from hf_accum_fix.weighing.weigh import Weighed, weigh

TARGETS, MASKED, SAMPLES = Items(("labels",)), Items(("mask",), ignore_index=0), Items()
CLASSES = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)

Batch = Mapping[str, Tensor]


class Model:
    """Four classes of three numbers, and a number of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        self.scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def logits(self, batch: Batch) -> Tensor:
        return batch["x"] @ self.weight.T

    def each(self, batch: Batch) -> Tensor:
        """A number for each row."""
        return self.logits(batch).square().sum(1)

    def ce(self, batch: Batch, reduction: str = "mean", weight: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.logits(batch), batch["labels"], weight, reduction=reduction)

    def squares(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.logits(batch)[:, 0], batch["y"])

    def masked(self, batch: Batch) -> Tensor:
        """The mean over a mask by hand: 0 / 0 over an empty one."""
        return (self.each(batch) * batch["mask"]).sum() / batch["mask"].sum()


def micro_batch(rows: int, targets: int, seed: int) -> dict[str, Tensor]:
    """The targets, and the mask, are the first of the rows."""
    g = torch.Generator().manual_seed(seed)
    among = torch.arange(rows) < targets
    return {
        "x": torch.randn(rows, 3, generator=g, dtype=torch.float64),
        "labels": torch.randint(0, 4, (rows,), generator=g).masked_fill(~among, -100),
        "y": torch.randn(rows, generator=g, dtype=torch.float64),
        "mask": among.double(),
    }


#: Rows, and targets among them.
WINDOW = [micro_batch(*size, seed) for seed, size in enumerate([(3, 3), (2, 1), (4, 0), (5, 4)])]
WHOLE = {key: torch.cat([batch[key] for batch in WINDOW]) for key in WINDOW[0]}


def spec(name: str, factors: str = "", place: int | None = 0, **given: Any) -> TermSpec:
    """A term: ``/`` divides, ``*`` multiplies, ``~`` is a learnt factor; ``?`` after the name: it cannot be read."""
    flags = [(each == "/", each == "~") for each in factors]
    return TermSpec((f"{name.rstrip('?')}Backward0", not name.endswith("?"), *flags), place, **given)


@dataclass(frozen=True)
class Case:
    """A loss of a micro-batch, how its terms are reduced, and what it is of the whole batch.

    Attributes:
        loss: of a micro-batch; also handed the number.
        terms: of its contract.
        whole: of all micro-batches, as one, where that is not the same loss.
        reduction: of its contract.
        hands: the number is ours; else the trainer's own.
        handed: what the loss is handed on one rank, of which each of several has its part; None: n_mean.
    """

    name: str
    loss: Callable[[Model, Batch, Tensor], Tensor]
    terms: tuple[TermSpec, ...]
    whole: Callable[[Model, Batch], Tensor] | None = None
    reduction: Reduction = Reduction.MEAN
    handed: float | None = None
    hands: bool = True

    def of_whole(self, model: Model, batch: Batch | None = None) -> Tensor:
        """What it is to come to; a plain mean is that of the micro-batches' losses."""
        if self.reduction is Reduction.PLAIN:
            return torch.stack([self.loss(model, each, torch.ones(())) for each in WINDOW]).mean()
        batch = WHOLE if batch is None else batch
        return self.loss(model, batch, torch.ones(())) if self.whole is None else self.whole(model, batch)

    @property
    def contract(self) -> LossContract:
        numbered = any(each.how is How.NUMBER for each in self.terms)
        items = TARGETS if numbered else next((each.rule for each in self.terms if each.rule is not None), SAMPLES)
        return LossContract(
            self.reduction,
            None if self.reduction in (Reduction.SUM, Reduction.PLAIN) else items,
            terms=self.terms,
            hands_number=self.hands,
            dtype=torch.float64,
        )


CE = spec("NllLoss", "/", counts=(0,), rules={TARGETS: 1.0})
SQUARES = spec("MseLoss", "*/", counts=(1,), rules={SAMPLES: 1.0})
BY_NUMBER = spec("NllLoss", "/", how=How.NUMBER, counts=(0,))
BY_HAND = spec("Sum", "/", counts=(0,), rules={MASKED: 1.0})

CASES = [
    Case("one mean", lambda m, b, n: m.ce(b), (CE,)),
    Case(
        "a number of one mean",
        lambda m, b, n: 0.5 * m.ce(b),
        (replace(CE, shape=spec("NllLoss", "*/").shape, counts=(1,)),),
    ),
    Case(
        "class weights, which no rule counts",
        lambda m, b, n: m.ce(b, weight=CLASSES),
        (replace(CE, rules={}, counted=(2.5,)),),
    ),
    Case("by hand, without items in one", lambda m, b, n: m.masked(b), (BY_HAND,)),
    Case(
        "by hand, clamped",
        lambda m, b, n: (m.each(b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
        (BY_HAND,),
        lambda m, b: m.masked(b),
    ),
    Case(
        "by hand, which no rule counts",
        lambda m, b, n: (m.each(b) * b["mask"]).sum() / (0.3 * b["mask"].sum()),
        (replace(BY_HAND, rules={}, counted=(0.9,)),),
        lambda m, b: m.masked(b) / 0.3,
    ),
    Case(
        "elements, of which a rule counts half",
        lambda m, b, n: m.logits(b)[:, :2].square().mean(),
        (spec("Mean", "/", counts=(0,), rules={SAMPLES: 2.0}),),
    ),
    Case("two means", lambda m, b, n: m.ce(b) + 0.1 * m.squares(b), (CE, SQUARES)),
    Case("two means, one by hand", lambda m, b, n: m.masked(b) - m.squares(b), (BY_HAND, SQUARES)),
    Case(
        "rows of a stack",
        lambda m, b, n: torch.stack([each.square().sum() for each in m.logits(b)]).mean(),
        (spec("Mean", "/", counts=(0,), rules={SAMPLES: 1.0}),),
        lambda m, b: m.each(b).mean(),
    ),
    Case(
        "smoothed",
        lambda m, b, n: F.cross_entropy(m.logits(b), b["labels"], label_smoothing=0.1),
        (
            replace(CE, shape=spec("NllLoss", "*/").shape, counts=(1,)),
            spec("Sum", "*/", counts=(1,), rules={TARGETS: 1.0}),
        ),
    ),
    Case(
        "learnt factors",
        lambda m, b, n: (-m.scale).exp() * m.ce(b) + m.scale + m.squares(b) / (2 * m.scale**2),
        (
            spec("NllLoss", "~/", counts=(1,), rules={TARGETS: 1.0}),
            TermSpec(("AccumulateGrad", False), how=How.CONSTANT),
            TermSpec(("MseLossBackward0", True, (True, True), (True, False)), counts=(1,), rules={SAMPLES: 1.0}),
        ),
    ),
    Case(
        "a penalty on parameters",
        lambda m, b, n: m.ce(b) + 0.01 * m.weight.square().sum(),
        (CE, spec("Sum", "*", how=How.CONSTANT)),
    ),
    Case("a sum", lambda m, b, n: m.ce(b, "sum"), (spec("NllLoss", how=How.SUM),), reduction=Reduction.SUM),
    Case("a sum beside a mean", lambda m, b, n: m.ce(b) + 0.1 * m.each(b).sum(), (CE, spec("Sum", "*", how=How.SUM))),
    Case(
        "the number handed in", lambda m, b, n: m.ce(b, "sum") / n, (BY_NUMBER,), lambda m, b: m.ce(b), Reduction.NUMBER
    ),
    Case(
        "the number handed in, by hand",
        lambda m, b, n: (m.each(b) * b["mask"]).sum() / n,
        (spec("Sum", "/", how=How.NUMBER, counts=(0,)),),
        lambda m, b: m.masked(b),
        Reduction.NUMBER,
    ),
    Case("its integer", lambda m, b, n: m.ce(b, "sum") / int(n), (BY_NUMBER,), lambda m, b: m.ce(b), Reduction.NUMBER),
    Case(
        "the number beside a mean of its own",
        lambda m, b, n: m.ce(b, "sum") / n + 0.1 * m.squares(b),
        (BY_NUMBER, SQUARES),
        lambda m, b: m.ce(b) + 0.1 * m.squares(b),
        Reduction.NUMBER,
    ),
    Case(
        "the number handed in, by which a trainer scales itself",
        lambda m, b, n: m.ce(b, "sum") / n,
        (BY_NUMBER,),
        lambda m, b: m.ce(b),
        Reduction.NUMBER,
        handed=8.0,
        hands=False,
    ),
    Case(
        "a router's loss",
        lambda m, b, n: m.squares(b) + 0.02 * m.each(b).sum().sqrt(),
        (replace(SQUARES, shape=spec("MseLoss", "/").shape, counts=(0,)), spec("Sqrt?", "*", how=How.ROUTER)),
        lambda m, b: m.squares(b) + 0.02 * torch.stack([m.each(each).sum().sqrt() for each in WINDOW]).mean(),
    ),
    Case("a root", lambda m, b, n: m.squares(b).sqrt(), (spec("Sqrt?", how=How.PLAIN),), None, Reduction.PLAIN),
]


def named(name: str) -> Case:
    return next(each for each in CASES if each.name == name)


def gradients(model: Model) -> list[Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in (model.weight, model.scale)]


def run_one(case: Case, model: Model, batch: Batch, part: Part) -> Weighed:
    predicted = {rule: rule.count(batch) for rule in part.contract.rules}
    with capture(None, **part.contract.captures) as captured:
        loss = case.loss(model, batch, part.number)
    return weigh(loss, part, batch, predicted, captured)


def part_of(case: Case, micro_batches: int, world_size: int, whole: Batch = WHOLE, **given: Any) -> Part:
    totals = {rule: rule.count(whole) for rule in case.contract.rules} or {SAMPLES: torch.ones((), dtype=torch.float64)}
    return Part(case.contract, totals, micro_batches, world_size, **given)


def trained(case: Case, ranks: int, *, by_engine: bool = False, is_corrected: bool = True) -> tuple[Model, float]:
    """Gradients and the logged loss of a window of four micro-batches, on so many ranks one after the other.

    Args:
        case: what is trained.
        ranks: W; each holds as many of the micro-batches.
        by_engine: the engine divides by G.
        is_corrected: in the end by what was counted otherwise than predicted.
    """
    model, steps = Model(), len(WINDOW) // ranks
    divided = steps if by_engine else 1
    parts = [part_of(case, steps, ranks, is_corrected=is_corrected, engine_divisor=divided) for _ in range(ranks)]
    for part in parts:
        if case.handed is not None:
            part.number = torch.tensor(case.handed / ranks, dtype=torch.float64)
    value = 0.0
    for at, batch in enumerate(WINDOW):
        weighed = run_one(case, model, batch, parts[at % ranks])
        assert weighed.loss.ndim == weighed.value.ndim == 0 and not weighed.value.requires_grad
        (weighed.loss / divided / ranks).backward()
        value += float(weighed.value) / ranks
    assert not any(part.changed for part in parts)
    seen, predicted = torch.stack([part.summed() for part in parts]).sum(0).tolist()
    times = predicted / seen if seen and is_corrected else 1.0
    for each in (model.weight, model.scale):
        if each.grad is not None:
            each.grad.mul_(times)
    return model, value * times


@pytest.mark.parametrize("by_engine", [False, True], ids=["by us", "by the engine"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_window_has_the_gradient_and_the_loss_of_the_whole(case: Case, ranks: int, by_engine: bool) -> None:
    model, value = trained(case, ranks, by_engine=by_engine)
    whole = Model()
    loss = case.of_whole(whole)
    loss.backward()
    for here, there in zip(gradients(model), gradients(whole), strict=True):
        assert torch.allclose(here, there, rtol=1e-12, atol=1e-13)
    assert value == pytest.approx(float(loss.detach()), rel=1e-12)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.reduction is not Reduction.PLAIN], ids=lambda case: case.name
)
def test_plain_averaging_would_be_wrong(case: Case) -> None:
    """Or the table would show nothing."""
    plain, whole = Model(), Model()
    for batch in WINDOW:
        loss = case.loss(plain, batch, torch.tensor(14.0 / 4)) / len(WINDOW)
        if torch.isfinite(loss):
            loss.backward()
    case.of_whole(whole).backward()
    off = [
        torch.dist(*each) / each[1].norm().clamp(min=1e-3) for each in zip(*map(gradients, (plain, whole)), strict=True)
    ]
    assert max(off) > 1e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_micro_batch_that_is_the_global_batch_is_as_it_was_to_the_bit(case: Case) -> None:
    model, own = Model(), Model()
    batch, part = WINDOW[0], part_of(case, 1, 1)
    part.number = number = torch.tensor(3.0, dtype=torch.float64)
    weighed = run_one(case, model, batch, part)
    weighed.loss.backward()
    loss = case.loss(own, batch, number)
    loss.backward()
    assert torch.equal(weighed.loss, loss) and torch.equal(weighed.value, loss.detach())
    assert all(torch.equal(*each) for each in zip(gradients(model), gradients(own), strict=True))


@pytest.mark.parametrize("case", [named("one mean"), named("two means")], ids=lambda case: case.name)
def test_one_micro_batch_whose_engine_divides_by_more(case: Case) -> None:
    """The short window at the end of an epoch, under accelerate's own division."""
    model, own = Model(), Model()
    batch = WINDOW[0]
    part = part_of(case, 1, 1, batch, engine_divisor=3)
    weighed = run_one(case, model, batch, part)
    (weighed.loss / 3).backward()
    loss = case.loss(own, batch, part.number)
    loss.backward()
    assert torch.allclose(model.weight.grad, own.weight.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert float(weighed.value) == pytest.approx(float(loss.detach()), rel=1e-12)


# --- micro-batches without items, and those that count nothing -------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["one mean", "by hand, without items in one", "class weights, which no rule counts", "a sum"]
)
@pytest.mark.parametrize("place", range(4))
def test_only_what_counts_leaves_a_gradient(name: str, place: int) -> None:
    """The third has no items: its mean is 0 / 0, and zeros are what it adds, which touch every parameter."""
    case, model = named(name), Model()
    weighed = run_one(case, model, WINDOW[place], part_of(case, 4, 1))
    weighed.loss.backward()
    assert model.weight.grad is not None and bool(model.weight.grad.isfinite().all())
    assert bool(model.weight.grad.any()) == (place != 2) == bool(weighed.value)


WEIGHTLESS = [case for case in CASES if case.reduction is not Reduction.PLAIN and "router" not in case.name]


@pytest.mark.parametrize("case", WEIGHTLESS, ids=lambda case: case.name)
def test_a_weightless_micro_batch_adds_no_items(case: Case) -> None:
    """Terms that are no mean over items are those of any other micro-batch."""
    model, part = Model(), part_of(case, 4, 1)
    weighed = run_one(case, model, ZeroWeightBatch(WINDOW[0]), part)
    weighed.loss.backward()
    wanted = Model()
    same = [each for each in case.terms if each.how is How.CONSTANT]
    for each in same:
        loss = wanted.scale if each.shape[0] == "AccumulateGrad" else 0.01 * wanted.weight.square().sum()
        (loss / 4).backward()
    for here, there in zip(gradients(model), gradients(wanted), strict=True):
        assert torch.allclose(here, there, rtol=1e-12, atol=1e-15)
    assert bool(weighed.value) == bool(same)
    assert not part.summed()[0]


def test_the_positions_of_a_router_are_not_compared_in_a_weightless_micro_batch() -> None:
    """Its rule counts none there, whatever the loss is over."""
    router = spec("Mean", "*/", how=How.ROUTER, counts=(1,), rules={SAMPLES: 1.0})
    case = Case("a router's loss without a row", lambda m, b, n: m.ce(b) + 0.02 * m.each(b)[1:].mean(), (CE, router))
    changed = []
    for batch in (WINDOW[0], ZeroWeightBatch(WINDOW[0])):
        part = part_of(case, 4, 1)
        run_one(case, Model(), batch, part)
        changed.append(part.changed)
    assert changed == ["MeanBackward0 is not over every position, as it was in the observed batch", ""]


# --- what is held against the prediction -----------------------------------------------------------------------------


def after_window(case: Case) -> Part:
    part = part_of(case, len(WINDOW), 2)
    for batch in WINDOW:
        run_one(case, Model(), batch, part)
    return part


@pytest.mark.parametrize(
    ("name", "seen", "predicted"),
    [
        ("one mean", 8.0, 8.0),
        ("by hand, without items in one", 8.0, 8.0),
        ("by hand, clamped", 8.0, 8.0),
        ("elements, of which a rule counts half", 28.0, 28.0),
        ("rows of a stack", 14.0, 14.0),
        ("by hand, which no rule counts", 2.4, 3.6),
        ("the number handed in", 0.0, 0.0),
        ("two means", 0.0, 0.0),
        ("a sum", 0.0, 0.0),
    ],
)
def test_counts_that_were_seen_and_predicted(name: str, seen: float, predicted: float) -> None:
    """Several counts are no one number to correct by."""
    case = named(name)
    assert after_window(case).summed().tolist() == pytest.approx([seen, predicted], rel=1e-12)


def leaves_out(m: Model, b: Batch, n: Tensor) -> Tensor:
    """The labels 3 are masked on the way."""
    return F.cross_entropy(m.logits(b), b["labels"].masked_fill(b["labels"] == 3, -100)) + 0.1 * m.squares(b)


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        (named("one mean"), None),
        (named("two means"), False),
        (replace(named("two means"), loss=leaves_out), True),
        (named("smoothed"), False),
    ],
    ids=["one count", "two as predicted", "two, one of them not", "two terms with one count"],
)
def test_terms_that_divide_by_other_items_than_predicted(case: Case, broken: bool | None) -> None:
    found = after_window(case).broken()
    assert (None if found is None else bool(found)) == broken


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda m, b, n: m.ce(b) + m.squares(b), "MseLossBackward0, NllLossBackward0"),
        (lambda m, b, n: 2 * m.ce(b), "NllLossBackward0"),
        (lambda m, b, n: m.ce(b).sqrt(), "SqrtBackward0"),
        (lambda m, b, n: m.ce(b).detach(), "none with a gradient"),
    ],
    ids=["one more", "a coefficient", "a root", "detached"],
)
def test_another_loss_than_the_observed_one_is_left_as_the_plain_mean(
    loss: Callable[[Model, Batch, Tensor], Tensor], names: str
) -> None:
    case, model, own = replace(named("one mean"), loss=loss), Model(), Model()
    part = part_of(case, 4, 1)
    weighed = run_one(case, model, WINDOW[0], part)
    assert part.changed == f"its loss has other terms than the observed one: {names}"
    assert torch.allclose(weighed.loss, loss(own, WINDOW[0], torch.ones(())) / 4, rtol=1e-15)


def test_a_term_that_is_missing_now_and_then_is_pooled_over_the_micro_batches_that_hold_it() -> None:
    case = named("two means")

    def without_targets(m: Model, b: Batch, n: Tensor) -> Tensor:
        return case.loss(m, b, n) if bool((b["labels"] != -100).any()) else 0.1 * m.squares(b)

    model, value = trained(replace(case, loss=without_targets), 1)
    whole = Model()
    loss = case.of_whole(whole)
    loss.backward()
    assert torch.allclose(model.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]
    assert value == pytest.approx(float(loss.detach()), rel=1e-12)


def test_where_nothing_is_corrected_a_mean_is_weighed_as_predicted() -> None:
    """By class weights, which the rule does not see."""
    case = replace(named("one mean"), loss=lambda m, b, n: m.ce(b, weight=CLASSES))
    model, _ = trained(case, 1, is_corrected=False)
    wanted = Model()
    for batch in WINDOW:
        if count := int((batch["labels"] != -100).sum()):
            (wanted.ce(batch, weight=CLASSES) * count / 8).backward()
    assert torch.allclose(model.weight.grad, wanted.weight.grad, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_fewer_digits_is_weighed_in_float32_and_handed_over_as_a_tensor_of_its_own(
    dtype: torch.dtype,
) -> None:
    case = replace(named("one mean"), loss=lambda m, b, n: m.ce(b).to(dtype))
    model, part = Model(), part_of(case, 4, 1)
    part = replace(part, contract=replace(case.contract, dtype=dtype))
    with capture(None, **part.contract.captures) as captured:
        loss = case.loss(model, WINDOW[0], part.number)
    before = float(loss.detach())
    predicted = {TARGETS: TARGETS.count(WINDOW[0])}
    weighed = weigh(loss, part, WINDOW[0], predicted, captured)
    assert weighed.loss.dtype is torch.float32 and float(loss.detach()) == before and weighed.loss is not loss
    assert float(weighed.loss.detach()) == pytest.approx(before * 3 / 8, rel=1e-6)


def test_the_shapes_of_the_table_are_those_of_its_losses() -> None:
    for case in CASES:
        terms = read(case.loss(Model(), WINDOW[0], torch.tensor(3.0)))
        assert [term.shape for term in terms] == [each.shape for each in case.terms], case.name
