"""A run in one look, once or again and again: its loss, its gradients and its alarms; and the ratio of two runs.

Reads logs; imports no torch.

    print(look(read_runs(Path("output"))).words)
    follow([Path("output")])                         # until Ctrl-C; needs rich
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from hf_accum_fix.monitor.run_logs import Logs
from hf_accum_fix.monitor.run_summary import Summary, summarise
from hf_accum_fix.monitor.series import LogsError, Run, printable

#: Columns of a terminal; a row of a report: its indent and name, and its words.
_COLUMNS = 80
_ROW = re.compile(r"( +)(\S+(?: \S+)* {2,})?")
#: A ratio of two losses that no other model or data make throughout; that of two steps of one factor, at most.
_A_FACTOR, _THE_SAME = 1.8, 1.6
_FACTOR = (
    "one factor throughout points at how the loss is scaled or logged (accumulation steps, ranks), not at what is "
    "learned"
)
#: Most letters of a run's name in a picture and a comparison.
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Report:
    """The report on some runs.

    Attributes:
        words: all of it.
        findings: what is wrong with any of them.
        undecided: what could not be read or compared.
    """

    words: str
    findings: tuple[str, ...]
    undecided: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1: something is wrong; 3: else, something is undecided; 0: neither."""
        return 1 if self.findings else 3 if self.undecided else 0


def findings(its: Summary) -> list[str]:
    """What is wrong with a run; empty where nothing is."""
    found = [alarm.message for alarm in its.findings if not alarm.observation]
    return found + [
        f"{name}: {count} alarm{'s' * (count > 1)}, the first by step {step:.0f}"
        for name, (count, step) in its.alarms.items()
    ]


@dataclass(frozen=True)
class Ratio:
    """The ratio of one run's losses to another's, at the steps that both logged a loss at that is no zero.

    Attributes:
        steps: how many.
        of_losses: its median; nan without such a step.
        is_a_factor: whether one loss is a multiple of the other throughout, as where it is scaled or logged otherwise.
        words: all of it.
    """

    steps: int
    of_losses: float
    is_a_factor: bool
    words: str


