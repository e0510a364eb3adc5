"""The same functions as a Trainer subclass: for libraries, which must not patch a class that others use too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import Seq2SeqTrainer, Trainer

from hf_accum_fix import overrides
from hf_accum_fix.errors import SeamError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides import evaluation

_SEAMS = ("train", "get_batch_samples", "training_step", "compute_loss")


if TYPE_CHECKING:
    # It is only used above a Trainer, and so mypy checks it against the installed release.
    _Base = Trainer
else:
    _Base = object


class GlobalBatchMixin(_Base):
    """Computes the loss by the global item count, for every split into micro-batches and ranks.

    It has to come directly before ``Trainer`` in the method resolution order, so that a subclass's ``compute_loss``
    reaches it by ``super()``: put it last.

        class MyTrainer(SFTTrainer, GlobalBatchTrainer): ...

    Attributes:
        global_batch_options: a frozen `Options`; override it in the class body.

    Raises:
        SeamError: when a class is defined whose bases would be bypassed.
    """

    global_batch_options: ClassVar[Options] = Options()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        below = cls.__mro__[cls.__mro__.index(GlobalBatchMixin) + 1 :]
        for seam in _SEAMS:
            owner = next((base for base in below if seam in vars(base)), None)
            if owner not in (None, Trainer):
                raise SeamError(
                    f"{cls.__name__}: {owner.__name__}.{seam} comes after GlobalBatchMixin and would be bypassed; "
                    f"put the mixin last: class {cls.__name__}({owner.__name__}, GlobalBatchTrainer)"
                )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and refuse first what cannot be right."""
        return overrides.train(super().train, self, args, kwargs, options=self.global_batch_options)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch one window and count its items over all ranks."""
        original = super().get_batch_samples
        return overrides.get_batch_samples(original, self, args, kwargs, options=self.global_batch_options)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch: forward, backward, and the loss to log."""
        original = super().training_step
        return overrides.training_step(original, self, args, kwargs, options=self.global_batch_options)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss whose plain mean over micro-batches and ranks is the global batch's."""
        original = super().compute_loss
        return overrides.compute_loss(original, self, args, kwargs, options=self.global_batch_options)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; with ``eval_loss`` among the options the loss is the mean over the set's items."""
        original = super().evaluation_loop
        return evaluation.evaluation_loop(original, self, args, kwargs, options=self.global_batch_options)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The same under ``use_legacy_prediction_loop``, which releases before 5.0 have."""
        original = super().prediction_loop  # type: ignore[misc]
        return evaluation.evaluation_loop(original, self, args, kwargs, options=self.global_batch_options)


class GlobalBatchTrainer(GlobalBatchMixin, Trainer):
    """`transformers.Trainer` whose gradient and log are the global batch's."""


class GlobalBatchSeq2SeqTrainer(GlobalBatchMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` whose gradient and log are the global batch's."""
