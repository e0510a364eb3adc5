"""Check that what autograd delivered in a window is what the optimizer is about to use.

    delivered    the gradient of a parameter in each micro-batch, by a hook on the tensor that autograd delivers it to,
                 before any other hook and before the engine sees it; summed on this rank, averaged over ranks
    used         what the engine made of it, before clipping: ``.grad``, FSDP's shards, DeepSpeed's partitions

Both are linear in the window, so that they are equal to rounding, whatever the loss is: a loss scale is in both. On a
few parameters (`watched`), in the first window whose gradient is finite and not zero. The hooks are there from the
beginning of a micro-batch to its end, and change nothing. A rank on which something failed, or which has chosen other
parameters, joins the collectives, which have one length everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hf_accum_fix.counting.items import count_dtype
from hf_accum_fix.engines.difference import Difference, looks_like
from hf_accum_fix.engines.engine import before_the_step, is_deepspeed, reduced_in
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.engines.watched import AFTER, ELEMENTS, PARAMETERS, Watched, choose, own_hooks, watch

#: Windows in which it is tried, until one has a gradient that is finite and not zero (fp16 begins with overflows).
ATTEMPTS: Final = 8

#: Why a training is not exact.
OTHER_GRADIENT: Final = "the optimizer gets another gradient than autograd delivered"
_STEPS_INSIDE: Final = "an optimizer steps inside the backward"
_LEFT: Final = "gradients were there as the window began: call optimizer.zero_grad() after each step"
_FAILED: Final = "a micro-batch, or reading its gradient, failed on a rank"
_OTHERS: Final = "parameters could not be chosen, or are others, on some ranks"
#: Numbers of a parameter in the second collective.
_NUMBERS: Final = 7


@dataclass(frozen=True)
class Delivered:
    """Of one window, the same on every rank but for its words.

    Attributes:
        words: "yes, ...", "no, ..." or "not checked: ...", with this rank's own reason if it has one.
        error: of what the optimizer uses, relative, in the norm of all parameters; None: not checked, or not finite.
        wrong: it is more than rounding.
        final: no other window can say more.
        reason: why the training is not exact, if it is wrong.
    """

    words: str
    error: float | None = None
    wrong: bool = False
    final: bool = True
    reason: str = OTHER_GRADIENT

    @property
    def inside(self) -> bool:
        """Whether an optimizer steps inside the backward of every micro-batch, by that one's gradient."""
        return _STEPS_INSIDE in self.words


