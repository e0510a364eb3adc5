"""Which term of a loss is off when a batch is split: its part of the gradient, its divisor and its line of code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_accum_fix.reading.loss_graph import Term, read

#: Where a frame of a recorded call stack stands.
_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)\n\s*(.*)')
#: Frames up to this function are the caller's of the loss.
_CALLER = "_losses"
#: Most characters of a line of code that are shown.
_WIDEST = 100

#: The lines of code that make a term, from the loss function down.
Lines = tuple[str, ...]


class TermShare(NamedTuple):
    """The part in one micro-batch of a term, or of all terms of the same lines."""

    lines: Lines  # those that make it; empty: torch's own alone
    scale: float | None  # product of its factors, times the micro-batch's weight; None: several terms, or unreadable
    gradient: Tensor  # of these terms alone, in one vector


def shares(loss: Tensor, weight: float, gradient: Callable[[], Tensor]) -> list[TermShare]:
    """The terms of the loss of one micro-batch by their lines, which anomaly detection has recorded."""
    terms, by_lines = read(loss, deep=True), dict[Lines, list[Term]]()
    for term in terms:
        by_lines.setdefault(tuple(_lines(term.leaf.metadata.get("traceback_", []))), []).append(term)
    return [TermShare(lines, _scale(its, weight), _alone(its, terms, gradient)) for lines, its in by_lines.items()]


def blame(
    whole: Sequence[Sequence[TermShare]], parts: Sequence[Sequence[TermShare]], tolerance: float
) -> tuple[str, ...]:
    """One line for each term of the loss: off, and why, or right."""
    full, found = dict[Lines, list[TermShare]](), dict[Lines, list[TermShare]]()
    for looks, terms in ((whole, full), (parts, found)):
        for each in (share for look in looks for share in look):
            terms.setdefault(each.lines, []).append(each)
    least = max(float(_sum(each).norm()) for each in full.values()) * tolerance
    return tuple(_verdict(_shown(each), full.get(each, []), found.get(each, []), least) for each in {**full, **found})


def _verdict(where: str, full: Sequence[TermShare], parts: Sequence[TermShare], least: float) -> str:
    expected, got = _sum(full), _sum(parts)
    difference, square = float((got - expected).norm()), float(expected.square().sum())
    if difference <= least:
        return f"right: {where}"
    if not full or not square:
        return f"off: {where}: only micro-batches have this term"
    ratio = float((got * expected).sum()) / square
    parallel = difference**2 - (ratio - 1) ** 2 * square <= 1e-6 * square
    size = f"{ratio:.4g} times the full batch's" if parallel else f"relative error {difference / square**0.5:.2g}"
    return f"off: {where}: {size}; {_why([each.scale for each in full], [each.scale for each in parts])}"


def _why(full: Sequence[float | None], parts: Sequence[float | None]) -> str:
    """What a term's divisors tell."""
    whole, known = full[0], [each for each in parts if each]
    if not whole or not known or None in parts:
        return "its divisor cannot be read, as where its line makes several terms"
    if all(math.isclose(each, whole, rel_tol=1e-5) for each in known):
        return "its divisor is right, so its elements depend on the micro-batch, as by a mean or a norm of its samples"
    shown = ", ".join(f"{1 / each:.6g}" for each in known[:6]) + (", ..." if known[6:] else "")
    same = all(math.isclose(each, known[0], rel_tol=1e-5) for each in known)
    what = "another constant" if same else "a local divisor"
    return f"divided by {1 / whole:.6g} in the full batch, by {shown} in the micro-batches: {what}"


def _sum(shares: Sequence[TermShare]) -> Tensor:
    return sum((each.gradient for each in shares), torch.zeros(1, dtype=torch.float64))


def _shown(lines: Lines) -> str:
    """The outermost and the two innermost lines of code of a term."""
    shown = [*dict.fromkeys([*lines[:1], *lines[-2:]])] or ["the terms together"]
    return " > ".join(each if len(each) < _WIDEST else f"{each[:_WIDEST]}..." for each in shown)


def _scale(terms: Sequence[Term], weight: float) -> float | None:
    if len(terms) > 1 or not terms[0].readable or any(each.learnt for each in terms[0].factors):
        return None
    return weight * math.prod(float(f.value) ** (-1 if f.divides else 1) for f in terms[0].factors)


def _alone(its: Sequence[Term], terms: Sequence[Term], gradient: Callable[[], Tensor]) -> Tensor:
    """The gradient of some terms, with nothing passed to the others."""

    def nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in gradients)

    with ExitStack() as stack:
        for term in terms:
            if not any(term is each for each in its):
                stack.callback(term.top.register_prehook(nothing).remove)
        return gradient()


def _lines(recorded: Sequence[str]) -> Iterator[str]:
    """The lines of a recorded stack from the loss function down, without torch's own."""
    frames: list[Any] = [match for each in recorded if (match := _FRAME.search(each))]
    first = max((at for at, each in enumerate(frames) if each[3] == _CALLER), default=-1)
    for each in frames[first + 1 :]:
        file, line, _, code = each.groups()
        if "/torch/" not in file.replace("\\", "/"):
            yield f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}: {code}"
