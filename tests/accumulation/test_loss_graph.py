"""A loss, and the terms that its graph tells: the leaf, what it is divided and multiplied by, and what cannot be read.

A term is written as its leaf and its factors from the loss down: ``Mean *0.1 /12`` is a tenth of a mean over twelve
elements. ``/[n]`` is a count that a leaf divides by itself; ``~`` marks a factor that is learnt, ``?`` a leaf that
cannot be read, ``#3`` one that has put three single numbers together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel.distributed import _DDPSink
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_accum_fix.reading import loss_graph
from hf_accum_fix.reading.loss_graph import Term, read
from hf_accum_fix.reading.nodes import ROWS


@pytest.fixture(autouse=True)
def fewer_terms_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 4,097 terms takes minutes in torch 2.2."""
    monkeypatch.setattr(loss_graph, "_MOST_TERMS", 64)


#: Six rows of four classes; two rows are no target.
ROWS_, CLASSES = 6, 4
TARGETS = torch.tensor([0, 1, -100, 3, 2, -100])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
VALUES = torch.linspace(-1, 1, ROWS_, dtype=torch.float64)


class Learnt:
    """What a loss is made of: logits that are learnt, and a number and a pair of numbers that are."""

    # DistributedDataParallel's function asks for them.
    _ddp_sink_clone = True
    reducer, static_graph = None, False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(ROWS_, CLASSES, generator=generator, dtype=torch.float64, requires_grad=True)
        self.scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        self.pair = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    @property
    def ce(self) -> Tensor:
        """The mean over four targets."""
        return F.cross_entropy(self.logits, TARGETS)

    @property
    def each(self) -> Tensor:
        """A number for each row."""
        return self.logits.square().sum(1)

    @property
    def one(self) -> Tensor:
        """The first number of each row."""
        return self.logits[:, 0]

    @property
    def mean(self) -> Tensor:
        """The mean over six rows."""
        return self.each.mean()


COUNT = MASK.sum()
SIGNS = 2 * MASK - 1
NUMBER = torch.tensor(7.5)


def named(name: str, value: Tensor) -> Tensor:
    """A value through a function of this name, as engines put theirs into the graph."""
    function = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(_forward), "backward": staticmethod(_back)}
    )
    return function.apply(value)  # type: ignore[attr-defined, no-any-return]


def _forward(ctx: Any, value: Tensor) -> Tensor:
    return value.clone()


def _back(ctx: Any, grad: Tensor) -> Tensor:
    return grad


def ddp(*values: Tensor) -> tuple[Tensor, ...]:
    """What DistributedDataParallel hands back where it looks for unused parameters."""
    return _DDPSink.apply(weakref.ref(Learnt), *values)  # type: ignore[no-any-return]


def words(terms: list[Term]) -> str:
    return " + ".join(map(_word, terms)) or "nothing"


def _word(term: Term) -> str:
    last = len(term.factors) - 1
    factors = [
        ("/" if each.divides else "*")
        + (f"[{float(each.value):.4g}]" if term.divides and at == last else f"{float(each.value):.4g}")
        + "~" * each.learnt
        for at, each in enumerate(term.factors)
    ]
    name = term.name.removesuffix("0").removesuffix("1").removesuffix("Backward")
    return " ".join([name + "?" * (not term.readable) + (f"#{term.rows}" if term.rows else ""), *factors])


Loss = Callable[[Learnt], Tensor]

