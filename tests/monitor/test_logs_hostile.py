"""Logs and places that nobody meant as logs: told in one line, never a hang, a traceback or a foreign file's end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import LogsError
from hf_accum_fix.monitor.watch import look


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A read of a pipe that nobody writes to ends here, not at the time limit of the whole suite."""

    def ended(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lines(path: Path, count: int = 12, **others: object) -> Path:
    rows = [{"step": step, "loss": 1.0 / step, **others} for step in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "trainer_state.json"])
def test_a_pipe_is_no_log(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(LogsError):
            read_runs(place)


def test_a_pipe_or_a_folder_beside_logs_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").mkdir()
    lines(tmp_path / "c.jsonl")
    assert [len(run.series["loss"]) for run in read_runs(tmp_path)] == [12]


ODD_LINES = {
    "huge integer as a loss": '{"step": 1, "loss": 1' + "0" * 400 + "}",
    "integer of more digits than Python reads": '{"step": 1, "loss": 1' + "0" * 5000 + "}",
    "a loss of 1e400": '{"step": 1, "loss": 1e400}',
    "huge integer as a step": '{"step": 1' + "0" * 400 + ', "loss": 1}',
    "a step of 1e400": '{"step": 1e400, "loss": 1}',
    "a step of nan": '{"step": NaN, "loss": 1}',
    "no step": '{"step": null, "loss": 1}',
    "a step in words": '{"step": "first", "loss": 1}',
    "deep nesting": "[" * 100_000,
    "a deep nesting that ends": '{"loss": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number": "7",
    "a list": "[1, 2]",
    "a count of alarms of 1e400": '{"step": 1, "loss": 1, "hf_accum_fix/rank_loss_alarms": 1e400}',
    "no text": "\x00\x01",
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES.keys())
@pytest.mark.parametrize("many", [1, 12], ids=["once", "twelve times"])
def test_odd_lines_are_read_or_refused(
    line: str, many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text(f"{line}\n" * many)
    assert main(["watch", str(tmp_path)]) in (0, 1, 3)
    assert "Traceback" not in capsys.readouterr().err


def test_an_odd_byte_a_bad_line_and_a_mark_at_the_start_leave_the_rest_readable(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(
        b'\xef\xbb\xbf{"step": 1, "loss": 2, "name": "caf\xe9"}\n{"step": 2, "loss": 1}\n'
    )
    (tmp_path / "torn.jsonl").write_text('{"step": 1, "lo\n{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n')
    (tmp_path / "table.csv").write_bytes(
        b'\xef\xbb\xbfstep,loss,note\n1,2,"' + b"x" * 200_000 + b'"\n2,1,\n3,1,caf\xe9\n'
    )
    bytes_, torn, table = (read_runs(tmp_path / name)[0] for name in ("bytes.jsonl", "torn.jsonl", "table.csv"))
    assert bytes_.series["loss"].values == (2.0, 1.0) and bytes_.left_out == ""
    assert torn.series["loss"].steps == (2.0, 3.0) and torn.left_out == "1 of 3 lines"
    assert table.series["loss"].values[-1] == 1.0 and "1 of" in table.left_out
    assert "  left out        1 of 3 lines" in look([torn]).words
    (tmp_path / "torn.jsonl").write_text("{\n{\n" + '{"step": 3, "loss": 1}\n')
    with pytest.raises(LogsError, match="2 of 3 lines could not be read"):
        read_runs(tmp_path / "torn.jsonl")


ESCAPES = "\x1b]0;owned\x07\x1b[2Jx\r\x9b31m\u202e"


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ESCAPES
    folder.mkdir()
    lines(folder / "a.jsonl", **{f"eval_{ESCAPES}_accuracy": 0.5, f"hf_accum_fix/{ESCAPES}_alarms": 3})
    assert main(["watch", str(folder)]) in (0, 1)
    assert main(["watch", str(tmp_path / f"nowhere{ESCAPES}")]) == 3
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not [letter for letter in text if not (letter.isprintable() or letter == "\n")]
        assert r"\x1b]0;owned\x07" in text
