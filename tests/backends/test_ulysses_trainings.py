"""What is trained with samples that Ulysses cuts: adapters, with checkpointing, by a loop, by a launched script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import sequence_parallel as cut
from tests.cli.processes import ROOT, RUN, environment, start
from tests.numerics.parity import relative
from tests.ranks import on_ranks


def loops(stage: int, ranks: int, split: tuple[int, int]) -> list[cut.Cut]:
    ours = cut.loop_under_ulysses(stage, ranks, split)
    # On four ranks some of stock's end, and the others wait for them.
    return [ours] if ranks > cut.CUT else [ours, cut.loop_under_ulysses(stage, ranks, split, stock=True)]


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.thorough), (2, 4)])
def test_a_loop_of_ones_own(stage: int, ranks: int) -> None:
    ours, *stock = on_ranks(loops, stage, ranks, (2, 4), ranks=ranks)[0]
    assert ours.error <= 4e-6 and ours.loss <= 1e-6, ours
    assert all(each.error > 0.3 for each in stock), stock


def adapted(stage: int, what: str) -> list[cut.Cut]:
    """Two steps with adapters, or with gradient checkpointing, by the patch and by stock."""
    given: dict[str, Any] = {"adapt": cut.lora} if what == "LoRA" else {"arguments": {"gradient_checkpointing": True}}
    return [cut.under_ulysses(stage, 2, (2, 4), path, **given) for path in ("apply", "stock")]


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("what", ["LoRA", "gradient checkpointing"])
def test_what_trains_long_samples(stage: int, what: str) -> None:
    ours, stock = on_ranks(adapted, stage, what)[0]
    # The change of adapters is small beside what float32 keeps of them.
    assert ours.error <= 8e-6 and ours.loss <= 1e-6 and ours.report["exact"], ours
    assert stock.error > 0.3


@pytest.mark.deepspeed
@pytest.mark.timeout(300)
def test_an_unedited_script_that_accelerate_launches_under_the_command(tmp_path: Path) -> None:
    """``accelerate launch`` has flags for it, which it takes with FSDP2 alone; these are what they would set."""
    sizes = {"SIZE": "2", "BACKEND": "deepspeed", "SEQ_LENGTH_IS_VARIABLE": "true", "ATTN_IMPLEMENTATION": "sdpa"}
    given = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "DS_ACCELERATOR": "cpu"}
    given |= {f"PARALLELISM_CONFIG_SP_{name}": value for name, value in sizes.items()}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "2"]
    launch += ["--num_processes", "2", "--main_process_port", "0"]
    window = cut.of_window(cut.samples(cut.RAGGED, 48), 2, (2, 4), 0, each_loads=True)
    change, losses, _ = cut.plain_sgd(cut.llama(), [window], cut.UNCLIPPED)
    errors = []
    for before in (RUN, []):
        out = tmp_path / f"{len(errors)}"
        out.mkdir()
        script = Path(__file__).with_name("ulysses_script.py")
        done = start([*before, *launch, script, out], {**environment(ROOT), **given})
        assert done.returncode == 0, done.stderr[-3000:]
        moved, logged = torch.load(out / "moved.pt")
        found = {name: each.double() for name, each in moved.items()}
        errors.append((relative(found, change), abs(logged["loss"] / losses[0] - 1)))
    ours, stock = errors
    assert max(ours) <= 4e-6 and stock[0] > 0.9, errors
