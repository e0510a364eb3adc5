"""Hand-written loops on one process: every head, beside the float64 full batch and accelerate's own way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_accum_fix
from hf_accum_fix import ContractError, Items, LossContract, OptionsError, Reduction, SeamError, accumulation_windows
from tests.distributed.test_two_ranks import REDUCED
from tests.logged import Said
from tests.loop.steps import OURS, accelerator, epoch, own_batches, take_steps
from tests.numerics.heads import HEADS, Head, before
from tests.numerics.heads.samples import without_targets
from tests.numerics.parity import Step, cut, reference_step, reference_windows

#: The loss is not the Trainer's here, so heads that need its smoothing or its loss functions are left out.
LOOPED = {name: head for name, head in HEADS.items() if not (head.trainer or head.arguments or head.told_false)}
#: Right under ``accelerator.accumulate``: the mean over samples is, at one sample a micro-batch, and what is no mean.
RIGHT_BY_ACCUMULATE = {
    "llama-classification", "bert-classes", "bert-multi-label", "vit", "vit-regression", "vit-multi-label",
    "wav2vec2-ctc-mean", "mean-of-sample-means",
}  # fmt: skip


#: The column's name, which the collator changes.
OF_NO_BATCH = LossContract(Reduction.MEAN, Items(("label",)))


def every_case() -> Iterator[Any]:
    """Every head by both ways: in everyday tests one of each reduction by the first, in CI by the second, too."""
    for name in LOOPED:
        for way in OURS:
            marks = pytest.mark.thorough if name not in REDUCED else [] if way == OURS[0] else pytest.mark.slow
            yield pytest.param(name, way, marks=marks, id=f"{name}-{way}")


def assert_step(step: Step, reference: Step, head: Head) -> None:
    assert step.error(reference) <= head.tolerance
    assert step.loss == pytest.approx(reference.loss, rel=max(head.tolerance, 1e-6), abs=1e-12)
    assert step.norm == pytest.approx(reference.norm, rel=head.tolerance, abs=1e-12)


@pytest.mark.parametrize(("name", "way"), [*every_case()])
def test_every_head_takes_the_full_batch_step(name: str, way: str) -> None:
    head = LOOPED[name]
    reference = reference_step(head, cut(head.samples, 1))
    step, _, windows = take_steps(head, head.samples, 1, 8, way)
    assert_step(step, reference, head)
    assert windows.contract.exact == head.exact
    if way == "windows" and head.exact and not head.in_zoo:
        stock, _, _ = take_steps(head, head.samples, 1, 8, "accumulate")
        assert (stock.error(reference) < 1e-3) == (name in RIGHT_BY_ACCUMULATE)


@pytest.mark.parametrize("split", [(4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ["llama-position-0", "bert-mlm", "lora", "uses-tensor"])
def test_every_cut(name: str, split: tuple[int, int]) -> None:
    head = LOOPED[name]
    reference = reference_step(head, cut(head.samples, split[0]))
    stock, _, _ = take_steps(head, head.samples, *split, "accumulate")
    assert stock.error(reference) > 1e-3
    for way in OURS:
        assert_step(take_steps(head, head.samples, *split, way)[0], reference, head)


@pytest.mark.parametrize("name", ["llama", "no-kwargs"])
def test_two_epochs_whose_last_window_is_short(name: str) -> None:
    """Eight samples as 2 x 3: windows of three micro-batches and of one, each its own global batch."""
    head, rate = LOOPED[name], 1e-3
    windows = [cut(head.samples[:6], 2), [head.samples[6:]]] * 2
    steps = list(reference_windows(head, windows, rate))
    change = {key: rate * sum(step.change[key] for step in steps) for key in steps[0].change}
    wanted = Step(change, steps[0].loss, steps[0].norm)
    stock, seen, _ = take_steps(head, head.samples, 2, 3, "accumulate", rate=rate, epochs=2)
    # The short window is divided by three, too.
    assert seen[1][1] < 0.4 * steps[1].norm
    assert stock.error(wanted) > 1e-2
    for way in OURS:
        step, seen, made = take_steps(head, head.samples, 2, 3, way, rate=rate, epochs=2)
        assert step.error(wanted) <= max(head.tolerance, 1e-11)
        assert [loss for loss, _ in seen] == pytest.approx([each.loss for each in steps], rel=1e-6)
        assert [norm for _, norm in seen] == pytest.approx([each.norm for each in steps], rel=1e-6)
        assert len(made) == 2


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_autocast_adds_the_noise_of_its_own_precision_and_no_more(name: str) -> None:
    head = replace(LOOPED[name], build=lambda: LOOPED[name].build().float())
    reference = reference_step(LOOPED[name], cut(head.samples, 1))

    def off(way: str, *split: int) -> float:
        return take_steps(head, head.samples, *split, way, mixed_precision="bf16")[0].error(reference)

    noise = off("windows", 8, 1)
    assert noise < 1e-2 and off("windows", 1, 8) <= 2 * noise
    assert off("accumulate", 1, 8) > 10 * noise


def test_what_was_observed_is_kept_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    head, calls = LOOPED["bert-mlm"], []
    model = head.build()
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    batches = own_batches(head, head.samples, 2)
    windows = accumulation_windows(batches, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with caplog.at_level(logging.INFO, logger="hf_accum_fix"):
        for _ in range(3):
            list(epoch(windows, model, optimizer))
    # At most nine in each of three windows; before 2.5 torch shows a shape by a gradient, which needs a run that keeps
    # something for one.
    observes = 9 if hasattr(torch.ones((), requires_grad=True).neg().grad_fn, "_input_metadata") else 18
    assert 12 < calls.count(True) <= 12 + 3 * observes and not calls.count(False)
    assert [record.message for record in caplog.records if "the mean over its own items" in record.message] == [
        "BertForMaskedLM: the loss is the mean over its own items ('labels' other than -100); G=2, W=1."
    ]
    assert "BertForMaskedLM" in str(hf_accum_fix.report())


def looped(
    model: Any, batches: Any, loss: Any = None, steps: int | None = None, live: Any = None, **options: Any
) -> Any:
    """The last window of one epoch, in windows of all micro-batches or of ``steps``."""
    windows = accumulation_windows(batches, live, steps=steps or len(batches), **options)
    return list(epoch(windows, model, live=live, loss=loss))[-1]


def squares(model: Any, batch: Any, how: str = "mean") -> Tensor:
    return F.mse_loss(model(batch["inputs"])[:, 0], batch["targets"], reduction=how)


OWN_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": squares,
    "over-a-count": lambda model, batch: squares(model, batch, "sum") / len(batch["targets"]),
    "outputs": lambda model, batch: {"loss": squares(model, batch)},
    "penalty": lambda model, batch: squares(model, batch) + 0.1 * next(model.parameters()).square().sum(),
}


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize(("name", "given"), [*((name, False) for name in OWN_LOSSES), ("mean", True)])
def test_a_loss_of_ones_own(name: str, given: bool, way: str) -> None:
    """A linear model of one's own, cut 3, 3 and 2, whose plain mean of means is off by more than 1e-2.

    In float64, exact but for the order of sums.
    """
    torch.manual_seed(0)
    rows = {"inputs": torch.randn(8, 4, dtype=torch.float64), "targets": torch.randn(8, dtype=torch.float64)}
    model, loss_of = nn.Linear(4, 1, bias=False).double(), OWN_LOSSES[name]
    batches = [{key: value[s : s + 3] for key, value in rows.items()} for s in (0, 3, 6)]

    def gradient(*parts: Any) -> Tensor:
        losses = [loss_of(model, part) for part in parts]
        total = sum(each["loss"] if isinstance(each, dict) else each for each in losses) / len(parts)
        return torch.autograd.grad(total, model.weight)[0]

    wanted = gradient(rows)
    assert (gradient(*batches) - wanted).norm() > 1e-2 * wanted.norm()
    contract = LossContract(Reduction.MEAN, Items(("targets",), ignore_index=None)) if given else None
    live = accelerator(3) if way == "windows" else None
    window = looped(model, batches, loss_of, live=live, contract=contract)
    assert torch.allclose(model.weight.grad, wanted, rtol=1e-14)
    whole = loss_of(model, rows)
    assert float(window.mean_loss()) == pytest.approx(float(whole["loss"] if name == "outputs" else whole), rel=1e-14)


class OfOneDict(nn.Linear):
    def forward(self, batch: Any) -> Any:
        return squares(super().forward, batch), {"seen": 1}


class OfKeywords(nn.Linear):
    def forward(self, **batch: Any) -> Any:
        return {"loss": squares(super().forward, batch)}


@pytest.mark.parametrize("cls", [OfOneDict, OfKeywords])
def test_a_model_that_takes_one_dict_or_any_keyword(cls: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    rows, model = {"inputs": torch.randn(5, 4).double(), "targets": torch.randn(5).double()}, cls(4, 1).double()
    (wanted,) = torch.autograd.grad(squares(partial(nn.Linear.forward, model), rows), model.weight)
    batches = [{key: value[place] for key, value in rows.items()} for place in (slice(3), slice(3, 5))]
    looped(model, batches, (lambda its, given: its(given)) if cls is OfOneDict else None)
    assert torch.allclose(model.weight.grad, wanted, rtol=1e-12)


@pytest.mark.parametrize("own", [True, False], ids=["a loss of one's own", "another model"])
def test_losses_of_two_models_in_one_window_are_said(own: bool, said: Said) -> None:
    head = LOOPED["no-kwargs"]
    model, other = head.build(), head.build()
    second: Any = (lambda its, batch: its(**batch)["logits"].square().mean()) if own else other
    for window in accumulation_windows(own_batches(head, head.samples, 2), steps=4):
        for batch in window:
            with window.micro_batch(model):
                (window.loss(model, batch) + window.loss(second, batch)).backward()
    assert len(said("its losses are of two models")) == 1


#: A head, and what is given; a mean also for a head that would divide by the number.
GIVEN = [("llama", "MEAN"), ("bert-mlm", "MEAN"), *([] if before("4.46") else [("llama", "NUMBER")])]


@pytest.mark.parametrize(("name", "reduction"), GIVEN)
def test_a_contract_given_by_hand_is_not_observed(name: str, reduction: str) -> None:
    head = LOOPED[name]
    contract = LossContract(Reduction[reduction], Items(("labels",), shift=name == "llama"))
    step, _, windows = take_steps(head, head.samples, 1, 8, "plain", contract=contract)
    assert_step(step, reference_step(head, cut(head.samples, 1)), head)
    assert windows.contract is contract


def test_a_window_without_a_target_is_zero_and_said(said: Said) -> None:
    head = LOOPED["bert-mlm"]
    _, seen, _ = take_steps(head, [*head.samples, *without_targets(head.samples)], 2, 4, "windows", rate=0.0)
    assert seen[1] == (0.0, 0.0) and seen[0][1] > 0
    assert len(said("no target")) == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_copies_with_other_labels_are_corrected(parts: int) -> None:
    """Labels that a loop masks on the way, of a micro-batch or of its halves."""
    head = LOOPED["no-kwargs"]
    samples = [{**each, "labels": each["labels"].masked_fill(each["labels"] % 3 == 0, -100)} for each in head.samples]
    reference, model = reference_step(head, cut(samples, 2)), head.build()
    masked = iter(own_batches(head, samples, 2))
    for window in accumulation_windows(own_batches(head, head.samples, 2), steps=4):
        for _ in window:
            batch = next(masked)
            with window.micro_batch(model):
                for rows in torch.arange(2).chunk(parts):
                    window.loss(model, {key: value[rows] for key, value in batch.items()}).backward()
        loss = float(window.mean_loss())
    change = {name: -each.grad.double() for name, each in model.named_parameters() if each.grad is not None}
    assert Step(change, loss, 0.0).error(reference) <= head.tolerance
    assert loss == pytest.approx(reference.loss, rel=1e-6)


def of_one(batch: Any = None, **given: Any) -> Any:
    """The first window of one micro-batch."""
    return next(iter(accumulation_windows([{"x": torch.ones(1)} if batch is None else batch], steps=1, **given)))


def twice() -> None:
    window = of_one()
    for _ in range(2):
        with window.micro_batch(nn.Linear(1, 1)):
            pass


def count_what_no_batch_has() -> None:
    head = LOOPED["bert-mlm"]
    window = of_one(head.batch(head.samples[:2]), contract=OF_NO_BATCH)
    window.loss(head.build(), window.batches[0])


def number_for_none() -> None:
    head = LOOPED["no-kwargs"]
    take_steps(head, head.samples, 4, 2, "plain", contract=LossContract(Reduction.NUMBER, Items(("labels",))))


SQUARE = {"inputs": torch.randn(2, 4), "targets": torch.randn(2)}


def leaving(asks: bool) -> None:
    """A window after two of its four micro-batches."""
    model, windows = nn.Linear(4, 1), iter(accumulation_windows([SQUARE] * 8, steps=4))
    window = next(windows)
    for batch in window.batches[:2]:
        with window.micro_batch(model):
            window.loss(squares, batch).backward()
    window.mean_loss() if asks else next(windows)


def accumulating(backward: Any, steps: int = 4) -> None:
    """Windows of micro-batches with an accelerator; ``backward``: (accelerator, loss) -> None."""
    head, live = LOOPED["no-kwargs"], accelerator(steps)
    model = head.build()
    for window in accumulation_windows(own_batches(head, head.samples, 2), live):
        for batch in window:
            with window.micro_batch(model):
                backward(live, window.loss(model, batch))


def inside_of_accumulate(live: Any, loss: Tensor) -> None:
    """It chooses by a count of its own where the optimizer steps; they agree in full windows."""
    with live.accumulate(nn.Linear(1, 1)):
        live.backward(loss)


def test_gradients_that_nobody_emptied_are_named(said: Said) -> None:
    model = nn.Linear(4, 1)
    model.weight.grad = torch.ones(1, 4)
    looped(model, [SQUARE] * 4, squares, 2)
    assert len(said("optimizer.zero_grad()")) == 1


def test_the_term_that_divides_by_another_number_is_named(said: Said) -> None:
    """Two means over the labels, of which the second leaves some out from the third window on."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 5), {"inputs": torch.randn(6, 4), "labels": torch.arange(6) % 5}
    least = 0

    def loss_of(model: Any, batch: Any) -> Tensor:
        scores, kept = model(batch["inputs"]), batch["labels"] >= least
        return F.cross_entropy(scores, batch["labels"]) + (scores.square().sum(-1) * kept).sum() / kept.sum()

    for number, _ in enumerate(epoch(accumulation_windows([batch] * 6, steps=2), model, loss=loss_of), start=1):
        least = 2 * (number == 2)
    assert len(said("its term SumBackward0 divides by 3 items; 6 were predicted")) == 1


