"""Whatever fails while a loss is looked at, the training ends as stock's, to the bit, and says so once.

A fault is raised in each function that looks, at every call: on one rank, and on one or both of two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_accum_fix
from hf_accum_fix.engines import reached
from hf_accum_fix.learning import observe
from hf_accum_fix.weighing import weigh
from tests.losses.cases import several
from tests.losses.models import texts
from tests.losses.seen import Mean, Seen, Texts, full, tokens
from tests.numerics.heads.samples import text
from tests.numerics.parity import applied, pass_over_imports
from tests.ranks import on_ranks
from tests.trainings import Case, Training, loop, train
from tests.trainings import ours as by_ours

#: Where the package looks: attributes by module.
WHERE = {
    "learning.look": "read ways_of_counting", "learning.observe": "splits learn _with_own_constants",
    "learning.learn": "matching_rules", "counting.items": "Items.count", "weighing.weigh": "_ready",
    "weighing.part": "Part.note Part.summed Part.broken", "window.settle": "agree remark",
    "window.host": "labels_of Host.record Host.read", "window.count": "_other_labels _by_term",
    "window.window": "weigh", "overrides.session": "Session.facts",
}  # fmt: skip
FAULTS = [(module, name) for module, names in WHERE.items() for name in names.split()]
CUT = (2, 2)


class PlantedError(Exception):
    pass


def fails(*_: Any, **__: Any) -> Any:
    raise PlantedError("on purpose")


@contextmanager
def faulty(module: str, name: str) -> Iterator[None]:
    """The function raises in every call."""
    holder: Any = importlib.import_module(f"hf_accum_fix.{module}")
    *outer, name = name.split(".")
    for each in outer:
        holder = getattr(holder, each)
    kept = vars(holder)[name]
    setattr(holder, name, fails)
    try:
        yield
    finally:
        setattr(holder, name, kept)


#: Stock divides by G, and all micro-batches have as many targets: stock is right, so that ours has its bits.
EVEN = Case(
    "even", full(tokens), Texts, [text(seed=window, lengths=(6,) * 4, masked=lambda *_: 2) for window in range(2)]
)


class WithBuffer(Texts):
    """DDP shares buffers before a forward, where a rank that runs one more would wait for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


EVEN_OF_TWO = replace(
    EVEN, model=WithBuffer, windows=[text(seed=each, lengths=(6,) * 8, masked=lambda *_: 2) for each in range(2)]
)
#: Stock weights tokens of short micro-batches more.
RAGGED = Case("ragged", full(tokens), Mean, [texts(window)[:4] for window in range(2)])


@pytest.mark.parametrize(("module", "name"), FAULTS, ids=[name for _, name in FAULTS])
def test_on_one_rank(module: str, name: str, tmp_path: Path) -> None:
    for case in (EVEN, RAGGED):
        with applied("stock"):
            stock = train(case, CUT, tmp_path)
        with applied("apply"), faulty(module, name):
            ours = train(case, CUT, tmp_path)
        about = [words for _, words in ours.said if "on purpose" in words]
        assert len(about) == 1 and ours.exact is not True, ours.said
        # What fails after a window was weighted leaves the right gradient.
        if case is EVEN or name not in AFTER:
            assert [*ours.errors] == [*stock.errors] and [*ours.logged] == [*stock.logged]
    # By a loop, whose losses are means over equally many targets, so that dividing by G is right.
    with faulty(module, name):
        ours = loop(EVEN, CUT, by_ours)
    about = [words for _, words in ours.said if "on purpose" in words]
    # What only a Trainer calls does not fail.
    assert len(about) <= 1 and (ours.exact is not True or not about)
    assert max(ours.errors) <= 1e-12 and ours.log_error <= 1e-12


#: These run once the window's losses are weighted.
AFTER = ("Part.summed", "Part.broken", "Host.record", "Host.read", "remark")


def two_terms(s: Seen) -> Tensor:
    return s.tokens + 0.5 * s.classes


TWO_TERMS = Case("two", full(two_terms), lambda: Texts(two_terms), [window[:4] for window in several(2)])


def test_in_a_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its term stays as it is, so that the backward ends; no more than that can be said of the gradient."""
    with applied("apply"):
        whole = train(TWO_TERMS, CUT, tmp_path)
    monkeypatch.setattr(weigh, "_scaled", lambda _, part: weigh._hook(fails, part))
    with applied("apply"):
        ours = train(TWO_TERMS, CUT, tmp_path)
    assert whole.exact and max(whole.errors) <= 1e-9 < max(ours.errors) < 1
    assert ours.exact is False and [words for _, words in ours.said if "on purpose" in words]


def test_on_two_ranks(tmp_path: Path) -> None:
    """Nothing hangs, and stock, which is right here, is not further off.

    A rank that ran out of memory stops the other, outside of a forward, too: it would be waited for.
    """
    found = on_ranks(on_both, str(tmp_path), timeout=200, patience=30)
    for wrong, rows, _ in found:
        assert not wrong
        right, *failing = [words for _, words in rows]
        assert max(error for error, _ in rows) <= 1e-12
        assert right.startswith("yes, to ") and all(each.startswith("not checked: ") for each in failing), rows
    first, second = (raised for *_, raised in found)
    assert second == "MemoryError: on purpose"
    assert first.startswith("RankError: rank 0 stops, because of rank 1: MemoryError: on purpose;")


def on_both(output: str) -> tuple[list[str], list[tuple[float, str]], str]:
    pass_over_imports()
    with applied("stock"):
        stock = train(EVEN_OF_TWO, CUT, Path(output))
    return faults_of_ranks(stock, output), checked(output), out_of_memory_on_the_second(output)


def faults_of_ranks(stock: Training, output: str) -> list[str]:
    """What is wrong on this rank with trainings that have a fault on both, or on the second alone, in words."""
    rank, wrong = dist.get_rank(), []
    for (module, name), where in product(FAULTS, ("both", "second")):
        breaks = where == "both" or rank == 1
        with applied("apply"), faulty(module, name) if breaks else nullcontext():
            ours = train(EVEN_OF_TWO, CUT, Path(output))
        about = [words for _, words in ours.said if "on purpose" in words]
        # The other rank hears of it, unless that was in the last window.
        found = [f"{len(about)} warnings: {ours.said}"] * (len(about) != 1 if breaks else len(ours.said) > 1)
        found += ["called exact"] * (breaks and bool(ours.exact))
        found += [f"off by {ours.errors}, stock by {stock.errors}"] * (max(ours.errors) > max(*stock.errors, 1e-12))
        wrong += [f"{name} on {where}: {each}" for each in found]
    return wrong


def checked(output: str) -> list[tuple[float, str]]:
    """A right training, and some whose second rank chooses other parameters to look at, or none, or raises."""
    choose, rows = reached.choose, []
    for each in (choose, lambda *given: choose(*given)[1:], lambda *_: [], fails):
        reached.choose = each if dist.get_rank() == 1 else choose
        with applied("apply"):
            ours = train(EVEN_OF_TWO, CUT, Path(output))
        rows.append((max(ours.errors), hf_accum_fix.report().to_dict()["runs"][-1]["reached_optimizer"]))
    reached.choose = choose
    return rows


def out_of_memory_on_the_second(output: str) -> str:
    """What this rank raises."""

    def runs_out(*_: Any) -> Any:
        raise MemoryError("on purpose")

    observe.learn = runs_out if dist.get_rank() == 1 else observe.learn
    try:
        with applied("apply"):
            train(EVEN_OF_TWO, CUT, Path(output))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
