"""verify(): whether a run is affected, and right under the patch. Compares gradients: a correct log proves nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import transformers
from accelerate.utils import DistributedType, gather_object
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.errors import AccumFixError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.overrides.forward import compute_loss_of
from hf_accum_fix.overrides.host import settle
from hf_accum_fix.overrides.live import data_ranks
from hf_accum_fix.overrides.training import check_setup
from hf_accum_fix.router.router_loss import Convention, RouterLoss
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import VERIFY
from hf_accum_fix.verification import explanation
from hf_accum_fix.verification.dry_run import DryRun, copy_for_split, dry_run
from hf_accum_fix.verification.evaluate import evaluate
from hf_accum_fix.verification.explanation import Explanation, Facts
from hf_accum_fix.verification.gradients import Gradient, Sum, averaged, distance, dots, fit, take
from hf_accum_fix.verification.modes import active_mode, in_mode, options_of
from hf_accum_fix.verification.reference import (
    FLOORS,
    WIDEST,
    Reference,
    Scene,
    compute,
    out_of_memory,
    without_outputs,
)
from hf_accum_fix.verification.report import (
    PATCHED,
    STOCK,
    Kind,
    SplitResult,
    Verdict,
    VerificationReport,
    could_not_tell,
    judge_own,
)
from hf_accum_fix.verification.restore import restored, without_dropout
from hf_accum_fix.verification.sample import Drawn, Split, draw, splits_of

#: Smallest tolerance, in machine epsilons of the coarsest dtype of parameters and loss.
_ROUNDINGS: Final = 2.0
#: Largest distance of a factor from its symbol, in tolerances; and the smallest such limit, relative.
_NEAR: Final = 8.0
_NEAREST: Final = 1e-5
#: Smallest tolerance of a logged loss, which is rounded to few digits.
_LOGGED: Final = 1e-3
#: Further global batches in which to look for one whose samples have different numbers of items.
_FURTHER: Final = 8


def verify(
    trainer: Any,
    splits: Sequence[tuple[int, int] | int] | None = None,
    windows: int = 1,
    *,
    reference: str = "auto",
    samples: Sequence[Any] | None = None,
    with_apply: bool = True,
    eval_samples: int = 64,
    step: int = 0,
) -> VerificationReport:
    """Compare the gradient of a trainer for several splits of one global batch with the gradient of the full batch.

    Draw the first global batches in the trainer's own order, split them into micro-batches, and run each split through
    the trainer's own ``train()`` without an optimizer step, as the installed release does it and with ``apply()``.
    Afterwards all state reachable from the trainer, random states and the output folder are as before. Dropout is off
    during the comparison. Call it on every rank; every rank gets the same report.

    Args:
        trainer: a built `transformers.Trainer`, of any subclass.
        splits: pairs (samples per micro-batch, accumulation steps), or samples per micro-batch; None: the user's own,
            the two extremes, and a short last window.
        windows: number of global batches to verify.
        reference: "full": one forward; "streamed": sample by sample; "auto": streamed if the full batch does not fit.
        samples: this rank's samples, for a data set that cannot be read twice.
        with_apply: verify the installed release, stock and with ``apply()``; False: only the mode in which this process
            trains now.
        eval_samples: number of first samples of the evaluation set on which to compare ``eval_loss`` with the item
            mean, for two eval batch sizes; 0: do not compare.
        step: optimizer step to verify: it is set in the trainer's state, and one window runs before it. The weights are
            the current ones.

    Raises:
        OptionsError: if an argument is invalid. Any other obstacle gives the verdict "could not tell".
    """
    if windows < 1 or eval_samples < 0 or step < 0:
        raise OptionsError(
            f"got windows={windows}, eval_samples={eval_samples}, step={step}; expected windows >= 1, eval_samples "
            ">= 0 and step >= 0"
        )
    head = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
    blank = VerificationReport(
        type(trainer).__name__, head, transformers.__version__, active_mode(trainer), could_not_tell("nothing was run")
    )
    try:
        _check(trainer)
        with restored(trainer) as state:
            verification = _Verification(trainer, blank, splits, reference, with_apply, step)
            report = verification.run(windows, samples, eval_samples)
            lost = tuple(f"{each} was read or written and cannot be put back" for each in state.lost())
            return replace(report, notes=(*report.notes, *lost))
    except OptionsError:
        raise
    except AccumFixError as error:
        return replace(blank, verdict=could_not_tell(str(error)), world_size=trainer.args.world_size)


def _check(trainer: TrainerLike) -> None:
    off = check_setup(trainer)
    if VERIFY in off:
        raise SeamError(off[VERIFY])
    engine = trainer.accelerator.distributed_type
    if engine in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise UnsupportedSetupError(
            f"got {engine.value}, which shards gradients; expected one process or DistributedDataParallel; verify "
            "there, with the same model, data and arguments"
        )
    if data_ranks(trainer) < trainer.args.world_size:
        raise UnsupportedSetupError(
            "got tensor-parallel ranks, which shard gradients; expected data-parallel ranks; omit tp_plan"
        )
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise UnsupportedSetupError(
            "got a model without a trainable parameter; expected at least one; set requires_grad"
        )


@dataclass
class _Verification:
    """One run of verify()."""

    trainer: TrainerLike
    blank: VerificationReport
    splits: Sequence[tuple[int, int] | int] | None
    mode: str
    with_apply: bool
    step: int
    wrapped: Any = None
    router_is_whole: bool = False

    def run(self, windows: int, samples: Sequence[Any] | None, eval_samples: int) -> VerificationReport:
        """Draw samples, compute the references, run every split in every mode, evaluate."""
        trainer = self.trainer
        options = options_of(trainer)
        named = [(name, each) for name, each in trainer.model.named_parameters() if each.requires_grad]
        self.parameters: list[nn.Parameter] = [parameter for _, parameter in named]
        notes = ["dropout was turned off for the comparison"] if without_dropout(trainer.model) else []
        notes += _not_looked_at(trainer)
        own = (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps)
        drawn = draw(copy_for_split(trainer, *own), windows, samples)
        notes += drawn.notes
        modes = [STOCK, *([PATCHED] if self.with_apply and enabled() else [])]
        modes = modes if self.with_apply else [self.blank.active]
        if self.with_apply and not enabled():
            notes.append(f"apply() was not run: {SWITCH}={os.environ[SWITCH]}")
        report = replace(self.blank, world_size=trainer.args.world_size)
        results: list[SplitResult] = []
        owns: list[SplitResult] = []
        references: list[Reference] = []
        sizes, items = [], []
        for number, (scene, rows, every) in enumerate(self._windows(drawn, options, windows, samples, notes)):
            splits = splits_of(len(rows), own[0], self.splits)
            reference = compute(scene, every, self.mode, own[0])
            notes += reference.notes
            references.append(reference)
            sizes.append(len(every))
            items.append(scene.count(every))
            own_split = splits_of(len(rows), own[0], None)[0]
            for split in splits:
                one = _Run(self, scene, reference, number, rows, split, len(every), every)
                found = [one.result(mode, options) for mode in modes]
                results += found
                owns += found if split == own_split else []
            report = replace(report, contract=str(scene.contract))
            masked = "attention_mask" in scene.collate([rows[0]])
            if scene.contract.has_router_loss and options.router_loss == Convention.EXACT.value and not masked:
                notes.append(
                    "without an attention mask, padding is routed and counted: pad every split to the same width"
                )
            notes += self._notes_of(scene, reference, [each for each in results if each.window == number])
            notes += _notes_of_factor(trainer, scene.factor(scene.collate(list(rows[: own[0]]))), own[1])
        evaluated, reason = evaluate(self.trainer, scene, eval_samples, modes, options)
        notes += [reason] if reason else []
        return replace(
            report,
            evaluation=evaluated,
            verdict=judge_own(results, owns, report.active, own),
            own=(own_split.per_device, own_split.steps),
            samples=tuple(sizes),
            items=tuple(items),
            reference=references[0].words,
            floor=max(each.noise.floor for each in references),
            tolerance=max(self.tolerance(each) for each in references),
            results=tuple(results),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _notes_of(self, scene: Scene, reference: Reference, results: Sequence[SplitResult]) -> list[str]:
        """What limits the proof in one window."""
        notes = []
        stuck = sorted({each.per_device for each in results if _cannot_be_run(each)})
        if stuck and scene.contract.reduction is Reduction.PLAIN:
            notes.append(
                f"micro-batches of {', '.join(map(str, stuck))} samples cannot be run: if the model puts rows into "
                "groups by a size of its own, the full batch in one forward is another loss than in training"
            )
        if not reference.decomposes and not self.router_is_whole:
            notes.append("two halves of the global batch do not add up to it: no split can equal the full batch")
        return notes

    def tolerance(self, reference: Reference) -> float:
        """The largest relative error that counts as exact."""
        rounding = max(torch.finfo(dtype).eps for dtype in (reference.dtype, *(each.dtype for each in self.parameters)))
        return max(FLOORS * reference.noise.floor, _ROUNDINGS * rounding)

    def _windows(
        self, drawn: Drawn, options: Options, windows: int, samples: Sequence[Any] | None, notes: list[str]
    ) -> Iterator[tuple[Scene, Sequence[Any], list[Any]]]:
        """Each global batch, with its samples on this rank and on all ranks; a further one if all are uniform."""
        uniform = True
        for rows in drawn.windows:
            scene, every = self._scene(drawn, rows, options), self._of_all_ranks(rows)
            uniform = uniform and _is_uniform(scene, every)
            yield scene, rows, every
        if not uniform:
            return
        if samples is None:
            own = (self.trainer.args.per_device_train_batch_size, self.trainer.args.gradient_accumulation_steps)
            further = draw(copy_for_split(self.trainer, *own), windows + _FURTHER, None)
            for rows in further.windows:
                every = self._of_all_ranks(rows)
                if not _is_uniform(replace(scene, collate=further.collate), every):
                    notes.append(
                        "a further global batch was drawn, because all samples of the first have equally many items"
                    )
                    yield self._scene(further, rows, options), rows, every
                    return
        notes.append("all samples have equally many items: whether micro-batches are weighted by items was not tested")

    def _of_all_ranks(self, rows: Sequence[Any]) -> list[Any]:
        return [each for rank in _gathered(self.trainer, list(rows)) for each in rank]

    def _scene(self, drawn: Drawn, rows: Sequence[Any], options: Options) -> Scene:
        """The trainer without accumulation, its contract observed on the window with the user's split."""
        alone = copy_for_split(self.trainer, len(rows), 1, self.step)
        if compute_loss_of(alone) is not None:
            alone.compute_loss = without_outputs(alone.compute_loss)
        own = Split(self.trainer.args.per_device_train_batch_size, 1)
        contract = settle(alone, own.micro_batches(rows, drawn.collate), options)
        return Scene(alone, self.parameters, contract, drawn.collate)


