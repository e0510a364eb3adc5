"""The rows of the table are well formed, and a row that is not is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.seams import SEAMS, TESTED_BODIES, TESTED_RELEASES


def test_names_are_unique() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)


def test_every_row_has_a_summary_of_one_line() -> None:
    for defect in DEFECTS:
        assert defect.summary.endswith(".") and len(defect.summary) <= 100, defect.name
        assert defect.goes_when, defect.name


@pytest.mark.parametrize(
    "slip",
    [
        {"name": "Not Kebab"},
        {"name": "trailing-"},
        {"since": "4.50.0", "until": "4.50.0"},
        {"since": "5.0.0", "until": "4.57.6"},
        {"source": ()},
        {"source": ("http://example.org",)},
        {"seam": "evaluation_loop"},
        {"remove_when": ""},
    ],
)
def test_a_row_with_a_slip_is_refused(slip: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(DEFECTS[0], **slip)


def test_the_range_is_half_open_and_takes_builds_for_the_release_they_lead_to() -> None:
    row = replace(DEFECTS[0], since="4.49.0", until="5.0.0")
    inside = ["4.49.0", "4.49.0.dev0", "4.49.0rc1", "4.57.6", "4.49.0+local"]
    outside = ["4.48.3", "5.0.0", "5.0.0rc1", "5.0.0.dev0"]
    assert [release for release in inside + outside if row.is_in(Version(release))] == inside


# Ratio of the stock gradient to the full batch's at G=4, W=1, as measured on the released wheels:
# Llama, BERT classification, T5, LLaVA. Where it is not 1 there has to be a row that says so.
@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("4.46.1", "loss-times-steps"),
        ("4.46.3", "undivided-gradient-right-log"),
        ("4.47.0", "item-count-dropped"),
        ("4.47.1", "undivided-gradient-right-log"),
        ("4.48.0", "item-count-dropped-again"),
        ("4.48.3", "mean-of-micro-batch-means"),
        ("4.49.0", "llava-mean-loss"),
        ("4.51.3", "llava-mean-loss"),
        ("4.54.1", "head-drops-item-count"),
        ("5.4.0", "gradient-divided-twice"),
        ("5.10.0", "first-label-counted"),
        ("5.14.1", "label-smoothing-mean"),
        ("5.23.0", "first-label-still-counted"),
    ],
)
def test_a_release_measured_wrong_has_its_row(release: str, name: str) -> None:
    assert name in {defect.name for defect in DEFECTS if defect.is_in(Version(release))}


def test_a_release_measured_right_has_no_such_row() -> None:
    names = {defect.name for defect in DEFECTS if defect.is_in(Version("4.52.4"))}
    assert not names & {"llava-mean-loss", "gradient-divided-twice", "loss-times-steps", "item-count-dropped"}


def test_every_seam_has_tested_bodies() -> None:
    assert set(TESTED_BODIES) == {seam.name for seam in SEAMS}
    for bodies in TESTED_BODIES.values():
        assert 1 <= len(bodies) <= len(TESTED_RELEASES)
        assert all(len(body) == 16 and int(body, 16) >= 0 for body in bodies)
