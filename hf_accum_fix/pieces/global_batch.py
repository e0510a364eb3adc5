"""The global batch of a checkpoint, which a training goes on with on any ranks and in any cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.window.host import Host

#: Its entry among the states of callbacks, which are in a checkpoint.
KEPT: Final = "hf_accum_fix.cut"


def check_global_batch(host: Host, trainer: Any) -> None:
    """Compare a training's global batch with its checkpoint's, and keep its cut for the next one.

    Args:
        host: the training.
        trainer: of it; the states of callbacks of a resumed one are those of its checkpoint.

    Raises:
        UnsupportedSetupError: if it is another one, and the option is "keep".
    """
    args, states = trainer.args, trainer.state.stateful_callbacks
    # auto_find_batch_size makes it smaller.
    rows = getattr(trainer, "_train_batch_size", None) or args.per_device_train_batch_size
    splits = bool(getattr(args.accelerator_config, "split_batches", False))
    cut = {
        "per_device_train_batch_size": int(rows),
        "gradient_accumulation_steps": host.steps,
        "ranks": 1 if splits else host.world.data_ranks,
    }
    before = states.get(KEPT, {}).get("attributes", cut)
    if _samples(before) != _samples(cut):
        words = (
            f"got a global batch of {_samples(cut)} samples ({_words(cut)}), and a checkpoint's of {_samples(before)}"
        )
        words = f"{words} ({_words(before)}); expected the same; set a product of {_samples(before)}"
        if host.options.global_batch == "keep":
            raise UnsupportedSetupError(f"{words}, or omit global_batch='keep'")
        host.warn_once("global batch", f"{words}, or tune the learning rate again")
    states[KEPT] = {"args": {}, "attributes": cut}


def _samples(cut: Mapping[str, int]) -> int:
    return math.prod(cut.values())


def _words(cut: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {number}" for name, number in cut.items())
