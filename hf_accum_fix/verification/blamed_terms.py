"""Which term of a loss is off when a batch is split: its part of the gradient, and its line of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.reading.loss_graph import Term, read

#: Where a frame of a recorded call stack stands.
_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)\n\s*(.*)')
#: Frames up to this function are the caller's of the loss.
_CALLER = "_losses"
#: Most characters of a line of code that are shown.
_WIDEST = 100

#: The lines of code that make a term, from the loss function down; empty: torch's own alone.
Lines = tuple[str, ...]


def by_lines(losses: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> dict[Lines, Tensor]:
    """The gradient of all terms of the same lines, which anomaly detection has recorded, over some micro-batches.

    Args:
        losses: that of each micro-batch, and what takes its gradient, in one vector.
    """
    found = dict[Lines, Tensor]()
    for loss, gradient in losses:
        terms, groups = read(loss), dict[Lines, list[Term]]()
        for term in terms:
            groups.setdefault(tuple(_lines(term.leaf.metadata.get("traceback_", []))), []).append(term)
        for lines, its in groups.items():
            alone = _alone(its, terms, gradient)
            found[lines] = found[lines] + alone if lines in found else alone
    return found


def blame(whole: Mapping[Lines, Tensor], parts: Mapping[Lines, Tensor], tolerance: float) -> tuple[str, ...]:
    """One line for each term of the loss: off, and by how much, or right."""
    least = max(float(each.norm()) for each in whole.values()) * tolerance
    return tuple(_verdict(_shown(each), whole.get(each), parts.get(each), least) for each in {**whole, **parts})


def _verdict(where: str, expected: Tensor | None, got: Tensor | None, least: float) -> str:
    if expected is None or not expected.any():
        return f"off: {where}: only micro-batches have this term"
    got = torch.zeros_like(expected) if got is None else got
    difference, square = float((got - expected).norm()), float(expected.square().sum())
    if difference <= least:
        return f"right: {where}"
    ratio = float((got * expected).sum()) / square
    parallel = difference**2 - (ratio - 1) ** 2 * square <= 1e-6 * square
    size = f"{ratio:.4g} times the full batch's" if parallel else f"relative error {difference / square**0.5:.2g}"
    return f"off: {where}: {size}"


def _shown(lines: Lines) -> str:
    """The outermost and the two innermost lines of code of a term."""
    shown = [*dict.fromkeys([*lines[:1], *lines[-2:]])] or ["the terms together"]
    return " > ".join(each if len(each) < _WIDEST else f"{each[:_WIDEST]}..." for each in shown)


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
