"""The host waits for the device nowhere after the first window: not in the Trainer, not in a loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Trainer, TrainerCallback

import hf_accum_fix
from hf_accum_fix import Items, LossContract, Reduction, accumulation_windows
from tests.numerics.heads import HEADS
from tests.numerics.heads.own import UsesTensor
from tests.numerics.heads.samples import text
from tests.numerics.parity import training_arguments

STEPS, WINDOWS = 4, 3
BY_NUMBER = LossContract(Reduction.NUMBER, Items(("labels",), shift=True))
MEAN = LossContract(Reduction.MEAN, Items(("labels",), shift=True))
#: Heads that do not wait by themselves, one that divides by the number it is handed and one that returns its own mean,
#: the type of their parameters, and options.
CASES: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("uses-tensor", torch.float32, {"contract": BY_NUMBER}),
    ("drops-kwargs", torch.float32, {"contract": MEAN}),
    ("drops-kwargs", torch.bfloat16, {"contract": MEAN}),
    ("uses-tensor", torch.bfloat16, {"contract": BY_NUMBER, "accumulate_in": "float32"}),
)


class WaitError(Exception):
    """The host would wait for the device."""


class DoneError(Exception):
    """Ends a training before it reads its losses."""


class NoWait(TorchDispatchMode):
    """On "meta": a number that is read is 1 until ``strict`` is set, and an error from then on; so is a copy."""

    strict = False

    def refuse(self, what: object) -> None:
        if self.strict:
            raise WaitError(f"got {what} after the first window; expected nothing that waits for the device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            self.refuse(func)
            return torch.ones((), dtype=args[0].dtype).item()
        found = func(*args, **(kwargs or {}))
        if "copy" in str(func):
            devices = {each.device for each in tree_iter((args, kwargs, found)) if isinstance(each, Tensor)}
            if len(devices) > 1:
                self.refuse(func)
        return found


class NoNewNumber(TorchFunctionMode):
    """Refuses what puts a number on the device by ``torch.tensor``, which no dispatch shows."""

    def __init__(self, told: NoWait) -> None:
        super().__init__()
        self.told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and on is not None and torch.device(on).type != "cpu":
            self.told.refuse(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing(device: str) -> Iterator[Callable[[bool], None]]:
    """Yields what makes waits raise, or lets them be."""
    if device == "meta":
        with NoWait() as mode, NoNewNumber(mode):
            yield lambda strict: setattr(mode, "strict", strict)
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        yield lambda strict: torch.cuda.set_sync_debug_mode("error" if strict else before)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def batches_on(device: str) -> list[dict[str, Tensor]]:
    """Two samples each, of three windows."""
    head, rows = HEADS["drops-kwargs"], text() * WINDOWS
    batches = [head.batch(rows[at : at + 2]) for at in range(0, len(rows), 2)]
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]


def by_trainer(model: nn.Module, options: dict[str, Any] | None, device: str, output: Path) -> int:
    """The windows that a training ran, by the patch where there are options, all but the first without a wait."""
    quiet = {"max_grad_norm": 0.0, "logging_strategy": "no", "logging_nan_inf_filter": False}
    args = training_arguments(output, 1, STEPS, max_steps=WINDOWS, use_cpu=device != "cuda", **quiet)
    batches = batches_on(device)
    with contextlib.ExitStack() as stack:
        if device == "meta":
            stack.enter_context(device_of(args, torch.device(device)))
        if options is not None:
            stack.enter_context(hf_accum_fix.apply(**options, quiet=True))
        after = Strict(stack.enter_context(refusing(device)))
        trainer = Trainer(
            model, args, lambda rows: batches[rows[0]], train_dataset=list(range(len(batches))), callbacks=[after]
        )
        stack.enter_context(contextlib.suppress(DoneError))
        trainer.train()
    return after.windows


@contextlib.contextmanager
def device_of(args: Any, device: torch.device) -> Iterator[None]:
    """Give a training another device than accelerate found."""
    found = args.device
    PartialState._shared_state["device"] = args.__dict__["_setup_devices"] = device
    try:
        yield
    finally:
        PartialState._shared_state["device"] = found


class Strict(TrainerCallback):
    """Makes waits raise from the end of the first window to the end of the last."""

    def __init__(self, strict: Callable[[bool], None]) -> None:
        self.strict, self.windows = strict, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.windows = state.global_step
        self.strict(state.global_step < WINDOWS)
        if state.global_step == WINDOWS:
            raise DoneError


def by_loop(model: nn.Module, options: dict[str, Any], device: str) -> int:
    """The same in a loop of one's own."""
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ran = 0
    with refusing(device) as strict:
        for window in accumulation_windows(batches_on(device), steps=STEPS, **options):
            for batch in window:
                with window.micro_batch(model):
                    window.loss(model, batch).backward()
            window.mean_loss()
            optimizer.step()
            optimizer.zero_grad()
            ran += 1
            strict(ran < WINDOWS)
    return ran


class Waits(UsesTensor):
    """Reads a number in every forward, or puts one on the device."""

    reads = True

    def forward(self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        float(self.head.bias.detach().sum()) if self.reads else torch.tensor(1.0, device=input_ids.device)
        return super().forward(input_ids, labels, num_items_in_batch, **kwargs)


def no_waits(device: str, output: Path) -> None:
    """Every case by stock, by the patch and by a loop; a head that does wait is seen."""
    for name, dtype, options in CASES:

        def made(name: str = name, dtype: torch.dtype = dtype) -> nn.Module:
            return HEADS[name].build().to(dtype)

        assert by_trainer(made(), None, device, output) == WINDOWS
        assert by_trainer(made(), options, device, output) == WINDOWS
        assert by_loop(made(), options, device) == WINDOWS
    copies = Waits()
    copies.reads = False
    for waiting in (Waits(), copies):
        with pytest.raises((WaitError, RuntimeError), match=r"waits for the device|synchronizing CUDA operation"):
            by_trainer(waiting, {"contract": BY_NUMBER}, device, output)


@pytest.mark.slow
def test_on_the_device_without_numbers(tmp_path: Path) -> None:
    """On "meta", which takes the paths of a GPU."""
    no_waits("meta", tmp_path)


def test_by_the_sync_debug_mode(cuda: str, tmp_path: Path) -> None:
    """torch tells of a wait for CUDA alone; "meta" stands in for it in the test above."""
    no_waits(cuda, tmp_path)
