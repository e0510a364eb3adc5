"""What stands in a file next to a log: the loss of a guess."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Most bytes of a config.json.
_LARGEST = 1 << 20


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


def _text(file: Path) -> str:
    """Empty where there is none, or more than a config has."""
    try:
        if file.is_file() and file.stat().st_size <= _LARGEST:
            return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass  # The log counts, not what is beside it.
    return ""
