"""One SGD step (lr 1, no clipping) of a head, cut in a given way, beside the float64 full-batch step."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_accum_fix
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.numerics.heads import Head, Sample

PATHS = ("stock", "apply", "trainer")


class Returned:
    """Keeps what ``training_step`` returned in each window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.returned: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.returned.append(loss.double())
        return loss


class Recorder(Returned):
    """Keeps the data in its order, too."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class StockRecorder(Recorder, Trainer):
    """The installed Trainer; patched when apply() is active."""


class ClassRecorder(Recorder, GlobalBatchTrainer):
    """The subclass."""


class Steps(TrainerCallback):
    """Parameters before and gradient norms at every optimizer step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads]))))


@dataclass
class Step:
    """A step as it was taken: parameter changes by name, loss, gradient norm, the trainer that took it."""

    change: dict[str, Tensor]
    loss: float
    norm: float
    trainer: Any = None

    def error(self, reference: Step) -> float:
        """Relative error of the parameter change; absolute where the reference is zero."""
        return relative(self.change, reference.change)

    def errors(self, reference: Step) -> dict[str, float]:
        """Relative errors of the parameter change ("gradient"), the loss and the norm."""
        return {
            "gradient": self.error(reference),
            "loss": abs(self.loss - reference.loss) / max(abs(reference.loss), 1e-12),
            "norm": abs(self.norm - reference.norm) / max(reference.norm, 1e-12),
        }

    def times(self, reference: Step) -> float:
        """How many times the reference's step this one is, along it."""
        found, wanted = (flat(step.change, reference.change) for step in (self, reference))
        return float(found @ wanted / (wanted @ wanted))


