"""The report as it is read: 80 columns, the reason below its row, one name for a split, the user's own split."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_accum_fix import verify
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.verification.report import (
    Kind,
    SplitResult,
    Verdict,
    VerificationReport,
    also_looked_at,
    judge,
    judge_own,
)
from hf_accum_fix.verification.sample import splits_of
from tests.verify.trainers import Regression, points, small

EXACT = Verdict(Kind.EXACT, "exact")
LONG = "; ".join(["G x W times, and the mean of micro-batch means"] * 6)


def of(kind: Kind, words: str, **given: Any) -> SplitResult:
    facts = {"mode": "stock", "per_device": 16, "steps": 1024, "micro_batches": 1023, "window": 0}
    return SplitResult(**{**facts, "verdict": Verdict(kind, words), **given})


OFF = of(Kind.OFF, f"off, relative error 1.2e+05: {LONG}", norm_ratio=1.23456789e-5, error=1.2e5, cosine=-0.123456789,
         loss_ratio=1.23456789e-5, defects=("classic-head-drops-item-count", "mean-of-micro-batch-means"))  # fmt: skip


@pytest.mark.parametrize("windows", [1, 2])
def test_no_line_is_wider_than_80_columns(windows: int) -> None:
    results = tuple(
        of(each.verdict.kind, each.verdict.words, window=window, error=each.error, cosine=each.cosine, mode=mode)
        for window in range(windows)
        for mode in ("stock", "apply()")
        for each in (OFF, of(Kind.COULD_NOT_TELL, f"could not tell: {LONG}"), of(Kind.EXACT, f"exact, {LONG}"))
    )
    report = VerificationReport(
        "MyVeryOwnTrainerForSequenceClassification", "BertForSequenceClassification", "5.24.0", "stock",
        judge(results), 8, (8192,) * windows, (123456.0,) * windows, LONG, "full batch in one forward", 1e-8, 1e-7,
        results, (LONG,), (2, 4),
    )  # fmt: skip
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = " ".join(str(report).split())
    assert str(report.verdict) in text and text.count(LONG) >= len(results)


def test_the_reason_stands_below_its_row(tmp_path: Path) -> None:
    lines = str(verify(small(Regression(), tmp_path, points(3)))).splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:2] == ["split", "mode"])
    assert lines[head].split() == ["split", "mode", "gradient", "error", "logged", "answer"]
    own, reason, more, patched, following = lines[head + 2 : head + 7]
    assert own.startswith("2 x 4 (2 of 4)  stock ") and own.endswith("  off")
    assert reason.startswith("    another direction, cosine 0.") and more == "      [mean-of-micro-batch-means]"
    assert patched.startswith("2 x 4 (2 of 4)  apply() ") and patched.endswith("  exact")
    # An exact split has none.
    assert not following.startswith(" ")
    assert lines[-1] == "(k of G): a short last window, k micro-batches at G accumulation steps"


@pytest.mark.parametrize("splits", [None, [(2, 4), (1, 8)]])
def test_the_users_own_split_is_that_of_the_arguments(splits: list[tuple[int, int]] | None, tmp_path: Path) -> None:
    """Also where the data has fewer samples than it."""
    report = verify(small(Regression(), tmp_path, points(3)), splits=splits)
    assert report.own == (2, 4) and " at your 2 x 4 (2 of 4)" in str(report.verdict)
    assert "not among the splits" not in str(report)
    alone = verify(small(Regression(), tmp_path, points(1)), splits=[(2, 4)])
    assert str(alone.verdict) == "exact at your 2 x 4 (1 of 4)"
    assert "global batch: 1 sample;" in str(alone) or "global batch: 1 sample with 1 item;" in str(alone)
    assert "the data has 1 sample for a rank" in str(alone)


def test_another_split_alone_is_said_to_be_another() -> None:
    one = of(Kind.EXACT, "exact", per_device=1, steps=8, micro_batches=8)
    assert str(judge_own([one], [], "stock", (2, 4))) == "exact at 1 x 8; your own 2 x 4 is not among the splits"
    off = of(Kind.OFF, "off, relative error 7: G times", per_device=1, steps=8, micro_batches=8, norm_ratio=8.0,
             error=7.0, cosine=1.0)  # fmt: skip
    words = "8x too large at 1 x 8 (G times); your own 2 x 4 is not among the splits"
    assert str(judge_own([off], [], "stock", (2, 4))) == words


def test_another_direction_is_a_relative_error() -> None:
    off = of(Kind.OFF, "off, relative error 0.69: why", per_device=3, steps=4, micro_batches=3, error=0.69, cosine=0.9)
    own = of(Kind.EXACT, "exact", per_device=2, steps=4, micro_batches=4)
    assert also_looked_at([own, off], (2, 4)) == ["also looked at: relative error 0.69 at 3 x 4 (3 of 4)"]


def test_one_split_is_one_split() -> None:
    assert judge([of(Kind.EXACT, "exact")]).words == "exact for 1 split"
    both = [of(Kind.EXACT, "exact"), of(Kind.COULD_NOT_TELL, "could not tell: x")]
    assert judge(both).words == "exact for 1 split; 1 split without an answer"
    assert judge([OFF]).words.endswith("1 of 1 splits is off)")


@pytest.mark.parametrize("asked", [[(1, 2)], [9], []], ids=str)
def test_splits_that_do_not_fit_are_shown_in_both_spellings(asked: list[Any]) -> None:
    with pytest.raises(OptionsError, match=r"splits=\[1, \(2, 4\)\], on the command line --splits 1x8,2x4"):
        splits_of(8, (2, 4), asked)
    with pytest.raises(OptionsError, match="hold the 1 sample of a rank"):
        splits_of(1, (2, 4), [(2, 2)])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_how_far_it_is_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hf_accum_fix.progress._SILENT", 0.0)
    monkeypatch.setattr("hf_accum_fix.progress._ON_A_TERMINAL", 0.0)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("HF_ACCUM_FIX_QUIET", raising=False)
    verify(small(Regression(), tmp_path, points(8)), splits=[(2, 4), (1, 8)])
    said = [line.strip() for line in screen.getvalue().split("\r")]
    assert {"verify: split 1 of 4: 2 x 4, stock", "verify: split 4 of 4: 1 x 8, apply()"} <= {*said}, said
    assert any(line.startswith("verify: the reference: 8 samples") for line in said) and "\n" not in screen.getvalue()
    screen.truncate(0)
    monkeypatch.setenv("HF_ACCUM_FIX_QUIET", "1")
    verify(small(Regression(), tmp_path, points(8)), splits=[(2, 4)])
    assert "split" not in screen.getvalue()
