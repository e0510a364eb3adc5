"""What downstream test suites use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_accum_fix
from hf_accum_fix.testing import assert_invariant, invariant
from tests.numerics.heads import before
from tests.verify.trainers import Contrastive, points, small, trainer_of

__all__ = ["invariant"]


@pytest.mark.skipif(before("5.0"), reason="the stock BERT is wrong since 5.0")
def test_a_wrong_trainer_fails_with_the_report(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"off, relative error .*: G times"):
        assert_invariant(trainer_of("bert-classes", tmp_path))
    with hf_accum_fix.apply():
        assert {each.mode for each in assert_invariant(trainer_of("bert-classes", tmp_path)).results} == {"apply()"}


def test_could_not_tell_fails_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="could not tell"):
        assert_invariant(trainer_of("bert-classes", tmp_path, samples=[]))
    with pytest.raises(AssertionError, match="no split can equal"):
        assert_invariant(small(Contrastive(), tmp_path, points(8)))


def test_the_fixture_takes_a_patch_back(invariant: Any, tmp_path: Path) -> None:
    hf_accum_fix.apply()
    assert invariant(trainer_of("bert-classes", tmp_path), splits=[1]).active == "apply()"
