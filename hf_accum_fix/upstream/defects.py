"""The defects of gradient accumulation in transformers, release by release, and where each is fixed: defects.json.

The equations are of one optimizer step. m runs over its micro-batches on all ranks, k over the ranks. S_m is the summed
loss of a micro-batch and n_m its items; N is the sum of all n_m, and N_k that of rank k. G is
gradient_accumulation_steps, r the micro-batches of a shorter window, W the number of data-parallel ranks. "grad" is the
gradient of the optimizer step, "log" the logged loss; without an entry it has the same factor as the gradient.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from packaging.version import Version

from hf_accum_fix.upstream.seams import is_between

OLDEST_READ: Final = "4.38.2"
"""The oldest release whose source was read: a defect since this release may be older."""


class Factor(str, Enum):
    """Wrong gradient over right gradient; A: the accumulation steps given to the launcher."""

    G = "G"
    W = "W"
    G_W = "G x W"
    PER_G = "1 / G"
    PER_W = "1 / W"
    PER_G_W = "1 / (G x W)"
    PER_A = "1 / A"
    SHORT = "r / G"
    MORE_BY_ROWS = "N / (N + rows)"
    LESS_BY_ROWS = "N / (N - rows)"
    MORE_BY_IGNORED = "N / (N + ignored)"
    ROUTER = "G x W in the router's term"
    GPUS = "GPUs"
    PER_GPUS = "1 / GPUs"
    COPIES = "tensor-parallel size"
    SHARERS = "sp_size"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One defect of a range of releases."""

    name: str  # kebab-case, stable: what users search for
    summary: str  # the effect, in one line
    who: str  # the affected runs, in one clause
    wrong: str  # the result, as an equation or in words
    right: str = "grad sum_m S_m / N"  # the correct result
    since: str  # first release with it, from `OLDEST_READ` on
    until: str | None = None  # first release without it; None while the newest one has it
    seam: str  # the Trainer method at which it is fixed
    source: tuple[str, ...]  # its report, else the line in a release
    remove_when: str = ""  # when the row can be deleted; with ``until``: once no older release is supported
    #: "run": measured at both ends of its range; "newest": in the newest release, with ``since`` from the source;
    #: "read": found in the source.
    evidence: Literal["run", "newest", "read"] = "run"
    factors: tuple[Factor, ...] = ()  # wrong gradient over right gradient, one of several; empty: no single factor
    where: str = ""  # the affected runs or windows, in words; empty: all
    not_fixed: str = ""  # what to do instead, if this package does not fix it; empty: it does

    @property
    def gradient(self) -> str:
        """Wrong gradient over right gradient, in symbols; empty: no single factor."""
        return " ".join(filter(None, (", or ".join(self.factors), self.where)))

    @property
    def goes_when(self) -> str:
        """When the row can be deleted."""
        return self.remove_when or (f"transformers {self.until} is the oldest release supported" if self.until else "")

    @property
    def range(self) -> str:
        """The affected releases, in words."""
        return f"{self.since} on" if self.until is None else f"{self.since} to before {self.until}"

    def is_in(self, release: Version) -> bool:
        """Whether a release has it; a dev or rc build counts as the release that it precedes."""
        return is_between(release, self.since, self.until)


DEFECTS: Final = tuple(
    Defect(**{**row, "source": tuple(row["source"]), "factors": tuple(map(Factor, row.get("factors", ())))})
    for row in json.loads(Path(__file__).with_name("defects.json").read_text(encoding="utf-8"))
)
"""Every known defect; fields that a row of defects.json omits have the defaults of `Defect`."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A property of a library (``owner``) below transformers; ``remedy`` is the setting that avoids its effect."""

    name: str
    owner: str
    summary: str
    who: str
    remedy: str
    source: tuple[str, ...]


LIMIT: Final = Limit(
    name="gradient-added-in-16-bits",
    owner="torch",
    summary="adding a micro-batch to a 16-bit .grad rounds the sum; the finer the split, the larger the error",
    who="trainable bfloat16 or float16 parameters (the default dtype of checkpoints since transformers 5.0); bf16 "
    "mixed precision under FSDP, which sums in the dtype in which it computes or reduces",
    remedy="accumulate_in='float32' (4 bytes more per parameter); under DeepSpeed "
    '"data_types": {"grad_accum_dtype": "fp32"}',
    source=(
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
        "https://www.deepspeed.ai/docs/config-json/#data-type-options",
    ),
)
"""The one such property that makes a finer split train another gradient, in every release."""


def is_present(name: str, release: str) -> bool:
    """Whether a release has the defect of this name.

    Raises:
        KeyError: if there is no such row.
    """
    return {defect.name: defect for defect in DEFECTS}[name].is_in(Version(release))