TABLE: dict[str, tuple[Loss, str]] = {
    # Losses of torch: means over targets, over their weights, and over elements, of which a row has several.
    "cross entropy": (lambda x: x.ce, "NllLoss /[4]"),
    "of tokens": (lambda x: F.cross_entropy(x.logits.T[None], TARGETS[None]), "NllLoss2D /[4]"),
    "class weights": (lambda x: F.cross_entropy(x.logits, TARGETS, WEIGHTS), "NllLoss /[7.5]"),
    "sum": (lambda x: F.cross_entropy(x.logits, TARGETS, reduction="sum"), "NllLoss"),
    "without a target": (lambda x: F.cross_entropy(x.logits, torch.full((6,), -100)), "NllLoss /[0]"),
    "rows": (lambda x: F.cross_entropy(x.logits, TARGETS, reduction="none").mean(), "Mean /[6]"),
    "numbers added to every element": (lambda x: (x.each + 2 * x.ce).mean(), "Mean /[6] + NllLoss *2 /[4]"),
    "numbers taken from every element": (lambda x: (x.each - x.ce).mean(), "Mean /[6] + NllLoss *-1 /[4]"),
    "the largest": (lambda x: x.each.topk(2).values.mean(), "Topk?"),
    "the second largest": (lambda x: x.logits.kthvalue(2, dim=0).values.mean(), "Kthvalue?"),
    "the second largest of each row": (lambda x: x.logits.kthvalue(2).values.mean(), "Mean /[6]"),
    "smoothed": (
        lambda x: F.cross_entropy(x.logits, TARGETS, label_smoothing=0.1),
        "NllLoss *0.9 /[4] + Sum *0.025 /4",
    ),
    "smoothed with class weights": (
        lambda x: F.cross_entropy(x.logits, TARGETS, WEIGHTS, label_smoothing=0.1),
        "NllLoss *0.9 /[7.5] + Sum *0.025 /7.5",
    ),
    "of probabilities": (lambda x: F.cross_entropy(x.logits, torch.full((6, 4), 0.25).double()), "Sum /6 *-1"),
    "nll": (lambda x: F.nll_loss(x.logits.log_softmax(-1), TARGETS), "NllLoss /[4]"),
    "squares": (lambda x: F.mse_loss(x.one, VALUES), "MseLoss /[6]"),
    "squares, summed": (lambda x: F.mse_loss(x.one, VALUES, reduction="sum"), "MseLoss"),
    "smooth l1": (lambda x: F.smooth_l1_loss(x.one, VALUES), "SmoothL1Loss /[6]"),
    "huber": (lambda x: F.huber_loss(x.one, VALUES), "HuberLoss /[6]"),
    "l1": (lambda x: F.l1_loss(x.one, VALUES), "Mean /[6]"),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x.one, MASK), "BinaryCrossEntropyWithLogits /[6]"),
    "bce of probabilities": (lambda x: F.binary_cross_entropy(x.one.sigmoid(), MASK), "BinaryCrossEntropy /[6]"),
    "kl": (lambda x: F.kl_div(x.logits, x.logits.detach(), reduction="batchmean"), "Sum /6"),
    "triplet": (lambda x: F.triplet_margin_loss(x.logits, x.logits.detach() + 1, x.logits.detach()), "Mean /[6]"),
    "soft margin": (lambda x: F.soft_margin_loss(x.one, SIGNS), "SoftMarginLoss /[6]"),
    "margins by row": (lambda x: F.multi_margin_loss(x.logits, TARGETS.clamp(min=0)), "MultiMarginLoss /[24]"),
    "margins of several classes by row": (
        lambda x: F.multilabel_margin_loss(x.logits, torch.full((6, 4), -1)),
        "MultilabelMarginLoss /[24]",
    ),
    "ctc": (lambda x: ctc(x, "mean"), "Mean /[1]"),
    "ctc, summed": (lambda x: ctc(x, "sum"), "Sum"),
    # By hand: sums, means, and what stands inside of them.
    "mean": (lambda x: x.mean, "Mean /[6]"),
    "mean over axes": (lambda x: x.logits.mean((0, 1)), "Mean /[24]"),
    "sum by hand": (lambda x: x.each.sum(), "Sum"),
    "sum that leaves nan out": (lambda x: x.each.nansum(), "Nansum"),
    "mean that leaves nan out": (lambda x: x.each.nanmean(), "Nansum /6"),
    "sum over a number": (lambda x: F.cross_entropy(x.logits, TARGETS, reduction="sum") / NUMBER, "NllLoss /7.5"),
    "sum over a float": (lambda x: F.cross_entropy(x.logits, TARGETS, reduction="sum") / 7.5, "NllLoss /7.5"),
    "sum over an integer": (lambda x: F.cross_entropy(x.logits, TARGETS, reduction="sum") / 7, "NllLoss /7"),
    "masked mean": (lambda x: (x.each * MASK).sum() / COUNT, "Sum /3"),
    "masked mean, clamped": (lambda x: (x.each * MASK).sum() / (0 * COUNT).clamp(min=1), "Sum /1"),
    "masked mean by a product": (lambda x: x.each.dot(MASK) / COUNT, "Dot /3"),
    "masked mean by a matrix product": (lambda x: (x.each[None] @ MASK[:, None]).squeeze() / COUNT, "Mm /3"),
    "masked mean by an einsum": (lambda x: torch.einsum("b,b->", x.each, MASK) / COUNT, "Bmm /3"),
    "mean of what a mask picks": (lambda x: x.each[MASK.bool()].mean(), "Mean /[3]"),
    "weights of rows": (lambda x: (x.each * (MASK / COUNT)).sum(), "Sum"),
    "a mean of each row": (lambda x: (x.each / torch.arange(1, 7)).mean(), "Mean /[6]"),
    # Several terms, their signs and coefficients.
    "two terms": (lambda x: x.ce + 0.1 * x.mean, "NllLoss /[4] + Mean *0.1 /[6]"),
    "three terms by a list": (lambda x: sum([x.ce, x.mean, x.each.sum()]), "NllLoss /[4] + Mean /[6] + Sum"),  # type: ignore[arg-type, return-value]
    "in place": (lambda x: x.ce.clone().add_(x.mean), "NllLoss /[4] + Mean /[6]"),
    "difference": (lambda x: x.ce - x.each.sum() / 7, "NllLoss /[4] + Sum *-1 /7"),
    "alpha": (lambda x: torch.add(x.ce, x.mean, alpha=2), "NllLoss /[4] + Mean *2 /[6]"),
    "alpha of a difference": (lambda x: torch.sub(x.ce, x.mean, alpha=2), "NllLoss /[4] + Mean *-2 /[6]"),
    "alpha of a reversed one": (lambda x: torch.rsub(x.ce, x.mean, alpha=2), "NllLoss *-2 /[4] + Mean /[6]"),
    "from a number": (lambda x: 1 - x.mean, "Mean *-1 /[6]"),
    "and a number": (lambda x: x.mean + 1, "Mean /[6]"),
    "negative": (lambda x: -x.mean, "Mean *-1 /[6]"),
    "a number of both": (lambda x: 0.5 * (x.ce - x.mean), "NllLoss *0.5 /[4] + Mean *0.5 *-1 /[6]"),
    "a number that is a tensor": (lambda x: NUMBER * x.ce, "NllLoss *7.5 /[4]"),
    "z-loss": (lambda x: x.ce + 1e-3 * x.logits.logsumexp(-1).square().mean(), "NllLoss /[4] + Mean *0.001 /[6]"),
    "penalty on parameters": (lambda x: x.ce + 0.01 * x.pair.square().sum(), "NllLoss /[4] + Sum *0.01"),
    "twice the same": (lambda x: twice(x.ce), "NllLoss /[4] + NllLoss /[4]"),
    # Without a gradient there is no term.
    "detached": (lambda x: x.ce.detach(), "nothing"),
    "a detached term": (lambda x: x.ce + x.mean.detach(), "NllLoss /[4]"),
    "a detached factor": (lambda x: x.ce * (0 * x.mean.detach() + 2), "NllLoss *2 /[4]"),
    "chosen": (lambda x: torch.where(torch.tensor(True), x.ce, 0.0), "Where?"),
    "kept finite": (lambda x: x.ce.nan_to_num(), "NllLoss /[4]"),
    # Factors that are learnt.
    "uncertainty": (lambda x: torch.exp(-x.scale) * x.ce + x.scale, "NllLoss *0.6065~ /[4] + AccumulateGrad?"),
    "uncertainty of several": (
        lambda x: (-x.pair[0]).exp() * x.ce + x.pair[0] + (-x.pair[1]).exp() * x.mean + x.pair[1],
        "NllLoss *0.6065~ /[4] + Select? + Mean *0.1353~ /[6] + Select?",
    ),
    "variance": (lambda x: x.ce / (2 * x.scale**2), "NllLoss /0.5~ /[4]"),
    "gate": (
        lambda x: x.scale.sigmoid() * x.ce + (1 - x.scale.sigmoid()) * x.mean,
        "NllLoss *0.6225~ /[4] + Mean *0.3775~ /[6]",
    ),
    "learnt twice": (lambda x: x.scale * x.scale * x.ce, "NllLoss *0.25~ /[4]"),
    "learnt inside": (lambda x: (x.each * x.scale).mean(), "Mean /[6]"),
    # What is not linear, or hides what is below it.
    "root": (lambda x: x.mean.sqrt(), "Sqrt?"),
    "root beside a term": (lambda x: (x.ce + 1e-6).sqrt() + x.mean, "Sqrt? + Mean /[6]"),
    "log": (lambda x: x.mean.log(), "Log?"),
    "flooding": (lambda x: (x.ce - 0.1).abs() + 0.1, "Abs?"),
    "power": (lambda x: x.ce**2, "Pow?"),
    "product of two terms": (lambda x: x.ce * x.mean, "Mul?"),
    "dice": (lambda x: (x.each * MASK).sum() / (x.each.sum() + 1), "Div?"),
    "the larger of two terms": (lambda x: torch.max(x.ce, x.mean), "Maximum?"),
    "the largest of a stack": (lambda x: torch.stack([x.ce, x.mean]).max(), "Max?"),
    "limited": (lambda x: x.ce.clamp(min=0.1), "Clamp?"),
    "one of several": (lambda x: torch.stack([x.ce, x.mean])[-1], "Select?"),
    "above a bound": (lambda x: F.relu(x.ce), "Relu?"),
    "least": (lambda x: torch.minimum(x.ce, x.mean), "Minimum?"),
    "logsumexp": (lambda x: x.each.logsumexp(0), "Logsumexp?"),
    "norm": (lambda x: x.logits.norm(), "LinalgVectorNorm?"),
    "variance of rows": (lambda x: x.each.var(), "Var?"),
    "a function of one's own": (lambda x: named("OneOfOnesOwn", x.ce), "OneOfOnesOwn?"),
    "checkpoint, re-entrant": (lambda x: checkpointed(x, use_reentrant=True), "CheckpointFunction?"),
    "checkpoint": (lambda x: checkpointed(x, use_reentrant=False), "NllLoss /[4]"),
    "more terms than are read": (lambda x: sum(x.mean for _ in range(65)), "too many terms?"),  # type: ignore[arg-type, return-value]
    # What changes nothing.
    "in float32": (lambda x: x.ce.float(), "NllLoss /[4]"),
    "clone": (lambda x: x.ce.clone(), "NllLoss /[4]"),
    "alias": (lambda x: torch.ops.aten.alias(x.ce), "NllLoss /[4]"),
    "view": (lambda x: x.ce.view(1), "NllLoss /[4]"),
    "unsafe view": (lambda x: torch.ops.aten._unsafe_view(x.ce, [1]), "NllLoss /[4]"),
    "reshape": (lambda x: torch.ops.aten._reshape_alias(x.ce, [1], [1]), "NllLoss /[4]"),
    "squeeze": (lambda x: x.ce[None].squeeze(), "NllLoss /[4]"),
    "squeeze of an axis": (lambda x: x.ce[None].squeeze(0), "NllLoss /[4]"),
    "unsqueeze": (lambda x: x.ce.unsqueeze(0), "NllLoss /[4]"),
    "expand": (lambda x: x.ce.expand(1), "NllLoss /[4]"),
    "the mean of a vector of one": (lambda x: x.ce.unsqueeze(0).mean(), "NllLoss /[4]"),
    "the sum of a vector of one": (lambda x: x.ce.view(1).sum(), "NllLoss /[4]"),
    "the mean of an expanded number": (lambda x: x.ce.expand(3).mean(), "NllLoss /[4]"),
    "the sum of an expanded number": (lambda x: x.ce.expand(3).sum(), "Sum"),
    "permute": (lambda x: x.ce.view(1, 1).permute(1, 0), "NllLoss /[4]"),
    "under DistributedDataParallel": (lambda x: ddp(x.each, x.ce)[1], "NllLoss /[4]"),
    "the other output of it": (lambda x: ddp(x.mean, x.ce)[0], "Mean /[6]"),
    "to a distributed tensor": (lambda x: named("_ToTorchTensor", x.ce), "NllLoss /[4]"),
    "from a distributed tensor": (lambda x: named("_FromTorchTensor", x.ce), "NllLoss /[4]"),
    "under DeepSpeed": (lambda x: named("PreBackwardFunctionForModule", x.ce), "NllLoss /[4]"),
    "under an older DeepSpeed": (lambda x: named("PreBackwardFunction", x.ce), "NllLoss /[4]"),
    # A batch of one, whose axes are squeezed.
    "one sample": (lambda x: F.mse_loss(x.logits[:1, :1].squeeze(), VALUES[0]), "MseLoss /[1]"),
    "one row": (lambda x: (x.logits[:1, 0] - VALUES[:1]).square().mean(), "Mean /[1]"),
    # Rows, put together.
    "cat of rows": (lambda x: torch.cat([x.each[:2], x.each[2:]]).mean(), "Mean /[6]"),
    "stack of rows": (lambda x: torch.stack([x.each[:3], x.each[3:]]).mean(), "Mean /[6]"),
}

