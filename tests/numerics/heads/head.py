"""What a head is: how to build it tiny, its samples, and its loss for a whole batch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor, nn

#: Float64 from end to end: what is left is the rounding of sums in another order.
FLOAT64 = 1e-12
#: The library computes the loss in float32 inside a float64 model (``logits.float()``).
FLOAT32_LOSS = 1e-6


def before(release: str) -> bool:
    """What the stock Trainer gets wrong depends on the release these tests run on."""
    return Version(hf.__version__) < Version(release)


VOCABULARY = 48
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Sample = dict[str, Any]
Batch = dict[str, Any]


class Origin(str, Enum):
    """Which list of what 5.23.0 gets wrong a class of the library was taken from.

    Classes that take ``**kwargs`` and drop the count in their own loss; that add a router loss to one that is divided
    by it; that declare ``accepts_loss_kwargs = False``; that hand the count to the loss of their ``loss_type``, which
    drops it; that have no ``loss_type``, so that position 0 is counted as well.
    """

    DROPS = "drops the count"
    ROUTER = "adds a router loss"
    DECLARES_FALSE = "declares False"
    LOSS_TYPE_DROPS = "its loss_type drops the count"
    POSITION_0 = "position 0 is counted"


@dataclass(frozen=True)
class Head:
    """One kind of loss.

    Attributes:
        build: a new model, in float64, the same every time.
        samples: eight ragged samples.
        tolerance: relative, of parameter change, loss and gradient norm.
        model: the class of the library that is built; empty for modules of one's own.
        origin: the list that class was taken from; None: none of them.
        stock_wrong: the installed stock Trainer is off by more than 1e-3 for the split (1, 8).
        loss: loss of a batch as the promise defines it, where that is not what the model returns for the full batch.
        router: coefficient of the model's router loss, which is a mean over micro-batches and ranks by convention.
        router_loss: that loss, from the model's outputs.
        arguments, trainer: further keyword arguments of TrainingArguments and of the Trainer.
        told_false: ``model_accepts_loss_kwargs`` is set False after ``Trainer.__init__``, as LLaMA-Factory does.
        everyday: False: every cut of it is marked.
        exact: False for a loss that is no weighted mean over items; its reference is the mean over micro-batches.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: Sequence[Sample]
    tolerance: float = FLOAT32_LOSS
    model: str = ""
    origin: Origin | None = None
    stock_wrong: bool = True
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    router: float = 0.0
    router_loss: Callable[[Any], Tensor] = operator.itemgetter("aux_loss")
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[Sequence[Sample]], Batch] | None = None
    exact: bool = True
    everyday: bool = True
    told_false: bool = False

    @property
    def in_zoo(self) -> bool:
        """Whether it stands for its class alone, so that the everyday tests run it at fewer cuts."""
        return self.name == self.model

    def batch(self, samples: Sequence[Sample]) -> Batch:
        return (self.collate or collate)(samples)

    def reference_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.loss is not None:
            return self.loss(model, dict(batch))
        return model(**batch)["loss"]


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad token-wise inputs on the right, stack the rest, keep lists of dicts."""
    batch: Batch = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if not isinstance(values[0], Tensor):
            batch[key] = values
        elif values[0].ndim == 1:
            fill = -100 if "labels" in key else 0
            batch[key] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
        else:
            batch[key] = torch.stack(values)
    return batch


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        model = build().to(dtype)
        # Heads start near zero: spread the logits, so that one token's loss is not another's.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3.0)
        return model

    return built


def declared_false(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A head that says it takes no item count, as Qwen-VL and 66 other classes of 5.23.0 do."""

    def built() -> nn.Module:
        model: Any = build()
        model.accepts_loss_kwargs = False
        return model

    return built


def of_class(
    model: str,
    config: Mapping[str, Any],
    samples: Sequence[Sample],
    tolerance: float = FLOAT32_LOSS,
    *,
    name: str = "",
    origin: Origin | None = Origin.DROPS,
    prepare: Callable[[nn.Module], None] | None = None,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Head:
    """A head that is a class of the library, built from its config; neither is looked up before it is built.

    Args:
        prepare: changes the model once it is built.
        dtype: of the model; float32 where its code makes float32 tensors of its own.
        more: further attributes of the head.
    """

    def build() -> nn.Module:
        cls = getattr(hf, model)
        built = cls(cls.config_class(**copy.deepcopy(dict(config))))
        if prepare is not None:
            prepare(built)
        return built

    return Head(name or model, seeded(build, dtype), samples, tolerance, model=model, origin=origin, **more)


def of_classes(
    rows: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any], samples: Sequence[Sample], *given: Any, **more: Any
) -> list[Head]:
    """A head a class, of what its config says besides its family's."""
    return [of_class(name, {**base, **config}, samples, *given, **more) for name, config in rows.items()]


def plain(names: str, head: str = "") -> dict[str, Mapping[str, Any]]:
    """Classes whose config says nothing more; ``head``: the end of each name."""
    return {f"{name}{head}": {} for name in names.split()}


def freeze(part: str) -> Callable[[nn.Module], None]:
    """Freezes the parameters whose name has ``part`` in it."""

    def prepare(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.requires_grad_(False)

    return prepare
