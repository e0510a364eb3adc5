"""Ranks that share samples: two steps under every layout, stock and corrected, against all samples at once.

    python recipes/in_release.py "newest@deepspeed==0.19.8" -- python recipes/sample_shards.py      # 2 minutes
    python recipes/sample_shards.py --layouts cp --splits 1x4         # without DeepSpeed: context parallelism alone

In a clone, whose tests have the training: a Llama of 20 thousand parameters, samples of 12 to 16 positions, in some of
which all targets lie on one rank; float32, gloo. Layouts: DeepSpeed's Ulysses (sp 2) under ZeRO 0 to 3, and
accelerate's context parallelism (cp 2, FSDP2; attention by a gather of keys and values, since its kernel needs a GPU),
on two ranks, and on four, of which two hold other samples.

The table has the largest relative error of the parameter change over the splits, and of the logged loss; "ends" where
the training does. The output folder gets results.jsonl (a line per training) and table.md. Exit code 1: a
corrected training has ended; 2: bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shared
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.backends.sequence_parallel import errors_of  # noqa: E402
from tests.ranks import RankFailedError, on_ranks  # noqa: E402

RANKS = {2: "", 4: " x dp 2"}


def layouts(wanted: Sequence[str]) -> dict[str, tuple[str, int, Any]]:
    """By name: kind, ranks, and the stage or whether the model takes the number of items."""
    found: dict[str, tuple[str, int, Any]] = {}
    for ranks, more in RANKS.items():
        if "sp" in wanted:
            found |= {f"sp 2{more}, ZeRO {stage}": ("sp", ranks, stage) for stage in range(4)}
        if "cp" in wanted:
            found |= {
                f"cp 2{more}, FSDP2, a head that takes the number": ("cp", ranks, True),
                f"cp 2{more}, FSDP2, a head that returns its own mean": ("cp", ranks, False),
            }
    return found


def results(wanted: Sequence[str], splits: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """One for each training."""
    bar = tqdm([(name, layout, path) for name, layout in layouts(wanted).items() for path in ("stock", "apply")])
    for name, layout, path in bar:
        bar.set_description(f"{name}, {path}")
        try:
            rows = on_ranks(errors_of, *layout, splits, path, ranks=layout[1], timeout=60 + 30 * len(splits))[0]
        except RankFailedError as error:
            rows = [{"ends": str(error).strip().splitlines()[-1][:200]}]
        yield from ({"layout": name, "path": path, **row} for row in rows)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row a layout."""

    def cell(layout: str, path: str) -> str:
        its = [row for row in rows if (row["layout"], row["path"]) == (layout, path)]
        ends = any("ends" in row for row in its)
        return "ends" if ends else ", ".join(f"{max(row[of] for row in its):.1e}" for of in ("error", "loss"))

    names = dict.fromkeys(row["layout"] for row in rows)
    head = ("layout", "stock: gradient, log", "corrected: gradient, log")
    return shared.markdown(head, [(name, cell(name, "stock"), cell(name, "apply")) for name in names])


def main() -> int:
    parser = shared.Parser(__doc__, "sample_shards", new=True)
    parser.add_argument("--layouts", nargs="+", choices=("sp", "cp"), default=["sp", "cp"], help="which kinds")
    splits = [shared.Split(1, 1), shared.Split(1, 4), shared.Split(2, 4)]
    parser.add_argument("--splits", type=shared.splits_of, default=splits, help="default: 1x1,1x4,2x4")
    options = parser.parse_args()
    if "sp" in options.layouts and find_spec("deepspeed") is None:
        parser.error("got layout sp without DeepSpeed; expected it installed; pass --layouts cp, or install deepspeed")
    rows = []
    # Ranks know no `shared`.
    for row in results(options.layouts, [(each.per_device, each.accumulation) for each in options.splits]):
        rows.append(row)
        shared.add_line(options.output / "results.jsonl", row)
    (options.output / "table.md").write_text(table(rows))
    sys.stdout.write(table(rows))
    return int(any("ends" in row and row["path"] == "apply" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