#: Numbers that are stacked: rows of one leaf, or terms.
STACKED: dict[str, tuple[Loss, str]] = {
    "mean": (lambda x: torch.stack([x.ce, x.mean]).mean(), "Mean#2 /[2]"),
    "sum": (lambda x: torch.stack([x.ce, x.mean]).sum(), "Sum#2"),
    "a number of the sum": (lambda x: 0.5 * torch.stack([x.ce, x.mean]).sum(), "Sum#2 *0.5"),
    "cat": (lambda x: torch.cat([x.ce.view(1), x.mean.reshape(1)]).mean(), "Mean#2 /[2]"),
    "one of them detached": (lambda x: torch.stack([x.ce, x.mean.detach(), x.mean]).sum(), "Sum#2"),
    "weighted": (lambda x: (torch.stack([x.ce, x.mean]) * WEIGHTS[1:3]).sum(), "Sum#2"),
    "samples": (lambda x: torch.stack([F.mse_loss(x.one[at], VALUES[at]) for at in range(3)]).mean(), "Mean#3 /[3]"),
    "beside a term": (lambda x: x.ce + torch.stack([x.ce, x.mean]).mean(), "NllLoss /[4] + Mean#2 /[2]"),
}

#: Numbers inside of a sum, which are looked for where that is asked: as a rule, with the number of them, and deep.
WITHIN: dict[str, tuple[Loss, str, str, int]] = {
    "masked mean, divided inside": (lambda x: (x.each * MASK / COUNT).sum(), "Sum", "Sum /3", 1),
    "numbers inside a sum": (lambda x: (-0.1 * x.each / 2).sum() / COUNT, "Sum /3", "Sum /3 /2 *-0.1", 2),
    "numbers inside a mean": (lambda x: (3 * x.each).mean(), "Mean /[6]", "Mean *3 /[6]", 1),
    "negative": (lambda x: (-x.each).sum(), "Sum", "Sum *-1", 1),
    "through a view": (lambda x: (x.logits / COUNT).view(-1).sum(), "Sum", "Sum /3", 1),
    "above a weight of each row": (lambda x: (x.each * (MASK / COUNT) / 2).sum(), "Sum", "Sum /2", 1),
    "below a weight of each row": (lambda x: (x.each / 2 * MASK).sum(), "Sum", "Sum", 0),
}


