"""A hand-written loop as a host of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix.counting.items import Items
from hf_accum_fix.engines.engine import engine_divisor, waits_every_micro_batch
from hf_accum_fix.engines.model import holds_shards, requires_number, wants_number
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.engines.ranks import World
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.options import Options
from hf_accum_fix.router.router_loss import has_z_loss
from hf_accum_fix.weighing.part import Part
from hf_accum_fix.window.host import Host, loss_of_outputs
from hf_accum_fix.window.window import Window, open_unless_aside

Batch = Mapping[str, Any]
#: A loss of one's own: (model, micro-batch) -> its loss, or outputs with one.
LossOf = Callable[[Any, dict[str, Any]], Any]


class LoopHost(Host):
    """A hand-written loop: its ranks and engine, and the model of the open window."""

    name = "accumulation_windows"
    trained: nn.Module | None = None
    loss_of: LossOf | None = None  # what computes the loss; None: the model
    head = "the loss"

    def __init__(self, accelerator: Any, steps: int | None, options: Options) -> None:
        launched = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)
        shards = size > 1 and accelerator is not None and waits_every_micro_batch(accelerator)
        device = torch.device("cpu") if accelerator is None else accelerator.device
        super().__init__(options, World(rank, size, size, shards, device), has_stock=False)
        self.accelerator, self._steps, self._is_placed = accelerator, steps, accelerator is not None

    @property
    def steps(self) -> int:
        return self._steps or int(getattr(self.accelerator, "gradient_accumulation_steps", 1))

    @property
    def corrects_alone(self) -> bool:
        # A loop has no log at which to read; several ranks would need one more collective.
        return self.contract is not None and bool(self.contract.terms)

    def summed(self, numbers: Tensor) -> Tensor:
        if self.world.size > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers)
        return numbers

    def open(self, batches: Sequence[Batch], device: torch.device | None = None) -> Window:
        """Count a window; without accelerate, on the ``device`` of the first loss or model."""
        if not self._is_placed:
            on_gpu = self.world.size > 1 and dist.get_backend() == "nccl"
            usual = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            self.world.device, self._is_placed = device or usual, device is not None
        if (window := open_unless_aside(self, batches)) is not None:
            return window
        # The mean over its micro-batches, as a loop has it without this package.
        plain = LossContract(Reduction.PLAIN, reason="looking at its loss failed")
        self.state.loss.contract = plain
        self.router.forget()
        self.coupled = None
        steps, ranks = max(len(batches), 1), self.world.data_ranks
        part = Part(plain, {Items(): self.zero}, steps, ranks, False, engine_divisor(self.accelerator))
        return Window(self, list(batches), part, [{} for _ in batches])

    def refresh_loss_source(self, batches: Sequence[Batch]) -> None:
        given = self.options.contract
        if self.trained is None:
            return
        bare, is_own = self.bare(self.trained), self.loss_of is not None
        self.head, wants = "the loss" if is_own else type(bare).__name__, not is_own and wants_number(bare)
        self.source.passes_number = wants if given is None else given.by_number
        if given is not None and self.source.passes_number and not wants:
            raise ContractError(
                f"got a contract by which the loss {given.reduction.value}, but {self.head} takes no "
                "num_items_in_batch; expected Reduction.MEAN"
            )

    def facts(self, batches: Sequence[Batch], number: Any) -> Setting:
        bare = self.bare(self.model)
        required = self.source.passes_number and requires_number(bare)
        handed = "all" if required else "once" if self.source.passes_number else "none"
        is_own = self.loss_of is not None
        has_z = not is_own and has_z_loss(bare)
        return self.setting(bare, handed=handed, hands_number=required, custom=is_own, has_z_loss=has_z)

    @contextmanager
    def run(self, batches: Sequence[Batch]) -> Iterator[LossRun]:
        module = self.model

        def forward(inputs: Batch, number: Tensor | None) -> Tensor:
            tensors = {key: each.to(self.world.device) for key, each in inputs.items() if isinstance(each, Tensor)}
            return self.forward(module, {**inputs, **tensors}, number)[0]

        yield LossRun(forward, module, self.world.device, holds_shards(module), self.bare(module))

    def forward(self, model: nn.Module, inputs: Batch, number: Tensor | None) -> tuple[Tensor, Any]:
        """Loss and outputs of a forward."""
        with own_counts(inputs):
            own, given = self.loss_of, dict(inputs)
            outputs = self.model_outputs(model, inputs, number) if own is None else own(model, given)
        return loss_of_outputs(outputs, inputs, model), outputs
