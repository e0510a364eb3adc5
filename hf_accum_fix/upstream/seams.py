"""DATA: every name of transformers and accelerate that we use; releases and method bodies that our tests have run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from packaging.version import Version

TRAINER_MODULE: Final = "transformers.trainer"
TRAINER_CLASS: Final = "Trainer"

FIRST_RELEASE: Final = "4.41.0"
"""The oldest release supported."""

_COUNTS: Final = "4.46.0"
"""The first release that counts the items of a window: get_batch_samples and num_items_in_batch exist."""


@dataclass(frozen=True)
class Seam:
    """One method of the Trainer that we wrap."""

    name: str  # the method's name
    parameters: tuple[str, ...]  # the parameters it must start with, after self
    since: str = FIRST_RELEASE  # the first release with these parameters
    until: str | None = None  # the first later release with others; None: there is none

    def is_in(self, release: Version | None) -> bool:
        """Whether a release has it, by its base version; None: the newest."""
        return is_between(release, self.since, self.until)


def is_between(release: Version | None, since: str, until: str | None) -> bool:
    """Whether a release is from ``since`` to before ``until``, by its base version; None: the newest."""
    if release is None:
        return until is None
    base = Version(release.base_version)
    return Version(since) <= base and (until is None or base < Version(until))


SEAMS: Final = (
    Seam("train", ("resume_from_checkpoint",)),
    Seam("get_batch_samples", ("epoch_iterator", "num_batches"), since=_COUNTS),
    Seam("training_step", ("model", "inputs"), until=_COUNTS),
    Seam("training_step", ("model", "inputs", "num_items_in_batch"), since=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs"), until=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), since=_COUNTS),
)

GUARD: Final = ("transformers.trainer_callback", "CallbackHandler", "on_train_begin")
"""Called by every release's loop before its first step, whichever class Trainer is used: we check the methods there. It
fixes no defect."""

EVALUATION: Final = ("evaluation_loop", "prediction_loop")
"""Wrapped for the option eval_loss only; they fix no defect. Releases before 5.0 call the second with
``use_legacy_prediction_loop``."""


def seams_of(release: Version | None) -> tuple[Seam, ...]:
    """The seams of a release, by its base version; None: the seams of the newest."""
    return tuple(seam for seam in SEAMS if seam.is_in(release))


Seen: TypeAlias = Literal["class", "object", "loop", "DeepSpeed"]
"""Where to look for an attribute: on a class or module, on an object, in a running loop, under DeepSpeed."""


@dataclass(frozen=True)
class Attribute:
    """One upstream name that we call, read, override or replace without wrapping it."""

    target: str  # "module:class" that has it, or the module
    name: str  # of the attribute; in `_ROWS` several names
    used_for: str  # its use, verb first
    off: str = ""  # the feature that is off without it, with one warning; empty: apply() or train() refuses
    seen: Seen = "class"  # where to look for it
    since: str = ""  # the first release (of transformers or accelerate) that has it; empty: all supported ones
    until: str | None = None  # the first release without it; None: there is none

    def is_in(self, release: Version) -> bool:
        """Whether a release of its package must have it."""
        return Version(self.since or "0") <= release and is_between(release, "0", self.until)

    def __str__(self) -> str:
        module, _, owner = self.target.partition(":")
        return f"{owner or module}.{self.name}"


TRAINER: Final = f"{TRAINER_MODULE}:{TRAINER_CLASS}"
ARGUMENTS: Final = "transformers.training_args:TrainingArguments"
STATE: Final = "transformers.trainer_callback:TrainerState"
ACCELERATOR: Final = "accelerate.accelerator:Accelerator"
GRADIENT_STATE: Final = "accelerate.state:GradientState"
PROCESSES: Final = "accelerate.state:PartialState"
ENGINE_STATE: Final = "accelerate.state:AcceleratorState"
BATCH_SHARD: Final = "accelerate.data_loader:BatchSamplerShard"
STREAM_SHARD: Final = "accelerate.data_loader:IterableDatasetShard"
DISPATCHER: Final = "accelerate.data_loader:DataLoaderDispatcher"

_STEPS: Final = "current_gradient_accumulation_steps"
VERIFY: Final = "verify()"
CUTS: Final = "_prepare_context_parallel_inputs"
"""Cuts the samples of a micro-batch within its step, under context parallelism."""

# since and until come from the sources of TESTED_RELEASES, and of accelerate 0.26.0 to 1.15.0.
_ROWS: Final = (
    Attribute(TRAINER, "args state accelerator", "read the training's setup", seen="object"),
    Attribute(TRAINER, "model model_wrapped optimizer", "run, weigh and check a micro-batch", seen="object"),
    Attribute(TRAINER, "train_dataset eval_dataset data_collator", "leave the data as it was", seen="object"),
    Attribute(TRAINER, "label_smoother", "compute the loss", seen="object"),
    Attribute(TRAINER, "compute_loss_func model_accepts_loss_kwargs", "compute the loss", seen="object", since=_COUNTS),
    Attribute(TRAINER, "loss_is_scaled_for_ga", "see whether a trainer scales its loss", since="5.19.0"),
    Attribute(TRAINER, "is_in_train", "recognise a training step", seen="object"),
    Attribute(TRAINER, "_prepare_inputs compute_loss_context_manager", "run a forward as training does"),
    Attribute(TRAINER, "use_apex", "refuse apex", seen="object", until="5.0.0"),
    Attribute(TRAINER, "get_tp_size", "count data-parallel ranks", since="4.53.0"),
    Attribute(TRAINER, "get_cp_size get_sp_size", "see which ranks share samples", since="5.0.0"),
    Attribute(TRAINER, CUTS, "cut samples as they are counted", off="context parallelism", since="4.56.0"),
    Attribute(TRAINER, _STEPS, "see what a loss divides by", off="observing what divides", seen="loop", since="4.55.0"),
    Attribute(TRAINER, "_train_batch_size", "read a loss", off="recognising the batch size", seen="object"),
    Attribute(TRAINER, "get_train_dataloader", "give the loop whole windows"),
    Attribute(TRAINER, "log", "log nothing while the loss is observed, and exact windows with the loss"),
    Attribute(TRAINER, "evaluation_loop prediction_step", "compute eval_loss"),
    Attribute(TRAINER, "prediction_loop", "compute eval_loss", until="5.0.0"),
    Attribute(TRAINER, "callback_handler control", "train a copy", off=VERIFY, seen="object"),
    Attribute(TRAINER, "create_accelerator_and_postprocess", "train a copy", off=VERIFY),
    Attribute(ARGUMENTS, "world_size process_index device gradient_accumulation_steps", "count a window"),
    Attribute(ARGUMENTS, "n_gpu", "refuse DataParallel"),
    Attribute(ARGUMENTS, "seed data_seed", "draw groups of alike lengths by the epoch"),
    Attribute(ARGUMENTS, "average_tokens_across_devices", "keep upstream from a second collective", since="4.46.2"),
    Attribute(ARGUMENTS, "past_index", "pass the past on", until="5.0.0"),
    Attribute(ARGUMENTS, "disable_tqdm", "show a bar while lengths are read"),
    Attribute(ARGUMENTS, "length_column_name", "read lengths", off="reading length_column_name"),
    Attribute(ARGUMENTS, "train_sampling_strategy", "balance windows", off="seeing batch_rebalance", since="5.2.0"),
    Attribute(ARGUMENTS, "per_device_train_batch_size per_device_eval_batch_size", "split samples", off=VERIFY),
    Attribute(ARGUMENTS, "accelerator_config", "train a copy", off=VERIFY),
    Attribute(ARGUMENTS, "max_steps num_train_epochs", "train a copy for some steps", off=VERIFY),
    Attribute(STATE, "global_step", "name a window"),
    Attribute(STATE, "stateful_callbacks", "keep in checkpoints how much fits"),
    Attribute("transformers.trainer_callback", "TrainerCallback TrainerControl DefaultFlowCallback", "train a copy"),
    Attribute("transformers.trainer_pt_utils", "LabelSmoother", "compute the loss"),
    Attribute("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "compute the loss"),
    Attribute("transformers.trainer", "skip_first_batches", "resume in the middle of an epoch"),
    Attribute(ACCELERATOR, "backward gradient_accumulation_steps", "set the loss that makes its division right"),
    Attribute(ACCELERATOR, "sync_gradients no_sync", "reduce gradients once a window"),
    Attribute(ACCELERATOR, "clip_grad_norm_", "end a window before its gradient is clipped"),
    Attribute(ACCELERATOR, "reduce", "count over ranks"),
    Attribute(ACCELERATOR, "device distributed_type mixed_precision unwrap_model", "read the engine"),
    Attribute(ACCELERATOR, "state", "read the engine", seen="object"),
    Attribute(ACCELERATOR, "unscale_gradients", "read a copy's gradient", off=VERIFY),
    Attribute(ACCELERATOR, "parallelism_config torch_device_mesh", "see which ranks share samples", since="1.10.0"),
    Attribute(ACCELERATOR, "maybe_context_parallel", "attend over all ranks of a sample", since="1.10.0"),
    Attribute(ACCELERATOR, "autocast", "run a forward as training does"),
    Attribute(ACCELERATOR, "gradient_state", "find filled-up batches", seen="object"),
    Attribute(ACCELERATOR, "scaler", "read a loss scale", seen="object"),
    Attribute(ACCELERATOR, "dataloader_config", "switch dispatching off", seen="object", since="0.28.0"),
    Attribute(ACCELERATOR, "ddp_handler", "refuse a static graph before torch 2.5", seen="object"),
    Attribute(ACCELERATOR, "has_lomo_optimizer", "refuse LOMO", seen="object", since="0.30.0"),
    Attribute(ACCELERATOR, "deepspeed_engine_wrapped", "read what DeepSpeed divides by", seen="DeepSpeed"),
    Attribute("accelerate.state", "AcceleratorState GradientState PartialState", "leave the process as it was"),
    Attribute(GRADIENT_STATE, "end_of_dataloader remainder", "find filled-up batches"),
    Attribute(ENGINE_STATE, "deepspeed_plugin", "see which ZeRO stage runs", seen="DeepSpeed"),
    Attribute(PROCESSES, "_shared_state is_main_process", "count a head's own targets"),
    Attribute(PROCESSES, "num_processes process_index distributed_type", "count a head's own targets", seen="object"),
    Attribute("accelerate.utils", "DistributedType gather_object", "read the engine"),
    Attribute("accelerate.utils", "release_memory", "run a micro-batch in pieces"),
    Attribute("accelerate.data_loader", "BatchSamplerShard IterableDatasetShard", "find repeated samples"),
    Attribute("accelerate.data_loader", "DataLoaderDispatcher DataLoaderStateMixin", "find repeated samples"),
    Attribute("accelerate.data_loader", "DataLoaderShard", "train a copy"),
    Attribute(BATCH_SHARD, "batch_sampler batch_size drop_last even_batches", "find repeated samples", seen="object"),
    Attribute(BATCH_SHARD, "num_processes process_index split_batches", "find repeated samples", seen="object"),
    Attribute(STREAM_SHARD, "dataset batch_size drop_last", "find repeated samples", seen="object"),
    Attribute(STREAM_SHARD, "num_processes process_index split_batches", "find repeated samples", seen="object"),
    Attribute(DISPATCHER, "_drop_last state remainder", "find repeated samples", seen="object"),
)
ATTRIBUTES: Final = tuple(replace(row, name=name) for row in _ROWS for name in row.name.split())
"""The names that we use without wrapping them. apply() checks the classes; train() the objects, and the loop."""


_DATA: Final = json.loads(Path(__file__).with_name("releases.json").read_text(encoding="utf-8"))

TESTED_RELEASES: Final[tuple[str, ...]] = tuple(_DATA["tested"])
"""The first and last patch of every minor, yanked ones too, and releases between which something changed."""

TESTED_RANGES: Final = MappingProxyType(
    {
        "accelerate": ("0.26.0", "1.15.0"),
        "torch": ("2.2.2", "2.15.0"),
        "transformers": (FIRST_RELEASE, TESTED_RELEASES[-1]),
    }
)
"""The oldest and the newest release of each package that our tests have run."""

SHOWS_SHAPES: Final = "2.5"
"""The first torch whose graph has shapes. On older ones, reading a loss runs part of its backward."""

TESTED_BODIES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {name: frozenset(bodies) for name, bodies in _DATA["bodies"].items()}
)
"""environment.fingerprint() of each tested release's trainer.py, equal bodies once; by recipes/add_release.py."""
