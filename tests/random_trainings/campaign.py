"""Many random trainings, each out of one seed: ``python -m tests.random_trainings.campaign --draws 10000``.

Every training is a line of the file; at the end stands how many came to what, with the seed of each fault. A run that
is broken off is gone on with by the same command, which passes over what the file holds. ``--draws 1 --seed 17 --kind
loop`` runs one again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_ACCUM_FIX_QUIET", "1")

from tests.numerics.parity import pass_over_imports
from tests.random_trainings.compositions import Composition, compositions, installed_once, outcome, told
from tests.random_trainings.pair_of_ranks import PairOfRanks

KINDS = ("one", "two", "loop")
Line = dict[str, Any]


def drawn(kind: str, seed: int) -> Composition:
    """The same for ever, as long as the parts are."""
    return compositions(random.Random(f"{kind} {seed}").choice, kind)


# --- a worker -----------------------------------------------------------------------------------------------------

#: What lasts as long as a worker, and how it trains.
_lasting = contextlib.ExitStack()
_train: Callable[[Composition], Line]


def _begin(kind: str, folder: Path) -> None:
    global _train
    if kind == "two":
        pair = _lasting.enter_context(PairOfRanks(Path(tempfile.mkdtemp(dir=folder))))
        _train = partial(_of_pair, pair)
        return
    import torch

    torch.set_num_threads(1)
    logging.getLogger("hf_accum_fix").propagate = False
    silence = _lasting.enter_context((folder / f"{os.getpid()}.log").open("w"))
    for lasts in (installed_once(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence)):
        _lasting.enter_context(lasts)
    _train = partial(_of_one, folder)
    # Else every training collects what the imports have left.
    _train(Composition())
    pass_over_imports()


def _run(kind: str, seed: int) -> Line:
    composition, begun = drawn(kind, seed), time.perf_counter()
    try:
        line = _train(composition)
    except Exception as error:
        faults = [["broken", f"{type(error).__name__}: {error}"]]
        line = {"verdict": "broken", "faults": faults, "told": traceback.format_exc()}
    seconds = round(time.perf_counter() - begun, 3)
    return {"kind": kind, "seed": seed, **line, "seconds": seconds, "composition": asdict(composition)}


def _of_one(folder: Path, composition: Composition) -> Line:
    found = outcome(composition, folder)
    line: Line = {"verdict": found.verdict, "faults": [list(fault) for fault in found.faults]}
    for name, training in (("ours", found.patched), ("stock", found.stock)):
        if training is not None:
            line[name] = [float(f"{error:.2e}") for error in training.errors]
    if found.patched is not None:
        line["exact"], line["warned"] = found.patched.exact, [words for _, words in found.patched.said]
    return {**line, "told": told(composition, found)} if found.faults else line


def _of_pair(pair: PairOfRanks, composition: Composition) -> Line:
    answers = pair.answers(composition)
    faults = dict.fromkeys(fault for answer in answers for fault in answer.faults)
    verdict = next((answer.verdict for answer in answers if answer.faults), answers[0].verdict)
    line: Line = {"verdict": verdict, "faults": [list(fault) for fault in faults]}
    line["warned"] = answers[0].words.splitlines()
    return {**line, "told": "\n".join(answer.words for answer in answers)} if faults else line


# --- all workers --------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """What a file holds; a last line that was broken off is left out."""
    lines = []
    for words in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(words))
    return lines


def main(given: Sequence[str] | None = None) -> int:
    """0 if no fault was found, now or by what the file holds of these seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_trainings.campaign", description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, help="trainings of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one rank, two ranks, a loop; repeatable")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of two ranks each a pair")
    parser.add_argument("--out", type=Path, default=Path("campaign.jsonl"), help="a line a training; added to")
    options = parser.parse_args(given)
    seeds, kinds = range(options.seed, options.seed + options.draws), options.kind or list(KINDS)
    found = [line for line in read(options.out) if line["seed"] in seeds and line["kind"] in kinds]
    done = {(line["kind"], line["seed"]) for line in found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    spawning = multiprocessing.get_context("spawn")
    with options.out.open("a") as out, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out.write("\n")
        for kind in kinds:
            with ProcessPoolExecutor(options.workers, spawning, _begin, (kind, Path(folder))) as pool:
                left = [pool.submit(_run, kind, seed) for seed in seeds if (kind, seed) not in done]
                for each in as_completed(left):
                    found.append(each.result())
                    out.write(json.dumps(found[-1]) + "\n")
                    out.flush()
    for kind in kinds:
        print(kind, dict(Counter(line["verdict"] for line in found if line["kind"] == kind)))
    faulty = [line for line in found if line["faults"]]
    for line in faulty:
        print(f"{line['kind']} {line['seed']}: {line.get('told', line['faults'])}\n")
    return int(bool(faulty))


if __name__ == "__main__":
    raise SystemExit(main())
