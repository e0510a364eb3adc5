"""DATA: the Trainer methods we wrap, and the releases and bodies our tests have run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from packaging.version import Version

TRAINER_MODULE: Final = "transformers.trainer"
TRAINER_CLASS: Final = "Trainer"

FIRST_RELEASE: Final = "4.41.0"
"""The oldest release supported."""

_COUNTS: Final = "4.46.0"
"""The first release that counts the items of a window: get_batch_samples and num_items_in_batch exist."""


@dataclass(frozen=True)
class Seam:
    """One method where we can step in.

    Attributes:
        name: the method's name.
        parameters: the parameters it must start with, after self.
        since: the first release that has it so.
        until: the first release that has it otherwise; None: there is none.
        target: "module:class" that holds it.
    """

    name: str
    parameters: tuple[str, ...]
    since: str = FIRST_RELEASE
    until: str | None = None
    target: str = f"{TRAINER_MODULE}:{TRAINER_CLASS}"


SEAMS: Final = (
    Seam("train", ("resume_from_checkpoint",)),
    Seam("get_batch_samples", ("epoch_iterator", "num_batches"), since=_COUNTS),
    Seam("training_step", ("model", "inputs"), until=_COUNTS),
    Seam("training_step", ("model", "inputs", "num_items_in_batch"), since=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs"), until=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), since=_COUNTS),
)


def seams_of(release: Version | None) -> tuple[Seam, ...]:
    """The seams of a release, those of the newest for one that is not known; dev and rc builds as it."""
    if release is None:
        return tuple(seam for seam in SEAMS if seam.until is None)
    base = Version(release.base_version)
    return tuple(
        seam for seam in SEAMS if Version(seam.since) <= base and (seam.until is None or base < Version(seam.until))
    )


TESTED_RELEASES: Final = ("4.48.3", "4.49.0", "5.23.0")

# environment.fingerprints() of each tested release's trainer.py, oldest first; equal bodies once.
TESTED_BODIES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "train": frozenset({"741e110c59c3287a", "199e94af81f0705f"}),
        "get_batch_samples": frozenset({"e2a75a0c8011d36d", "3475e28c159962fd"}),
        "training_step": frozenset({"d77d80adcd7dc6ac", "590aead26184cb98", "1316087d64bfe91b"}),
        "compute_loss": frozenset({"652286682f6f7935", "2062f9f815e00553", "da039be3391d9ad9"}),
    }
)
