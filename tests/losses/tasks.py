"""Micro-batches of several kinds, each with labels and a loss of its own, on one rank or two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_accum_fix
from tests.logged import logged
from tests.numerics.heads import Batch, Sample, TokenModel, over_number, seeded, shifted_cross_entropy
from tests.numerics.heads.head import Head, collate
from tests.numerics.heads.samples import text
from tests.numerics.parity import pass_over_imports, plain_sgd, relative, trainable, training_arguments
from tests.trainers.runs import Case, Ordered, owning, run
from tests.trainings import RATE

#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 30


class Tasks(TokenModel):
    """Next tokens where labels have two axes, a class of each text where they have one, a number as score_labels."""

    by_number = False

    def forward(
        self,
        input_ids: Tensor,
        labels: Any = None,
        token_labels: Any = None,
        score_labels: Any = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        if score_labels is not None:
            return {"loss": self.of_scores(logits[:, 1, 0], score_labels), "logits": logits}
        labels = token_labels if labels is None else labels
        if labels is None:
            return {"logits": logits}
        if labels.ndim == 1:
            loss = F.cross_entropy(logits[:, 0, :4], labels)
        else:
            loss = over_number(logits, labels, num_items_in_batch if self.by_number else None)
        return {"loss": loss, "logits": logits}

    def of_scores(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(scores, labels)


class TasksByNumber(Tasks):
    """Its next tokens' loss is a sum, divided by the number that it is handed."""

    by_number = True
    accepts_loss_kwargs = True


class TasksByHand(Tasks):
    """The score's loss is one that no loss call shows."""

    def of_scores(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).abs().pow(1.5).mean()


class TasksCoupled(Tasks):
    """The score's loss depends on who is in the micro-batch."""

    def of_scores(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).pow(2).mean().sqrt()


class TasksOfOneName(TokenModel):
    """Classes of tokens, not shifted, and of texts, both as "labels" other than -100."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        if labels.ndim == 1:
            return {"loss": F.cross_entropy(logits[:, 0, :4], labels), "logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class TasksWithWeights(Tasks):
    """Tokens have weights, so that no rule counts what their loss reduces over."""

    def forward(self, input_ids: Tensor, labels: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        if labels.ndim == 1:
            return {"loss": F.cross_entropy(logits[:, 0, :4], labels), "logits": logits}
        weight = torch.arange(1, logits.shape[-1] + 1, dtype=logits.dtype)
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight),
            "logits": logits,
        }


class TasksWithEvenWeights(Tasks):
    """Classes of texts have weights whose sum may be their number by chance."""

    def forward(self, input_ids: Tensor, labels: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        if labels.ndim == 2:
            return {"loss": shifted_cross_entropy(logits, labels), "logits": logits}
        weight = torch.tensor([0.5, 1.5, 1, 1], dtype=logits.dtype)
        return {"loss": F.cross_entropy(logits[:, 0, :4], labels, weight), "logits": logits}


class WithAnOption(TokenModel):
    """Next tokens; whatever else is called labels is no part of the loss."""

    def forward(self, input_ids: Tensor, labels: Any = None, other_labels: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"loss": shifted_cross_entropy(logits, labels), "logits": logits}


class WithATermMore(Tasks):
    """What some micro-batches are labelled with beside is one more term of theirs."""

    def forward(self, input_ids: Tensor, other_labels: Any = None, **inputs: Any) -> dict[str, Tensor]:
        found = super().forward(input_ids, **inputs)
        if other_labels is None:
            return found
        return {**found, "loss": found["loss"] + found["logits"][:, 1, 0].pow(2).mean()}


def of_scores(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """Each task's loss, computed by the trainer itself."""
    outputs = model(input_ids=inputs["input_ids"])
    if "score_labels" in inputs:
        return F.mse_loss(outputs["logits"][:, 1, 0], inputs["score_labels"]), outputs
    return shifted_cross_entropy(outputs["logits"], inputs["token_labels"]), outputs


