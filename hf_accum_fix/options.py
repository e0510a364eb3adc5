"""The options of apply(), the trainer classes, loops and the command line, each defined once."""

from __future__ import annotations

import inspect
import os
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hf_accum_fix.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hf_accum_fix.learning.contract import LossContract

    _Function = TypeVar("_Function", bound=Callable[..., Any])

SWITCH: Final = "HF_ACCUM_FIX"
_ON: Final = ("1", "on", "true", "yes")
_OFF: Final = ("0", "off", "false", "no")

#: The conventions of `hf_accum_fix.router.router_loss`, as strings, so that importing this needs no torch.
ROUTER_LOSSES: Final = ("mean", "exact")

#: Over which samples a loss that couples them is computed: see `hf_accum_fix.coupled`.
COUPLED_LOSSES: Final = ("micro-batch", "rank", "exact")

#: The dtypes in which a window's gradients are summed: see `hf_accum_fix.engines.precision`.
ACCUMULATE_IN: Final = ("parameter", "float32", "compensated")


@dataclass(frozen=True)
class BalanceOptions:
    """Length-balanced windows: pack the samples of a global batch into micro-batches by length.

    Attributes:
        lengths: the name of the column with a sample's length, or a function of a sample as the collator gets it (for a
            vision-language model: text and image tokens together); None: the column that ``length_column_name`` of the
            training arguments names, or the number of ``input_ids``.
        truncated_to: length to which the collator truncates samples; None: it does not truncate.
        read_ahead: read every length once before training. False: each rank packs the samples that it fetches, and
            collates them in the main process, as always with streams.
        max_rows_per_micro_batch: maximum samples of a micro-batch, for rows that cost memory at any length (images);
            None: no maximum.
        max_tokens_per_micro_batch: maximum of samples times the longest of them; a window that does not fit exceeds it
            by as little as possible. None, or a larger maximum: the per-device batch size times the window's longest
            sample.

    Raises:
        OptionsError: if a maximum is not a positive integer, or lengths is neither a name nor a function.
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


def _about(help: str | None, *, choices: tuple[str, ...] | None = None, of_loops: bool = False) -> dict[str, Any]:
    """Metadata of an option.

    Args:
        help: help text on the command line; None: not an option there.
        choices: the allowed values; None: any.
        of_loops: whether `accumulation_windows` takes it too.
    """
    return {"help": help, "choices": choices, "of_loops": of_loops}


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
            "float32", 4 more bytes per parameter; "compensated", two 16-bit numbers, 2 more bytes.
        prove_every: check in every so many windows, from the first on, that the gradient which autograd delivered is
            the one that the optimizer uses, on a few parameters; 0: in the first window alone.

    Raises:
        OptionsError: if allow_foreign is not a tuple of "module.qualname" strings, a switch is not a bool, router_loss
            or accumulate_in is not an allowed value, balance_windows is neither a bool nor `BalanceOptions`, or
            prove_every is no integer of at least 0.
    """

    contract: LossContract | None = field(default=None, metadata=_about(None, of_loops=True))
    allow_foreign: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "wrap this replacement of a Trainer method by another package instead of refusing it; repeatable"
        ),
    )
    eval_loss: bool = field(default=False, metadata=_about("report eval_loss as the mean over items"))
    drop_duplicates: bool = field(default=False, metadata=_about("drop samples that accelerate repeats", of_loops=True))
    router_loss: str = field(
        default="mean", metadata=_about("of a mixture of experts", choices=ROUTER_LOSSES, of_loops=True)
    )
    coupled_loss: str = field(
        default="micro-batch",
        metadata=_about("over which samples a coupled loss is computed", choices=COUPLED_LOSSES, of_loops=True),
    )
    coupled: tuple[str, ...] = field(
        default=(),
        metadata=_about("a module that returns one vector per sample, for --coupled-loss; repeatable", of_loops=True),
    )
    balance_windows: bool | BalanceOptions = field(
        default=False, metadata=_about("length-balance the micro-batches of a window")
    )
    accumulate_in: str = field(
        default="parameter",
        metadata=_about("of gradients of 16-bit parameters", choices=ACCUMULATE_IN, of_loops=True),
    )
    prove_every: int = field(default=0, metadata=_about(None, of_loops=True))

    def __post_init__(self) -> None:
        """Refuse values that would be misread later, such as one string instead of a tuple."""
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
        for switch in ("eval_loss", "drop_duplicates"):
            if not isinstance(getattr(self, switch), bool):
                raise OptionsError(f"got {switch}={getattr(self, switch)!r}; expected True or False")
        if isinstance(self.prove_every, bool) or not isinstance(self.prove_every, int) or self.prove_every < 0:
            raise OptionsError(
                f"got prove_every={self.prove_every!r}; expected a number of windows, or 0 for the first one alone"
            )
        modules = self.coupled
        if not isinstance(modules, tuple) or not all(isinstance(name, str) for name in modules):
            raise OptionsError(
                f"got coupled={modules!r}; expected a tuple of module names, such as coupled=('text_projection',)"
            )
        if modules and self.coupled_loss == "micro-batch":
            raise OptionsError(
                f"got coupled={modules!r} with coupled_loss='micro-batch', which reads no module; expected 'rank' or "
                "'exact'; set coupled_loss, or omit coupled"
            )
        weights = self.contract is not None or self.drop_duplicates
        if self.coupled_loss != "micro-batch" and weights:
            raise OptionsError(
                f"got coupled_loss={self.coupled_loss!r} with a contract or drop_duplicates, which weight "
                "samples; expected only one of them"
            )
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices is not None and value not in choices:
                raise OptionsError(f"got {option.name}={value!r}; expected one of {', '.join(map(repr, choices))}")
        if self.balance_windows is True:
            object.__setattr__(self, "balance_windows", BalanceOptions())
        if self.balance_windows is not False and not isinstance(self.balance_windows, BalanceOptions):
            raise OptionsError(
                f"got balance_windows={self.balance_windows!r}; expected True, False or BalanceOptions(...)"
            )


def shows_options(function: _Function, *, of_loops: bool = False) -> _Function:
    """List each option in the signature of a function that takes ``**options``, for ``help()`` and notebooks."""
    *own, _ = (signature := inspect.signature(function)).parameters.values()
    shown = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(Options)
        if each.metadata["of_loops"] or not of_loops
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function


def on_the_command_line() -> tuple[Field[Any], ...]:
    """The options that `hf-accum-fix run` takes: strings, names and switches."""
    return tuple(option for option in fields(Options) if option.metadata["help"] is not None)


def options_from(given: Mapping[str, Any], *, of_loops: bool = False) -> Options:
    """The options of `apply()`, or of `accumulation_windows`.

    Raises:
        OptionsError: if an option is invalid, unknown, or not for loops.
    """
    known = [option.name for option in fields(Options) if option.metadata["of_loops"] or not of_loops]
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
