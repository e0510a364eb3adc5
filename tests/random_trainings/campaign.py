"""Many random trainings, each out of one seed: ``python -m tests.random_trainings.campaign --draws 10000``.

Prints how many were drawn, and how many were silent, worse than stock, or crashed, with the seed of each; every
training is a line of the file. A run that is broken off is gone on with by the same command, which passes over what
the file holds. ``--draws 1 --seed 17 --kind loop --tell`` runs one again and tells all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_ACCUM_FIX_QUIET", "1")

from tests.numerics.parity import pass_over_imports
from tests.random_trainings.compositions import Composition, compositions, installed_once, outcome, told
from tests.random_trainings.pair_of_ranks import PairOfRanks

KINDS = ("one", "two", "loop")
FAULTS = ("silent", "worse", "crash", "broken")
#: A training that takes longer has hung [s]; two ranks, and the start of a worker, have patience of their own.
PATIENCE = 240
#: Trainings after which a worker lets garbage be collected.
BETWEEN_COLLECTIONS = 200

Line = dict[str, Any]


def drawn(kind: str, seed: int) -> Composition:
    """The same for ever, as long as the parts are."""
    return compositions(random.Random(f"{kind} {seed}").choice, kind)


# --- a worker -----------------------------------------------------------------------------------------------------


def run_all(kind: str, seeds: Sequence[int], folder: Path) -> Iterator[Line]:
    """Train what each seed draws."""
    training = _on_two_ranks if kind == "two" else _in_this_process
    with training(folder) as run:
        for number, seed in enumerate(seeds):
            composition, begun = drawn(kind, seed), time.perf_counter()
            try:
                line = run(composition)
            except Exception as error:
                faults = [["broken", f"{type(error).__name__}: {error}"]]
                line = {"verdict": "broken", "faults": faults, "told": traceback.format_exc()}
            seconds = round(time.perf_counter() - begun, 3)
            yield {"kind": kind, "seed": seed, **line, "seconds": seconds, "composition": asdict(composition)}
            if number % BETWEEN_COLLECTIONS == 0:
                gc.collect()


Run = Callable[[Composition], Line]


@contextlib.contextmanager
def _in_this_process(folder: Path) -> Iterator[Run]:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("hf_accum_fix").propagate = False
    silence = (folder / f"{os.getpid()}.log").open("w")

    def run(composition: Composition) -> Line:
        found = outcome(composition, folder)
        line: Line = {"verdict": found.verdict, "faults": [list(fault) for fault in found.faults]}
        for name, training in (("ours", found.patched), ("stock", found.stock)):
            if training is not None:
                line[name] = [float(f"{error:.2e}") for error in training.errors]
        if found.patched is not None:
            line["exact"], line["warned"] = found.patched.exact, [words for _, words in found.patched.said]
        return {**line, "told": told(composition, found)} if found.faults else line

    with installed_once(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        # Else every training collects what the imports have left.
        run(Composition())
        pass_over_imports()
        yield run


@contextlib.contextmanager
def _on_two_ranks(folder: Path) -> Iterator[Run]:
    with PairOfRanks(Path(tempfile.mkdtemp(dir=folder))) as pair:

        def run(composition: Composition) -> Line:
            answers = pair.answers(composition)
            faults = dict.fromkeys(fault for answer in answers for fault in answer.faults)
            verdict = next((answer.verdict for answer in answers if answer.faults), answers[0].verdict)
            line: Line = {"verdict": verdict, "faults": [list(fault) for fault in faults]}
            line["warned"] = answers[0].words.splitlines()
            return {**line, "told": "\n".join(answer.words for answer in answers)} if faults else line

        yield run


def _work(kind: str, seeds: Sequence[int], folder: Path, pipe: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):
        for line in run_all(kind, seeds, folder):
            pipe.send(line)


# --- all workers --------------------------------------------------------------------------------------------------


class Workers:
    """Processes that train; one that dies or hangs costs the seed it was at, and another goes on behind that."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self._working: dict[Connection, tuple[Any, list[int], float]] = {}

    def lines(self, seeds: Sequence[int], workers: int) -> Iterator[Line]:
        """Of every seed, in no order."""
        try:
            for worker in range(workers):
                self._start([*seeds[worker::workers]])
            while self._working:
                for pipe in wait([*self._working], timeout=5):
                    assert isinstance(pipe, Connection)
                    process, left, _ = self._working[pipe]
                    try:
                        line = pipe.recv()
                    except EOFError:
                        yield from self._lost(pipe, "its process died")
                        continue
                    left.remove(line["seed"])
                    self._working[pipe] = process, left, time.monotonic()
                    yield line
                for pipe, (_, _, heard) in [*self._working.items()]:
                    if time.monotonic() - heard > PATIENCE:
                        yield from self._lost(pipe, "it hangs")
        finally:
            for process, _, _ in self._working.values():
                process.kill()

    def _start(self, seeds: list[int]) -> None:
        if not seeds:
            return
        spawning = multiprocessing.get_context("spawn")
        here, there = spawning.Pipe(duplex=False)
        # Two ranks are processes of a worker, which a daemon may not have.
        process = spawning.Process(
            target=_work, args=(self._kind, [*seeds], self._folder, there), daemon=self._kind != "two"
        )
        process.start()
        there.close()
        self._working[here] = process, seeds, time.monotonic()

    def _lost(self, pipe: Connection, words: str) -> Iterator[Line]:
        process, left, _ = self._working.pop(pipe)
        process.kill()
        process.join()
        pipe.close()
        if left:
            at, *others = left
            composition = asdict(drawn(self._kind, at))
            fault = {"verdict": "crash", "faults": [["crash", words]]}
            yield {"kind": self._kind, "seed": at, **fault, "composition": composition}
            self._start(others)


