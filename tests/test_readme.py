"""What the README shows is what the package holds."""

from __future__ import annotations

import re
from pathlib import Path

import hf_accum_fix
from hf_accum_fix import monitor
from hf_accum_fix.cli import COMMANDS
from hf_accum_fix.cli.explain import explanation
from hf_accum_fix.reporting import defect_table
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.seams import TESTED_RELEASES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_defect_table_is_printed_from_the_rows() -> None:
    begin, end = "<!-- defects -->\n", "\n<!-- /defects -->"
    assert README[README.index(begin) + len(begin) : README.index(end)] == defect_table(DEFECTS)


def test_every_public_name_is_in_the_readme() -> None:
    for name in (*hf_accum_fix.__all__, *monitor.__all__):
        assert f"`{name}" in README or f"{name}(" in README, name


def test_every_tested_release_is_in_the_matrix() -> None:
    matrix = "recipes/release_matrix.md"
    assert f"({matrix})" in README and "(recipes/release_matrix.png)" in README
    lines = (ROOT / matrix).read_text().splitlines()
    for release in TESTED_RELEASES:
        assert {f"| {release} | {ranks} |" for ranks in (1, 2)} <= {line[: len(release) + 8] for line in lines}


def test_every_command_is_shown() -> None:
    for name in COMMANDS:
        assert f"$ hf-accum-fix {name}" in README, name


def test_the_explanation_shown_is_the_one_printed() -> None:
    shown = re.search(r"\$ hf-accum-fix explain ([\w-]+)\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    printed = explanation(next(each for each in DEFECTS if each.name == shown[1])).splitlines()
    assert {line for line in shown[2].splitlines() if line != "..."} <= {*printed}


def test_python_examples_compile() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")


def test_what_it_links_to_is_there() -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
