"""Run by torchrun on two gloo ranks: something happens in the second micro-batch of the third window.

torchrun --nproc_per_node 2 -m tests.faults.interrupted OUTPUT nothing|kill|terminate|resume
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.scenarios import ACCUMULATE, InForward, trainer
from tests.numerics.parity import trainable
from tests.torchrun import leave

AT = 2 * ACCUMULATE + 1


def killed(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return loss


def launcher_terminated(loss: Tensor) -> Tensor:
    """What a cluster does whose time is up."""
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
    return loss


HAPPENS = {"kill": killed, "terminate": launcher_terminated}


def main(output: Path, what: str) -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = InForward(HAPPENS.get(what, torch.clone), AT)
    made = trainer(output, model=model, save_strategy="steps", save_steps=1)
    made.train(resume_from_checkpoint=True if what == "resume" else None)
    if dist.get_rank() == 0:
        end = {name: parameter.tolist() for name, parameter in trainable(made.model).items()}
        steps = [entry for entry in made.state.log_history if "loss" in entry]
        logged = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in steps]
        (output / "end.json").write_text(json.dumps({"parameters": end, "logged": logged}))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
