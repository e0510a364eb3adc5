"""What every test gets: a check that it left the Trainer class as it found it, and a short garbage collection.

Every test of `SLOW` has the mark ``slow``, unless it needs another release: what starts ranks, launchers or fresh
processes that import torch belongs there. What is in `THOROUGH` tests a part that rarely changes, before a release.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_accum_fix import observations
from tests.logged import Said

HERE = Path(__file__).parent
#: Folders that change little, or take long, and what takes long in others: files, and tests by their ids.
SLOW = (
    "balancing",
    "losses/test_exact_windows.py",
    "monitor",
    "patch",
    "precision",
    "random_trainings",
    "trainers",
    "cli/test_commands.py::test_it_starts_light[doctor]",
    "cli/test_doctor.py::test_a_class_of_transformers",
    "cli/test_end_to_end.py",
    "cli/test_verify.py",
    "backends/test_reached.py::test_a_right_window_is_called_right_and_a_fault_is_found_and_named[torch.float32]",
    "backends/test_reached.py::test_a_right_window_is_called_right_and_a_fault_is_found_and_named[torch.float64]",
    "clients/test_preference.py",
    "clients/test_sft.py",
    "coupled/test_coupled.py::test_verify_calls_it_exact_and_names_the_option_without_it",
    "data/test_elastic.py",
    "data/test_resume.py",
    "data/test_two_ranks.py",
    "distributed",
    "faults/test_faults.py",
    "faults/test_looking_fails.py::test_on_two_ranks",
    "loop/test_two_ranks.py",
    "numerics/test_epochs.py::test_every_epoch_ends_in_a_step_of_its_own[bert-mlm-stream]",
    "numerics/test_zoo.py::test_no_class_is_looked_up_at_import",
    "pieces/test_in_pieces.py",
    "recipes/test_smoke.py::test_a_step_costs_one_in_a_hundred_operations_and_no_memory",
    "recipes/test_smoke.py::test_the_matrix_is_summarised_and_drawn",
    "router/test_conventions.py",
    "test_applying.py::test_applying_in_the_midst_of_the_import_is_refused",
    "test_applying.py::test_applying_while_another_thread_imports_waits_for_it",
    "test_applying.py::test_what_is_wrong_at_the_deferred_import_comes_out_of_that_import",
    "verify/test_cost.py",
    "verify/test_eval_loss.py",
    "verify/test_proof.py::test_every_split_has_the_proofs_gradient_and_a_planted_fault_is_found[bfloat16]",
    "verify/test_proof.py::test_every_split_has_the_proofs_gradient_and_a_planted_fault_is_found[float64]",
    "verify/test_sharded.py::test_errors_by_projections_are_those_of_the_whole_to_a_third",
    "verify/test_verdicts.py",
    "verify/test_verify.py",
)

#: Folders of which CI runs a few files only.
THOROUGH = {"monitor": ("test_callbacks.py", "test_monitor.py", "test_watch.py")}

#: Marks of what needs another release, another library or a device, and has its own step in CI.
ELSEWHERE = ("cpu_adam", "deepspeed", "gpu", "liger", "llama_factory", "releases", "releases_all", "swift")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without these, the everyday tests are collected in half the time, by every worker."""
    return True if "not slow" in config.option.markexpr and collection_path in (HERE / each for each in SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {*SLOW}
    for item in items:
        path = item.path.relative_to(HERE)
        # A test, or one row of it.
        tests = {f"{path}::{name}" for name in (item.originalname, item.name)}  # type: ignore[attr-defined]
        if slow & {*map(str, path.parents), str(path), *tests} and not any(map(item.get_closest_marker, ELSEWHERE)):
            item.add_marker(pytest.mark.slow)
        if path.name not in THOROUGH.get(str(path.parent), (path.name,)):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def no_residue() -> Iterator[None]:
    """The attributes of Trainer are the identical objects before and after each test."""
    before = _trainer_attributes()
    yield
    if before is not None:
        after = _trainer_attributes()
        assert after is not None
        changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}
        assert not changed, f"the test left Trainer changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def no_runs() -> None:
    """No test finds the runs of another in the report."""
    observations.clear()


@pytest.fixture(autouse=True)
def what_is_imported_is_no_garbage() -> None:
    """Every training collects garbage first; looking through torch and transformers was three quarters of its time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What the package has logged in this test, warnings and above unless ``caplog`` is told otherwise."""

    def messages(words: str = "") -> list[str]:
        ours = [record.getMessage() for record in caplog.records if record.name == "hf_accum_fix"]
        return [message for message in ours if words in message]

    return messages


def _trainer_attributes() -> dict[str, object] | None:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return None if trainer is None else dict(vars(trainer))
