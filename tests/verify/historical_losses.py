"""Losses of RL libraries that depended on the split, as their issues describe them, each beside its fix.

Every term stands on a line of its own, so that a test can see which line is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.verification.split_invariance import WholeBatch

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


def positive(rows: Rows) -> Tensor:
    """The tokens of correct samples."""
    return rows["mask"] * (rows["rewards"] > 0)[:, None]


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


def _nemo_nll(rows: Rows, window: WholeBatch) -> Tensor:
    loss = policy(rows) / share(window)
    correct = positive(rows)
    if correct.sum() > 0:
        loss = loss - 0.1 * (rows["logprobs"] * correct).sum() / correct.sum()
    return loss


def _nemo_nll_right(rows: Rows, window: WholeBatch) -> Tensor:
    loss = policy(rows) / share(window)
    return loss - 0.1 * (rows["logprobs"] * positive(rows)).sum() / positive(window.batch).sum() * window.ranks


def _prime_rank(rows: Rows, window: WholeBatch) -> Tensor:
    return policy(rows) / max(float(tokens(window.of_rank)), 1.0)


_RANKS = {"ranks": (1, 2, 3)}
_MEAN = {"over_micro_batches": "mean", **_RANKS}
HISTORY = (
    History("huggingface/trl grpo_trainer.py 1.16.0, bnpo", _trl_bnpo, _by_window, "policy(rows) /", _RANKS),
    History("modelscope/ms-swift#10117", _by_window, _swift_dapo_right, "policy(rows) /", _MEAN),
    History("verl-project/verl#6957", _verl_critic, _verl_critic_right, "critic = ", _RANKS),
    History("NVIDIA-NeMo/RL#3791", _nemo_nll, _nemo_nll_right, "loss - 0.1", _RANKS),
    # Right on one rank, wrong on two.
    History("PrimeIntellect-ai/prime-rl#2358", _prime_rank, _by_window, "policy(rows) /", {"ranks": (2, 3)}),
)
