"""What the Trainer's methods do instead: the one room that knows them, and where the two flows meet.

Each function is called as ``fn(wrapped, trainer, args, kwargs, options=...)``, by the patch on the Trainer class and by
`GlobalBatchMixin` through ``super()`` alike; ``wrapped`` is the bound original. With both active the inner call passes
through: everything here is set, nothing is multiplied, so being asked twice changes nothing.

    train              refuse what cannot be right, before anything has run
    get_batch_samples  count the window; on the first one, observe the loss
    compute_loss       ours inside a window: call the model with n_mean, or weigh its mean by n / n_mean
    training_step      hand accelerate the loss that makes its own division right, and return the one to log
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderStateMixin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix import observations, ranks
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.balancing import LENDER
from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.declared import (
    has_parameter,
    inside_ddp,
    products_are_rounded,
    router_coefficients,
    takes_number,
)
from hf_accum_fix.accumulation.observe import NO_TARGET_SEEN, LossCall, observe
from hf_accum_fix.accumulation.router_loss import Convention, Form, Forward, RouterLoss, one_form
from hf_accum_fix.accumulation.share import Cut, loss_among, share_of
from hf_accum_fix.accumulation.whole_windows import Blank, WholeWindows, without_blanks
from hf_accum_fix.accumulation.window import Items, Weightless, count_dtype, total_items
from hf_accum_fix.dealing import Dealer, RedealtLoader, unfit
from hf_accum_fix.duplicates import WithoutDuplicates
from hf_accum_fix.engine import engine_divisor, inputs_are_rounded, is_sharded, tell_last, waits_every_micro_batch
from hf_accum_fix.errors import ContractError, RankError, SeamError, UnsupportedSetupError
from hf_accum_fix.loss_log import LossLog
from hf_accum_fix.options import BalanceOptions, Options, enabled
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.defects import is_present

logger = logging.getLogger("hf_accum_fix")

#: Where a trainer keeps its session, and the key that marks its state (and so its checkpoints).
SESSION = "_hf_accum_fix_session"
STATE_KEY = "hf_accum_fix"

#: Where a trainer keeps what deals its windows, with the lengths that it read, from one train() to the next; None there
#: leaves its windows as they are.
DEALER = "_hf_accum_fix_dealer"

_ABSENT = object()

#: Asked here, as looking it up takes longer than all that is done in a micro-batch.
_LAST_NOT_REDUCED = is_present("last-micro-batch-not-reduced", transformers.__version__)

#: Windows that are observed before an inconclusive contract is taken as it is.
_ATTEMPTS = 3


@dataclass
class MicroBatch:
    """One forward and backward, while it runs.

    Attributes:
        share: its loss, such that the sum over the window, averaged over ranks, is the global batch's.
        reported: that without its graph, once it was handed to the engine.
    """

    items: Tensor | None
    weightless: bool = False
    share: Tensor | None = None
    base_called: bool = False
    reported: Tensor | None = None


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        batches: as the loop will hand them to ``training_step``.
        counts: items of each, 0-dim, on the training device; empty where the contract counts none.
        total: N over all ranks.
        cut: n_mean, G and W.
        upstream_number: what the installed release counted, over all ranks; None: nothing.
    """

    batches: list[Any]
    counts: list[Tensor]
    total: Tensor
    cut: Cut
    upstream_number: Any = None
    steps_run: int = 0

    def items_of(self, inputs: Any) -> Tensor | None:
        """Items of this micro-batch, told by identity; None where somebody handed over another object."""
        return next((count for batch, count in zip(self.batches, self.counts, strict=False) if batch is inputs), None)


@dataclass
class Session:
    """What is known of one trainer between its windows."""

    options: Options
    contract: LossContract | None = None
    observed_for: tuple[Any, ...] = ()
    passes_number: bool = False
    attempts: int = 0
    window: Window | None = None
    micro_batch: MicroBatch | None = None
    observing: bool = False
    base_loss: tuple[Tensor, Any] | None = None
    busy: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    empty_windows: Tensor | None = None
    loss_log: LossLog | None = None
    repeated: dict[str, Any] = field(default_factory=dict)
    router: RouterLoss | None = None
    counting_loss: tuple[tuple[Any, ...], Callable[..., Any] | None] | None = None

    def warn_once(self, kind: str, message: str) -> None:
        """Warn once for each kind and run."""
        if kind not in self.said:
            self.said.add(kind)
            logger.warning(message)


def session_of(trainer: Any, options: Options) -> Session:
    """The session of a trainer, made at its first use."""
    session: Session | None = trainer.__dict__.get(SESSION)
    if session is None:
        session = trainer.__dict__[SESSION] = Session(options)
    return session


# --- train ----------------------------------------------------------------------------------------------------------


def train(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, options: Options
) -> Any:
    """Refuse what cannot be right, start from a fresh session, and say at the end what was kept on the device."""
    session = session_of(trainer, options)
    if not enabled() or "train" in session.busy:
        return wrapped(*args, **kwargs)
    check_setup(trainer)
    session = trainer.__dict__[SESSION] = Session(options)
    session.loss_log = LossLog(trainer) if trainer.args.logging_nan_inf_filter else None
    try:
        logged = session.loss_log.installed() if session.loss_log is not None else nullcontext()
        with busy(session, "train"), _whole_windows(trainer, options), logged:
            result = wrapped(*args, **kwargs)
    finally:
        session.window = None
    if session.empty_windows is not None and int(session.empty_windows):
        _warn_empty(session)
    _note_routing(trainer, session)
    _tell_saved(trainer)
    return result


