"""What the documents show is what the package holds, and stands in one place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import hf_accum_fix
from hf_accum_fix import monitor
from hf_accum_fix.cli import COMMANDS
from hf_accum_fix.cli.explain import explanation
from hf_accum_fix.upstream.defects import DEFECTS
from hf_accum_fix.upstream.engine_defects import ENGINE_DEFECTS
from hf_accum_fix.upstream.seams import TESTED_RELEASES
from tests.upstream.defect_tables import defect_table, engine_table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_accum_fix"
ROOMS = ("cli", "data", "learning", "monitor", "router", "upstream", "verification", "window")
PAGES = {
    page: (ROOT / page).read_text(encoding="utf-8")
    for page in (
        *("README.md", "recipes/README.md", "tests/README.md", "hf_accum_fix/README.md"),
        *(f"hf_accum_fix/{room}/README.md" for room in ROOMS),
    )
}
TWO_SCREENS = 180


def anchors(text: str) -> set[str]:
    """The headings of a page, as GitHub makes links of them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_fits_on_two_screens() -> None:
    assert len(PAGES["README.md"].splitlines()) <= TWO_SCREENS


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)", PAGES["README.md"]))
    assert {*PAGES} - {"README.md"} <= linked


def test_no_line_stands_twice() -> None:
    lines = Counter(line.strip() for text in PAGES.values() for line in text.splitlines() if len(line.strip()) > 60)
    assert not {line for line, times in lines.items() if times > 1}


def test_the_defect_table_is_printed_from_the_rows() -> None:
    page = (PACKAGE / "upstream/DEFECTS.md").read_text(encoding="utf-8")
    assert f"\n\n{defect_table(DEFECTS)}\n\n" in page and page.endswith(f"\n\n{engine_table(ENGINE_DEFECTS)}\n")
    (counted,) = re.findall(r"\[All (\d+) known defects", PAGES["README.md"])
    assert int(counted) == len(DEFECTS)


@pytest.mark.parametrize(
    ("page", "names"),
    [("hf_accum_fix/README.md", hf_accum_fix.__all__), ("hf_accum_fix/monitor/README.md", monitor.__all__)],
)
def test_every_public_name_is_described(page: str, names: list[str]) -> None:
    for name in names:
        assert f"`{name}" in PAGES[page] or f"{name}(" in PAGES[page], name


def test_the_tree_names_every_module() -> None:
    (tree,) = re.findall(r"## The tree\n.*?```\nhf_accum_fix/\n(.*?)```", PAGES["hf_accum_fix/README.md"], re.DOTALL)
    named: dict[str, set[str]] = {"": set()}
    room = ""
    for line in tree.splitlines():
        if not line.startswith("   "):
            room = line.split()[0] if "/" in line.split()[0] else ""
            named.setdefault(room, set())
        named[room] |= set(re.findall(r"\w+\.py", line))
    assert {*named} == {"", *(f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py"))}
    for room, modules in named.items():
        # A room whose modules its own page tells of is one line here.
        if modules:
            there = {path.name for path in (PACKAGE / room).glob("*.py")}
            assert modules == (there - {"__init__.py"} if room else there), room
    for page in PACKAGE.glob("*/README.md"):
        inner = {path.name for path in page.parent.glob("*/*.py") if (path.parent / "__init__.py").exists()}
        assert inner - {"__init__.py"} <= {*re.findall(r"`(\w+\.py)`", page.read_text())}, page


def test_every_tested_release_is_in_the_matrix() -> None:
    page = PAGES["recipes/README.md"]
    assert "(release_matrix.md)" in page and "(release_matrix.png)" in page
    lines = (ROOT / "recipes/release_matrix.md").read_text().splitlines()
    for release in TESTED_RELEASES:
        assert {f"| {release} | {ranks} |" for ranks in (1, 2)} <= {line[: len(release) + 8] for line in lines}


def test_every_recipe_is_listed() -> None:
    for recipe in (ROOT / "recipes").glob("*.py"):
        assert f"[{recipe.name}]({recipe.name})" in PAGES["recipes/README.md"], recipe.name


def test_every_command_is_shown() -> None:
    for name in COMMANDS:
        assert any(f"$ hf-accum-fix {name}" in text for text in PAGES.values()), name
        assert f"[`{name}`](" in PAGES["hf_accum_fix/cli/README.md"], name


def test_every_row_of_what_is_exact_names_its_test() -> None:
    (table,) = re.findall(r"^\| what you train \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGES["README.md"], flags=re.MULTILINE)
    for row in table.splitlines():
        named = re.findall(r"\]\((tests/[\w/]+\.py)#(test_\w+)\)", row)
        assert named, row
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_the_explanation_shown_is_the_one_printed() -> None:
    page = PAGES["hf_accum_fix/cli/README.md"]
    shown = re.search(r"\$ hf-accum-fix explain ([\w-]+)\n(.*?)```", page, flags=re.DOTALL)
    assert shown is not None
    printed = explanation(next(each for each in DEFECTS if each.name == shown[1])).splitlines()
    assert {line for line in shown[2].splitlines() if line != "..."} <= {*printed}


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_compile(page: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)
    assert examples or page not in ("README.md", "hf_accum_fix/README.md", "hf_accum_fix/monitor/README.md")
    for example in examples:
        compile(example, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_what_it_links_to_is_there(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        assert not anchor or found.suffix == ".py" or anchor in anchors(found.read_text(encoding="utf-8")), target
