"""Importing the package is light and changes nothing: asked in fresh interpreters."""

from __future__ import annotations

from types import ModuleType

import pytest

import hf_accum_fix
from hf_accum_fix import monitor
from tests.cli.processes import python

LIMIT = 0.1  # seconds of this process alone: 0.045 on an idle machine, 0.07 beside another worker; torch takes over 1


def fresh(script: str) -> str:
    """What a fresh interpreter prints."""
    return python("-c", script).stdout.strip()


def test_neither_torch_nor_transformers_is_imported() -> None:
    script = (
        "import sys, hf_accum_fix.monitor;print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    assert fresh(script) == "[]"


def test_apply_and_report_before_the_import_do_not_import_either() -> None:
    script = (
        "import sys, hf_accum_fix; hf_accum_fix.apply(); str(hf_accum_fix.report());"
        "print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    assert fresh(script) == "[]"


def test_the_import_is_quick() -> None:
    script = "from time import process_time as t; s = t(); import hf_accum_fix; print(t() - s)"
    assert min(float(fresh(script)) for _ in range(8)) < LIMIT


@pytest.mark.parametrize("package", [hf_accum_fix, monitor], ids=lambda package: package.__name__)
def test_every_public_name_is_there(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__module__.startswith(package.__name__), name
    assert set(package.__all__) <= set(dir(package))
