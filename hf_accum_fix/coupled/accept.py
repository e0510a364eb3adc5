"""Where a coupled loss can be cut: tried on two micro-batches, joined and cut, before the first step."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_accum_fix.counting.items import sample_count
from hf_accum_fix.coupled.cuts import nearest_to_the_loss, nodes_of
from hf_accum_fix.coupled.whole_window import WholeWindow
from hf_accum_fix.errors import AccumFixError, UnsupportedSetupError
from hf_accum_fix.learning.join import Split, splits
from hf_accum_fix.learning.look import LossRun, out_of_memory
from hf_accum_fix.trace.preserve import WithoutNoise, random_states

#: Relative difference that rounding explains, by bytes of a number (convolutions in TF32); of products in halves.
_TOLERANCE, _OF_HALVES = {8: 1e-9, 4: 5e-3}, 5e-2
_TRIES = 4  # cuts of a loss
#: What gathers parameters, and no samples.
_ENGINES = (*(f"torch.distributed.{each}" for each in ("fsdp", "tensor", "_composable")), "deepspeed")


def accepted(
    run: LossRun, batches: Sequence[Any], given: Mapping[str, nn.Module], head: str, *, sharded: bool, rounded: bool
) -> Mapping[str, nn.Module]:
    """The modules at which cutting a loss is exact, or an error: those given, or of those searched the nearest to it.

    ``sharded``: no gradient, and no search, since ranks meet in every forward; ``rounded``: products in half precision.
    """
    # The halves of one fit into memory where two do not.
    tried = [found for of in (batches, batches[:1]) if (found := next((s for s in splits(of) if s.blocks == 1), None))]
    first, passed, why = dict(batches[0]), set[str](), ""
    loss = partial(run.forward, first, None)
    with WithoutNoise(alike=True), torch.set_grad_enabled(not sharded):
        for _ in range(1 if given or sharded else _TRIES):
            modules = given or ({} if sharded else nearest_to_the_loss(run.model, loss, sample_count(first), passed))
            if not modules:
                break
            differs = _difference(run, tried, WholeWindow(modules), rounded=rounded)
            if not differs:
                return modules
            passed |= {*modules}
            why = why or f"whose loss cut at {', '.join(name or 'the model' for name in modules)} {differs}"
    raise UnsupportedSetupError(
        f"got coupled_loss='exact' for {head}, {why or 'no module of which is known, or found, to make its vectors'}; "
        "expected modules through which alone samples reach the loss, one row each, in their order; name others, as "
        "in coupled=('text_projection',), pad to a fixed length, or hand what the loss takes through a module: "
        "self.vectors = torch.nn.Identity() in __init__, x = self.vectors(x) in forward; or leave the option out"
    )


def _rows(value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(hash(repr(value)))
    return tensor if tensor.ndim else tensor[None]


def varying(batches: Sequence[Any], but: Container[str] = ()) -> set[str]:
    """The inputs that are not one value in all samples: where a loss reads one, only these have shown it."""
    first = {name: _rows(each)[:1] for name, each in batches[0].items() if name not in but}
    rows = [(name, _rows(each[name])) for each in batches for name in first]
    return {name for name, its in rows if its.shape[1:] != first[name].shape[1:] or bool((its != first[name]).any())}


def _difference(run: LossRun, tried: Sequence[Split], window: WholeWindow, *, rounded: bool) -> str:
    """How two micro-batches, cut, differ from both as one; empty: in nothing."""
    for split in tried:
        try:
            return _compared(run, split, window, rounded=rounded)
        except AccumFixError:
            raise
        except Exception as error:
            if not out_of_memory(error):
                return f"cannot be run on the vectors of two micro-batches ({type(error).__name__}: {error})"
    return "cannot be tried: " + ("out of memory; use smaller micro-batches" if tried else "no two rows to join")


def _compared(run: LossRun, split: Split, window: WholeWindow, *, rounded: bool) -> str:
    # All forwards before any comparison: the ranks of shards meet in them.
    drawn = random_states()
    loss, wanted = _gradient(run, run.forward(dict(split.whole), None))
    if drawn.drew():
        return "draws numbers (dimensions, layers); for sentence-transformers use MatryoshkaLoss, n_dims_per_step=-1"
    before, again = _places(run.model), list[float]()
    window.collect([split.whole], lambda batch: again.append(float(run.forward(dict(batch), None))))
    written = [name for name, place in _places(run.model).items() if before.get(name) != place]
    whole = window.kept
    window.collect([split.one, split.other], lambda batch: run.forward(dict(batch), None))
    parts = []
    for place, batch in enumerate((split.one, split.other)):
        with window.micro_batch(place):
            part = run.forward(window.inputs(batch), None)
        parts.append(_gradient(run, part))
    size = min((each.element_size() for [each] in whole.values() if each.is_floating_point()), default=0)
    tolerance = _OF_HALVES if rounded else _TOLERANCE.get(size, _OF_HALVES)
    if abs(again[0] - loss) > tolerance * abs(loss) or {*written}.intersection(dict(run.model.named_parameters())):
        words = f"a forward keeps a state, as a queue or a moving average ({written})"
        return f"is {loss:g}, then {again[0]:g} for the same samples: {words}"
    for key, [each] in whole.items():
        if not _off(torch.cat(window.kept.get(key, [each[:0]])), each) <= tolerance:
            return f"gets other rows from {key[1]}, or in another order, of two micro-batches joined than of each"
    off = _off((parts[0][1] + parts[1][1]) / 2, wanted)
    if off <= tolerance and all(abs(value - loss) <= tolerance * abs(loss) for value, _ in parts):
        return ""
    return f"is {parts[0][0]:g} instead of {loss:g}, and its gradient is {off:.2g} off"


def _places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Where tensors are, and how often they were written to."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: (each._version, each.data_ptr()) for name, each in tensors if torch.is_grad_enabled()}


def _off(found: Tensor, wanted: Tensor) -> float:
    """Relative difference of two tensors."""
    one, other = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (found, wanted))
    return float((one - other).norm() / other.norm().clamp(min=1e-30)) if one.shape == other.shape else math.inf


def _gradient(run: LossRun, loss: Tensor) -> tuple[float, Tensor]:
    """A loss, and its gradient of all parameters in a row, if it has one."""
    if not loss.requires_grad:
        return float(loss), loss.new_zeros(1)
    leaves = (getattr(node, "variable", None) for node in nodes_of(loss))
    if any(leaf is not None and leaf._backward_hooks and not isinstance(leaf, nn.Parameter) for leaf in leaves):
        raise RuntimeError(
            "its backward runs the model again; use the loss without Cached in its name, or without mini-batches"
        )
    trained = [each for each in run.model.parameters() if each.requires_grad]
    hooks = [each._backward_hooks for each in trained]
    try:
        # They belong to training: those of a loop would add this gradient up.
        for each in trained:
            each._backward_hooks = None
        both = zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True)
    finally:
        for each, its in zip(trained, hooks, strict=True):
            each._backward_hooks = its
    return float(loss.detach()), torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in both])


class WithoutCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse a loss that gathers over ranks itself: every rank's samples would reach it as often as there are ranks."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; of collectives, before any rank waits in them, only those of engines."""
        if "c10d" in str(func):
            names = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe()))
            # Its hooks, and no loss, lie between a collective and the module that is called.
            if not any(each.startswith(_ENGINES) for each in takewhile(nn.Module.__module__.__ne__, names)):
                raise UnsupportedSetupError(
                    f"got coupled_loss='exact' and a loss that runs a collective itself ({func}); expected none, since "
                    "it gets the vectors of all ranks; set coupled_loss='rank', or let it gather nothing"
                )
        return func(*args, **(kwargs or {}))
