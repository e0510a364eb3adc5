"""Older releases make their masks in the default dtype, which the least float64 does not fit into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.numerics.heads import before


@pytest.fixture(autouse=True)
def masks_of_old_releases() -> Iterator[None]:
    usual = torch.get_default_dtype()
    if before("5.0"):
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)
