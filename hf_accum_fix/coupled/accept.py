"""Where a coupled loss can be cut: tried on two micro-batches, joined and cut, before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.join import Split, splits
from hf_accum_fix.accumulation.look import LossRun
from hf_accum_fix.accumulation.noise import WithoutNoise
from hf_accum_fix.coupled.cuts import nearest_to_the_loss
from hf_accum_fix.coupled.whole_window import WholeWindow
from hf_accum_fix.errors import UnsupportedSetupError

#: Relative difference of gradients that rounding explains, by bytes of a parameter.
_TOLERANCE = {8: 1e-9, 4: 1e-3}
#: How many cuts of a loss are tried.
_TRIES = 4


def accepted(
    run: LossRun, batches: Sequence[Any], given: Mapping[str, nn.Module], head: str
) -> tuple[Mapping[str, nn.Module], bool]:
    """The modules at which cutting a loss is exact: those given, or of those searched the nearest to the loss.

    The second value is False where that cannot be shown of those given: two micro-batches joined do not run, or have
    other vectors than each.

    Raises:
        UnsupportedSetupError: if there are none, or those that were searched cannot be shown to be right.
    """
    split = next((each for each in splits(batches) if each.blocks == 1), None)
    passed, failure = set[str](), None
    for _ in range(1 if given else _TRIES):
        with WithoutNoise(alike=False), torch.enable_grad():
            loss = partial(run.forward, dict(batches[0]), None)
            modules = given or nearest_to_the_loss(run.model, loss, sample_count(batches[0]), passed)
            try:
                shows = modules and split is not None and _try(run, split, WholeWindow(modules), head)
            except UnsupportedSetupError as error:
                passed |= {*modules}
                failure = failure or error
                continue
        if not modules:
            break
        if given or shows:
            return modules, bool(shows)
        raise UnsupportedSetupError(
            f"got coupled_loss='exact' for {head}, whose loss was found to be cut at {', '.join(modules)}, which "
            "two micro-batches joined cannot show; expected modules known to return one vector per sample; name "
            "them, as in coupled=('text_projection',)"
        )
    raise failure or UnsupportedSetupError(
        f"got coupled_loss='exact' for {head}, no module of which returns one vector per sample that its loss reaches; "
        "expected one or more; name them, as in coupled=('text_projection',)"
    )


def _try(run: LossRun, split: Split, window: WholeWindow, head: str) -> bool:
    """Raise an error unless two micro-batches, cut, have loss and gradient of both as one; False: not comparable."""
    at = ", ".join(name or "the model" for name in window.modules)
    try:
        loss, wanted = _gradient(run, split.whole)
        window.collect([split.whole], lambda batch: run.forward(batch, None))
        joined = window.kept
        window.collect([split.one, split.other], lambda batch: run.forward(batch, None))
        pairs = [(each, torch.cat(window.kept.get(key, [each[:0]]))) for key, [each] in joined.items()]
    except RuntimeError:
        # Twice the samples may not fit, or rows of one have another shape.
        return False
    tolerance = _TOLERANCE.get(wanted.element_size(), 5e-2)
    if not all(a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance) for a, b in pairs):
        return False
    found, value = torch.zeros_like(wanted), 0.0
    for place, batch in enumerate((split.one, split.other)):
        try:
            with window.micro_batch(place):
                value, gradient = _gradient(run, window.inputs(batch))
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedSetupError(
                f"got coupled_loss='exact' for {head}, whose loss fails on the vectors of a window at {at} ({error}); "
                "expected samples to reach it through these modules and labels alone; name others in coupled="
            ) from error
        found += gradient / 2
    off = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not (off <= tolerance and abs(value - loss) <= tolerance * abs(loss)):
        raise UnsupportedSetupError(
            f"got coupled_loss='exact' for {head}, whose loss cut at {at} is {value:g} instead of {loss:g}, and whose "
            f"gradient is {off:.2g} off; expected modules through which alone samples reach the loss; name others in "
            "coupled="
        )
    return True


def _gradient(run: LossRun, batch: Any) -> tuple[float, Tensor]:
    """Loss and gradient of a batch, all parameters in a row."""
    trained = [each for each in run.model.parameters() if each.requires_grad]
    loss = run.forward(dict(batch), None)
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    both = zip(trained, found, strict=True)
    return float(loss.detach()), torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in both]
    )
