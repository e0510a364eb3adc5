"""Every warning and error stands on hf_accum_fix/window/README.md, with what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_accum_fix import errors
from hf_accum_fix.monitor.series import LogsError

PACKAGE = Path(errors.__file__).parent
PAGE = PACKAGE / "window/README.md"

#: Where a sentence is one of a warning, an error or a log line. Elsewhere only what is passed to `SAYS` is.
MESSAGES = (
    *("counting", "reading", "trace", "learning", "weighing", "window", "overrides", "data", "engines", "router"),
    *("applying.py", "confirmation.py", "errors.py", "loop.py", "options.py", "trainer.py"),
    *("upstream/plan.py", "upstream/patchers.py", "upstream/presence.py"),
)
#: Calls that say something to the user.
SAYS = {
    *(name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)),
    *(LogsError.__name__, "ArgumentTypeError", "error"),
    *("warn", "warning", "warn_once", "warn_inexact", "report_inexact", "not_exact"),
    *("complain", "print_line", "print_once_per_job", "_print", "sys.stderr.write"),
}
#: In one of `MESSAGES`, and none.
NOT_SAID = (
    ("None of the inputs have requires_grad", "torch's warning, which is silenced"),
    ("a node outlives its loss", "an assertion"),
    ("router loss of length-balanced windows", "the name of a warning"),
    ("_ToTorchTensor _FromTorchTensor", "names of nodes"),
    ("Neg Mul Div Where", "names of nodes"),
    ("Sum Nansum Dot Mm Bmm", "names of nodes"),
)
#: A part that is filled in: of an f-string, of a format.
FILLED = "\0"


def _name(call: ast.Call) -> str:
    whole = ast.unparse(call.func)
    return whole if whole in SAYS else whole.rpartition(".")[2]


def _is_quiet(node: ast.AST) -> bool:
    """Whether what is below a node is not printed: a line at DEBUG."""
    return isinstance(node, ast.Call) and _name(node) == "debug"


def _strings(node: ast.AST) -> Iterator[str]:
    """The string literals below a node, without docstrings, with `FILLED` for what is filled in."""
    if _is_quiet(node):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%(s|d|\.\d[fg])", FILLED, node.value)
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(each.value) if isinstance(each, ast.Constant) else FILLED for each in node.values)
    within = (each for each in ast.iter_child_nodes(node) if not isinstance(node, ast.JoinedStr) or _is_filled(each))
    for each in within:
        is_docstring = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        yield from () if is_docstring else _strings(each)


def _is_filled(node: ast.AST) -> bool:
    return isinstance(node, ast.FormattedValue)


def _longest(text: str, between: str) -> str:
    """The longest part of a message that is always the same."""
    return max((" ".join(each.split()) for each in re.split(between, text)), key=len)


def _messages(path: Path) -> set[str]:
    """The constant words of the messages of a module: four words, three where they are passed to be said."""
    tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE).as_posix()
    said = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) in SAYS)
    found = {(text, 3) for node in said for text in _strings(node)}
    if name in MESSAGES or name.split("/")[0] in MESSAGES:
        found |= {(text, 4) for text in _strings(tree)}
    longest = {(_longest(text, FILLED), least) for text, least in found}
    long = {words for words, least in longest if len(words.split()) >= least}
    return {words for words in long if not any(each in words for each, _ in NOT_SAID)}


def _rows() -> list[str]:
    """The messages of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = (re.match(r"\| (`+) ?(.*?) ?\1 \| [^|]+ \| [^|]+ \|$", line.replace(r"\|", FILLED)) for line in lines)
    return [" ".join(row[2].replace(FILLED, "|").split()) for row in rows if row is not None]


def missing(rows: list[str], path: Path) -> set[str]:
    """The messages of a module that are in none of the rows, nor in the text between them."""
    text = "\n".join([*rows, *(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] != "|")])
    return {words for words in _messages(path) if words not in text}


@pytest.mark.parametrize("name", sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")))
def test_every_message_has_its_row(name: str) -> None:
    assert not missing(_rows(), PACKAGE / name)


def test_a_row_that_is_deleted_is_missed() -> None:
    rows = _rows()
    kept = [row for row in rows if "accelerator.accumulate() inside micro_batch()" not in row]
    assert len(kept) == len(rows) - 1
    (missed,) = missing(kept, PACKAGE / "loop.py")
    assert missed.startswith("got accelerator.accumulate() inside micro_batch(); expected")


def test_no_row_is_of_a_message_that_is_gone() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    said = "\n".join(" ".join(text.split()) for tree in trees for text in _strings(tree))
    # A row puts several strings together.
    parts = ([part.strip() for part in re.split(r"\.\.\.|[:;,] ", row) if part.count(" ") > 1] for row in _rows())
    assert not [each for each in parts if each and not any(part in said for part in each)]


def test_every_row_stands_once() -> None:
    rows = _rows()
    assert len(rows) == len({*rows}) > 250
    tables = PAGE.read_text(encoding="utf-8").partition("\n### ")[2]
    assert sum(line.startswith("| `") for line in tables.splitlines()) == len(rows)
