"""verify() on every rank of a process group: python -m torch.distributed.run ... -m tests.verify.two_ranks FILE"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from hf_accum_fix import verify
from tests.numerics.heads import HEADS
from tests.verify.trainers import Contrastive, points, small, trainer_of

GLOO = {"ddp_backend": "gloo", "per_device": 2, "accumulate": 2}


def reports(output: Path) -> dict[str, Any]:
    """The reports of verify() on this rank."""
    found = {
        name: verify(trainer_of(name, output, **GLOO), with_apply=True).to_dict()
        for name in ("llama", "bert-classes", "bert-mlm", "mixtral", "lora")
    }
    evaluated = HEADS["llama"].samples[:7]
    trainer = trainer_of("llama", output, evaluated=evaluated, **GLOO)
    found["evaluated"] = verify(trainer, splits=[2]).to_dict()
    found["contrastive"] = verify(small(Contrastive(), output, points(8), **GLOO)).to_dict()
    trainer = trainer_of("llama", output, **GLOO)
    trainer.model_wrapped = trainer.model
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    verify(trainer)
    same = all((one == other).all() for one, other in zip(before, trainer.model.parameters(), strict=True))
    trainer.train()
    found["trained"] = {"same": bool(same), "loss": trainer.state.log_history[0]["loss"]}
    return found


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        found = reports(Path(folder))
    every: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(every), encoding="utf-8")
    dist.barrier()
    # Taking a gloo group down after a barrier can hang in torch 2.13.0.
    os._exit(0)
