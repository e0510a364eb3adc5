"""verify() on trainers made to mislead it: never "exact" where a gradient is off, never a bare error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix import verify
from hf_accum_fix.testing import assert_invariant
from hf_accum_fix.verification.report import Kind
from tests.verify.trainers import Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")


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


class Pairs(Regression):
    """The first half of a batch is preferred to the second."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(x)))[:, 0]
        half = len(scores) // 2 or 1
        return {"loss": -nn.functional.logsigmoid(scores[:half] - scores[-half:]).mean(), "logits": scores}


class Mixup(Regression):
    """Mixes the samples of a batch at random, from three on."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if len(x) > 2:
            x = torch.lerp(x, x[torch.randperm(len(x))], 0.4)
        return super().forward(x, labels)


class Rarely(Regression):
    """Leaves its hidden layer out at times: by a rate that no module holds, by one of its configuration, or neither."""

    def __init__(self, rate: float = 0.0, configured: float = 0.0) -> None:
        super().__init__()
        self.rare, self.config = rate, SimpleNamespace(layerdrop=configured)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        skipped = float(torch.rand(())) < max(self.rare, self.config.layerdrop)
        return super().forward(torch.zeros_like(x) if skipped else x, labels)


class OwnNoise(Regression):
    """Noise of a generator that no seed reaches."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(1)
        return super().forward(x + 0.5 * torch.randn(x.shape, generator=self.generator), labels)


def noisy_gradients(output: Path) -> Any:
    model = Regression()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad + torch.randn_like(grad))
    return small(model, output, points(8))


@pytest.mark.parametrize(
    ("trainer_in", "wanted", "words"),
    [
        (lambda output: small(Pairs(), output, points(8)), Kind.OFF, "no split can equal"),
        (noisy_gradients, Kind.COULD_NOT_TELL, "random"),
        (lambda output: small(Mixup(), output, points(8)), Kind.COULD_NOT_TELL, "random"),
        (lambda output: small(Rarely(0.1), output, points(8)), Kind.COULD_NOT_TELL, "random"),
        (lambda output: small(OwnNoise(), output, points(8)), Kind.COULD_NOT_TELL, "random"),
        *(
            (
                lambda output, size=size: small(Tagger(penalty=size, by_number=True), output, tokens(RAGGED)),
                Kind.OFF,
                "off, relative error",
            )
            for size in (1e-1, 1e-2, 1e-3)
        ),
    ],
    ids=["pairs", "noisy gradients", "mixup", "rare noise", "own generator", "z 0.1", "z 0.01", "z 0.001"],
)
def test_what_no_floor_excuses(trainer_in: Callable[[Path], Any], wanted: Kind, words: str, tmp_path: Path) -> None:
    report = verify(trainer_in(tmp_path))
    assert report.verdict.kind is wanted and words in str(report)
    for each in report.results:
        assert each.verdict.kind is not Kind.EXACT or (each.error is not None and each.error < 1e-5), each


def test_a_rate_of_layerdrop_in_the_configuration_is_turned_off_and_comes_back(tmp_path: Path) -> None:
    model = Rarely(configured=0.5)
    report = verify(small(model, tmp_path, points(8)))
    assert report.verdict.kind is Kind.EXACT and model.config.layerdrop == 0.5
    assert any("random numbers" in note for note in report.notes), report.notes


