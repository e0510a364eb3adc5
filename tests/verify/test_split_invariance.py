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


@pytest.mark.parametrize("history", HISTORY, ids=lambda history: history.issue)
def test_a_historical_loss_is_named_by_its_line_its_fix_passes_and_its_terms_add_up(history: History) -> None:
    over: Any = history.how.get("over_micro_batches", "sum")
    with pytest.raises(AssertionError, match="depends on the split") as raised:
        assert_split_invariant(history.wrong, batch(), **history.how)
    (off,) = [line for line in str(raised.value).splitlines() if line.startswith("  off: ")]
    assert history.line in off, off
    report = assert_split_invariant(history.right, batch(), **history.how)
    assert report and report.splits
    assert bool(split_invariance(history.wrong, batch(), over_micro_batches=over)) == (1 not in history.how["ranks"])
    layout = Layout((1, 2, 3))
    for loss in (history.wrong, history.right):
        runs = _Runs(loss, batch(), (), over)
        added = sum(runs.by_lines(layout).values())
        torch.testing.assert_close(added, runs.gradient(layout), rtol=1e-12, atol=1e-14)


def test_whitened_advantages_are_off_at_their_line() -> None:
    def whitened(rows: dict[str, Tensor], window: WholeBatch) -> Tensor:
        advantages = rows["advantages"] - rows["advantages"].mean()
        return (rows["logprobs"] * advantages * rows["mask"]).sum() / share(window)

    (off,) = [each for each in split_invariance(whitened, batch()).words if each.startswith("off: ")]
    assert 'rows["logprobs"] * advantages' in off


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


def test_a_loss_may_write_into_its_micro_batch() -> None:
    def loss(rows: dict[str, Tensor], window: WholeBatch | None = None) -> Tensor:
        assert window is not None
        rows["mask"] *= 0.5
        rows["logprobs"].clamp_(max=0.5)
        return 2 * policy(rows) / share(window)

    assert_split_invariant(loss, batch())


def summed(rows: Any) -> Tensor:
    return rows["x"].sum()


def some(count: int, **other: Any) -> dict[str, Any]:
    return {"x": torch.ones(count, requires_grad=True), **other}


#: The function, the batch, further arguments and words of the refusal.
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (lambda rows: rows["x"], some(3), {}, r"got \(3,\) from loss_fn"),
    (summed, {"x": torch.ones(3)}, {}, "got a gradient of norm 0"),
    (summed, some(3, y=[1]), {}, r"got a batch of \{'x': 3, 'y'"),
    (summed, some(1), {}, "at least 2"),
    *((summed, some(4), {"ranks": ranks}, "; expected ") for ranks in ((0,), 2, (), (9,))),
    (summed, some(4), {"over_micro_batches": "max"}, "; expected "),
    (None, {}, {}, "expected a function and a mapping"),
    (torch.sum, [1, 2], {}, "expected a function and a mapping"),
]


@pytest.mark.parametrize(("loss", "rows", "how", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_split_is_refused(loss: Any, rows: Any, how: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        split_invariance(loss, rows, **how)


def test_a_divisor_of_zero_is_off_at_the_split_that_has_it() -> None:
    report = split_invariance(lambda its: its["x"].sum() / (len(its["x"]) // 2), some(4))
    assert not report and "off: " in str(report)
    with pytest.raises(OptionsError, match=r"a division by zero from loss_fn at micro-batches of 1\+"):
        split_invariance(lambda its: its["x"].sum() * (1 / (len(its["x"]) // 2)), some(4))
