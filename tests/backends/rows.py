"""The backends as rows of data: what a user writes or launches with, and what must then stand around the model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Backend:
    """One way to move gradients between ranks."""

    name: str  # of the row
    #: class of ``trainer.model_wrapped``, or of a base of it: a row that silently runs under something else fails
    wrapped: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of TrainingArguments
    environment: Mapping[str, str] = field(default_factory=dict)  # what ``accelerate launch`` would set
    prepare: Callable[[Any], None] | None = None  # changes the trainer once it is built
    dtype: torch.dtype = torch.float64  # of the model's parameters
    autocast: torch.dtype | None = None  # dtype of the forward's products where it is another one
    #: dtype in which the parameters are run and their gradients gathered, where it is another one
    compute: torch.dtype | None = None
    #: makes of a model the one that is trained, such as by loading it sharded
    load: Callable[[nn.Module], nn.Module] | None = None
    data_ranks: int = 2  # ranks that hold samples of their own, of two
    #: for a head that divides by the number, too, which the installed release gets right elsewhere
    stock_wrong: bool = False
    reports_norm: bool = True  # of the gradient; DeepSpeed clips at stage 0 without telling
    compiles: bool = False  # for a minute, before it can be run; by ``pytest -m cpu_adam``

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Of its tests."""
        if self.compiles:
            return pytest.mark.cpu_adam
        return pytest.mark.deepspeed if self.wrapped == DEEPSPEED else pytest.mark.slow


DDP, FSDP1, FSDP2, DEEPSPEED, TENSOR_PARALLEL = (
    "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine", "LlamaPreTrainedModel",
)  # fmt: skip
#: FSDP1 takes norms in float32, DeepSpeed knows no float64.
FLOAT32: Any = {"dtype": torch.float32}


def as_bucket_view(trainer: Any) -> None:
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True


