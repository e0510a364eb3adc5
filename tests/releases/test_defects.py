"""The rows of the table are true: stock, measured on the first and last release of each range and on their neighbours.

Every release that bounds a range is installed in turn and runs the probes of the rows it bounds: ``pytest -m
releases_all`` (an hour and a half on two cores; the environments of recipes/in_release.py are kept). ``pytest -m
releases`` runs the newest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_accum_fix.upstream import seams
from hf_accum_fix.upstream.defects import DEFECTS, OLDEST_READ, Defect
from hf_accum_fix.upstream.seams import TESTED_RELEASES
from tests.releases.probes import PROBES, Probe, Where
from tests.releases.test_releases import run_in
from tests.torchrun import launcher

#: Every release from the oldest read to the newest tested, yanked ones (4.46.0, 4.52.0, 4.57.0, 5.10.0) too.
PUBLISHED_RELEASES: list[str] = json.loads(Path(seams.__file__).with_name("releases.json").read_text())["published"]
MEASURED = {defect.name: defect for defect in DEFECTS if defect.evidence == "run"}


def edges(defect: Defect) -> Iterator[tuple[str, Where]]:
    """The first and last release of its range, the one before and the one after."""
    first = PUBLISHED_RELEASES.index(defect.since)
    after = len(PUBLISHED_RELEASES) if defect.until is None else PUBLISHED_RELEASES.index(defect.until)
    yield PUBLISHED_RELEASES[first], "inside"
    yield PUBLISHED_RELEASES[after - 1], "inside"
    if first > 0:
        yield PUBLISHED_RELEASES[first - 1], "before"
    if after < len(PUBLISHED_RELEASES):
        yield PUBLISHED_RELEASES[after], "after"


#: Of each release that bounds a range: the rows it bounds, and where in their range it is.
EXPECTED: dict[str, dict[str, Where]] = {}
for _defect in MEASURED.values():
    for _release, _where in edges(_defect):
        EXPECTED.setdefault(_release, {})[_defect.name] = _where


def test_every_row_measured_at_its_ends_has_a_probe_and_every_other_says_that_it_was_not() -> None:
    assert PROBES.keys() == MEASURED.keys()
    assert {defect.evidence for defect in DEFECTS if defect.name not in PROBES} == {"newest", "read"}


def test_the_list_of_releases_ends_with_the_newest_tested() -> None:
    assert PUBLISHED_RELEASES[0] == OLDEST_READ and PUBLISHED_RELEASES[-1] == TESTED_RELEASES[-1]


def test_a_probe_tells_presence_from_absence() -> None:
    probe = Probe(lambda: 0.0, inside=4.0, before=None, after=1.0)
    for value, where in ((4.001, "inside"), (None, "before"), (1.001, "after")):
        assert [each for each in ("before", "inside", "after") if probe.shows(value, each)] == [where]
    for neither in (2.0, float("nan")):
        assert not any(probe.shows(neither, where) for where in ("before", "inside", "after"))
    for name, each in PROBES.items():
        bounds = {where for rows in EXPECTED.values() for row, where in rows.items() if row == name}
        assert not any(each.shows(getattr(each, where), "inside") for where in bounds - {"inside"}), name
        assert all(getattr(each, where) is None for where in {"before", "after"} - bounds), name


@pytest.mark.releases_all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "release",
    [
        pytest.param(each, marks=[pytest.mark.releases] * (each == TESTED_RELEASES[-1]))
        for each in sorted(EXPECTED, key=PUBLISHED_RELEASES.index)
    ],
)
def test_the_rows_that_a_release_bounds_are_true_of_it(release: str, tmp_path: Path) -> None:
    output = tmp_path / "probes.jsonl"
    for ranks, started in ((1, ("-m",)), (2, (*launcher(), "-m"))):
        names = [name for name in EXPECTED[release] if PROBES[name].ranks == ranks]
        if names:
            run_in(release, "python", "-W", "ignore", *started, "tests.releases.probes", str(output), *names)
    rows = {row["defect"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert rows.keys() == EXPECTED[release].keys()
    untrue = [
        {**rows[name], "where": where, "expected": getattr(PROBES[name], where)}
        for name, where in EXPECTED[release].items()
        if "error" in rows[name] or not PROBES[name].shows(rows[name]["value"], where)
    ]
    assert not untrue