_CANNOT = "this micro-batch cannot be run"


def _cannot_be_run(result: SplitResult) -> bool:
    return _CANNOT in result.verdict.words


@dataclass
class _Run:
    """One split of one global batch."""

    verification: _Verification
    scene: Scene
    reference: Reference
    window: int
    rows: Sequence[Any]
    split: Split
    samples: int
    every: Sequence[Any]

    @property
    def trainer(self) -> Any:
        return self.verification.trainer

    def micro_batches(self) -> list[Any]:
        return self.split.micro_batches(self.rows, self.scene.collate)

    def result(self, mode: str, options: Options) -> SplitResult:
        """Run the split in one mode and compare its gradient."""
        count = -(-len(self.rows) // self.split.per_device)
        blank = SplitResult(
            mode, self.split.per_device, self.split.steps, count, self.window, could_not_tell("not run")
        )
        try:
            with in_mode(mode, self.trainer, options):
                run = dry_run(
                    self.trainer,
                    self.verification.parameters,
                    self.micro_batches(),
                    self.split,
                    self.samples,
                    self.verification.wrapped,
                    self.verification.step,
                )
        except AccumFixError as error:
            return replace(blank, verdict=could_not_tell(str(error)))
        except TypeError as error:  # The loss requires num_items_in_batch, which this mode does not pass.
            take(self.verification.parameters)
            return replace(blank, verdict=could_not_tell(f"{mode} cannot run this micro-batch: {error}"))
        except (RuntimeError, ValueError) as error:
            own = self.split.per_device == self.trainer.args.per_device_train_batch_size
            if own and not out_of_memory(error):
                raise
            take(self.verification.parameters)
            return replace(blank, verdict=could_not_tell(f"{_CANNOT}: {error}"))
        self.verification.wrapped = run.wrapped
        self.verification.router_is_whole |= _is_whole(run.router)
        return self._compared(blank, run, count)

    def _compared(self, blank: SplitResult, run: DryRun, count: int) -> SplitResult:
        """The numbers and the verdict, the same on every rank."""
        release = self.verification.blank.transformers
        lost = is_present(explanation.LOST, release) and run.steps_run < count
        if run.gradient is None:
            words = f"no optimizer step after {run.steps_run} of {count} micro-batches"
            if not lost:
                return replace(blank, verdict=could_not_tell(words))
            return replace(blank, verdict=Verdict(Kind.OFF, f"off: {words}"), defects=(explanation.LOST,))
        parameters, world_size = self.verification.parameters, self.trainer.args.world_size
        wanted, weights = [self.reference.gradient], [1.0]
        loss = self.reference.loss
        router = None
        if self.scene.contract.has_router_loss:
            here, value = self._router(run.router)
            router = averaged(here, parameters, world_size)
            wanted, weights = [*wanted, router], [1.0, 1.0]
            loss += _mean(self.trainer, value)
        products = dots(run.gradient, *wanted)
        right = math.sqrt(float(products[1:, 1:].sum()))
        norm = math.sqrt(float(products[0, 0])) if products[0, 0] >= 0 else math.nan
        error = _worst(self.trainer, distance(run.gradient, wanted, weights) / (right or 1.0))
        logged = _mean(self.trainer, run.loss)
        result = replace(
            blank,
            norm_ratio=norm / right if right else None,
            error=error,
            cosine=float(products[0, 1:].sum()) / (norm * right) if norm * right else None,
            loss_ratio=logged / loss if loss else None,
        )
        tolerance = self.verification.tolerance(self.reference)
        scale = float(products[0, 1:].sum()) / right**2 if right else 1.0
        if error <= tolerance and (kept := self._kept(tolerance, scale, count)) is not False:
            if kept is not True:
                return replace(result, verdict=could_not_tell(kept))
            if router is None and (rounded := self._rounded_off(run.gradient, count)) is not None:
                return replace(result, verdict=_off(rounded, self._rounding()))
            # A router loss that the trainer itself adds is not a term of the contract.
            named = router is not None or _is_whole(run.router)
            words = f"exact to the floor, the router's loss {_words(run.router)}" if named else "exact to the floor"
            if result.loss_ratio is not None and abs(result.loss_ratio - 1) > max(_NEAR * tolerance, _LOGGED):
                words += f"; but the logged loss is {result.loss_ratio:.4g} times the full batch's"
            return replace(result, verdict=Verdict(Kind.EXACT, words))
        if lost:
            words = f"{run.steps_run} of {count} micro-batches were trained on"
            return replace(result, verdict=_off(error, words), defects=(explanation.LOST,))
        why = self._why(run, router, result.loss_ratio or math.nan, count, tolerance)
        return replace(result, verdict=_off(error, why.words), defects=tuple(dict.fromkeys(why.defects)))

    def _kept(self, tolerance: float, scale: float, count: int) -> bool | str:
        """Whether the tolerance excludes the smallest relevant factor, 1 + 1/G; or why that is unknown.

        Args:
            tolerance: of the error.
            scale: length of the gradient along the reference.
            count: G.
        """
        least = min(0.3, 1 / count if count > 1 else 0.3)
        if tolerance > WIDEST:
            return f"the noise floor is {self.reference.noise.floor:.2g}, which would hide a factor of 1.3"
        if tolerance < least / 2:
            return True
        if FLOORS * self.reference.noise.scale >= least / 2:
            return f"the noise floor is {self.reference.noise.floor:.2g}, which would hide a factor of {1 + least:.4g}"
        return abs(scale - 1) < least / 2

    def _router(self, trained: RouterLoss | None) -> tuple[Gradient, float]:
        """This rank's gradient and value of the router loss, by the convention in training."""
        convention = Convention.MEAN if trained is None else trained.in_force
        if convention is Convention.EXACT:
            return self.scene.router([self.scene.collate(list(self.every))])
        if convention is Convention.MEAN:
            return self.scene.router(self.micro_batches())
        # Running counts depend on the split, so compare them with themselves.
        assert trained is not None
        batches = self.micro_batches()
        device, world_size = self.trainer.args.device, self.trainer.args.world_size
        numbers = trained.count(_never, batches, self.trainer.model, device, world_size)
        if world_size > 1:
            numbers = self.trainer.accelerator.reduce(numbers, reduction="sum")
        trained.settle(numbers, len(batches), world_size)
        return self.scene.router(batches, trained.micro_batch)

    def _why(self, run: DryRun, router: Any, logged: float, count: int, tolerance: float) -> Explanation:
        """Try the possible causes, the cheap ones first."""
        assert run.gradient is not None
        precision = min(max(_NEAR * tolerance, _NEAREST), WIDEST)
        gradient, right = run.gradient, self.reference.gradient
        if not torch.isfinite(dots(gradient)).all():
            empty = any(not self._items(inputs) for inputs in self.micro_batches())
            named = ("window-without-items-is-nan",) if empty else ()
            return Explanation("not finite, " + ("as a micro-batch has no target" if empty else "an overflow"), named)
        facts = self._facts(count)
        inherent = self._inherent()
        if router is None and (words := self._sums_in_16_bits(gradient, tolerance)):
            return Explanation(words)
        if router is not None:
            found = fit(gradient, right, router)
            if found.residual <= precision:
                return explanation.of_router(found.weights[0], found.weights[1], facts, precision)
        else:
            found = fit(gradient, right)
            if found.residual <= precision:
                return explanation.of_factor(found.weights[0], logged, facts, precision)
        parameters, world_size = self.verification.parameters, self.trainer.args.world_size
        if world_size > 1 and self.scene.contract.by_number:
            ranks = fit(gradient, averaged(self._rank_mean(), parameters, world_size))
            if ranks.residual <= precision:
                return explanation.of_means(explanation.RANK_MEANS, ranks.weights[0], logged, facts, precision)
        means = fit(gradient, averaged(self._means(count), parameters, world_size), *([router] if router else []))
        if means.residual <= precision:
            why = explanation.of_means(explanation.MEANS, means.weights[0], logged, facts, precision)
            return Explanation(f"{why.words}; {inherent}", why.defects) if inherent else why
        if inherent:
            return Explanation(inherent)
        return Explanation("no known cause")

    def _narrow(self) -> set[torch.dtype]:
        """The 16-bit dtypes of the parameters; empty if the micro-batches cannot be summed again."""
        dtypes = {each.dtype for each in self.verification.parameters if each.dtype.itemsize < 4}
        return dtypes if self.scene.contract.items is not None else set()

    def _rounded_off(self, gradient: Gradient, count: int) -> float | None:
        """The relative loss of summing micro-batches in 16 bits; None: less than one unit in the last place.

        The same micro-batches are summed in 32 bits, so that the noise of 16-bit forwards is in both and hides nothing.
        """
        if count == 1 or not (narrow := self._narrow()):
            return None
        parameters, world_size = self.verification.parameters, self.trainer.args.world_size
        wide = averaged(self._rank_mean(of_all=True, wide=True), parameters, world_size)
        lost = _worst(self.trainer, distance(gradient, [wide], [1.0]) / (math.sqrt(float(dots(wide)[0, 0])) or 1.0))
        return lost if lost > max(torch.finfo(dtype).eps for dtype in narrow) else None

    def _rounding(self) -> str:
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self._narrow()))
        return f"rounding, by summing micro-batches in {named}; set accumulate_in='float32' or 'compensated'"

    def _sums_in_16_bits(self, gradient: Gradient, tolerance: float) -> str:
        """The words for rounding in the parameters' own 16 bits; empty if that is not the cause."""
        parameters = self.verification.parameters
        if not self._narrow():
            return ""
        summed = averaged(self._rank_mean(of_all=True), parameters, self.trainer.args.world_size)
        if distance(gradient, [summed], [1.0]) > tolerance * math.sqrt(float(dots(summed)[0, 0])):
            return ""
        return self._rounding()

    def _inherent(self) -> str:
        """Why no split can equal the full batch; empty if splits can."""
        contract = self.scene.contract
        if contract.reduction is Reduction.PLAIN:
            return f"{contract.reason}, so no split can equal the full batch"
        return "" if self.reference.decomposes else "the loss does not decompose, so no split can equal the full batch"

    def _means(self, count: int) -> list[Any]:
        for inputs in self.micro_batches():
            if self._items(inputs) != 0:
                self.scene.backward(inputs, 1 / count)
        return take(self.verification.parameters)

    def _rank_mean(self, *, of_all: bool = False, wide: bool = False) -> list[Any]:
        """The gradient of the mean over this rank's items, or of its part of the mean over all items.

        Args:
            of_all: return that part, times W, so that the mean over ranks is the sum of the parts.
            wide: sum in 32 bits, whatever the dtype of the parameters.
        """
        summed = Sum(self.verification.parameters)
        batches = self.micro_batches()
        counts = [self._items(inputs) or 0.0 for inputs in batches]
        every = self.scene.count(self.every) or 0.0
        total = every / self.trainer.args.world_size if of_all else sum(counts)
        for inputs, counted in zip(batches, counts, strict=True):
            if counted:
                self.scene.backward(inputs, counted / total)
                if wide:
                    summed.add()
        return summed.take()

    def _items(self, inputs: Any) -> float | None:
        items = self.scene.contract.items
        return None if items is None else float(items.count(inputs))

    def _facts(self, count: int) -> Facts:
        trainer, contract = self.trainer, self.scene.contract
        model = trainer.accelerator.unwrap_model(trainer.model)
        labels = [batch.get("labels") for batch in (self.scene.collate([row]) for row in self.every)]
        counted = shifted = None
        if all(isinstance(each, torch.Tensor) and each.ndim > 1 for each in labels):
            counted = float(sum(int((each != -100).sum()) for each in labels))
            shifted = float(sum(int((each[..., 1:] != -100).sum()) for each in labels))
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        return Facts(
            micro_batches=count,
            steps=self.split.steps,
            world_size=trainer.args.world_size,
            items=self.scene.count(self.every),
            labels=counted,
            labels_shifted=shifted,
            reduction=contract.reduction,
            head=type(model).__name__,
            release=self.verification.blank.transformers,
            ignore_index=None if contract.items is None else contract.items.ignore_index,
            declares=bool(getattr(trainer, "model_accepts_loss_kwargs", False)),
            own_loss_func=getattr(trainer, "compute_loss_func", None) is not None,
            smoothing=trainer.label_smoother is not None,
            compiled=hasattr(trainer.model, "_orig_mod"),
            classification=problem in ("regression", "multi_label_classification"),
            has_labels=all(each is not None for each in labels),
            library=type(model).__module__.startswith("transformers."),
            generic=any(base.__name__.startswith("GenericFor") for base in type(model).__mro__),
            text=getattr(model, "main_input_name", "") == "input_ids",
        )


