"""verify(): whether a run is affected, and right under the patch. Compares gradients: a correct log proves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from tqdm.auto import tqdm

from hf_accum_fix.confirmation import is_quiet
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.engines.ranks import fails_everywhere
from hf_accum_fix.errors import AccumFixError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.learning.look import out_of_memory
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.overrides.session import session_of
from hf_accum_fix.overrides.trainer_facts import compute_loss_of, data_ranks
from hf_accum_fix.overrides.training import check_setup
from hf_accum_fix.upstream.environment import upstream_class
from hf_accum_fix.upstream.seams import VERIFY
from hf_accum_fix.verification.compare import compare, gathered
from hf_accum_fix.verification.copies import (
    PROOF,
    copy_for_split,
    engine_of,
    own_backward_left_out,
    plugins_copied,
    refuse_shards,
    whole_model,
)
from hf_accum_fix.verification.projection import BUCKETS, ROWS
from hf_accum_fix.verification.proof import limit_across, proof_of
from hf_accum_fix.verification.reference import Reference, Scene, SceneSplit, compute, without_outputs
from hf_accum_fix.verification.report import PATCHED, STOCK, SplitResult, VerificationReport, could_not_tell, judge_own
from hf_accum_fix.verification.restore import active_mode, options_of, unseen, without_dropout
from hf_accum_fix.verification.sample import Drawn, draw, micro_batches, splits_of

#: Seconds before anything is said.
_SILENT = 2.0


def verify(
    trainer: Any,
    splits: Sequence[tuple[int, int] | int] | None = None,
    windows: int = 1,
    *,
    reference: str = "auto",
    samples: Sequence[Any] | None = None,
    with_apply: bool = True,
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
        step: optimizer step to verify: it is set in the trainer's state, and one window runs before it. The weights are
            the current ones.
        save: a file for the proof of the first global batch, to hold another layout against
            (``hf-accum-fix verify --against``); rank 0 writes it.

    Raises:
        OptionsError: if an argument is invalid. Any other obstacle gives the verdict "could not tell".
    """
    if windows < 1 or step < 0:
        raise OptionsError(f"got windows={windows}, step={step}; expected windows >= 1 and step >= 0")
    if upstream_class(type(trainer)) is None:
        got = f"the class {trainer.__name__}" if isinstance(trainer, type) else type(trainer).__name__
        raise OptionsError(
            f"got {got}; expected a built transformers.Trainer; pass Trainer(model=..., args=..., train_dataset=...)"
        )
    head = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
    blank = VerificationReport(
        type(trainer).__name__, head, transformers.__version__, active_mode(trainer), could_not_tell("nothing was run")
    )
    try:
        off = check_setup(trainer)
        if VERIFY in off:
            raise SeamError(off[VERIFY])
        refuse_shards(trainer)
        if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedSetupError(
                "got a model without a trainable parameter; expected at least one; set requires_grad"
            )
        # On a terminal alone.
        hidden = None if trainer.args.process_index == 0 and not is_quiet() else True
        bar = tqdm(bar_format="{desc} ({elapsed})", delay=_SILENT, leave=False, disable=hidden)
        with bar, unseen(trainer), plugins_copied(trainer):
            say = bar.set_description_str
            return _verified(trainer, blank, splits, windows, reference, samples, with_apply, step, save, say)
    except OptionsError:
        raise
    except (AccumFixError, RuntimeError) as error:
        no_memory = is_sharded(trainer.accelerator) and out_of_memory(error)
        known = isinstance(error, AccumFixError) or no_memory
        if not (known and fails_everywhere(trainer.args.process_index, trainer.args.world_size)):
            raise
        words = f"{error}{PROOF}" if no_memory else str(error)
        return replace(blank, verdict=could_not_tell(words), world_size=trainer.args.world_size)


def _verified(
    trainer: Any,
    blank: VerificationReport,
    splits: Sequence[tuple[int, int] | int] | None,
    windows: int,
    reference: str,
    samples: Sequence[Any] | None,
    with_apply: bool,
    step: int,
    save: str | Path | None,
    say: Callable[[str], None],
) -> VerificationReport:
    """Draw samples, compute the references, run every split in every mode."""
    options = options_of(trainer)
    own = size, _ = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    notes = ["dropout was turned off for the comparison"] if without_dropout(trainer.model) else []
    notes += filter(None, [own_backward_left_out(trainer)])
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
    scenes, references, results, owns = list[Scene](), list[Reference](), list[SplitResult](), list[SplitResult]()
    say("verify: observing the loss")
    for window, rows in enumerate(drawn.windows):
        scene = _scene(whole, rows, drawn, options, step)
        of_window = f"verify: window {window + 1}, " if window else "verify: "
        say(f"{of_window}the reference: {len(scene.every)} samples")
        found = compute(scene, reference, size)
        if save is not None and not window:
            try:
                proof = proof_of(scene, found, drawn)
                if trainer.args.process_index == 0:
                    proof.save(Path(save))
            except UnsupportedSetupError as error:
                notes.append(f"no proof was saved: {error}")
        if shards:
            least = limit_across(found.tolerance, scene.rounding)
            found = replace(found, gradient=scene.compared(found.gradient), least=least)
        to_run = [(split, mode) for split in splits_of(len(scene.rows), own, splits) for mode in modes]
        for number, (split, mode) in enumerate(to_run, start=1):
            say(f"{of_window}split {number} of {len(to_run)}: {split[0]} x {split[1]}, {mode}")
            results.append(compare(trainer, SceneSplit(scene, *split), found, window, mode, options, step))
            owns += results[-1:] if split == own else []
        notes += found.notes
        scenes.append(scene)
        references.append(found)
    if all(map(_is_uniform, scenes)):
        notes.append("all samples have equally many items: whether micro-batches are weighted by items was not tested")
    return replace(
        blank,
        world_size=data_ranks(trainer),
        contract=str(scene.contract),
        verdict=judge_own(results, owns, blank.active, own),
        own=own,
        samples=tuple(len(each.every) for each in scenes),
        items=tuple(each.count(each.every) for each in scenes),
        reference=references[0].words,
        floor=max(each.noise.floor for each in references),
        tolerance=max(each.tolerance for each in references),
        results=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
    )


def _scene(trainer: Any, rows: Sequence[Any], drawn: Drawn, options: Options, step: int) -> Scene:
    """The trainer without accumulation, its contract observed on the window with the user's split."""
    alone = copy_for_split(trainer, len(rows), 1, step)
    if compute_loss_of(alone) is not None:
        alone.compute_loss = without_outputs(alone.compute_loss)
    own = micro_batches(rows, trainer.args.per_device_train_batch_size, drawn.collate)
    contract = session_of(alone, options).settled(own)
    parameters = [each for each in trainer.model.parameters() if each.requires_grad]
    # Tensor-parallel ranks have the same samples.
    ranks = gathered(trainer.args.world_size, list(rows))[:: trainer.args.world_size // data_ranks(trainer)]
    return Scene(alone, parameters, contract, drawn.collate, rows, [each for rank in ranks for each in rank])


def _is_uniform(scene: Scene) -> bool:
    """Whether all samples have equally many items, so that weights by items and by samples are the same."""
    items = scene.contract.items
    if items is None or not items.keys or not scene.contract.is_weighed:
        return False
    counts = [scene.count([row]) or 0.0 for row in scene.every]
    return len(counts) > 1 and max(counts) > 1 and len(set(counts)) == 1