def second_twice(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The second task counts twice."""
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss * (2 if is_second(inputs) else 1), outputs


OfLogits, WeighsTasks = owning(of_scores), owning(second_twice)


def is_second(inputs: Any) -> bool:
    """Whether a micro-batch, or a sample of it, is of the second task."""
    return "score_labels" in inputs or inputs.get("labels", inputs["input_ids"]).ndim < inputs["input_ids"].ndim


def a_class(sample: Sample, i: int) -> Sample:
    return {"input_ids": sample["input_ids"], "labels": torch.tensor(i % 4)}


def a_score(sample: Sample, i: int) -> Sample:
    return {"input_ids": sample["input_ids"], "score_labels": torch.tensor(0.3 * i - 1, dtype=torch.float64)}


#: What the labels of next tokens are called beside each: upstream asks every micro-batch for "labels", or none.
NAMES = {a_class: "labels", a_score: "token_labels"}


def in_common(samples: Sequence[Sample]) -> Batch:
    keys = set(samples[0]).intersection(*samples)
    if len({sample["labels"].ndim for sample in samples if "labels" in sample}) > 1:
        keys.discard("labels")
    return collate([{key: sample[key] for key in sample if key in keys} for sample in samples])


def in_turn(other: Callable[[Sample, int], Sample], pairs: str, seed: int = 0) -> list[Sample]:
    """Pairs of ragged texts with next tokens ("a") or of the other kind ("b"); "A" and "B" have no target."""
    tokens = [{"input_ids": each["input_ids"], NAMES[other]: each["labels"]} for each in text(seed=seed)]
    made = [other(each, i) if pairs[i // 2] in "bB" else each for i, each in enumerate(tokens)]
    return [without_target(each) if pairs[i // 2].isupper() else each for i, each in enumerate(made)]


def without_target(sample: Sample) -> Sample:
    """The same with nothing that a loss counts."""
    return {key: torch.full_like(value, -100) if "labels" in key else value for key, value in sample.items()}


def with_an_option(pairs: str, seed: int = 0) -> list[Sample]:
    """Pairs of texts without ("a") and with ("b") a label that no loss asks for; "A" and "B" have no target."""
    samples = []
    for i, each in enumerate(text(seed=seed)):
        pair = pairs[i // 2]
        labels = torch.full_like(each["labels"], -100) if pair.isupper() else each["labels"]
        other = {"other_labels": torch.ones_like(labels)} if pair in "bB" else {}
        samples.append({"input_ids": each["input_ids"], "labels": labels, **other})
    return samples


def of_all(model: nn.Module, samples: Sequence[Sample]) -> Tensor:
    """The mean over the items of all samples, of whatever kind."""
    held = [{key: sample[key] for key in ("input_ids", "labels")} for sample in samples]
    return model(**collate(held))["loss"]


def by_share(model: nn.Module, samples: Sequence[Sample], second: float = 1.0) -> Tensor:
    """The mean of each kind over its items, weighed by how many of the samples are of it; the second kind's times."""
    kinds: dict[Any, list[Sample]] = {}
    for sample in samples:
        key = tuple(sorted((key, value.ndim) for key, value in sample.items() if "labels" in key))
        kinds.setdefault(key, []).append(sample)
    shares = [len(held) / len(samples) * (second if is_second(held[0]) else 1) for held in kinds.values()]
    losses = [model(**collate(held))["loss"].nan_to_num(0.0) for held in kinds.values()]
    return torch.stack([share * loss for share, loss in zip(shares, losses, strict=True)]).sum()


def full_steps(
    model: nn.Module, windows: Sequence[Sequence[Sample]], loss: Callable[..., Tensor] = by_share
) -> dict[str, Tensor]:
    """The parameter change of full-batch steps, one for each window."""
    return plain_sgd(model, loss, windows, RATE)[0]


def by_loop(model: nn.Module, windows: Sequence[Sequence[Batch]]) -> tuple[dict[str, Tensor], bool, list[str]]:
    """The parameter change of a hand-written loop over this rank's windows, whether it is exact, and warnings."""
    bare, before = model, trainable(model)
    if dist.is_initialized():
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = [batch for window in windows for batch in window]
    with logged() as said:
        epoch = hf_accum_fix.accumulation_windows(loader, steps=len(windows[0]))
        for window in epoch:
            for batch in window:
                with window.micro_batch(model):
                    window.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    change = {name: value - before[name] for name, value in trainable(bare).items()}
    exact = epoch._host.state.exact
    return change, exact, said


#: What each rank's micro-batches hold, one window after another; the kind of the first window's is the first kind.
TURNS = {
    "a-kind-on-each-rank": ["abab", "baba"],
    "both-on-each-rank": ["abba", "baab"],
    "a-new-kind-on-one-rank-later": ["aaaa", "aaaa", "aaaa", "aaaa", "aaab", "abab"],
    "by-windows": ["aaaa", "bbbb", "aaaa", "bbbb", "aaaa"],
}
#: Losses that are easily taken for one another, by name: the model, its windows, the full batch's loss.
ALIKE: dict[str, tuple[Any, list[list[Sample]], Callable[..., Tensor]]] = {
    "one-name": (TasksOfOneName, [in_turn(a_class, pairs) for pairs in ("abab", "aabb", "aaaa", "bbbb")], by_share),
    "weights": (TasksWithWeights, [in_turn(a_class, pairs) for pairs in ("aaaa", "bbbb", "aaaa")], by_share),
    **{
        f"no-target-{turns[0]}": (WithAnOption, [with_an_option(*each[::-1]) for each in enumerate(turns)], of_all)
        for turns in (["AbAb", "abab", "abba"], ["aBaB", "abab", "abba"], ["aaaa", "aaaB", "aaab", "abab"])
    },
}
#: Samples of a micro-batch x micro-batches on each of two ranks.
TWO_RANKS = (2, 2)


def _found(rank: int, model: Any, windows: Sequence[Sequence[Sample]], loss: Callable[..., Tensor]) -> dict[str, Any]:
    """Stock, patched, and by a loop: how far from the full batches, and what was said."""
    build = seeded(model)
    wanted = full_steps(build(), windows, loss)
    case = Case(model.__name__, Head(model.__name__, build, windows[0], collate=in_common), Ordered)
    samples = [sample for window in windows for sample in window]
    found: dict[str, Any] = {}
    for path in ("stock", "apply"):
        pass_over_imports()
        ran = run(
            case,
            TWO_RANKS,
            path,
            steps=len(windows),
            samples=samples,
            learning_rate=RATE,
            ddp_backend="gloo",
            ddp_find_unused_parameters=True,
        )
        found[path] = relative(ran.change, wanted) if ran.raised is None else repr(ran.raised)
    found |= {"exact": ran.exact, "warned": ran.warned}
    mine = [[collate(window[at : at + 2]) for at in (2 * rank, 2 * rank + 4)] for window in windows]
    change, exact, said = by_loop(build(), mine)
    return found | {"loop": relative(change, wanted), "loop exact": exact, "loop warned": said}


def verified(samples: Sequence[Sample], given: Sequence[Sample] | None = None, **arguments: Any) -> str:
    """What ``verify`` says of a trainer that has not trained."""
    with tempfile.TemporaryDirectory() as output:
        args = training_arguments(Path(output), *TWO_RANKS, **arguments)
        data = list(samples)
        trainer = Ordered(model=seeded(Tasks)(), args=args, train_dataset=data, data_collator=in_common)
        return str(hf_accum_fix.verify(trainer, samples=given))


def rows_of() -> dict[str, dict[str, Any]]:
    """On each rank: what became of each of `TURNS` and of `ALIKE`, and the words of ``verify``."""
    rank, rows = dist.get_rank(), {}
    for name, turns in TURNS.items():
        for model in (Tasks, TasksByNumber):
            for other in (a_class, a_score):
                windows = [in_turn(other, pairs, seed) for seed, pairs in enumerate(turns)]
                rows[f"{name}-{model.__name__}-{other.__name__}"] = _found(rank, model, windows, by_share)
    for name, (model, windows, loss) in ALIKE.items():
        rows[name] = _found(rank, model, windows, loss)
    rows["verify"] = {"verdict": verified(in_turn(a_class, "abaa"), ddp_backend="gloo")}
    return rows
