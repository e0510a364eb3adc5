"""One loss, observed on one window: how its terms are reduced, whether it is exact, and how often it is run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_accum_fix.counting.rules import matching_rules
from hf_accum_fix.learning.agreement import agree
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, How, LossContract, Reduction
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.learning.observe import observe
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text

Batch = Mapping[str, Any]
CLASSES = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


class Rows(nn.Module):
    """Four classes of three numbers; its loss is another's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


Loss = Callable[[Rows, Batch, "Tensor | None"], Tensor]


def window(*targets: int) -> list[dict[str, Tensor]]:
    """Micro-batches of four rows, so many of them with a target."""
    g, found = torch.Generator().manual_seed(3), []
    for count in targets:
        among = torch.arange(4) < count
        found.append(
            {
                "x": torch.randn(4, 3, generator=g, dtype=torch.float64),
                "labels": torch.randint(0, 4, (4,), generator=g).masked_fill(~among, -100),
                "mask": among.long(),
            }
        )
    return found


def ce(m: Rows, b: Batch, n: Tensor | None = None, **given: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]), b["labels"], **given)


def by_number(m: Rows, b: Batch, n: Tensor | None = None) -> Tensor:
    """As the library's heads divide."""
    return ce(m, b) if n is None else ce(m, b, reduction="sum") / n


def contrastive(m: Rows, b: Batch, n: Tensor | None = None) -> Tensor:
    """In-batch negatives."""
    outputs = m(b["x"])
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def observed(loss: Loss, setting: Setting, batches: list[dict[str, Tensor]]) -> tuple[LossContract, int]:
    """The contract, and how often the loss was run."""
    model, runs = Rows(), 0

    def call(inputs: Batch, number: Tensor | None) -> Tensor:
        nonlocal runs
        runs += 1
        return loss(model, inputs, number)

    return observe(LossRun(call, model, torch.device("cpu")), batches, setting), runs


MEAN, NUMBER, PLAIN = Reduction.MEAN, Reduction.NUMBER, Reduction.PLAIN
TARGETS = "'labels' other than -100"
SHOWN, HANDED = Setting(handed="once"), Setting(handed="all", hands_number=True)
OWN = Setting(handed="all", custom=True)

#: The loss, its setting; reduction, and the rule of the first count, without which it is not exact.
TABLE: dict[str, tuple[Loss, Setting, Reduction, str]] = {
    "cross entropy": (ce, Setting(), MEAN, TARGETS),
    "samples": (lambda m, b, n: m(b["x"]).square().sum(1).mean(), Setting(), MEAN, "samples"),
    "masked mean by hand": (
        lambda m, b, n: (m(b["x"]).square().sum(1) * b["mask"]).sum() / b["mask"].sum(),
        Setting(),
        MEAN,
        TARGETS,
    ),
    "a head that may divide by the number": (by_number, SHOWN, NUMBER, TARGETS),
    "one that rounds it to 16 bits": (
        lambda m, b, n: by_number(m, b, None if n is None else n.bfloat16()),
        SHOWN,
        NUMBER,
        TARGETS,
    ),
    "one that cannot do without": (
        lambda m, b, n: ce(m, b, reduction="sum") / n,  # type: ignore[operator]
        HANDED,
        NUMBER,
        TARGETS,
    ),
    "one that cuts it to an integer": (
        lambda m, b, n: ce(m, b, reduction="sum") / int(n),  # type: ignore[arg-type]
        HANDED,
        NUMBER,
        TARGETS,
    ),
    "a trainer that scales itself": (by_number, OWN, NUMBER, TARGETS),
    "flooding": (lambda m, b, n: (ce(m, b) - 0.1).abs() + 0.1, Setting(), PLAIN, ""),
    "two means": (lambda m, b, n: ce(m, b) + 0.1 * m(b["x"]).square().sum(1).mean(), Setting(), MEAN, TARGETS),
    "learnt factors": (lambda m, b, n: (-m.scale).exp() * ce(m, b) + m.scale, Setting(), MEAN, TARGETS),
}
#: Two micro-batches joined, two rows of four alone; one more with another number, or to see whether it divides.
FORWARDS = 7


