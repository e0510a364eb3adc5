"""A training put together from named parts, stock and patched, and what is wrong with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch.distributed as dist
from accelerate.utils import imports
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import hf_accum_fix
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.upstream import environment, seams
from tests import trainings
from tests.numerics.heads import Batch, Sample
from tests.random_trainings.parts import COLLATORS, HEADS, OVERRIDES, Head, Override, Tiny, built, drawn, in_forward
from tests.trainings import Case, Cut, Training, pieces, train

#: Relative error of a parameter change that rounding leaves at most: of a loss in float64, and in float32.
FLOOR, FLOOR32 = 1e-9, 5e-6
#: Warnings that say nothing of exactness.
BESIDE = ("no target", "the loss is a sum, so it grows")
#: What stock raises: it multiplies in place a loss whose backward needs it.
RAISED_BY_STOCK = ("modified by an inplace operation", "marked as ready twice")
#: Overrides whose labels are not those that were fetched.
MASKED_LATER = ("masked-in-step", "masked-in-place")
#: So many times stock's error is worse, also where it is said; less is chance where samples are coupled.
WORSE = 1.5
#: A stock training whose step is so many times the full batch's has diverged: any two errors differ there.
DIVERGED = 1e3
CUTS = ((2, 4), (4, 2), (1, 8), (3, 3), (8, 1))
CUTS_OF_TWO = ((2, 2), (1, 4), (4, 1), (2, 3))
#: Samples of the micro-batches of an uneven window, which is one of 2 x 4 otherwise.
UNEVEN = (3, 1, 2, 2)
_T = TypeVar("_T")
#: Parameters and buffers at which each window begins; none: where the last one has ended.
Begun = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Composition:
    """One training; ``outcome(Composition(...), folder)`` runs it again.

    Attributes:
        head, override, collator: their names in `parts`.
        data: a name in `parts.DATA` for every window.
        cut: samples of a micro-batch, and micro-batches of a window, on each rank.
        missing: samples that the last window lacks.
        declares_false: the model says that it takes no number.
        seed: of weights and samples.
        ranks: W.
        even: the model begins with nearly even probabilities.
        uneven: micro-batches are of `UNEVEN` sizes.
        loop: not a Trainer but accumulation windows, over a model whose own forward does what the override does.
    """

    head: str = "mean"
    override: str = "none"
    collator: str = "right"
    data: tuple[str, ...] = ("ragged",)
    cut: tuple[int, int] = (2, 4)
    missing: int = 0
    declares_false: bool = False
    seed: int = 0
    ranks: int = 1
    even: bool = False
    uneven: bool = False
    loop: bool = False

    @classmethod
    def read(cls, words: str) -> Composition:
        """From "head override collator data,data 2x4", and further fields as "seed=1" or, if true, by name."""
        head, override, collator, data, cut, *fields = words.split()
        per_device, _, accumulated = cut.partition("x")
        more: dict[str, Any] = {}
        for each in fields:
            name, _, number = each.partition("=")
            more[name.replace("-", "_")] = int(number) if number else True
        return cls(head, override, collator, tuple(data.split(",")), (int(per_device), int(accumulated)), **more)

    def __str__(self) -> str:
        """As `read` takes it."""
        parts = [self.head, self.override, self.collator, ",".join(self.data), "x".join(map(str, self.cut))]
        numbers = {"missing": self.missing, "seed": self.seed, "ranks": self.ranks}
        parts += [f"{name}={number}" for name, number in numbers.items()]
        flags = ("declares_false", "even", "uneven", "loop")
        return " ".join([*parts, *(name.replace("_", "-") for name in flags if getattr(self, name))])

    @property
    def floor(self) -> float:
        return FLOOR32 if HEADS[self.head].float32 or OVERRIDES[self.override].float32 else FLOOR

    def case(self) -> Case:
        head, override, collator = HEADS[self.head], OVERRIDES[self.override], COLLATORS[self.collator]
        size = self.cut[0] * self.cut[1] * self.ranks
        sizes = [size] * (len(self.data) - 1) + [size - self.missing]
        windows = [
            drawn(head, kind, count, 10 * self.seed + place)
            for place, (kind, count) in enumerate(zip(self.data, sizes, strict=True))
        ]

        def loss(model: Any, batch: Batch, step: int) -> Tensor:
            model.step = step
            return override.full(model, batch)

        ranks = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True} if self.ranks > 1 else {}
        return Case(
            repr(self),
            loss,
            lambda: self._model(head),
            windows,
            _dealing_unevenly(override.trainer(head)) if self.uneven else override.trainer(head),
            override.given(head),
            {"logging_strategy": "no", **override.arguments, **ranks},
            lambda samples: collator(samples, head),
            self.floor,
            [self.cut],
        )

    def loop_by(self, windows: trainings.Windows, case: Case, begun: Begun = ()) -> Training:
        loss = OVERRIDES[self.override].loss
        kind = Tiny if loss is None else in_forward(loss)
        return trainings.loop(case, self.micro_batches, windows, lambda: self._model(HEADS[self.head], kind), begun)

    @property
    def micro_batches(self) -> Cut:
        """Of a window, on each rank."""
        return UNEVEN if self.uneven else self.cut

    def _model(self, head: Head, kind: type[Tiny] = Tiny) -> nn.Module:
        model = built(head, self.seed, kind, learns=OVERRIDES[self.override].learns, even=self.even)
        if self.declares_false:
            model.accepts_loss_kwargs = False
        return model


def _dealing_unevenly(trainer: type) -> type:
    class Dealing(trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            samples, batches = range(len(self.train_dataset)), []
            while len(samples):
                for size in UNEVEN:
                    batches.append(list(samples[:size]))
                    samples = samples[size:]
            loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    return Dealing


def compositions(choose: Callable[[Sequence[_T]], _T], kind: str) -> Composition:
    """Every part may be drawn with every other that it can work with; what comes first is the simplest.

    Args:
        choose: one of several.
        kind: "one" rank, "two" ranks, or a "loop".
    """
    ranks, looped = 2 if kind == "two" else 1, kind == "loop"
    head = HEADS[choose([*HEADS])]
    override = OVERRIDES[choose([name for name, each in OVERRIDES.items() if suits(each, head, kind)])]
    uneven = ranks == 1 and choose([False, False, False, True])
    size, steps = cut = (2, 4) if uneven else choose(CUTS if ranks == 1 else CUTS_OF_TWO)
    # On several ranks accelerate would repeat samples.
    missing = 0 if uneven or ranks > 1 else choose([0, 1, size * steps // 2])
    least = max(head.windows, override.windows)
    count = choose([each for each in (1, 2, 3, 4) if each >= least])
    return Composition(
        head.name,
        override.name,
        choose([*COLLATORS]),
        tuple(choose(override.data(head)) for _ in range(count)),
        cut,
        missing,
        choose([False, True]),
        choose(range(2**16)),
        ranks,
        choose([False] * 7 + [True]),
        uneven,
        looped,
    )


def suits(override: Override, head: Head, kind: str) -> bool:
    """Whether an override can be drawn with a head, in a training of this kind."""
    if kind == "two" and override.learns:
        # What it learns is used beside the forward, which DistributedDataParallel refuses.
        return False
    if kind == "loop" and override.loss is None and override.name != "none":
        return False
    return override.suits(head)


class _Stepped(TrainerCallback):
    """Whether an optimizer step was taken."""

    def __init__(self) -> None:
        self.taken = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.taken = True


class Fault(NamedTuple):
    """What is wrong: "silent", "worse" or "crash", "broken" where stock does not train it either; and in words."""

    kind: str
    words: str


@dataclass(frozen=True)
class Outcome:
    """What became of a composition.

    Attributes:
        patched: None: it was not trained to its end.
        stock: None: it was not needed, as ours is exact, or it cannot train that at all.
        faults: what is wrong.
        refused: ours has said before its first step that it does not train that.
        exact: every window is, to the floor.
    """

    patched: Training | None
    stock: Training | None
    faults: tuple[Fault, ...]
    refused: bool = False
    exact: bool = False

    @property
    def verdict(self) -> str:
        """The first fault's kind, or what is right: "exact", "exact, warned of", "said", "refused" or "both raise"."""
        if self.faults:
            return self.faults[0].kind
        if self.patched is None:
            return "refused" if self.refused else "both raise"
        if not self.exact:
            return "said"
        return "exact" if self.patched.exact and not self.patched.said else "exact, warned of"


