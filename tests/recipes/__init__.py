"""The recipes, loaded from their files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).parents[2] / "recipes"
# They import one another.
sys.path.insert(0, str(RECIPES))


def load(name: str, *, known_as: str = "") -> ModuleType:
    """A recipe as a new module; one that others are to import is known to them by a name."""
    spec = importlib.util.spec_from_file_location(known_as or name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if known_as:
        sys.modules[known_as] = module
    spec.loader.exec_module(module)
    return module
