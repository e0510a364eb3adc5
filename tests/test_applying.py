"""apply(), revert() and report() on the real Trainer; what is computed is tested elsewhere, so fakes stand in."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

import hf_accum_fix
from hf_accum_fix import ForeignPatchError, Options, OptionsError, overrides
from hf_accum_fix.upstream.seams import seams_of
from tests.cli.processes import python
from tests.patch import toys
from tests.verify.trainers import Regression, points, small

SEAMS = seams_of(None)
NAMES = [seam.name for seam in SEAMS]
ORIGINALS = {name: vars(Trainer)[name] for name in NAMES}


@pytest.fixture(autouse=True)
def nothing_applied() -> Iterator[None]:
    assert hf_accum_fix.active_handle() is None
    yield
    hf_accum_fix.revert()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Options]]:
    """Overrides that note their call and return their name, in place of the real ones."""
    noted: list[tuple[str, Any, Options]] = []

    def fake(name: str) -> Callable[..., str]:
        def override(wrapped: Any, trainer: Any, args: Any, kwargs: Any, *, options: Options) -> str:
            noted.append((name, trainer, options))
            return f"our {name}"

        return override

    monkeypatch.setattr(overrides, "OVERRIDES", {name: fake(name) for name in NAMES})
    return noted


def is_original() -> bool:
    return all(vars(Trainer)[name] is ORIGINALS[name] for name in NAMES)


def blank(kind: type[Trainer] = Trainer) -> Trainer:
    """A trainer that was never set up: enough to call a wrapped method on."""
    return kind.__new__(kind)


def test_apply_reaches_every_subclass_and_revert_gives_the_identical_functions_back(
    calls: list[tuple[str, Any, Options]],
) -> None:
    class Own(Seq2SeqTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return f"own, then {super().compute_loss(*args, **kwargs)}"

    handle = hf_accum_fix.apply()
    assert handle.active and not handle.pending and not is_original()
    trainer = blank(Own)
    assert trainer.compute_loss(None, {}) == "own, then our compute_loss"
    assert trainer.train() == "our train"
    assert calls == [("compute_loss", trainer, Options()), ("train", trainer, Options())]
    handle.revert()
    handle.revert()
    assert is_original() and not handle.active


def test_apply_is_idempotent_and_refuses_other_options_meanwhile() -> None:
    handle = hf_accum_fix.apply()
    assert hf_accum_fix.apply() is handle and hf_accum_fix.active_handle() is handle
    with pytest.raises(OptionsError, match=r"revert\(\) first"):
        hf_accum_fix.apply(allow_foreign=("some.body",))
    hf_accum_fix.revert()
    assert is_original()
    other = hf_accum_fix.apply(allow_foreign=("some.body",))
    assert other is not handle and other.options.allow_foreign == ("some.body",)


def test_a_with_block_restores_also_after_an_exception() -> None:
    with hf_accum_fix.apply() as handle:
        assert handle.active
    assert is_original()
    with pytest.raises(KeyError), hf_accum_fix.apply():
        raise KeyError
    assert is_original()


def test_many_threads_get_one_handle_and_leave_nothing() -> None:
    barrier = threading.Barrier(8)
    handles: list[hf_accum_fix.PatchHandle] = []

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            with hf_accum_fix.apply() as handle:
                assert handle.active
        barrier.wait()
        handles.append(hf_accum_fix.apply())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == 8 and len(set(map(id, handles))) == 1
    for handle in handles:
        assert handle.active
        handle.revert()
    assert is_original()


@pytest.mark.parametrize("value", ["0", "False"])
def test_the_environment_switches_it_off(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ACCUM_FIX", value)
    with caplog.at_level(logging.INFO, "hf_accum_fix"), hf_accum_fix.apply() as handle:
        assert is_original() and not handle.active and not handle.pending and handle.missing() == ()
    assert "HF_ACCUM_FIX" in caplog.text
    assert hf_accum_fix.report().state == "switched off"


def test_quiet_is_a_bool() -> None:
    with pytest.raises(OptionsError, match="got quiet='no'; expected True or False"):
        hf_accum_fix.apply(quiet="no")  # type: ignore[arg-type]
    assert is_original()


def test_the_environment_switch_must_mean_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ACCUM_FIX", "on")
    assert hf_accum_fix.apply().active
    monkeypatch.setenv("HF_ACCUM_FIX", "maybe")
    with pytest.raises(OptionsError, match="'maybe'"):
        hf_accum_fix.apply()


def test_a_tracing_wrapper_put_on_later_is_reported_and_has_to_go_first(
    calls: list[tuple[str, Any, Options]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be put around ours, before or after, is tested in upstream/test_patch.py."""
    handle = hf_accum_fix.apply()
    with monkeypatch.context() as patched:
        inner = Trainer.compute_loss
        patched.setattr(Trainer, "compute_loss", functools.wraps(inner)(lambda self, *args: inner(self, *args)))
        trainer = blank()
        assert trainer.compute_loss(None, {}) == "our compute_loss" and handle.missing() == ()
        assert calls == [("compute_loss", trainer, Options())]
        [state] = [state for state in hf_accum_fix.report().environment.seams if state.seam.name == "compute_loss"]
        assert state.ours and state.composable and state.foreign is not None and "lambda" in state.foreign
        with pytest.raises(ForeignPatchError, match=r"undo that later patch first"):
            handle.revert()
        assert handle.active
    handle.revert()


