"""A hand-written loop as a `Run`: its ranks, its engine, and what its windows have shown."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.closing import Closing
from hf_accum_fix.accumulation.declared import inside_ddp
from hf_accum_fix.engines.engine import engine_divisor, waits_every_micro_batch
from hf_accum_fix.known import Known
from hf_accum_fix.observations import Windows
from hf_accum_fix.options import Options
from hf_accum_fix.router.router_loss import Convention, RouterLoss
from hf_accum_fix.upstream.protocols import AcceleratorLike

logger = logging.getLogger("hf_accum_fix")


class LoopRun(Known):
    """A hand-written loop, and what its windows have shown.

    Attributes:
        accelerator: the live ``accelerate.Accelerator``; None: torch.distributed as it is initialised, or one process.
        options: of the loop.
        head: the model's class, once one was seen.
        passes_number: the model is handed the number.
        router: what is known of its router's loss.
        repeated: samples that its dataloader repeats, for report().
        said: the kinds of warnings that were given.
    """

    def __init__(self, accelerator: AcceleratorLike | None, steps: int | None, options: Options) -> None:
        self.contract = options.contract
        self.windows, self.closing = Windows(), Closing()
        self.accelerator, self.options = accelerator, options
        self.head = "the loss"
        self.passes_number = False
        self.router = RouterLoss(Convention(options.router_loss))
        self.repeated: dict[str, Any] = {}
        self.said: set[str] = set()
        self._steps = steps
        launched = dist.is_available() and dist.is_initialized()
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)
        self._device: torch.device | None = None if accelerator is None else accelerator.device

    @property
    def steps(self) -> int:
        if self._steps is not None:
            return self._steps
        assert self.accelerator is not None
        return int(self.accelerator.gradient_accumulation_steps)

    @property
    def device(self) -> torch.device:
        if self._device is not None:
            return self._device
        on_gpu = self.world_size > 1 and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def count_beside(self, device: torch.device | None) -> None:
        """Put counts where the first loss or model was, without accelerate."""
        self._device = self._device or device

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def data_ranks(self) -> int:
        return self._world_size

    @property
    def engine_divisor(self) -> int:
        return 1 if self.accelerator is None else engine_divisor(self.accelerator, {})

    @property
    def shards(self) -> bool:
        return self.world_size > 1 and self.accelerator is not None and waits_every_micro_batch(self.accelerator)

    @property
    def readable(self) -> bool:
        # A loss of one term is corrected unread.
        return self.device.type == "cpu" and any(len(each.terms) > 1 for each in self.contracts)

    @property
    def steps_in_backward(self) -> bool:
        return self.accelerator is not None and self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def summed(self, numbers: Tensor) -> Tensor:
        if self.world_size > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers)
        return numbers

    def gather(self, said: list[Any]) -> list[Any]:
        # accelerate's asks for its own state, which a loop without it has not.
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, said[0])
        return gathered

    def tell(self, why: str, windows: int = 1) -> None:
        self.windows.note_inexact(windows=windows)
        if self.steps * self.world_size > 1:
            self.warn_once(
                "certificate",
                f"{self.head}: window {self.windows.opened} is not exact: {why}. Every window is checked; report() has "
                "how many were not.",
            )

    def warn_once(self, kind: str, message: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            logger.warning(message)

    def tell_rounded(self, words: str) -> None:
        """Say once what 16 bits have lost."""
        if "16 bits" not in self.said:
            self.windows.note_inexact()
        self.warn_once("16 bits", words)

    def tell_repeated(self, samples: int) -> None:
        """Say once that the dataloader repeats samples."""
        if self.repeated:
            return
        self.repeated = {"repeated_samples": samples, "repeated_samples_dropped": self.options.drop_duplicates}
        if self.windows.recorded:
            observations.amend(self.repeated)
        if not self.options.drop_duplicates:
            words = f"repeat {samples} samples, so that every rank has as many, and count them twice"
            self.warn_once("repeated", f"an epoch's last micro-batches {words}; drop_duplicates=True leaves them out")

    def bare(self, model: nn.Module) -> nn.Module:
        """The model inside of what an engine has put around it."""
        model = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        return inside_ddp(model) or model
