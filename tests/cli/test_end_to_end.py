"""Unedited scripts under ``run``, by the launchers people use: exact with it, wrong without; one and two gloo ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cli.plain_training import HEAD
from tests.cli.processes import ROOT, RUN, environment, start
from tests.numerics.parity import Step, cut, reference_step
from tests.upstream.test_newer_release import made_release

SCRIPT = Path(__file__).with_name("plain_training.py")
LAUNCHER = Path(__file__).with_name("plain_launcher.py")
# accelerate 1.15.0 starts one process for --cpu, whatever --num_processes says, and both for --multi_gpu, GPUs or not;
# the script trains on the CPU.
ONE_RANK = ("accelerate", "launch", "--cpu", "--num_processes", "2", SCRIPT)
ITS_OWN_TORCHRUN = (sys.executable, LAUNCHER, SCRIPT)

ON = "hf-accum-fix: "


def train(command: tuple[Any, ...], folder: Path, ranks: int) -> tuple[dict[str, Any], Step, float, str]:
    """Train one step of eight samples, two a micro-batch: what was found, the full-batch step, the error, stderr."""
    output = folder / "step.pt"
    words = [*command, output, "2", str(4 // ranks)]
    done = start(words, environment(ROOT, HF_HOME=str(folder)), cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(output)
    assert found["ranks"] == ranks
    reference = reference_step(HEAD, cut(HEAD.samples, 2))
    return found, reference, Step(found["change"], found["loss"], found["norm"]).error(reference), done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        pytest.param(ONE_RANK, 1, id="one-rank"),
        pytest.param(ITS_OWN_TORCHRUN, 2, id="its-own-torchrun"),
    ],
)
def test_under_run_it_is_exact_and_without_it_is_not(command: tuple[Any, ...], ranks: int, tmp_path: Path) -> None:
    if ranks == 1:
        _, _, error, printed = train(command, tmp_path, ranks)
        assert error > 1 and ON not in printed
    found, reference, error, printed = train((*RUN, *command), tmp_path, ranks)
    assert error <= HEAD.tolerance
    assert found["loss"] == pytest.approx(reference.loss, rel=1e-4)  # the log is rounded by some releases
    assert found["norm"] == pytest.approx(reference.norm, rel=1e-6)
    assert printed.count(ON) == 1 and " is on: transformers " in printed


README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.slow
@pytest.mark.skipif(f"transformers {transformers.__version__}," not in README, reason="README shows another release")
@pytest.mark.parametrize("command", ["python", "hf-accum-fix run python", "hf-accum-fix verify"])
def test_the_script_of_the_readme_prints_what_it_shows(command: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"`train.py`.*?```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(script.splitlines()) <= 15
    (tmp_path / "train.py").write_text(script)
    (shown,) = re.findall(rf"^\$ {command} train.py\n(.*?)(?=^\$|^```)", README, flags=re.DOTALL | re.MULTILINE)
    done = start([*command.split(), "train.py"], environment(ROOT, HF_HOME=str(tmp_path)), cwd=tmp_path)
    assert done.returncode == int("verify" in command), done.stderr[-4000:]
    for line in shown.splitlines():
        start_of_line = line.partition("...")[0]
        pattern = re.sub(r"\d+\\\.\d+", r"(\\d+\\.\\d+)", re.escape(start_of_line))
        found = re.search(pattern, f"{done.stderr}\n{done.stdout}")
        assert found is not None, line
        # Another processor rounds otherwise.
        assert [*map(float, found.groups())] == pytest.approx([*map(float, NUMBER.findall(start_of_line))], rel=5e-3)


def test_a_refusal_ends_the_job(tmp_path: Path) -> None:
    """`from transformers import Trainer` makes an ImportError of errors, and scripts have a way on for that."""
    made_release(tmp_path, "4.40.0")
    script = "try:\n    from transformers import Trainer\nexcept Exception:\n    print('goes on without')\n"
    done = start([*RUN, sys.executable, "-c", script], environment(tmp_path, ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    assert "hf-accum-fix: got transformers 4.40.0; expected a release from" in done.stderr
