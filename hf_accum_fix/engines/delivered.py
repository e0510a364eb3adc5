"""The gradient of a window on its way to the optimizer: added in the chosen dtype, compared at its end, and stepped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_accum_fix.engines.engine import (
    bare_name,
    check_engine_adds,
    engine_divisor,
    is_deepspeed,
    is_sharded,
    narrow_leaves,
)
from hf_accum_fix.engines.precision import WindowGradient, rounding_words
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.engines.reached import Delivered, Reached
from hf_accum_fix.engines.watched import plain
from hf_accum_fix.options import Options

logger = logging.getLogger("hf_accum_fix")

#: Names in a message.
_NAMES: Final = 3
#: What swapping a weight out and back in may leave of rounding, relative, in epsilons.
_ROUNDINGS: Final = 8.0
#: Factors this near to 1, relative, are 1, in 16 bits as well.
_SAME: Final = 0.01
#: A parameter and its name.
Named = tuple[str, Tensor]


class Steps:
    """Who steps the trainable parameters of a model, and when; what is found takes "exact" away.

    A parameter with a gradient that is in no group of an optimizer that has stepped is named if it has not moved when
    the next window begins: master weights, and what steps without torch's hooks, move it. FSDP and DeepSpeed, whose
    optimizers hold other tensors, and LOMO, which has no step, are left out.
    """

    def __init__(self, reached: Reached) -> None:
        self._reached, self.stays = reached, False  # no later window is exact
        self._own: dict[int, Named] = {}  # trainable parameters of this window, by id
        #: By id: held by an optimizer that has stepped, or moved otherwise; named; written with what they were.
        self._held, self._lost, self._steady = set[int](), set[int](), set[int]()
        #: Those with a gradient that none has held, and where it is largest the element of each.
        self._left: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self._versions, self._norms = list[int](), list[Tensor]()
        self._waiting: dict[int, int] = {}  # versions at a window's end of what no optimizer has held, by id
        self._number = self._begun = self._of = self._stepped = 0
        self._moves = False  # an optimizer has stepped since, at a rate that is not zero

    def begin(self, host: Training, model: nn.Module, micro_batches: int) -> None:
        """Begin a window, before its first micro-batch."""
        self.conclude(host)
        self._number, self._begun, self._of, self._stepped = host.state.opened, 1, micro_batches, 0
        if self.stays:
            host.state.note_inexact()
        engine = host.accelerator
        other = engine is not None and (is_sharded(engine) or getattr(engine, "has_lomo_optimizer", False))
        if not (other or hasattr(model, "_get_fsdp_state") or hasattr(model, "_handle")):
            self._own = {id(each): (name, each) for name, each in model.named_parameters() if each.requires_grad}

    def go_on(self, host: Training, begun: int) -> None:
        """Begin another micro-batch of it, before which no optimizer may have stepped."""
        self._begun = begun
        if self._stepped == begun - 1:
            found = f"an optimizer step after micro-batch {self._stepped} of the {self._of} of a window"
            words = f"{host.where}: got {found}; expected one after the last; leave stepping to the training loop"
            self.say(host, "steps within", words, found, "the optimizer steps within a window")

    def weigh(self, host: Training) -> None:
        """Note the weights after the first of several micro-batches, and compare them after the last."""
        own = self._own
        if self._begun == 1:
            self._versions = [each._version for _, each in own.values()]
            # A forward that clamps or normalises a weight writes to it, and changes nothing.
            self._norms = _norms(own) if self._number == 1 else []
        elif not self._stepped and len(self._versions) == len(own):
            versions = zip(own.items(), self._versions, strict=True)
            moved = {key: each for (key, each), version in versions if each[1]._version != version}
            if moved and self._norms:
                before, after = dict(zip(own, self._norms, strict=True)), zip(moved, _norms(moved), strict=True)
                self._steady |= {key for key, norm in after if _is_near(before[key], norm)}
            if names := _names([each for key, each in moved.items() if key not in self._steady]):
                found = f"weights that change within a window ({names})"
                words = (
                    f"{host.where}: got {found}; expected the same in all of its micro-batches; change them after it"
                )
                self.say(host, "weights change", words, found, "weights change within a window")

    def end(self, _: Training) -> None:
        """After the last backward: note the versions of what no optimizer has held so far; no operation."""
        self._waiting = {key: each._version for key, (_, each) in self._own.items() if key not in self._held}

    def stepped(self, host: Training, optimizer: Optimizer, *_: Any) -> None:
        """Before an optimizer steps: note what it holds, and after the last backward what none has held so far."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._held |= held
        if self._begun < self._of:
            # Inside the backward it is found by `Reached`.
            outside = torch._C._current_graph_task_id() == -1
            self._stepped = self._begun if outside and not held.isdisjoint(self._own) else -1
            return
        # What was written to since, a callback has moved.
        waiting = ((key, version, self._own[key][1]) for key, version in self._waiting.items() if key not in self._held)
        without = {key for key, version, each in waiting if each.grad is not None and each._version == version}
        if without and without <= self._lost:
            host.state.note_inexact()
            without = set()
        if not self._left:
            self._left = [(*each, *_largest(each[1])) for key, each in self._own.items() if key in without]
        self._moves = self._moves or any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)

    def conclude(self, host: Training) -> None:
        """When all optimizers have stepped after a window: name what none has moved."""
        left = [each for each in self._left if self._moves and id(each[1]) not in self._held]
        self._waiting, self._left, self._moves = {}, [], False
        if lost := [(name, each) for name, each, place, before in left if bool(_at(each, place) == before)]:
            none = self._held.isdisjoint(self._own)
            what = "none of the model's parameters" if none else f"no {_names(lost)}, which got a gradient"
            words = (
                f"{host.head}: got an optimizer with {what}; expected all that require one; make it of this model, "
                "after resize_token_embeddings and unfreezing, or set requires_grad=False if that is meant"
            )
            reason = "the optimizer does not have all parameters that train"
            self.say(host, "other optimizer", words, f"it has {what}", reason)
        self._lost |= {id(each) for _, each in lost}
        self._held |= {id(each) for _, each, *_ in left} - self._lost

    def say(self, host: Training, name: str, words: str, found: str, reason: str) -> None:
        """Warn once by name; this window is not exact, for a reason, and what was found is in the report."""
        host.state.note_inexact(self._number)
        host.warn_once(name, words)
        self._reached.verdict = Delivered(f"no, {found}", wrong=True, reason=reason)
        host.note(**self._reached.facts())


