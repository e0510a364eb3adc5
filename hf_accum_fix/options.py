"""The options of apply(), the trainer classes, loops and the command line, each defined once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from hf_accum_fix.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hf_accum_fix.learning.contract import LossContract

SWITCH: Final = "HF_ACCUM_FIX"
_ON: Final = ("1", "on", "true", "yes")
_OFF: Final = ("0", "off", "false", "no")

#: The options that are one of some words, as strings, so that importing this needs no torch: see
#: `hf_accum_fix.router.router_loss`, `hf_accum_fix.coupled` and `hf_accum_fix.engines.precision`.
CHOICES: Final = {
    "router_loss": ("mean", "exact"),
    "coupled_loss": ("micro-batch", "rank", "exact"),
    "accumulate_in": ("parameter", "float32"),
    "out_of_memory": ("raise", "split"),
    "global_batch": ("warn", "keep"),
    "micro_batch": ("fixed", "auto"),
}

#: The options that `accumulation_windows` does not take.
_OF_TRAINERS: Final = ("allow_foreign", "eval_loss", "balance_windows", "out_of_memory", "global_batch", "micro_batch")


@dataclass(frozen=True)
class BalanceOptions:
    """Length-balanced windows: pack the samples of a global batch into micro-batches by length.

    Attributes:
        lengths: the name of the column with a sample's length, or a function of a sample as the collator gets it (for a
            vision-language model: text and image tokens together); None: the column that ``length_column_name`` of the
            training arguments names, or the number of ``input_ids``.
        truncated_to: length to which the collator truncates samples; None: it does not truncate.
        max_rows_per_micro_batch: maximum samples of a micro-batch, for rows that cost memory at any length (images);
            None: no maximum.

    Raises:
        OptionsError: if a maximum is not a positive integer, or lengths is neither a name nor a function.
    """

    lengths: str | Callable[[Any], int] | None = None
    truncated_to: int | None = None
    max_rows_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        if not (self.lengths is None or isinstance(self.lengths, str) or callable(self.lengths)):
            raise OptionsError(f"got lengths={self.lengths!r}; expected a column, a function of a sample, or None")
        for name in ("truncated_to", "max_rows_per_micro_batch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionsError(f"got {name}={value!r}; expected an integer of at least 1, or None")


@dataclass(frozen=True)
class Options:
    """The user's options; the defaults suit most trainings.

    Attributes:
        contract: what the loss divides by and counts; None: observe it.
        allow_foreign: replacements of Trainer methods by other packages, as "module.qualname", to wrap instead of
            refusing them.
        eval_loss: report ``eval_loss`` as the mean over the items of the evaluation set; off, because it changes a
            number that you may have published.
        drop_duplicates: drop the samples that accelerate repeats at the end of an epoch to give every rank equally
            many; off, because stock counts them twice.
        router_loss: the load-balancing loss of a mixture of experts: "mean", over micro-batches and ranks;
            "exact", over the whole global batch, by one more forward.
        coupled_loss: over which samples a loss that couples them (in-batch negatives) is computed: "micro-batch", its
            own; "rank", those of the window on each rank; "exact", of the window on all ranks; by one more forward.
        coupled: for coupled_loss, the modules with one vector per sample; (): those listed for its class, or found.
        balance_windows: length-balance the micro-batches of a global batch; True is `BalanceOptions()`.
        accumulate_in: the dtype that sums gradients of 16-bit parameters: "parameter", their own, as torch does;
            "float32", 4 more bytes per parameter.
        out_of_memory: what becomes of a micro-batch that runs out of memory: "raise" its error; "split", it runs in
            pieces, at the gradient of the whole.
        global_batch: where a checkpoint was trained with another one: "warn"; "keep", refuse before the first step.
        micro_batch: "auto", the samples of a rank's window run in as few micro-batches as fit, alike lengths together;
            it learns what fits by out_of_memory="split", which it sets.

    Raises:
        OptionsError: if a value is none of these, or does not go with another.
    """

    contract: LossContract | None = None
    allow_foreign: tuple[str, ...] = ()
    eval_loss: bool = False
    drop_duplicates: bool = False
    router_loss: str = "mean"
    coupled_loss: str = "micro-batch"
    coupled: tuple[str, ...] = ()
    balance_windows: bool | BalanceOptions = False
    accumulate_in: str = "parameter"
    out_of_memory: str = "raise"
    global_batch: str = "warn"
    micro_batch: str = "fixed"

    def __post_init__(self) -> None:
        """Refuse values that would be misread later, such as one string instead of a tuple."""
        if self.balance_windows is True:
            object.__setattr__(self, "balance_windows", BalanceOptions())
        is_contract = self.contract is None or type(self.contract).__name__ == "LossContract"
        is_balance = self.balance_windows is False or isinstance(self.balance_windows, BalanceOptions)
        switch = "True or False"
        foreign = 'a tuple of "module.qualname" strings, such as ("unsloth_zoo.loss_utils._unsloth_get_batch_samples",)'
        allowed = {
            "contract": (is_contract, "a LossContract, such as LossContract(Reduction.MEAN, Items(('labels',)))"),
            "allow_foreign": (_are_names(self.allow_foreign, "."), foreign),
            "eval_loss": (isinstance(self.eval_loss, bool), switch),
            "drop_duplicates": (isinstance(self.drop_duplicates, bool), switch),
            "coupled": (_are_names(self.coupled), "a tuple of module names, such as coupled=('text_projection',)"),
            "balance_windows": (is_balance, "True, False or BalanceOptions(...)"),
        }
        for name, choices in CHOICES.items():
            allowed[name] = getattr(self, name) in choices, f"one of {', '.join(map(repr, choices))}"
        for name, (fits, expected) in allowed.items():
            if not fits:
                raise OptionsError(f"got {name}={getattr(self, name)!r}; expected {expected}")
        if self.micro_batch == "auto":
            object.__setattr__(self, "out_of_memory", "split")
            if self.balance_windows:
                raise OptionsError(
                    "got micro_batch='auto' and balance_windows, which pack the same samples; expected one of them"
                )
        if self.coupled and self.coupled_loss == "micro-batch":
            raise OptionsError(
                f"got coupled={self.coupled!r} with coupled_loss='micro-batch', which reads no module; expected 'rank' "
                "or 'exact'; set coupled_loss, or omit coupled"
            )
        weights = self.contract is not None or self.drop_duplicates
        if self.coupled_loss != "micro-batch" and weights:
            raise OptionsError(
                f"got coupled_loss={self.coupled_loss!r} with a contract or drop_duplicates, which weight "
                "samples; expected only one of them"
            )


def _are_names(value: object, part: str = "") -> bool:
    """Whether a value is a tuple of strings with a part."""
    return isinstance(value, tuple) and all(isinstance(each, str) and part in each for each in value)


def options_from(given: Mapping[str, Any], *, of_loops: bool = False) -> Options:
    """The options of `apply()`, or of `accumulation_windows`.

    Raises:
        OptionsError: if an option is invalid, unknown, or not for loops.
    """
    known = [option.name for option in fields(Options) if not (of_loops and option.name in _OF_TRAINERS)]
    for name, value in given.items():
        if name not in known:
            what = "a loop" if of_loops else "apply()"
            raise OptionsError(f"got {name}={value!r}; expected an option of {what}: {', '.join(known)}")
    return Options(**given)


def enabled() -> bool:
    """Whether the environment permits the patch: HF_ACCUM_FIX=0 switches it off; empty counts as unset.

    Raises:
        OptionsError: if the variable is neither on nor off.
    """
    value = os.environ.get(SWITCH, "")
    if value.strip().lower() in ("", *_ON):
        return True
    if value.strip().lower() in _OFF:
        return False
    raise OptionsError(f"got {SWITCH}={value!r}; expected one of {', '.join(_ON + _OFF)}, or the variable unset")
