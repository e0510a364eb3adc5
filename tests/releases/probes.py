"""How each defect shows itself on the stock Trainer of the installed release: one probe a row, and what measures it.

    python -m tests.releases.probes results.jsonl [DEFECT ...]
    torchrun --nproc_per_node 2 -m tests.releases.probes results.jsonl [DEFECT ...]

The first runs the probes of one rank, the second of two; each appends a JSON line per probe. Nothing is patched.
Unless a probe is about uneven items, all micro-batches hold equally many, so that a factor comes out as it is and
the defects that overlap in a release do not blur each other.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from tests.numerics.epochs import Stream
from tests.numerics.heads import HEADS, Batch, DropsKwargs, Head, NoKwargs, Sample, TokenModel
from tests.numerics.heads.experts import ROUTER
from tests.numerics.heads.head import VOCABULARY, seeded
from tests.numerics.heads.losses import shifted_cross_entropy, smoothing_reference
from tests.numerics.heads.multimodal import llava_samples
from tests.numerics.heads.own import func_reference, func_with_mean, func_with_number
from tests.numerics.heads.samples import images, one_class, speech, text, with_labels
from tests.numerics.heads.text import bert, llama, llama_config, prompt_tuning
from tests.numerics.parity import StockRecorder, cut, flat, reference_step, relative, train, trainer_of

Gradient = dict[str, Tensor]
Where = Literal["before", "inside", "after"]


class UnavailableError(Exception):
    """The release lacks what the defect is about, so that it cannot have it."""


@dataclass(frozen=True)
class Probe:
    """One measurement and what it has to give.

    Attributes:
        measure: the value on the installed release; raises `UnavailableError` where there is nothing to measure.
        inside: the value in the row's range.
        before: the value in the release before the range; None: there is nothing to measure in it.
        after: the same in the release after it.
        ranks: processes it needs.
    """

    measure: Callable[[], float]
    inside: float
    before: float | None = None
    after: float | None = None
    ranks: int = 1

    def shows(self, value: float | None, where: Where) -> bool:
        """Whether a measured value is the one expected there: within 1 %, or within 0.01 of a zero."""
        expected: float | None = getattr(self, where)
        if value is None or expected is None:
            return value is expected
        return abs(value - expected) <= 0.01 * (abs(expected) or 1.0)


class Divides(TokenModel):
    """Divides by the item count; its arguments have the name that 4.46 looks for."""

    def forward(self, input_ids: Tensor, labels: Any = None, **loss_kwargs: Any) -> dict[str, Tensor]:
        return self.mean(input_ids, labels, loss_kwargs.get("num_items_in_batch"))


class TargetsTakesNothing(TokenModel):
    """Its targets are not called labels."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, targets: Any = None) -> dict[str, Tensor]:
        return self.mean(input_ids, targets)


class TargetsTakesKwargs(TokenModel):
    """The same, and its forward takes anything."""

    def forward(self, input_ids: Tensor, targets: Any = None, **loss_kwargs: Any) -> dict[str, Tensor]:
        return self.mean(input_ids, targets)


class Root(TokenModel):
    """The root of a mean: its backward needs the value that it returned."""

    def forward(self, input_ids: Tensor, labels: Any = None, **loss_kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.mean(input_ids, labels)["loss"].sqrt()}


class OffTheList(hf.LlamaForCausalLM):
    """A causal model by a name of its own."""


