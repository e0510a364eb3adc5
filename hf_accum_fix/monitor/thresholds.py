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
#: Chance that 30 readings of any healthy rank are as far from the others'. Audit: 2.2e-4 raises 1.3 false alarms in
#: 1,000 logs of two ranks whose difficulty persists for 100 micro-batches; 3e-5 misses a gradient x1.5 on two ranks.
CHANCE = 1e-4
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

# ---- the loss from log to log (loss_over_time) -----------------------------------------------------------------------

#: Logs in a mean: hard stretches of data pass sooner. Taste.
LOGS = 30
#: Ratio to the mean before, or to the best, that is a jump; to the best that is divergence; to the best of every log in
#: the mean; of two learning rates that is a rise. Taste.
JUMP, FAR_OVER_BEST, BACK, RISE = 1.5, 2.0, 1.2, 1.05
#: Errors of a mean that the loss wanders by itself. Audit: where difficulty persists.
WANDERS = 5.0
#: Logs looked at for a swing, logs from one look to the next, fewest periods in them. Taste.
LOOK, EVERY_LOOK, FEWEST_PERIODS = 64, 32, 5
#: Share of the power that one frequency and its two neighbours have: noise hardly has it twice. Audit.
SHARE = 0.6
#: Relative deviation of the loss that counts; of a period from an epoch that are the same. Taste.
SWING, OF_EPOCH = 0.07, 0.1
#: Logs until a stall is judged, blocks of them that a slope is taken over, logs that are the beginning. Taste.
JUDGED, SLOPES, FIRST = 300, 60, 5
#: Fall of the loss, as a share, that is learning; of the first logs above the rest, and in their standard errors; of a
#: tenth of the logs below the first. Audit: a fine-tune that gains 3 %, a task that is learned late.
LEARNED, ABOVE, ERRORS, FAR_BELOW = 0.05, 0.02, 3.0, 0.2
#: Ratio of a first loss to a guess's that is too large. Taste: two micro-batches that nothing divides make 2.
OVER_A_GUESS = 1.5
#: Fewest evaluations; share of the first loss that a loss has fallen to; gain in accuracy that is one; near 1. Taste.
EVALUATIONS, FALLEN, GAIN, HIGH = 8, 0.7, 0.02, 0.95

# ---- the loss that a Trainer logs (loss.LossCheck) -------------------------------------------------------------------

#: Relative difference of two losses that count as the same; of 16-bit ones; of two factors. Rounding, with room.
SAME_LOSS, SAME_LOSS_16_BIT, SAME_FACTOR = 1e-3, 2e-2, 0.03

# ---- memory ----------------------------------------------------------------------------------------------------------

#: Fewest samples for a decision; fewest steps of growth for an alarm, where memory is not full soon: memory that a
#: collector frees every hundred steps grows in between; steps until memory is full beyond which nobody acts. Taste.
SAMPLES, STEPS_OF_A_LEAK, FAR_AWAY = 30, 250, 1_000_000
#: Total growth that counts as none [bytes], and as a share of the level: the resident set of a healthy process creeps
#: by a few MiB over its first thousand steps. Steps over which a plateau grows by nothing. Measured on torch 2.13.
NO_GROWTH, NO_GROWTH_SHARE, PLATEAU_STEPS = 16 * 2.0**20, 0.002, 1000
#: Of the interval of a slope; share of the blocks that lie above the one before: of noise, half of them do. Audit.
CONFIDENCE, RISING = 0.999, 0.4
#: The later half's pace over the earlier's below which growth comes to rest: the rest of a geometric series is less
#: than twenty times the growth of the later half.
SLOWING = 0.95

# ---- the gradient norm over time (gradient_norm) ---------------------------------------------------------------------

#: Norms that define a usual one; fewest before one that is a spike, and of which some are not finite. Taste.
WINDOW, FEWEST_NORMS = 100, 30
#: Least distance of a spike from the usual, in deviations of the noise, and as a ratio. At 9, log norms that follow
#: Student's distribution of 5 degrees gave 5 spikes in 60,000 simulated steps, normal ones none.
UNUSUAL_NORM, SPIKE = 9.0, 3.0
#: Share of the usual items below which a step is short, and its norm is no spike; share of norms that are not finite
#: beyond which a loss scaler is not why. Taste.
SHORT_STEP, NOT_FINITE = 0.5, 0.05
#: Steps in a block of the drift, blocks kept, fewest that show one; ratios that count, and the share of blocks that lie
#: above the one before as a norm grows steadily. Taste.
DRIFT_BLOCK, DRIFT_BLOCKS, FEWEST_BLOCKS = 100, 500, 5
GROWN, VANISHED, GROWS_STEADILY = 30.0, 1e4, 0.8
#: Clipped steps in a row that are always; ratio of norm to max_norm that is far. Taste.
ALWAYS, FAR_CLIPPED = 1000, 5.0

# ---- BatchNorm, and samples of other ranks ---------------------------------------------------------------------------

#: Samples below which batch statistics cost accuracy. Source: Wu and He 2018, "Group Normalization", figure 1.
SMALL_BATCH = 16
#: Forwards after which running statistics are settled; standard deviations, or ratio of variances less one, by which
#: batches of the same data do not differ, however small. Measured by tests/monitor/test_batch_norm.py.
SETTLED_FORWARDS, UNEVEN = 50, 3.0
#: Hashes kept of a rank's samples; fewest for a judgement; share of them that two ranks must not have in common;
#: readings in a row; share of its own samples that a rank sees twice in an epoch shorter than two readings. Taste.
HASHES, FEWEST_HASHES, SHARED, SHARED_IN_A_ROW, REPEATS = 64, 16, 0.5, 2, 0.05

# ---- logs that are read back (run_summary, watch) --------------------------------------------------------------------

#: A loss of exactly zero after one above this is no loss: a Trainer logs nan so. Taste.
NOT_ZERO = 0.01
#: Ratio of the last tenth of the losses to the best that is divergence, where it is halfway back to the first. Taste.
OVER_THE_BEST = 1.5
#: A ratio of two losses that no other model or data make throughout; that of two steps of one factor, at most. Taste.
A_FACTOR, THE_SAME_FACTOR = 1.8, 1.6
