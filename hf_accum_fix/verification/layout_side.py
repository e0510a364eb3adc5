"""One layout's side of a proof: its own training up to the first optimizer step, sharded or not.

The trainer cannot be used afterwards, because engines shard a model in place: for a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import DistributedType, gather_object
from torch import nn
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.trainer_facts import data_ranks, parallel_size
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.projection import Projected, added, hashed, named, parts_of
from hf_accum_fix.verification.proof import Against, Proof, Side, hash_of, judge, limit_across
from hf_accum_fix.verification.reference import MIXED, Reference, Scene
from hf_accum_fix.verification.restore import restored, without_dropout
from hf_accum_fix.verification.sample import Drawn, draw
from hf_accum_fix.verification.sharded import AtTheStep, Reached


def proof_of(scene: Scene, reference: Reference, drawn: Drawn) -> Proof:
    """The proof of a global batch that `verify` has computed.

    Raises:
        UnsupportedSetupError: for a loss or samples that another layout cannot have.
    """
    if scene.contract.has_router_loss:
        raise UnsupportedSetupError(
            "got a model with a router loss, which depends on the split; expected none; set output_router_logits=False"
        )
    _refuse_random(drawn)
    found = scene.projected(reference.gradient)
    samples, name = sorted(map(hash_of, scene.every)), _class_of(scene.trainer)
    side = _side(scene.trainer, name, fingerprint(scene.trainer.model), samples, found)
    types = sorted({side.parameters[each][1] for each in found})
    side = replace(side, layout=f"{reference.words}, {' and '.join(types)}")
    return Proof(side, str(scene.contract), scene.count(scene.every), reference.noise.floor, reference.tolerance)


def projected(scene: Scene, reference: Reference) -> Reference:
    """The reference as an engine's gradients are compared with it: its projections, and what is noise there."""
    least = limit_across(reference.tolerance, scene.rounding)
    return replace(reference, gradient=scene.compared(reference.gradient), least=least)


def hold_against(trainer: Any, proof: Proof) -> Against:
    """Train up to the first optimizer step, as the script would, and hold its gradient against a proof.

    Call it on every rank. Dropout and clipping are off; of the callbacks only the Trainer's own run.

    Raises:
        UnsupportedSetupError: if the gradient cannot be read, or the step is not reached.
    """
    size, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    with restored(trainer):
        drawn = draw(trainer, 1, None)
    _refuse_random(drawn)
    # Ranks that cut their samples take turns with them.
    own = size * steps // parallel_size(trainer, "sp")
    hashes = [hash_of(row) for row in drawn.windows[0][:own]]
    every = [each for rank in (gather_object([hashes]) if trainer.args.world_size > 1 else [hashes]) for each in rank]
    # Ranks that share a model share their samples.
    samples = sorted(every)[:: trainer.args.world_size // data_ranks(trainer)]
    without_dropout(trainer.model)
    # FSDP2 makes another class of it.
    name, parameters = _class_of(trainer), fingerprint(trainer.model)
    # Bypass __setattr__, which may validate on assignment.
    vars(trainer.args).update(max_grad_norm=0.0, eval_on_start=False)
    at_the_step = AtTheStep(trainer, ends=True)
    trainer.callback_handler.callbacks = [DefaultFlowCallback(), at_the_step]
    try:
        trainer.train()
    except Reached:
        return judge(proof, _side(trainer, name, parameters, samples, at_the_step.reached))
    raise UnsupportedSetupError("got a training without an optimizer step; expected one; check data and max_steps")


def fingerprint(model: nn.Module) -> dict[str, tuple[list[int], str, int]]:
    """Shape, dtype and hash of the values of every parameter, by name, on every rank."""
    found: dict[str, tuple[list[int], str, int]] = {}
    for name, each in named(model):
        shape, gathered = list(getattr(each, "ds_shape", each.shape)), nullcontext()
        if hasattr(each, "ds_shape"):
            gathered = import_module("deepspeed").zero.GatheredParameters([each])
        with gathered:
            found[name] = (shape, str(each.dtype).removeprefix("torch."), hashed(name, parts_of(each)))
    hashes = added(torch.tensor([each[2] for each in found.values()], dtype=torch.int64))
    return {
        name: (shape, dtype, int(value))
        for (name, (shape, dtype, _)), value in zip(found.items(), hashes.tolist(), strict=True)
    }


def _class_of(trainer: TrainerLike) -> str:
    return type(trainer.accelerator.unwrap_model(trainer.model)).__name__


def _side(
    trainer: TrainerLike,
    model: str,
    parameters: Mapping[str, tuple[list[int], str, int]],
    samples: list[str],
    gradient: Mapping[str, Projected],
) -> Side:
    args, precision = trainer.args, trainer.accelerator.mixed_precision
    dtypes = {getattr(torch, dtype) for _, dtype, _ in parameters.values()}
    dtypes |= {MIXED[precision]} if precision in MIXED else set()
    size, steps, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    words = [engine_of(trainer), f"{ranks} rank{'' if ranks == 1 else 's'}", f"{size} x {steps}", precision or "no"]
    return Side(
        model=model,
        layout=", ".join(each for each in words if each not in ("", "no")),
        ranks=data_ranks(trainer),
        steps=steps,
        eps=max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point),
        releases={
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "torch": str(torch.__version__),
        },
        parameters=parameters,
        samples=samples,
        gradient=gradient,
    )


def engine_of(trainer: TrainerLike) -> str:
    """What stands around the model, in words."""
    state, kind = trainer.accelerator.state, trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        cut = parallel_size(trainer, "sp")
        return f"DeepSpeed ZeRO-{state.deepspeed_plugin.zero_stage}" + (f", sequence parallel {cut}" if cut > 1 else "")
    if kind == DistributedType.FSDP:
        return f"FSDP{getattr(state.fsdp_plugin, 'fsdp_version', 1)}"
    shared = trainer.args.world_size // data_ranks(trainer)
    return f"tensor parallel {shared}" if shared > 1 else "DDP" if trainer.args.world_size > 1 else ""


def _refuse_random(drawn: Drawn) -> None:
    if any("collator is random" in note for note in drawn.notes):
        raise UnsupportedSetupError(
            "got a random collator, which makes other batches of the same samples; expected one that does not; give it "
            "a fixed seed"
        )
