"""Count the routing of a window by forwards, for a router's loss over the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from hf_accum_fix.counting.items import as_weight
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.errors import BY_DESIGN, StandAsideError
from hf_accum_fix.learning.look import errors_of_forward, is_of_forward
from hf_accum_fix.router.router_loss import Form, RouterLoss, one_form

Value = TypeVar("Value")


def count_routing(
    host: Training, router: RouterLoss, batches: Sequence[Any], error: Exception | None
) -> tuple[Tensor, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error.

    The model's load-balancing loss is recognised first, on every rank.

    Raises:
        StandAsideError: recognising it failed on a rank, so that all train as stock.
    """
    contract, device = host.contract, host.world.device
    assert contract is not None
    if router.runs_forwards and host.world.shards:
        lengths = host.all_of(len(batches), error)
        if len(set(lengths)) > 1:
            raise ranks.uneven(dict(enumerate(lengths)))
    if router.form is None or not router.form.settled:
        recognise = partial(router.recognise_among, window=batches, items=contract.items)
        seen, error = _by_forwards(host, router, batches, error, recognise, Form(settled=False))
        forms, troubled = zip(*host.all_of((seen, host.state.told.troubled), error), strict=True)
        if any(troubled):
            raise StandAsideError
        router.form = one_form(forms)
        if why := router.why_mean(contract.has_router_loss):
            host.warn_once("router", f"{host.head}: {why}")

    count = partial(router.count, window=batches, device=device, world_size=host.world.data_ranks)
    return _by_forwards(host, router, batches, error, count, router.nothing(device))


def _by_forwards(
    host: Training,
    router: RouterLoss,
    batches: Sequence[Any],
    error: Exception | None,
    look: Callable[..., Value],
    instead: Value,
) -> tuple[Value, Exception | None]:
    """What ``look(forward, model)`` finds in a window, and this rank's error, raised once the other ranks have it.

    That is the first of ``error`` and of what a forward of the loss or a check of ours raises. A fault in our code is
    contained; the other ranks hear of it by the flag in the window's collective.
    """
    if not batches:
        return instead, error
    try:
        with host.run_counting(batches) as run:
            passed = None if host.contract is None else as_weight(host.zero + 1, host.contract.dtype)

            def forward(inputs: Any) -> Tensor:
                with errors_of_forward():
                    return run.forward(inputs, passed)

            return look(forward=forward, model=run.model), error
    except Exception as caught:
        router.forget()
        if isinstance(caught, BY_DESIGN) or is_of_forward(caught):
            return instead, error or caught
        host.note_trouble("counting the routing of a window", caught)
        return instead, error
