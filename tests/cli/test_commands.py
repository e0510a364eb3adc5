"""The table of commands: what it starts, how quickly, and with which exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from hf_accum_fix import cli
from hf_accum_fix.cli import main
from hf_accum_fix.errors import OptionsError, SeamError
from hf_accum_fix.upstream.defects import DEFECTS, Defect
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS, EngineDefect
from tests.cli.processes import environment, start, unread, with_bytecode_in

#: Seconds of processor time, of a machine that may be busy; on a quiet one they start in less than 0.1.
QUICK = 0.3
HEAVY = {"torch", "transformers", "accelerate", "wrapt"}


@pytest.mark.parametrize("words", [["doctor"], ["run", "--help"]], ids=" ".join)
def test_it_starts_light(words: list[str], tmp_path: Path) -> None:
    script = f"""
import sys
from time import process_time
from hf_accum_fix.cli import main
try:
    main({words!r})
except SystemExit:
    pass
print(process_time(), *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    # doctor imports the Trainer in another process, all of which would be compiled anew.
    env = environment(**(with_bytecode_in(tmp_path) if words != ["doctor"] else {"PYTHONDONTWRITEBYTECODE": ""}))
    done = [start([sys.executable, "-c", script], env) for _ in range(2 if words == ["doctor"] else 3)]
    assert all(each.stdout for each in done), done[0].stderr
    assert {word for each in done for word in each.stderr.split()[1:]} == set()
    assert min(float(each.stderr.split()[0]) for each in done) < QUICK


@pytest.mark.parametrize("words", [[], ["cure"], ["doctor", "--json", "--verbose"], ["explain", "a", "b"]])
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert "usage: hf-accum-fix" in capsys.readouterr().err


def test_no_error_reads_as_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = "hf-accum-fix explain: found, needed"
    errors = ((OptionsError("found, needed"), 2, ours), (SeamError("found, needed"), 3, ours))
    for error, code, last_line in (*errors, (KeyError("a slip"), 3, "KeyError: 'a slip'")):
        monkeypatch.setattr("hf_accum_fix.cli.explain.execute", mock.Mock(side_effect=error))
        assert cli.main(["explain"]) == code
        assert capsys.readouterr().err.splitlines()[-1] == last_line


@pytest.mark.parametrize("defect", [*DEFECTS, *ENGINE_DEFECTS], ids=lambda defect: defect.name)
def test_a_row_is_printed_whole(defect: Defect | EngineDefect, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", defect.name]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 or "https://" in line for line in out.splitlines())
    printed = " ".join(out.split())
    for fact in (defect.name, defect.summary, defect.range, defect.who, defect.wrong):
        assert fact in printed
    assert all(link in printed for link in defect.source)


@pytest.mark.skipif(os.name != "posix", reason="a pipe that nobody reads ends a process otherwise there")
@pytest.mark.parametrize(
    ("words", "code"),
    [("explain", 0), ("verify /no/such/script.py", 2), ("run no-such-command", 127), ("watch /no/such/log", 3)],
)
def test_a_pipe_that_nobody_reads_changes_no_exit_code(words: str, code: int) -> None:
    assert unread(*words.split()) == code


def test_one_rank_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for rank, local, heard in (("1", None, True), ("0", "0", True), ("1", "1", False)):
        monkeypatch.setenv("RANK", rank)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert main(["explain"]) == 0 and main(["verify", "/no/such/script.py"]) == 2
        said = capsys.readouterr()
        assert bool(said.out) == heard and bool(said.err) == heard, (rank, local)