def ctc(x: Learnt, reduction: str) -> Tensor:
    """Of one sample; its mean over targets is taken sample by sample."""
    targets = torch.tensor([[1, 2]])
    return F.ctc_loss(x.logits.log_softmax(-1)[:, None], targets, (ROWS_,), (2,), reduction=reduction)


def twice(loss: Tensor) -> Tensor:
    return loss + loss


def checkpointed(x: Learnt, *, use_reentrant: bool) -> Tensor:
    return checkpoint(lambda each: F.cross_entropy(each, TARGETS), x.logits, use_reentrant=use_reentrant)


@pytest.mark.parametrize(("loss", "rows"), STACKED.values(), ids=STACKED)
def test_stacked_numbers_are_rows(loss: Loss, rows: str) -> None:
    assert words(read(loss(Learnt()))) == rows


@pytest.mark.parametrize(("loss", "terms", "deep", "within"), WITHIN.values(), ids=WITHIN)
def test_numbers_inside_of_a_sum(loss: Loss, terms: str, deep: str, within: int) -> None:
    assert words(read(loss(Learnt()))) == terms
    (found,) = read(loss(Learnt()), deep=True)
    assert (words([found]), found.within) == (deep, within)


def test_the_table_holds_every_node() -> None:
    losses = [loss for loss, *_ in (*TABLE.values(), *STACKED.values())]
    seen = {name.rpartition("Backward")[0] for loss in losses for name in _names(loss(Learnt()))}
    assert set(ROWS) <= seen