def check_setup(trainer: Any) -> None:
    """Raise `UnsupportedSetupError` for a setup whose averaging is not the one this package rests on."""
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"{name} would run torch.nn.DataParallel on {trainer.args.n_gpu} GPUs; start it with "
            "`accelerate launch` (one process a GPU), or show it one GPU by CUDA_VISIBLE_DEVICES"
        )
    if getattr(trainer, "use_apex", False):
        raise UnsupportedSetupError(f"{name} uses apex, which goes past accelerate.backward; use torch's bf16 or fp16")
    split = {kind: size for kind in ("cp", "sp") if (size := _parallel_size(trainer, kind)) > 1}
    if split:
        told = ", ".join(f"{kind}_size={size}" for kind, size in split.items())
        raise UnsupportedSetupError(
            f"{name} splits samples over ranks ({told}), so that no rank sees the items of a sample; needed are "
            "ranks with whole samples: leave context and sequence parallelism out of the parallelism_config (data and "
            "tensor parallelism are supported)"
        )


@contextmanager
def _whole_windows(trainer: Any, options: Options) -> Iterator[None]:
    """Hand the loop whole windows, where its release or a stream would let the end of an epoch leak or be lost."""
    module = sys.modules[Trainer.__module__]
    original_loader, original_skip = trainer.get_train_dataloader, module.skip_first_batches
    counts_windows = _counts_windows()
    loses_the_rest = is_present("epoch-tail-not-trained", transformers.__version__) or not counts_windows

    def opened(window: list[Any]) -> None:
        _open_window(trainer, session_of(trainer, options), window, None, options)

    def repeated(samples: int) -> None:
        _tell_repeated(trainer, session_of(trainer, options), samples, dropped=options.drop_duplicates)

    def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
        with _not_dispatching(trainer, options):
            loader = original_loader(*args, **kwargs)
        if isinstance(loader, (WholeWindows, WithoutDuplicates, RedealtLoader)):
            return loader
        _let_epochs_through(loader)
        loader = _dealt(trainer, loader, options)
        # A loader of the trainer's own, which accelerate did not prepare, repeats nothing.
        if trainer.args.world_size > 1 and isinstance(loader, DataLoaderStateMixin):
            loader = WithoutDuplicates(loader, options.drop_duplicates, repeated)
            loader.check()
        if not (loses_the_rest or _is_endless(loader)):
            return loader
        return WholeWindows(loader, trainer.args.gradient_accumulation_steps, None if counts_windows else opened)

    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(dataloader, (WholeWindows, WithoutDuplicates, RedealtLoader)):
            return original_skip(dataloader, *args, **kwargs)
        return dataloader.around(skip_first_batches(dataloader.__wrapped__, *args, **kwargs))

    with (
        shadow(trainer, "get_train_dataloader", get_train_dataloader),
        shadow(module, "skip_first_batches", skip_first_batches),
    ):
        yield


def _tell_repeated(trainer: Any, session: Session, samples: int, *, dropped: bool) -> None:
    if session.repeated:
        return
    session.repeated = {"repeated_samples": samples, "repeated_samples_dropped": dropped}
    if "announced" in session.said:
        observations.amend(session.repeated)
    if trainer.args.process_index > 0:
        return
    if dropped:
        logger.info("an epoch's last micro-batches repeat %d samples to even out the ranks; left out", samples)
    else:
        logger.warning(
            "an epoch's last micro-batches repeat %d samples, so that every rank has as many, and count them twice; "
            "apply(drop_duplicates=True), or Options(drop_duplicates=True), leaves them out",
            samples,
        )


def _let_epochs_through(loader: Any) -> None:
    """Let a batch sampler that draws by epoch (batch_rebalance) hear of it behind accelerate's shard of it.

    The Trainer tells it past the shard, but not past what skips the batches of a resumed epoch as well.
    """
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(shard, "batch_sampler", None)
    if hasattr(sampler, "set_epoch") and not hasattr(shard, "set_epoch"):
        shard.set_epoch = sampler.set_epoch


def _dealt(trainer: Any, loader: Any, options: Options) -> Any:
    """The loader with its windows dealt by length, where that is asked for."""
    args = trainer.args
    if not isinstance(options.balance_windows, BalanceOptions) or isinstance(loader, (WholeWindows, RedealtLoader)):
        return loader
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and not _is_endless(loader):
        session_of(trainer, options).warn_once(
            "dealt already",
            "balance_windows: the dealing is left to train_sampling_strategy='batch_rebalance'; gradient and log are "
            "mended all the same",
        )
        return loader
    dealer = trainer.__dict__.get(DEALER, _ABSENT)
    if dealer is None:
        return loader
    if dealer is _ABSENT or dealer.options != options.balance_windows:
        dealer = trainer.__dict__[DEALER] = Dealer(options.balance_windows, progress=not args.disable_tqdm)
    return dealer.around(
        loader,
        args.gradient_accumulation_steps,
        lockstep=waits_every_micro_batch(trainer.accelerator),
        length_column=getattr(args, "length_column_name", None) or "length",
        columns=trainer.train_dataset,
    )


def _tell_saved(trainer: Any) -> None:
    """What dealing brought, in padded tokens, at the end of a training."""
    dealer = trainer.__dict__.get(DEALER)
    if dealer is None or not dealer.real or trainer.args.process_index > 0:
        return
    logger.info(
        "balance_windows: %.3f padded tokens for a real one; as they come the windows would have had %.3f",
        dealer.dealt / dealer.real,
        dealer.as_they_come / dealer.real,
    )


