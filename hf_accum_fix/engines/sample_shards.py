"""Ranks that share a sample (sequence and context parallelism): a shard is a micro-batch of fewer tokens.

Every target lies on one rank. So shards are counted and weighted as micro-batches are, over all ranks that hold one:
the sum over the world of each shard's summed loss is that of the samples. What is left is what the engine divides that
sum by: DeepSpeed (0.19.8) by the data-parallel ranks at stage 0 to 2, by all ranks at stage 3. That is measured, not
listed: another engine of the same configuration takes one step of one parameter.

Source: ``UlyssesSPDataLoaderAdapter`` (DeepSpeed) has shifted the labels as ``shift_labels`` before it cut the samples,
and removed ``labels``; ``deepspeed_sp_compute_loss`` (transformers) puts them back, for a loss that shifts nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix.engines.engine import is_deepspeed
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.options import Options

#: Labels that were shifted before the samples were cut.
SHIFTED: Final = "shift_labels"
#: Of a configuration of DeepSpeed, what decides how gradients are summed over ranks, and what an engine asks for.
_OF_THE_SUM: Final = (
    *("sequence_parallel_size", "communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "bf16", "data_types"),
)
#: Of its ``zero_optimization``, what the one parameter needs not.
_PLACES: Final = ("offload_optimizer", "offload_param", "sub_group_size", "stage3_gather_16bit_weights_on_model_save")


def check_shards(name: str, sizes: Mapping[str, int], options: Options, *, func: bool) -> None:
    """Refuse by name what is not exact where several ranks hold parts of a sample.

    Args:
        name: of the trainer.
        sizes: ranks of a sample by axis, "cp" and "sp".
        options: of the training.
        func: a ``compute_loss_func`` makes its loss, which stock ignores under sequence parallelism, and hands labels
            that were not shifted under context parallelism.

    Raises:
        UnsupportedSetupError: if it asks for one of these.
    """
    axis, size = next(((axis, size) for axis, size in sizes.items() if size > 1), ("", 1))
    if size == 1:
        return
    asked = {
        "compute_loss_func": func,
        "coupled_loss": options.coupled_loss != "micro-batch",
        "balance_windows": bool(options.balance_windows),
        "drop_duplicates": options.drop_duplicates,
    }
    if found := [what for what, is_asked in asked.items() if is_asked]:
        raise UnsupportedSetupError(
            f"{name}: got {' and '.join(found)} with samples that are cut over ranks ({axis}_size={size}); expected "
            f"whole samples for that; omit it, or remove {axis}_size from parallelism_config"
        )


def is_cut(accelerator: Any) -> bool:
    """Whether several ranks hold a part of each sample."""
    return any(axis_size(accelerator, axis) > 1 for axis in ("cp", "sp"))


def axis_size(accelerator: Any, axis: str) -> int:
    """Ranks along an axis of accelerate's parallelism_config, "cp", "sp" or "tp"; 1: it has none."""
    return getattr(getattr(accelerator, "parallelism_config", None), f"{axis}_size", 1) or 1


def cut_whole(prepare: Callable[..., Any], model: nn.Module, batch: Any) -> bool:
    """Cut a micro-batch along its sequence, in place, if upstream would within its step; whether it did.

    ``prepare``: ``Trainer._prepare_context_parallel_inputs`` (5.0.0 on): (model, inputs) -> (context, inputs).
    """
    context, _ = prepare(model, batch)
    if context is nullcontext:
        return False
    # Upstream leaves its tensors cut behind it.
    with context():
        return True


