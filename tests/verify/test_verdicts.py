"""What verify() answers where an answer is hard to give: never "exact" without grounds, never a bare error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.numerics.heads import before
from tests.trainings import computing
from tests.verify.trainers import Contrastive, Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")

Make = Callable[[Path], Any]


def of(model: Callable[[], nn.Module], samples: Any = None, **given: Any) -> Make:
    """A trainer of eight samples, or of these."""
    return lambda output: small(model(), output, points(8) if samples is None else samples, **given)


def single() -> nn.Module:
    return Regression().float()


def in_float32(times: float = 1.0) -> list[Any]:
    return [{name: value.float() * times for name, value in each.items()} for each in points(8)]


def tokens(counts: Sequence[int], width: int = 6) -> list[dict[str, Tensor]]:
    """Samples of `width` tokens, so many of them with a target."""
    g = torch.Generator().manual_seed(5)
    samples = []
    for count in counts:
        labels = torch.randint(0, 7, (width,), generator=g)
        labels[count:] = -100
        samples.append({"x": torch.randn(width, 4, generator=g), "labels": labels})
    return samples


RAGGED = (6, 1, 5, 2, 1, 6, 3, 1)


class Tagger(nn.Module):
    """A mean over targets, or their sum divided by the number, plus a penalty that is a mean over all tokens."""

    def __init__(self, *, penalty: float = 0.0, by_number: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 7)
        self.penalty, self.by_number = penalty, by_number
        self.accepts_loss_kwargs = by_number

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(x)
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        number = (labels != -100).sum() if num_items_in_batch is None or not self.by_number else num_items_in_batch
        return {"loss": summed / number + self.penalty * logits.logsumexp(-1).square().mean(), "logits": logits}


class Half(Regression):
    """In bfloat16, whatever type the collator makes of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x.bfloat16())))[:, 0]
        return {"loss": (logits.float() - labels.float()).square().mean(), "logits": logits}


