"""The errors of this package: each says what was found, what is needed and what to do."""

from __future__ import annotations


class AccumFixError(RuntimeError):
    """Base of every error this package raises on purpose."""


class UnsupportedVersionError(AccumFixError):
    """The installed transformers is missing or too old to be mended."""


class SeamError(AccumFixError):
    """A method to be wrapped is missing or has another signature, or training did not come through it."""


class ForeignPatchError(AccumFixError):
    """Somebody else replaced a method that we wrap, before or after us."""

    @classmethod
    def replaced(cls, method: str, author: str) -> ForeignPatchError:
        """The refusal to wrap a method, such as "Trainer.compute_loss", that author has replaced."""
        return cls(
            f"{method} was replaced by {author}, which does not lead to the original; needed is the "
            f"original; apply before that package patches, or wrap around it by allow_foreign=({author!r},)"
        )


class UnsupportedSetupError(AccumFixError):
    """The training setup (DataParallel, apex, tensor parallelism ...) is one that cannot be made exact."""


class ContractError(AccumFixError):
    """How the model reduces its loss could not be settled."""


class OptionsError(AccumFixError):
    """An option or the environment variable has a value that means nothing here."""