def relative(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative error of a change of parameters; absolute where none is wanted."""
    scale = float(flat(wanted, wanted).norm())
    return float((flat(found, wanted) - flat(wanted, wanted)).norm()) / (scale if scale else 1.0)


def flat(change: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([change[name].flatten() for name in sorted(names)])


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters in float64; those that are sharded whole, on every rank."""
    held = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    wholes = ((name, each.full_tensor() if hasattr(each, "full_tensor") else each) for name, each in held)
    return {name: each.to("cpu", torch.float64, copy=True) for name, each in wholes}


def moved(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The change of the parameters."""
    return {name: value - before[name] for name, value in trainable(model).items()}


def training_arguments(
    output: Path, per_device: int = 2, accumulate: int = 4, *, kind: type = TrainingArguments, **overrides: Any
) -> Any:
    """One step of plain SGD, lr 1, no clipping, nothing saved or sent; ``kind`` is a subclass of another library's."""
    given = {
        "max_steps": 1,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e30,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return kind(
        output_dir=str(output),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulate,
        **{**given, **overrides},
    )


def pass_over_imports() -> None:
    """Let the garbage collection that every training begins with pass over what is there already."""
    gc.collect()
    gc.freeze()


def take_step(
    head: Head,
    samples: Sequence[Sample],
    per_device: int,
    accumulate: int,
    path: str,
    output: Path,
    *,
    steps: int = 1,
    trainer_class: type | None = None,
    **arguments: Any,
) -> Step:
    """Train ``steps`` optimizer steps on the samples in order: stock, by the patch or by the subclass."""
    given = {"per_device": per_device, "accumulate": accumulate, "max_steps": steps, **arguments}

    def make() -> Any:
        trainer = trainer_of(head, output, trainer_class or recorder(path), samples=samples, **given)
        if head.told_false:
            trainer.model_accepts_loss_kwargs = False
        return trainer

    return step_of(make, path)


def trainer_of(
    head: Head,
    output: Path,
    cls: Callable[..., Any] = StockRecorder,
    *,
    model: nn.Module | None = None,
    samples: Any = None,
    given: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A trainer of a head, by default of one step over its samples, 2 x 4.

    Args:
        samples: a sequence of them, or a torch dataset.
        given: further arguments of the trainer.
        arguments: `training_arguments`'.
    """
    args = training_arguments(output, **{**head.arguments, **arguments})
    samples = head.samples if samples is None else samples
    return cls(
        model=head.build() if model is None else model,
        args=args,
        train_dataset=samples if isinstance(samples, Dataset) else list(samples),
        **{"data_collator": head.batch, **head.trainer, **(given or {})},
    )


def applied(path: str, **options: Any) -> contextlib.AbstractContextManager[object]:
    """The patch with these options, where the path is "apply"."""
    return hf_accum_fix.apply(**options) if path == "apply" else contextlib.nullcontext()


def recorder(path: str) -> type:
    return ClassRecorder if path == "trainer" else StockRecorder


@dataclass
class Trained:
    """A training as it went: the change of the parameters, and the trainer."""

    change: dict[str, Tensor]
    trainer: Any

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log."""
        return self.trainer.state.log_history

    @property
    def losses(self) -> list[float]:
        """As logged."""
        return [entry["loss"] for entry in self.history if "loss" in entry]

    def error(self, reference: Mapping[str, Tensor]) -> float:
        """Relative, of the parameter change."""
        return relative(self.change, reference)


def train(make: Callable[[], Any], path: str = "stock", *, checkpoint: Path | None = None, **options: Any) -> Trained:
    """Train what ``make`` builds, under the patch where the path is "apply"."""
    with applied(path, **options):
        trainer = make()
        before = trainable(trainer.model)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return Trained(moved(trainer.model, before), trainer)


def step_of(make: Callable[[], Any], path: str) -> Step:
    """What the trainer that ``make`` builds, a `Recorder`, makes of its model: under the patch or as it is."""
    observed = Steps()

    def observing() -> Any:
        trainer = make()
        trainer.add_callback(observed)
        return trainer

    run = train(observing, path)
    trainer = run.trainer
    loss = torch.stack(trainer.returned).sum() / trainer.state.global_step
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    # Releases before 4.46 do not call back before the optimizer.
    return Step(run.change, float(loss), observed.norms[0] if observed.norms else math.nan, trainer)


def reference_step(head: Head, micro_batches: Sequence[Sequence[Sample]]) -> Step:
    """The step of the whole global batch, in float64, by one forward and no Trainer.

    The two kinds of term that are no function of the whole batch by convention, router losses and losses that are no
    weighted mean over items, are averaged over the micro-batches of the cut.
    """
    model = head.build()
    model.train()
    pieces = [head.batch(samples) for samples in micro_batches]
    whole = head.batch([sample for samples in micro_batches for sample in samples])
    if not head.exact:
        loss = torch.stack([head.reference_loss(model, piece) for piece in pieces]).mean()
    else:
        loss = head.reference_loss(model, dict(whole))
        if head.router:
            if head.loss is None:
                loss = loss - head.router * head.router_loss(model(**whole))
            loss = loss + head.router * torch.stack([head.router_loss(model(**piece)) for piece in pieces]).mean()
    return step_along(model, loss)


def reference_windows(head: Head, windows: Sequence[Sequence[Sequence[Sample]]], rate: float) -> Iterator[Step]:
    """One reference step a window, each taken where the steps before (lr ``rate``) have left the parameters."""
    taken: list[Step] = []

    def model_so_far() -> nn.Module:
        model = head.build()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for step in taken:
                    if name in step.change:
                        parameter += rate * step.change[name]
        return model

    for window in windows:
        taken.append(reference_step(replace(head, build=model_so_far), window))
        yield taken[-1]


def plain_sgd(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], windows: Iterable[Any], rate: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Each window in one forward, no Trainer: the change of the parameters, and the loss of each step."""
    model.train()
    before, losses = trainable(model), []
    for window in windows:
        model.zero_grad()
        found = loss(model, window)
        found.backward()
        losses.append(float(found.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return moved(model, before), losses


def step_along(model: nn.Module, loss: Tensor) -> Step:
    """The SGD step (lr 1) that a loss takes."""
    before = trainable(model)
    loss.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    norm = float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads.values()])))
    with torch.no_grad():
        change = {name: (before[name] - grad.double().cpu()) - before[name] for name, grad in grads.items()}
    return Step(change, float(loss.detach()), norm)


def contract_of(step: Step) -> LossContract:
    """What was observed of the loss."""
    contract = step.trainer.__dict__[SESSION].contract
    assert isinstance(contract, LossContract)
    return contract


def cut(samples: Sequence[Sample], per_device: int) -> list[list[Sample]]:
    return [list(samples[start : start + per_device]) for start in range(0, len(samples), per_device)]