def attention_over_ranks(accelerator: Any, batch: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which attention of a cut micro-batch is over all ranks that hold a part.

    What it asks to cut is a tensor of the whole length that nobody reads.
    """
    rows, length = batch["input_ids"].shape
    unread = torch.empty(rows, length * accelerator.parallelism_config.cp_size, device=batch["input_ids"].device)
    cut = {"buffers": [unread], "buffer_seq_dims": [1], "no_restore_buffers": {unread}}
    return partial(accelerator.maybe_context_parallel, **cut)


def is_one_of(inputs: Mapping[str, Any], cut: Sequence[Any]) -> bool:
    """Whether inputs have the tokens of a micro-batch that was ``cut``; only a copy of them is waited for."""
    name = "input_ids"
    own, others = inputs.get(name), [each[name] for each in cut if name in each]
    if own is None or any(own is each for each in others):
        return own is not None
    return any(own.shape == each.shape and own.to(each.device).equal(each) for each in others)


def other_samples(accelerator: Any, batches: Sequence[Any], gather: Callable[[list[Any]], list[Any]]) -> str:
    """What to do where ranks that share a sample were given different ones, empty: they were not; a collective.

    ``batches``: not cut yet; ``gather``: concatenates the lists of all ranks.
    """
    together = tuple(dist.get_process_group_ranks(_sharing(accelerator)))
    try:
        seen = _hash_of(batches)
    except (RuntimeError, TypeError, ValueError):
        # What has no bytes is not compared; the other ranks are waiting.
        seen = 0
    found = {*gather([(together, seen)])}
    if len(found) == len({ranks for ranks, _ in found}):
        return ""
    return (
        "got different samples on ranks that share one; expected the same, or parts of several are mixed; set "
        "dispatch_batches=False (accelerator_config of the Trainer, DataLoaderConfiguration of accelerate), and give "
        "these ranks the same data and seed"
    )


def _hash_of(batches: Sequence[Any]) -> int:
    found = 0
    for each in batches:
        for value in each.values() if isinstance(each, Mapping) else ():
            if isinstance(value, Tensor):
                found = crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, found)
    return found


def _sharing(accelerator: Any) -> Any:
    """The group of ranks that share this one's samples."""
    if axis_size(accelerator, "sp") > 1:
        return import_module("deepspeed.utils.groups")._get_sequence_parallel_group()
    return accelerator.torch_device_mesh["cp"].get_group()


def complete_shard(batch: Any) -> None:
    """Give a micro-batch of shifted labels the ``labels`` that a model's loss asks for, in place.

    Slices along a sequence have gaps between their rows, which the losses of transformers cannot view as one axis.
    """
    if not isinstance(batch, MutableMapping) or not isinstance(shifted := batch.get(SHIFTED), Tensor):
        return
    batch[SHIFTED] = shifted.contiguous()
    batch.setdefault("labels", batch[SHIFTED])


def skip_shards(skip: Callable[..., Any], loader: Any, batches: int) -> Any:
    """A loader of cut samples without its first micro-batches.

    ``skip``: ``accelerate.skip_first_batches``, which ends with "no attribute 'dataset'" (1.15.0) if it gets one.
    """
    whole, more = divmod(batches, loader.sp_world_size)
    rest = copy.copy(loader)
    rest.dl, rest.micro_batches = skip(loader.dl, whole), deque()
    rest.iter = iter(rest.dl)
    for _ in range(more):
        next(rest)
    return rest


def measured_divisor(accelerator: Any, data_ranks: int) -> float:
    """What the engine divides the sum over ``data_ranks`` of their gradients by: a collective.

    ``data_ranks``: all ranks that hold a micro-batch, or a shard of one.
    """
    if not is_deepspeed(accelerator) or not is_cut(accelerator):
        return float(data_ranks)
    deepspeed: Any = import_module("deepspeed")
    engine = accelerator.deepspeed_engine_wrapped.engine
    whole = copy.deepcopy(engine.config)
    config = {key: whole[key] for key in _OF_THE_SUM if key in whole}
    config["zero_optimization"] = {k: v for k, v in whole.get("zero_optimization", {}).items() if k not in _PLACES}
    # Its default clips at 1.
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    # It draws what the training would.
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(1, 1, bias=False).to(engine.device)
    nn.init.zeros_(model.weight)
    # Whatever stands around it, this step is plain.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    probe, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=engine.mpu)
    probe.backward(probe(torch.ones(1, 1, device=engine.device, dtype=model.weight.dtype)).sum())
    probe.step()
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        moved = -float(model.weight.detach().sum())
    probe.destroy()
    return data_ranks / moved


def compare_samples(host: Training, batches: Sequence[Any]) -> None:
    """Before context parallelism cuts the first window: warn if ranks that share a sample got different ones."""
    if host.world.over_ranks is None:
        compared = partial(other_samples, host.accelerator, batches, host.gather)
        if words := host.contained("comparing the samples of ranks", compared, ""):
            host.warn_inexact("other samples", f"{host.name}: {words}")


def complete_shards(host: Training, batches: Sequence[Any]) -> None:
    """Before a window of cut samples is counted: give it its labels, and find what the engine divides by."""
    for each in batches:
        complete_shard(each)
    if host.world.over_ranks is None:
        measured = partial(measured_divisor, host.accelerator, host.world.data_ranks)
        divisor = host.contained("measuring what the engine divides by", measured, float(host.world.data_ranks))
        host.world.over_ranks = divisor / host.world.data_ranks


def check_shift(host: Training) -> None:
    """Count a window of cut samples as inexact, if what is counted was not shifted before they were cut."""
    items = None if host.contract is None else host.contract.items
    if items is not None and items.keys[:1] != (SHIFTED,):
        words = f"{host.name} counts {items}, not the labels that were shifted before samples were cut"
        host.warn_inexact("shifts again", f"{words}; the step is reported as not exact")
