"""doctor's verdicts, its forms, and a model on made-up samples."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_accum_fix
from hf_accum_fix.cli import main
from hf_accum_fix.cli.doctor import Answer, Diagnosis, judge, to_json, to_text, to_verbose
from hf_accum_fix.options import Options
from hf_accum_fix.reporting import Report
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.environment import LINES, Environment, still_in
from hf_accum_fix.upstream.plan import Action, make_plan
from hf_accum_fix.upstream.seams import TESTED_RELEASES
from tests.cli.processes import environment, start
from tests.numerics.heads import HEADS


def report_on(release: str | None, state: str = "not applied", missing: tuple[str, ...] = ()) -> Report:
    installed = Environment(transformers=release, accelerate="1.15.0", torch="2.13.0", python="3.11.7")
    return Report("0.1.0", state, installed, make_plan(installed, Options()), missing, ())


REASONS = {
    "5.24.0": "not fixed in this process (not applied)", "5.25.0": "not of transformers 5.25.0",
    "5.24.1.dev0": "pre-release", "from git": "of no release: 'from git'", None: "not installed",
}  # fmt: skip


@pytest.mark.parametrize("release", REASONS, ids=str)
def test_the_verdict_on_a_release(release: str | None) -> None:
    verdict, reason = judge(report_on(release))
    assert REASONS[release] in reason
    assert verdict is (Answer.DEFECTS if release == "5.24.0" else Answer.COULD_NOT_TELL)


def test_the_verdict_on_a_process() -> None:
    assert judge(report_on("5.23.0", "applied"))[0] is Answer.CLEAN
    for state, missing in (("applied", ("compute_loss",)), ("switched off", ()), ("pending", ())):
        assert judge(report_on("5.23.0", state, missing))[0] is Answer.DEFECTS
    assert judge(report_on("5.25.0", "applied"))[0] is Answer.COULD_NOT_TELL
    changed = report_on("5.22.7", "applied")
    changed = replace(changed, plan=replace(changed.plan, untested="compute_loss of Trainer is not as it was"))
    assert judge(changed)[0] is Answer.COULD_NOT_TELL


@pytest.mark.parametrize("form", [to_verbose, to_json])
@pytest.mark.parametrize("release", ["4.40.0", "4.49.0", "5.3.0", "5.24.0"])
def test_every_form_has_each_present_defect_and_no_other(form: Any, release: str) -> None:
    report = report_on(release)
    printed = form(Diagnosis(report, *judge(report)))
    flat = " ".join(printed.split())
    for decision in report.plan.decisions:
        present = decision.action is not Action.NOT_AFFECTED
        if form is not to_json:
            assert (f"\n{decision.defect.name}:" in printed) == present
        if present:
            assert decision.defect.gradient in flat and json.dumps(decision.defect.who)[1:-1] in json.dumps(flat)
    if form is to_json:
        rows = {row["name"]: row for row in json.loads(printed)["defects"]}
        assert [*rows] == [defect.name for defect in DEFECTS]
        assert rows["gradient-divided-twice"]["decision"] == ("fix" if release == "5.3.0" else "not affected")
    assert ("pip install -U transformers" in flat) == (release == "4.40.0")


def test_the_exit_code_and_the_json_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = judge(hf_accum_fix.report())
    assert main(["doctor", "--json"]) == expected
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == expected.name.lower()
    assert printed["installed"]["transformers"] == transformers.__version__


def newer(state: str = "not applied", gone: tuple[str, ...] = ()) -> Report:
    """A release newer than all tests, whose code has the lines of every known defect but some."""
    installed = Environment("99.0.0", "1.15.0", "2.13.0", "3.11.7", read=frozenset({*LINES} - {*gone}))
    return Report("0.1.0", state, installed, make_plan(installed, Options()), (), ())


def test_a_newer_release_is_answered_by_its_code() -> None:
    report = newer(gone=("window-without-items-is-nan",))
    known = sum(defect.until is None for defect in DEFECTS)
    diagnosis = Diagnosis(report, *judge(report))
    printed = to_text(diagnosis)
    assert diagnosis.verdict is Answer.DEFECTS
    assert printed.startswith("transformers 99.0.0: affected, many models 8x at G = 8\nrun: hf-accum-fix run COMMAND")
    assert "check: hf-accum-fix verify SCRIPT" in printed and "could not tell" not in printed
    words = " ".join(printed.split())
    assert f"{known - 1} of the {known} defects of " in words and "apply() fits, but our tests have run" in words
    assert "UNTESTED" not in printed
    on = newer("applied")
    assert judge(on)[0] is Answer.COULD_NOT_TELL
    assert "the patch is on and fits" in to_text(Diagnosis(on, *judge(on)))
    assert judge(newer(gone=(*LINES,)))[0] is Answer.COULD_NOT_TELL


def test_the_lines_of_every_open_defect_are_in_the_newest_tested_release() -> None:
    still_open = {defect.name for defect in DEFECTS if defect.until is None}
    assert still_open <= {*LINES} <= {defect.name for defect in DEFECTS}
    if transformers.__version__ == TESTED_RELEASES[-1]:
        assert still_open <= still_in(transformers.__path__)


@pytest.mark.skipif(transformers.__version__ != TESTED_RELEASES[-1], reason="what the newest release does")
@pytest.mark.parametrize(
    ("name", "code", "words", "defect"),
    [
        ("LlamaForCausalLM", 0, "exact", None),
        ("GPT2LMHeadModel", 1, "1.037x too small", "first-label-still-counted"),
        ("BertForSequenceClassification", 1, "8x too large", "classic-head-drops-item-count"),
        ("ViTForImageClassification", 0, "exact", None),
        pytest.param("BertForMaskedLM", 1, "8.", "classic-head-drops-item-count", marks=pytest.mark.slow),
        pytest.param("LlavaForConditionalGeneration", 0, "exact", None, marks=pytest.mark.slow),
    ],
)
def test_a_class_of_transformers(
    name: str, code: int, words: str, defect: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--model", name]) == code
    report = json.loads(capsys.readouterr().out)
    stock, patched = report["results"]
    assert report["head"] == name and report["verdict"]["words"].startswith(words)
    assert patched["verdict"]["kind"] == "exact" and (defect is None or defect in stock["defects"])


@pytest.mark.thorough
def test_detection_is_answered(tmp_path: Path) -> None:
    """Boxes are listed image by image; a checkpoint keeps its backbone."""
    HEADS["DFineForObjectDetection"].build().float().save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) in (0, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DetrForSegmentation", "no labels can be made up for DetrForSegmentation"),
        ("WhisperForConditionalGeneration", "input_features cannot be made up"),
    ],
)
def test_a_class_that_cannot_be_fed_is_no_answer(name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", name]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(f"could not tell: {name} could not be built small") and reason in printed


@pytest.mark.parametrize("asked", ["BertForMaskedML", "meta-llama/Llama-3.1-8B"])
def test_another_name_is_wrong_usage(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", asked]) == 2
    assert f"got {asked!r}; expected a model class" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "accelerate"])
def test_run_is_not_recommended_where_nothing_can_be_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    for words in ([], ["--model", "BertForMaskedLM"]):
        done = start([sys.executable, "-m", "hf_accum_fix", "doctor", *words], environment(tmp_path))
        assert done.returncode == 3 and "could not tell" in done.stdout, done
        assert "libcudart" in done.stdout and "hf-accum-fix run" not in done.stdout, done