def replacement(self: Any, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> str:
    return "replaced"


def test_a_replacement_is_refused_by_name_unless_it_is_allowed(
    calls: list[tuple[str, Any, Options]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute_loss", replacement)
        name = f"{__name__}.replacement"
        with pytest.raises(ForeignPatchError, match=name):
            hf_accum_fix.apply()
        assert hf_accum_fix.active_handle() is None and vars(Trainer)["train"] is ORIGINALS["train"]
        assert f"got {name} in place of Trainer.compute_loss" in " ".join(str(hf_accum_fix.report()).split())
        with hf_accum_fix.apply(allow_foreign=(name,)):
            assert blank().compute_loss(None, {}) == "our compute_loss"
        assert vars(Trainer)["compute_loss"] is replacement


@pytest.fixture
def toy(tmp_path: Path) -> Callable[[str], str]:
    """Runs a script in a fresh interpreter whose transformers is a toy that takes a while to import."""
    # It imports what apply() will use, so that apply() itself is quick.
    folder = toys.toy_in(tmp_path, pause=0.2)
    prelude = "import hf_accum_fix; hf_accum_fix.report()\n"
    return lambda script: toys.fresh(prelude + script, folder).stdout.strip().splitlines()[-1]


def fresh(script: str) -> str:
    """The last line that a fresh interpreter prints."""
    return python("-c", script).stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_before_the_import_the_handle_waits_and_the_import_applies_it(tmp_path: Path) -> None:
    script = f"""
import logging, hf_accum_fix
log = {str(tmp_path / "log")!r}
logging.basicConfig(level=logging.INFO, format="%(message)s", filename=log)
handle = hf_accum_fix.apply()
found = [handle.pending, hf_accum_fix.report().state, open(log).read()]
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
found += [handle.active, handle.pending, open(log).read().count("wrapped Trainer.train")]
found += [type(vars(Trainer)["compute_loss"]).__module__]
handle.revert()
print(found + [type(vars(Trainer)["compute_loss"]).__name__])
"""
    applied = [True, False, 1, "hf_accum_fix.upstream.patch", "function"]
    assert fresh(script) == str([True, "pending", "", *applied])


def test_what_is_wrong_at_the_deferred_import_comes_out_of_that_import(toy: Callable[[str], str]) -> None:
    script = """
from dataclasses import replace
import hf_accum_fix.upstream.seams as seams
seams.SEAMS = (*seams.SEAMS[:-1], replace(seams.SEAMS[-1], parameters=("batch",)))
handle = hf_accum_fix.apply()
try:
    import transformers.trainer
except hf_accum_fix.SeamError as error:
    print("(self, batch, ...)" in str(error), handle.active, handle.pending, hf_accum_fix.active_handle())
"""
    assert toy(script) == "True False False None"


@pytest.mark.parametrize("moment", [0.1, 0.3])  # before and after the class statement
def test_applying_while_another_thread_imports_waits_for_it(moment: float, toy: Callable[[str], str]) -> None:
    script = f"""
import threading, time
importing = threading.Thread(target=lambda: __import__("transformers.trainer"))
importing.start()
while "transformers.trainer" not in sys.modules:
    time.sleep(0.0005)
time.sleep({moment})
handle = hf_accum_fix.apply()
from transformers.trainer import Trainer
print(handle.active, type(vars(Trainer)["train"]).__module__)
"""
    assert toy(script) == "True hf_accum_fix.upstream.patch"


def test_applying_in_the_midst_of_the_import_is_refused(toy: Callable[[str], str]) -> None:
    script = """
import time
def midway(_):
    time.sleep = lambda _: None
    hf_accum_fix.apply()
time.sleep = midway
try:
    import transformers.trainer
except hf_accum_fix.SeamError as error:
    print("not while it is imported" in str(error), hf_accum_fix.active_handle())
"""
    assert toy(script) == "True None"


# --- changed in mid-run -----------------------------------------------------------------------------------------------


def test_each_reverts_its_own_apply_alone() -> None:
    one, other = hf_accum_fix.apply(), hf_accum_fix.apply()
    one.revert()
    assert other.active and not is_original()
    other.revert()
    other.revert()
    assert is_original()


def test_a_switch_set_after_apply_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf_accum_fix.apply()
    monkeypatch.setenv("HF_ACCUM_FIX", "0")
    small(Regression(), tmp_path, points(8), max_steps=1).train()
    assert "HF_ACCUM_FIX=0 was set after apply()" in caplog.text
    assert hf_accum_fix.report().state == "switched off"


class AtTheFirstStep(TrainerCallback):
    def __init__(self, act: Callable[[], object], event: str = "on_step_end") -> None:
        self.act, self.raised = act, ""
        setattr(self, event, self.at)

    def at(self, *args: Any, **kwargs: Any) -> None:
        try:
            self.act()
        except hf_accum_fix.AccumFixError as error:
            self.raised = str(error)


def test_apply_in_mid_training_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = small(Regression(), tmp_path, points(8), max_steps=1)
    callback = AtTheFirstStep(hf_accum_fix.apply)
    trainer.add_callback(callback)
    trainer.train()
    assert "while a Trainer trains" in callback.raised and "revert()" not in caplog.text
    assert is_original() and hf_accum_fix.active_handle() is None
    with hf_accum_fix.apply() as handle:
        assert handle.active


@pytest.mark.parametrize("event", ("on_train_begin", "on_substep_end", "on_step_end"))
def test_revert_in_mid_training_is_warned_of(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training runs on, from wherever it is."""
    handle = hf_accum_fix.apply()
    trainer = small(Regression(), tmp_path, points(16), max_steps=2)
    trainer.add_callback(AtTheFirstStep(handle.revert, event))
    trainer.train()
    assert trainer.state.global_step == 2
    assert [each for each in caplog.messages if "the stock Trainer runs the rest" in each]
    assert is_original() and not any(run["exact"] for run in hf_accum_fix.report().runs[-1:])