class AlignedForConditionalGeneration(hf.T5ForConditionalGeneration):
    """Targets aligned with its logits, and divided by the item count: what Florence-2 does."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=self._shift_right(labels)
        )
        loss = self.loss_function(outputs.logits, labels, VOCABULARY, shift_labels=labels, **kwargs)
        return {"loss": loss, "logits": outputs.logits}


FIRST_MARK = 4


def even(count: int = 8, masked: int = 4, length: int = 12) -> list[Sample]:
    """Samples with equally many items, and none at position 0 unless nothing is masked; their first token is a mark."""
    samples = text(lengths=(length,) * count, masked=lambda index, _: masked)
    for index, sample in enumerate(samples):
        sample["input_ids"][0] = FIRST_MARK + index
    return samples


def ragged(count: int = 8) -> list[Sample]:
    """The same with 1 to 10 items each."""
    samples = even(count)
    for index, sample in enumerate(samples):
        sample["labels"][: 11 - (index * 7) % 10] = -100
    return samples


def with_targets(samples: Sequence[Sample]) -> list[Sample]:
    return [{"input_ids": sample["input_ids"], "targets": sample["labels"]} for sample in samples]


def aligned_t5() -> nn.Module:
    return AlignedForConditionalGeneration(HEADS["t5"].build().config)


def classes() -> list[Sample]:
    return with_labels(one_class, even())


def ctc_sum() -> Head:
    samples = [{**sample, "labels": sample["labels"][:2]} for sample in speech()]
    return Head("ctc-sum", HEADS["wav2vec2-ctc-sum"].build, samples)


def _one_number(index: int, _: torch.Generator) -> Tensor:
    return torch.tensor(0.3 * index, dtype=torch.float64)


def _three_numbers(index: int, _: torch.Generator) -> Tensor:
    return torch.tensor([index % 2, 1, index % 3], dtype=torch.float64).clamp(max=1)


def module(build: Callable[[], nn.Module], samples: Sequence[Sample] | None = None, **more: Any) -> Head:
    return Head(build.__name__, seeded(build), even() if samples is None else samples, **more)


def of(name: str, samples: Sequence[Sample] | None = None, **more: Any) -> Head:
    """A head of the tests on these samples."""
    return Head(name, HEADS[name].build, even() if samples is None else samples, **more)


def llama_classifier() -> nn.Module:
    return hf.LlamaForSequenceClassification(llama_config(num_labels=3))


SMOOTHING = {"label_smoothing_factor": 0.1}
IGNORED = VOCABULARY - 1


def func_with_own_ignore_index(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / num_items_in_batch


def own_ignore_index_reference(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    labels = labels.masked_fill(labels == IGNORED, -100)
    return shifted_cross_entropy(model(**batch)["logits"], labels)


def some_ignored(samples: Sequence[Sample]) -> list[Sample]:
    """Of the eleven targets of each sample seven are to be ignored, by an index of the loss's own."""
    for sample in samples:
        sample["labels"].clamp_(max=IGNORED - 1)
        sample["labels"][1:4] = sample["labels"][-4:] = IGNORED
    return list(samples)