def test_a_gradient_that_is_off_is_never_rounding(tmp_path: Path) -> None:
    class Doubles(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            for parameter in self.model.parameters():
                parameter.grad.mul_(1.3)
            return loss

    report = verify(small(Half(), tmp_path, points(8), cls=Doubles))
    assert report.verdict.kind is Kind.OFF and "rounding" not in str(report.verdict)


class Half(Regression):
    """In bfloat16, whatever type the collator makes of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x.bfloat16())))[:, 0]
        return {"loss": (logits.float() - labels.float()).square().mean(), "logits": logits}


@pytest.mark.parametrize("reference", ["full", "streamed"])
def test_roundings_of_many_micro_batches_in_half_precision_are_no_floor(reference: str, tmp_path: Path) -> None:
    """Its own floor is one forward's: what 256 sums in bfloat16 lose is off, and is called by its name."""
    samples = [{**each, "labels": each["labels"] + 4} for each in points(256)]
    trainer = small(Half(), tmp_path, samples, per_device=1, accumulate=256)
    report = verify(trainer, splits=[1, 64], reference=reference)
    many, few = report.of("stock")
    assert many.error is not None and many.error > report.tolerance
    assert many.verdict.kind is Kind.OFF and "bfloat16" in many.verdict.words
    assert few.verdict.kind is Kind.EXACT and few.error is not None and few.error < 0.01
    assert report.tolerance < 0.02


@pytest.mark.parametrize("factor", [1.3, 17 / 16, 2.0], ids=str)
def test_the_least_factor_is_detected_in_half_precision(factor: float, tmp_path: Path) -> None:
    class Scaled(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            if self.args.gradient_accumulation_steps == 1:
                return found
            return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    trainer = small(Half(), tmp_path, points(16), cls=Scaled, per_device=1, accumulate=16)
    report = verify(trainer, splits=[1], with_apply=False)
    assert report.verdict.kind is not Kind.EXACT, report


def test_uniform_counts_are_no_proof_of_weights(tmp_path: Path) -> None:
    """Two windows of samples with six targets each, then ragged ones, which are looked for."""
    samples = tokens((6,) * 16 + RAGGED * 2)
    trainer = small(Tagger(), tmp_path, samples)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    report = verify(trainer, splits=[1, 2])
    assert {each.window for each in report.results} == {0, 1}
    assert report.verdict.kind is Kind.OFF and report.verdict_of("apply()").kind is Kind.EXACT


def test_only_uniform_counts_are_noted(tmp_path: Path) -> None:
    report = verify(small(Tagger(), tmp_path, tokens((6,) * 24)), splits=[1, 2])
    assert report.verdict.kind is Kind.EXACT and any("weigh" in note for note in report.notes), report.notes


class Later(Trainer):
    """Right in its first step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        late = self.state.global_step > 0 and self.is_in_train
        return loss * self.args.gradient_accumulation_steps if late else loss


def test_a_later_step_on_request(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, points(8), cls=Later)
    assert verify(trainer, with_apply=False).verdict.kind is Kind.EXACT
    for step in (1, 1000):
        report = verify(trainer, with_apply=False, step=step)
        assert report.verdict.kind is Kind.OFF and "G times" in report.verdict.words
    assert trainer.state.global_step == 0


class ReadsSteps(Trainer):
    """Divides the regularisation by the micro-batches of the window, which only a loop notes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class NeedsNumber(Trainer):
    """Cannot do without the number."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        logits = model(**inputs)["logits"]
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        loss = summed / num_items_in_batch
        return (loss, logits) if return_outputs else loss


def test_a_loss_that_reads_the_length_of_the_window(tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, points(8), cls=ReadsSteps), with_apply=False)
    assert report.verdict.kind in (Kind.EXACT, Kind.OFF) and report.results


@pytest.mark.parametrize("by_number", [True, False])
def test_a_loss_that_cannot_do_without_the_number(by_number: bool, tmp_path: Path) -> None:
    report = verify(small(Tagger(by_number=by_number), tmp_path, tokens(RAGGED), cls=NeedsNumber))
    # For a head that declares no number stock passes None, and so do we: neither trains it.
    wanted = Kind.EXACT if by_number else Kind.COULD_NOT_TELL
    assert [each.verdict.kind for each in report.of("apply()")] == [wanted] * 4, report
    assert {each.verdict.kind for each in report.of("stock")} == {wanted}


class Inflated(Regression):
    """Takes any keyword and drops the number: G times in the releases since 4.46."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def test_the_users_own_split_decides_and_the_others_are_named(tmp_path: Path) -> None:
    report = verify(small(Inflated(), tmp_path, points(8), per_device=8, accumulate=1))
    assert report.verdict.words == "exact at your 8 x 1" and "also looked at: 8x too large at 1 x 8" in str(report)
    assert report.verdict_of("stock").kind is Kind.OFF
    with pytest.raises(AssertionError, match="off, relative error"):
        assert_invariant(small(Inflated(), tmp_path, points(8), per_device=8, accumulate=1))


class Quarter(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"] / 4, outputs) if return_outputs else outputs["loss"] / 4

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(model)


def test_what_is_not_verified_is_noted(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Changes(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("no callback is run")

    trainer = small(Regression(), tmp_path, points(8), cls=Quarter)
    trainer.add_callback(Changes())
    notes = "\n".join(verify(trainer, splits=[2], with_apply=False).notes)
    for words in ("Changes.on_pre_optimizer_step", "Quarter._clip_grad_norm", "0.25 times"):
        assert words in notes


class WrongLog(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs) * 4


def test_a_wrong_log_over_a_right_gradient_is_reported(tmp_path: Path) -> None:
    verdict = verify(small(Regression(), tmp_path, points(8), cls=WrongLog), with_apply=False).verdict
    assert verdict.kind is Kind.EXACT and "logged loss is 4 times" in verdict.words


# --- traces -----------------------------------------------------------------------------------------------------------


def popping(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Empties its samples, and shifts their targets in place."""
    labels = torch.stack([row.pop("labels").add_(1.0) for row in rows])
    return {"x": torch.stack([row.pop("x") for row in rows]), "labels": labels}


def test_a_collator_that_changes_its_samples_gets_them_anew(tmp_path: Path) -> None:
    samples = points(8)
    trainer = small(Regression(), tmp_path, samples)
    trainer.data_collator = popping
    wanted = torch.stack([each["labels"] for each in samples])
    report = verify(trainer)
    assert report.verdict.kind is Kind.EXACT, report
    assert torch.equal(torch.stack([each["labels"] for each in samples]), wanted)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Draws:
    """A collator with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = torch.stack([row["x"] for row in rows])
        return {
            "x": x + torch.randn(x.shape, generator=self.generator),
            "labels": torch.stack([row["labels"] for row in rows]),
        }


class Normalises(Regression):
    """Changes its parameters in its forward: scaled to norm one in place, and one that follows another."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm())
            self.last.bias.data = self.last.bias.data * 0.9
            self.last.weight.data.mul_(0.99)
        return super().forward(x, labels)


class Meter:
    def __init__(self) -> None:
        self.seen = [0]
        self.last: dict[str, float] = {}


class Metered(Trainer):
    """Counts on objects of its own."""

    counted: Meter

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.counted.seen[0] += 1
        self.counted.last["loss"] = 1.0
        return super().compute_loss(*args, **kwargs)


def plain(output: Path) -> Any:
    return small(Regression(), output, points(24), max_steps=3)


def with_collator(output: Path) -> Any:
    trainer = plain(output)
    trainer.data_collator = Draws()
    return trainer


def with_sampler(output: Path) -> Any:
    trainer = plain(output)
    sampler = torch.utils.data.RandomSampler(points(24), generator=torch.Generator().manual_seed(7))
    trainer._get_train_sampler = lambda *_: sampler
    return trainer


def with_loader(output: Path) -> Any:
    """A dataloader of the user's own, which is the same each time."""
    trainer = plain(output)
    generator = torch.Generator().manual_seed(7)
    loader = torch.utils.data.DataLoader(
        points(24), batch_size=2, shuffle=True, generator=generator, collate_fn=trainer.data_collator
    )
    trainer.get_train_dataloader = lambda: loader
    return trainer


def with_cached_loader(output: Path) -> Any:
    trainer = plain(output)
    loader = Trainer.get_train_dataloader(trainer)
    trainer.get_train_dataloader = lambda: loader
    return trainer


def changing(output: Path) -> Any:
    return small(Normalises(), output, points(24), max_steps=3)


def metered(output: Path) -> Any:
    trainer = small(Regression(), output, points(24), cls=Metered, max_steps=3)
    trainer.counted = Meter()
    return trainer


@pytest.mark.parametrize(
    "made",
    [with_collator, with_sampler, with_loader, with_cached_loader, changing, metered],
    ids=lambda made: made.__name__,
)
def test_the_training_that_follows_is_the_one_without_it(made: Callable[[Path], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = losses(made(tmp_path))
    torch.manual_seed(0)
    trainer = made(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    storages = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    verify(trainer)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == storages
    if hasattr(trainer, "counted"):
        assert trainer.counted.seen == [0] and trainer.counted.last == {}
    assert losses(trainer) == wanted


QUEUE: Any = SimpleQueue()


class Queued(torch.utils.data.IterableDataset[Any]):
    """A stream from a queue, wherever it keeps it."""

    def __init__(self, kept: str) -> None:
        while not QUEUE.empty():
            QUEUE.get()
        for each in points(60):
            QUEUE.put(each)
        self.source: Any = {
            "nested": {"queues": [QUEUE]},
            "closure": (lambda queue: lambda: queue.get())(QUEUE),
            "object": SimpleNamespace(inner=SimpleNamespace(rest=iter(points(60)))),
            "global": None,
        }[kept]

    def __iter__(self) -> Iterator[Any]:
        while not QUEUE.empty():
            yield QUEUE.get()


@pytest.mark.parametrize("kept", ["nested", "closure", "object", "global"])
def test_a_stream_from_a_queue_loses_nothing(kept: str, tmp_path: Path) -> None:
    report = verify(small(Regression(), tmp_path, Queued(kept), max_steps=2))
    assert report.verdict.kind is Kind.COULD_NOT_TELL and "cannot be rewound" in report.verdict.words
    assert QUEUE.qsize() == 60
