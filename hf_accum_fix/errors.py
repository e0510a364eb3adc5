"""The errors of this package. Each message has what was found, what is expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class AccumFixError(RuntimeError):
    """Base of every error this package raises on purpose."""


class UnsupportedVersionError(AccumFixError):
    """The installed transformers is missing or too old."""


class SeamError(AccumFixError):
    """A method or attribute that we use upstream is missing, has another signature, or is bypassed."""


class ForeignPatchError(AccumFixError):
    """Somebody else replaced a method that we wrap, before or after us."""

    @classmethod
    def replaced(cls, method: str, author: str, advice: str = "") -> ForeignPatchError:
        """The refusal to wrap a method, such as "Trainer.compute_loss", that author has replaced."""
        advice = advice or "apply before that package patches"
        return cls(
            f"{method} was replaced by {author}, which does not lead to the original; expected the "
            f"original; {advice}, or wrap around it by allow_foreign=({author!r},)"
        )

    @classmethod
    def dropped(cls, by_method: Mapping[str, str], advice: str = "") -> ForeignPatchError:
        """The refusal to train with methods whose wrappers others, named by method, have dropped since apply()."""
        names = tuple(dict.fromkeys(by_method.values()))
        advice = advice or "omit that patch"
        return cls(
            f"{', '.join(by_method)} no longer leads to hf_accum_fix: {', '.join(names)} replaced it after apply(), "
            f"and training would be stock again; {advice}, or patch first and then apply(allow_foreign={names!r})"
        )


class UnsupportedSetupError(AccumFixError):
    """The training setup (DataParallel, apex, tensor parallelism ...) is one that cannot be made exact."""


class ContractError(AccumFixError):
    """What the loss divides by could not be found, or is not as declared."""


class RankError(AccumFixError):
    """Another rank failed, or has other micro-batches or another loss than this one."""


class UnevenRanksError(RankError, SeamError):
    """The ranks do not have the same micro-batches; a `SeamError` too, as it was for loops before 0.2."""


class OptionsError(AccumFixError):
    """An option or the environment variable has an invalid value."""
