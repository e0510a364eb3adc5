"""Check that what autograd delivered in a window is what the optimizer is about to use.

    delivered    the gradient of a parameter in each micro-batch, by a hook on the tensor that autograd delivers it to,
                 before any other hook and before the engine sees it; summed on this rank, averaged over ranks
    used         what the engine made of it, before clipping: ``.grad``, FSDP's shards, DeepSpeed's partitions

Both are linear in the window, so that they are equal to rounding, whatever the loss is: a loss scale is in both. On at
most `PARAMETERS` parameters, `ELEMENTS` elements in all, in the first window whose gradient is finite and not zero. The
hooks are there from the beginning of a micro-batch to its end, and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.items import count_dtype
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.engines.difference import Difference, looks_like
from hf_accum_fix.engines.engine import is_deepspeed, parameters_of_fsdp2, reduced_in
from hf_accum_fix.upstream.protocols import AcceleratorLike

PARAMETERS: Final = 8
#: One megabyte in float64.
ELEMENTS: Final = 2**17
#: Windows in which it is tried, until one has a gradient that is finite and not zero (fp16 begins with overflows).
ATTEMPTS: Final = 8

#: Why a training is not exact.
OTHER_GRADIENT: Final = "the optimizer gets another gradient than autograd delivered"
_STEPS_INSIDE: Final = "an optimizer steps inside the backward"


class Ranks(Protocol):
    """What is asked of a `core.host.Host`."""

    accelerator: AcceleratorLike | None
    world_size: int
    data_ranks: int
    device: torch.device

    def summed(self, numbers: Tensor) -> Tensor:
        """Sum numbers over ranks: a collective."""


@dataclass(frozen=True)
class Verdict:
    """Of one window, the same on every rank.

    Attributes:
        words: "yes, ...", "no, ..." or "not checked: ...".
        error: of what the optimizer uses, relative, in the norm of all parameters; None: not checked.
        wrong: it is more than rounding.
        final: no other window can say more.
    """

    words: str
    error: float | None = None
    wrong: bool = False
    final: bool = True


@dataclass(eq=False)
class Watched:
    """One parameter, or a sample of FSDP1's flat one.

    Attributes:
        name: of the parameter.
        leaf: the tensor that autograd delivers its gradient to.
        used: what the optimizer is about to use, flat; None: it has no gradient. A collective under sharding.
        pick: the elements of a delivered gradient that are compared, flat.
        own: the part of these elements that is used on this rank; None: all.
        numel: of these elements.
        total: their sum over micro-batches; None: nothing was delivered.
        size: the norms of all that was added, summed; 0-dim.
        dtype: of what was delivered.
    """

    name: str
    leaf: Tensor
    used: Callable[[], Tensor | None]
    numel: int
    pick: Callable[[Tensor], Tensor]
    own: slice | None = None
    total: Tensor | None = None
    size: Tensor | None = None
    dtype: torch.dtype | None = None

    @torch.no_grad()
    def deliver(self, gradient: Tensor) -> None:
        """A hook on the leaf."""
        wide = count_dtype(gradient.device)
        added = self.pick(_plain(gradient.detach())).to(wide, copy=True)
        self.dtype = gradient.dtype
        self.total = added if self.total is None else self.total.add_(added)
        size = torch.linalg.vector_norm(added)
        self.size = size if self.size is None else self.size + size


class Reached:
    """The check of a training, window by window.

    Args:
        every: check every so many windows from the first on; 0: the first alone.

    Attributes:
        verdict: the last one, or the first that is wrong, for report(); None: there was none.
    """

    def __init__(self, every: int = 0) -> None:
        self.verdict: Verdict | None = None
        self._every, self._window, self._decided = every, 0, False
        self._watched: list[Watched] = []
        self._found: Verdict | None = None
        self._complete = False
        self._micro_batches = 0
        self._model: Any = None

    @contextmanager
    def micro_batch(self, ranks: Ranks, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        """Around one forward and backward; with DeepSpeed, which steps in there, it compares before the step."""
        if first:
            self._begin(ranks, model)
        if not self._watched:
            yield
            return
        self._micro_batches += 1
        engine = ranks.accelerator.deepspeed_engine_wrapped.engine if is_deepspeed(ranks.accelerator) else None
        step = nullcontext() if engine is None or not last else overridden(engine, "step", self._before(engine, ranks))
        hooks = [_hooked_first(each.leaf, each.deliver) for each in self._watched]
        try:
            with step:
                yield
        except BaseException:
            self._watched = []
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._complete = last

    def _begin(self, ranks: Ranks, model: nn.Module) -> None:
        self._window, self._watched, self._found, self._micro_batches = self._window + 1, [], None, 0
        self._complete, self._model = False, model
        due = not self._decided or (self._every and (self._window - 1) % self._every == 0)
        if not due:
            return
        try:
            if why := unsuitable(ranks):
                self._found = Verdict(f"not checked: {why}")
            else:
                self._watched = choose(ranks.accelerator, model, ranks.data_ranks)
                if not self._watched:
                    # FSDP2 makes its whole parameters in the first forward.
                    nothing = f"not checked: no trainable parameter has at most {ELEMENTS} elements"
                    self._found = Verdict(nothing, final=self._window > 1)
        except Exception as error:
            self._found = Verdict(f"not checked: {type(error).__name__}: {error}")

    def _before(self, engine: Any, ranks: Ranks) -> Callable[..., Any]:
        step = engine.step

        def compared(*args: Any, **kwargs: Any) -> Any:
            if self._found is None:
                self._found = self._judge(ranks, 1.0)
            return step(*args, **kwargs)

        return compared

    def close(self, ranks: Ranks, times: Tensor | float | None) -> Verdict | None:
        """The verdict on a window that ended; None: there is none. A collective in a window that is checked.

        ``times``: what the gradient was multiplied by after the last micro-batch; None: nothing.
        """
        if self._found is None and self._complete and self._watched:
            self._found = self._judge(ranks, 1.0 if times is None else float(times))
        verdict, self._found, self._watched, self._complete = self._found, None, [], False
        self._model = None
        if verdict is not None:
            self.verdict = self.verdict if self.verdict is not None and self.verdict.wrong else verdict
            self._decided = self._decided or verdict.final or self._window >= ATTEMPTS
        return verdict

    def _judge(self, ranks: Ranks, times: float) -> Verdict:
        try:
            narrow = reduced_in(ranks.accelerator, self._model) if ranks.data_ranks > 1 else []
            return judge(ranks, self._watched, times, self._micro_batches, narrow)
        except Exception as error:
            return Verdict(f"not checked: {type(error).__name__}: {error}")

    def facts(self) -> dict[str, Any]:
        """Entries of a report."""
        if self.verdict is None:
            return {}
        why = {"reason": OTHER_GRADIENT} if self.verdict.wrong else {}
        return {"reached_optimizer": self.verdict.words, "reached_optimizer_error": self.verdict.error, **why}


# --- the comparison ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(ranks: Ranks, watched: Sequence[Watched], times: float, steps: int, narrow: Sequence[str]) -> Verdict:
    """Compare what was delivered on all ranks with what is used on this one: two collectives.

    Args:
        ranks: of the training.
        watched: the parameters, after the last backward of a window.
        times: what the gradient was multiplied by since.
        steps: micro-batches of the window.
        narrow: the dtypes in which gradients are reduced, and communication hooks.
    """
    zeros = partial(torch.zeros, dtype=count_dtype(ranks.device), device=ranks.device)
    delivered = [zeros(each.numel) if each.total is None else each.total.to(ranks.device) for each in watched]
    sizes = [zeros(()) if each.size is None else each.size.to(ranks.device) for each in watched]
    if ranks.data_ranks > 1:
        # Of sequence-parallel ranks an engine may not take the mean.
        divisor = ranks.data_ranks * (getattr(ranks, "over_ranks", None) or 1.0)
        mean = ranks.summed(torch.cat([*delivered, torch.stack(sizes)])) / divisor
        both = torch.split(mean, [*(each.numel for each in watched), *[1] * len(watched)])
        delivered, sizes = [*both[: len(watched)]], [each[0] for each in both[len(watched) :]]
    rows = []
    for each, whole, size in zip(watched, delivered, sizes, strict=True):
        expected, gradient = (whole * times)[each.own or slice(None)], each.used()
        used = torch.zeros_like(expected) if gradient is None else gradient.reshape(-1).to(expected)
        inside = gradient is None and bool(getattr(each.leaf, "_post_accumulate_grad_hooks", None))
        dtypes = [each.dtype] if gradient is None else [each.dtype, gradient.dtype]
        epsilon = max((torch.finfo(dtype).eps for dtype in dtypes if dtype is not None), default=0.0)
        products = (used - expected).square().sum(), (used * expected).sum(), expected.square().sum()
        rows.append(torch.stack([*products, size * abs(times), *map(zeros(()).add, (epsilon, float(inside)))]))
    summed = ranks.summed(torch.stack(rows)).tolist()
    reduced = max(map(_epsilon, narrow), default=0.0)
    differences, norms, errors = list[Difference](), 0.0, 0.0
    for each, (error, dot, norm, size, epsilon, inside) in zip(watched, summed, strict=True):
        if not math.isfinite(norm):
            return Verdict("not checked: the gradient is not finite", final=False)
        if inside and norm:
            return Verdict(f"not checked: {_STEPS_INSIDE}")
        if not norm:
            continue
        norms, errors = norms + norm, errors + error
        copies = 1 if ranks.data_ranks == 1 or each.own is not None else ranks.world_size
        size = size if ranks.data_ranks == 1 else size / ranks.world_size
        differences.append(
            Difference(
                each.name,
                error=math.sqrt(error / norm),
                ratio=dot / norm,
                elements=each.numel,
                additions=steps + ranks.data_ranks,
                spread=max(size / math.sqrt(norm / copies), 1.0),
                epsilon=max(epsilon / ranks.world_size, reduced),
            )
        )
    return _verdict(differences, steps, ranks.data_ranks, math.sqrt(errors / norms) if norms else 0.0)


def _verdict(differences: Sequence[Difference], steps: int, ranks: int, error: float) -> Verdict:
    several = f"{len(differences)} parameter{'s' * (len(differences) != 1)}"
    if not differences:
        return Verdict("not checked: the gradient is zero", final=False)
    wrong = [each for each in differences if each.is_wrong]
    if not wrong:
        return Verdict(f"yes, to {error:.0e}, on {several}", error)
    ratio = sum(each.ratio for each in wrong) / len(wrong)
    words = f"no, {ratio:.3g} of it, off by {error:.2g}, on {len(wrong)} of {several}"
    return Verdict(f"{words} ({looks_like(differences, steps, ranks)})", error, wrong=True)


def _epsilon(name: str) -> float:
    """Of a dtype, or of a communication hook by the dtype in its name."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    found: Any = getattr(torch, name, None) or next((dtype for key, dtype in narrow.items() if key in name), None)
    return float(torch.finfo(found).eps) if isinstance(found, torch.dtype) else 0.0


