"""What the router losses that the outputs carry are multiplied by inside a loss."""

from __future__ import annotations

from hf_accum_fix.accumulation.evidence.forwards import RouterPair, Seen, weighed_router
from hf_accum_fix.accumulation.evidence.rules import is_close


def router_terms(seen: Seen, configured: RouterPair) -> list[RouterPair]:
    """What the coefficients of the router losses inside a loss that is otherwise a mean may be, likeliest first."""
    if not any(seen.router):
        return [(0.0, 0.0)]
    rests = [seen.loss - call.value for call in seen.calls if call.mean]
    if not rests:
        return [configured, (0.0, 0.0)]
    expected = weighed_router(configured, seen.router)
    nearest = min(rests, key=lambda rest: abs(rest - expected))
    return [fitted_coefficients(nearest, seen, configured) if abs(nearest) > 1e-6 * abs(seen.loss) else (0.0, 0.0)]


def fitted_coefficients(rest: float, seen: Seen, configured: RouterPair) -> RouterPair:
    """What router losses are multiplied by to make the rest of a loss: as configured, else the ``aux_loss`` alone.

    A loss in 16 bits cannot tell so small a rest from its own rounding: there it is as configured.
    """
    router, expected = seen.router, weighed_router(configured, seen.router)
    rounded = seen.dtype.itemsize < 4 and abs(rest - expected) <= seen.rounding * abs(seen.loss)
    if rounded or is_close(rest, expected, 1e-2):
        aux, z = configured
        return (aux if router[0] else 0.0, z if router[1] else 0.0)
    return (rest / router[0] if router[0] else 0.0, 0.0)
