"""The example of a test suite, in verification/README.md, run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import hf_accum_fix
from hf_accum_fix.testing import assert_invariant
from tests.numerics.parity import training_arguments

PAGE = Path(hf_accum_fix.__file__).parent / "verification" / "README.md"


def test_the_example_of_the_fixture_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("my_library")
    library.MyTrainer = Trainer
    library.cpu_arguments = lambda per_device_train_batch_size, gradient_accumulation_steps: training_arguments(
        tmp_path, per_device_train_batch_size, gradient_accumulation_steps
    )
    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    library.tiny_model = lambda: LlamaForCausalLM(config).to(torch.float32)
    monkeypatch.setitem(sys.modules, "my_library", library)
    (example,) = (
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "invariant)" in each
    )
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    ran = []

    def invariant(*given: Any, **how: Any) -> Any:
        ran.append(assert_invariant(*given, **how))
        return ran[-1]

    with hf_accum_fix.apply(quiet=True):
        names["test_accumulation_changes_nothing"](invariant)
    assert {each.split for each in ran[0].results} == {"1 x 4", "2 x 2", "4 x 1"}