def _names(loss: Tensor) -> Iterator[str]:
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield type(node).__name__
            nodes += [each for each, _ in node.next_functions]


# --- the graph, as engines and memory savers leave it ---------------------------------------------------------------


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.run = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.run += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss", "terms"), TABLE.values(), ids=TABLE)
def test_terms_are_read_without_an_operation_under_a_dispatch_mode_or_not(loss: Loss, terms: str) -> None:
    plain = loss(Learnt())
    with Operations():
        made = loss(Learnt())
    with Operations() as counted:
        found = [words(read(each)) for each in (plain, made)]
    assert counted.run == 0
    assert found == [terms, terms] == [words(read(each)) for each in (plain, made)]


@pytest.mark.parametrize("name", [name for name in TABLE if name != "checkpoint"])
def test_of_what_is_kept_elsewhere_only_single_numbers_are_fetched(name: str) -> None:
    """Activations may be on the host, or not there at all; a checkpoint around the loss is run again for its count."""
    loss, terms = TABLE[name]
    fetched: list[int] = []

    def unpacked(tensor: Tensor) -> Tensor:
        fetched.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpacked):
        made = loss(Learnt())
    # A re-entrant checkpoint fetches its inputs as it is made.
    fetched.clear()
    assert words(read(made)) == terms
    # torch before 2.5 shows shapes by gradients, which fetch what they need.
    assert all(numbers == 1 for numbers in fetched) or not hasattr(made.grad_fn, "_input_metadata")