def ratio(one: Summary, other: Summary) -> Ratio:
    """The ratio of two runs' losses at equal steps; in words, that of their median gradient norms too."""
    mine, theirs = (dict(zip(each.loss.steps, each.loss.values, strict=True)) for each in (one, other))
    found = sorted(mine[step] / theirs[step] for step in mine.keys() & theirs.keys() if theirs[step])
    head, steps = f"{one.run} against {other.run}: ", f"{len(found)} equal step{'s' * (len(found) > 1)}"
    if not found:
        return Ratio(0, math.nan, False, f"{head}no steps in common")
    low, middle, high = found[len(found) // 10], median(found), found[-1 - len(found) // 10]
    norms = one.norm / other.norm
    of_norms = "" if math.isnan(norms) else f", {norms:.4g} times its gradient norm"
    words = f"{head}{middle:.4g} times its loss ({low:.3g} to {high:.3g}) at {steps}{of_norms}"
    is_a_factor = low > 0 and max(middle, 1 / middle) > _A_FACTOR and high < _THE_SAME * low
    return Ratio(len(found), middle, is_a_factor, words)


def within(text: str, columns: int = _COLUMNS) -> str:
    """The text in lines of at most so many letters; what does not fit stands below, further in."""
    lines = []
    for line in text.split("\n"):
        row = _ROW.match(line)
        words = len(row[0]) if row and row[2] else 0
        indent = " " * (words if 0 < words < columns // 2 else 2 + len(row[1] if row else ""))
        lines += textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def look(
    runs: Sequence[Run],
    against: str | None = None,
    unread: Sequence[str] = (),
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Each run in words, and compared with the reference run; and what is wrong with any, with which the words end.

    Args:
        runs: that were read.
        against: name of the reference run, in full or shortened; None: the first, as where there is no run of this
            name, which is undecided then.
        unread: what could not be read, in words.
        progress: is told what is being done.

    Raises:
        LogsError: if no run can be judged.
    """
    undecided = [f"could not read: {line}" for line in unread]
    names = short_names([run.name for run in runs])
    summaries, judged = list[Summary](), list[Run]()
    for number, (run, name) in enumerate(zip(runs, names, strict=True), start=1):
        progress(f"judging run {number} of {len(runs)}")
        try:
            summaries.append(replace(summarise(run), run=name))
            judged.append(run)
        except (ArithmeticError, ValueError) as error:
            undecided.append(f"could not judge: {name} ({type(error).__name__}: {error})")
    if not judged:
        raise LogsError("; ".join(undecided))
    progress("comparing runs")
    names = [its.run for its in summaries]
    named = [place for place, run in enumerate(judged) if against in (names[place], run.name)]
    if against is not None and not named:
        wanted = f"got {printable(against)} to hold the others against; expected one of {', '.join(names)}"
        undecided.append(f"could not compare: {wanted}")
    reference = named[0] if named else 0
    compared = [ratio(its, summaries[reference]) for place, its in enumerate(summaries) if place != reference]
    found = [f"{its.run}: {line}" for its in summaries for line in findings(its)]
    found += [f"{its.words}: {_FACTOR}" for its in compared if its.is_a_factor]
    observed = [f"{its.run}: {alarm.message}" for its in summaries for alarm in its.findings if alarm.observation]
    undecided += [f"could not compare: {its.words}" for its in compared if not its.steps]
    parts = [_described(its, run) for its, run in zip(summaries, judged, strict=True)]
    if len(judged) > 2 and not named:
        parts.append(f"{names[reference]}: the others are compared with it, the first of them (--against)")
    parts += [its.words for its in compared]
    parts += ["\n".join(["observed, which may be intended:", *(f"  {line}" for line in observed)])] if observed else []
    count = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing wrong was found"
    count += ", but not all could be decided" if undecided and not found else ""
    parts.append("\n".join([count, *(f"  {line}" for line in (*found, *undecided))]))
    return Report("\n\n".join(parts), tuple(found), tuple(undecided))


def followable() -> bool:
    """Whether rich is installed."""
    return find_spec("rich") is not None


def follow(
    paths: Sequence[Path], against: str | None = None, seconds: float = 5.0, sleep: Callable[[float], None] = time.sleep
) -> Report:
    """Show the report, and read what has been appended every so many seconds, until it is interrupted.

    Logs that are not there yet, or are being written, are waited for.

    Args:
        paths: as `read_runs` takes them.
        against: as in `look`.
        seconds: from one reading to the next.
        sleep: waits.

    Returns:
        The last complete reading.

    Raises:
        LogsError: if it is interrupted before any logs could be read.
    """
    found: Report | None = None
    logs, before = Logs(grow=True), list[Run]()
    unread_before: list[str] = []
    missing = LogsError("interrupted before the logs were read; expected one complete reading")
    try:
        from rich.live import Live
        from rich.text import Text

        with Live(Text("reading"), auto_refresh=False) as live:
            while True:
                try:
                    unread: list[str] = []
                    runs = logs.read_all(paths, unread)
                    # Runs whose logs have not grown are the same objects.
                    if found is None or [*map(id, runs)] != [*map(id, before)] or unread != unread_before:
                        found = look(runs, against, unread)
                    before, unread_before = runs, unread
                    shown = within(found.words)
                except LogsError as error:
                    missing = error
                    shown = within(f"waiting: {error}")
                shown = f"{shown}\n\n{time.strftime('%H:%M:%S')}, every {seconds:g} s; Ctrl-C ends"
                live.update(Text(shown), refresh=True)
                sleep(seconds)
    except KeyboardInterrupt:
        if found is None:
            raise missing from None
        return found


def short_names(names: Sequence[str]) -> list[str]:
    """Names of runs without the folders that all have in common, of 60 letters at most, and no two alike."""
    places, labels = zip(*(name.partition(": ")[::2] for name in names), strict=True)
    parts = [place.rstrip("/").split("/") for place in places]
    while min(map(len, parts)) > 1 and len({its[0] for its in parts}) == 1:
        parts = [its[1:] for its in parts]
    found: list[str] = []
    for its, label in zip(parts, labels, strict=True):
        name = "/".join(its) + (f": {label}" if label else "")
        kept, number = _LONGEST_NAME // 2 - 2, 1
        name = short = name if len(name) <= _LONGEST_NAME else f"{name[:kept]}...{name[-kept:]}"
        while short in found:
            number += 1
            short = f"{name} ({number})"
        found.append(short)
    return found


def _described(its: Summary, run: Run) -> str:
    width, count = max(len(name) for name, _ in its.rows), len(its.loss)
    head = f"{its.run}: {count} logged loss{'es' * (count != 1)}" + f" ({run.name})" * (run.name != its.run)
    return "\n".join([head, *(f"  {name:{width}}  {words}" for name, words in its.rows)])
