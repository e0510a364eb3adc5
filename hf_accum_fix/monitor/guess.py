"""The loss of a guess with all classes equally likely, and a first loss far above it. Pure Python."""

from __future__ import annotations

import math

#: Ratio of a first loss to a guess's that is too large.
OVER_A_GUESS = 1.5


def too_large(loss: float, guess: float) -> str:
    """What to tell of such a loss."""
    return (
        f"the first loss, {loss:.4g}, is {loss / guess:.2g} times the loss of a guess, ln({math.exp(guess):.0f}) = "
        f"{guess:.3g}: a mean that is not divided by the accumulation steps looks like this, see `hf-accum-fix doctor`"
        "; else look at the labels, the tokenizer and the initialisation"
    )
