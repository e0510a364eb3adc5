"""Run one split of one global batch through the trainer's own loop, and compare its gradient with the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
import transformers
from accelerate.utils import gather_object

from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.ranks import fails_everywhere
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.learning.look import out_of_memory
from hf_accum_fix.options import Options
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.verification.copies import plugins_copied
from hf_accum_fix.verification.dry_run import DryRun, dry_run
from hf_accum_fix.verification.explanation import NEAR, explain, rounding
from hf_accum_fix.verification.gradients import Gradient, averaged, distance, dots, relative, take
from hf_accum_fix.verification.reference import FLOORS, WIDEST, Reference, SceneSplit
from hf_accum_fix.verification.report import Kind, SplitResult, Verdict, could_not_tell, off_by
from hf_accum_fix.verification.restore import in_mode

#: Smallest tolerance of a logged loss, which is rounded to few digits.
_LOGGED: Final = 1e-3
_LOST: Final = "epoch-tail-not-trained"


def compare(
    trainer: Any, split: SceneSplit, reference: Reference, window: int, mode: str, options: Options, step: int
) -> SplitResult:
    """Run a split in one mode, and judge its gradient; the result is the same on every rank."""
    blank = SplitResult(mode, split.per_device, split.steps, split.count, window, could_not_tell("not run"))
    try:
        with in_mode(mode, trainer, options), plugins_copied(trainer, split.per_device, split.steps):
            run = dry_run(trainer, split, step)
    except Exception as error:
        own = split.per_device == trainer.args.per_device_train_batch_size
        words = _obstacle(error, mode, own=own, sharded=is_sharded(trainer.accelerator))
        if not (words and fails_everywhere(trainer.args.process_index, trainer.args.world_size)):
            raise
    else:
        return _judged(blank, split, reference, run)
    take(split.scene.parameters)
    return replace(blank, verdict=could_not_tell(words))


def _obstacle(error: Exception, mode: str, *, own: bool, sharded: bool) -> str:
    """Why a split of the trainer's own micro-batches, or of others, was not run; empty: the error is the user's."""
    if isinstance(error, AccumFixError):
        return str(error)
    if isinstance(error, TypeError):  # The loss requires num_items_in_batch, which this mode does not pass.
        return f"{mode} cannot run this micro-batch: {error}"
    # An engine may raise anything; the user's own loop should not.
    known = isinstance(error, (RuntimeError, ValueError)) and not own
    return f"this micro-batch cannot be run: {error}" if known or sharded or out_of_memory(error) else ""


def _judged(blank: SplitResult, split: SceneSplit, reference: Reference, run: DryRun) -> SplitResult:
    count, tolerance, scene = split.count, reference.tolerance, split.scene
    lost = run.steps_run < count and is_present(_LOST, transformers.__version__)
    if run.gradient is None:
        words = f"no optimizer step after {run.steps_run} of {count} micro-batches"
        if not lost:
            return replace(blank, verdict=could_not_tell(words))
        return replace(blank, verdict=Verdict(Kind.OFF, f"off: {words}"), defects=(_LOST,))
    wanted, loss, router = [reference.gradient], reference.loss, None
    if scene.contract.has_router_loss:
        # By the convention in training.
        whole = run.convention is Convention.EXACT
        here, value = scene.router([scene.collate(list(scene.every))] if whole else split.micro_batches())
        router = scene.compared(averaged(here, scene.parameters, scene.world_size))
        wanted.append(router)
        loss += _mean(scene.world_size, value)
    products = dots(run.gradient, *wanted)
    right = math.sqrt(float(products[1:, 1:].sum()))
    norm = math.sqrt(float(products[0, 0])) if products[0, 0] >= 0 else math.nan
    along = float(products[0, 1:].sum())
    error = _worst(scene.world_size, distance(run.gradient, *wanted) / (right or 1.0))
    logged = _mean(scene.world_size, run.loss)
    result = replace(
        blank,
        norm_ratio=norm / right if right else None,
        error=error,
        cosine=along / (norm * right) if norm * right else None,
        loss_ratio=logged / loss if loss else None,
    )
    least = min(0.3, 1 / count if count > 1 else 0.3)
    if error <= tolerance and (factor := _hidden_factor(reference, least)):
        words = f"the noise floor is {reference.noise.floor:.2g}, which would hide a factor of {factor:.4g}"
        return replace(result, verdict=could_not_tell(words))
    scale = along / right**2 if right else 1.0
    if error <= tolerance and (tolerance < least / 2 or abs(scale - 1) < least / 2):
        if router is None and (rounded := _rounded_off(split, run.gradient)) is not None:
            return replace(result, verdict=off_by(rounded, rounding(split)))
        return replace(result, verdict=_exact(run, router, result.loss_ratio, tolerance))
    if lost:
        words = f"{run.steps_run} of {count} micro-batches were trained on"
        return replace(result, verdict=off_by(error, words), defects=(_LOST,))
    words, defects = explain(split, reference, run.gradient, router, result.loss_ratio or math.nan)
    return replace(result, verdict=off_by(error, words), defects=tuple(dict.fromkeys(defects)))


def _hidden_factor(reference: Reference, least: float) -> float | None:
    """The smallest relevant factor, if noise would hide it: 1.3, or ``1 + least``."""
    if reference.tolerance > WIDEST:
        return 1.3
    return 1 + least if min(reference.tolerance, FLOORS * reference.noise.scale) >= least / 2 else None


def _exact(run: DryRun, router: Gradient | None, logged: float | None, tolerance: float) -> Verdict:
    words = "exact"
    # A router loss that the trainer itself adds is not a term of the contract.
    if router is not None or run.convention is Convention.EXACT:
        words += f", the router's loss {run.convention}"
        words += ", by convention" if run.convention is not Convention.EXACT else ""
    if logged is not None and abs(logged - 1) > max(NEAR * tolerance, _LOGGED):
        words += f"; but the logged loss is {logged:.4g} times the full batch's"
    return Verdict(Kind.EXACT, words)


def _rounded_off(split: SceneSplit, gradient: Gradient) -> float | None:
    """The relative loss of summing micro-batches in 16 bits; None: less than one unit in the last place.

    The same micro-batches are summed in 32 bits, so that the noise of 16-bit forwards is in both and hides nothing.
    """
    if split.count == 1 or not split.narrow:
        return None
    lost = _worst(split.scene.world_size, relative(gradient, split.averaged(split.parts(), wide=True)))
    return lost if lost > max(torch.finfo(dtype).eps for dtype in split.narrow) else None


def gathered(world_size: int, value: Any) -> list[Any]:
    """The values of all ranks."""
    return list(gather_object([value])) if world_size > 1 else [value]


def _mean(world_size: int, value: float) -> float:
    return float(sum(gathered(world_size, value)) / world_size)


def _worst(world_size: int, value: float) -> float:
    found = gathered(world_size, value)
    return max(found) if all(map(math.isfinite, found)) else math.inf