@contextmanager
def _not_dispatching(trainer: Any, options: Options) -> Iterator[None]:
    """Let each rank read its own stream while its loader is made, as a dispatched one cannot be dealt.

    On one rank that is the same loader. On several the user has to say that every rank may read the stream.
    """
    holder = getattr(trainer.accelerator, "dataloader_config", None) or trainer.accelerator
    stream = isinstance(trainer.train_dataset, IterableDataset)
    if not options.balance_windows or not stream or holder.dispatch_batches is not None or trainer.args.world_size > 1:
        yield
        return
    session_of(trainer, options).warn_once(
        "dispatching", "balance_windows: dispatch_batches, the Trainer's default for a stream, is off in this training"
    )
    with shadow(holder, "dispatch_batches", False):
        yield


def _check_dealing(trainer: Any, contract: LossContract, options: Options) -> None:
    """Refuse a loss that depends on which samples share a micro-batch."""
    if not options.balance_windows:
        return
    reason = unfit(contract)
    if reason is not None:
        raise UnsupportedSetupError(
            f"balance_windows: {_head_name(trainer)}: {reason}. Dealing samples by length would change such a loss; "
            "needed is a loss that is a mean over items or a sum, or balance_windows=False"
        )


def _is_endless(loader: Any) -> bool:
    """Whether a loader cannot say how many micro-batches an epoch has."""
    try:
        len(loader)
    except TypeError:
        return True
    return False


def _parallel_size(trainer: Any, kind: str) -> int:
    size = getattr(trainer, f"get_{kind}_size", None)
    if size is not None:
        return int(size())
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return int(getattr(config, f"{kind}_size", 1) or 1)


# --- get_batch_samples ----------------------------------------------------------------------------------------------


def get_batch_samples(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, options: Options
) -> Any:
    """Count the window that was fetched, over all ranks, and return N in the place of upstream's own number."""
    session = session_of(trainer, options)
    if not enabled() or "get_batch_samples" in session.busy:
        return wrapped(*args, **kwargs)
    averaged = getattr(trainer.args, "average_tokens_across_devices", False)
    with busy(session, "get_batch_samples"):
        # Upstream's own gather would be a second collective, and one that a rank without micro-batches does not join.
        trouble: Exception | None = None
        try:
            with shadow(trainer.args, "average_tokens_across_devices", False):
                fetched, upstream_number = wrapped(*args, **kwargs)
        except Exception as error:
            # Raised as soon as the other ranks know.
            fetched, upstream_number, trouble = [], None, error
        window = _open_window(trainer, session, without_blanks(fetched), upstream_number, options, trouble)
    contract = session.contract
    assert contract is not None
    if contract.items is None:
        return fetched, upstream_number
    # A trainer that scales by itself multiplies by W only where it averages tokens across devices.
    owned = contract.owned_by_trainer and not averaged
    return fetched, window.total / window.cut.world_size if owned else window.total.long()


def _open_window(
    trainer: Any,
    session: Session,
    batches: list[Any],
    upstream_number: Any,
    options: Options,
    trouble: Exception | None = None,
) -> Window:
    """Count the window whose micro-batches are about to be run, or raise what kept this rank from fetching it."""
    if session.window is not None and session.window.batches and session.window.steps_run == 0:
        raise SeamError(
            f"no micro-batch of the last window came through Trainer.training_step: {type(trainer).__name__} overrides "
            "it without calling super(), so nothing would be mended; call super().training_step, or revert()"
        )
    _mark_state(trainer, session)
    contract = _settle_contract(trainer, session, batches, options, trouble)
    routing, trouble = _count_routing(trainer, session, contract, batches, options, trouble)
    session.window = window = _counted(trainer, contract, batches, upstream_number, trouble, session.router, routing)
    if contract.items is not None and batches:
        _note_empty(session, window.total)
    if options.balance_windows and router_loss_depends_on_the_cut(session):
        session.warn_once(
            "router loss of dealt windows",
            f"balance_windows: {_head_name(trainer)} has a router loss that depends on the cut; micro-batches of about "
            "one length each lead it further from the global batch's: take router_loss='exact'",
        )
    return window


def _counted(
    trainer: Any,
    contract: LossContract,
    batches: list[Any],
    upstream_number: Any,
    trouble: Exception | None = None,
    router: RouterLoss | None = None,
    routing: Tensor | None = None,
) -> Window:
    """The window with its items counted over all ranks, by the one collective of an optimizer step.

    Five numbers ride in it: the items, upstream's own count, and what tells a rank that fails or has less to run; and
    the routing of a mixture of experts, where its loss is to be the global batch's.
    """
    device, world_size, data = trainer.args.device, trainer.args.world_size, data_ranks(trainer)
    zero = torch.zeros((), dtype=count_dtype(device), device=device)
    counts: list[Tensor] = []
    total = zero
    try:
        if contract.items is not None:
            counts, total = total_items(contract.items, batches, device)
    except Exception as error:
        trouble = trouble or error
    number = zero if upstream_number is None else torch.as_tensor(upstream_number).to(zero)
    if world_size > 1:
        # Sharded models meet in every forward, others only when a step is taken.
        runs = len(batches) if is_sharded(trainer.accelerator) else min(len(batches), 1)
        sums = torch.stack([total, number, *ranks.marks(runs, trouble, zero)])
        if routing is not None:
            sums = torch.cat([sums, routing])
        sums = trainer.accelerator.reduce(sums, reduction="sum")
        suspects = len(batches) < trainer.args.gradient_accumulation_steps
        ranks.check_marks(sums[2:5], runs, trouble, fetched=len(batches), suspects=suspects, **_place(trainer))
        # Tensor-parallel ranks hold the same samples, and have all counted them.
        copies = world_size // data
        total, number, routing = sums[0] / copies, sums[1], sums[5:] / copies
    elif trouble is not None:
        raise trouble
    cut = Cut.of(contract, total, len(batches), data)
    if router is not None and routing is not None:
        router.settle(routing, cut.micro_batches, cut.world_size)
    counted = None if upstream_number is None else number
    return Window(batches, counts, total, cut, counted)


