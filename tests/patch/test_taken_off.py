"""What removes the patch silently is detected as training starts, and what is on is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import transformers.trainer
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerControl

import hf_accum_fix
from hf_accum_fix import ForeignPatchError
from hf_accum_fix.upstream.seams import seams_of
from tests.numerics.heads import HEADS
from tests.numerics.parity import trainer_of
from tests.patch.toys import INSTALLED, SEAMS, fresh, toy_in

HEAD = HEADS["drops-kwargs"]
ON = "hf-accum-fix: 0.1.0 is on"


@pytest.fixture(autouse=True)
def nothing_applied() -> Iterator[None]:
    """And CallbackHandler left as it was found."""
    assert hf_accum_fix.active_handle() is None
    begin = vars(CallbackHandler)["on_train_begin"]
    yield
    hf_accum_fix.revert()
    assert vars(CallbackHandler)["on_train_begin"] is begin and type(begin) is FunctionType


def made(folder: Path, kind: type = Trainer, **arguments: Any) -> Any:
    """A trainer of one window of four micro-batches."""
    return trainer_of(HEAD, folder, kind, **arguments)


def again(name: str) -> Any:
    """The original method, executed again from its source: what unsloth and axolotl make of it."""
    original = vars(Trainer)[name]
    function = FunctionType(original.__code__, vars(transformers.trainer), name, original.__defaults__)
    function.__kwdefaults__ = original.__kwdefaults__
    return function


@pytest.mark.parametrize("names", [SEAMS, SEAMS[:1], SEAMS[1:]], ids=["all", "train", "all but train"])
def test_methods_that_replaced_ours_train_nothing(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = {name: again(name) for name in names}
    handle = hf_accum_fix.apply(quiet=True)
    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(Trainer, name, originals[name])
        trainer = made(tmp_path)
        with pytest.raises(ForeignPatchError, match="training would be stock again"):
            trainer.train()
        assert trainer.state.global_step == 0 and set(handle.missing()) == set(names)
    made(tmp_path).train()


def test_a_trainer_whose_train_is_its_own_trains(tmp_path: Path) -> None:
    """TRL's PPOTrainer: a loop of its own, which calls none of the wrapped methods, and the callbacks."""

    class Own(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            return "trained"

    class Elses:
        def __init__(self, handler: Any) -> None:
            self.handler = handler

        def train(self) -> Any:
            return self.handler.on_train_begin(None, None, TrainerControl())

    hf_accum_fix.apply(quiet=True)
    trainer = made(tmp_path, Own)
    assert trainer.train() == "trained"
    trainer.callback_handler.callbacks.clear()
    assert isinstance(Elses(trainer.callback_handler).train(), TrainerControl)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return toy_in(tmp_path)


def test_a_class_that_moved_behind_a_module_of_the_old_name_trains_nothing(toy: Path) -> None:
    """And a process that ends without importing the class prints that."""
    (toy / "transformers" / "trainer.py").rename(toy / "transformers" / "training.py")
    (toy / "transformers" / "trainer.py").write_text("from transformers.training import Trainer\n")
    script = """
import hf_accum_fix
handle = hf_accum_fix.apply()
from transformers.training import Trainer
try:
    Trainer().loop()
except hf_accum_fix.SeamError as error:
    print("has moved" in str(error), handle.pending)
"""
    done = fresh(script, toy)
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr.count("hf-accum-fix: NOT on: transformers.trainer was never imported") == 1


def test_a_reloaded_trainer_is_refused_and_patched_by_the_next_apply(toy: Path) -> None:
    script = """
import importlib, transformers.trainer, hf_accum_fix
old = transformers.trainer.Trainer
first = hf_accum_fix.apply()
new = importlib.reload(transformers.trainer).Trainer
def trains(kind):
    try:
        return kind().loop()
    except hf_accum_fix.SeamError as error:
        return "refused" if "reloaded" in str(error) else error
print(old is new, len(first.missing()), trains(new), trains(old))
second = hf_accum_fix.apply()
print(second.active, first.active, second.missing(), trains(new), trains(old))
hf_accum_fix.revert()
print(type(vars(new)["train"]).__name__, type(vars(old)["train"]).__name__, trains(new), trains(old))
"""
    assert fresh(script, toy).stdout.splitlines() == [
        f"False {len(SEAMS)} refused stock",
        "True False () stock refused",
        "function function stock stock",
    ]


REFUSED_TWICE = """
import hf_accum_fix
handle = hf_accum_fix.apply()
for attempt in range(2):
    try:
        from transformers.trainer import Trainer
    except Exception as error:
        print(type(error).__name__, end=" ")
try:
    print(Trainer().loop(), end=" ")
except hf_accum_fix.SeamError as error:
    print("(self, batch)" in str(error), hf_accum_fix.report().state, end=" ")
hf_accum_fix.revert()
print(Trainer().loop())
"""


def test_a_refusal_is_printed_and_is_not_undone_by_importing_again(toy: Path) -> None:
    """transformers makes "are this object's requirements defined correctly?" of it, and scripts go on after that."""
    trainer = toy / "transformers" / "trainer.py"
    [step] = [seam for seam in seams_of(None) if seam.name == "training_step"]
    trainer.write_text(trainer.read_text().replace(f"step(self, {', '.join(step.parameters)})", "step(self, batch)"))
    done = fresh(REFUSED_TWICE, toy)
    assert done.stdout.split() == ["SeamError", "True", "refused", "stock"]
    assert done.stderr.startswith("hf-accum-fix: NOT on: got transformers ")
    assert " with Trainer.training_step(self, batch); expected (self, model, " in done.stderr
    assert done.stderr.count("\n") == 1
    assert fresh(REFUSED_TWICE, toy, HF_ACCUM_FIX_QUIET="1").stderr == ""


SAYS = "import hf_accum_fix, transformers.trainer; "


def test_one_line_per_job_reports_that_it_is_on(toy: Path) -> None:
    again = "apply(); hf_accum_fix.apply(); hf_accum_fix.revert(); hf_accum_fix.apply()"
    printed = fresh(SAYS + "hf_accum_fix." + again, toy).stderr
    assert printed.count("\n") == 1 and printed.startswith(ON) and INSTALLED in printed
    for variables in ({"RANK": "1", "LOCAL_RANK": "0"}, {"HF_ACCUM_FIX_QUIET": "1"}, {"HF_ACCUM_FIX": "0"}):
        assert fresh(SAYS + "hf_accum_fix.apply()", toy, **variables).stderr == ""


RELOADS: dict[str, str] = {
    "applying": "importlib.reload(hf_accum_fix.applying)",
    "anew": "[sys.modules.pop(name) for name in list(sys.modules) if getattr(sys.modules[name], '__file__', None)"
    " and name.partition('.')[0] == 'hf_accum_fix']",
}


@pytest.mark.parametrize("how", RELOADS)
@pytest.mark.parametrize("then", ["revert", "apply"])
def test_a_reload_of_this_package_keeps_the_patch_in_hand(how: str, then: str, toy: Path) -> None:
    script = f"""
import importlib, sys, transformers.trainer, hf_accum_fix, hf_accum_fix.upstream.patch
handle = hf_accum_fix.apply(quiet=True)
{RELOADS[how]}
import hf_accum_fix
import hf_accum_fix.applying as applying
Trainer = transformers.trainer.Trainer
print(handle.active, applying.report().state, all(state.ours for state in applying.report().environment.seams), end=" ")
if {then!r} == "apply":
    print(applying.apply(quiet=True).active, end=" ")
applying.revert()
print(applying.report().state, type(vars(Trainer)["train"]).__name__, handle.active)
"""
    state = ["True", "applied", "True", *["True"] * (then == "apply"), "not", "applied", "function", "False"]
    assert fresh(script, toy).stdout.split() == state


@pytest.mark.parametrize("imported", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_code_that_is_not_of_its_metadata_is_judged_by_itself_and_reported(imported: bool, tmp_path: Path) -> None:
    """4.49.0's dist-info next to the installed code, as a copied environment or an editable install leaves it."""
    folder = tmp_path / "transformers-4.49.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.49.0\n")
    code = transformers.__version__
    script = f"""
import sys
{"import transformers" if imported else ""}
from hf_accum_fix.upstream.environment import detect
from hf_accum_fix.cli import main
found = detect()
print(found.transformers, found.stale_metadata, "transformers" in sys.modules)
main(["doctor"])
"""
    printed = fresh(script, tmp_path).stdout
    first, *rest = printed.splitlines()
    assert first.split() == [code, "4.49.0", str(imported)]
    words = f"apply() fits, but transformers is {code} in its code, 4.49.0 in its metadata; reinstall transformers"
    assert words in " ".join(printed.split())
    assert f"transformers {code}" in rest[0]
