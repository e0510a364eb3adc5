"""For test suites of downstream libraries: assert that a trainer's or a loss's gradient is the same at any split.

``pytest_plugins = ["hf_accum_fix.testing"]`` in a conftest.py adds the fixture `invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from hf_accum_fix.applying import active_handle, revert
from hf_accum_fix.verification.report import Kind, VerificationReport
from hf_accum_fix.verification.split_invariance import SplitReport, split_invariance
from hf_accum_fix.verification.verify import verify


def assert_invariant(trainer: Any, **how: Any) -> VerificationReport:
    """Assert that a trainer, as this process trains it, has the full batch's gradient for every split.

    Without ``apply()`` or one of this package's trainer classes this tests the installed release.

    Args:
        trainer: a built trainer of any subclass; its state is restored.
        how: arguments of `verify`; ``with_apply`` defaults to False.

    Returns:
        The report.

    Raises:
        AssertionError: if a split is off, or has no answer; with the report.
    """
    report = verify(trainer, **{"with_apply": False, **how})
    verdict = report.verdict_of(report.active)
    if verdict.kind is not Kind.EXACT:
        raise AssertionError(f"{verdict}\n\n{report}")
    return report


def assert_split_invariant(loss_fn: Callable[..., Tensor], batch: Mapping[str, Any], **how: Any) -> SplitReport:
    """Assert that a loss function has the whole batch's gradient however the batch is split; no Trainer, no model.

    Args:
        loss_fn: ``loss_fn(micro_batch, window)``: the loss of one micro-batch, as handed to ``backward()``; ``window``
            holds the whole batch, from which to take the normaliser.
        batch: tensors [B, ...], some of which require a gradient.
        how: keyword arguments of `split_invariance`, such as ``ranks=(1, 2)`` and ``over_micro_batches="mean"``.

    Returns:
        The report.

    Raises:
        AssertionError: if a split has another gradient; it names the term by its line of code.
        OptionsError: if the batch cannot be split, or the loss is not one number.
    """
    report = split_invariance(loss_fn, batch, **how)
    if not report:
        raise AssertionError(str(report))
    return report


@pytest.fixture
def invariant() -> Iterator[Callable[..., VerificationReport]]:
    """`assert_invariant`; a patch that the test applies is reverted at its end."""
    before = active_handle()
    yield assert_invariant
    handle = active_handle()
    if handle is not None and handle is not before:
        revert()
