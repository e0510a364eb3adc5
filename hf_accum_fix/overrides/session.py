"""One training of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.core.host import Host
from hf_accum_fix.core.window import Window
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import bare_model, data_ranks, own_step
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.upstream.protocols import AcceleratorLike, TrainerLike
from hf_accum_fix.upstream.seams import VERIFY

#: The trainer's attribute for its session.
SESSION = "_hf_accum_fix_session"
#: The loss of one batch as the base Trainer returns it: (model, inputs, number or None) -> (loss, outputs).
BaseLoss = Callable[[nn.Module, Mapping[str, Any], Any], tuple[Tensor, Any]]


class Session(Host):
    """One training of a Trainer: its ranks and engine, and its state between windows.

    Attributes:
        trainer: the one that trains.
        window: the open one; None: there is none.
        micro_batch: the running one; None: there is none.
        base_loss: replaces the base's ``compute_loss``; None: upstream's.
        entered: a micro-batch of this training came through ``training_step``.
        gradients: `gradient_versions` after the last micro-batch of the open window; None: not checked.
        observed_for: what computed the loss when it was observed.
        shift: labels are shifted as they are smoothed; None: unknown.
        deferred: upstream's numbers for a custom ``get_batch_samples``, whose result is not counted yet.
        busy: running overrides, so that a nested call passes through.
        own_step: see `live.own_step`; None: the base's step runs micro-batches.
        refused: an error of ours in a micro-batch, which a custom training_step may have caught.
        loss_log: the logged loss; None: upstream filters nothing.
        first_divisor: what the first micro-batch of the training divided by, the mean over ranks, 0-dim; None: unknown.
        counting_loss: `observed_for`, and the loss that router losses are counted by.
    """

    window: Window | None = None
    micro_batch: Any = None
    base_loss: BaseLoss | None = None
    entered = False
    gradients: int | None = None
    observed_for: tuple[Any, ...] = ()
    shift: bool | None = None
    deferred: list[Any] | None = None
    refused: AccumFixError | None = None
    loss_log: LossLog | None = None
    first_divisor: Tensor | None = None
    counting_loss: tuple[tuple[Any, ...], Callable[..., Any] | None] | None = None

    def __init__(self, trainer: TrainerLike, options: Options) -> None:
        super().__init__(options)
        self.trainer, args = trainer, trainer.args
        self.rank, self.world_size, self.device = args.process_index, args.world_size, args.device
        self.data_ranks, self.shards = data_ranks(trainer), is_sharded(trainer.accelerator)
        self.own_step = own_step(trainer)
        self.busy: set[str] = set()

    @property
    def accelerator(self) -> AcceleratorLike:
        return self.trainer.accelerator

    @property
    def head(self) -> str:
        return type(bare_model(self.trainer)).__name__

    @property
    def where(self) -> str:
        return f"window {self.state.opened} (step {self.trainer.state.global_step + 1})"

    @property
    def steps(self) -> int:
        return int(self.trainer.args.gradient_accumulation_steps)

    @property
    def readable(self) -> bool:
        return self.device.type == "cpu"

    @property
    def matters(self) -> bool:
        # Label smoothing has to know the shift even if nothing is split.
        return self.is_split or self.trainer.label_smoother is not None

    @property
    def shows(self) -> bool:
        # The mean of a single micro-batch is exact over any items.
        return self.is_split or (self.contract is not None and self.contract.depends_on_number)

    @property
    def observing(self) -> bool:
        """Whether the loss runs to be observed, or to count a router loss."""
        return self.base_loss is not None and self.micro_batch is None

    def bare(self, model: nn.Module) -> nn.Module:
        return bare_model(self.trainer)

    def summed(self, numbers: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(numbers, reduction="sum")  # type: ignore[no-any-return]

    def gather(self, values: list[Any]) -> list[Any]:
        return ranks.gather_object(values)  # type: ignore[no-any-return]

    def warn_off(self, off: Mapping[str, str]) -> None:
        """Warn once of each feature that is off in this training."""
        for what, why in off.items():
            if what != VERIFY:
                self.warn_once(what, why)

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Let a nested call of the same override pass through."""
        self.busy.add(what)
        try:
            yield
        finally:
            self.busy.discard(what)