# --- what is known of a term beside its factors ---------------------------------------------------------------------


def test_a_router_loss_is_a_term_whatever_it_is_made_of() -> None:
    x = Learnt()
    router = x.mean * x.each.sum()
    loss = x.ce + 0.1 * router
    assert words(read(loss, [router.grad_fn])) == "NllLoss /[4] + Mul? *0.1"
    assert [term.leaf is router.grad_fn for term in read(loss, [router.grad_fn])] == [False, True]


@pytest.mark.parametrize(
    ("loss", "weights", "alike"),
    [
        (lambda x: x.ce + 0.1 * x.mean, (2.0, 3.0), lambda x: 2 * x.ce + 0.3 * x.mean),
        (lambda x: 0.5 * (x.ce - x.mean / 7), (2.0, 3.0), lambda x: x.ce - 1.5 * x.mean / 7),
        (lambda x: x.ce * x.scale + x.mean, (2.0, 3.0), lambda x: 2 * x.ce * x.scale + 3 * x.mean),
        (lambda x: x.ce + (x.mean + 1e-6).sqrt(), (2.0, 3.0), lambda x: 2 * x.ce + 3 * (x.mean + 1e-6).sqrt()),
        (lambda x: (x.ce.float() + 2 * x.mean).view(1), (2.0, 3.0), lambda x: 2 * x.ce.float() + 6 * x.mean),
    ],
    ids=["coefficient", "of both", "learnt", "root", "in float32"],
)
def test_a_hook_on_the_top_of_a_term_weighs_all_of_it(loss: Loss, weights: tuple[float, ...], alike: Loss) -> None:
    x, wanted = Learnt(), Learnt()
    made = loss(x)
    for term, weight in zip(read(made), weights, strict=True):
        term.top.register_prehook(lambda grads, weight=weight: tuple(g and g * weight for g in grads))
    made.backward(torch.ones_like(made))
    alike(wanted).backward()
    for name in ("logits", "scale", "pair"):
        here, there = getattr(x, name).grad, getattr(wanted, name).grad
        assert (here is None) == (there is None)
        assert here is None or torch.allclose(here, there, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("loss", "above"),
    [
        (lambda x: 0.5 * x.ce, [0]),
        (lambda x: 0.5 * (x.ce + 2 * x.mean), [1, 1]),
        (lambda x: 0.5 * (x.ce - (x.mean + 2 * x.each.sum()) / 3), [1, 3, 3]),
    ],
    ids=["one term", "two", "nested"],
)
def test_factors_above_the_top_of_a_term(loss: Loss, above: list[int]) -> None:
    assert [term.above for term in read(loss(Learnt()))] == above


def test_the_products_with_learnt_factors() -> None:
    x = Learnt()
    factor = torch.exp(-x.scale)
    product = factor * x.ce
    (term, _) = read(product + x.scale)
    assert term.learnt_nodes == [product.grad_fn]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (lambda x: x.ce / 3, lambda x: x.ce / 5, True),
        (lambda x: x.ce, lambda x: F.cross_entropy(x.logits, TARGETS, WEIGHTS), True),
        (lambda x: x.ce / 3, lambda x: 3 * x.ce, False),
        (lambda x: x.ce, lambda x: x.mean, False),
        (lambda x: x.scale * x.ce, lambda x: x.scale.detach() * x.ce, False),
    ],
    ids=["number", "weights", "multiplied", "leaf", "learnt"],
)
def test_terms_of_two_micro_batches_are_the_same_but_for_numbers(one: Loss, other: Loss, alike: bool) -> None:
    shapes = [[term.shape for term in read(loss(Learnt()))] for loss in (one, other)]
    assert (shapes[0] == shapes[1]) == alike
