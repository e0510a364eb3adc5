"""The options, parsed once, that serve apply() and the trainer classes alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hf_accum_fix.errors import OptionsError

if TYPE_CHECKING:
    from hf_accum_fix.accumulation.contract import LossContract

SWITCH: Final = "HF_ACCUM_FIX"
_ON: Final = ("1", "on", "true", "yes")
_OFF: Final = ("0", "off", "false", "no")

#: The conventions of `hf_accum_fix.accumulation.router_loss`, by name, so that importing this needs no torch.
ROUTER_LOSSES: Final = ("mean", "window", "exact")


@dataclass(frozen=True)
class Options:
    """What the user decided; the defaults are right for almost everyone.

    Attributes:
        contract: how the model reduces its loss, where it must not be observed; None observes it.
        allow_foreign: names ("module.qualname") of other people's replacements of Trainer methods to wrap
            around instead of refusing them.
        eval_loss: report ``eval_loss`` as the mean over the items of the evaluation set; off, because it changes a
            reported number.
        drop_duplicates: leave out the samples that accelerate repeats at the end of an epoch so that every rank has as
            many; off, because stock counts them twice, too.
        router_loss: what the load-balancing loss of a mixture of experts is: "mean", over micro-batches and ranks;
            "window", by the running counts of the window; "exact", that of the whole global batch, by one more forward.

    Raises:
        OptionsError: if allow_foreign is not a tuple of "module.qualname" strings, a switch is no bool, or router_loss
            is none of the three.
    """

    contract: LossContract | None = None
    allow_foreign: tuple[str, ...] = ()
    eval_loss: bool = False
    drop_duplicates: bool = False
    router_loss: str = "mean"

    def __post_init__(self) -> None:
        """Refuse what would be misread later, such as a bare string taken for a sequence of names."""
        names = self.allow_foreign
        if not isinstance(names, tuple) or not all(isinstance(name, str) and "." in name for name in names):
            raise OptionsError(
                f'allow_foreign is {names!r}; needed is a tuple of "module.qualname" strings, such as '
                'allow_foreign=("unsloth_zoo.loss_utils._unsloth_get_batch_samples",)'
            )
        for switch in ("eval_loss", "drop_duplicates"):
            if not isinstance(getattr(self, switch), bool):
                raise OptionsError(f"{switch} is {getattr(self, switch)!r}; needed is True or False")
        if self.router_loss not in ROUTER_LOSSES:
            known = ", ".join(map(repr, ROUTER_LOSSES))
            raise OptionsError(f"router_loss is {self.router_loss!r}; needed is one of {known}")


def enabled() -> bool:
    """Whether the environment lets the fix be applied: HF_ACCUM_FIX=0 switches it off.

    Raises:
        OptionsError: if the variable is set to something that is neither on nor off.
    """
    value = os.environ.get(SWITCH)
    if value is None or value.strip().lower() in _ON:
        return True
    if value.strip().lower() in _OFF:
        return False
    raise OptionsError(f"{SWITCH}={value!r}; needed is one of {', '.join(_ON + _OFF)}, or the variable unset")
