"""A wrapped method is copied, pickled and compared as the method that it stands for, by whatever wrapt is installed."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix.upstream.seams import seams_of

ROOT = Path(__file__).parents[2]
SEAMS = [seam.name for seam in seams_of(None)]
ORIGINALS = {name: vars(Trainer)[name] for name in SEAMS}


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    with hf_accum_fix.apply(quiet=True):
        yield


class Holder(Trainer):
    """A trainer that was never set up and keeps what it is given."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", SEAMS)
def test_a_function_stays_the_one_object(how: str, name: str) -> None:
    """As in stock, where `copy.deepcopy(Trainer.train) is Trainer.train`."""
    assert getattr(Trainer, name) is getattr(Trainer, name) is vars(Trainer)[name]
    for fetched in (getattr(Trainer, name), vars(Trainer)[name]):
        assert COPIES[how](fetched) is fetched


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kept", ["bound", "partial", "function"])
def test_a_trainer_that_keeps_a_method_of_its_own_is_copied(how: str, kept: str) -> None:
    trainer = Holder(None)
    bound = trainer.compute_loss
    trainer.kept = {"bound": bound, "partial": functools.partial(bound), "function": Trainer.compute_loss}[kept]
    copied = COPIES[how](trainer)
    method = copied.kept.func if kept == "partial" else copied.kept
    if kept == "function":
        assert method is Trainer.compute_loss
    else:
        assert method.__self__ is (trainer if how == "copy" else copied)


@pytest.mark.releases
@pytest.mark.thorough
@pytest.mark.parametrize("release", ["1.14.2", "1.17.3"])
def test_the_kernel_and_the_wrapped_loaders_work_by_an_older_wrapt(release: str, tmp_path: Path) -> None:
    """aiobotocore, and so s3fs, pins wrapt below 2."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"wrapt=={release}"], check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    tests = ["upstream/test_patch.py", "test_applying.py", "patch/test_copies.py", "balancing/test_dealing.py"]
    check = f"import wrapt; assert wrapt.__version__ == {release!r}; import pytest, sys; sys.exit(pytest.main())"
    command = [sys.executable, "-c", check, "-q", "-n", "0", "-m", "not releases", *(f"tests/{test}" for test in tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
