"""The errors of this package. Each message has what it got, what it expected and what to do.

Every warning and error is listed, with what it means and what to do, in ``hf_accum_fix/window/README.md``.

These end a training, and nothing else of this package does:

    UnsupportedVersionError, ForeignPatchError    by apply(), or as training begins
    UnsupportedSetupError, OptionsError           before the first step: it cannot be made exact, or is a wrong option
    SeamError                                     a step or loop that would train an uncorrected gradient
    ContractError                                 a contract or option that does not fit the loss; the loss is missing
    RankError                                     going on would hang: another rank failed, or has other micro-batches

Whatever else fails while a loss is looked at is contained (`window.host.Host.contained`): the training goes on as
stock's, with one warning, and is reported as not exact.
"""

from __future__ import annotations

from collections.abc import Mapping


class AccumFixError(RuntimeError):
    """Base of the errors of this package."""


class UnsupportedVersionError(AccumFixError):
    """The installed transformers is missing or too old."""


class SeamError(AccumFixError):
    """A method or attribute that we use upstream is missing, has another signature, or is bypassed."""


class ForeignPatchError(AccumFixError):
    """Another package replaced a method that we wrap, before or after us."""

    @classmethod
    def replaced(cls, method: str, author: str, advice: str = "") -> ForeignPatchError:
        """The refusal to wrap a method, such as "Trainer.compute_loss", that author has replaced."""
        advice = advice or "call apply() before that package patches"
        return cls(
            f"got {author} in place of {method}, which does not call the original; expected the original; {advice}, or "
            f"wrap it by allow_foreign=({author!r},)"
        )

    @classmethod
    def dropped(cls, by_method: Mapping[str, str], advice: str = "") -> ForeignPatchError:
        """The refusal to train with methods whose wrappers other packages, by method, dropped after apply()."""
        names = tuple(dict.fromkeys(by_method.values()))
        advice = advice or "omit that patch"
        return cls(
            f"got {', '.join(names)} in place of {', '.join(by_method)}, replaced after apply(); expected the "
            f"wrapper of hf_accum_fix, or training would be stock again; {advice}, or patch first and then "
            f"apply(allow_foreign={names!r})"
        )


class UnsupportedSetupError(AccumFixError):
    """The training setup (DataParallel, apex, sequence parallelism ...) cannot be made exact."""


class ContractError(AccumFixError):
    """The divisor of a loss could not be found, or differs from the declared one."""


class RankError(AccumFixError):
    """Another rank failed, or has other micro-batches or another loss than this rank."""


class UnevenRanksError(RankError, SeamError):
    """The ranks have different micro-batches; also a `SeamError`, for loops written before 0.2."""


class OptionsError(AccumFixError):
    """An option or the environment variable has an invalid value."""


class StandAsideError(Exception):
    """Looking at a loss failed on a rank, so all ranks train as stock does; never raised to the user."""


#: What is raised on purpose, and so is not contained.
BY_DESIGN = (
    UnsupportedVersionError,
    SeamError,
    ForeignPatchError,
    UnsupportedSetupError,
    ContractError,
    RankError,
    OptionsError,
    StandAsideError,
)
