"""``hf-accum-fix verify``: exit codes as documented, files that cannot be written, signals, launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from tests.cli.processes import ROOT, environment, start, unread
from tests.torchrun import torchrun

VERIFY = [sys.executable, "-m", "hf_accum_fix", "verify"]

#: A trainer of eight samples, 2 x 4.
MADE = """
import tempfile
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        logits = self.last(x)[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}

def made():
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, use_cpu=True,
        report_to="none", remove_unused_columns=False, save_strategy="no",
    )
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    return Trainer(model=Model(), args=arguments, train_dataset=samples)
"""
#: 4x too large as stock trains it: the head takes any keyword and drops the number.
SCRIPT = MADE.replace("labels=None)", "labels=None, **kwargs)") + "made().train()\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.skipif(os.name != "posix", reason="a pipe that nobody reads ends a process otherwise there")
@pytest.mark.parametrize(("splits", "code"), [("2x4", 1), ("1x2", 2)])
def test_a_pipe_that_nobody_reads_changes_no_exit_code(splits: str, code: int, script: Path) -> None:
    assert unread("verify", "--splits", splits, script) == code


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP on this system")
@pytest.mark.parametrize("name", [pytest.param("SIGHUP", marks=pytest.mark.thorough), "SIGTERM"])
def test_a_signal_ends_the_script_as_well(name: str, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import time\nfor tick in range(600):\n    open({str(ticks)!r}, 'w').write(str(tick))\n    time.sleep(0.1)\n"
    )
    env = {**environment(), "TMPDIR": str(tmp_path)}
    running = subprocess.Popen([*VERIFY, str(slow)], env=env, cwd=ROOT, stderr=subprocess.DEVNULL)
    for _ in range(300):
        if ticks.exists():
            break
        time.sleep(0.1)
    running.send_signal(getattr(signal, name))
    running.wait(30)
    last = ticks.read_text()
    time.sleep(0.5)
    assert ticks.read_text() == last and not list(tmp_path.glob("hf-accum-fix-*"))


def test_under_torchrun_the_report_stands_once(script: Path) -> None:
    done = torchrun("hf_accum_fix", "verify", "--splits", "2x4", script)
    assert done.returncode == 1 and done.stdout.startswith("8x too large at your 2 x 4 (G x W times)"), done
    assert (done.stdout + done.stderr).count("global batch: ") == 1


#: Trains at once, and goes on in every way that there is; each leaves a file.
STUBBORN = f"""{MADE}
import atexit, os, sys, tempfile, threading
from pathlib import Path

HERE = Path(__file__).parent

def left(name):
    (HERE / f"{{name}}.left").touch()

def train(rank=0):
    atexit.register(left, "atexit")
    try:
        try:
            made().train()
            left("returned")
        except:
            left("caught")
            made().train()
            left("trained")
    finally:
        left("finally")

if __name__ == "__main__":
    print("begins", tempfile.gettempdir(), flush=True)
    if "spawn" in sys.argv:
        import multiprocessing
        child = multiprocessing.get_context("spawn").Process(target=train)
        child.start()
        child.join()
        left("joined")
    elif "thread" in sys.argv:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        left("joined")
    else:
        train()
"""


@pytest.mark.parametrize("how", ["plain", pytest.param("module", marks=pytest.mark.thorough), "spawn", "thread"])
def test_no_line_after_train_is_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    script = ["-m", "stubborn"] if how == "module" else [str(tmp_path / "stubborn.py")]
    target = tmp_path / "r.json"
    options = ["--splits", "2x4", "--json", target]
    done = start([*VERIFY, *options, *script, how], environment(ROOT), cwd=tmp_path)
    assert done.returncode == 0 and "exact at your 2 x 4" in done.stdout, done.stdout + done.stderr
    assert json.loads(target.read_text())["verdict"]["kind"] == "exact"
    assert not [path.name for path in tmp_path.glob("*.left")]
    temporary = next(line for line in done.stdout.splitlines() if line.startswith("begins")).split()[1]
    assert not Path(temporary).exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; os._exit(0)", "did not call trainer.train(): it ended;"),
        ("raise SystemExit(4)", "did not call trainer.train(): it ended with exit code 4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended, by signal 9;"),
    ],
    ids=["os._exit", "exit", "killed"],
)
def test_a_script_that_ends_has_no_verdict(
    script: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ends.py").write_text(script)
    assert main(["verify", str(tmp_path / "ends.py")]) == 3
    assert words in capsys.readouterr().err


def test_wrong_usage_is_reported_before_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "runs.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["verify", "--json", str(tmp_path), str(script)]) == 2
    assert main(["verify", "--save", str(tmp_path), str(script)]) == 2
    assert main(["verify", "-m", "no_such_module_at_all"]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is a folder; expected a writable file; name another path" in said
    assert f"got {tmp_path}, which is a folder; expected a Python script" in said
    assert not (tmp_path / "ran").exists()
