"""explain prints what a row holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.cli.explain import explanation
from hf_accum_fix.upstream.defects import DEFECTS, LIMIT, Defect, Factor

EXAMPLE = replace(
    DEFECTS[0],
    factors=(Factor.G,),
    who="runs on several ranks",
    wrong="sum(S) / n",
    right="sum(S) / N",
    evidence="read",
)


def test_the_list_has_every_name_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [
        (each.name, each.summary) for each in (*DEFECTS, LIMIT)
    ]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_row_is_printed_whole(defect: Defect, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", defect.name]) == 0
    printed = capsys.readouterr().out
    for fact in (defect.name, defect.summary, defect.range, defect.gradient, defect.who, defect.wrong, defect.right):
        assert fact in printed
    assert all(link in printed for link in defect.source)


def test_the_equations_stand_one_above_the_other() -> None:
    printed = explanation(EXAMPLE).splitlines()
    assert "wrong       sum(S) / n" in printed
    assert "right       sum(S) / N" in printed
    assert "whose runs  runs on several ranks" in printed
    assert "gradient    G times the right one" in printed
    assert "evidence    read in the source, not run" in printed


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gradient-divided-thrice"]) == 2
    assert "'gradient-divided-twice'" in capsys.readouterr().err
