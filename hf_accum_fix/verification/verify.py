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
from packaging.version import Version
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.errors import AccumFixError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.overrides.live import compute_loss_of, data_ranks
from hf_accum_fix.overrides.session import settled_contract
from hf_accum_fix.overrides.training import check_setup
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.upstream.defects import DEFECTS, Factor
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import VERIFY
from hf_accum_fix.verification import explanation
from hf_accum_fix.verification.dry_run import DryRun, copy_for_split, dry_run
from hf_accum_fix.verification.evaluate import evaluate
from hf_accum_fix.verification.explanation import Explanation, Facts
from hf_accum_fix.verification.gradients import Gradient, averaged, distance, dots, fit, take
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

#: Largest distance of a factor from its symbol, in tolerances; and the smallest such limit, relative.
_NEAR: Final = 8.0
_NEAREST: Final = 1e-5
#: Smallest tolerance of a logged loss, which is rounded to few digits.
_LOGGED: Final = 1e-3
_CANNOT: Final = "this micro-batch cannot be run"
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
            lost = tuple(f"{each} was read or written and cannot be put back" for each in state.python.lost())
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
        self.parameters: list[nn.Parameter] = [each for each in trainer.model.parameters() if each.requires_grad]
        release = Version(self.blank.transformers)
        self.present = {defect.name: defect for defect in DEFECTS if defect.is_in(release)}
        notes = ["dropout was turned off for the comparison"] if without_dropout(trainer.model) else []
        notes += _not_looked_at(trainer)
        size, steps = self.own = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
        drawn = draw(copy_for_split(trainer, size, steps), windows, samples)
        notes += drawn.notes
        modes = [STOCK, *([PATCHED] if self.with_apply and enabled() else [])]
        modes = modes if self.with_apply else [self.blank.active]
        if self.with_apply and not enabled():
            notes.append(f"apply() was not run: {SWITCH}={os.environ[SWITCH]}")
        results: list[SplitResult] = []
        owns: list[SplitResult] = []
        references: list[Reference] = []
        sizes: list[tuple[int, float | None]] = []
        for number, scene in enumerate(self._windows(drawn, options, windows, samples, notes)):
            reference = compute(scene, self.mode, size)
            notes += reference.notes
            references.append(reference)
            sizes.append((len(scene.every), scene.count(scene.every)))
            own_split = splits_of(len(scene.rows), size, None)[0]
            here = []
            for split in splits_of(len(scene.rows), size, self.splits):
                found = [_Run(self, scene, reference, number, split).result(mode, options) for mode in modes]
                here += found
                owns += found if split == own_split else []
            results += here
            masked = "attention_mask" in scene.collate([scene.rows[0]])
            if scene.contract.has_router_loss and options.router_loss == Convention.EXACT.value and not masked:
                notes.append(
                    "without an attention mask, padding is routed and counted: pad every split to the same width"
                )
            notes += self._notes_of(scene, reference, here)
            notes += _notes_of_factor(trainer, scene.factor(scene.collate(list(scene.rows[:size]))), steps)
        evaluated, reason = evaluate(trainer, scene, eval_samples, modes, options)
        notes += [reason] if reason else []
        return replace(
            self.blank,
            world_size=trainer.args.world_size,
            contract=str(scene.contract),
            evaluation=evaluated,
            verdict=judge_own(results, owns, self.blank.active, self.own),
            own=(own_split.per_device, own_split.steps),
            samples=tuple(samples for samples, _ in sizes),
            items=tuple(items for _, items in sizes),
            reference=references[0].words,
            floor=max(each.noise.floor for each in references),
            tolerance=max(each.tolerance for each in references),
            results=tuple(results),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _notes_of(self, scene: Scene, reference: Reference, results: Sequence[SplitResult]) -> list[str]:
        """What limits the proof in one window."""
        notes = []
        stuck = sorted({each.per_device for each in results if _CANNOT in each.verdict.words})
        if stuck and scene.contract.reduction is Reduction.PLAIN:
            notes.append(
                f"micro-batches of {', '.join(map(str, stuck))} samples cannot be run: if the model puts rows into "
                "groups by a size of its own, the full batch in one forward is another loss than in training"
            )
        if not reference.decomposes and not self.router_is_whole:
            notes.append("two halves of the global batch do not add up to it: no split can equal the full batch")
        return notes

    def _windows(
        self, drawn: Drawn, options: Options, windows: int, samples: Sequence[Any] | None, notes: list[str]
    ) -> Iterator[Scene]:
        """Each global batch; a further one if all are uniform."""
        uniform = True
        for rows in drawn.windows:
            scene = self._scene(drawn, rows, options)
            uniform = uniform and _is_uniform(scene)
            yield scene
        if not uniform:
            return
        if samples is None:
            further = draw(copy_for_split(self.trainer, *self.own), windows + _FURTHER, None)
            for rows in further.windows:
                if not _is_uniform(replace(scene, collate=further.collate, every=self._of_all_ranks(rows))):
                    notes.append(
                        "a further global batch was drawn, because all samples of the first have equally many items"
                    )
                    yield self._scene(further, rows, options)
                    return
        notes.append("all samples have equally many items: whether micro-batches are weighted by items was not tested")

    def _of_all_ranks(self, rows: Sequence[Any]) -> list[Any]:
        return [each for rank in _gathered(self.trainer, list(rows)) for each in rank]

    def _scene(self, drawn: Drawn, rows: Sequence[Any], options: Options) -> Scene:
        """The trainer without accumulation, its contract observed on the window with the user's split."""
        alone = copy_for_split(self.trainer, len(rows), 1, self.step)
        if compute_loss_of(alone) is not None:
            alone.compute_loss = without_outputs(alone.compute_loss)
        own = Split(self.own[0], 1)
        contract = settled_contract(alone, own.micro_batches(rows, drawn.collate), options)
        return Scene(alone, self.parameters, contract, drawn.collate, rows, self._of_all_ranks(rows))


@dataclass
class _Run:
    """One split of one global batch."""

    verification: _Verification
    scene: Scene
    reference: Reference
    window: int
    split: Split

    @property
    def trainer(self) -> Any:
        return self.verification.trainer

    @property
    def count(self) -> int:
        """G, the micro-batches of this rank's window."""
        return -(-len(self.scene.rows) // self.split.per_device)

    def micro_batches(self) -> list[Any]:
        return self.split.micro_batches(self.scene.rows, self.scene.collate)

    def result(self, mode: str, options: Options) -> SplitResult:
        """Run the split in one mode and compare its gradient."""
        size, steps = self.split.per_device, self.split.steps
        blank = SplitResult(mode, size, steps, self.count, self.window, could_not_tell("not run"))
        try:
            with in_mode(mode, self.trainer, options):
                run = dry_run(
                    self.trainer,
                    self.scene.parameters,
                    self.micro_batches(),
                    self.split,
                    len(self.scene.every),
                    self.verification.wrapped,
                    self.verification.step,
                )
        except AccumFixError as error:
            return replace(blank, verdict=could_not_tell(str(error)))
        except TypeError as error:  # The loss requires num_items_in_batch, which this mode does not pass.
            take(self.scene.parameters)
            return replace(blank, verdict=could_not_tell(f"{mode} cannot run this micro-batch: {error}"))
        except (RuntimeError, ValueError) as error:
            if size == self.verification.own[0] and not out_of_memory(error):
                raise
            take(self.scene.parameters)
            return replace(blank, verdict=could_not_tell(f"{_CANNOT}: {error}"))
        self.verification.wrapped = run.wrapped
        self.verification.router_is_whole |= run.convention is Convention.EXACT
        return self._compared(blank, run)

    def _compared(self, blank: SplitResult, run: DryRun) -> SplitResult:
        """The numbers and the verdict, the same on every rank."""
        count, tolerance = self.count, self.reference.tolerance
        lost = explanation.LOST in self.verification.present and run.steps_run < count
        if run.gradient is None:
            words = f"no optimizer step after {run.steps_run} of {count} micro-batches"
            if not lost:
                return replace(blank, verdict=could_not_tell(words))
            return replace(blank, verdict=Verdict(Kind.OFF, f"off: {words}"), defects=(explanation.LOST,))
        wanted: list[Gradient] = [self.reference.gradient]
        loss = self.reference.loss
        router = None
        if self.scene.contract.has_router_loss:
            here, value = self._router(run)
            router = self._over_ranks(here)
            wanted.append(router)
            loss += _mean(self.trainer, value)
        products = dots(run.gradient, *wanted)
        right = math.sqrt(float(products[1:, 1:].sum()))
        norm = math.sqrt(float(products[0, 0])) if products[0, 0] >= 0 else math.nan
        error = _worst(self.trainer, distance(run.gradient, *wanted) / (right or 1.0))
        logged = _mean(self.trainer, run.loss)
        result = replace(
            blank,
            norm_ratio=norm / right if right else None,
            error=error,
            cosine=float(products[0, 1:].sum()) / (norm * right) if norm * right else None,
            loss_ratio=logged / loss if loss else None,
        )
        scale = float(products[0, 1:].sum()) / right**2 if right else 1.0
        if error <= tolerance and (kept := self._kept(scale)) is not False:
            if kept is not True:
                return replace(result, verdict=could_not_tell(kept))
            if router is None and (rounded := self._rounded_off(run.gradient)) is not None:
                return replace(result, verdict=_off(rounded, self._rounding()))
            # A router loss that the trainer itself adds is not a term of the contract.
            words = "exact to the floor"
            if run.convention is Convention.EXACT:
                words += f", the router's loss {run.convention}"
            elif router is not None:
                words += f", the router's loss {run.convention}, by convention"
            if result.loss_ratio is not None and abs(result.loss_ratio - 1) > max(_NEAR * tolerance, _LOGGED):
                words += f"; but the logged loss is {result.loss_ratio:.4g} times the full batch's"
            return replace(result, verdict=Verdict(Kind.EXACT, words))
        if lost:
            words = f"{run.steps_run} of {count} micro-batches were trained on"
            return replace(result, verdict=_off(error, words), defects=(explanation.LOST,))
        why = self._why(run.gradient, router, result.loss_ratio or math.nan)
        return replace(result, verdict=_off(error, why.words), defects=tuple(dict.fromkeys(why.defects)))

    def _kept(self, scale: float) -> bool | str:
        """Whether the tolerance excludes the smallest relevant factor, 1 + 1/G; or why that is unknown.

        ``scale`` is the length of the gradient along the reference.
        """
        least, tolerance = min(0.3, 1 / self.count if self.count > 1 else 0.3), self.reference.tolerance
        if tolerance > WIDEST:
            return f"the noise floor is {self.reference.noise.floor:.2g}, which would hide a factor of 1.3"
        if tolerance < least / 2:
            return True
        if FLOORS * self.reference.noise.scale >= least / 2:
            return f"the noise floor is {self.reference.noise.floor:.2g}, which would hide a factor of {1 + least:.4g}"
        return abs(scale - 1) < least / 2

    def _router(self, run: DryRun) -> tuple[Gradient, float]:
        """This rank's gradient and value of the router loss, by the convention in training."""
        trained, batches = run.router, self.micro_batches()
        if run.convention is Convention.EXACT:
            return self.scene.router([self.scene.collate(list(self.scene.every))])
        if trained is None or run.convention is Convention.MEAN:
            return self.scene.router(batches)
        # Running counts depend on the split, so compare them with themselves.
        device, world_size = self.trainer.args.device, self.trainer.args.world_size
        numbers = trained.count(_never, batches, self.trainer.model, device, world_size)
        if world_size > 1:
            numbers = self.trainer.accelerator.reduce(numbers, reduction="sum")
        trained.settle(numbers, len(batches), world_size)
        return self.scene.router(batches, trained.micro_batch)

    def _why(self, gradient: Gradient, router: Gradient | None, logged: float) -> Explanation:
        """Try the possible causes, the cheap ones first."""
        tolerance, right = self.reference.tolerance, self.reference.gradient
        precision = min(max(_NEAR * tolerance, _NEAREST), WIDEST)
        if not torch.isfinite(dots(gradient)).all():
            if any(not self._items(inputs) for inputs in self.micro_batches()):
                return Explanation("not finite, as a micro-batch has no target", ("window-without-items-is-nan",))
            return Explanation("not finite, an overflow")
        facts, inherent = self._facts(), self._inherent()
        if router is None and self._narrow() and _apart(gradient, self._averaged(self._parts())) <= tolerance:
            return Explanation(self._rounding())
        if router is not None:
            (main, aux), rest = fit(gradient, right, router)
            if rest <= precision:
                return explanation.of_router(main, aux, facts, precision)
        else:
            (factor,), rest = fit(gradient, right)
            if rest <= precision:
                return explanation.of_factor(factor, logged, facts, precision)
        items = [self._items(inputs) for inputs in self.micro_batches()]
        if self.trainer.args.world_size > 1 and self.scene.contract.by_number:
            rank_mean = self._averaged(self._parts(sum(each or 0.0 for each in items)))
            (factor,), rest = fit(gradient, rank_mean)
            if rest <= precision:
                return explanation.of_means(explanation.RANK_MEANS, factor, logged, facts, precision)
        means = self._averaged([0.0 if each == 0 else 1 / self.count for each in items])
        (factor, *_), rest = fit(gradient, means, *([router] if router else []))
        if rest <= precision:
            why = explanation.of_means(explanation.MEANS, factor, logged, facts, precision)
            return Explanation(f"{why.words}; {inherent}", why.defects) if inherent else why
        return Explanation(inherent or "no known cause")

    def _narrow(self) -> set[torch.dtype]:
        """The 16-bit dtypes of the parameters; empty if the micro-batches cannot be summed again."""
        dtypes = {each.dtype for each in self.scene.parameters if each.dtype.itemsize < 4}
        return dtypes if self.scene.contract.items is not None else set()

    def _rounded_off(self, gradient: Gradient) -> float | None:
        """The relative loss of summing micro-batches in 16 bits; None: less than one unit in the last place.

        The same micro-batches are summed in 32 bits, so that the noise of 16-bit forwards is in both and hides nothing.
        """
        if self.count == 1 or not (narrow := self._narrow()):
            return None
        lost = _worst(self.trainer, _apart(gradient, self._averaged(self._parts(), wide=True)))
        return lost if lost > max(torch.finfo(dtype).eps for dtype in narrow) else None

    def _rounding(self) -> str:
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self._narrow()))
        return f"rounding, by summing micro-batches in {named}; set accumulate_in='float32' or 'compensated'"

    def _inherent(self) -> str:
        """Why no split can equal the full batch; empty if splits can."""
        contract = self.scene.contract
        if contract.reduction is Reduction.PLAIN:
            return f"{contract.reason}, so no split can equal the full batch"
        return "" if self.reference.decomposes else "the loss does not decompose, so no split can equal the full batch"

    def _averaged(self, weights: Sequence[float], *, wide: bool = False) -> Gradient:
        """The sum of this rank's micro-batches, each times its weight; the mean over ranks."""
        return self._over_ranks(self.scene.gradient(self.micro_batches(), weights, wide=wide)[1])

    def _over_ranks(self, gradient: Gradient) -> Gradient:
        return averaged(gradient, self.scene.parameters, self.trainer.args.world_size)

    def _parts(self, total: float | None = None) -> list[float]:
        """The weight of each micro-batch in the mean over all items, times W; or over another total."""
        if total is None:
            total = (self.scene.count(self.scene.every) or 0.0) / self.trainer.args.world_size
        return [counted / total if (counted := self._items(inputs)) else 0.0 for inputs in self.micro_batches()]

    def _items(self, inputs: Any) -> float | None:
        items = self.scene.contract.items
        return None if items is None else float(items.count(inputs))

    def _facts(self) -> Facts:
        trainer, contract, count, steps = self.trainer, self.scene.contract, self.count, self.split.steps
        world_size, items = trainer.args.world_size, self.scene.count(self.scene.every)
        factors = {
            Factor.G: float(count),
            Factor.W: float(world_size),
            Factor.G_W: float(count * world_size),
            Factor.PER_G: 1 / steps,
            Factor.PER_W: 1 / world_size,
            Factor.PER_G_W: 1 / (steps * world_size),
            Factor.SHORT: count / steps,
        }
        labels = [batch.get("labels") for batch in (self.scene.collate([row]) for row in self.scene.every)]
        if items and all(isinstance(each, torch.Tensor) and each.ndim > 1 for each in labels):
            counted = sum(int((each != -100).sum()) for each in labels)
            shifted = sum(int((each[..., 1:] != -100).sum()) for each in labels)
            ignored = contract.items is not None and contract.items.ignore_index not in (None, -100)
            if counted > items:
                factors[Factor.MORE_BY_IGNORED if ignored else Factor.MORE_BY_ROWS] = items / counted
            if 0 < shifted < items:
                factors[Factor.LESS_BY_ROWS] = items / shifted
        model = trainer.accelerator.unwrap_model(trainer.model)
        head, bases = type(model), [base.__name__ for base in type(model).__mro__]
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        reads_text = getattr(model, "main_input_name", "") == "input_ids"
        traits = {
            contract.reduction.value: True,
            "declares": bool(getattr(trainer, "model_accepts_loss_kwargs", False)),
            "own-loss": getattr(trainer, "compute_loss_func", None) is not None,
            "smoothing": trainer.label_smoother is not None,
            "compiled": hasattr(trainer.model, "_orig_mod"),
            "labels": all(each is not None for each in labels),
            "library": head.__module__.startswith("transformers."),
            "generic": any(name.startswith("GenericFor") for name in bases),
            "other-classes": not reads_text and problem in ("regression", "multi_label_classification"),
            "llava": "Llava" in head.__name__,
            "peft": head.__name__.startswith("Peft"),
            "one-step": steps == 1,
        }
        return Facts(
            world_size,
            {factor: value for factor, value in factors.items() if value != 1.0},
            self.verification.present,
            frozenset(name for name, holds in traits.items() if holds),
        )


def _is_uniform(scene: Scene) -> bool:
    """Whether all samples have equally many items, so that weights by items and by samples are the same."""
    items = scene.contract.items
    if items is None or not items.keys or scene.contract.reduction is Reduction.PLAIN:
        return False
    counts = [scene.count([row]) or 0.0 for row in scene.every]
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


def _never(_: Any) -> Any:
    raise AssertionError("the running counts need no forward")


def _off(error: float, words: str) -> Verdict:
    return Verdict(Kind.OFF, f"off, relative error {error:.2g}: {words}")


def _apart(one: Gradient, other: Gradient) -> float:
    return distance(one, other) / (math.sqrt(float(dots(other)[0, 0])) or 1.0)


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