def outcome(composition: Composition, output: Path) -> Outcome:
    """Train a composition patched, and where that is not exact stock as well; on every rank alike.

    Of several ranks, one that raises leaves the others where they wait: whether stock trains that, new ranks can tell.
    """
    case, floor, stepped = composition.case(), composition.floor, _Stepped()
    try:
        patched = _ours(composition, replace(case, given={**case.given, "callbacks": [stepped]}), output)
    except Exception as error:
        if isinstance(error, AccumFixError) and not stepped.taken:
            return Outcome(None, None, (), refused=True)
        raised = (Fault("crash", f"raised, where stock trains: {type(error).__name__}: {error}"),)
        if composition.ranks > 1:
            return Outcome(None, None, raised)
        plain = stock(case, composition, output)
        return Outcome(None, plain, () if plain is None else raised)
    patched = _of_all_ranks(patched)
    if all(error <= floor for error in patched.errors):
        return Outcome(patched, None, (), exact=True)
    plain = stock(case, composition, output)
    if composition.cut[1] * composition.ranks == 1 and plain is not None and str(plain.errors) == str(patched.errors):
        # One micro-batch is the global batch, as in stock: what is off is rounding in a training that diverges.
        return Outcome(patched, plain, ())
    silent = [Fault("silent", words) for words in _without_stocks_nan(patched, plain).silent(floor)]
    worse = _worse(case, composition, patched, plain)
    if worse and len(patched.errors) > 1:
        # From where ours has gone: other parameters have another loss.
        worse = _worse(case, composition, patched, stock(case, composition, output, patched.begun))
    return Outcome(patched, plain, (*silent, *worse))