def func_aligned(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"].flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def aligned_reference(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(model(**batch)["logits"].flatten(0, 1), labels.flatten())


@dataclass
class MicroBatch:
    """One call of ``training_step``: its inputs, the count it was handed, the optimizer steps taken by then."""

    inputs: Batch
    count: float | None
    after: int

    @property
    def index(self) -> int:
        """The mark of its first sample."""
        return int(self.inputs["input_ids"][0, 0])


@dataclass
class Run:
    """What was trained: the parameter change, what was logged, the micro-batches of each optimizer step."""

    change: Gradient
    log: float
    steps: list[list[MicroBatch]]


class Watched(StockRecorder):
    """The stock Trainer, keeping what its loop hands to ``training_step``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batches: list[MicroBatch] = []

    def training_step(self, model: nn.Module, inputs: Batch, *count: Any) -> Tensor:
        number = None if not count or count[0] is None else float(count[0])
        self.micro_batches.append(MicroBatch(dict(inputs), number, self.state.global_step))
        return super().training_step(model, inputs, *count)


def run(head: Head, per_device: int = 2, accumulate: int = 4, *, stream: bool = False, **arguments: Any) -> Run:
    """Train the head on its samples in order, one step of plain SGD at lr 1 unless the arguments say otherwise."""
    if "compute_loss_func" in head.trainer and not _takes("compute_loss_func"):
        raise UnavailableError("this Trainer takes no compute_loss_func")
    found = train(lambda: _trainer(head, per_device, accumulate, stream=stream, **arguments))
    micro_batches, steps = found.trainer.micro_batches, range(found.trainer.state.global_step)
    by_step = [[each for each in micro_batches if each.after == step] for step in steps]
    return Run(found.change, next(iter(found.losses), math.nan), by_step)


def _trainer(head: Head, per_device: int, accumulate: int, *, stream: bool = False, **arguments: Any) -> Watched:
    if dist.is_initialized():
        arguments["ddp_backend"] = "gloo"
    output = Path(tempfile.gettempdir()) / "hf_accum_fix_probes"
    arguments |= {"per_device": per_device, "accumulate": accumulate, "given": {"eval_dataset": list(head.samples)}}
    samples = Stream(head.samples) if stream else head.samples
    return trainer_of(head, output, Watched, samples=samples, **arguments)


def _takes(argument: str) -> bool:
    return argument in inspect.signature(hf.Trainer.__init__).parameters


def averaged() -> dict[str, bool]:
    """Ask for item counts over all ranks, where the release has that."""
    name = "average_tokens_across_devices"
    return {name: True} if name in {each.name for each in fields(hf.TrainingArguments)} else {}


def factor(found: Gradient, wanted: Gradient) -> float:
    """What ``wanted`` has to be multiplied by to give ``found``; nan where no factor does."""
    a, b = flat(found, wanted), flat(wanted, wanted)
    times = float(a @ b / (b @ b))
    return times if float((a - times * b).norm()) <= 1e-3 * float(a.norm()) else math.nan


def distance(found: Gradient, wrong: Gradient, right: Gradient) -> float:
    """How far ``found`` is from ``wrong``, in units of how far ``right`` is from it: 0 is wrong, 1 is right."""
    return relative(found, wrong) / relative(right, wrong)


def right_step(head: Head, per_device: int) -> tuple[Gradient, float]:
    step = reference_step(head, cut(head.samples, per_device))
    return step.change, step.loss


def gradient(head: Head, per_device: int = 2, accumulate: int = 4, **arguments: Any) -> float:
    """The stock gradient over the full batch's."""
    found = run(head, per_device, accumulate, **arguments)
    return factor(found.change, right_step(head, per_device)[0])


def logged(head: Head, per_device: int = 2, accumulate: int = 4, **arguments: Any) -> float:
    """The logged loss over the full batch's."""
    return run(head, per_device, accumulate, **arguments).log / right_step(head, per_device)[1]


def gradient_over_log(head: Head) -> float:
    """How many times more than the log the gradient is off."""
    found = run(head)
    change, loss = right_step(head, 2)
    return factor(found.change, change) / (found.log / loss)


def descent(model: nn.Module, loss: Tensor) -> Gradient:
    """The parameter change of one SGD step at lr 1."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True, retain_graph=True)
    found = zip(named, grads, strict=True)
    return {name: torch.zeros_like(its) if grad is None else -grad.double() for (name, its), grad in found}


def mean_of_means() -> float:
    head = module(NoKwargs, ragged())
    model = head.build()
    wrong = torch.stack([model(**head.batch(piece))["loss"] for piece in cut(head.samples, 2)]).mean()
    return distance(run(head).change, descent(model, wrong), right_step(head, 2)[0])


def rank_means() -> float:
    head = module(Divides, ragged())
    found = run(head, 1, 4)
    model = head.build()
    micro_batches = found.steps[0]
    items = [int((micro_batch.inputs["labels"][:, 1:] != -100).sum()) for micro_batch in micro_batches]
    means = [model(input_ids=mb.inputs["input_ids"], labels=mb.inputs["labels"])["loss"] for mb in micro_batches]
    own = sum(n * mean for n, mean in zip(items, means, strict=True)) / sum(items)
    wrong = descent(model, own)
    for each in wrong.values():
        dist.all_reduce(each)
        each /= dist.get_world_size()
    return distance(found.change, wrong, right_step(head, 1)[0])


def same(*values: float) -> float:
    """The one value that several heads give; nan if they differ."""
    return values[0] if all(abs(value - values[0]) <= 1e-3 * abs(values[0]) for value in values) else math.nan


def router_term(head: Head) -> float:
    """What the router's coefficient comes out multiplied by."""
    model = head.build()
    model.train()
    main, router = [], []
    for piece in cut(head.samples, 2):
        batch = head.batch(piece)
        aux = model(**batch)["aux_loss"]
        own = head.loss(model, dict(batch)) if head.loss is not None else model(**batch)["loss"] - ROUTER * aux
        main.append(own)
        router.append(ROUTER * aux)
    change = run(head).change
    basis = [flat(descent(model, torch.stack(terms).mean()), change) for terms in (main, router)]
    found = flat(change, change)
    solved = torch.linalg.lstsq(torch.stack(basis, dim=1), found[:, None])
    rest = found - torch.stack(basis, dim=1) @ solved.solution[:, 0]
    return float(solved.solution[1]) if float(rest.norm()) <= 1e-3 * float(found.norm()) else math.nan


def smoothing_unshifted() -> float:
    def build() -> nn.Module:
        return OffTheList(llama_config())

    head = module(build, loss=smoothing_reference(0.1), arguments=SMOOTHING)
    unshifted = replace(head, loss=smoothing_reference(0.1, shift=False))
    found = run(head, 8, 1).change
    return distance(found, right_step(unshifted, 8)[0], right_step(head, 8)[0])


def ends(error: type[Exception], words: str, *given: Any, **how: Any) -> float:
    """1 where a training ends in this error, 0 where it ends well."""
    try:
        run(*given, **how)
    except error as raised:
        if words not in str(raised):
            raise
        return 1.0
    return 0.0


def compiled() -> float:
    """Whether the module inside is handed a number that it cannot take."""
    return ends(TypeError, "num_items_in_batch", module(lambda: torch.compile(NoKwargs(), backend="eager")))


def func_got_no_count() -> float:
    seen: list[Any] = []

    def func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append(num_items_in_batch)
        return func_with_mean(outputs, labels)

    run(module(NoKwargs, trainer={"compute_loss_func": func}))
    assert len(seen) == 4
    return float(seen == [None] * 4)


def func_calls_without_labels() -> float:
    calls: list[Any] = []

    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        calls.append(labels)
        return outputs["loss"]

    run(module(TargetsTakesNothing, with_targets(even()), trainer={"compute_loss_func": func}))
    return float(len(calls))


def func_averaged() -> float:
    head = module(NoKwargs, loss=func_reference, trainer={"compute_loss_func": func_with_number})
    try:
        return gradient(head, 2, 2, **averaged())
    except TypeError as error:
        raise UnavailableError("compute_loss_func is handed no number to divide by") from error


def launched_with_steps() -> float:
    """The gradient with ``accelerate launch --gradient_accumulation_steps 4`` over that without."""
    head = module(Divides)
    plain = run(head).change
    with mock.patch.dict(os.environ, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"):
        return factor(run(head).change, plain)


def _with_a_blank() -> Head:
    samples = even()
    samples[2]["labels"][:] = samples[3]["labels"][:] = -100
    return module(NoKwargs, samples)


def blank_is_nan() -> float:
    return float(math.isnan(run(_with_a_blank(), logging_nan_inf_filter=False).log))


def nan_filter() -> float:
    """Where the log lies between the right loss (0) and that with the step so far put in the blank's place (1)."""
    head = _with_a_blank()
    model = head.build()
    first, _, third, fourth = (float(model(**head.batch(piece))["loss"]) for piece in cut(head.samples, 2))
    wrong, right = (2 * first + third + fourth) / 4, (first + third + fourth) / 3
    return (run(head).log - right) / (wrong - right)


def scaled_in_place() -> float:
    """With unused parameters looked for, DDP would hand out a clone."""
    how = {"ddp_find_unused_parameters": False, **averaged()}
    return ends(RuntimeError, "modified by an inplace operation", module(Root), 2, 2, **how)


def averaging_crashes() -> float:
    how = {"max_steps": 2, "learning_rate": 1e-3, **averaged()}
    return ends(TypeError, "Unsupported types", module(Divides), 2, 2, **how) if averaged() else 0.0


def averaging_without_count() -> float:
    try:
        return gradient(module(TargetsTakesKwargs, with_targets(even())), 4, 1, **averaged())
    except TypeError as error:
        raise UnavailableError("the gather of no count raises") from error


def evaluation_loss(build: Callable[[], nn.Module]) -> float:
    head = module(build)
    trainer = _trainer(head, 2, 2, per_device_eval_batch_size=2, **averaged())
    return float(trainer.evaluate()["eval_loss"]) / right_step(head, 2)[1]


def drift(samples: int, accumulate: int, steps: int) -> float:
    """1 where the two ranks do not hold the same parameters after these steps."""
    trained = run(module(Divides, ragged(samples)), 1, accumulate, max_steps=steps, learning_rate=0.1)
    assert len(trained.steps) == steps
    found = flat(trained.change, trained.change)
    first = found.clone()
    dist.broadcast(first, src=0)
    apart = (found - first).norm() / first.norm()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return float(apart > 1e-6)


def steps_in_one_epoch() -> float:
    """Six micro-batches in windows of four."""
    return float(len(run(module(NoKwargs, even(6)), 1, 4, max_steps=-1, num_train_epochs=1).steps))


def trained_in_first_epoch() -> float:
    """Of seven micro-batches of two samples, in windows of four."""
    found = run(module(NoKwargs, even(14)), 2, 4, max_steps=4, learning_rate=1e-3)
    order = [micro_batch.index for step in found.steps for micro_batch in step]
    again = order.index(order[0], 1)
    return float(again)


def _epochs(step: Sequence[MicroBatch]) -> int:
    """How many epochs a step has micro-batches of, when the data is in order."""
    indices = [micro_batch.index for micro_batch in step]
    return 1 + sum(later <= earlier for earlier, later in pairwise(indices))


def steps_across_epochs() -> float:
    found = run(module(NoKwargs, even(6)), 1, 4, max_steps=3, learning_rate=1e-3)
    assert len(found.steps) == 3
    return float(sum(_epochs(step) > 1 for step in found.steps))


def counts_in_one_step() -> float:
    found = run(module(Divides, ragged(6)), 1, 4, max_steps=3, learning_rate=1e-3)
    return float(max(len({mb.count for mb in step if mb.count is not None}) for step in found.steps))


def longest_step_of_a_stream() -> float:
    found = run(module(NoKwargs, even(6)), 1, 4, stream=True, max_steps=2, learning_rate=1e-3)
    return float(max(len(step) for step in found.steps))


G, W = 4.0, 2.0
WITH_MEAN = {"compute_loss_func": func_with_mean}
ALIGNED = {"compute_loss_func": func_aligned}
OWN_INDEX = {"compute_loss_func": func_with_own_ignore_index}
SMOOTHED: dict[str, Any] = {"loss": smoothing_reference(0.1), "arguments": SMOOTHING}


def times(
    head: Callable[[], Head], inside: float, *cut: int, before: Any = None, after: Any = None, **more: Any
) -> Probe:
    """The gradient of a head over the full batch's."""
    return Probe(lambda: gradient(head(), *cut), inside, before, after, **more)


#: Both neighbours of the range are right, or the one before it, where there is none after.
RIGHT, BEFORE = {"before": 1.0, "after": 1.0}, {"before": 1.0}

PROBES: dict[str, Probe] = {
    "mean-of-micro-batch-means": Probe(mean_of_means, 0.0),
    # 4.27: 4.45 takes the mean of micro-batch means, which is not the mean of rank means.
    "rank-means-averaged": Probe(rank_means, 0.0, before=4.2746, after=1.0, ranks=2),
    "loss-times-steps": Probe(lambda: logged(module(NoKwargs)), G, **RIGHT),
    "undivided-gradient-right-log": Probe(
        lambda: gradient_over_log(module(TargetsTakesNothing, with_targets(even()))), G, **RIGHT
    ),
    "undivided-as-if-counted": Probe(lambda: logged(module(NoKwargs)), G, **RIGHT),
    "item-count-dropped": times(lambda: module(Divides), G, **RIGHT),
    "item-count-dropped-again": times(lambda: module(Divides), G, **RIGHT),
    "loss-without-labels-undivided": times(lambda: module(TargetsTakesKwargs, with_targets(even())), G, **RIGHT),
    # Outside: nothing is divided by, so that three micro-batches give three times the mean.
    "short-epoch-divisor": times(lambda: module(NoKwargs, even(3)), 3 / G, 1, 4, after=3.0),
    "short-window-divisor": times(lambda: module(NoKwargs, even(3)), 3 / G, 1, 4, before=3.0, after=1.0),
    "gradient-divided-twice": times(lambda: module(Divides), 1 / G, **RIGHT),
    "launcher-steps-divide-again": Probe(launched_with_steps, 1 / G, **RIGHT),
    "head-drops-item-count": Probe(lambda: logged(module(DropsKwargs)), G, **BEFORE),
    "generic-head-drops-item-count": times(lambda: module(llama_classifier, classes()), G, **BEFORE),
    "classic-head-drops-item-count": Probe(
        lambda: same(
            gradient(Head("bert", seeded(bert("BertForSequenceClassification", num_labels=3)), classes())),
            gradient(of("t5", even(masked=0))),
        ),
        G,
        **BEFORE,
    ),
    "llava-mean-loss": times(lambda: of("llava", llava_samples(even())), G, **RIGHT),
    "undivided-mean-times-ranks": times(lambda: module(DropsKwargs), W, 4, 1, ranks=2, **BEFORE),
    "compiled-module-signature": Probe(compiled, 1.0, before=0.0),
    "loss-func-mean-not-divided": times(lambda: module(NoKwargs, loss=func_reference, trainer=WITH_MEAN), G),
    "loss-func-without-count": Probe(func_got_no_count, 1.0, before=0.0, after=0.0),
    "loss-func-without-count-again": Probe(func_got_no_count, 1.0, before=0.0, after=0.0),
    "loss-func-skipped-without-labels": Probe(func_calls_without_labels, 0.0, after=G),
    "loss-func-not-times-ranks": Probe(func_averaged, 1 / W, after=1.0, ranks=2),
    "regression-and-multi-label-mean": Probe(
        lambda: same(
            gradient(of("vit-regression", images(_one_number))), gradient(of("vit-multi-label", images(_three_numbers)))
        ),
        G,
        **BEFORE,
    ),
    "ctc-sum-divided-by-accelerate": times(ctc_sum, 1 / G, after=1.0),
    "ctc-sum-divided": times(ctc_sum, 1 / G, **RIGHT),
    "router-loss-times-steps": Probe(lambda: router_term(of("mixtral")), G, **BEFORE),
    "label-smoothing-mean": times(lambda: module(llama, **SMOOTHED), G, **RIGHT),
    "label-smoothing-drops-router-loss": Probe(lambda: router_term(of("mixtral", **SMOOTHED)), 0.0),
    "label-smoothing-unshifted": Probe(smoothing_unshifted, 0.0),
    "first-label-counted": times(lambda: module(llama, even(masked=0)), 11 / 12, **RIGHT),
    "first-label-still-counted": times(lambda: module(Divides, even(masked=0)), 11 / 12, **BEFORE),
    "first-column-not-counted": times(
        lambda: module(Divides, even(masked=0), loss=aligned_reference, trainer=ALIGNED), 12 / 11, after=1.0
    ),
    "aligned-targets-undercounted": times(lambda: module(aligned_t5, even(masked=0)), 12 / 11, **RIGHT),
    "virtual-tokens-undercounted": times(lambda: module(prompt_tuning, even(masked=0)), 12 / 11, **BEFORE),
    "ignore-index-miscounted": times(
        lambda: module(Divides, some_ignored(even()), loss=own_ignore_index_reference, trainer=OWN_INDEX), 4 / 11
    ),
    "window-without-items-is-nan": Probe(blank_is_nan, 1.0),
    "nan-filter-in-the-log": Probe(nan_filter, 1.0),
    "loss-scaled-in-place": Probe(scaled_in_place, 1.0, before=0.0, ranks=2),
    "averaging-gathers-nothing": Probe(averaging_crashes, 1.0, before=0.0, after=0.0, ranks=2),
    "averaging-times-ranks-without-count": Probe(averaging_without_count, W, after=1.0, ranks=2),
    "evaluation-loss-times-ranks": Probe(lambda: evaluation_loss(Divides), W, ranks=2, **RIGHT),
    "evaluation-mean-times-ranks": Probe(lambda: evaluation_loss(DropsKwargs), W, ranks=2, **BEFORE),
    "epoch-tail-not-trained": Probe(steps_in_one_epoch, 1.0, after=2.0),
    "remainder-of-examples": Probe(trained_in_first_epoch, 6.0, before=7.0, after=7.0),
    "tail-carried-into-next-epoch": Probe(steps_across_epochs, 1.0, after=0.0),
    "two-counts-in-one-step": Probe(counts_in_one_step, 2.0, before=0.0, after=1.0),
    "stream-tail-not-stepped": Probe(longest_step_of_a_stream, 6.0, before=4.0),
    "last-micro-batch-not-reduced": Probe(lambda: drift(8, 2, 1), 1.0, before=0.0, after=0.0, ranks=2),
    "step-across-epochs-not-synchronised": Probe(lambda: drift(12, 4, 2), 1.0, before=0.0, after=0.0, ranks=2),
    "short-epoch-not-synchronised": Probe(lambda: drift(4, 4, 1), 1.0, after=0.0, ranks=2),
}


def main(output: Path, names: Sequence[str]) -> None:
    """Run the probes of as many ranks as there are, those named or all, and append their values to ``output``."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    for name, probe in PROBES.items():
        if probe.ranks != ranks or (names and name not in names):
            continue
        row: dict[str, Any] = {"release": hf.__version__, "defect": name, "value": None}
        try:
            row["value"] = probe.measure()
        except UnavailableError as error:
            row["unavailable"] = str(error)
        except Exception as error:
            if ranks > 1:  # the other rank may wait for this one
                raise
            row["error"] = f"{type(error).__name__}: {error}"
        if ranks == 1 or dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            with output.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    if ranks > 1:
        dist.barrier()
        # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
