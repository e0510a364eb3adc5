"""Every release, head and split, stock and corrected, on one rank and two: the error of one step.

    python recipes/release_matrix.py                          # the first and last patch of every minor, some two hours
    python recipes/release_matrix.py 4.46.3 5.4.0 5.24.0      # a few

Each release gets its own environment (recipes/in_release.py), which is deleted after use, and two processes, one
for each number of ranks, that run tests/releases/cells.py. --output keeps their cells as JSON lines, so that a matrix
that was interrupted continues, and gets a table, table.md, and a picture, matrix.png.

Exit code: 0 if ours is at the float floor in every cell that can be run; 1 if not; 2 for a wrong call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import in_release
import shared

from hf_accum_fix.upstream.seams import TESTED_RELEASES

WORLD_SIZES = (1, 2)
OURS = ("apply", "trainer")
#: How the reason begins where ours refuses a release.
REFUSED = "UnsupportedSetupError"

#: Environments are made one at a time: pip's cache is shared.
_MAKING = Lock()


@dataclass(frozen=True)
class Summary:
    """One release, number of ranks and head: the worst relative error over its splits."""

    stock: float | None  # None: could not be run
    ours: float | None  # worst of patch and subclass
    within: bool  # every one of ours is within its tolerance
    why: str | None  # the first reason of the cells that could not be run; of a refusal it is no failure
    convention: bool  # the reference is a convention (router losses), so that it is never called exact

    def words(self) -> str:
        """Stock and ours as a cell of the table."""
        stock = "fails" if self.stock is None else f"{self.stock:.0e}" if self.stock < 1e-3 else f"{self.stock:.2g}"
        if self.ours is None:
            return f"{stock} / refused" if (self.why or "").startswith(REFUSED) else "not runnable"
        return f"{stock} / {'' if self.within else '**'}{self.ours:.0e}{'' if self.within else '**'}"


def main(arguments: list[str]) -> int:
    parser = shared.Parser(__doc__, "release_matrix")
    parser.add_argument("releases", nargs="*", default=TESTED_RELEASES, metavar="RELEASE")
    parser.add_argument("--workers", type=shared.positive, default=1, help="releases at once")
    options = parser.parse_args(arguments)
    releases = tuple(options.releases)
    if unknown := [release for release in releases if not in_release.RELEASE.fullmatch(release)]:
        parser.error(f"got {', '.join(unknown)}; expected releases, such as 5.24.0")
    options.output.mkdir(parents=True, exist_ok=True)
    in_release.environment(in_release.NEWEST)
    failed = run(releases, options.output.resolve(), options.workers)
    summaries = summarise(releases, options.output)
    (options.output / "table.md").write_text(table(summaries) + "\n", encoding="utf-8")
    draw(summaries, options.output / "matrix.png")
    print(table(summaries))
    for (release, ranks, head), summary in summaries.items():
        if not summary.within:
            print(f"{release}, {ranks} ranks, {head}: {summary.ours} {summary.why or ''}")
    for release, why in failed.items():
        print(f"{release}: {why}")
    return int(bool(failed) or not all(summary.within for summary in summaries.values()))


def run(releases: Sequence[str], output: Path, workers: int) -> dict[str, str]:
    """Run the missing cells; return the ones that could not run at all, with the end of their output."""
    from tqdm import tqdm

    failed = {}
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(run_release, release, output): release for release in releases}
        for job in tqdm(as_completed(jobs), total=len(jobs), unit="release"):
            why = job.result()
            if why is not None:
                failed[jobs[job]] = why
    return failed


def run_release(release: str, output: Path) -> str | None:
    """The cells of one release; None, or why they could not be run."""
    wanted = [ranks for ranks in WORLD_SIZES if not cells_file(output, release, ranks).exists()]
    if not wanted:
        return None
    folder = in_release.folder_of(release)
    made = not (folder / "complete").exists()
    try:
        with _MAKING:
            python = in_release.environment(release) / in_release.BIN / "python"
        for ranks in wanted:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
            command = [str(python), *launcher, "-m", "tests.releases.cells", str(cells_file(output, release, ranks))]
            with cells_file(output, release, ranks).with_suffix(".log").open("wb") as log:
                done = subprocess.run(
                    command, cwd=in_release.ROOT, env=_quiet(), stdout=log, stderr=subprocess.STDOUT, check=False
                )
            if not cells_file(output, release, ranks).exists():
                return f"{ranks} ranks ended with {done.returncode}; see {log.name}"
    except in_release.NotMadeError as error:
        return f"its environment could not be made: {error}"
    finally:
        # Keep one that could not be made: it holds pip's log.
        if made and release != in_release.NEWEST and (folder / "complete").exists():
            # First the marker of a complete environment: this may be killed halfway.
            (folder / "complete").unlink()
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _quiet() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ, "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


def cells_file(output: Path, release: str, ranks: int) -> Path:
    return output / f"{in_release.folder_of(release).name}-{ranks}.jsonl"


def summarise(releases: Sequence[str], output: Path) -> dict[tuple[str, int, str], Summary]:
    """The worst of every (release, ranks, head), in the order they were run."""
    found = {}
    for release in releases:
        for ranks in WORLD_SIZES:
            if cells_file(output, release, ranks).exists():
                rows = [json.loads(line) for line in cells_file(output, release, ranks).read_text().splitlines()]
                for head in dict.fromkeys(row["head"] for row in rows):
                    found[release, ranks, head] = _summary([row for row in rows if row["head"] == head])
    return found


def _summary(rows: Sequence[dict[str, Any]]) -> Summary:
    stock = [row["error"] for row in rows if row["path"] == "stock" and row["error"] is not None]
    ours = [row for row in rows if row["path"] in OURS]
    errors = [row["error"] for row in ours if row["error"] is not None]
    # A head that this release cannot run is not our failure; one that stock runs and we neither run nor refuse is.
    known = [row for row in ours if not (row["why"] or "").startswith(REFUSED)]
    runnable = [row for row in known if row["error"] is not None or stock]
    return Summary(
        stock=max(stock, default=None),
        ours=max(errors, default=None),
        within=all(row["error"] is not None and row["error"] <= row["tolerance"] for row in runnable),
        why=next((row["why"] for row in ours if row["why"]), None),
        convention=bool(rows[0]["router"]),
    )


def table(summaries: dict[tuple[str, int, str], Summary]) -> str:
    """Markdown: a line for each release and number of ranks, a column for each head, stock / ours."""
    heads = list(dict.fromkeys(head for _, _, head in summaries))
    convention = {head for (_, _, head), summary in summaries.items() if summary.convention}
    names = [f"{head} *" if head in convention else head for head in heads]
    rows = []
    for release, ranks in dict.fromkeys((release, ranks) for release, ranks, _ in summaries):
        known = [summaries[release, ranks, head] for head in heads if (release, ranks, head) in summaries]
        rows.append((release, ranks, *(each.words() for each in known)))
    lines = [" ".join(line.split()) for line in shared.markdown(("release", "ranks", *names), rows).splitlines()]
    lines += ["", "Worst relative error of the parameter change over the splits, stock / ours."]
    lines[-1] += " *: against the plain mean of the router losses, a convention that is never called exact."
    reasons: dict[tuple[str, str], list[str]] = {}
    for (release, ranks, head), summary in summaries.items():
        if summary.ours is None and ranks == min(WORLD_SIZES):
            reasons.setdefault((head, " ".join((summary.why or "").split())[:160]), []).append(release)
    if reasons:
        lines += ["", "Not runnable, stock or ours:", ""]
    for (head, why), where in reasons.items():
        lines.append(f"- {head} on {where[0]}{f' to {where[-1]} ({len(where)})' if len(where) > 1 else ''}: `{why}`")
    return "\n".join(lines)


#: Difference of two logarithms of an error that is a change.
_CHANGED = 0.18


def draw(summaries: dict[tuple[str, int, str], Summary], file: Path) -> None:
    """Stock on the left, ours on the right: pale at the float floor, dark where the gradient is another one.

    Releases are labelled where one of their cells differs from the release before by more than a factor of 1.5.
    """
    import numpy as np

    heads = list(dict.fromkeys(head for _, _, head in summaries))
    releases = list(dict.fromkeys(release for release, _, _ in summaries))
    columns = [(head, ranks) for head in heads for ranks in WORLD_SIZES]
    figure, (axes,) = shared.figure_of(1, 2, (11, 3 + 0.13 * len(releases)), sharey=True)
    image = None
    changed = {0, len(releases) - 1}
    for axis, (title, side) in zip(axes, (("stock", "stock"), ("hf_accum_fix", "ours")), strict=True):
        values = np.full((len(releases), len(columns)), np.nan)
        for row, release in enumerate(releases):
            for column, (head, ranks) in enumerate(columns):
                summary = summaries.get((release, ranks, head))
                value = None if summary is None else getattr(summary, side)
                if value is not None:
                    values[row, column] = np.log10(max(value, 1e-16))
        numbers = np.nan_to_num(values, nan=9.0)
        changed |= {row for row in range(1, len(releases)) if np.abs(numbers[row] - numbers[row - 1]).max() > _CHANGED}
        axis.set_facecolor("lightgrey")
        image = axis.imshow(values, cmap="magma_r", vmin=-8, vmax=1, aspect="auto")
        axis.set_title(title)
        # A head has a column for each number of ranks: one label in their middle.
        wide = len(WORLD_SIZES)
        axis.set_xticks([wide * place + (wide - 1) / 2 for place in range(len(heads))], heads, rotation=90)
        axis.set_xticks([wide * place - 0.5 for place in range(1, len(heads))], minor=True)
        axis.tick_params(which="both", length=0)
        axis.grid(which="minor", axis="x", color="white", linewidth=1.5)
        axis.spines[:].set_visible(False)
    rows = sorted(changed)
    axes[0].set_yticks(rows, [releases[row].split("@")[0] for row in rows], fontsize=9)
    figure.suptitle("Worst relative error of one step; each head on one rank and on two")
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40)
    bar.set_label("grey: the release cannot run it")
    bar.set_ticks(range(-8, 2, 2), labels=[f"{10.0**power:g}" for power in range(-8, 2, 2)])
    bar.outline.set_visible(False)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