# --- what was found -----------------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """What a file holds; a last line that was broken off is left out."""
    lines = []
    for words in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(words))
    return lines


def table(lines: Sequence[Line], *, seeds: int = 10) -> str:
    """By kind of training; then the seeds of each kind of fault, and the parts that most of them have."""
    verdicts = dict.fromkeys(["exact", "exact, warned of", "said", "refused", "both raise"])
    columns = ["drawn", *FAULTS, *verdicts]
    rows = [["", *columns]]
    for kind in KINDS:
        of_kind = [line for line in lines if line["kind"] == kind]
        # A training that is both silent and worse is counted under both.
        found = Counter(
            each for line in of_kind for each in {fault for fault, _ in line["faults"]} or {line["verdict"]}
        )
        if of_kind:
            rows.append([kind, str(len(of_kind)), *(str(found[column]) for column in columns[1:])])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    words = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    by_fault = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        for fault in dict.fromkeys(fault for fault, _ in line["faults"]):
            by_fault[fault, line["kind"]].append(line)
    for (fault, kind), faulty in sorted(by_fault.items()):
        first = ", ".join(str(line["seed"]) for line in faulty[:seeds])
        words.append(f"{fault}, {kind}: {first}{', ...' if len(faulty) > seeds else ''}")
        for part in ("head", "override"):
            of_part = Counter(line["composition"][part] for line in faulty).most_common(6)
            words.append(f"  by {part}: {', '.join(f'{name} {count}' for name, count in of_part)}")
    return "\n".join(words)


def campaign(kind: str, seeds: Sequence[int], workers: int, out: TextIO, folder: Path) -> Iterator[Line]:
    """Train what seeds draw, each a line of a file as soon as it is known."""
    for line in Workers(kind, folder).lines(seeds, workers):
        out.write(json.dumps(line) + "\n")
        out.flush()
        yield line


def main(given: Sequence[str] | None = None) -> int:
    """0 if no fault was found, now or by what the file holds of these seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_trainings.campaign", description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, help="trainings of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one rank, two ranks, a loop; repeatable")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of two ranks each a pair")
    parser.add_argument("--out", type=Path, default=Path("campaign.jsonl"), help="a line a training; added to")
    parser.add_argument("--tell", action="store_true", help="print every fault as it is found, in full")
    options = parser.parse_args(given)
    seeds, kinds = range(options.seed, options.seed + options.draws), options.kind or list(KINDS)
    held = [line for line in read(options.out) if line["seed"] in seeds and line["kind"] in kinds]
    done = {(line["kind"], line["seed"]) for line in held}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists() and options.out.read_bytes()[-1:] not in (b"", b"\n"):
        with options.out.open("a") as out:
            out.write("\n")
    found, begun = [*held], time.monotonic()
    with options.out.open("a") as out, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for kind in kinds:
            left = [seed for seed in seeds if (kind, seed) not in done]
            for line in campaign(kind, left, options.workers, out, Path(folder)):
                found.append(line)
                if options.tell and line["faults"]:
                    print(f"{line['kind']} {line['seed']}: {line.get('told', line['faults'])}\n", flush=True)
    new, seconds = len(found) - len(held), time.monotonic() - begun
    print(table(found))
    if new:
        print(f"{new} in {seconds:.0f} s by {options.workers} workers: {new / seconds:.1f} a second")
    return int(any(line["faults"] for line in found))


if __name__ == "__main__":
    raise SystemExit(main())
