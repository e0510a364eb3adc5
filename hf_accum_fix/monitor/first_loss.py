"""A first loss far above a guess: nothing was divided by the accumulation steps, labels are off, or the start is bad.

    first, alarms = FirstLoss(), Alarms()
    ...
    alarms.say(first.judge(meter.read(), guess=math.log(vocabulary)))

Imports no torch: `watch` judges logs by it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hf_accum_fix.monitor.alarms import Alarm

if TYPE_CHECKING:
    from hf_accum_fix.monitor.loss import LossReading

#: Ratio of a first loss to a guess's that is too large.
OVER_A_GUESS = 1.5


class FirstLoss:
    """Compare the first loss of a run with the loss of a guess, all classes equally likely."""

    def __init__(self) -> None:
        self._judged = False

    def judge(self, reading: LossReading, guess: float) -> Alarm | None:
        """The alarm that the first reading calls for, if any. Every rank judges alike, without communication.

        Args:
            reading: of a `LossMeter`.
            guess: ln(classes) or ln(vocabulary); nan where there are no classes, or they are not known yet.
        """
        loss = reading.mean
        if self._judged or math.isnan(loss) or not guess > 0:
            return None
        self._judged = True
        if not math.isfinite(loss) or loss <= OVER_A_GUESS * guess:
            return None  # RankLoss tells a loss that is not finite.
        return Alarm("first-loss-above-a-guess", too_large(loss, guess))


def too_large(loss: float, guess: float) -> str:
    """What to tell of such a loss."""
    return (
        f"the first loss, {loss:.4g}, is {loss / guess:.2g} times the loss of a guess, ln({math.exp(guess):.0f}) = "
        f"{guess:.3g}: a mean that is not divided by the accumulation steps looks like this, see `hf-accum-fix doctor`"
        "; else look at the labels, the tokenizer and the initialisation"
    )
