"""assert_split_invariant: historical losses are named by line, their fixes pass, and what it reads adds up."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.testing import assert_split_invariant
from hf_accum_fix.verification.split_invariance import Layout, Window, _Runs, split_invariance
from tests.verify.historical_losses import HISTORY, History, batch, policy, share, tokens

_BY_ISSUE = {"argvalues": HISTORY, "ids": [each.issue for each in HISTORY]}


def _off(words: tuple[str, ...]) -> list[str]:
    return [each for each in words if each.startswith("off: ")]


@pytest.mark.parametrize("history", **_BY_ISSUE)
def test_a_historical_loss_is_named_by_its_line(history: History) -> None:
    with pytest.raises(AssertionError, match="depends on the split") as raised:
        assert_split_invariant(history.wrong, batch(), **history.how)
    (off,) = [line for line in str(raised.value).splitlines() if line.startswith("  off: ")]
    assert history.line in off and history.why in off, off


@pytest.mark.parametrize("history", **_BY_ISSUE)
@pytest.mark.parametrize("samples", [2, 6, 8])
def test_its_fix_passes(history: History, samples: int) -> None:
    report = assert_split_invariant(history.right, batch(samples), **history.how)
    assert report and report.splits


def test_the_other_term_is_called_right() -> None:
    wrong = next(each for each in HISTORY if each.issue.endswith("6957"))
    words = split_invariance(wrong.wrong, batch()).words
    assert [each[:6] for each in words[1:]] == ["right:", "off: h"] and "actor = " in words[1]


def test_a_rank_of_its_own_is_right_on_one_rank() -> None:
    prime = next(each for each in HISTORY if each.issue.endswith("2358"))
    assert split_invariance(prime.wrong, batch())


def test_a_mean_over_samples_is_right_for_even_micro_batches_only() -> None:
    def mean(rows: dict[str, Tensor]) -> Tensor:
        per_sample: Tensor = (rows["logprobs"] * rows["mask"]).sum(-1) / rows["mask"].sum(-1)
        return per_sample.mean()

    assert split_invariance(mean, batch(), over_micro_batches="mean", uneven=False, ranks=(1, 2))
    report = split_invariance(mean, batch(), over_micro_batches="mean")
    assert not report and all(len({*layout.sizes}) > 1 for layout, _ in report.off)


def test_whitened_advantages_are_no_divisor() -> None:
    def whitened(rows: dict[str, Tensor], window: Window) -> Tensor:
        advantages = rows["advantages"] - rows["advantages"].mean()
        return (rows["logprobs"] * advantages * rows["mask"]).sum() / share(window)

    (off,) = _off(split_invariance(whitened, batch()).words)
    assert "its divisor is right" in off and "a mean or a norm of its samples" in off


def test_terms_of_one_line_are_one() -> None:
    def loss(rows: dict[str, Tensor], window: Window) -> Tensor:
        return policy(rows) / share(window) + rows["values"].square().mean()

    def of_samples(rows: dict[str, Tensor], window: Window) -> Tensor:
        total = torch.zeros(())
        for logprobs, mask in zip(rows["logprobs"], rows["mask"], strict=True):
            total = total + (logprobs * mask).sum() / mask.sum()
        return total / len(rows["mask"])

    def together(rows: dict[str, Tensor], window: Window) -> Tensor:
        return rows["logprobs"].square().sum() / share(window) + rows["values"].square().mean()

    assert "divided by 30 in the full batch" in _off(split_invariance(loss, batch()).words)[0]
    for each in (together, of_samples):
        assert "its line makes several terms" in _off(split_invariance(each, batch()).words)[0]


def test_parameters_are_compared_too() -> None:
    layer = torch.nn.Linear(5, 1)
    rows = {key: x.detach() for key, x in batch().items()}
    layer.double()

    def loss(rows: dict[str, Tensor], window: Window, *, local: bool) -> Tensor:
        n = len(rows["mask"]) if local else len(window.batch["mask"])
        return layer(rows["logprobs"]).square().sum() / n

    parameters = [*layer.parameters()]
    assert split_invariance(lambda rows, window: loss(rows, window, local=False), rows, parameters=parameters)
    report = split_invariance(lambda rows, window: loss(rows, window, local=True), rows, parameters=parameters)
    assert len(report.off) == report.splits == 31


@pytest.mark.parametrize("history", **_BY_ISSUE)
def test_the_terms_add_up_to_the_gradient(history: History) -> None:
    layout = Layout((1, 2, 3))
    how = {"over_micro_batches": "sum", **history.how}
    for loss in (history.wrong, history.right):
        runs = _Runs(loss, batch(), (), how["over_micro_batches"])
        added = sum(share.gradient for look in runs.shares(layout) for share in look)
        torch.testing.assert_close(added, runs.gradient(layout), rtol=1e-12, atol=1e-14)


def test_float32_inside_of_the_loss_is_no_fault() -> None:
    def loss(rows: dict[str, Tensor], window: Window) -> Tensor:
        return policy(rows).float() / share(window).float()

    report = assert_split_invariant(loss, batch())
    assert report.tolerance > 1e-5


def test_a_loss_may_write_into_its_micro_batch() -> None:
    def loss(rows: dict[str, Tensor], window: Window | None = None) -> Tensor:
        assert window is not None
        rows["mask"] *= 0.5
        rows["logprobs"].clamp_(max=0.5)
        return 2 * policy(rows) / share(window)

    assert_split_invariant(loss, batch())


def test_many_samples_are_split_at_random() -> None:
    rows: dict[str, Any] = {"x": torch.randn(40, requires_grad=True), "scale": 2.0, "names": ["a"] * 40}
    report = assert_split_invariant(lambda micro, window: micro["scale"] * micro["x"].square().sum(), rows)
    assert 100 < report.splits <= 264
    assert not split_invariance(lambda micro: micro["x"].square().mean(), rows)


@pytest.mark.parametrize(
    ("loss", "rows", "got"),
    [
        (lambda rows: rows["x"], {"x": torch.ones(3, requires_grad=True)}, r"got \(3,\) from loss_fn"),
        (lambda rows: 0.0, {"x": torch.ones(3, requires_grad=True)}, "got float from loss_fn"),
        (lambda rows: rows["x"].sum(), {"x": torch.ones(3)}, "got a gradient of norm 0"),
        (lambda rows: rows["x"].log().sum(), {"x": torch.zeros(3, requires_grad=True)}, "got a gradient of norm inf"),
        (
            lambda rows: rows["x"].sum(),
            {"x": torch.ones(3, requires_grad=True), "y": [1]},
            r"got a batch of \{'x': 3, 'y'",
        ),
        (lambda rows: rows["x"].sum(), {"x": torch.ones(1, requires_grad=True)}, "at least 2"),
        (lambda rows: rows["x"].sum(), {"x": 1.0}, "got a batch of {}"),
    ],
)
def test_what_cannot_be_split_is_refused(loss: Any, rows: dict[str, Any], got: str) -> None:
    with pytest.raises(OptionsError, match=got):
        split_invariance(loss, rows)


def test_tokens_are_uneven() -> None:
    """Else means of micro-batch means would pass."""
    assert float(tokens(batch())) == 20.0


def _term_by_window(rows: Any, window: Window) -> Tensor:
    return policy(rows) / share(window)


def _term_by_samples(rows: Any, window: Window) -> Tensor:
    per_sample = (rows["values"].square() * rows["mask"]).sum(-1) / rows["mask"].sum(-1)
    return per_sample.sum() / len(window.batch["mask"]) * window.ranks


def _term_of_a_stack(rows: Any, window: Window) -> Tensor:
    return torch.stack([x.exp().sum() for x in rows["values"]]).sum() / share(window)


def _local_mean(rows: Any, window: Window) -> Tensor:
    return rows["logprobs"][rows["mask"] > 0].mean()


def _local_count(rows: Any, window: Window) -> Tensor:
    return (rows["values"] * rows["mask"]).sum() / rows["mask"].sum()


def _local_huber(rows: Any, window: Window) -> Tensor:
    return torch.nn.functional.smooth_l1_loss(rows["values"], rows["returns"])


def _root(rows: Any, window: Window) -> Tensor:
    return rows["values"].square().sum().sqrt()


_RIGHT, _WRONG = (
    (_term_by_window, _term_by_samples, _term_of_a_stack),
    (_local_mean, _local_count, _local_huber, _root),
)


@pytest.mark.parametrize("right", _RIGHT, ids=lambda each: each.__name__)
@pytest.mark.parametrize("other", _RIGHT + _WRONG, ids=lambda each: each.__name__)
@pytest.mark.parametrize("wrong", _WRONG, ids=lambda each: each.__name__)
def test_of_three_terms_the_wrong_ones_are_named(right: Any, other: Any, wrong: Any) -> None:
    terms = [right, other, wrong]

    def loss(rows: Any, window: Window) -> Tensor:
        total: Any = 0.0
        for weight, term in zip((1.0, 0.5, -0.3), terms, strict=True):
            total = total + weight * term(rows, window)
        return total

    lines = split_invariance(loss, batch()).words[1:]
    code = {term: inspect.getsource(term).splitlines()[-1].strip() for term in terms}
    for term in {*terms}:
        said = {line[:4] for line in lines if code[term].removeprefix("return ")[:30] in line}
        assert said == ({"off:"} if term in _WRONG else {"righ"}), "\n".join(lines)