@pytest.mark.parametrize("name", TABLE)
def test_how_a_loss_is_reduced(name: str) -> None:
    loss, setting, reduction, rule = TABLE[name]
    found, runs = observed(loss, setting, window(3, 1))
    assert found.reduction is reduction, found.reason
    assert (str(found.items) if found.items else "") == rule
    assert found.exact == bool(rule), found.doubt
    # torch before 2.5 shows a shape by a gradient, which needs a run that keeps something for one. That is not held, so
    # that a part of the joined batch is run again as a whole; if each has a number of its own, it is so everywhere.
    older = not hasattr(torch.ones((), requires_grad=True).neg().grad_fn, "_input_metadata")
    forwards = FORWARDS + (setting.handed != "none")
    assert runs == forwards or (older and runs == 2 * (forwards + (setting.handed != "all")))


@pytest.mark.parametrize(
    ("loss", "terms"),
    [
        (lambda m, b, n: ce(m, b, weight=CLASSES), [How.MEAN]),
        (lambda m, b, n: ce(m, b, reduction="sum"), [How.SUM]),
        (lambda m, b, n: ce(m, b) + 0.01 * m.linear.weight.square().sum(), [How.MEAN, How.CONSTANT]),
    ],
    ids=["class weights", "sum", "penalty"],
)
def test_how_each_term_is_reduced(loss: Loss, terms: list[How]) -> None:
    found, _ = observed(loss, Setting(), window(3, 1))
    assert [each.how for each in found.terms] == terms


def test_a_sum_that_is_divided_by_a_number_among_the_inputs_is_said() -> None:
    batches = [{**batch, "ntokens": 2} for batch in window(4, 4)]
    found, _ = observed(lambda m, b, n: ce(m, b, reduction="sum") / b["ntokens"], Setting(), batches)
    assert not found.exact and "'ntokens'" in found.doubt


def test_samples_that_are_coupled_are_named() -> None:
    found, _ = observed(contrastive, Setting(), window(3, 1))
    assert found.reduction is PLAIN and not found.exact
    assert found.coupled and "in-batch negatives" in found.reason


def test_a_window_without_a_target_shows_nothing() -> None:
    found, _ = observed(ce, Setting(), window(0, 0))
    assert not found.conclusive and not found.exact


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("targets", [(1, 0), (0, 1), (1,), (1, 0, 0)], ids=str)
def test_one_target_in_a_window_makes_no_sum_of_a_mean_over_at_least_one(
    targets: tuple[int, ...], is_read: bool
) -> None:
    def masked(m: Rows, b: Batch, n: Tensor | None) -> Tensor:
        count = int(b["mask"].sum()) if is_read else len(b["mask"].nonzero())
        return (m(b["x"]).square().sum(1) * b["mask"]).sum() / max(count, 1)

    found, _ = observed(masked, Setting(), window(*targets))
    assert found.conclusive == found.exact == is_read
    assert not is_read or [each.how for each in found.terms] == [How.MEAN]


