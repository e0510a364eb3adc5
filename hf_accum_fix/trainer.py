"""The patch as a Trainer subclass, for libraries: they must not patch a class that others use too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import Seq2SeqTrainer, Trainer

from hf_accum_fix import overrides
from hf_accum_fix.confirmation import confirm_class
from hf_accum_fix.errors import SeamError
from hf_accum_fix.evaluation import evaluation_loop
from hf_accum_fix.options import Options

_SEAMS = ("train", "get_batch_samples", "training_step", "compute_loss")


if TYPE_CHECKING:
    # For mypy: the mixin is only used together with a Trainer.
    _Base = Trainer
else:
    _Base = object


class GlobalBatchMixin(_Base):
    """Scale the loss by the global item count, for every split into micro-batches and ranks.

    Put it last in the class statement, directly before ``Trainer`` in the method resolution order, so that a subclass's
    ``compute_loss`` reaches it by ``super()``.

        class MyTrainer(SFTTrainer, GlobalBatchTrainer): ...

    Attributes:
        global_batch_options: frozen `Options`; set them in the class body.

    Raises:
        SeamError: if a class statement would bypass a base.
    """

    global_batch_options: ClassVar[Options] = Options()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        below = cls.__mro__[cls.__mro__.index(GlobalBatchMixin) + 1 :]
        for seam in _SEAMS:
            owner = next((base for base in below if seam in vars(base)), None)
            if owner not in (None, Trainer):
                raise SeamError(
                    f"got {cls.__name__}, in which GlobalBatchMixin would bypass {owner.__name__}.{seam}; expected the "
                    f"mixin last; write class {cls.__name__}({owner.__name__}, GlobalBatchTrainer)"
                )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse unsupported setups, confirm once per job, then train."""
        confirm_class(type(self).__name__, self.global_batch_options)
        return overrides.train(super().train, self, args, kwargs, options=self.global_batch_options)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch one window and count its items over all ranks."""
        original = super().get_batch_samples
        return overrides.get_batch_samples(original, self, args, kwargs, options=self.global_batch_options)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward and backward, and return the loss to log."""
        original = super().training_step
        return overrides.training_step(original, self, args, kwargs, options=self.global_batch_options)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss whose mean over micro-batches and ranks is the global batch's."""
        original = super().compute_loss
        return overrides.compute_loss(original, self, args, kwargs, options=self.global_batch_options)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; with the option ``eval_loss`` the loss is the mean over the set's items."""
        original = super().evaluation_loop
        return evaluation_loop(original, self, args, kwargs, options=self.global_batch_options)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The same under ``use_legacy_prediction_loop`` of releases before 5.0."""
        original = super().prediction_loop  # type: ignore[misc]
        return evaluation_loop(original, self, args, kwargs, options=self.global_batch_options)


class GlobalBatchTrainer(GlobalBatchMixin, Trainer):
    """`transformers.Trainer` with the gradient and logged loss of the global batch."""


class GlobalBatchSeq2SeqTrainer(GlobalBatchMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with the gradient and logged loss of the global batch."""
