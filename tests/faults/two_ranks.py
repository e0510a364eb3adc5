"""Run by torchrun on two gloo ranks: what each rank says when one of them fails; JSON of every rank.

torchrun --nproc_per_node 2 -m tests.faults.two_ranks OUTPUT
"""

from __future__ import annotations

import faulthandler
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.scenarios import RAISING, InForward, nan, trainer
from tests.numerics.parity import pass_over_imports
from tests.torchrun import leave

#: Seconds after which a rank that waits says where, and ends.
PATIENCE = 60


def main(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said: dict[str, Any] = {}
    folder = Path(tempfile.gettempdir()) / "faults"
    for name, make in RAISING.items():
        pass_over_imports()
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        began = time.monotonic()
        try:
            make(folder).train()
            said[name] = {"raised": "", "message": ""}
        except Exception as error:
            said[name] = {"raised": type(error).__name__, "message": str(error)}
        said[name]["seconds"] = time.monotonic() - began
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    made = trainer(folder, model=InForward(nan))
    made.train()
    finite = all(bool(parameter.isfinite().all()) for parameter in made.model.parameters())
    said["nan"] = {"steps": made.state.global_step, "finite": finite}
    (output / f"rank{dist.get_rank()}.json").write_text(json.dumps(said))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
