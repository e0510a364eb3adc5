"""``hf-accum-fix verify`` on a plain script: one process, and two ranks under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from tests.cli.processes import environment, start
from tests.torchrun import torchrun

SCRIPT = str(Path(__file__).with_name("script.py"))
VERIFY = [sys.executable, "-m", "hf_accum_fix", "verify"]


@pytest.mark.slow
def test_one_process_wrong_then_fixed(tmp_path: Path) -> None:
    wrong = start([*VERIFY, "--json", str(tmp_path / "r.json"), "--splits", "2x2,1x4", SCRIPT], environment())
    assert wrong.returncode == 1 and "G times [classic-head-drops-item-count]" in wrong.stdout, wrong.stderr
    assert "trained" not in wrong.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["verdict"]["kind"] == "off" and len(report["results"]) == 4
    fixed = start([*VERIFY, "--splits", "1x4", SCRIPT, "fixed"], environment())
    assert fixed.returncode == 0 and fixed.stdout.startswith("exact at 1 x 4"), fixed.stderr


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """G x W times."""
    done = torchrun("hf_accum_fix", "verify", "--json", tmp_path / "r.json", SCRIPT)
    assert done.returncode == 1, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["world_size"] == 2 and report["samples"] == [8]
    found = {(each["mode"], each["per_device"], each["steps"]): each for each in report["results"]}
    assert found["stock", 1, 4]["verdict"]["words"].endswith("G x W times")
    assert found["stock", 1, 4]["norm_ratio"] == pytest.approx(8, rel=1e-5)
    assert {each["verdict"]["kind"] for key, each in found.items() if key[0] == "apply()"} == {"exact"}


@pytest.mark.slow
def test_a_script_that_does_not_train_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    done = start([*VERIFY, SCRIPT, "stops"], environment())
    assert done.returncode == 3 and "did not call trainer.train()" in done.stderr


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no_such_script.py"]) == 2
    assert main(["verify", "--json", "no_such_folder/r.json", SCRIPT]) == 2
    assert "no_such_folder first" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["verify", "--splits", "2by2", SCRIPT])
    assert end.value.code == 2