def _names(found: list[Named]) -> str:
    names = ", ".join(bare_name(name) for name, _ in found[:_NAMES])
    return names + (f" and {len(found) - _NAMES} more" if len(found) > _NAMES else "")


def _largest(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Where its gradient is largest, and its element there; no device sync."""
    place = plain(parameter.grad).abs().argmax()
    return place, _at(parameter, place)


def _at(parameter: Tensor, place: Tensor) -> Tensor:
    return plain(parameter.detach()).take(place)


def _norms(parameters: dict[int, Named]) -> list[Tensor]:
    return [*torch._foreach_norm([plain(each.detach()) for _, each in parameters.values()])] if parameters else []


def _is_near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs() <= _ROUNDINGS * torch.finfo(one.dtype).eps * one)


class Delivery:
    """The gradient of a training's windows.

    Attributes:
        gradient: the sum of a window's gradients.
        reached: whether it is what the optimizer uses.
        steps: whether the optimizer steps the model's parameters, once a window.
    """

    def __init__(self, options: Options) -> None:
        self.gradient, self.reached = WindowGradient(options.accumulate_in), Reached()
        self.steps, self._failed = Steps(self.reached), False

    def ask(self, act: Callable[..., None], host: Training, *given: Any, **more: Any) -> None:
        """Run a part of the check of who steps; one that fails ends that check alone, and the report says so."""
        if self._failed:
            return
        try:
            act(host, *given, **more)
        except Exception as error:
            self._failed = True
            logger.debug("asking who steps failed", exc_info=error)
            self.reached.unasked = f"; who steps is not checked: {type(error).__name__}: {error}"
            host.note(**self.reached.facts())

    def listen(self, host: Training, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        """In the first window: warn if an ``accelerator.backward`` that was replaced hands on a multiple of a loss."""
        engine, function = host.accelerator, getattr(backward, "__func__", backward)
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        if host.state.opened > 1 or is_deepspeed(engine) or package == "accelerate" or not loss.requires_grad:
            return
        scaler = None if engine is None else engine.scaler
        expected = (1.0 if scaler is None else scaler.get_scale()) / engine_divisor(engine, **kwargs)

        def heard(gradient: Tensor) -> None:
            times = float(gradient) / expected
            if math.isfinite(times) and abs(times - 1) > _SAME:
                found = f"accelerator.backward replaced by one that hands on {times:.3g} times the loss"
                words = f"{host.head}: got {found}; expected the loss as it is; scale it in compute_loss"
                self.steps.say(host, "replaced backward", words, found, "accelerator.backward is replaced")
                self.steps.stays = True

        loss.register_hook(heard)  # type: ignore[no-untyped-call]

    def micro_batch(
        self, host: Training, model: nn.Module, micro_batches: int, begun: int
    ) -> AbstractContextManager[None]:
        """Around micro-batch number ``begun``: add gradients in the chosen dtype; warn once of what 16 bits lose."""
        steps, first = self.steps, begun == 1
        self.ask(*(steps.begin, host, model, micro_batches) if first else (steps.go_on, host, begun))
        if self.gradient.idle and self.reached.idle and not (first or begun >= micro_batches):
            return nullcontext()
        return self._watched(host, model, micro_batches, begun)

    @contextmanager
    def _watched(self, host: Training, model: nn.Module, micro_batches: int, begun: int) -> Iterator[None]:
        first, last, gradient, reached = begun == 1, begun >= micro_batches, self.gradient, self.reached
        if first and not last and (found := check_engine_adds(host.accelerator, host.options.accumulate_in)):
            host.warn_inexact("16 bits", found)
        unknown, leaves = gradient.lost is None, partial(narrow_leaves, host.accelerator, model)
        with (
            nullcontext() if gradient.idle else gradient.micro_batch(leaves, first=first, last=last),
            nullcontext() if reached.idle else reached.micro_batch(host, model, first=first, last=last),
        ):
            yield
        if first is not last:
            self.ask(self.steps.weigh, host)
        if unknown and gradient.lost is not None:
            host.note(lost_in_16_bits=gradient.lost)
            if gradient.matters:
                head = type(host.bare(model)).__name__
                host.warn_inexact("16 bits", f"{head}: {rounding_words(gradient.lost, micro_batches)}")

    def check(self, host: Training, times: Tensor | float | None) -> None:
        """Say whether what autograd delivered in this window is what the optimizer is about to use.

        ``times``: what the gradient was multiplied by at the window's end. A collective in a window that is checked.
        """
        self.ask(self.steps.end, host)
        if self.reached.idle or (verdict := self.reached.close(host, times)) is None:
            return
        host.note(**self.reached.facts())
        where = f"{host.head}: {host.where}"
        if verdict.wrong:
            host.warn_inexact(
                "reached",
                f"{where}: got {verdict.words[4:]} in what the optimizer uses; expected the gradient that autograd "
                "delivered, averaged over ranks; look at the engine, gradient and communication hooks",
            )
        elif verdict.inside and host.steps > 1:
            host.warn_inexact(
                "reached",
                f"{where}: got an optimizer that steps inside the backward of every micro-batch; expected one step a "
                "window; use another optimizer, or gradient_accumulation_steps=1",
            )
            self.steps.stays = True
        elif verdict.final and host.world.rank == 0:
            logger.info("%s: the gradient reached the optimizer: %s", host.head, verdict.words)
