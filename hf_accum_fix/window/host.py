"""The base of what runs windows, the Trainer or a hand-written loop: ranks, engine, warnings, state."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix import observations
from hf_accum_fix.counting.items import Labels, count_dtype, labels_of
from hf_accum_fix.coupled.coupled_loss import CoupledLoss
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.delivered import Delivery
from hf_accum_fix.engines.engine import reduced_in
from hf_accum_fix.engines.model import decoder_pad, inside_ddp, products_are_rounded
from hf_accum_fix.engines.ranks import Training, World
from hf_accum_fix.errors import BY_DESIGN, ContractError
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.options import Options
from hf_accum_fix.reading.values import Captured, capture
from hf_accum_fix.router.router_loss import Convention, RouterLoss
from hf_accum_fix.window.state import ALWAYS, LossSource, TrainingState

logger = logging.getLogger("hf_accum_fix")

Value = TypeVar("Value")
#: Why a loss is not observed: only what training runs is run.
MADE_LATER = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
MADE_BY_STEP = "its training_step never calls the Trainer's, and is not run except to train"


class Host(Training, ABC):
    """One training: it runs its loss, sums and gathers over ranks, and knows facts; all else is done here."""

    #: the model as the engine runs it; None: a loop's loss is custom, or it has no micro-batch.
    trained: nn.Module | None
    coupled: CoupledLoss | None = None  # its loss over the whole window; None: it is each micro-batch's
    context_parallel = False  # its step would cut samples

    def __init__(self, options: Options, world: World, *, has_stock: bool) -> None:
        self.options, self.world, self.state = options, world, TrainingState()
        self.source, self.delivery = LossSource(has_stock), Delivery(options)
        self.router = RouterLoss(Convention(options.router_loss))
        self.noted: dict[str, Any] = {}  # more facts for report()
        self.warned: set[str] = set()  # names of the warnings that were given

    @property
    def where(self) -> str:
        """The open window, for messages."""
        return f"window {self.state.opened}"

    @property
    def zero(self) -> Tensor:
        """A count of nothing, 0-dim."""
        return torch.zeros((), dtype=count_dtype(self.world.device), device=self.world.device)

    @property
    def reads_are_free(self) -> bool:
        """Whether reading a number does not wait for a device."""
        return self.world.device.type == "cpu"

    @property
    def knows_other_ranks(self) -> bool:
        """Whether every window's collective tells this rank what the others have found."""
        return self.world.size == 1 or self.reads_are_free

    @property
    def corrects_alone(self) -> bool:
        """Whether every window's gradient is corrected where there is one rank."""
        return self.reads_are_free

    @property
    def is_split(self) -> bool:
        """Whether a global batch has more than one micro-batch, or may be cut."""
        return self.steps * self.world.data_ranks > 1 or self.options.out_of_memory == "split"

    def bare(self, model: nn.Module) -> nn.Module:
        """The model without the engine's wrappers."""
        model = model if self.accelerator is None else self.accelerator.unwrap_model(model)
        return inside_ddp(model) or model

    @property
    def model(self) -> nn.Module:
        """The model to observe: a forward through DDP without gradient would switch off the next one's buffer sync."""
        assert self.trained is not None
        return inside_ddp(self.trained) or self.trained

    @property
    def rounds_products(self) -> bool:
        """Whether matrix products are less precise than float32."""
        return getattr(self.accelerator, "mixed_precision", "no") != "no" or products_are_rounded(self.model)

    def capturing(self, contract: LossContract, model: nn.Module) -> AbstractContextManager[Captured]:
        """Around the forward of a micro-batch: what weighing its loss needs of it."""
        wants = contract.captures
        return capture(self.bare(model), **wants) if wants else nullcontext(Captured())

    def model_outputs(self, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None) -> Any:
        """Outputs of a forward; a model that takes num_items_in_batch gets the number."""
        given = {"num_items_in_batch": number} if self.source.passes_number and number is not None else {}
        return model(**{**inputs, **given})

    def gather(self, values: list[Any]) -> list[Any]:
        """Concatenate the ranks' lists, of one value each, in order: a collective; accelerate's needs its own state."""
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, values[0])
        return gathered

    @abstractmethod
    def run(self, batches: Sequence[Any]) -> AbstractContextManager[LossRun]:
        """The trained loss, to be run on micro-batches of a window while the context is open."""

    def run_counting(self, batches: Sequence[Any]) -> AbstractContextManager[LossRun]:
        """Like `run`, around counting the routing of a window."""
        return self.run(batches)

    @abstractmethod
    def facts(self, batches: Sequence[Any], number: Any) -> Setting | LossContract:
        """What is known of the loss of these micro-batches; ``number``: upstream's count of them, or None.

        Its contract, if only what training runs may be run.
        """

    def setting(self, bare: nn.Module, *, handed: str, hands_number: bool, **more: Any) -> Setting:
        """Facts about any training, and ``more`` of this host's; ``bare``: the model without wrappers."""
        return Setting(
            handed=handed,
            is_cut=self.world.cuts_samples,
            hands_number=hands_number,
            world_size=self.world.data_ranks,
            rounded=self.rounds_products,
            decoder_pad=decoder_pad(bare),
            **more,
        )

    @abstractmethod
    def refresh_loss_source(self, batches: Sequence[Any]) -> None:
        """Note what computes the loss now, and check a given contract, before a window is settled."""

    def refresh(self, batches: Sequence[Any]) -> None:
        """Note what computes the loss, and the labels that most micro-batches of the first window have."""
        self.refresh_loss_source(batches)
        if self.state.loss.labels is None and batches:
            [(self.state.loss.labels, _)] = Counter(map(self.labels_of, batches)).most_common(1)

    def all_of(self, value: Value, error: Exception | None) -> list[Value]:
        """The value of every rank, in order; the error of one is raised on all."""
        place = {"rank": self.world.rank, "world_size": self.world.size}
        return ranks.all_gather_or_raise(value, error, gather=self.gather, **place)

    @property
    def contract(self) -> LossContract | None:
        """How the loss is reduced; None: it was not observed yet."""
        return self.state.loss.contract

    @property
    def is_due(self) -> bool:
        """Whether the next window settles the contract, as far as this rank knows."""
        loss = self.state.loss
        return not loss.is_settled or (self.world.data_ranks == 1 and loss.reconsiders)

    def labels_of(self, batch: Any) -> Labels:
        """The labels of a micro-batch, or those that a given contract counts."""
        given = self.options.contract
        return labels_of(batch, None if given is None else {key for rule in given.rules for key in rule.keys})

    def contained(self, what: str, look: Callable[[], Value], instead: Value) -> Value:
        """The result of looking at something, or ``instead`` if that fails: no look ends a training."""
        try:
            return look()
        except BY_DESIGN:
            raise
        except Exception as error:
            self.note_trouble(what, error)
            return instead

    def note_trouble(self, what: str, error: Exception) -> None:
        """Warn once that a look failed; from the next window on the training is stock's, on every rank."""
        self.state.told.troubled = True
        self.warn_inexact(
            "trouble",
            f"{self.where}: {what} failed ({type(error).__name__}: {error}). The training goes on as without "
            "hf_accum_fix, and is not exact; please report this error",
        )
        logger.debug("%s failed", what, exc_info=error)

    def stand_aside(self) -> None:
        """Let the training go on as without us: its loss cannot be read, or looking at it failed on a rank."""
        state, plain = self.state, self.contract
        state.aside = True
        if plain is None or plain.reduction is not Reduction.STOCK:
            plain = LossContract(Reduction.PLAIN, reason="looking at its loss failed on another rank")
            # Once, whatever this rank has warned of already.
            if "inexact" not in self.warned:
                outcome = "The training goes on as without hf_accum_fix, and is not exact"
                self.warn_once("trouble", f"{self.where}: {plain.reason}. {outcome}")
        if not state.recorded:
            self.contained("reporting a loss", partial(self.record, plain), None)
        state.amend(exact=False)

    def warn_once(self, name: str, message: str) -> None:
        """Warn once for each name."""
        if name not in self.warned:
            self.warned.add(name)
            logger.warning(message)

    def warn_inexact(self, name: str, message: str) -> None:
        """Warn once, and count this window as inexact."""
        self.state.note_inexact()
        self.warn_once(name, message)

    def report_inexact(self, why: str, windows: int = 1) -> None:
        """Warn that this window, or several since the last log, are not exact."""
        self.state.note_inexact(windows=windows)
        # The mean of a single micro-batch is exact over any items.
        if self.is_split or (self.contract is not None and self.contract.by_number):
            words = f"{self.where} is not exact: {why}. Every window is checked; report() has how many were not."
            self.warn_once("inexact window", f"{self.head}: {words}")

    def read(self) -> None:
        """Warn of what was found on the device since the last call; waits for it."""
        state = self.state
        self.delivery.ask(self.delivery.steps.conclude, self)
        if windows := int(state.unread):
            self.report_inexact("its terms divide by another number of items than predicted", windows)
            # Several ranks would first have to agree on it.
            if self.world.data_ranks == 1:
                state.loss.windows_to_correct = ALWAYS
        state.unread = 0
        if "empty" not in self.warned and bool(state.empty):
            self.warn_once(
                "empty",
                "got an accumulation window with no target, so its gradient and logged loss are zero; look at "
                "truncation, label masking, or samples without an answer",
            )
        for name, message in () if self.router.convention is Convention.MEAN else self.router.remarks():
            self.warn_once(name, f"{self.head}: {message}")

    def note(self, **facts: Any) -> None:
        """Keep more facts for report()."""
        self.noted |= facts
        self.state.amend(**facts)

    def announce(self, contract: LossContract) -> None:
        """Record for report(), and log, how the loss of this training is reduced."""
        self.record(contract)
        if self.world.rank == 0:
            router = f", {self.router.in_force}" if contract.has_router_loss else ""
            ranks = self.world.data_ranks
            logger.info("%s: the loss %s%s; G=%d, W=%d.", self.head, contract, router, self.steps, ranks)

    def record(self, contract: LossContract) -> None:
        """Keep a contract for report()."""
        state, model, ranks = self.state, self.trained, self.world.data_ranks
        observations.record(
            {
                "head": self.head,
                "trainer": self.name,
                **contract.facts(),
                "exact": state.exact,
                "inexact_windows": state.inexact,
                "accumulation_steps": self.steps,
                "world_size": ranks,
                "reduced_in": reduced_in(self.accelerator, model) if ranks > 1 and model is not None else [],
                **({} if self.coupled is None else self.coupled.facts()),
                "router_loss": self.router.in_force.value,
                **self.noted,
            }
        )
        state.recorded = True

    def around_forward(self, place: int, share: float = 1.0) -> ExitStack:
        """Around the forward of a micro-batch in training, or a ``share`` of it: what its loss has to know."""
        with ExitStack() as stack:
            if self.router.convention is not Convention.MEAN:
                stack.enter_context(self.router.micro_batch(place, share))
            if self.coupled is not None:
                stack.enter_context(self.coupled.micro_batch(place))
            return stack.pop_all()


def loss_of_outputs(outputs: Any, inputs: Mapping[str, Any], model: object) -> Tensor:
    """The loss that a model returned: alone, as its output ``loss``, or the first.

    Raises:
        ContractError: if its outputs are named and none is the loss.
    """
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise ContractError(
            f"{type(model).__name__}: got outputs {sorted(outputs)} without a loss, from the inputs {sorted(inputs)}; "
            "expected a loss; add the targets to the inputs, or pass compute_loss_func"
        )
    loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss
