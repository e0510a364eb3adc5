"""Compare ``eval_loss``, for two eval batch sizes, with the mean over the items of the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.evaluation import evaluation_loop
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import EVALUATION
from hf_accum_fix.verification.copies import copy_for_split
from hf_accum_fix.verification.reference import Scene
from hf_accum_fix.verification.report import PATCHED, EvalResult
from hf_accum_fix.verification.restore import in_mode
from hf_accum_fix.verification.sample import copied


def evaluate(
    trainer: TrainerLike, scene: Scene, count: int, modes: Sequence[str], options: Options
) -> tuple[tuple[EvalResult, ...], str]:
    """The results on the first ``count`` samples; if there are none, the reason, empty if none were requested."""
    dataset = trainer.eval_dataset
    if not count or dataset is None:
        return (), ""
    if is_sharded(trainer.accelerator):
        return (), "eval_loss was not compared: the engine would shard the model"
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return (), f"eval_loss was not compared: got {type(dataset).__name__}; expected one data set with a length"
    if scene.contract.reduction not in (Reduction.NUMBER, Reduction.MEAN):
        return (), f"eval_loss was not compared: the loss {scene.contract.reduction.words}"
    first = range(min(count, len(dataset)))
    rows = dataset.select(first) if hasattr(dataset, "select") else _Fresh(dataset[place] for place in first)
    if not len(rows):
        return (), "eval_loss was not compared: the evaluation set is empty"
    own = trainer.args.per_device_eval_batch_size
    results = []
    try:
        mean = _item_mean(scene, trainer, rows)
        for mode in modes:
            for size in dict.fromkeys((own, 1 if own > 1 else 2)):
                actor = copy_for_split(trainer, trainer.args.per_device_train_batch_size, 1)
                actor.args.per_device_eval_batch_size = size
                actor.compute_metrics = None
                averages = mode == PATCHED
                if averages:
                    _average_over_items(actor, replace(options, eval_loss=True))
                with nullcontext() if averages else in_mode(mode, trainer, options):
                    metrics = actor.evaluate(rows)
                named = "eval_loss=True" if averages else mode
                results.append(EvalResult(named, size, float(metrics["eval_loss"]), mean))
    except (AccumFixError, TypeError, ValueError, RuntimeError) as error:  # anything that the user's evaluation raises
        return (), f"eval_loss was not compared: {type(error).__name__}: {error}"
    return tuple(results), ""


class _Fresh(list[Any]):
    """Hands out copies, so that a collator may change its samples."""

    def __getitem__(self, index: Any) -> Any:
        return copied(super().__getitem__(index))


def _average_over_items(actor: Any, options: Options) -> None:
    def averaging(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: evaluation_loop(original, actor, args, kwargs, options=options)

    for name in EVALUATION:
        if hasattr(actor, name):
            setattr(actor, name, averaging(getattr(actor, name)))


def _item_mean(scene: Scene, trainer: TrainerLike, rows: Any) -> float:
    """The mean over items, sample by sample, without a Trainer's loop and without the router loss."""
    loader = copy_for_split(trainer, 1, 1).get_eval_dataloader(rows)
    items = scene.contract.items
    assert items is not None
    total = counted = 0.0
    scene.trainer.model.eval()
    with torch.no_grad():
        for place in range(len(rows)):
            inputs = loader.collate_fn([rows[place]])
            count = float(items.count(inputs))
            if count:
                loss, router = scene.losses(inputs)
                total += count * float(loss if router is None else loss - router)
                counted += count
    return total / counted if counted else float("nan")
