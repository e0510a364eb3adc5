"""Which known defects the code of a release has whose number we do not know: their lines, looked for in its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

LINES: Final[dict[str, dict[str, str]]] = json.loads(Path(__file__).with_name("code.json").read_text(encoding="utf-8"))
"""The lines that make each defect of the newest tested release, by defect, then by file of transformers."""


def still_in(package: Iterable[str]) -> frozenset[str]:
    """The defects whose lines are all in the source of transformers; white space does not count.

    Args:
        package: the folders of the installed transformers.
    """
    folders = [Path(folder) for folder in package]
    return frozenset(
        name
        for name, lines in LINES.items()
        if all(any(_squeezed(text) in _source(folder / file) for folder in folders) for file, text in lines.items())
    )


@lru_cache(maxsize=16)
def _source(file: Path) -> str:
    try:
        return _squeezed(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def _squeezed(text: str) -> str:
    return "".join(text.split())
