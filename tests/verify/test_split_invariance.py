"""assert_split_invariant: historical losses are named by line, their fixes pass, and what it reads adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.testing import assert_split_invariant
from hf_accum_fix.verification.split_invariance import Layout, WholeBatch, _Runs, split_invariance

Rows = Mapping[str, Tensor]
LossFn = Callable[[Any, WholeBatch], Tensor]


def batch(samples: int = 6) -> dict[str, Tensor]:
    """Rollouts [B, 5] of unequal lengths, with and without a reward."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 3, 2, 5, 4, 2, 3])[:samples]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws)

    return {
        "logprobs": normal(samples, 5).requires_grad_(),
        "values": normal(samples, 5).requires_grad_(),
        "teacher": normal(samples, 5),
        "returns": normal(samples, 5),
        "advantages": normal(samples, 1),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])[:samples],
        "mask": (torch.arange(5) < lengths[:, None]).float(),
    }


def policy(rows: Rows) -> Tensor:
    """The sum of a policy loss over tokens."""
    return -(rows["logprobs"] * rows["advantages"] * rows["mask"]).sum()


def tokens(rows: Rows) -> Tensor:
    return rows["mask"].sum()


def share(window: WholeBatch) -> Tensor:
    """The tokens of the window by rank, because ranks are averaged."""
    return tokens(window.batch) / window.ranks


@dataclass(frozen=True)
class History:
    """A loss as it was and as it should be."""

    issue: str  # where it is described
    wrong: LossFn  # the loss
    right: LossFn
    line: str  # part of the line of the term that is off
    how: Mapping[str, Any] = field(default_factory=dict)  # arguments of `assert_split_invariant`


def _trl_bnpo(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / tokens(rows) / window.micro_batches


def _by_window(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / share(window)


def _swift_dapo_right(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / share(window) * window.micro_batches


def squared_error(rows: Rows) -> Tensor:
    """The sum of a critic's over tokens."""
    return (((rows["values"] - rows["returns"]) ** 2) * rows["mask"]).sum()


def _verl_critic(rows: Rows, window: WholeBatch) -> Tensor:
    actor = policy(rows) / share(window)
    critic = squared_error(rows) / tokens(rows)
    return actor + 0.5 * critic


def _verl_critic_right(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / share(window) + 0.5 * squared_error(rows) / share(window)


def _prime_rank(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / max(float(tokens(window.of_rank)), 1.0)


_RANKS = {"ranks": (1, 2, 3)}
_MEAN = {"over_micro_batches": "mean", **_RANKS}
HISTORY = (
    History("huggingface/trl grpo_trainer.py 1.16.0, bnpo", _trl_bnpo, _by_window, "policy(rows) /", _RANKS),
    History("modelscope/ms-swift#10117", _by_window, _swift_dapo_right, "policy(rows) /", _MEAN),
    History("verl-project/verl#6957", _verl_critic, _verl_critic_right, "critic = ", _RANKS),
    # Right on one rank, wrong on two.
    History("PrimeIntellect-ai/prime-rl#2358", _prime_rank, _by_window, "policy(rows) /", {"ranks": (2, 3)}),
)


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
