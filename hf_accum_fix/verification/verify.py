"""verify(): whether a run is affected, and right under the patch. Compares gradients: a correct log proves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import Trainer, TrainerCallback

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.confirmation import is_quiet
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.ranks import fails_everywhere
from hf_accum_fix.errors import AccumFixError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.overrides.session import settled_contract
from hf_accum_fix.overrides.trainer_facts import compute_loss_of, data_ranks
from hf_accum_fix.overrides.training import check_setup
from hf_accum_fix.progress import Progress
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import VERIFY
from hf_accum_fix.verification.compare import compare, gathered
from hf_accum_fix.verification.copies import PROOF, copy_for_split, plugins_copied, refuse_shards, whole_model
from hf_accum_fix.verification.evaluate import evaluate
from hf_accum_fix.verification.projection import BUCKETS, ROWS
from hf_accum_fix.verification.proof import limit_across, proof_of
from hf_accum_fix.verification.reference import Reference, Scene, Split, compute, out_of_memory, without_outputs
from hf_accum_fix.verification.report import (
    PATCHED,
    STOCK,
    SplitResult,
    VerificationReport,
    could_not_tell,
    judge_own,
)
from hf_accum_fix.verification.restore import active_mode, options_of, unseen, without_dropout
from hf_accum_fix.verification.sample import Drawn, draw, micro_batches, splits_of
from hf_accum_fix.verification.sharded import engine_of

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
    save: str | Path | None = None,
) -> VerificationReport:
    """Compare the gradient of a trainer for several splits of one global batch with the gradient of the full batch.

    Draw the first global batches in the trainer's own order, split them into micro-batches, and run each split through
    the trainer's own ``train()`` without an optimizer step, as the installed release does it and with ``apply()``.
    Afterwards model, optimizer, the trainer's attributes, random states, data order and output folder are as before.
    Dropout is off during the comparison. Call it on every rank; every rank gets the same report. FSDP and DeepSpeed
    train copies of the model, and projections of the gradients are compared there.

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
        save: a file for the proof of the first global batch, to hold another layout against
            (``hf-accum-fix verify --against``); rank 0 writes it.

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
        progress = Progress(listened=trainer.args.process_index == 0 and not is_quiet())
        with progress.kept_up(), unseen(trainer), plugins_copied(trainer):
            return _verified(
                trainer, blank, splits, windows, reference, samples, with_apply, eval_samples, step, save, progress.say
            )
    except OptionsError:
        raise
    except (AccumFixError, RuntimeError) as error:
        no_memory = is_sharded(trainer.accelerator) and out_of_memory(error)
        known = isinstance(error, AccumFixError) or no_memory
        if not (known and fails_everywhere(trainer.args.process_index, trainer.args.world_size)):
            raise
        words = f"{error}{PROOF}" if no_memory else str(error)
        return replace(blank, verdict=could_not_tell(words), world_size=trainer.args.world_size)


def _check(trainer: TrainerLike) -> None:
    off = check_setup(trainer)
    if VERIFY in off:
        raise SeamError(off[VERIFY])
    refuse_shards(trainer)
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise UnsupportedSetupError(
            "got a model without a trainable parameter; expected at least one; set requires_grad"
        )


def _verified(
    trainer: TrainerLike,
    blank: VerificationReport,
    splits: Sequence[tuple[int, int] | int] | None,
    windows: int,
    reference: str,
    samples: Sequence[Any] | None,
    with_apply: bool,
    eval_samples: int,
    step: int,
    save: str | Path | None,
    say: Callable[[str], None],
) -> VerificationReport:
    """Draw samples, compute the references, run every split in every mode, evaluate."""
    options = options_of(trainer)
    own = size, _ = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    notes = ["dropout was turned off for the comparison"] if without_dropout(trainer.model) else []
    notes += _not_looked_at(trainer)
    say("verify: drawing samples")
    drawn = draw(copy_for_split(trainer, *own), windows, samples)
    notes += drawn.notes
    modes = [STOCK, PATCHED] if with_apply and enabled() else [STOCK if with_apply else blank.active]
    if with_apply and not enabled():
        notes.append(f"apply() was not run: {SWITCH}={os.environ[SWITCH]}")
    whole, shards = trainer, is_sharded(trainer.accelerator)
    if shards:
        whole = copy_for_split(trainer, *own)
        whole.model = whole_model(trainer)
        notes.append(
            f"{engine_of(trainer)}: gradients were compared by {ROWS * BUCKETS} projections of each parameter, which "
            "tell an error to about a third of itself"
        )
    scenes: list[Scene] = []
    references: list[Reference] = []
    results: list[SplitResult] = []
    owns: list[SplitResult] = []
    say("verify: observing the loss")
    for window, scene in enumerate(_scenes(whole, drawn, options, windows, samples is None, step, notes)):
        scenes.append(scene)
        of_window = f"verify: window {window + 1}, " if window else "verify: "
        say(f"{of_window}the reference: {len(scene.every)} samples")
        references.append(compute(scene, reference, size))
        if save is not None and not window:
            notes += _saved(scene, references[0], drawn, Path(save))
        if shards:
            shown, least = references[-1], limit_across(references[-1].tolerance, scene.rounding)
            references[-1] = replace(shown, gradient=scene.compared(shown.gradient), least=least)
        to_run = [(split, mode) for split in splits_of(len(scene.rows), own, splits) for mode in modes]
        here: list[SplitResult] = []
        for number, (split, mode) in enumerate(to_run, start=1):
            say(f"{of_window}split {number} of {len(to_run)}: {split[0]} x {split[1]}, {mode}")
            here.append(compare(trainer, Split(scene, *split), references[-1], window, mode, options, step))
        results += here
        owns += [each for each in here if (each.per_device, each.steps) == own]
        notes += [*references[-1].notes, *_notes_on(scene, references[-1], here, options, own)]
    say("verify: eval_loss")
    evaluated, reason = evaluate(trainer, scene, eval_samples, modes, options)
    return replace(
        blank,
        world_size=data_ranks(trainer),
        contract=str(scene.contract),
        evaluation=evaluated,
        verdict=judge_own(results, owns, blank.active, own),
        own=own,
        samples=tuple(len(each.every) for each in scenes),
        items=tuple(each.count(each.every) for each in scenes),
        reference=references[0].words,
        floor=max(each.noise.floor for each in references),
        tolerance=max(each.tolerance for each in references),
        results=tuple(results),
        notes=tuple(dict.fromkeys([*notes, reason] if reason else notes)),
    )


