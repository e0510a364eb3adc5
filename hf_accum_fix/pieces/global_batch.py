"""The global batch of a checkpoint, which a training goes on with on any ranks and in any cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from hf_accum_fix.data.loader import ranks_of_a_step
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
    cut = {
        "per_device_train_batch_size": int(rows),
        "gradient_accumulation_steps": host.steps,
        "ranks": ranks_of_a_step(host, args),
    }
    before = states.get(KEPT, {}).get("attributes", cut)
    now, then = math.prod(cut.values()), math.prod(before.values())
    if now != then:
        words = f"got a global batch of {now} samples ({_words(cut)}), and a checkpoint's of {then} ({_words(before)})"
        words += f"; expected the same; set a product of {then}"
        if host.options.global_batch == "keep":
            raise UnsupportedSetupError(f"{words}, or omit global_batch='keep'")
        host.warn_once("global batch", f"{words}, or tune the learning rate again")
    states[KEPT] = {"args": {}, "attributes": cut}


def _words(cut: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {number}" for name, number in cut.items())