class Rewindable(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(points(20))


class OneWay(Rewindable):
    def __init__(self) -> None:
        self.rest = iter(points(20))

    def __iter__(self) -> Iterator[Any]:
        return self.rest


class Groups(Regression):
    """One query and its three passages a sample; the first passage is the right one."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(x)))[:, 0].view(len(labels), -1)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def passages() -> list[Any]:
    drawn = points(24)
    return [{"passages": [each["x"] for each in drawn[at : at + 3]]} for at in range(0, 24, 3)]


def flattened(samples: list[Any]) -> dict[str, Tensor]:
    x = torch.stack([each for sample in samples for each in sample["passages"]])
    return {"x": x, "labels": torch.zeros(len(samples), dtype=torch.long)}


class NoOutputs(Trainer):
    """As the trainers of TRL that sample: no outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        if return_outputs:
            raise ValueError("The GRPOTrainer does not support returning outputs")
        return model(**inputs)["loss"]


class OfRows(Trainer):
    """Its batches are lists of rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(torch.stack([row["x"] for row in inputs]), torch.stack([row["labels"] for row in inputs]))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.words(x).mean(1))[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def times(factor: Callable[[Any], float]) -> type:
    """Scales the base's loss by what is made of the trainer."""

    class Times(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found, by = super().compute_loss(*args, **kwargs), factor(self)
            return (found[0] * by, found[1]) if isinstance(found, tuple) else found * by

    return Times


def steps_of(trainer: Any) -> int:
    return trainer.args.gradient_accumulation_steps


#: Its sums over a window leave the range of float32, which the full batch does not.
OverflowsInAWindow = times(lambda trainer: 1.0 if steps_of(trainer) == 1 else 3e37)
#: Right in its first step.
Later = times(lambda trainer: steps_of(trainer) if trainer.state.global_step > 0 and trainer.is_in_train else 1)


#: Weighs its loss by the calls that it counts.
Counts = times(lambda trainer: 1 / next(vars(trainer).setdefault("calls", itertools.count(1))))


class TimesThirteenTenths(Trainer):
    """Scales its gradients after every micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad.mul_(1.3)
        return loss


class WrongLog(Trainer):
    """Four times the right loss over a right gradient."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs) * 4


def needs_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """For a head that declares no number stock passes None, and so do we: neither trains it."""
    logits = model(**inputs)["logits"]
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    return summed / number, logits


def on_two_gpus(output: Path) -> Any:
    """As far as the Trainer knows."""
    trainer = small(Regression(), output, points(8))
    trainer.args._n_gpu = 2
    return trainer


#: Of a split that is off, one is given.
REASONS = ("off, relative error", "no split can equal", "overflow")
OFF, EXACT, UNKNOWN = Kind.OFF, Kind.EXACT, Kind.COULD_NOT_TELL
SLOW = pytest.mark.slow
SPARSE_SAMPLES = [{"x": torch.arange(3) + place % 6, "labels": torch.tensor(float(place))} for place in range(8)]


def row(
    name: str, make: Make, kind: Kind, *words: str, fixed: Any = None, absent: str = "", marks: Any = (), **how: Any
) -> Any:
    """``words`` are in the verdict, or noted, ``absent`` is not; ``fixed``: the verdict on apply()."""
    return pytest.param(make, how, kind, words, absent, fixed, id=name, marks=marks)


def exact(name: str, make: Make, *words: str, **how: Any) -> Any:
    return row(name, make, EXACT, *words, fixed=EXACT, **how)


def stock(name: str, make: Make, kind: Kind, *words: str, marks: Any = SLOW, **how: Any) -> Any:
    return row(name, make, kind, *words, marks=marks, with_apply=False, **how)


NEEDS_NUMBER = computing(needs_number, Trainer)
LATER = of(Regression, cls=Later)


@pytest.mark.parametrize(
    ("make", "how", "kind", "words", "absent", "fixed"),
    [
        row("batch norm", of(lambda: Regression(batch_norm=True)), OFF, "BatchNorm in training mode (norm)",
            "no split can equal", fixed=OFF, splits=[2, 8]),
        row("in-batch negatives", of(Contrastive), OFF, "in-batch negatives", "no split can equal the full batch",
            fixed=OFF, splits=[2, 8]),
        row("no labels", of(Regression, [{"x": each["x"]} for each in points(8)]), UNKNOWN, "without a loss"),
        row("nothing to train", of(lambda: Regression().requires_grad_(False)), UNKNOWN, "trainable"),
        # Two, two and one: the stock Trainer weighs the last one as much as the two before.
        row("fewer than a batch", of(Regression, points(5)), OFF, fixed=EXACT),
        # A gradient of zero is no proof.
        row("zero", of(Regression, cls=times(lambda _: 0.0)), UNKNOWN, "zero"),
        *(row(f"overflow of {by}", of(single, in_float32(), cls=times(lambda _, by=by: by)), UNKNOWN, "overflow",
              splits=[1, 2]) for by in (1e39, float("nan"))),
        stock("overflow of a split", of(single, in_float32(1e3), cls=OverflowsInAWindow), OFF,
              "overflow", splits=[1], marks=()),
        row("calls counted", of(Regression, cls=Counts), UNKNOWN, "random"),
        row("lists of rows", of(Regression, cls=OfRows, data_collator=list), OFF, "no split can equal", splits=[3]),
        row("two GPUs", on_two_gpus, UNKNOWN, "DataParallel"),
        row("z", of(lambda: Tagger(penalty=1e-3, by_number=True), tokens(RAGGED)), OFF, "relative error", marks=SLOW),
        row("gradients scaled", of(Half, cls=TimesThirteenTenths), OFF, absent="rounding", marks=SLOW),
        row("needs a number it does not get", of(Tagger, tokens(RAGGED), cls=NEEDS_NUMBER), UNKNOWN, fixed=UNKNOWN,
            marks=SLOW),
        exact("needs a number", of(lambda: Tagger(by_number=True), tokens(RAGGED), cls=NEEDS_NUMBER), marks=SLOW),
        stock("the least factor in half precision", of(Half, points(16), per_device=1, accumulate=16,
              cls=times(lambda trainer: 1.0 if steps_of(trainer) == 1 else 17 / 16)), OFF, splits=[1]),
        stock("a wrong log over a right gradient", of(Regression, cls=WrongLog), EXACT, "logged loss is 4 times"),
        stock("later, in the first step", LATER, EXACT),
        *(stock(f"later, in step {step}", LATER, OFF, "G times", step=step) for step in (1, 1000)),
        exact("dropout", of(lambda: Regression(dropout=0.5)), "dropout was turned off for the comparison",
              splits=[2, 8]),
        exact("a stream that starts anew", of(Regression, Rewindable(), max_steps=2), splits=[2, 8]),
        exact("grouped rows", of(Groups, passages(), data_collator=flattened), splits=[1, 2, 8]),
        exact("no outputs", of(Regression, cls=NoOutputs), splits=[2, 8]),
        exact("sparse", of(Sparse, SPARSE_SAMPLES, max_grad_norm=0.0), splits=[2, 8], reference="full"),
        # A right gradient is right whatever its size.
        *(exact(str(by), of(single, in_float32(), cls=times(lambda _, by=by: by)), splits=[1, 2])
          for by in (1e-30, 1e36)),
    ],
)  # fmt: skip
def test_a_verdict(
    make: Make, how: dict[str, Any], kind: Kind, words: tuple[str, ...], absent: str, fixed: Kind | None, tmp_path: Path
) -> None:
    trainer = make(tmp_path)
    report = verify(trainer, **how)
    said = " ".join((report.verdict.words, *report.notes))
    assert report.verdict.kind is kind and all(each in said for each in words), report
    for each in report.results:
        assert each.verdict.kind is not EXACT or (each.error is not None and each.error < 1e-5), each
        assert each.verdict.kind is not OFF or any(reason in each.verdict.words for reason in REASONS), each
    if fixed is not None:
        assert report.verdict_of("apply()").kind is fixed, report
    if fixed is OFF:
        assert all(each in report.verdict_of("apply()").words for each in words)
    assert not absent or absent not in said
    assert trainer.state.global_step == 0 and (kind is not EXACT or report.samples == (8,))


def test_a_stream_that_cannot_is_refused_untouched_or_given_its_own_sample(tmp_path: Path) -> None:
    stream = OneWay()
    trainer = small(Regression(), tmp_path, stream, max_steps=2)
    refused = verify(trainer).verdict
    assert refused.kind is UNKNOWN and "pass some of its samples: samples=[...]" in refused.words
    assert verify(trainer, [2, 8], samples=points(8)).verdict.kind is EXACT
    assert len(list(stream.rest)) == 20


class Inflated(Regression):
    """Takes any keyword and drops the number: G times in the releases since 4.46."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


RELEASE = pytest.mark.skipif(
    before("4.46") or (before("5.6") and not before("5.2")), reason="stock trains this head at another factor"
)


@RELEASE
def test_the_first_line_is_about_the_users_own_split(tmp_path: Path) -> None:
    report = verify(small(Inflated(), tmp_path, points(8)))
    first, *rest = str(report).splitlines()
    assert first.startswith("4x too large at your 2 x 4 (G times)") and first.endswith("apply() makes it exact"), first
    assert not report.ok and not report
    also = next(line for line in rest if line.startswith("also looked at"))
    assert "1 x 8" in also and "8x too large" in also