def _is_uniform(scene: Scene, every: Sequence[Any]) -> bool:
    """Whether all samples have equally many items, so that weights by items and by samples are the same."""
    items = scene.contract.items
    if items is None or not items.keys or scene.contract.reduction is Reduction.PLAIN:
        return False
    counts = [scene.count([row]) or 0.0 for row in every]
    return len(counts) > 1 and max(counts) > 1 and len(set(counts)) == 1


def _not_looked_at(trainer: TrainerLike) -> list[str]:
    """Notes on the trainer's own code that may change gradients and is not run here."""
    found = [
        f"{type(each).__name__}.{name}"
        for each in trainer.callback_handler.callbacks
        for name in ("on_pre_optimizer_step", "on_optimizer_step")
        if getattr(type(each), name, None) is not getattr(TrainerCallback, name, None)
        and not type(each).__module__.startswith("transformers.")
    ]
    clips = next((cls for cls in type(trainer).__mro__ if "_clip_grad_norm" in vars(cls)), Trainer)
    if clips is not Trainer:
        found.append(f"{clips.__name__}._clip_grad_norm")
    return [f"{each} is not run here; its effect on gradients is not verified" for each in found]


def _words(router: RouterLoss | None) -> str:
    """The convention of a router loss, in the words of a verdict."""
    convention = Convention.MEAN if router is None else router.in_force
    return f"{convention}" + ("" if convention is Convention.EXACT else ", by convention")