def _ours(composition: Composition, case: Case, output: Path) -> Training:
    if composition.loop:
        return composition.loop_by(trainings.ours, case)
    with hf_accum_fix.apply():
        return train(case, composition.cut, output)


def _worse(case: Case, composition: Composition, patched: Training, plain: Training | None) -> list[Fault]:
    """The fault that ours is further off than stock, by the windows that tell; none where stock has diverged."""
    if plain is None or any(isnan(error) or error > DIVERGED for error in plain.errors):
        return []
    each = zip(patched.errors, plain.errors, _telling(case, composition, patched), strict=True)
    telling = [errors for *errors, tells in each if tells]
    ours = max((error for error, _ in telling), key=lambda error: (isnan(error), error), default=0.0)
    theirs = max((error for _, error in telling), default=0.0)
    if ours <= WORSE * theirs + composition.floor:
        return []
    if composition.override in MASKED_LATER and patched.said:
        # Labels that go after the window was counted: of several terms no one number corrects it.
        return []
    return [Fault("worse", f"off by {ours:.1e}, where stock is off by {theirs:.1e}")]


def _telling(case: Case, composition: Composition, patched: Training) -> Iterator[bool]:
    """Whether a window has two micro-batches that count: of one, a sum that should be a mean is right by chance."""
    model: Any = case.model()

    def counts(samples: Sequence[Sample], step: int) -> bool:
        loss = float(case.loss(model, case.collate(samples), step).detach())
        return isfinite(loss) and loss != 0.0

    size = composition.cut[0]
    for step, (window, begun) in enumerate(zip(case.windows, patched.begun, strict=True)):
        # Of several ranks the micro-batches of all.
        cut = pieces(window, composition.micro_batches) if composition.ranks == 1 else _by(size, window)
        model.load_state_dict(begun, strict=False)
        yield sum(counts(samples, step) for samples in cut) > 1


def _by(size: int, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def _without_stocks_nan(patched: Training, plain: Training | None) -> Training:
    """A loss that is nan in stock too is in the log (not filtered), which is not silent; nor is what follows.

    So is the loss of a full batch that is nan itself, which is no reference.
    """
    if plain is None:
        return patched
    each = zip(patched.errors, plain.errors, patched.losses, strict=False)
    both = [(isnan(ours) and isnan(theirs)) or isnan(whole) for ours, theirs, whole in each]
    return replace(patched, errors=[0.0 if any(both[: at + 1]) else each for at, each in enumerate(patched.errors)])


def stock(case: Case, composition: Composition, output: Path, begun: Begun = ()) -> Training | None:
    """Train it by stock; None: that raises, as where it multiplies in place a loss whose backward needs it."""
    try:
        if composition.loop:
            return composition.loop_by(trainings.by_hand, case, begun)
        return train(case, composition.cut, output, begun)
    except RuntimeError as error:
        if not any(words in str(error) for words in RAISED_BY_STOCK):
            raise
        return None


def _of_all_ranks(training: Training) -> Training:
    """What any rank has said; it is called exact if all do, since a rank learns with the next window of the others'."""
    said = [(window, words) for window, words in training.said if not any(each in words for each in BESIDE)]
    mine = said, training.exact
    gathered: list[Any] = [mine] if not dist.is_initialized() else [None] * dist.get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(gathered, mine)
    exact = training.exact and all(each for _, each in gathered)
    return replace(training, said=[each for rank, _ in gathered for each in rank], exact=exact)


def told(composition: Composition, found: Outcome) -> str:
    """A composition and its faults, such that a person can run it again."""
    lines = [repr(composition), str(composition), *(words for _, words in found.faults)]
    for name, training in (("stock", found.stock), ("ours", found.patched)):
        if training is not None:
            lines.append(f"{name} is off by {', '.join(f'{each:.1e}' for each in training.errors)}")
    if found.patched is not None:
        lines += [f"exact: {found.patched.exact}"]
        lines += [f"said in window {window}: {words}" for window, words in found.patched.said]
    return "\n".join(lines)


@contextmanager
def installed_once() -> Iterator[None]:
    """Look up what is installed once, and let no seed note who set it: both take longer than a training."""
    looked_up = [(environment, "_version"), (environment, "fingerprint"), (seams, "is_between")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "format_stack", lambda *_, **__: [])
        for module, name in [*looked_up, (imports, "_is_package_available")]:
            patch.setattr(module, name, cache(getattr(module, name)))
        yield