def _scenes(
    trainer: TrainerLike, drawn: Drawn, options: Options, windows: int, may_draw: bool, step: int, notes: list[str]
) -> Iterator[Scene]:
    """Each global batch; a further one if all samples have equally many items. ``notes`` get what is special."""
    size, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps

    def scene_of(drawn: Drawn, rows: Sequence[Any]) -> Scene:
        """The trainer without accumulation, its contract observed on the window with the user's split."""
        alone = copy_for_split(trainer, len(rows), 1, step)
        if compute_loss_of(alone) is not None:
            alone.compute_loss = without_outputs(alone.compute_loss)
        contract = settled_contract(alone, micro_batches(rows, size, drawn.collate), options)
        parameters = [each for each in trainer.model.parameters() if each.requires_grad]
        return Scene(alone, parameters, contract, drawn.collate, rows, every(rows))

    def every(rows: Sequence[Any]) -> list[Any]:
        # Tensor-parallel ranks have the same samples.
        ranks = gathered(trainer.args.world_size, list(rows))[:: trainer.args.world_size // data_ranks(trainer)]
        return [each for rank in ranks for each in rank]

    uniform = True
    for rows in drawn.windows:
        scene = scene_of(drawn, rows)
        uniform = uniform and _is_uniform(scene)
        yield scene
    if not uniform:
        return
    if may_draw:
        further = draw(copy_for_split(trainer, size, steps), windows + _FURTHER, None)
        for rows in further.windows:
            if not _is_uniform(replace(scene, collate=further.collate, every=every(rows))):
                notes.append(
                    "a further global batch was drawn, because all samples of the first have equally many items"
                )
                yield scene_of(further, rows)
                return
    notes.append("all samples have equally many items: whether micro-batches are weighted by items was not tested")


def _saved(scene: Scene, reference: Reference, drawn: Drawn, path: Path) -> list[str]:
    """Save the proof of a global batch; a note, if there can be none."""
    try:
        proof = proof_of(scene, reference, drawn)
    except UnsupportedSetupError as error:
        return [f"no proof was saved: {error}"]
    if scene.trainer.args.process_index == 0:
        proof.save(path)
    return []


def _is_uniform(scene: Scene) -> bool:
    """Whether all samples have equally many items, so that weights by items and by samples are the same."""
    items = scene.contract.items
    if items is None or not items.keys or scene.contract.reduction is Reduction.PLAIN:
        return False
    counts = [scene.count([row]) or 0.0 for row in scene.every]
    return len(counts) > 1 and max(counts) > 1 and len(set(counts)) == 1


def _notes_on(
    scene: Scene, reference: Reference, results: Sequence[SplitResult], options: Options, own: tuple[int, int]
) -> Iterator[str]:
    """What limits the proof in one window."""
    batch = scene.collate(list(scene.rows[: own[0]]))
    exact_router = scene.contract.has_router_loss and options.router_loss == Convention.EXACT.value
    if exact_router and "attention_mask" not in batch:
        yield "without an attention mask, padding is routed and counted: pad every split to the same width"
    if not reference.decomposes and not any(each.verdict and each.micro_batches > 1 for each in results):
        yield "two halves of the global batch do not add up to it: no split can equal the full batch"


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
