"""``hf-accum-fix verify``: nothing of a script runs once it has come to train, whatever it does to go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from tests.cli.processes import environment, start

VERIFY = [sys.executable, "-m", "hf_accum_fix", "verify"]

#: Trains at once, and goes on in every way that there is; each leaves a file.
STUBBORN = """
import atexit, os, sys, tempfile, threading
from pathlib import Path

HERE = Path(__file__).parent

def left(name):
    (HERE / f"{name}.left").touch()

def train(rank=0):
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
            tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1,
            use_cpu=True, report_to="none", remove_unused_columns=False, save_strategy="no",
        )
        torch.manual_seed(0)
        samples = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(8)]
        return Trainer(model=Model(), args=arguments, train_dataset=samples)

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


@pytest.mark.parametrize("how", ["plain", "module", "spawn", "thread"])
def test_no_line_after_train_is_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    script = ["-m", "stubborn"] if how == "module" else [str(tmp_path / "stubborn.py")]
    target = tmp_path / "r.json"
    root = Path(__file__).parents[2]
    options = ["--splits", "2x4", "--json", target]
    done = start([*VERIFY, *options, *script, how], environment(root), cwd=tmp_path)
    assert done.returncode == 0 and "exact at your 2 x 4" in done.stdout, done.stdout + done.stderr
    assert json.loads(target.read_text())["verdict"]["kind"] == "exact"
    assert not [path.name for path in tmp_path.glob("*.left")]
    temporary = next(line for line in done.stdout.splitlines() if line.startswith("begins")).split()[1]
    assert not Path(temporary).exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; os._exit(0)", "did not call trainer.train(): it ended"),
        ("raise SystemExit(4)", "did not call trainer.train(): it ended with exit code 4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it was ended by signal 9"),
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
    assert main(["verify", "--plot", str(tmp_path), str(script)]) == 2
    assert main(["verify", "-m", "no_such_module_at_all"]) == 2
    assert "is a folder; expected a writable file; name another path" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_splits_that_do_not_hold_the_samples_are_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    done = start([*VERIFY, "--splits", "1x2", str(tmp_path / "stubborn.py")], environment(Path(__file__).parents[2]))
    assert done.returncode == 2 and " in splits; expected pairs" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.left"))


def test_a_sitecustomize_of_ones_own_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')")
    (tmp_path / "ends.py").write_text("")
    done = start([*VERIFY, str(tmp_path / "ends.py")], environment(Path(__file__).parents[2], tmp_path))
    assert done.returncode == 3 and "own sitecustomize" in done.stdout
