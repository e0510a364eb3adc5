"""Two gloo ranks that live as long as a test, and train in step whatever they are given."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.numerics.parity import pass_over_imports
from tests.random_trainings.compositions import Composition, Fault, installed_once, outcome, stock, told

RANKS = 2
#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 30


class Answer(NamedTuple):
    """What a rank says of a composition: ``well`` if it can go on to the next."""

    verdict: str
    faults: tuple[Fault, ...]
    words: str
    well: bool


class PairOfRanks:
    """``outcome`` of compositions of two ranks; after one that did not end well the next has two new ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> PairOfRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def outcome(self, composition: Composition) -> tuple[tuple[Fault, ...], str]:
        """The faults that any rank found, and what the first one tells."""
        answers = self.answers(composition)
        faults = tuple(dict.fromkeys(fault for answer in answers for fault in answer.faults))
        return faults, "\n".join(dict.fromkeys(answer.words for answer in answers))

    def answers(self, composition: Composition) -> list[Answer]:
        """Of every rank."""
        answers = self._asked(composition)
        if any(fault.kind == "crash" for answer in answers for fault in answer.faults):
            plain = self._asked(composition, stock_alone=True)
            if not all(answer.well for answer in plain):
                return plain
        return answers

    def _asked(self, composition: Composition, *, stock_alone: bool = False) -> list[Answer]:
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((composition, stock_alone))
        answers = []
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                ended = pipe.poll(4 * PATIENCE)
                answers.append(pipe.recv() if ended else _no_answer(f"rank {rank} waits for ever", composition))
            except EOFError:
                answers.append(_no_answer(f"rank {rank} died", composition))
        if not all(answer.well for answer in answers):
            self._end()
        return answers

    def _start(self) -> None:
        self._started += 1
        spawning = multiprocessing.get_context("spawn")
        for rank in range(RANKS):
            here, there = spawning.Pipe()
            process = spawning.Process(
                target=_serve, args=(rank, there, self._folder, f"meeting-{self._started}"), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _end(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


def _no_answer(words: str, composition: Composition) -> Answer:
    return Answer("crash", (Fault("crash", words),), repr(composition), False)


def _serve(rank: int, pipe: Connection, folder: Path, meeting: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", HF_ACCUM_FIX_QUIET="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / meeting}", rank=rank, world_size=RANKS, timeout=patience
    )
    silence = (folder / f"{meeting}-{rank}.log").open("w")
    first = True
    with installed_once(), contextlib.redirect_stdout(silence):
        while True:
            try:
                composition, stock_alone = pipe.recv()
            except EOFError:
                return
            try:
                answer = _stock(composition, folder) if stock_alone else _ours(composition, folder)
            except Exception as error:
                fault = Fault("broken", f"{type(error).__name__}: {error}")
                answer = Answer("broken", (fault,), f"{composition}\n{traceback.format_exc()}", False)
            pipe.send(answer)
            if first and answer.well:
                pass_over_imports()
                first = False


def _ours(composition: Composition, folder: Path) -> Answer:
    found = outcome(composition, folder)
    # A rank that raised may have left the other in a collective of its own.
    return Answer(found.verdict, found.faults, told(composition, found), found.patched is not None)


def _stock(composition: Composition, folder: Path) -> Answer:
    trains = stock(composition.case(), composition, folder) is not None
    return Answer("stock trains" if trains else "both raise", (), repr(composition), trains)
