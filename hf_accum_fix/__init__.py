"""Exact gradient accumulation for Hugging Face Transformers.

    import hf_accum_fix
    hf_accum_fix.apply()                                   # applications: patches transformers.Trainer
    from hf_accum_fix import GlobalBatchTrainer            # libraries: the same as a class

Importing this patches nothing and imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_accum_fix.applying import PatchHandle, active_handle, apply, report, revert
from hf_accum_fix.errors import (
    AccumFixError,
    ContractError,
    ForeignPatchError,
    OptionsError,
    RankError,
    SeamError,
    UnsupportedSetupError,
    UnsupportedVersionError,
)
from hf_accum_fix.options import BalanceOptions, Options
from hf_accum_fix.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_accum_fix.counting.items import Items
    from hf_accum_fix.data.balancing import Dealer
    from hf_accum_fix.learning.contract import LossContract, Reduction
    from hf_accum_fix.loop import AccumulationWindow, AccumulationWindows, accumulation_windows
    from hf_accum_fix.trainer import GlobalBatchMixin, GlobalBatchSeq2SeqTrainer, GlobalBatchTrainer
    from hf_accum_fix.verification.report import VerificationReport
    from hf_accum_fix.verification.verify import verify


__all__ = [
    "AccumFixError",
    "AccumulationWindow",
    "AccumulationWindows",
    "BalanceOptions",
    "ContractError",
    "Dealer",
    "ForeignPatchError",
    "GlobalBatchMixin",
    "GlobalBatchSeq2SeqTrainer",
    "GlobalBatchTrainer",
    "Items",
    "LossContract",
    "Options",
    "OptionsError",
    "PatchHandle",
    "RankError",
    "Reduction",
    "SeamError",
    "UnsupportedSetupError",
    "UnsupportedVersionError",
    "VerificationReport",
    "accumulation_windows",
    "active_handle",
    "apply",
    "report",
    "revert",
    "verify",
]

# These need torch and transformers, so they are imported on first access.
_LAZY = {
    "Dealer": "hf_accum_fix.data.balancing",
    "AccumulationWindow": "hf_accum_fix.loop",
    "AccumulationWindows": "hf_accum_fix.loop",
    "GlobalBatchMixin": "hf_accum_fix.trainer",
    "GlobalBatchSeq2SeqTrainer": "hf_accum_fix.trainer",
    "GlobalBatchTrainer": "hf_accum_fix.trainer",
    "Items": "hf_accum_fix.counting.items",
    "LossContract": "hf_accum_fix.learning.contract",
    "Reduction": "hf_accum_fix.learning.contract",
    "accumulation_windows": "hf_accum_fix.loop",
    "VerificationReport": "hf_accum_fix.verification.report",
    "verify": "hf_accum_fix.verification.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
