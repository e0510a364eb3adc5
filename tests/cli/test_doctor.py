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
from hf_accum_fix.cli.doctor import Diagnosis, Verdict, judge, to_json, to_text, to_verbose
from hf_accum_fix.options import Options
from hf_accum_fix.reporting import Report
from hf_accum_fix.upstream.code import LINES, still_in
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.environment import Environment
from hf_accum_fix.upstream.plan import Action, make_plan
from hf_accum_fix.upstream.seams import TESTED_RELEASES
from tests.cli.processes import environment, start
from tests.numerics.heads import HEADS
from tests.upstream.test_newer_release import made_release


def report_on(release: str | None, state: str = "not applied", missing: tuple[str, ...] = ()) -> Report:
    installed = Environment(transformers=release, accelerate="1.15.0", torch="2.13.0", python="3.11.7")
    return Report("0.1.0", state, installed, make_plan(installed, Options()), missing, ())


@pytest.mark.parametrize(
    ("release", "verdict", "reason"),
    [
        ("5.24.0", Verdict.DEFECTS, "not fixed in this process (not applied)"),
        ("5.22.7", Verdict.DEFECTS, "transformers 5.22.7 has "),
        ("4.40.0", Verdict.DEFECTS, "transformers 4.40.0 has "),
        ("5.25.0", Verdict.COULD_NOT_TELL, "not of transformers 5.25.0"),
        ("5.24.1.dev0", Verdict.COULD_NOT_TELL, "pre-release"),
        ("5.0.0rc1", Verdict.COULD_NOT_TELL, "pre-release"),
        ("4.38.1", Verdict.COULD_NOT_TELL, "not of transformers 4.38.1"),
        ("from git", Verdict.COULD_NOT_TELL, "of no release: 'from git'"),
        (None, Verdict.COULD_NOT_TELL, "not installed"),
    ],
)
def test_the_verdict_on_a_release(release: str | None, verdict: Verdict, reason: str) -> None:
    found = judge(report_on(release))
    assert found[0] is verdict
    assert reason in found[1]


def test_the_verdict_on_a_process() -> None:
    assert judge(report_on("5.23.0", "applied"))[0] is Verdict.CLEAN
    assert judge(report_on("5.23.0", "applied", missing=("compute_loss",)))[0] is Verdict.DEFECTS
    assert judge(report_on("5.23.0", "switched off"))[0] is Verdict.DEFECTS
    assert judge(report_on("5.23.0", "pending"))[0] is Verdict.DEFECTS
    assert judge(report_on("5.25.0", "applied"))[0] is Verdict.COULD_NOT_TELL
    changed = report_on("5.22.7", "applied")
    changed = replace(changed, plan=replace(changed.plan, untested="compute_loss of Trainer is not as it was"))
    assert judge(changed)[0] is Verdict.COULD_NOT_TELL


def test_a_release_without_defects_is_clean() -> None:
    report = report_on("5.23.0")
    gone = tuple(replace(each, action=Action.NOT_AFFECTED) for each in report.plan.decisions)
    assert judge(replace(report, plan=replace(report.plan, decisions=gone)))[0] is Verdict.CLEAN


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


def test_the_affected_runs_are_printed() -> None:
    report = report_on("5.23.0")
    decisions = tuple(replace(each, defect=replace(each.defect, who="LoRA on GPT-2")) for each in report.plan.decisions)
    report = replace(report, plan=replace(report.plan, decisions=decisions))
    for form in (to_verbose, to_json):
        assert "LoRA on GPT-2" in form(Diagnosis(report, *judge(report)))


def test_what_apply_would_do_is_printed() -> None:
    for release, words in (
        ("5.23.0", "apply() would wrap train, get_batch_samples, training_step, compute_loss of Trainer"),
        ("4.45.2", "apply() would wrap train, training_step, compute_loss of Trainer"),
        ("4.40.0", "apply() refuses: got transformers 4.40.0"),
    ):
        report = report_on(release)
        diagnosis = Diagnosis(report, *judge(report))
        assert words in " ".join(to_verbose(diagnosis).split())
        if "would wrap" not in words:
            assert words in " ".join(to_text(diagnosis).split())


# --- this process -----------------------------------------------------------------------------------------------------


def test_the_exit_code_and_the_json_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = judge(hf_accum_fix.report())
    assert main(["doctor", "--json"]) == expected
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == expected.name.lower()
    assert printed["installed"]["transformers"] == transformers.__version__


def test_with_the_patch_on_it_is_clean() -> None:
    from transformers import Trainer  # without it the patch is pending

    with hf_accum_fix.apply():
        assert Trainer and main(["doctor"]) == 0


@pytest.mark.slow
def test_a_release_that_our_tests_have_not_run_is_imported(tmp_path: Path) -> None:
    """The installed code, under the number of a release that there never was."""
    made_release(tmp_path, "5.22.7")
    done = start([sys.executable, "-m", "hf_accum_fix", "doctor", "--json"], environment(tmp_path))
    printed = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert printed["trainer_imported"] and {seam["state"] for seam in printed["seams"]} == {"original"}


def newer(state: str = "not applied", gone: tuple[str, ...] = ()) -> Report:
    """A release newer than all tests, whose code has the lines of every known defect but some."""
    installed = Environment("99.0.0", "1.15.0", "2.13.0", "3.11.7", read=frozenset({*LINES} - {*gone}))
    return Report("0.1.0", state, installed, make_plan(installed, Options()), (), ())


