"""A run in one look: its loss, its noise, its gradients and its alarms; and the ratio of two runs.

Reads logs; imports no torch.

    runs = read_runs(Path("output"))
    print(report(runs))
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_accum_fix.monitor.run_comparison import Comparison, compare
from hf_accum_fix.monitor.run_summary import Summary, in_words, summarise
from hf_accum_fix.monitor.series import LogsError, Run, printable

#: Columns of a terminal; a row of a report: its indent and name, and its words.
_COLUMNS = 80
_ROW = re.compile(r"( +)(\S+(?: \S+)* {2,})?")
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


def findings_between(its: Comparison) -> list[str]:
    """What is wrong with one of two runs; empty where nothing is. A difference alone is no finding."""
    if not its.is_a_factor:
        return []
    return [
        f"{_compared(its)}: one factor throughout points at how the loss is scaled or logged (accumulation steps, "
        "ranks), not at what is learned"
    ]


def report(runs: Sequence[Run], against: str | None = None) -> str:
    """The words of `look`."""
    return look(runs, against).words


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
    compared = [compare(its, summaries[reference]) for place, its in enumerate(summaries) if place != reference]
    found = [f"{its.run}: {line}" for its in summaries for line in findings(its)]
    found += [line for its in compared for line in findings_between(its)]
    observed = [f"{its.run}: {alarm.message}" for its in summaries for alarm in its.findings if alarm.observation]
    undecided += [f"could not compare: {_compared(its)}" for its in compared if not its.steps]
    parts = [_described(its, run) for its, run in zip(summaries, judged, strict=True)]
    if len(judged) > 2 and not named:
        parts.append(f"{names[reference]}: the others are compared with it, the first of them (--against)")
    parts += map(_compared, compared)
    parts += ["\n".join(["observed, which may be intended:", *(f"  {line}" for line in observed)])] if observed else []
    count = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing wrong was found"
    count += ", but not all could be decided" if undecided and not found else ""
    parts.append("\n".join([count, *(f"  {line}" for line in (*found, *undecided))]))
    return Report("\n\n".join(parts), tuple(found), tuple(undecided))


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
    loss, full_name = its.loss, run.name
    rows = [("loss", "none left")]
    if len(loss):
        error = "" if math.isnan(its.last_error) else f" +- {its.last_error:.2g}"
        rows = [("loss", f"{loss.values[0]:.4g} at step {loss.steps[0]:.0f}, {its.last:.4g}{error} last")]
    if its.slope is not None:
        rows.append(("trend", f"{in_words(its.slope)} over the second half"))
    if not math.isnan(its.noise):
        rows.append(("noise", f"{its.noise:.1%} of the loss from log to log"))
    if its.gradients is not None:
        got_norms = its.gradients
        spikes = f"{len(got_norms.spikes)} spike{'s' * (len(got_norms.spikes) != 1)}"
        words = f"median {got_norms.median:.3g}, MAD {got_norms.mad:.2g}, {spikes}"
        where = ", ".join(f"{step:.0f}" for step in got_norms.spikes[:5])
        rows.append(("gradient norm", f"{words} (steps {where})" if where else words))
    rows += [("left out", its.left_out)] if its.left_out else []
    rows += (
        [("shortened", f"means of {run.logs_a_point} logs each, and the noise is theirs")]
        if run.logs_a_point > 1
        else []
    )
    alarms = "; ".join(f"{name}: {count}, first by step {step:.0f}" for name, (count, step) in its.alarms.items())
    rows += [*its.extras, ("alarms", alarms or "none logged")]
    width = max(len(name) for name, _ in rows)
    head = f"{its.run}: {len(loss)} logged loss{'es' * (len(loss) != 1)}" + (
        f" ({full_name})" if full_name != its.run else ""
    )
    return "\n".join([head, *(f"  {name:{width}}  {words}" for name, words in rows)])


def _compared(its: Comparison) -> str:
    head = f"{its.run} against {its.other}: "
    if not its.steps:
        return f"{head}no steps in common"
    norms = "" if math.isnan(its.norms) else f", {its.norms:.4g} times its gradient norm"
    steps = f"{its.steps} equal step{'s' * (its.steps > 1)}"
    return f"{head}{its.ratio:.4g} times its loss ({its.low:.3g} to {its.high:.3g}) at {steps}{norms}"