def _place(trainer: Any) -> dict[str, int]:
    return {"rank": trainer.args.process_index, "world_size": trainer.args.world_size}


def data_ranks(trainer: Any) -> int:
    """W: the ranks that hold samples of their own; engines average over these alone."""
    return int(trainer.args.world_size) // _parallel_size(trainer, "tp")


def _mark_state(trainer: Any, session: Session) -> None:
    marks = trainer.state.stateful_callbacks
    if STATE_KEY not in marks and trainer.state.global_step > 0 and session.window is None:
        session.warn_once(
            "resumed",
            f"step {trainer.state.global_step} was reached without hf_accum_fix: from here on gradient and log are "
            "those of the global batch, so learning rate, clipping and the curve may no longer match the steps before",
        )
    marks[STATE_KEY] = {"active": True}


def _note_empty(session: Session, total: Tensor) -> None:
    if total.device.type == "cpu":
        if not bool(total):
            _warn_empty(session)
    else:
        seen = session.empty_windows
        session.empty_windows = (total == 0).long() if seen is None else seen + (total == 0)


def _warn_empty(session: Session) -> None:
    session.warn_once(
        "empty",
        "a whole accumulation window had no target: its gradient and its logged loss are zero; look at truncation, "
        "label masking, or samples without an answer",
    )


# --- the contract ---------------------------------------------------------------------------------------------------


def _settle_contract(
    trainer: Any, session: Session, window: list[Any], options: Options, trouble: Exception | None = None
) -> LossContract:
    """The contract of this trainer's loss as it is now; observed where it has not been, on every rank alike."""
    computed_by = (_accepts_number(trainer), _loss_func(trainer), trainer.label_smoother)
    if session.observed_for != computed_by:
        session.contract, session.observed_for, session.attempts = None, computed_by, 0
        session.passes_number = _accepts_number(trainer) and takes_number(trainer.model_wrapped)
    known = session.contract
    if known is not None and (known.conclusive or session.attempts >= _ATTEMPTS):
        return known
    if options.contract is not None:
        found = _given(trainer, session, options.contract)
    else:
        _check_alike(trainer, window, trouble)
        seen = None
        try:
            # The loop notes the length of a window once it was fetched; a loss of one's own may divide a term by it.
            with shadow(trainer, "current_gradient_accumulation_steps", len(window)):
                seen = _observe(trainer, session, window) if window else None
        except Exception as error:
            trouble = error
        found = _agreed(trainer, seen, trouble)
        session.attempts += found.reason != NO_TARGET_SEEN
    session.contract = found
    if not found.conclusive and session.attempts < _ATTEMPTS:
        return found
    _check_dealing(trainer, found, options)
    head = _head_name(trainer)
    if found.reduction is Reduction.PLAIN:
        if found.owned_by_trainer and _scales_itself(trainer):
            outcome = "stays as the trainer scales it"
        elif found.items is None:
            outcome = "gets the plain mean over micro-batches"
        else:
            outcome = "gets each micro-batch weighed by its items"
        session.warn_once("inexact", f"{head}: {found.reason}. It {outcome}.")
    elif found.changed_by_trainer:
        words = f"{type(trainer).__name__}.compute_loss changes the base's loss, so that it is not called exact."
        session.warn_once("inexact", f"{head}: {words}")
    elif not found.conclusive:
        session.warn_once("inexact", f"{head}: the loss {found}, as far as {_ATTEMPTS} windows tell.")
    if found.reduction is Reduction.SUM:
        session.warn_once("sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch.")
    return found


