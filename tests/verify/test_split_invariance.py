"""assert_split_invariant: historical losses are named by line, their fixes pass, and what it reads adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.testing import assert_split_invariant
from hf_accum_fix.verification.split_invariance import Layout, WholeBatch, _Runs, split_invariance
from tests.verify.historical_losses import HISTORY, History, batch, policy, share

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
def test_its_fix_passes(history: History) -> None:
    report = assert_split_invariant(history.right, batch(), **history.how)
    assert report and report.splits


def test_a_rank_of_its_own_is_right_on_one_rank() -> None:
    prime = next(each for each in HISTORY if each.issue.endswith("2358"))
    assert split_invariance(prime.wrong, batch())


def test_whitened_advantages_are_no_divisor() -> None:
    def whitened(rows: dict[str, Tensor], window: WholeBatch) -> Tensor:
        advantages = rows["advantages"] - rows["advantages"].mean()
        return (rows["logprobs"] * advantages * rows["mask"]).sum() / share(window)

    (off,) = _off(split_invariance(whitened, batch()).words)
    assert "its divisor is right" in off and "a mean or a norm of its samples" in off


def test_parameters_are_compared_too() -> None:
    layer = torch.nn.Linear(5, 1)
    rows = {key: x.detach() for key, x in batch().items()}
    layer.double()

    def loss(rows: dict[str, Tensor], window: WholeBatch, *, local: bool) -> Tensor:
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


def test_a_loss_may_write_into_its_micro_batch() -> None:
    def loss(rows: dict[str, Tensor], window: WholeBatch | None = None) -> Tensor:
        assert window is not None
        rows["mask"] *= 0.5
        rows["logprobs"].clamp_(max=0.5)
        return 2 * policy(rows) / share(window)

    assert_split_invariant(loss, batch())


@pytest.mark.parametrize(
    ("loss", "rows", "got"),
    [
        (lambda rows: rows["x"], {"x": torch.ones(3, requires_grad=True)}, r"got \(3,\) from loss_fn"),
        (lambda rows: rows["x"].sum(), {"x": torch.ones(3)}, "got a gradient of norm 0"),
        (
            lambda rows: rows["x"].sum(),
            {"x": torch.ones(3, requires_grad=True), "y": [1]},
            r"got a batch of \{'x': 3, 'y'",
        ),
        (lambda rows: rows["x"].sum(), {"x": torch.ones(1, requires_grad=True)}, "at least 2"),
    ],
)
def test_what_cannot_be_split_is_refused(loss: Any, rows: dict[str, Any], got: str) -> None:
    with pytest.raises(OptionsError, match=got):
        split_invariance(loss, rows)