# --- which parameters, and where their gradients are -----------------------------------------------------------------


def unsuitable(ranks: Ranks) -> str:
    """Why the engine does not allow the check; empty: it does."""
    if ranks.data_ranks not in (1, ranks.world_size):
        return f"{ranks.world_size} ranks share the samples in {ranks.data_ranks} groups"
    if getattr(ranks.accelerator, "has_lomo_optimizer", False):
        return _STEPS_INSIDE
    return ""


def choose(accelerator: AcceleratorLike | None, model: nn.Module, data_ranks: int) -> list[Watched]:
    """At most `PARAMETERS` trainable parameters spread over the depth, the same ones on every rank."""
    if flat := list(_flat_parameters(model, data_ranks)):
        return flat[:: -(-len(flat) // PARAMETERS)]
    # After a forward without backward the root's own are whole.
    fsdp2 = [each for module in model.modules() for each in parameters_of_fsdp2(module)]
    whole = {id(one): each for each in fsdp2 for one in (each.sharded_param, getattr(each, "_unsharded_param", None))}
    found = list[Watched]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        leaf: Any = parameter
        used: Callable[[], Tensor | None] = partial(_gradient, parameter)
        if (sharded := whole.get(id(parameter))) is not None:
            if (leaf := getattr(sharded, "_unsharded_param", None)) is None:
                continue
            used = partial(_whole_gradient, sharded.sharded_param, leaf.device)
        elif is_deepspeed(accelerator):
            used = partial(import_module("deepspeed").utils.safe_get_full_grad, parameter)
        # ZeRO-3 keeps the number of elements apart.
        numel = getattr(parameter, "ds_numel", None) or _plain(leaf).numel()
        found.append(Watched(_bare_name(name), leaf, used, numel, _flat))
    return spread(found)


def spread(found: Sequence[Watched]) -> list[Watched]:
    """Small ones from the first to the last, both of LoRA's; the smallest one if none is small."""
    small = [each for each in found if 0 < each.numel <= ELEMENTS // PARAMETERS]
    if not small:
        return [each for each in sorted(found, key=lambda each: each.numel)[:1] if each.numel <= ELEMENTS]
    count = min(PARAMETERS, len(small))
    return [small[place * (len(small) - 1) // max(count - 1, 1)] for place in range(count)]


def _flat_parameters(model: nn.Module, data_ranks: int) -> Iterator[Watched]:
    """Of FSDP1: the first elements of every rank's shard of a unit."""
    module: Any
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param") or not handle.flat_param.requires_grad:
            continue
        flat = handle.flat_param
        if not handle.uses_sharded_strategy:
            few = min(flat.numel(), ELEMENTS // PARAMETERS)
            yield Watched(_bare_name(flat._fqns[0]), flat, partial(_sample, handle, few), few, partial(_first, few))
            continue
        pieces = handle.world_size
        few = min(flat._local_shard.numel(), max(ELEMENTS // PARAMETERS // pieces, 1))
        own = slice(handle.rank * few, (handle.rank + 1) * few)
        pick, used = partial(_pieces, few, pieces), partial(_sample, handle, few)
        yield Watched(_bare_name(flat._fqns[0]), flat, used, few * pieces, pick, own)


def _pieces(few: int, pieces: int, gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    # FSDP1 pads the last shard.
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % pieces))
    return padded.view(pieces, -1)[:, :few].reshape(-1)


def _first(few: int, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[:few]


def _flat(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)


def _sample(handle: Any, few: int) -> Tensor | None:
    gradient = handle.sharded_grad
    return None if gradient is None else _first(few, gradient)


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else _plain(parameter.grad)


def _whole_gradient(parameter: Tensor, device: torch.device) -> Tensor | None:
    gradient: Any = parameter.grad
    # Offloaded shards are gathered where the ranks can.
    return None if gradient is None else gradient.to(device).full_tensor()


def _plain(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, and every element of a sparse gradient."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.to_dense() if local.layout is not torch.strided else local


def _bare_name(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


def _hooked_first(leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Let a hook see a gradient before the hooks that are there, which may change it."""
    handle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = leaf._backward_hooks
    # Torch reads the order of insertion, which `OrderedDict.move_to_end` leaves as it is.
    *before, ours = hooks.items()
    hooks.clear()
    hooks.update([ours, *before])
    return handle
