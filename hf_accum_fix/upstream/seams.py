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

    @property
    def module(self) -> str:
        """The module of the class."""
        return self.target.partition(":")[0]

    @property
    def owner(self) -> str:
        """The name of the class."""
        return self.target.partition(":")[2]


SEAMS: Final = (
    Seam("train", ("resume_from_checkpoint",)),
    Seam("get_batch_samples", ("epoch_iterator", "num_batches"), since=_COUNTS),
    Seam("training_step", ("model", "inputs"), until=_COUNTS),
    Seam("training_step", ("model", "inputs", "num_items_in_batch"), since=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs"), until=_COUNTS),
    Seam("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), since=_COUNTS),
)

GUARD: Final = Seam(
    "on_train_begin", ("args", "state", "control"), target="transformers.trainer_callback:CallbackHandler"
)
"""Every release's loop calls it before its first step, wherever the class Trainer comes from: there we check the
methods. It mends no defect."""

EVALUATION: Final = ("evaluation_loop", "prediction_loop")
"""Wrapped only for the option eval_loss; they mend no defect. Releases before 5.0 use the second with
``use_legacy_prediction_loop``."""


def seams_of(release: Version | None) -> tuple[Seam, ...]:
    """The seams of a release, by its base version; None: the seams of the newest."""
    if release is None:
        return tuple(seam for seam in SEAMS if seam.until is None)
    base = Version(release.base_version)
    return tuple(
        seam for seam in SEAMS if Version(seam.since) <= base and (seam.until is None or base < Version(seam.until))
    )


TESTED_RELEASES: Final = (
    *("4.41.0", "4.41.2", "4.42.0", "4.42.4", "4.43.0", "4.43.4", "4.44.0", "4.44.2", "4.45.0", "4.45.2"),
    *("4.46.0", "4.46.1", "4.46.2", "4.46.3", "4.47.0", "4.47.1", "4.48.0", "4.48.1", "4.48.3", "4.49.0"),
    *("4.50.0", "4.50.3", "4.51.0", "4.51.3", "4.52.0", "4.52.4", "4.53.0", "4.53.3", "4.54.0", "4.54.1"),
    *("4.55.0", "4.55.4", "4.56.0", "4.56.2", "4.57.0", "4.57.6"),
    *("5.0.0", "5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.0", "5.5.3", "5.5.4", "5.6.0", "5.6.2", "5.7.0"),
    *("5.8.0", "5.8.1", "5.9.0", "5.10.0", "5.10.1", "5.10.4", "5.11.0", "5.12.0", "5.12.1", "5.13.0"),
    *("5.13.1", "5.14.0", "5.14.1", "5.15.0", "5.15.1", "5.16.0", "5.16.1", "5.17.0", "5.18.0", "5.19.0"),
    *("5.20.0", "5.20.2", "5.21.0", "5.21.1", "5.22.0", "5.22.2", "5.23.0"),
)
"""The first and last patch of every minor, yanked ones too, and releases between which something changed."""

# environment.fingerprints() of each tested release's trainer.py, oldest first; equal bodies once.
TESTED_BODIES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "train": frozenset(
            {
                "3f955ceb21174282",
                "e03f3bb872e3e4b5",
                "741e110c59c3287a",
                "44de947b10302484",
                "82ec25faf76d4549",
                "508a18789b637cfc",
                "b0f6197507690d87",
                "314d4302bac3cc2f",
                "1c91a5c2c1d8071a",
                "1cd7c6cc0a56b54f",
                "fd7bb008889c999b",
                "15f660f189fc6387",
                "2a7c6a2fbb2d110c",
                "199e94af81f0705f",
            }
        ),
        "get_batch_samples": frozenset(
            {
                "2bf541c2832019f9",
                "a2424735be7094db",
                "1675c2491a6a1e68",
                "c8d9c351783b9d52",
                "e2a75a0c8011d36d",
                "f488d0d237d207ed",
                "ba6eea4691e84606",
                "6861c6c661a20062",
                "aecc6bb3266d422c",
                "8e4a5fd414e62017",
                "6837c58f26d55e0e",
                "3475e28c159962fd",
            }
        ),
        "training_step": frozenset(
            {
                "a605c5a1966901c5",
                "a235a7990240d3b6",
                "7d080172d3ed5063",
                "4df963a6aca72012",
                "2ca49f9e4be57a59",
                "d047ad631f111a32",
                "3e911bca98d6cd23",
                "169e87069c4cb289",
                "d77d80adcd7dc6ac",
                "590aead26184cb98",
                "e610e0a5e2d220e7",
                "c0c27f1557249aa8",
                "02d21f6bd752636f",
                "7b71c391ed8bccfd",
                "5a3e40bd8d7a544f",
                "172c756d8c6841e6",
                "a2d43ea20364b4b3",
                "b159fc832827959c",
                "1316087d64bfe91b",
            }
        ),
        "compute_loss": frozenset(
            {
                "aec904a8917d9f48",
                "138d1eb63ebadade",
                "652286682f6f7935",
                "2062f9f815e00553",
                "945ce5131e527795",
                "b3ce399cd2cdd653",
                "3bb36c503bf22e26",
                "b3a662cefbd6e8ce",
                "473cf7861a1147f2",
                "8e91e2e91dda302f",
                "acde134068604405",
                "ad2184d6480dbed3",
                "8cca4bd6cfb79cf5",
                "da039be3391d9ad9",
            }
        ),
    }
)
