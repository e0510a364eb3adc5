"""The options, parsed once, that serve apply() and the trainer classes alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_accum_fix.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_accum_fix.accumulation.contract import LossContract

SWITCH: Final = "HF_ACCUM_FIX"
_ON: Final = ("1", "on", "true", "yes")
_OFF: Final = ("0", "off", "false", "no")

#: The conventions of `hf_accum_fix.accumulation.router_loss`, by name, so that importing this needs no torch.
ROUTER_LOSSES: Final = ("mean", "window", "exact")

#: What a window's gradients are added in: see `hf_accum_fix.accumulation.precision`.
ACCUMULATE_IN: Final = ("parameter", "float32", "compensated")


@dataclass(frozen=True)
class BalanceOptions:
    """How the samples of a global batch are dealt into micro-batches by length.

    Attributes:
        lengths: where a sample's length comes from: the name of a column that holds it, or a function of a sample as
            the collator gets it (for a vision-language model: text and image tokens together); None: the number of its
            ``input_ids``, or the column that ``length_column_name`` of the training arguments names, if there is one.
        truncated_to: tokens that the collator cuts a sample to; None: it cuts nothing.
        read_ahead: read every length once before training. Off: the samples are dealt as they are fetched, on each rank
            among its own alone, and collated in the main process. Streams are always dealt so.
        max_rows_per_micro_batch: most samples in a micro-batch, for rows that cost memory whatever their length
            (images); None: as many as fit.
        max_tokens_per_micro_batch: limit of samples times the longest of them; a window that does not fit exceeds it
            by as little as possible. None, or a larger limit: the per-device batch size times the window's longest
            sample.

    Raises:
        OptionsError: if a limit is no positive number, or lengths neither a name nor a function.
    """

    lengths: str | Callable[[Any], int] | None = None
    truncated_to: int | None = None
    read_ahead: bool = True
    max_rows_per_micro_batch: int | None = None
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        if not (self.lengths is None or isinstance(self.lengths, str) or callable(self.lengths)):
            raise OptionsError(f"got lengths={self.lengths!r}; expected a column, a function of a sample, or None")
        if not isinstance(self.read_ahead, bool):
            raise OptionsError(f"got read_ahead={self.read_ahead!r}; expected True or False")
        for name in ("truncated_to", "max_rows_per_micro_batch", "max_tokens_per_micro_batch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionsError(f"got {name}={value!r}; expected an integer of at least 1, or None")


@dataclass(frozen=True)
class Options:
    """What the user decided; the defaults are right for almost everyone.

    Attributes:
        contract: how the model reduces its loss, where it must not be observed; None observes it.
        allow_foreign: names ("module.qualname") of other people's replacements of Trainer methods to wrap
            around instead of refusing them.
        eval_loss: report ``eval_loss`` as the mean over the items of the evaluation set; off, because it changes a
            number that may have been reported.
        drop_duplicates: leave out the samples that accelerate repeats at the end of an epoch so that every rank has as
            many; off, because stock counts them twice, too.
        router_loss: what the load-balancing loss of a mixture of experts is: "mean", over micro-batches and ranks;
            "window", by the running counts of the window; "exact", over the whole global batch, by one more forward.
        balance_windows: deal the samples of a global batch into micro-batches by length; True is `BalanceOptions()`.
        per_sample: train the mean of sample means, so that every sample weighs as much however many targets it has;
            off, because stock weighs every target alike.
        accumulate_in: what the gradients of 16-bit parameters are added in: "parameter", their dtype, as torch does;
            "float32", 4 bytes a parameter more; "compensated", twice their dtype, 2 bytes more.

    Raises:
        OptionsError: if allow_foreign is not a tuple of "module.qualname" strings, a switch is no bool, router_loss
            or accumulate_in is none of the three, or balance_windows is neither a bool nor `BalanceOptions`.
    """

    contract: LossContract | None = None
    allow_foreign: tuple[str, ...] = ()
    eval_loss: bool = False
    drop_duplicates: bool = False
    router_loss: str = "mean"
    balance_windows: bool | BalanceOptions = False
    per_sample: bool = False
    accumulate_in: str = "parameter"

    def __post_init__(self) -> None:
        """Refuse values that would be misread later, such as a bare string taken for a sequence of names."""
        if self.contract is not None and type(self.contract).__name__ != "LossContract":
            raise OptionsError(
                f"got contract={self.contract!r}; expected a LossContract, such as "
                "LossContract(Reduction.MEAN, Items(('labels',)))"
            )
        names = self.allow_foreign
        if not isinstance(names, tuple) or not all(isinstance(name, str) and "." in name for name in names):
            raise OptionsError(
                f'got allow_foreign={names!r}; expected a tuple of "module.qualname" strings, such as '
                'allow_foreign=("unsloth_zoo.loss_utils._unsloth_get_batch_samples",)'
            )
        for switch in ("eval_loss", "drop_duplicates", "per_sample"):
            if not isinstance(getattr(self, switch), bool):
                raise OptionsError(f"got {switch}={getattr(self, switch)!r}; expected True or False")
        if self.per_sample and self.contract is not None:
            raise OptionsError("got per_sample=True and a contract; expected one of them: the loss has to be observed")
        check_choice("router_loss", self.router_loss, ROUTER_LOSSES)
        check_choice("accumulate_in", self.accumulate_in, ACCUMULATE_IN)
        if self.balance_windows is True:
            object.__setattr__(self, "balance_windows", BalanceOptions())
        if self.balance_windows is not False and not isinstance(self.balance_windows, BalanceOptions):
            raise OptionsError(
                f"got balance_windows={self.balance_windows!r}; expected True, False or BalanceOptions(...)"
            )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `OptionsError` for a value that is none of the choices."""
    if value not in choices:
        raise OptionsError(f"got {name}={value!r}; expected one of {', '.join(map(repr, choices))}")


def enabled() -> bool:
    """Whether the environment lets the fix be applied: HF_ACCUM_FIX=0 switches it off; empty counts as unset.

    Raises:
        OptionsError: if the variable is set to something that is neither on nor off.
    """
    value = os.environ.get(SWITCH, "")
    if value.strip().lower() in ("", *_ON):
        return True
    if value.strip().lower() in _OFF:
        return False
    raise OptionsError(f"got {SWITCH}={value!r}; expected one of {', '.join(_ON + _OFF)}, or the variable unset")
