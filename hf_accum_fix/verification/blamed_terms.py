"""Which term of a loss is off when a batch is split: its part of the gradient, its divisor and its line of code."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_accum_fix.accumulation.loss_graph import Term, read

#: Where a frame of a recorded call stack stands.
_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)\n\s*(.*)')
#: Frames up to this function are the caller's of the loss.
_CALLER = "_losses"
#: Most characters of a line of code that are shown.
_WIDEST = 100


class TermShare(NamedTuple):
    """A term's part of one micro-batch.

    Attributes:
        place: the lines of code that make it, from the loss function down, and its number among those of one line.
        name: of its reduction in the autograd graph.
        scale: the product of its factors, times the micro-batch's weight; None: it has several, or they cannot be read.
        gradient: of this term alone, in one vector.
    """

    place: tuple[str, ...]
    name: str
    scale: float | None
    gradient: Tensor

    @property
    def line(self) -> tuple[str, ...]:
        """Its place without the number."""
        return self.place[:-1]


def shares(loss: Tensor, weight: float, gradient: Callable[[], Tensor]) -> list[TermShare]:
    """The terms of the loss of one micro-batch, made under anomaly detection, which records lines of code."""
    terms = read(loss, deep=True)
    places = [_place(term.leaf) for term in terms]
    return [
        TermShare(place, its[0].name, _scale(its, weight), _alone(its, terms, gradient))
        for place, its in _grouped(places, terms).items()
    ]


def blame(
    whole: Sequence[Sequence[TermShare]], parts: Sequence[Sequence[TermShare]], tolerance: float
) -> tuple[str, ...]:
    """One line for each term of the loss: off, and why, or right."""
    looks = [*whole, *parts]
    counts: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for look in looks:
        for line, number in Counter(each.line for each in look).items():
            counts[line].add(number)
    # Terms of a loop are one: each micro-batch has another number of them.
    merged = {line for line, numbers in counts.items() if len(numbers) > 1}
    full, found = _by_place(whole, merged), _by_place(parts, merged)
    norms = [float(_sum(each).norm()) for each in full.values()]
    places = {**full, **found}
    several = Counter(place[:-1] for place in places)
    return tuple(
        _line(_shown(place, several[place[:-1]]), full.get(place, []), found.get(place, []), max(norms) * tolerance)
        for place in places
    )


def _line(where: str, full: Sequence[TermShare], parts: Sequence[TermShare], least: float) -> str:
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
    if len(full) > 1:
        return "its line makes several terms, of other number in each micro-batch"
    if not whole or not known or None in parts:
        return "its divisor cannot be read"
    shown = ", ".join(f"{1 / each:.6g}" for each in known[:6]) + (", ..." if known[6:] else "")
    words = f"divided by {1 / whole:.6g} in the full batch, by {shown} in the micro-batches"
    if all(math.isclose(each, whole, rel_tol=1e-5) for each in known):
        return "its divisor is right, so its elements depend on the micro-batch, as by a mean or a norm of its samples"
    same = all(math.isclose(each, known[0], rel_tol=1e-5) for each in known)
    return f"{words}: {'another constant' if same else 'a local divisor'}"


def _grouped(places: Sequence[tuple[str, ...]], terms: Sequence[Term]) -> dict[tuple[str, ...], list[Term]]:
    found: dict[tuple[str, ...], list[Term]] = {}
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    for place, term in zip(places, terms, strict=True):
        # Several terms of one line are numbered.
        number = "" if not place else str(seen[place])
        seen[place] += 1
        found.setdefault((*place, number), []).append(term)
    return found


def _by_place(
    looks: Sequence[Sequence[TermShare]], merged: Container[tuple[str, ...]]
) -> dict[tuple[str, ...], list[TermShare]]:
    found: dict[tuple[str, ...], list[TermShare]] = {}
    for look in looks:
        for each in look:
            found.setdefault((*each.line, "") if each.line in merged else each.place, []).append(each)
    return found


def _sum(shares: Sequence[TermShare]) -> Tensor:
    return sum((each.gradient for each in shares), torch.zeros(1, dtype=torch.float64))


def _shown(place: tuple[str, ...], of_line: int) -> str:
    """The outermost and the two innermost lines of code of a term."""
    lines = [*dict.fromkeys([*place[:1], *place[:-1][-2:]])] if place[:-1] else ["the terms together"]
    number = f" (term {int(place[-1]) + 1} of this line)" if of_line > 1 and place[-1] else ""
    return " > ".join(each if len(each) < _WIDEST else f"{each[:_WIDEST]}..." for each in lines) + number


def _scale(terms: Sequence[Term], weight: float) -> float | None:
    if len(terms) > 1 or not terms[0].readable or any(each.learnt for each in terms[0].factors):
        return None
    return weight * math.prod(float(f.value) ** (-1 if f.divides else 1) for f in terms[0].factors)


def _alone(its: Sequence[Term], terms: Sequence[Term], gradient: Callable[[], Tensor]) -> Tensor:
    """The gradient of some terms, with nothing passed to the others."""
    with ExitStack() as stack:
        for term in terms:
            if not any(term is each for each in its):
                stack.callback(term.top.register_prehook(_nothing).remove)
        return gradient()


def _nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


def _place(node: Any) -> tuple[str, ...]:
    """The lines that made a node, from the loss function down, without torch's own."""
    return tuple(_frames(node.metadata.get("traceback_", [])))


def _frames(recorded: Sequence[str]) -> Iterator[str]:
    frames = [match for each in recorded if (match := _FRAME.search(each))]
    first = max((at for at, each in enumerate(frames) if each[3] == _CALLER), default=-1)
    for each in frames[first + 1 :]:
        file, line, _, code = each.groups()
        if "/torch/" not in file.replace("\\", "/"):
            yield f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}: {code}"