def not_told(trainer: Any) -> None:
    """Leave DeepSpeed to count micro-batches, as accelerate does before 1.8."""
    accelerator = trainer.accelerator
    prepare = accelerator._prepare_deepspeed

    def backward(loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        engine = accelerator.deepspeed_engine_wrapped.engine
        engine.backward(loss, **kwargs)
        engine.step()

    def prepared(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        # Loaders are prepared apart.
        if accelerator.deepspeed_engine_wrapped is not None:
            accelerator.deepspeed_engine_wrapped.backward = backward
        return made

    accelerator._prepare_deepspeed = prepared


#: Without a GPU accelerate does not know where to put the parameters that it would broadcast.
FULL_SHARD_1 = {
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "false",
}  # fmt: skip


def fsdp_argument(version: int, *words: str) -> dict[str, Any]:
    """``--fsdp`` and its config."""
    config = {"version": version, **({"sync_module_states": False} if version == 1 else {})}
    return {"fsdp": " ".join(("full_shard", *words, "auto_wrap")), "fsdp_config": config}


def launched_fsdp(version: int, **more: str) -> dict[str, str]:
    """The variables of ``accelerate launch --use_fsdp --fsdp_version ...``."""
    return {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(version), "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", **(FULL_SHARD_1 if version == 1 else {}), **more,
    }  # fmt: skip


def zero(stage: int, *offloaded: str, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config as the documentation of Transformers writes it, with torch's own optimizer."""
    offload = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **offload},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": "auto"},
    }  # fmt: skip
    return {"deepspeed": {**config, **dict.fromkeys(auto, "auto"), **more}}


def deepspeed(stage: int, more: str = "", arguments: Mapping[str, Any] | None = None, **how: Any) -> Backend:
    given = {**zero(stage), **(arguments or {})}
    return Backend(f"deepspeed-zero-{stage}{more}", DEEPSPEED, given, LAUNCHED_DEEPSPEED, **FLOAT32, **how)


def cpu_adam() -> dict[str, Any]:
    """ZeRO-Offload's own AdamW as plain SGD: without momentum, and with an epsilon far above every gradient.

    Its step is then rate * g / (|g| + epsilon), so that a rate of epsilon times SGD's is SGD's to 1 / epsilon.
    """
    epsilon = 1e8
    rate = 0.1 * epsilon
    adam = {"lr": rate, "betas": [0.0, 0.999], "eps": epsilon, "weight_decay": 0.0}
    arguments = {"learning_rate": rate, "adam_beta1": 0.0, "adam_epsilon": epsilon, "optim": "adamw_torch"}
    return {**zero(2, "optimizer", optimizer={"type": "AdamW", "params": adam}), **arguments}


def by_tp_plan(model: Any) -> nn.Module:
    """The same model loaded by its own ``tp_plan``, half of every matrix on each rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if folder[0]:
        model.save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    loaded = type(model).from_pretrained(folder[0], tp_plan="auto", dtype=model.dtype)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return loaded


LAUNCHED_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
SYNC_EACH_BATCH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
ONE_BY_ONE = {"gradient_checkpointing": True}
REENTRANT = {**ONE_BY_ONE, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
IN_BF16: Any = {"arguments": {"bf16": True}, "compute": torch.bfloat16}
BY_TP_PLAN: Any = {"load": by_tp_plan, "data_ranks": 1}
APART = {"average_tokens_across_devices": False}
OFFLOADS = {"FSDP_OFFLOAD_PARAMS": "true"}

BACKENDS = {
    row.name: row
    for row in (
        Backend("ddp", DDP),
        Backend("ddp-find-unused-parameters", DDP, {"ddp_find_unused_parameters": True}),
        Backend("ddp-sync-each-batch", DDP, SYNC_EACH_BATCH),
        # Without it torch's reducer fails in the first window that is accumulated, stock or not.
        Backend("ddp-static-graph", DDP, {"ddp_static_graph": True, **SYNC_EACH_BATCH}),
        Backend("ddp-gradient-checkpointing", DDP, ONE_BY_ONE),
        Backend("ddp-gradient-checkpointing-reentrant", DDP, REENTRANT),
        Backend("ddp-gradient-as-bucket-view", DDP, prepare=as_bucket_view),
        Backend("ddp-bf16", DDP, {"bf16": True}, autocast=torch.bfloat16, **FLOAT32),
        Backend("fsdp1-launched", FSDP1, environment=launched_fsdp(1), **FLOAT32),
        Backend("fsdp2-launched", FSDP2, environment=launched_fsdp(2)),
        Backend("fsdp2-launched-offloaded", FSDP2, environment=launched_fsdp(2, **OFFLOADS)),
        Backend("fsdp1-argument", FSDP1, fsdp_argument(1), **FLOAT32),
        Backend("fsdp1-launched-offloaded", FSDP1, environment=launched_fsdp(1, **OFFLOADS), **FLOAT32),
        Backend("fsdp2-argument", FSDP2, fsdp_argument(2)),
        Backend("fsdp2-argument-offloaded", FSDP2, fsdp_argument(2, "offload")),
        Backend("fsdp1-bf16", FSDP1, environment=launched_fsdp(1), **IN_BF16, **FLOAT32),
        Backend("fsdp2-bf16", FSDP2, environment=launched_fsdp(2), **IN_BF16, **FLOAT32),
        Backend("tensor-parallel", TENSOR_PARALLEL, **BY_TP_PLAN),
        # Stock divides a count that it never summed over the ranks by their number.
        Backend("tensor-parallel-counted-apart", TENSOR_PARALLEL, APART, stock_wrong=True, **BY_TP_PLAN),
        deepspeed(0, reports_norm=False),
        deepspeed(1),
        deepspeed(2),
        deepspeed(3),
        # Stock never steps the short last window.
        deepspeed(2, "-not-told", prepare=not_told, stock_wrong=True),
        deepspeed(2, "-offloaded", zero(2, "optimizer")),
        deepspeed(3, "-offloaded", zero(3, "optimizer", "param")),
        deepspeed(2, "-cpu-adam", cpu_adam(), compiles=True),
        deepspeed(2, "-bf16", **IN_BF16),
        deepspeed(3, "-bf16", **IN_BF16),
    )
}