def test_a_loss_that_takes_a_gradient_itself_is_run_once_more() -> None:
    """What a backward would need is forgotten as a rule."""

    def penalised(m: Rows, b: Batch, n: Tensor | None) -> Tensor:
        x = b["x"].clone().requires_grad_()
        outputs = m(x)
        (grad,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        return F.cross_entropy(outputs, b["labels"]) + 0.1 * grad.square().sum(1).mean()

    found, runs = observed(penalised, Setting(), window(3, 1))
    assert runs == 2 * FORWARDS
    assert [each.how for each in found.terms] == [How.MEAN, How.MEAN] and found.exact


# --- a window whose observed samples list no target, or in part none, is not taken for a sum ------------------------


class Boxes(nn.Module):
    """The sum over boxes, and over queries without one, by the number of boxes, or by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        boxes = torch.cat([each["class_labels"] for each in labels])
        values = torch.cat([boxes.double(), pixel_values.square().flatten()])
        return (self.scale * values).sum() / max(len(boxes), 1)


def batch(*counts: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(len(counts), 3, generator=generator, dtype=torch.float64)
    return {"pixel_values": values, "labels": [{"class_labels": torch.arange(1, 1 + count)} for count in counts]}


@pytest.mark.parametrize(
    ("counts", "conclusive"), [((2, 0), True), ((1, 0), True), ((3, 1, 0), True), ((0, 0), False)], ids=str
)
def test_boxes_that_are_missing_make_no_sum(counts: tuple[int, ...], conclusive: bool) -> None:
    model = Boxes()

    def call(inputs: Any, number: Any) -> Tensor:
        return model(**inputs)

    found = observe(LossRun(call, model, torch.device("cpu")), [batch(*counts)], Setting())
    assert found.reduction is Reduction.MEAN and str(found.items) == "rows of 'class_labels'"
    assert found.conclusive == conclusive and (found.reason == NO_TARGET_SEEN) != conclusive


@pytest.mark.parametrize(
    ("box", "query"), [(1.0, 0.1), (1.0, 0.4), (0.9, 1.2345), (2.0, 1 / 3)], ids=lambda each: f"{each:.4g}"
)
@pytest.mark.parametrize("rounding", [0.0, 3e-8, -3e-8])
def test_factors_of_a_mix_are_the_same_on_ranks_that_round_apart(box: float, query: float, rounding: float) -> None:
    """Otherwise ranks would seem to train different losses."""
    batches = [batch(3, 1, 0), batch(3), batch(1, 0)]
    counts = [box * sum(map(_boxes, each["labels"])) + query * len(each["labels"]) for each in batches]
    [(rule, ratio)] = matching_rules([count * (1 + rounding) for count in counts], batches).items()
    assert ratio == 1.0
    assert [factor for factor, _ in rule.mix] == [float(f"{box:.6g}"), float(f"{query:.6g}")]
    assert [str(each) for _, each in rule.mix] == ["rows of 'class_labels'", "samples"]


def _boxes(target: dict[str, Tensor]) -> int:
    return len(target["class_labels"])


def rounding_apart(rounding: float) -> LossContract:
    """Of a trainer's own sum over the number, whose last digits move with labels that it does not use."""
    scale = nn.Parameter(torch.ones(()))

    def call(inputs: Batch, number: Tensor | None) -> Tensor:
        assert number is not None
        value = scale * inputs["input_ids"][:, 1:].float().sqrt()
        summed = (value * (inputs["labels"][:, 1:] != -100)).sum()
        return summed * (1 + rounding * bool((inputs["labels"][:, 0] != -100).any())) / number

    batches = [collate(text()[start : start + 2]) for start in range(0, 8, 2)]
    return observe(LossRun(call, nn.Linear(1, 1), torch.device("cpu")), batches, OWN)


@pytest.mark.parametrize("rounding", [0.0, 1.2e-7, -1.2e-7, 1e-6])
def test_ranks_whose_losses_round_apart_observe_the_same(rounding: float) -> None:
    """22.1141815 on one rank and 22.1141796 on the other are one loss in float32."""
    here, there = rounding_apart(0.0), rounding_apart(rounding)
    agreed = agree([here, there])
    assert agreed.items is not None and agreed.items.shift and there.items == here.items


def test_nothing_of_its_forwards_stays_alive() -> None:
    """An operation that saves its own result, one number a row, which is small enough to be kept with the counts."""
    made: list[weakref.ref[Any]] = []

    def curved(m: Rows, b: Batch, n: Tensor | None = None) -> Tensor:
        score = torch.tanh(m(b["x"])[:, 0])
        made.append(weakref.ref(score.untyped_storage()))
        return (score - 1).square().mean()

    observed(curved, Setting(), window(4, 4))
    gc.collect()
    assert made and not [each for each in made if each() is not None]