def over_graphs(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="sum") / (batch["batch"].max() + 1)


@pytest.mark.parametrize("counts", [(1,) * 7, (4, 4), (2, 3, 1, 4)], ids=str)
def test_graphs_are_numbered_over_the_window(counts: tuple[int, ...]) -> None:
    """PyG's ``batch`` begins at 0 in each micro-batch: joined as it is, it has as many graphs as its larger half."""
    torch.manual_seed(0)
    model, batches = nn.Linear(4, 1, bias=False).double(), list[dict[str, Tensor]]()
    for count in counts:
        index = torch.arange(count).repeat_interleave(torch.randint(2, 5, (count,)))
        rows = {"x": torch.randn(len(index), 4, dtype=torch.float64), "y": torch.randn(len(index), dtype=torch.float64)}
        batches.append({**rows, "batch": index})
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in ("x", "y")}
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    index = torch.cat([each["batch"] + start for each, start in zip(batches, starts, strict=True)])
    (wanted,) = torch.autograd.grad(over_graphs(model, {**joined, "batch": index}), model.weight)
    looped(model, batches, over_graphs)
    assert torch.allclose(model.weight.grad, wanted, rtol=1e-12)


#: What is done, the error, and words of it.
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a micro-batch too many": (twice, SeamError, "2 times in a window of 1"),
    "a loss of one's own without its model": (
        lambda: of_one().loss(squares, {"x": torch.ones(1)}), SeamError, "where its model is known"),
    "a contract that counts what no batch has": (
        count_what_no_batch_has, ContractError, "no micro-batch of the first window has; expected one of "),
    "a number for a model that takes none": (number_for_none, ContractError, "takes no num_items_in_batch"),
    "mean_loss before a loss": (lambda: of_one().mean_loss(), SeamError, "after 0 of 1 micro-batches"),
    "batches that are no mappings": (lambda: of_one((torch.ones(1),)), ContractError, "expected a dict"),
    **{f"{steps} steps": (partial(accumulation_windows, [], steps=steps), OptionsError, "at least 1")
       for steps in (0, -1, True, 2.0)},
    "neither steps nor an accelerator": (partial(accumulation_windows, []), OptionsError, "steps=G"),
    "another accelerator": (
        partial(accumulation_windows, [], nn.Linear(1, 1)), OptionsError,
        "got accelerator=Linear.*expected an accelerate.Accelerator"),
    "a micro-batch that is not run": (partial(leaving, False), SeamError, "2 of the 4 micro-batches"),
    "mean_loss of a window that was left": (partial(leaving, True), SeamError, "after 2 of 4 micro-batches"),
    "a backward without the accelerator, which divides by G": (
        partial(accumulating, lambda live, loss: loss.backward()), SeamError, "divides by 4"),
    "accumulate inside of a micro-batch": (
        partial(accumulating, inside_of_accumulate, 3), SeamError, "remove accumulate"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_refused(name: str) -> None:
    run, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        run()