def _is_whole(router: RouterLoss | None) -> bool:
    """Whether the router loss in training is that of the whole global batch."""
    return router is not None and router.in_force is Convention.EXACT


def _never(_: Any) -> Any:
    raise AssertionError("the running counts need no forward")


def _off(error: float, words: str) -> Verdict:
    return Verdict(Kind.OFF, f"off, relative error {error:.2g}: {words}")


def _gathered(trainer: TrainerLike, value: Any) -> list[Any]:
    return list(gather_object([value])) if trainer.args.world_size > 1 else [value]


def _mean(trainer: TrainerLike, value: float) -> float:
    found = _gathered(trainer, value)
    return float(sum(found) / len(found))


def _worst(trainer: TrainerLike, value: float) -> float:
    found = _gathered(trainer, value)
    return math.inf if any(not math.isfinite(each) for each in found) else max(found)


def _notes_of_factor(trainer: TrainerLike, factor: float | None, steps: int) -> list[str]:
    """A note if a custom loss is G times the model's, or 1/G of it, at any split."""
    if factor is None or steps == 1 or all(abs(factor / each - 1) >= 1e-3 for each in (steps, 1 / steps)):
        return []
    return [
        f"{type(trainer).__name__}.compute_loss returns {factor:.4g} times the model's loss at any split: "
        f"if that factor is gradient_accumulation_steps={steps}, remove it"
    ]
