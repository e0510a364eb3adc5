"""One training of a Trainer, as a host of windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, TypeAlias

import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from hf_accum_fix.counting.items import Items
from hf_accum_fix.coupled.coupled_loss import planned
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.engines import model as of_model
from hf_accum_fix.engines import sample_shards as cutting
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.engines.ranks import World
from hf_accum_fix.engines.watched import add_up, own_hooks
from hf_accum_fix.errors import AccumFixError, ContractError
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.options import Options
from hf_accum_fix.overrides import trainer_facts as facts_of
from hf_accum_fix.pieces.global_batch import check_global_batch
from hf_accum_fix.pieces.in_pieces import InPieces
from hf_accum_fix.router.load_balancing import LENDER
from hf_accum_fix.router.router_loss import has_z_loss, router_coefficients, router_loss
from hf_accum_fix.trace.preserve import PythonState, overridden
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.seams import CUTS, VERIFY
from hf_accum_fix.window.host import MADE_BY_STEP, MADE_LATER, Host, loss_of_outputs
from hf_accum_fix.window.settle import settle
from hf_accum_fix.window.state import LossState
from hf_accum_fix.window.window import Window, open_unless_aside

logger = logging.getLogger("hf_accum_fix")

#: Stock passes no count to heads that would divide by it, so that it trains 1/G of their gradient.
_NUMBER_DROPPED = is_present("item-count-dropped-again", transformers.__version__)
#: The trainer's attribute for its session.
SESSION = "_hf_accum_fix_session"
#: A method as it was, and the arguments of a call of it.
Original: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
#: The sessions of running trainings.
TRAINING: Final[list[Session]] = []


class Session(Host):
    """One training of a Trainer: its ranks and engine, its loss, and its state between windows."""

    accelerator: Any
    window: Window | None = None  # the open one; None: there is none
    #: the base's ``compute_loss`` in a micro-batch, or an observed forward: (model, inputs, the number that a custom
    #: one passed on) -> (loss, outputs); None: upstream's.
    base_loss: Callable[[nn.Module, Mapping[str, Any], Any], tuple[Tensor, Any]] | None = None
    upstream_numbers: Sequence[Any] = ()  # what upstream has counted of the window that is fetched, on this rank
    is_counted = False  # that window has a number
    #: an error of ours in a micro-batch, which a custom training_step may have caught.
    refused: AccumFixError | None = None
    finite: Tensor | float = 0.0  # 0 while the loss of every window was finite, else nan

    def __init__(self, trainer: Any, options: Options) -> None:
        self.coupled, options = planned(options)
        args, ranks, shards = trainer.args, facts_of.data_ranks(trainer), is_sharded(trainer.accelerator)
        cut = cutting.is_cut(trainer.accelerator)
        world = World(args.process_index, args.world_size, ranks, shards, args.device, cut)
        super().__init__(options, world, has_stock=True)
        self.name, self.trainer, self.accelerator = type(trainer).__name__, trainer, trainer.accelerator
        splits = options.out_of_memory == "split"
        self.in_pieces = InPieces(self, lambda: trainer.state.stateful_callbacks) if splits else None
        self.context_parallel = facts_of.parallel_size(trainer, "cp") > 1 and hasattr(trainer, CUTS)

    @property
    def head(self) -> str:
        return type(self.bare(self.trainer.model)).__name__

    @property
    def where(self) -> str:
        return f"window {self.state.opened} (step {self.trainer.state.global_step + 1})"

    @property
    def steps(self) -> int:
        return int(self.trainer.args.gradient_accumulation_steps)

    @property
    def trained(self) -> nn.Module:  # type: ignore[override]
        return self.trainer.model_wrapped  # type: ignore[no-any-return]

    def summed(self, numbers: Tensor) -> Tensor:
        return self.trainer.accelerator.reduce(numbers, reduction="sum")  # type: ignore[no-any-return]

    def warn_off(self, off: Mapping[str, str]) -> None:
        """Warn once of each feature that is off in this training."""
        for what, why in off.items():
            if what != VERIFY:
                self.warn_once(what, why)

    def not_exact(self, name: str, what: str) -> None:
        """Warn once of what the trainer does, verb first, and count this window as inexact."""
        self.warn_inexact(name, f"{self.name} {what}; the step is reported as not exact")

    def open(self, batches: list[Any], number: Any = None, error: Exception | None = None) -> Window | None:
        """Count the window that is about to run, or raise the ``error`` of fetching it; None: it trains as stock."""
        batches = [each for each in batches if not isinstance(each, PlaceholderBatch)]
        if self.context_parallel:
            cutting.compare_samples(self, batches)
            for each in batches:
                cutting.cut_whole(getattr(self.trainer, CUTS), self.trainer.model_wrapped, each)
        if self.world.cuts_samples:
            cutting.complete_shards(self, batches)
        if not self.state.opened:
            check_global_batch(self, self.trainer)
        self.state.opened += bool(batches)
        self.window = window = open_unless_aside(self, batches, number, error)
        if window is not None and self.world.cuts_samples:
            cutting.check_shift(self)
        if window is not None and len(batches) > self.steps:
            self.warn_inexact(
                "more micro-batches",
                f"got {len(batches)} micro-batches in a window; expected at most gradient_accumulation_steps="
                f"{self.steps}, after which the Trainer steps; the step is reported as not exact",
            )
        return window

    def settled(self, batches: Sequence[Any]) -> LossContract:
        """How its loss is reduced, observed on the micro-batches of one window, in training or outside."""
        self.refresh(batches)
        if self.is_due:
            settle(self, batches)
        assert self.contract is not None
        return self.contract

    def unscaled_loss(self, model: nn.Module, given: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        """The base Trainer's loss, before any release's scaling.

        Source: ``Trainer.compute_loss`` in all releases: a model that accepts the number gets it, ``compute_loss_func``
        computes its own loss, and the label smoother hides the labels from the model.
        """
        trainer, func, inputs, labels = self.trainer, self.source.func, dict(given), None
        if self.source.owns_labels:
            labels = inputs.pop("labels", None)
            # Those of cut samples were shifted before.
            labels = inputs.get(cutting.SHIFTED, labels) if self.world.cuts_samples else labels
        with own_counts(given) if self.world.size > 1 else nullcontext():
            outputs = self.model_outputs(model, inputs, number)
            if (past := getattr(trainer.args, "past_index", -1)) >= 0:
                vars(trainer)["_past"] = outputs[past]
            if func is not None:
                return func(outputs, labels, num_items_in_batch=number), outputs
        if trainer.label_smoother is None or labels is None:
            return loss_of_outputs(outputs, inputs, model), outputs
        # By upstream's list of names, of the model without wrappers and adapters; FSDP2 makes a subclass of it.
        classes = type(of_model.adapted(self.bare(trainer.model))).__mro__
        is_causal = any(each.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for each in classes)
        loss: Tensor = trainer.label_smoother(outputs, labels, shift_labels=is_causal and not self.world.cuts_samples)
        # The smoothed loss uses the logits alone.
        coefficients = router_coefficients(self.bare(trainer.model))
        for name, coefficient in zip(("aux_loss", "z_loss"), coefficients, strict=True):
            if coefficient and (router := router_loss(outputs, name)) is not None:
                loss = loss + coefficient * router.to(loss.device)
        return loss, outputs

    def loss_in_training(
        self, model: nn.Module, inputs: Any, number: Tensor | None, **given: Any
    ) -> tuple[Tensor, Any]:
        """The loss of fetched inputs as in training, and the outputs if they are returned.

        The base's loss gets the ``number``; a custom one gets it if training passes one, and what else is ``given``.
        """
        custom, calls = facts_of.compute_loss_of(self.trainer), list[bool]()

        def base(model: nn.Module, inputs: Mapping[str, Any], passed: Any) -> tuple[Tensor, Any]:
            if self.source.requires_number:
                return self.unscaled_loss(model, inputs, number)
            calls.append(passed is not None and self.source.passes_number)
            self.source.kept_back = max(self.source.kept_back, sum(calls))
            # Without a number a model returns its own mean.
            return self.unscaled_loss(model, inputs, None)

        inputs = self.trainer._prepare_inputs(inputs)
        attention = cutting.attention_over_ranks(self.accelerator, inputs) if self.context_parallel else nullcontext
        with self.trainer.compute_loss_context_manager(), attention():
            if custom is None:
                return self.unscaled_loss(model, inputs, number)
            with overridden(self, "base_loss", base):
                passed = {"num_items_in_batch": number} if facts_of.hands_number(custom) else {}
                result = custom(model, inputs, **passed, **given)
        return result if isinstance(result, tuple) else (result, None)

    @contextmanager
    def run(self, batches: Sequence[Any]) -> Iterator[LossRun]:
        trainer, model = self.trainer, self.model
        self.source.kept_back = 0
        # The loop sets the length of a window, which a custom loss may divide by, only after fetching it.
        with (
            overridden(trainer, "log", lambda *_, **__: None),
            overridden(trainer, "current_gradient_accumulation_steps", len(batches)),
        ):
            yield LossRun(
                lambda inputs, number: self.loss_in_training(model, inputs, number)[0],
                model,
                self.world.device,
                of_model.holds_shards(model),
                self.bare(trainer.model),
                others=(trainer,),
                leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator),
                kept_back=lambda: self.source.kept_back,
                hand_on=lambda: setattr(self.source, "requires_number", True),
            )

    @contextmanager
    def run_counting(self, batches: Sequence[Any]) -> Iterator[LossRun]:
        trainer = self.trainer
        # Other libraries bind its name only once it is imported.
        import_module(LENDER)
        # A schedule-free optimizer evaluates at other weights than it trains at.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        with self.run(batches) as run:
            run.model.train()
            with nullcontext() if facts_of.compute_loss_of(trainer) is None else PythonState(trainer, leave=run.leave):
                yield run

    def refresh_loss_source(self, batches: Sequence[Any]) -> None:
        trainer, given, source = self.trainer, self.options.contract, self.source
        self.accelerator, accepts = trainer.accelerator, bool(getattr(trainer, "model_accepts_loss_kwargs", False))
        func, declared = getattr(trainer, "compute_loss_func", None), getattr(trainer, "loss_is_scaled_for_ga", None)
        computed_by = (accepts, func, trainer.label_smoother, declared)
        if source.computed_by == computed_by:
            return
        source.func, source.scales_itself = func, facts_of.scales_itself(trainer)
        source.owns_labels = func is not None or trainer.label_smoother is not None
        source.counts_items = facts_of.counts_itself(trainer)
        source.computed_by, self.state.loss, self.router.form = computed_by, LossState(), None
        source.passes_number = accepts and of_model.takes_number(trainer.model_wrapped)
        required = source.passes_number and of_model.requires_number(trainer.model_wrapped)
        source.requires_number = required or source.func is not None
        if given is not None and not given.by_number:
            # A head that would divide by the number returns its own mean without it.
            source.passes_number = False
        elif given is not None and not source.passes_number and source.func is None:
            raise ContractError(
                f"got a contract by which the loss {given.reduction.value}, but {self.head} gets no "
                "num_items_in_batch; expected Reduction.MEAN, or set model_accepts_loss_kwargs = True"
            )

    def facts(self, batches: Sequence[Any], number: Any) -> Setting | LossContract:
        trainer, bare, custom = self.trainer, self.bare(self.trainer.model), facts_of.compute_loss_of(self.trainer)
        of_base = custom is None and self.source.func is None
        # Where nothing is counted, training passes None.
        counts = self.is_counted or not trainer.is_in_train
        handed = self.source.requires_number or (custom is not None and facts_of.hands_number(custom) and counts)
        own_steps, own_ranks = facts_of.own_numbers(trainer, {self.steps, len(batches)}, self.world.data_ranks)
        setting = self.setting(
            bare,
            handed="all" if handed else "once" if self.source.passes_number and custom is None else "none",
            hands_number=self.source.requires_number,
            custom=custom is not None,
            func=self.source.func is not None,
            own=own_steps | own_ranks,
            own_steps=own_steps,
            has_stock=not (of_base and _NUMBER_DROPPED),
            has_z_loss=of_base and has_z_loss(bare),
            halves=self.in_pieces is not None and self.in_pieces.halves,
            upstream_number=None if number is None else float(number),
        )
        reason = MADE_BY_STEP if facts_of.replaces_step(trainer) else ""
        if reason := reason if all(isinstance(batch, Mapping) for batch in batches) else MADE_LATER:
            return LossContract(Reduction.STOCK, custom=True, doubt=reason, reason=reason)
        doubt = ""
        if any((hooks := own_hooks(each)) and not add_up(hooks, each) for each in self.model.parameters()):
            doubt = "gradient hooks run in every micro-batch; one that is not linear makes another sum"
        if not (self.world.cuts_samples and custom is None and type(trainer.label_smoother) is LabelSmoother):
            return replace(setting, doubt=doubt)
        # One part of a sample shows no count.
        doubt = "a router loss is added to smoothed labels" if any(router_coefficients(bare)) else doubt
        return LossContract(Reduction.MEAN, Items((cutting.SHIFTED,)), doubt=doubt, reason=doubt)


def session_of(trainer: Any, options: Options, *, new: bool = False) -> Session:
    """The session of a trainer, made at its first use, or ``new``; not one copied from another trainer."""
    session: Session | None = vars(trainer).get(SESSION)
    if new or session is None or session.trainer is not trainer:
        session = vars(trainer)[SESSION] = Session(trainer, options)
    return session
