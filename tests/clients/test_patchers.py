"""unsloth's and axolotl's patches of the Trainer, made as they make them: its source, edited as text and run again.

It is looked for when training begins; before that, apply() refuses to wrap an edition of somebody else's.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix import ForeignPatchError
from tests.numerics.heads import HEADS
from tests.numerics.parity import cut, reference_step, take_step

HEAD = HEADS["bert-mlm"]

Patch = Callable[[pytest.MonkeyPatch], None]


def run_again(source: str, name: str, namespace: dict[str, Any], file: str = "<string>") -> Any:
    """A function of that source, in the namespace of the module that edited it."""
    namespace.update({item: value for item, value in vars(transformers.trainer).items() if item in source})
    exec(compile(textwrap.dedent(source), file, "exec"), namespace)
    return namespace[name]


def patch_as_unsloth(patch: pytest.MonkeyPatch) -> None:
    """As unsloth 2026.10.9 does in models/_utils.py and unsloth_zoo in fast_grad_params.py."""
    namespace = {"__name__": "unsloth.models._utils"}
    fetch, compute = Trainer.get_batch_samples, inspect.getsource(Trainer.compute_loss)
    assert inspect.getsource(fetch).strip().endswith("return batch_samples, num_items_in_batch"), "unsloth would raise"
    again = run_again(inspect.getsource(fetch), "get_batch_samples", namespace)
    again.__name__ = "_unsloth_get_batch_samples"
    patch.setattr(Trainer, "get_batch_samples", again)

    edited, edits = re.subn(r"loss\s*\*=", "loss = loss *", compute)
    assert edits
    patch.setattr(Trainer, "_old_compute_loss", run_again(edited, "compute_loss", namespace), raising=False)
    before = "def _unsloth_pre_compute_loss(self, model, inputs, *args, **kwargs):\n"
    before += "    return self._old_compute_loss(model, inputs, *args, **kwargs)\n"
    patch.setattr(Trainer, "compute_loss", run_again(before, "_unsloth_pre_compute_loss", namespace))

    step = inspect.getsource(Trainer.training_step).replace("def training_step", "def _unsloth_training_step", 1)
    step = run_again(step, "_unsloth_training_step", namespace)

    @functools.wraps(step)
    def settling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, *args, **kwargs)

    patch.setattr(Trainer, "training_step", settling)
    train = Trainer.train

    @functools.wraps(train)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return train(self, *args, **kwargs)

    patch.setattr(Trainer, "train", wrapped)


def patch_as_compiled(patch: pytest.MonkeyPatch) -> None:
    """As source that unsloth writes to a file and imports from there: only the file tells whose it is."""
    source = inspect.getsource(Trainer.training_step)
    file = str(Path("unsloth_compiled_cache") / "Generated.py")
    patch.setattr(Trainer, "training_step", run_again(source, "training_step", {"__name__": "Generated"}, file))


def patch_as_axolotl(patch: pytest.MonkeyPatch) -> None:
    """As axolotl 0.6.0 does in monkeypatch/trainer_grad_accum.py; here only the attribute it leaves tells."""
    source = inspect.getsource(Trainer.training_step)
    patch.setattr(Trainer, "_original_training_step", source, raising=False)
    renamed = source.replace("def training_step(", "def _fixed_training_step(", 1)
    patch.setattr(Trainer, "training_step", run_again(renamed, "_fixed_training_step", {"__name__": "patched"}))


PATCHES = {
    "unsloth": (patch_as_unsloth, "unsloth.models._utils._unsloth_training_step", "unsloth counts the items"),
    "unsloth's compiled cache": (patch_as_compiled, "Generated.training_step", "unsloth counts the items"),
    "axolotl": (patch_as_axolotl, "patched._fixed_training_step", "axolotl from 0.8 on"),
}
each = pytest.mark.parametrize(("patch", "author", "advice"), PATCHES.values(), ids=PATCHES)


@pytest.fixture
def undo() -> Iterator[pytest.MonkeyPatch]:
    """Undone before the residue of a test is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@each
def test_refused_when_training_begins(
    patch: Patch, author: str, advice: str, undo: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handle = hf_accum_fix.apply()
    patch(undo)
    with pytest.raises(ForeignPatchError) as refusal:
        take_step(HEAD, HEAD.samples, 2, 4, "stock", tmp_path)
    assert "Trainer.training_step" in str(refusal.value)
    assert author in str(refusal.value) and advice in str(refusal.value)
    assert "dropped by a later patch" in str(hf_accum_fix.report())
    undo.undo()
    handle.revert()


@each
def test_refused_by_apply_and_exact_where_it_is_allowed(
    patch: Patch, author: str, advice: str, undo: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names in the refusals, allowed one after the other, are all that it takes."""
    patch(undo)
    names: tuple[str, ...] = ()
    while True:
        try:
            handle = hf_accum_fix.apply(allow_foreign=names)
            break
        except ForeignPatchError as error:
            assert advice in str(error)
            (name,) = set(re.findall(r"allow_foreign=\('([^']+)'", str(error))) - set(names)
            names += (name,)
    assert author in names
    reference = reference_step(HEAD, cut(HEAD.samples, 2))
    with handle:
        assert take_step(HEAD, HEAD.samples, 2, 4, "stock", tmp_path).error(reference) <= HEAD.tolerance
    # Theirs alone is wrong, and the subclass stands before it.
    assert take_step(HEAD, HEAD.samples, 2, 4, "stock", tmp_path).error(reference) > 1
    assert take_step(HEAD, HEAD.samples, 2, 4, "trainer", tmp_path).error(reference) <= HEAD.tolerance
