"""DeepSpeed keeps sums of its own: what it adds in is read, and refused where it is not what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin

import hf_accum_fix
from hf_accum_fix import accumulation_windows
from tests.backends.rows import zero
from tests.backends.trajectory import fresh_state, unset_hf_deepspeed_config, without_compiling
from tests.loop.steps import epoch
from tests.precision.gradients import Gradient, batch, error, llama, reference, samples
from tests.precision.test_gradients import NOISE
from tests.ranks import on_ranks

pytestmark = [pytest.mark.deepspeed, pytest.mark.thorough]
#: What is written into DeepSpeed's configuration.
TOLD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "adds": {"data_types": {"grad_accum_dtype": "fp32"}},
    "adds and reduces": {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
}
#: That, and what is asked of us.
CASES = (
    *(("nothing", "parameter"), ("nothing", "float32"), ("adds", "parameter"), ("adds", "float32")),
    ("adds and reduces", "float32"),
)


def step(rows: Sequence[dict[str, Any]], stage: int, told: str, steps: int, asked: str) -> Gradient:
    """What one step of SGD, rate 1, takes off the float32 weights that DeepSpeed keeps."""
    from deepspeed.utils import safe_get_full_fp32_param

    unset_hf_deepspeed_config()
    fresh_state()
    without_compiling()
    sizes = {"train_micro_batch_size_per_gpu": len(rows) // 2 // steps, "gradient_accumulation_steps": steps}
    config = {**zero(stage)["deepspeed"], **sizes, "gradient_clipping": 1e30, "bf16": {"enabled": True}, **TOLD[told]}
    live = Accelerator(
        gradient_accumulation_steps=steps, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    mine = rows[dist.get_rank() :: 2]
    size = len(mine) // steps
    loader = [batch(mine[start : start + size]) for start in range(0, len(mine), size)]
    model: Any = llama().bfloat16()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = live.prepare(model, optimizer)

    def weights() -> Gradient:
        named = [(name, safe_get_full_fp32_param(each)) for name, each in model.module.named_parameters()]
        plain = dict(model.module.named_parameters())
        return {name: (plain[name] if each is None else each).detach().double().clone() for name, each in named}

    before = weights()
    list(epoch(accumulation_windows(loader, live, steps=steps, accumulate_in=asked), model, optimizer, live))
    after = weights()
    return {name: before[name] - after[name] for name in before}


def rows_of() -> dict[tuple[int, str, str], dict[Any, Any]]:
    """On each rank: errors of the step by stage, and what it is reduced in."""
    data, rows = samples(128), {}
    wanted = reference(llama().bfloat16(), data)
    for stage, (told, asked) in product(range(4), CASES):
        row: dict[Any, Any] = {}
        try:
            for steps in (1, 32) if asked == "parameter" else (32,):
                row[steps] = error(step(data, stage, told, steps, asked), wanted)
            row["reduced_in"] = hf_accum_fix.report().to_dict()["runs"][-1]["reduced_in"]
        except Exception as raised:
            row["raised"] = f"{type(raised).__name__}: {raised}"
        rows[stage, told, asked] = row
    return rows


@pytest.fixture(scope="module")
def rows() -> Any:
    return on_ranks(rows_of)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_is_deepspeeds_own(stage: int, rows: Any) -> None:
    rounded = rows[stage, "nothing", "parameter"]
    for told, asked in (("adds", "parameter"), ("adds", "float32"), ("adds and reduces", "float32")):
        assert 0 < rows[stage, told, asked][32] <= NOISE * rounded[1] < rounded[32]
        reduced = "float32" if "reduces" in told else "bfloat16"
        assert rows[stage, told, asked]["reduced_in"] == [reduced]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_it_adds_in_16_bits_is_refused(stage: int, rows: Any) -> None:
    assert 'expected float32; add "data_types"' in rows[stage, "nothing", "float32"]["raised"]
