"""Every number that the monitors decide by, and where it is from.

*Audit*: chosen on seeds 8101 to 8104 of recipes/monitor_audit.py, so that at most one healthy log in 1,000 raises an
alarm, and judged on others. *Taste*: what nobody would act upon, or everybody would. Else the source is named.
"""

from __future__ import annotations

# ---- a rank that is off (robust.Shifts) ------------------------------------------------------------------------------

#: Readings that are compared. Taste: 30 logs.
COMPARED = 30
#: Readings in a part of these, and the share of the mean difference that every part has to show. Audit: without it,
#: ranks that wander raise 2.7 false alarms in 1,000 logs; with two thirds, a gradient x1.1 is hardly found.
PART, SHOWN = 5, 0.5
#: Chance that 30 readings of any healthy rank are as far from the others'. Audit: a tenth of it misses a gradient x1.5
#: on two ranks.
CHANCE = 2.2e-4
#: Lengths of the blocks that show how far ranks wander, and degrees of freedom of the belief that they do not. Audit.
BLOCKS, BELIEF = (1, 2, 4, 8, 16, 32, 64), 4.0
#: Readings kept; most errors that one of them counts for, so that no single one decides. Taste.
KEPT, MOST_ERRORS = 1000, 60.0
#: Difference of losses, as a share of the mean loss, that counts as none, and the same at the first mean loss: it grows
#: with the square of that loss over the present one, since losses of memorised data differ by any factor. Audit.
LOSS_TOLERANCE, LOSS_TOLERANCE_OF_FIRST = 0.01, 0.001
#: The same of the logarithms of gradient norms. Audit: memorised data leave no gradient.
NORM_TOLERANCE, NORM_TOLERANCE_OF_FIRST = 0.005, 0.002
#: Micro-batches, and steps, of a rank in a judgement: shorter readings are put together. Taste.
FEWEST_MICRO_BATCHES, FEWEST_STEPS = 8, 8
#: Readings in a row in which two ranks have equal losses. Taste: once is coincidence.
SAME_IN_A_ROW = 2

# ---- a rank that lags (pace) -----------------------------------------------------------------------------------------

#: Lag, as a share of the whole step, that counts as none; in seconds: processes of one machine differ by that. Taste.
LAG_TOLERANCE, LAG_TOLERANCE_SECONDS = 0.1, 0.01
#: In tolerances: the most that the lag of one reading counts for, so that one long stall is no lag; how far ranks are
#: believed to wander from reading to reading. Audit.
MOST_LAG, LAG_WANDERS = 5.0, 0.3
#: Share of a reading's longest steps that is left out (evaluations, checkpoints), and fewest steps. Taste.
LEFT_OUT, FEWEST_TIMES = 0.2, 5
