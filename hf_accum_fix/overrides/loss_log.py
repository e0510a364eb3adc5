"""Log the training loss unfiltered: a micro-batch whose loss is not finite stays in it.

Upstream's ``logging_nan_inf_filter``, which is on by default, replaces such a loss by the mean of what was logged
before, so the log looks healthy over weights that are nan. Where they differ, upstream's value is logged as well, under
`FILTERED`; the same holds for the ``train_loss`` of the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")

#: Names in the log of upstream's filtered ``loss`` and ``train_loss``.
FILTERED = {"loss": "loss_nan_inf_filtered", "train_loss": "train_loss_nan_inf_filtered"}
#: The argument that switches upstream's filter on.
SWITCH = "logging_nan_inf_filter"

#: Most losses that are kept between two logs.
_MOST_LOSSES = 30_000


def is_loss(logs: dict[str, Any]) -> bool:
    """Whether a log has the training loss: a trainer's other logs have no learning rate."""
    return "loss" in logs and "learning_rate" in logs


class LossLog:
    """The logged loss of one training run, whose arguments have the filter on.

    It has to have the log, and two calls of the loop: `add_filtered`, `end_micro_batch`, `end_step`.
    """

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer = trainer
        self._losses: list[tuple[int, Tensor]] = []
        self._filtered = self._filtered_total = 0.0
        self._first_step: int | None = None
        self._logged_at = 0
        self._logged = self._warned = False

    def add(self, loss: Tensor) -> None:
        """Add the loss of one micro-batch, 0-dim, and turn the loop's filter off for it; no device sync."""
        step = self._trainer.state.global_step
        if self._first_step is None:
            self._first_step = self._logged_at = step
        # Not earlier: whoever reads the arguments as training begins has to see the user's.
        setattr(self._trainer.args, SWITCH, False)
        self._losses.append((step + 1 - self._logged_at, loss.detach()))
        if len(self._losses) >= _MOST_LOSSES:
            self._filter()

    def _filter(self) -> None:
        """Add up the kept losses as upstream's filter does; waits for the device."""
        device = self._trainer.args.device
        losses = [loss.to(device=device, dtype=torch.float32) for _, loss in self._losses]
        for (step, _), loss in zip(self._losses, torch.stack(losses).tolist() if losses else [], strict=True):
            self._filtered += loss if math.isfinite(loss) else self._filtered / step
        self._losses.clear()

    def end_micro_batch(self, count: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``floating_point_ops``, by whose call the loop has added the loss: the arguments are the user's again."""
        setattr(self._trainer.args, SWITCH, True)
        return count(*args, **kwargs)

    def end_step(self, turn: Callable[..., Any], tr_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``_maybe_log_save_evaluate``; upstream subtracts a logged loss from itself, which leaves a nan as it is."""
        self._logged = False
        result = turn(tr_loss, *args, **kwargs)
        if self._logged:
            tr_loss.zero_()
        return result

    def add_filtered(self, logs: dict[str, Any]) -> None:
        """Add upstream's value to the log of a loss that is not finite."""
        state = self._trainer.state
        if "train_loss" in logs and not math.isfinite(logs["train_loss"]):
            self._filter()
            steps = state.global_step - (self._first_step or 0)
            logs[FILTERED["train_loss"]] = (self._filtered_total + self._filtered) / max(steps, 0.001)
        if not is_loss(logs):
            return
        steps, mean = max(state.global_step - self._logged_at, 1), logs["loss"]
        if not math.isfinite(mean):
            # All ranks are here, since the logged loss is their mean.
            self._filter()
            filtered = torch.tensor(self._filtered, device=self._trainer.args.device)
            mean = float(self._trainer.accelerator.reduce(filtered, reduction="mean")) / steps
            logs[FILTERED["loss"]] = mean
            if not self._warned and self._trainer.args.process_index == 0:
                logger.warning(
                    "step %d: the loss of a micro-batch is not finite, and is logged as it is; upstream's %s would "
                    "have logged %r",
                    *(state.global_step, SWITCH, mean),
                )
            self._warned = True
        self._filtered_total += mean * steps
        self._filtered = 0.0
        self._losses.clear()
        self._logged_at, self._logged = state.global_step, True
