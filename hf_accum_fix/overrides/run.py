"""A Trainer's training as a `Run`: its ranks, its engine, and how it warns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import engine_divisor, is_sharded
from hf_accum_fix.overrides.live import data_ranks, head_name, is_cut
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.upstream.protocols import TrainerLike


@dataclass(frozen=True)
class TrainerRun:
    """A Trainer's training."""

    trainer: TrainerLike
    session: Session

    @property
    def head(self) -> str:
        return head_name(self.trainer)

    @property
    def steps(self) -> int:
        return int(self.trainer.args.gradient_accumulation_steps)

    @property
    def device(self) -> torch.device:
        return self.trainer.args.device  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        return int(self.trainer.args.process_index)

    @property
    def world_size(self) -> int:
        return int(self.trainer.args.world_size)

    @property
    def data_ranks(self) -> int:
        return data_ranks(self.trainer)

    @property
    def engine_divisor(self) -> int:
        return engine_divisor(self.trainer.accelerator, {})

    @property
    def shards(self) -> bool:
        return is_sharded(self.trainer.accelerator)

    @property
    def readable(self) -> bool:
        return self.device.type == "cpu"

    @property
    def steps_in_backward(self) -> bool:
        return bool(self.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def summed(self, numbers: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(numbers, reduction="sum")  # type: ignore[no-any-return]

    def gather(self, said: list[Any]) -> list[Any]:
        return ranks.gather_object(said)  # type: ignore[no-any-return]

    def tell(self, why: str, windows: int = 1) -> None:
        session, trainer = self.session, self.trainer
        session.windows.note_inexact(windows=windows)
        by_number = session.contract is not None and session.contract.depends_on_number
        # The mean of the only micro-batch is right, whatever it is over.
        if by_number or is_cut(trainer):
            session.warn_once(
                "certificate",
                f"{self.head}: window {session.windows.opened} (step {trainer.state.global_step + 1}) is not exact: "
                f"{why}. Every window is checked; report() has how many were not.",
            )

    def warn_once(self, kind: str, message: str) -> None:
        self.session.warn_once(kind, message)