class Reached:
    """The check of a training, window by window.

    Attributes:
        verdict: the last one, or the first that is wrong, for report(); None: there was none.
        idle: no later window is checked.
        unasked: why who steps the parameters is not known, in words; empty: it is.
    """

    def __init__(self) -> None:
        self.verdict: Delivered | None = None
        self.idle, self.unasked = False, ""
        self._window = 0
        self._watched: list[Watched] = []
        self._found: Delivered | None = None
        self._joins = self._complete = self._open = False
        self._unchosen, self._left = "", False
        self._micro_batches = 0
        self._model: Any = None

    @contextmanager
    def micro_batch(self, ranks: Training, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        """Around one forward and backward; with DeepSpeed, which steps in there, it compares before the step."""
        if first or not self._open:
            self._begin(ranks, model)
            # This rank left the first micro-batches out.
            for each in () if first else self._watched:
                each.failed = True
        if not self._joins:
            yield
            return
        self._micro_batches += 1
        within = last and is_deepspeed(ranks.accelerator)
        step = before_the_step(ranks.accelerator, None, partial(self._compare, ranks)) if within else nullcontext()
        hooks = watch(self._watched)
        try:
            with step:
                yield
        except BaseException:
            # Whoever catches this goes on, as the other ranks do.
            for each in self._watched:
                each.failed = True
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._complete = last

    def _begin(self, ranks: Training, model: nn.Module) -> None:
        self._window, self._watched, self._found, self._micro_batches = self._window + 1, [], None, 0
        self._complete, self._open, self._model, self._unchosen = False, True, model, ""
        try:
            if why := unsuitable(ranks):
                self._found = Delivered(f"not checked: {why}")
            else:
                self._watched = choose(ranks.accelerator, model)
                # FSDP2 makes its whole parameters in the first forward.
                self._unchosen = "" if self._watched else f"no trainable parameter has at most {ELEMENTS} elements"
                self._left = any(each.leaf.grad is not None and bool(each.leaf.grad.any()) for each in self._watched)
        except Exception as error:
            self._unchosen = f"{type(error).__name__}: {error}"
        self._joins = self._found is None

    def _compare(self, ranks: Training) -> None:
        if self._found is None:
            self._found = self._judge(ranks, 1.0)

    def close(self, ranks: Training, times: Tensor | float | None) -> Delivered | None:
        """The verdict on a window that ended; None: there is none. A collective in a window that is checked.

        ``times``: what the gradient was multiplied by after the last micro-batch; None: nothing.
        """
        for each in () if self._complete else self._watched:
            # A rank that left out its last micro-batch joins all the same.
            each.failed = True
        if self._found is None and self._joins:
            self._found = self._judge(ranks, 1.0 if times is None else float(times))
        verdict, self._found, self._watched = self._found, None, []
        self._joins, self._complete, self._open, self._model = False, False, False, None
        if verdict is not None:
            self.verdict = self.verdict if self.verdict is not None and self.verdict.wrong else verdict
            self.idle = verdict.final or self._window >= ATTEMPTS
        return verdict

    def _judge(self, ranks: Training, times: float) -> Delivered:
        try:
            narrow = reduced_in(ranks.accelerator, self._model) if ranks.world.data_ranks > 1 else []
            found = judge(ranks, self._watched, times, self._micro_batches, narrow)
            if found.wrong and self._left:
                found = replace(found, words=f"{found.words.partition(' (')[0]} ({_LEFT})")
            return replace(found, words=f"not checked: {self._unchosen}") if self._unchosen else found
        except Exception as error:
            return Delivered(f"not checked: {type(error).__name__}: {error}")

    def facts(self) -> dict[str, Any]:
        """Entries of a report."""
        if self.verdict is None:
            return {}
        why = {"reason": self.verdict.reason} if self.verdict.wrong else {}
        words = self.verdict.words + self.unasked
        return {"reached_optimizer": words, "reached_optimizer_error": self.verdict.error, **why}


def unsuitable(ranks: Training) -> str:
    """Why the engine does not allow the check; empty: it does."""
    if ranks.world.data_ranks not in (1, ranks.world.size):
        return f"{ranks.world.size} ranks share the samples in {ranks.world.data_ranks} groups"
    if getattr(ranks.accelerator, "has_lomo_optimizer", False):
        return _STEPS_INSIDE
    if is_deepspeed(ranks.accelerator):
        optimizer = ranks.accelerator.deepspeed_engine_wrapped.engine.optimizer
        # Reading would read and write files.
        return "the optimizer's state is swapped to files" if getattr(optimizer, "swap_optimizer", False) else ""
    return ""


# --- the comparison ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(ranks: Training, watched: Sequence[Watched], times: float, steps: int, narrow: Sequence[str]) -> Delivered:
    """Compare what was delivered on all ranks with what is used on this one: two collectives.

    Args:
        ranks: of the training.
        watched: the parameters, after the last backward of a window.
        times: what the gradient was multiplied by since.
        steps: micro-batches of the window.
        narrow: the dtypes in which gradients are reduced, and communication hooks.
    """
    zeros = partial(torch.zeros, dtype=count_dtype(ranks.world.device), device=ranks.world.device)
    delivered = [zeros(each.numel) if each.total is None else each.total.to(ranks.world.device) for each in watched]
    sizes = [zeros(()) if each.size is None else each.size.to(ranks.world.device) for each in watched]
    if ranks.world.data_ranks > 1:
        chosen = float(crc32(repr([(each.name, each.numel) for each in watched]).encode()) & 0xFFFF)
        head = zeros(2).new_tensor([chosen, chosen**2])
        sent = torch.cat([head, *map(torch.atleast_1d, [*delivered, *sizes])])
        summed = ranks.summed(pad(sent, (0, 2 + ELEMENTS + PARAMETERS - len(sent))))
        if summed[0] ** 2 != summed[1] * ranks.world.size:
            return Delivered(f"not checked: {_OTHERS}", final=False)
        # Of sequence-parallel ranks an engine may not take the mean.
        mean = summed[2 : len(sent)] / (ranks.world.data_ranks * (ranks.world.over_ranks or 1.0))
        both = torch.split(mean, [*(each.numel for each in watched), *[1] * len(watched)])
        delivered, sizes = [*both[: len(watched)]], [each[0] for each in both[len(watched) :]]
    # This rank's failure to choose.
    rows = [zeros(_NUMBERS) + (not watched)]
    for each, whole, size in zip(watched, delivered, sizes, strict=True):
        expected, gradient = (whole * times)[each.own or slice(None)], each.read()
        used = torch.zeros_like(expected) if gradient is None else gradient.reshape(-1).to(expected)
        # An optimizer that steps there leaves zeros or nothing; a user's mask of rows is the same in every split.
        inside = bool(getattr(each.leaf, AFTER, None)) and not bool(used.any())
        expected = expected * (used != 0) if not inside and own_hooks(each.leaf, AFTER) else expected
        dtypes = [each.dtype] if gradient is None else [each.dtype, gradient.dtype]
        epsilon = max((torch.finfo(dtype).eps for dtype in dtypes if dtype is not None), default=0.0)
        products = (used - expected).square().sum(), (used * expected).sum(), expected.square().sum()
        rows.append(torch.stack([*products, size * abs(times), *map(zeros(()).add, (epsilon, inside, each.failed))]))
    table = ranks.summed(pad(torch.stack(rows), (0, 0, 0, 1 + PARAMETERS - len(rows)))).tolist()
    reduced = max(map(_epsilon, narrow), default=0.0)
    differences, norms, errors = list[Difference](), 0.0, 0.0
    if any(failed for *_, failed in table):
        return Delivered(f"not checked: {_FAILED}", final=False)
    for each, (error, dot, norm, size, epsilon, inside, _) in zip(watched, table[1:], strict=False):
        if not math.isfinite(norm):
            return Delivered("not checked: the gradient is not finite", final=False)
        if inside and norm:
            return Delivered(f"not checked: {_STEPS_INSIDE}")
        if not norm:
            continue
        norms, errors = norms + norm, errors + error
        copies = 1 if ranks.world.data_ranks == 1 or each.own is not None else ranks.world.size
        size = size if ranks.world.data_ranks == 1 else size / ranks.world.size
        differences.append(
            Difference(
                each.name,
                error=math.sqrt(error / norm),
                ratio=dot / norm,
                elements=each.numel,
                additions=steps + ranks.world.data_ranks,
                spread=max(size / math.sqrt(norm / copies), 1.0),
                epsilon=max(epsilon / ranks.world.size, reduced),
            )
        )
    return _verdict(differences, steps, ranks.world.data_ranks, math.sqrt(errors / norms) if norms else 0.0)


def _verdict(differences: Sequence[Difference], steps: int, ranks: int, error: float) -> Delivered:
    several = f"{len(differences)} parameter{'s' * (len(differences) != 1)}"
    if not differences:
        return Delivered("not checked: the gradient is zero", final=False)
    wrong = [each for each in differences if each.is_wrong]
    if not wrong:
        return Delivered(f"yes, to {f'{error:.0e}' if error else 'the last bit'}, on {several}", error)
    ratio = sum(each.ratio for each in wrong) / len(wrong)
    amount = f"{ratio:.3g} of it, off by {error:.2g}" if math.isfinite(error) else "nothing finite"
    words = f"{amount}, on {len(wrong)} of {several}"
    # A report is data for JSON.
    finite = error if math.isfinite(error) else None
    return Delivered(f"no, {words} ({looks_like(differences, steps, ranks)})", finite, wrong=True)


def _epsilon(name: str) -> float:
    """Of a dtype, or of a communication hook by the dtype in its name."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    found: Any = getattr(torch, name, None) or next((dtype for key, dtype in narrow.items() if key in name), None)
    return float(torch.finfo(found).eps) if isinstance(found, torch.dtype) else 0.0
