"""DATA: packages that replace the Trainer's methods by re-executed source, and how to recognise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Patcher:
    """One such package."""

    name: str  # of the package, part of its replacements' "module.qualname"
    files: tuple[str, ...]  # parts of its replacements' source files
    left: tuple[str, ...]  # attributes that it adds to the class
    advice: str  # what to do instead of combining its patch with ours


PATCHERS: Final = (
    # unsloth.models._utils.patch_gradient_accumulation_fix; trainers generated into unsloth_compiled_cache/.
    Patcher(
        name="unsloth",
        files=("unsloth_compiled_cache",),
        left=("_old_compute_loss", "_unsloth_init_wrapped_for_accelerate_gas", "_unsloth_settles_eager_fallbacks"),
        advice="unsloth counts the items of a window itself; use it alone (HF_ACCUM_FIX=0), or do not import it",
    ),
    # axolotl.monkeypatch.trainer_grad_accum.patch_training_step_for_ga, up to 0.6.
    Patcher(
        name="axolotl",
        files=(),
        left=("_original_training_step",),
        advice="axolotl from 0.8 on does not patch these methods; upgrade it",
    ),
)


def known_patcher(replacement: Any, author: str, owner: type) -> Patcher | None:
    """The known package, the author of a replacement, that replaced a method of owner; None for an unknown one."""
    file = getattr(getattr(replacement, "__code__", None), "co_filename", "")
    for patcher in PATCHERS:
        if patcher.name in author or any(part in file for part in patcher.files):
            return patcher
    return next((patcher for patcher in PATCHERS if any(name in vars(owner) for name in patcher.left)), None)
