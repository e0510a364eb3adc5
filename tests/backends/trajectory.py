"""Three optimizer steps of a head on two ranks through any backend, beside plain SGD over the global batches.

Ragged samples; the second window holds two targets' samples, both on the first rank; the last window is short.
"""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.backends.rows import DEEPSPEED, FSDP1, FSDP2, TENSOR_PARALLEL, Backend
from tests.numerics.epochs import Stream
from tests.numerics.heads import Head, Sample
from tests.numerics.heads.head import of_class
from tests.numerics.heads.samples import one_class, text, with_labels, without_targets
from tests.numerics.heads.text import DECODER
from tests.numerics.parity import applied, moved, pass_over_imports, recorder, relative, trainable, training_arguments

#: Micro-batch size and accumulation steps on each of two ranks: the same global batches of 8, 8 and 4 samples.
SPLITS = ((1, 4), (2, 2))
#: Heads whose two key-value heads can be dealt to two ranks.
HEADS = {
    "llama": of_class("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 2}, text(), name="llama"),
    "llama-classification": of_class(
        "LlamaForSequenceClassification",
        {**DECODER, "num_key_value_heads": 2, "num_labels": 3},
        with_labels(one_class),
        name="llama-classification",
    ),
}
WINDOWS = (slice(0, 8), slice(8, 16), slice(16, 20))
#: Of the second window, these samples are the first rank's in both splits.
WITH_TARGETS = (8, 12)
RATE = 0.1
#: Smaller than every gradient norm, or none at all.
CLIPPED, UNCLIPPED = 0.5, 1e30


@dataclass
class Trajectory:
    """Parameter changes by name, and each step's loss and gradient norm (before clipping) as logged."""

    change: dict[str, Tensor]
    losses: list[float]
    norms: list[float]

    def error(self, reference: Trajectory) -> float:
        """Relative error of the parameter change."""
        return relative(self.change, reference.change)

    def errors(self, reference: Trajectory) -> dict[str, float]:
        """Relative errors: of the parameter change, and the largest of the steps' losses and norms."""
        return {
            "change": self.error(reference),
            "loss": furthest(self.losses, reference.losses) if self.losses else 0.0,
            "norm": furthest(self.norms, reference.norms) if self.norms else 0.0,
        }


def furthest(found: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


def samples_of(head: Head) -> list[Sample]:
    """Twenty samples; the second rank has no item in the second window, however it is cut."""
    return without_targets((list(head.samples) * 3)[:20], {*range(8, 16)} - {*WITH_TARGETS})


def built(head: Head, backend: Backend) -> nn.Module:
    """The model as it is trained; DeepSpeed takes its float32 copy of what was rounded before."""
    return head.build().to(backend.compute or backend.dtype).to(backend.dtype).train()


def reference(
    head: Head, max_norm: float, backend: Backend, *, exact: bool = False, by: int = 0, order: int = 1
) -> Trajectory:
    """Plain SGD over the global batches: the promise itself, in the precision of a backend.

    Args:
        head: what is trained.
        max_norm: at which the gradient is clipped.
        backend: whose precision is taken.
        exact: in float64 all the same.
        by: samples of one forward, whose sums are added up; 0: the whole global batch.
        order: 1 or -1, in which order a global batch's samples are taken.
    """
    autocast, compute = (None, None) if exact else (backend.autocast, backend.compute)
    model = built(head, backend).to(torch.float64 if exact else backend.dtype)
    run = model if compute is None else copy.deepcopy(model).to(compute)
    start, losses, norms = trainable(model), [], []
    samples = samples_of(head)
    for window in WINDOWS:
        rows = samples[window][::order]
        pieces = [rows[at : at + by] for at in range(0, len(rows), by)] if by else [rows]
        model.zero_grad()
        run.zero_grad()
        run.load_state_dict(model.state_dict())
        total = 0.0
        counts = [items_of(head, piece) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            if count:
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    loss = head.reference_loss(run, head.batch(piece)) * (count / sum(counts))
                loss.backward()
                total += float(loss.detach())
        for parameter, computed in zip(model.parameters(), run.parameters(), strict=True):
            parameter.grad = None if computed.grad is None else computed.grad.to(parameter.dtype)
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return Trajectory(moved(model, start), losses, norms)


def references(head: Head, max_norm: float, backend: Backend) -> tuple[Trajectory, Trajectory, float]:
    """In float64 and in the backend's precision, and what the order of the samples makes of the latter."""
    exact, wanted = (reference(head, max_norm, backend, exact=exact) for exact in (True, False))
    return exact, wanted, reference(head, max_norm, backend, by=1, order=-1).error(wanted)


def compared(found: Trajectory, exact: Trajectory, wanted: Trajectory) -> dict[str, Any]:
    return {"exact": found.error(exact), **found.errors(wanted), "norms": found.norms}


def attempted(run: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """What ``run`` returns or, of all ranks alike, or the others would wait for ever, what it raised."""
    pass_over_imports()
    try:
        return run(*given, **how)
    except Exception:
        return {"raised": traceback.format_exc()[-3000:]}


def assert_steps(runs: Sequence[dict[str, Any]], backend: Backend, least: float = 0.0) -> None:
    """To twice what the order of the samples does in this precision; in float64 the loss is still made in float32."""
    for run in runs:
        tolerance = max(1e-6 if backend.dtype == torch.float64 else 2 * run["noise"], least)
        assert run["change"] <= tolerance and run["norm"] <= tolerance, run
        assert run["loss"] <= max(tolerance, 1e-6), run
        # Clipping in float32 rounds more than the order of the samples does.
        assert (least and run["max_norm"] < 1) or run["exact"] <= 2 * tolerance + 1e-5, run


def items_of(head: Head, samples: Sequence[Sample]) -> int:
    """Targets of some samples; a causal head's first label is none."""
    labels = [sample["labels"][1:] if head.name == "llama" else sample["labels"] for sample in samples]
    return sum(int((each != -100).sum()) for each in labels)


def train(
    head: Head, backend: Backend, split: tuple[int, int], path: str, max_norm: float, output: Path, *,
    stream: bool = False, trainer_class: type | None = None, device: str = "cpu", **options: Any,
) -> Trajectory:  # fmt: skip
    """The same by the Trainer on this backend.

    Args:
        device: that all ranks share.
        stream: the samples come without a length.
        trainer_class: a recorder with a loss of its own.
        options: of apply().
    """
    per_device, accumulate = split
    accumulate *= 2 // backend.data_ranks
    given: dict[str, Any] = {"learning_rate": RATE, "max_grad_norm": max_norm, "max_steps": -1, "num_train_epochs": 1}
    if stream:
        # A dispatching loader would have to concatenate ragged samples.
        given |= {"max_steps": len(WINDOWS), "accelerator_config": {"dispatch_batches": False}}
    data = Stream(samples_of(head)) if stream else samples_of(head)
    arguments = partial(training_arguments, output, per_device, accumulate, **given)
    make = partial(trainer_class or recorder(path), train_dataset=data, data_collator=head.batch)
    with applied(path, **options):
        return trained_on(backend, lambda: built(head, backend), arguments, make, device)


def trained_on(
    backend: Backend, build: Callable[[], nn.Module], arguments: Callable[..., Any], make: Callable[..., Any],
    device: str = "cpu",
) -> Trajectory:  # fmt: skip
    """Train on a backend what ``build`` makes; ``arguments`` and ``make`` lack the backend's, the model and them."""
    # Before the arguments are: a config of ZeRO-3 makes every model that is built after it a sharded one.
    unset_hf_deepspeed_config()
    model = build()
    start = trainable(model)
    if backend.load is not None:
        model = backend.load(model)
    with variables(backend.environment), offloading_on_a_cpu() if device == "cpu" else contextlib.nullcontext():
        if backend.wrapped == DEEPSPEED:
            without_compiling()
        where = {"ddp_backend": dist.get_backend(), "use_cpu": device == "cpu"}
        args = arguments(**where, **copy.deepcopy(dict(backend.arguments)))
        if backend.wrapped in (FSDP1, FSDP2, TENSOR_PARALLEL):
            sharding_on(args, device)
        trainer = make(model=model, args=args)
        if backend.prepare is not None:
            backend.prepare(trainer)
        trainer.train()
        wrapping = [cls.__name__ for cls in type(trainer.model_wrapped).__mro__]
        assert backend.wrapped in wrapping, f"{backend.name} trained under {wrapping[0]}"
        end = gathered(trainer.model_wrapped, backend)
        unset_hf_deepspeed_config()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trajectory(
        {name: end[name] - start[name] for name in start},
        [float(entry["loss"]) for entry in logged],
        [float(entry["grad_norm"]) for entry in logged] if backend.reports_norm else [],
    )


def sharding_on(args: Any = None, device: str = "cpu") -> None:
    """Let accelerate shard, which it does on devices alone; from here on it is its own code, on the CPU."""
    if args is not None:
        args.device  # noqa: B018 - it is set up when it is asked for
    PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device(device))


def fresh_state() -> None:
    """Of accelerate, on CPU ranks; it keeps the last for the whole process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState(cpu=True, backend="gloo")


def gathered(model: nn.Module, backend: Backend) -> dict[str, Tensor]:
    """The parameters of a model that may be sharded, whole, on every rank, by their names in the bare model."""
    whole: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    full: Callable[[Any], Tensor] = torch.Tensor.detach
    if backend.wrapped == FSDP1:
        whole = FullyShardedDataParallel.summon_full_params(model)
    elif backend.wrapped in (FSDP2, TENSOR_PARALLEL):
        full = whole_tensor
    elif backend.wrapped == DEEPSPEED:
        import deepspeed

        if backend.compute is not None:
            full = deepspeed.utils.safe_get_full_fp32_param
        else:
            whole = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with whole:
        return {
            name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): on_cpu(full(p))
            for name, p in model.named_parameters()
        }


def on_cpu(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float64, copy=True)


def whole_tensor(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def without_compiling() -> None:
    """Leave DeepSpeed's collectives to gloo; its own for CPUs would be compiled first, for minutes."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def offloading_on_a_cpu() -> Iterator[None]:
    """What is offloaded is pinned and waited for, which asks for another device than the CPU: here both are no work.

    FSDP1 tells a gradient that was offloaded from one to be added to by its device, so that on a CPU it adds the last
    step's to every one after (torch 2.13.0); here it is reported as on a GPU.
    """
    prepare = FlatParamHandle.prepare_gradient_for_backward

    def without_the_last_step(handle: Any) -> None:
        parameter = handle.flat_param
        if handle._offload_params and parameter.grad is not None:
            offloaded = parameter.grad.size() == parameter._local_shard.size()
            parameter.grad = None if offloaded else parameter.grad
        prepare(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatParamHandle, "prepare_gradient_for_backward", without_the_last_step)
        patch.setattr(Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor)
        patch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
        yield


@contextlib.contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
