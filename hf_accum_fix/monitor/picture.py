"""Runs in one picture: loss, and gradient norm and accuracy where they were logged. The one file that draws."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_accum_fix.monitor.run_summary import summarise, without_overflow
from hf_accum_fix.monitor.series import LogsError, Run
from hf_accum_fix.monitor.watch import short_names

_PALE, _GRID = 0.25, "0.92"
#: Letters of a name beside which no other has room.
_LONG = 45
#: Label of the lines that are no curve; matplotlib leaves it out of the legend.
_ALARM = "_alarm"
#: Ratio of losses, or norms, from which on a linear axis hides the smaller ones.
_DECADE = 10.0
#: Flags that make opening a link an error, and keep opening a pipe from waiting; Windows has neither.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def drawable() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_picture(runs: Sequence[Run], path: Path) -> None:
    """Draw every run's loss with its band of noise, and one panel each for gradient norm and accuracy.

    Raises:
        LogsError: if the file cannot be written: it is a link, its folder is missing, its ending is no picture's.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = [without_overflow(run) for run in runs]
    summaries = [summarise(run) for run in runs]
    panels = ["loss"]
    panels += ["gradient norm"] if any(each.norm > 0 for each in summaries) else []
    panels += ["accuracy"] if any(each.accuracy for each in summaries) else []
    figure = Figure(figsize=(8, 1 + 2.6 * len(panels)), layout="constrained")
    names = short_names([run.name for run in runs])
    axes = dict(zip(panels, figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], strict=True))
    for number, (run, its) in enumerate(zip(runs, summaries, strict=True)):
        colour = f"C{number % 10}"
        axes["loss"].plot(its.loss.steps, its.loss.values, color=colour, label=_label(names[number]))
        if not math.isnan(its.noise):
            low = [value - 2 * its.noise * abs(value) for value in its.loss.values]
            high = [value + 2 * its.noise * abs(value) for value in its.loss.values]
            axes["loss"].fill_between(its.loss.steps, low, high, color=colour, alpha=_PALE, linewidth=0)
        for step in sorted({step for _, step in its.alarms.values()}):
            axes["loss"].axvline(step, color=colour, linestyle=":", linewidth=1, label=_ALARM)
        if its.not_finite:
            axes["loss"].axvline(its.not_finite[0], color=colour, linestyle="--", linewidth=1, label=_ALARM)
        if its.norm > 0:
            norms = run.series["grad_norm"]
            axes["gradient norm"].plot(norms.steps, norms.values, color=colour, linewidth=1)
        if its.accuracy:
            series = run.series[its.accuracy]
            axes["accuracy"].plot(series.steps, series.values, color=colour, marker=".")
    for name, panel in axes.items():
        _set_axis(panel, name)
    axes["loss"].set_title(
        "loss and twice its noise from log to log; dotted: first alarms; dashed: no longer finite", fontsize=9
    )
    columns = 1 if max(map(len, names)) > _LONG else 2
    figure.legend(loc="outside lower center", fontsize="small", frameon=False, ncols=columns)
    axes[panels[-1]].set_xlabel("optimizer step")
    axes[panels[-1]].xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
    axes[panels[-1]].xaxis.set_major_formatter("{x:,.0f}")
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=120, format=path.suffix.removeprefix(".") or "png")
        # Write to no link and no pipe: we must not overwrite their targets.
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | _NO_LINK, 0o666)
        with open(opened, "wb") as file:  # noqa: PTH123 - a descriptor
            file.truncate()
            file.write(drawn.getvalue())
    except (OSError, ValueError) as error:
        found = f"{path} is a link" if path.is_symlink() else f"{path} could not be written ({error})"
        raise LogsError(
            f"no picture: {found}; expected a place for a new file that ends in .png, .svg or .pdf; "
            "name one by --output, or leave the picture out by --no-picture"
        ) from error


def _set_axis(panel: Any, name: str) -> None:
    """A grid, and plain numbers; a logarithmic axis where a linear one hides the smaller values."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_ylabel(name)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color=_GRID)
    panel.set_axisbelow(True)
    # The lines of alarms have two points, from the bottom to the top.
    values = [float(value) for line in panel.get_lines() if line.get_label() != _ALARM for value in line.get_ydata()]
    values = [value for value in values if math.isfinite(value)]
    if name != "accuracy" and values and min(values) > 0 and max(values) > _DECADE * min(values):
        panel.set_yscale("log")
        few = max(values) > _DECADE**3 * min(values)
        panel.yaxis.set_major_locator(LogLocator(subs=(1,) if few else (1, 2, 5)))
        panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")


def _label(name: str) -> str:
    """A run's name that matplotlib takes neither for a formula nor, with an underscore in front, for a hidden label."""
    return f"\u200b{name}".replace("$", r"\$")
