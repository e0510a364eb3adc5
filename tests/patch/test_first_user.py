"""What a first user asks: the answer comes first, in one line, about their own model, in plain words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hf_accum_fix
from hf_accum_fix import observations
from hf_accum_fix.accumulation.reduction import Reduction
from hf_accum_fix.cli import main
from hf_accum_fix.cli.doctor import _COMMON, Diagnosis, judge, to_text
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.environment import parsed
from hf_accum_fix.upstream.seams import FIRST_RELEASE, TESTED_RELEASES
from tests.cli.processes import ROOT
from tests.cli.test_doctor import report_on
from tests.numerics.heads import HEADS
from tests.numerics.parity import take_step

#: Words of ours that nobody else uses so; where they stand, they have to be defined.
OURS = ("the number", "head", "window", " cut")

NEWEST = TESTED_RELEASES[-1]
newest = pytest.mark.skipif(
    hf_accum_fix.report().environment.transformers != NEWEST, reason="what the newest release does"
)


def doctor(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, list[str]]:
    """The exit code, and the lines, the answer and what to do as one."""
    code = main(["doctor", *map(str, words)])
    return code, in_one_line(capsys.readouterr().out)


def in_one_line(printed: str) -> list[str]:
    """The lines; the answer and what to do, above the first empty one, as one."""
    answer, empty, rest = printed.partition("\n\n")
    answer = " ".join(answer.replace("\nrun: ", "; run: ").split()) if empty else answer
    return [*answer.splitlines(), *([""] if empty else []), *rest.splitlines()]


# --- doctor -----------------------------------------------------------------------------------------------------------


@newest
def test_without_a_model_the_first_line_answers_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = doctor(capsys)
    assert code == 1
    assert lines[0] == f"transformers {NEWEST}: affected, many models 8x at G = 8; run: hf-accum-fix run COMMAND"
    assert any("doctor --model" in line for line in lines) and any("--verbose" in line for line in lines)
    assert len(lines) <= 12 and all(len(line) <= 80 for line in lines[1:])
    with hf_accum_fix.apply():
        code, lines = doctor(capsys)
    assert (code, lines[0]) == (0, f"transformers {NEWEST}: fine, the patch is on and fixes 21 of 25 defects")


@newest
def test_the_table_stands_behind_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    name = "classic-head-drops-item-count"
    _, short = doctor(capsys)
    _, long = doctor(capsys, "--verbose")
    assert long[0] == short[0] and len(long) > 80
    assert not any(name in line for line in short) and any(line.startswith(name) for line in long)


@pytest.mark.parametrize(
    "release", ["4.40.0", "4.41.0", "4.46.2", "5.3.0", "5.24.0", "5.25.0", "5.25.0.dev0", "from git", None]
)
def test_every_release_has_an_answer(release: str | None) -> None:
    report = report_on(release)
    diagnosis = Diagnosis(report, *judge(report))
    lines = to_text(diagnosis).splitlines()
    first, name = in_one_line(to_text(diagnosis))[0], release or "(not installed)"
    assert first.startswith(f"transformers {name}: ") and max(map(len, lines)) <= 80
    expected = {"4.41.0": "affected; run", "4.46.2": "affected, many models 8x at G = 8; run", "4.40.0": "refused"}
    expected["5.24.0"] = expected["4.46.2"]
    expected["5.3.0"] = "affected, many models 1/8x at G = 8; run"
    assert expected.get(name, "could not tell") in first
    for state in ("not applied", "pending", "applied", "switched off"):
        printed = replace(report, state=state)
        assert str(printed).splitlines()[0] == printed.answer and printed.answer.startswith(f"transformers {name}: ")


def test_the_defects_that_meet_models_at_large_are_rows() -> None:
    assert {*_COMMON} <= {defect.name for defect in DEFECTS}


@newest
def test_the_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "hf_accum_fix/cli/README.md"))
    shown = re.findall(r"^\$ hf-accum-fix (doctor.*)\n((?:.+\n|\n(?!```))*?)```", pages, flags=re.MULTILINE)
    assert len(shown) == 2
    for words, block in shown:
        main(words.split())
        printed = capsys.readouterr().out.splitlines()
        assert {line for line in block.splitlines() if line != "..."} <= {*printed}


def test_json_has_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = doctor(capsys)
    _, printed = doctor(capsys, "--json")
    assert json.loads("\n".join(printed))["answer"] == lines[0]


@newest
def test_doctor_uses_no_word_that_it_does_not_define(capsys: pytest.CaptureFixture[str]) -> None:
    # The name of a defect is a name.
    printed = re.sub(r"explain [\w-]+", "explain", "\n".join(doctor(capsys)[1]))
    assert not [word for word in OURS if word in printed.lower()], printed
    printed = "\n".join(doctor(capsys, "--verbose")[1])
    for word in ("head:", "item:", "window:", "G:", "W:"):
        assert word in printed


# --- report -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "release", ["4.40.0", "4.41.0", "4.46.2", "4.49.0", "5.3.0", "5.23.0", "5.24.0", "5.25.0", "5.25.0.dev0"]
)
def test_the_report_is_narrow_and_holds_the_defects_present_alone(release: str) -> None:
    report = report_on(release)
    lines = str(report).splitlines()
    version = parsed(release)
    assert version is not None
    assert lines[0].startswith(f"transformers {release}: ")
    assert ("refused" if version < parsed(FIRST_RELEASE) else "affected") in lines[0]
    assert max(map(len, lines)) <= 80 and len(lines) <= 60
    assert "not affected" not in str(report)
    for decision in report.plan.decisions:
        here = decision.action.value not in ("not affected", "unknown")
        assert any(line.split()[:1] == [decision.defect.name] for line in lines) == here
        assert decision.defect.name in report.details()


@newest
def test_after_a_block_the_report_is_headed_by_the_run_that_was_fixed(tmp_path: Path) -> None:
    head = HEADS["bert-classes"]
    take_step(head, head.samples, 1, 8, "apply", tmp_path)
    lines = str(hf_accum_fix.report()).splitlines()
    assert lines[0] == "1 run trained with hf_accum_fix 0.1.0: exact"
    assert lines[1] == "  1. BertForSequenceClassification, G = 8, W = 1: exact"
    assert max(map(len, lines)) <= 80
    assert "not applied" not in lines[0] and any("not applied now" in line for line in lines)


def test_each_run_is_headed_by_what_it_was(tmp_path: Path) -> None:
    observations.record({"head": "ToyForCausalLM", "exact": True, "accumulation_steps": 4, "world_size": 2})
    observations.record({"head": "Own", "exact": False, "reason": "nothing fits", "repeated_samples": 3})
    lines = str(hf_accum_fix.report()).splitlines()
    assert lines[0].startswith("2 runs trained with hf_accum_fix") and lines[0].endswith(": 1 exact, 1 not")
    assert lines[1] == "  1. ToyForCausalLM, G = 4, W = 2: exact"
    assert lines[2] == "  2. Own: not exact (nothing fits)"
    assert "repeated samples: 3" in "\n".join(lines)


@pytest.mark.parametrize("reduction", Reduction)
def test_a_run_is_reported_in_plain_words(reduction: Reduction) -> None:
    run: dict[str, Any] = {
        "head": "Toy",
        "exact": True,
        "reduction": reduction.value,
        "items": "shifted 'labels' other than -100",
    }
    observations.record(run)
    text = str(hf_accum_fix.report())
    above = text[: text.index("transformers")]
    assert not [word for word in OURS if word in above], above
