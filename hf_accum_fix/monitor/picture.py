"""Runs in one picture: loss, and gradient norm and accuracy where they were logged. The one file that draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hf_accum_fix.monitor.run_logs import LogsError, Run
from hf_accum_fix.monitor.watch import summarise

_PALE = 0.25
#: Ratio of losses from which on the smaller are not to be told apart on a plain axis.
_DECADE = 10.0


def write_picture(runs: Sequence[Run], path: Path) -> None:
    """Draw every run's loss with the band that its noise makes, and a panel each for gradient norm and accuracy.

    Raises:
        LogsError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LogsError(
            'a picture needs matplotlib; pip install "hf-accum-fix[recipes]", or leave it out by --no-picture'
        ) from error
    summaries = [summarise(run) for run in runs]
    panels = ["loss"]
    panels += ["gradient norm"] if any(each.gradients for each in summaries) else []
    panels += ["accuracy"] if any(each.accuracy for each in summaries) else []
    figure = Figure(figsize=(8, 1 + 2.6 * len(panels)), layout="constrained")
    axes = dict(zip(panels, figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], strict=True))
    for number, (run, its) in enumerate(zip(runs, summaries, strict=True)):
        colour = f"C{number % 10}"
        axes["loss"].plot(its.loss.steps, its.loss.values, color=colour, label=its.run)
        if not math.isnan(its.noise):
            low = [value - 2 * its.noise * abs(value) for value in its.loss.values]
            high = [value + 2 * its.noise * abs(value) for value in its.loss.values]
            axes["loss"].fill_between(its.loss.steps, low, high, color=colour, alpha=_PALE, linewidth=0)
        for step in sorted({step for _, step in its.alarms.values()}):
            axes["loss"].axvline(step, color=colour, linestyle=":", linewidth=1)
        if its.gradients is not None:
            norms = run.series["grad_norm"]
            axes["gradient norm"].plot(norms.steps, norms.values, color=colour, linewidth=1)
        if its.accuracy is not None:
            series = run.series[its.accuracy.name]
            axes["accuracy"].plot(series.steps, series.values, color=colour, marker=".")
    for name, panel in axes.items():
        panel.set_ylabel(name)
    if "gradient norm" in axes:
        axes["gradient norm"].set_yscale("log")
    losses = [value for each in summaries for value in each.loss.values]
    if losses and min(losses) > 0 and max(losses) > _DECADE * min(losses):
        axes["loss"].set_yscale("log")
    axes["loss"].set_title("loss, twice its noise from log to log; dotted: first alarms", fontsize="small")
    axes["loss"].legend(fontsize="small")
    axes[panels[-1]].set_xlabel("optimizer step")
    figure.savefig(path, dpi=120)
