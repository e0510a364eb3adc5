"""Run by torchrun on two gloo ranks with DeepSpeed: errors of a bfloat16 model's step by ZeRO stage; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.precision.zero_ranks OUTPUT.json MICRO_BATCHES STAGE ...
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import hf_accum_fix
from hf_accum_fix import accumulation_windows
from tests.backends.rows import zero
from tests.backends.trajectory import unset_hf_deepspeed_config, without_compiling
from tests.precision.gradients import Bigram, Gradient, batch, error, llama, reference, samples
from tests.torchrun import leave_with

#: What is written into DeepSpeed's configuration.
TOLD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "adds": {"data_types": {"grad_accum_dtype": "fp32"}},
    "adds and reduces": {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
}
#: That, and what is asked of us.
CASES = (
    ("nothing", "parameter"),
    ("nothing", "float32"),
    ("adds", "parameter"),
    ("adds", "float32"),
    ("adds and reduces", "compensated"),
)
FINE = (CASES[0], CASES[3])


def step(
    build: Callable[[], nn.Module], rows: Sequence[dict[str, Any]], stage: int, told: str, steps: int, asked: str
) -> Gradient:
    """What one step of SGD, rate 1, takes off the float32 weights that DeepSpeed keeps."""
    from deepspeed.utils import safe_get_full_fp32_param

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()
    PartialState(cpu=True, backend="gloo")
    without_compiling()
    config = {
        **zero(stage)["deepspeed"],
        "train_micro_batch_size_per_gpu": len(rows) // 2 // steps,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1e30,
        "bf16": {"enabled": True},
        **TOLD[told],
    }
    live = Accelerator(
        gradient_accumulation_steps=steps,
        mixed_precision="bf16",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    )
    mine = rows[dist.get_rank() :: 2]
    size = len(mine) // steps
    loader = [batch(mine[start : start + size]) for start in range(0, len(mine), size)]
    model: Any = build().bfloat16()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = live.prepare(model, optimizer)

    def weights() -> Gradient:
        named = [(name, safe_get_full_fp32_param(each)) for name, each in model.module.named_parameters()]
        plain = dict(model.module.named_parameters())
        return {name: (plain[name] if each is None else each).detach().double().clone() for name, each in named}

    before = weights()
    for window in accumulation_windows(loader, live, steps=steps, accumulate_in=asked):
        for each in window:
            with window.micro_batch(model):
                live.backward(window.loss(model, each))
        optimizer.step()
        optimizer.zero_grad()
    after = weights()
    return {name: before[name] - after[name] for name in before}


def main(output: Path, many: int, stages: Sequence[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Few enough operations for 1,024 micro-batches.
    build, data = (llama, samples(128)) if many < 64 else (Bigram, samples(2 * many))
    wanted = reference(build().bfloat16(), data)
    rows = []
    for stage, (told, asked) in product(stages, CASES if many < 64 else FINE):
        row: dict[str, Any] = {"stage": stage, "told": told, "asked": asked}
        try:
            for steps in (1, many) if asked == "parameter" else (many,):
                row[str(steps)] = error(step(build, data, stage, told, steps, asked), wanted)
            row["reduced_in"] = hf_accum_fix.report().to_dict()["runs"][-1]["reduced_in"]
        except Exception as raised:
            row["raised"] = f"{type(raised).__name__}: {raised}"
            row["where"] = traceback.format_exc()[-1500:]
        rows.append(row)
        print(row, flush=True)
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