def _check_alike(trainer: Any, window: list[Any], trouble: Exception | None) -> None:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does."""
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    place = {"rank": trainer.args.process_index, "world_size": trainer.args.world_size}
    lengths_and_labels = ranks.agreed((len(window), sorted(labels), told), trouble, **place)
    if len({bool(length) for length, _, _ in lengths_and_labels}) > 1:
        raise ranks.uneven({rank: length for rank, (length, _, _) in enumerate(lengths_and_labels)})
    if len({tuple(each) for _, each, _ in lengths_and_labels}) > 1:
        raise RankError(
            f"the ranks hold different labels: {ranks.by_rank([each for _, _, each in lengths_and_labels])}; every "
            "rank needs the same; look at the collator, and at what it was given on the rank without"
        )


def _given(trainer: Any, session: Session, contract: LossContract) -> LossContract:
    """A contract given by hand, held against what can be known without a forward."""
    if contract.by_number and not session.passes_number and _loss_func(trainer) is None:
        raise ContractError(
            f"the contract given says that the loss {contract.reduction.value}, but {_head_name(trainer)} is not "
            "handed the number; give Reduction.MEAN, or let model_accepts_loss_kwargs be True"
        )
    if not contract.by_number:
        # A head that would divide by the number returns its own mean without it.
        session.passes_number = False
    return contract


def _observe(trainer: Any, session: Session, window: list[Any]) -> LossContract:
    """Observe the loss through the very call that training makes."""
    model = trainer.model_wrapped
    # A forward through DDP without gradient would switch off the next one's buffer sync.
    module: nn.Module = inside_ddp(model) or model
    # DeepSpeed's engine has a config of its own.
    bare: nn.Module = trainer.accelerator.unwrap_model(model)
    compute_loss = _compute_loss_of(trainer)
    if not all(isinstance(batch, Mapping) for batch in window):
        reason = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
        return LossContract(Reduction.PLAIN, owned_by_trainer=compute_loss is not None, reason=reason)
    changed = False

    forward = _as_in_training(trainer, module, compute_loss)

    def call(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        nonlocal changed
        session.base_loss = None
        loss, outputs = forward(inputs, number)
        if session.base_loss is None:
            return loss, outputs
        # Both nan, where there was no target, is no change.
        changed = changed or not torch.allclose(loss, session.base_loss[0], rtol=1e-6, atol=0.0, equal_nan=True)
        return session.base_loss

    session.observing = True
    try:
        found = observe(
            call,
            window,
            module,
            device=trainer.args.device,
            passes_number=compute_loss is not None or session.passes_number or _loss_func(trainer) is not None,
            needs_number=_loss_func(trainer) is not None or compute_loss is not None,
            router_coefficients=(0.0, 0.0) if _loss_func(trainer) is not None else router_coefficients(bare),
            world_size=data_ranks(trainer),
            low_precision=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
        )
    except Exception:
        logger.error(
            "%s: its loss could not be run to be observed. Where training itself would run, give the contract by hand: "
            "apply(contract=LossContract(...))",
            _head_name(trainer),
        )
        raise
    finally:
        session.observing, session.base_loss = False, None
    if found.owned_by_trainer:
        return found
    if changed:
        found = replace(found, changed_by_trainer=True)
    smoothed = trainer.label_smoother is not None and _loss_func(trainer) is None
    if smoothed and found.reduction is not Reduction.PLAIN:
        shift = found.items is not None and found.items.shift
        items = Items(("labels",), trainer.label_smoother.ignore_index, shift=shift)
        return replace(found, reduction=Reduction.MEAN, items=items, alternatives=(items,))
    return found


def _as_in_training(trainer: Any, module: nn.Module, compute_loss: Callable[..., Any] | None) -> LossCall:
    """The forward that training makes of a micro-batch, unsmoothed; without outputs where the loss is the trainer's."""
    hands_number = compute_loss is not None and _hands_number(compute_loss)

    def forward(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            if compute_loss is None:
                return _base_loss(trainer, module, inputs, number, smooth=False)
            result = compute_loss(module, inputs, **({"num_items_in_batch": number} if hands_number else {}))
        return (result[0] if isinstance(result, tuple) else result), None

    return forward


def _agreed(trainer: Any, found: LossContract | None, trouble: Exception | None = None) -> LossContract:
    """The ranks' one contract; None: this rank had no window to observe."""
    gathered = ranks.agreed(found, trouble, rank=trainer.args.process_index, world_size=trainer.args.world_size)
    return agree([each for each in gathered if each is not None])


def _compute_loss_of(trainer: Any) -> Callable[..., Any] | None:
    """The trainer's own ``compute_loss`` where something overrides the base; None where the base is all there is.

    It is bound to a copy, containers and all, so that what it notes on the trainer while it is observed is dropped.
    """
    if "compute_loss" in vars(trainer):
        return trainer.compute_loss  # type: ignore[no-any-return]
    ours = ("hf_accum_fix.trainer", Trainer.__module__)
    defining = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    if defining.__module__ in ours:
        return None
    return unshared(trainer).compute_loss  # type: ignore[no-any-return]


def unshared(trainer: Any) -> Any:
    """A copy of a trainer: the same model and data, but containers, and containers in them, are its own."""
    copied = object.__new__(type(trainer))  # copy.copy would leave a note on the class
    vars(copied).update((name, _without_sharing(value)) for name, value in vars(trainer).items())
    return copied


def _without_sharing(value: Any) -> Any:
    """The same, but containers, and containers in them, are new ones."""
    if type(value) in (dict, defaultdict, OrderedDict):
        copied = copy.copy(value)
        copied.update((key, _without_sharing(each)) for key, each in value.items())
        return copied
    if type(value) in (list, deque, set):
        copied = copy.copy(value)
        if type(value) is list:
            copied[:] = map(_without_sharing, value)
        return copied
    return value


def _counts_windows() -> bool:
    """Whether the release's Trainer counts the items of a window, and hands the number on: 4.46 and later."""
    return hasattr(Trainer, "get_batch_samples")


def _hands_number(compute_loss: Callable[..., Any]) -> bool:
    """Whether the release's Trainer hands a ``compute_loss`` of the trainer's own the number."""
    return _counts_windows() and has_parameter(compute_loss, "num_items_in_batch")


def _accepts_number(trainer: Any) -> bool:
    """Whether the release's Trainer would hand its model the number; releases before 4.46 know of none."""
    return bool(getattr(trainer, "model_accepts_loss_kwargs", False))


def _loss_func(trainer: Any) -> Callable[..., Any] | None:
    """The user's own loss; releases before 4.46 know of none."""
    func: Callable[..., Any] | None = getattr(trainer, "compute_loss_func", None)
    return func


def _head_name(trainer: Any) -> str:
    return type(trainer.accelerator.unwrap_model(trainer.model)).__name__


def settle(trainer: Any, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    return _settle_contract(trainer, session_of(trainer, options), window, options)


def loss_alone(trainer: Any, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The loss of a batch that is not part of a larger one, and the model's outputs; `settle` comes first.

    It is the mean over the batch's own items (or the sum), by the head itself, which is handed no number, or by the
    trainer's own ``compute_loss``; a ``compute_loss_func`` is handed the batch's own item count.
    """
    session: Session = trainer.__dict__[SESSION]
    contract = session.contract
    assert contract is not None
    inputs = trainer._prepare_inputs(inputs)
    compute_loss = _compute_loss_of(trainer)
    with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
        if compute_loss is not None:
            return compute_loss(model, inputs, return_outputs=True)  # type: ignore[no-any-return]
        counted = _loss_func(trainer) is not None and contract.items is not None
        number = contract.items.count(inputs) if counted and contract.items is not None else None
        loss, outputs = _base_loss(trainer, model, inputs, None if number is None else contract.as_number(number))
    router = contract.carried(outputs)
    # A smoothed loss is made from the logits alone.
    smoothed = trainer.label_smoother is not None and _loss_func(trainer) is None
    return (loss + router.to(loss.device) if smoothed and router is not None else loss), outputs


# --- the router's loss ----------------------------------------------------------------------------------------------


def _count_routing(
    trainer: Any,
    session: Session,
    contract: LossContract,
    batches: list[Any],
    options: Options,
    trouble: Exception | None,
) -> tuple[Tensor | None, Exception | None]:
    """This rank's numbers of the window, to be summed over ranks, and its trouble; None where the loss stays a mean.

    In the first window the model's own load-balancing loss is looked at, on every rank alike.
    """
    if options.router_loss == Convention.MEAN.value:
        return None, trouble
    if session.router is None:
        session.router = RouterLoss(Convention(options.router_loss))
        # Its name is bound where others look it up only once it is imported.
        import_module(LENDER)
    router, model = session.router, trainer.model_wrapped
    module: nn.Module = inside_ddp(model) or model
    if options.router_loss == Convention.EXACT.value and is_sharded(trainer.accelerator):
        # Sharded models meet in every forward, and so in those that count.
        lengths = ranks.agreed(len(batches), trouble, **_place(trainer))
        if len(set(lengths)) > 1:
            raise ranks.uneven(dict(enumerate(lengths)))
    with _forward_alone(trainer, session, module, len(batches)) as forward:
        if router.form is None or not router.form.settled:
            router.form = _recognised(trainer, contract, router, forward, batches, module, trouble)
            if why := router.why_mean(contract.has_router_loss):
                session.warn_once("router", f"{_head_name(trainer)}: {why}")
        try:
            return router.count(forward, batches, module, trainer.args.device, data_ranks(trainer)), trouble
        except Exception as error:
            # Raised as soon as the other ranks know.
            return router.nothing(trainer.args.device), trouble or error


@contextmanager
def _forward_alone(trainer: Any, session: Session, module: nn.Module, steps: int) -> Iterator[Forward]:
    """The forward that training makes of a micro-batch, to be run without its step."""
    if session.counting_loss is None or session.counting_loss[0] != session.observed_for:
        with shadow(trainer, "current_gradient_accumulation_steps", steps):
            session.counting_loss = (session.observed_for, _compute_loss_of(trainer))
        if session.router is not None:
            session.router.form = None
    compute_loss = session.counting_loss[1]
    run = _as_in_training(trainer, module, compute_loss)
    number = torch.ones((), device=trainer.args.device)
    module.train()
    # A schedule-free optimizer evaluates at other weights than it trains at.
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    session.observing = True
    try:
        yield lambda inputs: run(inputs, number)[0]
    finally:
        session.observing, session.base_loss = False, None


def _recognised(
    trainer: Any,
    contract: LossContract,
    router: RouterLoss,
    forward: Forward,
    batches: list[Any],
    module: nn.Module,
    trouble: Exception | None,
) -> Form:
    """What the ranks see of the model's own load-balancing loss."""
    seen = Form(settled=False)
    try:
        seen = router.recognise_among(forward, batches, contract.items, module, trainer.args.device)
    except Exception as error:
        trouble = trouble or error
    return one_form(ranks.agreed(seen, trouble, **_place(trainer)))


def _convention(session: Session) -> Convention:
    """That of the router's loss as it is trained."""
    return Convention.MEAN if session.router is None else session.router.in_force


def router_loss_depends_on_the_cut(session: Session) -> bool:
    """Whether another cut of the same global batch, such as one by length, trains another router loss.

    To be asked once the first window is counted: only then it is known whether "exact" is in force.
    """
    if session.router is not None and session.router.form is not None and session.router.form.pools:
        return session.router.depends_on_the_cut
    return session.contract is not None and session.contract.has_router_loss


def _in_the_window(session: Session, window: Window) -> AbstractContextManager[None]:
    """Around the forward of a micro-batch: its load-balancing loss is its share of the global batch's."""
    return nullcontext() if session.router is None else session.router.micro_batch(window.steps_run)


def _note_routing(trainer: Any, session: Session) -> None:
    """Say once what the router's loss has shown that ought to be said."""
    for kind, words in () if session.router is None else session.router.remarks():
        session.warn_once(kind, f"{_head_name(trainer)}: {words}")


# --- compute_loss ---------------------------------------------------------------------------------------------------


def compute_loss(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, options: Options
) -> Any:
    """The loss of one micro-batch, such that its plain mean over micro-batches and ranks is the global batch's.

    The original runs outside of a window: evaluation, and calls by hand.
    """
    session = session_of(trainer, options)
    if not session.observing and session.micro_batch is None:
        return wrapped(*args, **kwargs)

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if session.observing:
            session.base_loss = _base_loss(trainer, model, inputs, num_items_in_batch, smooth=False)
            loss, outputs = session.base_loss
        else:
            assert session.micro_batch is not None
            session.micro_batch.base_called = True
            loss, outputs = _loss_in_window(trainer, session, session.micro_batch, model, inputs)
        return (loss, outputs) if return_outputs else loss

    return bind(*args, **kwargs)


def _loss_in_window(
    trainer: Any, session: Session, micro_batch: MicroBatch, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[Tensor, Any]:
    contract, window = session.contract, session.window
    assert contract is not None and window is not None
    share = share_of(
        contract,
        inputs,
        micro_batch.items,
        window.cut,
        own_loss=_loss_func(trainer) is not None,
        rounded=inputs_are_rounded(trainer.accelerator),
    )
    loss, outputs = _base_loss(trainer, model, share.inputs, share.number)
    if share.ratio is None:
        return loss, outputs
    carried = contract.carried(outputs)
    if carried is not None:
        carried = carried.to(loss.device)
        if trainer.label_smoother is not None and _loss_func(trainer) is None:
            loss = loss + carried
    return share.of(loss, carried), outputs


def _base_loss(
    trainer: Any, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None, *, smooth: bool = True
) -> tuple[Tensor, Any]:
    """The loss as the base Trainer comes by it, before any release's scaling.

    Source: the contract of ``Trainer.compute_loss``, which the releases share: the number goes to a model that accepts
    it; ``compute_loss_func`` owns its loss; the label smoother takes the labels out of the model's sight.
    """
    inputs = dict(inputs)
    func, smoother = _loss_func(trainer), trainer.label_smoother if smooth else None
    labels = inputs.pop("labels", None) if func is not None or smoother is not None else None
    session: Session = trainer.__dict__[SESSION]
    if session.passes_number and number is not None:
        inputs["num_items_in_batch"] = number
    outputs = model(**inputs)
    if getattr(trainer.args, "past_index", -1) >= 0:
        trainer._past = outputs[trainer.args.past_index]
    if func is not None:
        return func(outputs, labels, num_items_in_batch=number), outputs
    if smoother is not None and labels is not None:
        contract = session.contract
        shift = contract is not None and contract.items is not None and contract.items.shift
        return smoother(outputs, labels, shift_labels=shift), outputs
    return loss_among(outputs, inputs, model), outputs


# --- training_step --------------------------------------------------------------------------------------------------


def training_step(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, options: Options
) -> Any:
    """Run the original step, with the loss that reaches accelerate set right, and return the one to log.

    Summed over the window and averaged over ranks, as gradients are and as the Trainer logs, both are the global
    batch's.
    """
    session = session_of(trainer, options)
    if session.micro_batch is not None:
        return wrapped(*args, **kwargs)
    window = session.window
    if window is None:
        if not enabled() or not trainer.is_in_train:
            return wrapped(*args, **kwargs)
        raise SeamError(
            f"no window was counted before this step: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples without calling it; call super().get_batch_samples, or revert()"
        )
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if isinstance(inputs, Blank):
        return torch.zeros((), device=trainer.args.device)
    model = kwargs["model"] if "model" in kwargs else args[0]
    micro_batch = session.micro_batch = MicroBatch(window.items_of(inputs), isinstance(inputs, Weightless))
    accelerator = trainer.accelerator
    original_loss, original_backward = trainer.compute_loss, accelerator.backward
    depth = 0

    def record_loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            with _in_the_window(session, window) if depth == 1 else nullcontext():
                result = original_loss(*loss_args, **loss_kwargs)
        finally:
            depth -= 1
        if depth == 0:
            loss = result[0] if isinstance(result, tuple) else result
            # Now: 4.46.0 scales in place what it is handed. And never the model's output itself: DeepSpeed hangs hooks
            # on that, which divide once more (stage 0).
            micro_batch.share = _share_of_window(trainer, session, micro_batch, window, loss)
        return result

    def set_loss(loss: Tensor, **backward_kwargs: Any) -> Any:
        tell_last(accelerator, window.steps_run + 1 == len(window.batches))
        if micro_batch.share is None:
            return original_backward(loss, **backward_kwargs)
        micro_batch.reported = micro_batch.share.detach()
        if window.steps_run == 0:
            _announce(trainer, session, window, passed=loss, right=micro_batch.reported)
        divisor = engine_divisor(accelerator, backward_kwargs)
        return original_backward(micro_batch.share if divisor == 1 else micro_batch.share * divisor, **backward_kwargs)

    try:
        with (
            shadow(trainer, "compute_loss", record_loss),
            shadow(accelerator, "backward", set_loss),
            _reduced_in_the_last(trainer, window, model),
        ):
            result = wrapped(*args, **kwargs)
    finally:
        session.micro_batch = None
    window.steps_run += 1
    if window.steps_run == len(window.batches):
        # To look at a number waits for the device: there, only in the first window, and when training ends.
        if trainer.args.device.type == "cpu" or "routing" not in session.said:
            _note_routing(trainer, session)
        session.said.add("routing")
    if micro_batch.share is None:
        return _logged(session, result)
    if micro_batch.reported is None:
        raise SeamError(
            f"the step of {type(trainer).__name__} computed a loss but did not hand it to accelerator.backward; "
            "its gradient was not mended: use accelerator.backward, or revert()"
        )
    return _logged(session, micro_batch.reported)


def _logged(session: Session, loss: Tensor) -> Tensor:
    if session.loss_log is not None:
        session.loss_log.add(loss)
    return loss


def _reduced_in_the_last(trainer: Any, window: Window, model: nn.Module) -> AbstractContextManager[None]:
    """Reduce over ranks in the last micro-batch of a window alone; 4.46.2 does so in every other one."""
    if not _LAST_NOT_REDUCED or trainer.args.world_size == 1:
        return nullcontext()
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedSetupError(
            f"transformers {transformers.__version__} leaves the gradients of the last micro-batch on each rank, and "
            f"only under DistributedDataParallel can that be mended, not under {type(model).__name__}; take 4.46.3"
        )
    last = window.steps_run + 1 == len(window.batches)
    return shadow(model, "require_backward_grad_sync", last)


def _share_of_window(trainer: Any, session: Session, micro_batch: MicroBatch, window: Window, loss: Tensor) -> Tensor:
    """What a micro-batch's loss adds to the window's; averaged over ranks the sum is the global batch's loss."""
    contract = session.contract
    assert contract is not None
    if micro_batch.base_called:
        return loss / len(window.batches)
    if micro_batch.weightless:
        return loss * 0.0
    scaled = contract.owned_by_trainer and (contract.by_number or _scales_itself(trainer))
    return loss / (1 if scaled else len(window.batches))


def _scales_itself(trainer: Any) -> bool:
    """Whether a trainer says that the loss it computes is divided for the window already.

    Source: ``Trainer.loss_is_scaled_for_ga`` (5.19.0 on); before it, a ``compute_loss_func`` that is no function, whose
    presence alone keeps the Trainer from dividing.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is None:
        return _loss_func(trainer) is not None and not callable(_loss_func(trainer))
    return bool(declared)


def _announce(trainer: Any, session: Session, window: Window, *, passed: Tensor, right: Tensor) -> None:
    """Once a run: what was observed, and what the stock Trainer would have made of it."""
    if "announced" in session.said:
        return
    session.said.add("announced")
    contract = session.contract
    assert contract is not None
    factor = _stock_factor(trainer, session, window, passed, right)
    steps, world_size = len(window.batches), window.cut.world_size
    head = _head_name(trainer)
    told = "" if factor is None else f" The stock Trainer would train at about {factor:.3g}x this gradient."
    if factor is not None and abs(factor - 1) > 0.02:
        told += " Clipping and learning rate felt it."
    observations.record(
        {
            "head": head,
            "trainer": type(trainer).__name__,
            "reduction": contract.reduction.value,
            "items": None if contract.items is None else str(contract.items),
            "router_coefficient": contract.router_coefficient,
            "router_z_coefficient": contract.router_z_coefficient,
            "router_loss": _convention(session).value,
            "exact": contract.exact,
            "reason": contract.reason,
            "accumulation_steps": steps,
            "world_size": world_size,
            "stock_gradient_factor": factor,
            **session.repeated,
        }
    )
    if trainer.args.process_index == 0:
        router = f", {_convention(session)}" if contract.has_router_loss else ""
        logger.info("%s: the loss %s%s; G=%d, W=%d.%s", head, contract, router, steps, world_size, told)


def _stock_factor(trainer: Any, session: Session, window: Window, passed: Tensor, right: Tensor) -> float | None:
    """About how many times the right gradient the installed Trainer would train at; None where it cannot be told.

    Its own division is read off the loss it passes on, accelerate's off the live object, its count off what it
    returned; the multiplication by W is the releases' common condition.
    """
    contract = session.contract
    assert contract is not None
    if contract.owned_by_trainer or trainer.label_smoother is not None or not bool(right):
        return None
    handed = session.passes_number or _loss_func(trainer) is not None
    averaged = getattr(trainer.args, "average_tokens_across_devices", False)
    world_size = window.cut.world_size
    undivided = float((passed / right).detach()) / int(trainer.accelerator.gradient_accumulation_steps)
    if contract.reduction is Reduction.MEAN:
        return undivided * (world_size if averaged and handed and window.upstream_number is not None else 1)
    if contract.reduction is Reduction.NUMBER and window.upstream_number is not None:
        # Where upstream does not average, a rank divides by its own count: about 1/W of them all.
        counted = float(window.upstream_number)
        return undivided / len(window.batches) * float(window.total) / counted if counted else None
    return None


# --- small machinery ------------------------------------------------------------------------------------------------


@contextmanager
def busy(session: Session, what: str) -> Iterator[None]:
    """Let a nested call of the same override pass through."""
    session.busy.add(what)
    try:
        yield
    finally:
        session.busy.discard(what)


OVERRIDES: dict[str, Callable[..., Any]] = {
    "train": train,
    "get_batch_samples": get_batch_samples,
    "training_step": training_step,
    "compute_loss": compute_loss,
}