def test_a_newer_release_is_answered_by_its_code() -> None:
    report = newer(gone=("window-without-items-is-nan",))
    known = sum(defect.until is None for defect in DEFECTS)
    diagnosis = Diagnosis(report, *judge(report))
    printed = to_text(diagnosis)
    assert diagnosis.verdict is Verdict.DEFECTS
    assert printed.startswith("transformers 99.0.0: affected, many models 8x at G = 8\nrun: hf-accum-fix run COMMAND")
    assert "check: hf-accum-fix verify SCRIPT" in printed and "could not tell" not in printed
    words = " ".join(printed.split())
    assert f"{known - 1} of the {known} defects of " in words and "apply() fits, but our tests have run" in words
    assert "UNTESTED" not in printed
    on = newer("applied")
    assert judge(on)[0] is Verdict.COULD_NOT_TELL
    assert "the patch is on and fits" in to_text(Diagnosis(on, *judge(on)))
    assert judge(newer(gone=(*LINES,)))[0] is Verdict.COULD_NOT_TELL


def test_the_lines_of_every_open_defect_are_in_the_newest_tested_release() -> None:
    still_open = {defect.name for defect in DEFECTS if defect.until is None}
    assert still_open <= {*LINES} <= {defect.name for defect in DEFECTS}
    if transformers.__version__ == TESTED_RELEASES[-1]:
        assert still_open <= still_in(transformers.__path__)


def test_without_transformers_no_defect_is_counted() -> None:
    report = report_on(None)
    printed = to_text(Diagnosis(report, *judge(report)))
    assert "could not tell" in printed and " of 66 defects" not in printed and not report.present


@pytest.mark.parametrize("form", [to_text, to_verbose])
@pytest.mark.parametrize("release", ["4.40.0", "4.49.0", "5.3.0", "5.24.0"])
def test_no_line_is_wider_than_80_columns(form: Any, release: str) -> None:
    report = report_on(release)
    lines = form(Diagnosis(report, *judge(report))).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_package_that_raises_at_its_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('half an installation')")
    done = start([sys.executable, "-m", "hf_accum_fix", "doctor"], environment(tmp_path))
    assert done.returncode == 3 and "half an installation" in done.stdout, done
    assert "affected" not in done.stdout and "refuse" not in done.stdout


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(transformers.__version__ != TESTED_RELEASES[-1], reason="what the newest release does")
@pytest.mark.parametrize(
    ("name", "code", "words", "defect"),
    [
        ("LlamaForCausalLM", 0, "exact", None),
        ("GPT2LMHeadModel", 1, "1.037x too small", "first-label-still-counted"),
        ("BertForSequenceClassification", 1, "8x too large", "classic-head-drops-item-count"),
        ("ViTForImageClassification", 0, "exact", None),
        pytest.param("BertForMaskedLM", 1, "8.", "classic-head-drops-item-count", marks=pytest.mark.slow),
        pytest.param("BertForTokenClassification", 1, "8.", "classic-head-drops-item-count", marks=pytest.mark.slow),
        pytest.param("T5ForConditionalGeneration", 1, "8.", "classic-head-drops-item-count", marks=pytest.mark.slow),
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


def test_a_checkpoint_keeps_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A router loss is off by default."""
    HEADS["mixtral"].build().float().save_pretrained(tmp_path)
    main(["doctor", "--model", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "of MixtralForCausalLM on" in printed and "router loss" in printed


def test_detection_is_answered(tmp_path: Path) -> None:
    """Boxes are listed image by image; a checkpoint keeps its backbone."""
    HEADS["DFineForObjectDetection"].build().float().save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) in (0, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BertModel", "no labels can be made up for BertModel"),
        ("DetrForSegmentation", "no labels can be made up for DetrForSegmentation"),
        ("WhisperForConditionalGeneration", "input_features cannot be made up"),
    ],
)
def test_a_class_that_cannot_be_fed_is_no_answer(name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", name]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(f"could not tell: {name} could not be built small") and reason in printed


def test_a_checkpoint_that_cannot_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 3
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchClass"]}')
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "got 'NoSuchClass'; expected a model class" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["BertForMaskedML", "bert", "meta-llama/Llama-3.1-8B", "TrainerCallback"])
def test_another_name_is_wrong_usage(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", asked]) == 2
    assert f"got {asked!r}; expected a model class" in capsys.readouterr().err


# --- an installation that does not work -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "accelerate"])
def test_run_is_not_recommended_where_nothing_can_be_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    for words in ([], ["--model", "BertForMaskedLM"]):
        done = start([sys.executable, "-m", "hf_accum_fix", "doctor", *words], environment(tmp_path))
        assert done.returncode == 3 and "could not tell" in done.stdout, done
        assert "libcudart" in done.stdout and "hf-accum-fix run" not in done.stdout, done


def test_a_failure_of_its_own_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "packaging.py").write_text("raise ModuleNotFoundError('No module named packaging', name='packaging')")
    done = start([sys.executable, "-m", "hf_accum_fix", "doctor"], environment(tmp_path))
    assert done.returncode == 3 and "packaging" in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.parametrize(("release", "shown"), [("0.18.4", True), ("0.19.8", False)])
@pytest.mark.parametrize("form", [to_text, to_verbose, to_json])
def test_an_installed_engine_that_loses_micro_batches_is_named(
    form: Any, release: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_accum_fix.upstream.engine_defects.version", lambda package: release)
    report = report_on("5.23.0")
    printed = form(Diagnosis(report, *judge(report)))
    assert ("zero-2-offload-drops-micro-batches" in printed and release in printed) == shown
    assert form is to_json or max(map(len, printed.splitlines())) <= 80
