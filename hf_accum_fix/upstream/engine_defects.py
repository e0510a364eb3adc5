"""Defects of the engines below transformers that lose part of an accumulated gradient: rows, as in defects.json.

Whether a release has one is decided by its number; `engines.engine.check_engine_adds` warns of it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import InvalidVersion, Version

from hf_accum_fix.upstream.seams import is_between


@dataclass(frozen=True, kw_only=True)
class EngineDefect:
    """One defect of a range of releases of an engine."""

    name: str  # kebab-case, stable: what users search for
    package: str = "deepspeed"  # the distribution that has it
    summary: str  # the effect, in one line
    who: str  # the affected runs: what is configured
    wrong: str  # the result, as an equation or in words
    since: str  # the first release with it
    until: str  # the first release without it
    source: tuple[str, ...]  # where it was reported and repaired
    fixed: str = "warned of, and never called exact"  # what this package does about it

    @property
    def range(self) -> str:
        """The affected releases, in words."""
        return f"{self.package} {self.since} to before {self.until}"

    @property
    def remedy(self) -> str:
        """The command that installs a release without it."""
        return f"pip install '{self.package}>={self.until}'"


ENGINE_DEFECTS: Final = (
    EngineDefect(
        name="zero-2-offload-drops-micro-batches",
        summary="Only the first and the last micro-batch of a window reach the optimizer; loss and log are right.",
        who="ZeRO stage 2 with offload_optimizer, three or more micro-batches in a window",
        wrong="grad (g_1 + g_G) / G",
        since="0.15.2",
        until="0.19.0",
        source=(
            "https://github.com/deepspeedai/DeepSpeed/pull/7967",
            "https://github.com/deepspeedai/DeepSpeed/pull/6550",
        ),
    ),
    EngineDefect(
        name="zero-2-offload-keeps-the-last-micro-batch",
        summary="Only the last micro-batch of a window reaches the optimizer; loss and log are right.",
        who='ZeRO stage 2 with offload_optimizer, "gradient_accumulation_steps": 1 in its configuration, and a loop '
        "whose windows are longer",
        wrong="grad g_G",
        since="0.15.1",
        until="0.19.0",
        source=("https://github.com/deepspeedai/DeepSpeed/pull/7981",),
    ),
)
"""Every known one; 0.15.1 is the oldest release of DeepSpeed that was read: a row that starts there may be older."""


def engine_defects_of(package: str, release: str) -> tuple[EngineDefect, ...]:
    """The defects of a release; a build of a release has those of the release, one of no release has none."""
    try:
        number = Version(release)
    except InvalidVersion:
        return ()
    return tuple(row for row in ENGINE_DEFECTS if row.package == package and is_between(number, row.since, row.until))


def installed_engine_defects() -> tuple[tuple[str, EngineDefect], ...]:
    """The installed release of each package in the table, with each of its defects."""
    found = list[tuple[str, EngineDefect]]()
    for package in dict.fromkeys(row.package for row in ENGINE_DEFECTS):
        with suppress(PackageNotFoundError):
            release = version(package)
            found += [(release, row) for row in engine_defects_of(package, release)]
    return tuple(found)
