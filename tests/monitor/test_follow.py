"""A run is followed while it is written; what else its logs hold is told."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.cli import watch as command
from hf_accum_fix.monitor import watch as watching
from hf_accum_fix.monitor.run_logs import Logs, read_runs
from hf_accum_fix.monitor.series import Run
from hf_accum_fix.monitor.watch import follow, look


def test_logs_are_waited_for_read_again_and_judged_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = 0

    def write(seconds: float) -> None:
        nonlocal times
        times += 1
        assert seconds == 0.5
        if times == 4:
            raise KeyboardInterrupt
        # The second is torn: its end comes with the third.
        lines = {1: '{"step": 1, "loss": 1.5}\n', 2: '{"step": 2, "lo', 3: 'ss": NaN}\n'}
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(lines[times])

    found = follow([tmp_path], seconds=0.5, sleep=write)
    assert times == 4 and len(found.findings) == 1 and "not finite" in found.findings[0]
    assert "log.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("while_it", ["reads", "waits"])
def test_an_interrupt_ends_with_the_findings_so_far(
    while_it: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the midst of a file, as between two readings: no traceback, and the exit code of the last reading."""
    log, times, read_all = tmp_path / "log.jsonl", 0, Logs.read_all

    def interrupted(*args: object) -> list[Run]:
        raise KeyboardInterrupt

    def sleep(seconds: float) -> None:
        nonlocal times
        times += 1
        monkeypatch.setattr(Logs, "read_all", interrupted)
        if while_it == "waits":
            raise KeyboardInterrupt

    def watch(loss: str) -> int:
        nonlocal times
        times = 0
        monkeypatch.setattr(Logs, "read_all", read_all)
        monkeypatch.setattr(watching, "follow", partial(follow, sleep=sleep))
        log.write_text(f'{{"step": 1, "loss": 1.5}}\n{{"step": 2, "loss": {loss}}}\n' if loss else "")
        code = main(["watch", str(tmp_path), "--follow", "0.1"])
        assert times == 1
        return code

    assert [watch(loss) for loss in ("1.4", "NaN", "")] == [0, 1, 3]
    said = capsys.readouterr()
    assert said.err.startswith("hf-accum-fix watch: ") and "no loss was found" in said.err
    assert "Traceback" not in said.out + said.err


def test_an_interrupt_of_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "execute", interrupted)
    assert main(["watch", "logs"]) == 3
    assert capsys.readouterr().err == "hf-accum-fix watch: interrupted\n"


def test_seconds_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--follow", "0"]) == 3
    assert "expected seconds above zero" in capsys.readouterr().err


def test_learning_rate_memory_and_ranks_are_told(tmp_path: Path) -> None:
    rows = [
        {
            "step": step, "loss": 1.0, "learning_rate": 1e-3 * min(step, 5) / 5, "hf_accum_fix/memory_mib": 100 + step,
            "hf_accum_fix/rank_loss_0": 1.0, "hf_accum_fix/rank_loss_1": 2.0,
        }
        for step in range(1, 21)
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = look(read_runs(tmp_path)).words
    assert "learning rate  0.0002 at first, 0.001 at step 5, 0.001 last" in told
    assert "memory mib     101 at first, 120 at step 20, 120 last; grows 1 MiB/step" in told
    assert "loss of ranks  1 on rank 0 to 2 on rank 1, means of the second half" in told
