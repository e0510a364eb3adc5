"""What stands in files next to a log: accumulation steps and ranks, and the loss of a guess."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

#: Accumulation steps and ranks, as consoles and the files next to a log name them.
_SETTING = {
    name: re.compile(rf"\b(?:{'|'.join(words)})[\"']?\s*[:=]\s*(\d+)", re.IGNORECASE)
    for name, words in {
        "accumulation": ("gradient[_ ]accumulation[_ ]steps",),
        "ranks": ("num_processes", "world_size"),
    }.items()
}
#: Files of settings: of the Trainer, of W&B, of LLaMA-Factory (train.yaml); most bytes of one.
_FILES, _LARGEST = ("*args*.json", "*.yaml", "*.yml"), 1 << 20
_COMMENT = re.compile(r"(?:^|\s)#.*")
#: Most values of a setting, which say no more than two.
_MOST_VALUES = 8


class Settings:
    """Settings in the lines of a console and in files, where they agree."""

    def __init__(self) -> None:
        self._found: dict[str, set[int]] = {name: set() for name in _SETTING}

    def take(self, text: str) -> None:
        """Look for them in a text."""
        for name, known in _SETTING.items():
            if len(self._found[name]) < _MOST_VALUES:
                self._found[name].update(int(its) for its in known.findall(text) if len(its) < _MOST_VALUES)

    def with_those_beside(self, log: Path) -> Mapping[str, int]:
        """The same, and those of the files next to a log."""
        together = Settings()
        for folder in _folders(log):
            for file in chain.from_iterable(sorted(folder.glob(pattern)) for pattern in _FILES):
                text = _text(file)
                together.take(text if file.suffix == ".json" else "\n".join(map(_uncommented, text.split("\n"))))
        found = {name: its | together._found[name] for name, its in self._found.items()}
        return {name: next(iter(its)) for name, its in found.items() if len(its) == 1}


def guess_beside(folder: Path) -> float:
    """ln(classes), where the model's config.json is there and names its classes; else nan."""
    try:
        its = json.loads(_text(folder / "config.json"))
        classes = _classes(its) if isinstance(its, dict) else 0
    except (ValueError, TypeError, AttributeError, RecursionError):
        return math.nan  # Not a model's: the log is read without.
    return math.log(classes) if classes > 1 else math.nan


def _classes(its: Mapping[str, Any]) -> int:
    head = str((its.get("architectures") or [""])[0])
    if head.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return int(its.get("vocab_size") or (its.get("text_config") or {}).get("vocab_size") or 0)
    if not head.endswith(("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")):
        return 0
    # transformers does not store two labels, its default.
    classes = 0 if its.get("problem_type") in ("regression", "multi_label_classification") else 2
    return len(its.get("id2label") or ()) or classes


def _folders(log: Path) -> list[Path]:
    """The log's own; of a checkpoint's, the run's too."""
    return [log.parent, *([log.parent.parent] if log.parent.name.startswith("checkpoint-") else [])]


def _text(file: Path) -> str:
    """Empty where there is none, or more than settings have."""
    try:
        if file.is_file() and file.stat().st_size <= _LARGEST:
            return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass  # The log counts, not what is beside it.
    return ""


def _uncommented(line: str) -> str:
    return _COMMENT.sub("", line)
