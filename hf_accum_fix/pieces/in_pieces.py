"""Run the micro-batches of a training in pieces where they run out of memory.

The denominators of a window are fixed before its first forward, so the weighted losses of a micro-batch's pieces add up
to its own. What runs out of memory in its forward is cut, and runs again. In its backward ``.grad`` holds a part of it,
so the window runs again from its first micro-batch. No other rank has to know: under DistributedDataParallel gradients
are averaged once, after the last piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.counting.items import ZeroWeightBatch
from hf_accum_fix.engines.engine import is_sharded, sharing_no_buffers
from hf_accum_fix.engines.model import decoder_pad
from hf_accum_fix.engines.watched import AFTER, own_hooks
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.learning.join import take_rows
from hf_accum_fix.learning.look import out_of_memory
from hf_accum_fix.pieces.cap import Cap
from hf_accum_fix.pieces.cut import Places, can_be_cut, in_pieces, packed, places_in, rows_of, taken, width_of
from hf_accum_fix.trace.preserve import overridden, random_states
from hf_accum_fix.window.host import Host, Value
from hf_accum_fix.window.window import Window

#: Its entry among the states of callbacks, which are in a checkpoint.
KEPT: Final = "hf_accum_fix.out_of_memory"
#: Run a piece: (inputs, number of this forward in its window, from 1, number of the last) -> its part of the log.
Run = Callable[[Any, int, int], Tensor]


class InPieces:
    """The micro-batches of one training.

    Args:
        host: the training.
        states: those of callbacks, which are in a checkpoint.

    Raises:
        UnsupportedSetupError: if ranks wait for one another within a micro-batch.
    """

    def __init__(self, host: Host, states: Callable[[], MutableMapping[str, Any]]) -> None:
        if is_sharded(host.accelerator) or host.world.shards or host.world.data_ranks != host.world.size:
            option = "micro_batch='auto'" if host.options.micro_batch == "auto" else "out_of_memory='split'"
            shares = host.world.data_ranks != host.world.size
            engine = "ranks that share samples" if shares else host.accelerator.distributed_type.value
            raise UnsupportedSetupError(
                f"got {option} and {engine}, whose ranks wait for one another in every forward; expected one process "
                "or DistributedDataParallel; leave the option out"
            )
        self._host, self._states = host, states
        self._cap: Cap | None = None
        self._given: list[Any] = []  # the micro-batches of the window so far, as the step got them
        self._random = random_states()  # as the window began
        self._is_empty = True  # there was no gradient as it began
        self._in_backward = False
        self.halves = False  # the samples that are looked at can be halved

    @property
    def cap(self) -> Cap:
        """What has been learnt, also before a checkpoint that was loaded."""
        if self._cap is None:
            self._cap = Cap.of(self._states().get(KEPT, {}).get("attributes", {}))
        return self._cap

    def looking(self, look: Callable[[Sequence[Any]], Value], batches: Sequence[Any]) -> Value:
        """What looking at micro-batches shows, or at as many halves of them as memory takes."""
        while True:
            self.halves = any(rows_of(each) > 1 for each in batches)
            try:
                return look(batches)
            except Exception as error:
                if not (self.halves and out_of_memory(error)):
                    raise
            release_memory()
            batches = [take_rows(each, range(-(-rows_of(each) // 2))) for each in batches]

    def merged(self, batches: list[Any]) -> list[Any]:
        """The samples of a window in as few micro-batches as are known to fit; as they are, if they cannot be cut."""
        host, contract = self._host, self._host.contract
        if contract is None or any(isinstance(each, ZeroWeightBatch) or _why_whole(contract, each) for each in batches):
            return batches
        has_decoder = decoder_pad(host.bare(host.model)) is not None
        found = packed(batches, *contract.cut_by, self.cap.limit, has_decoder=has_decoder)
        return batches if found is None or len(found) >= len(batches) else found

    def run(self, window: Window, batch: Any, run: Run) -> Tensor:
        """Run a micro-batch; its part of the window's logged loss, 0-dim."""
        place = at = window.done
        if not place:
            self._given, self._random = [], random_states()
            self._is_empty = all(each.grad is None for each in self._host.model.parameters())
        self._given.append(batch)
        while (loss := self._micro_batch(window, self._given[at], run)) is None or at < place:
            at += 1
            if loss is None:
                at = 0
                self._undo(window)
            window.done = at
        if place + 1 == len(window.batches):
            self._given = []
            if isinstance(self._host.trained, DistributedDataParallel):
                average(self._host.trained)
            if self.cap.window_ended():
                self._keep()
        return loss

    def _micro_batch(self, window: Window, batch: Any, run: Run) -> Tensor | None:
        """Its loss; None: a backward ran out of memory."""
        loss: Tensor | None = None
        pieces, begun, of = deque(self._known_pieces(window.part.contract, batch)), window.done, len(window.batches)
        count = sum(map(len, pieces))
        while pieces:
            places = pieces.popleft()
            piece = batch if len(places) == count else taken(batch, places, window.part.contract.cut_by[0])
            begun, last = begun + 1, window.done + 1 == of and not pieces
            error: Exception | None = None
            try:
                with overridden(window.part, "share", len(places) / count), self._alone():
                    value = run(piece, begun, begun if last else max(of, begun + 1))
                loss = value if loss is None else loss + value
                continue
            except Exception as caught:
                if not out_of_memory(caught):
                    raise
                error = caught
            begun, smaller = begun - 1, self._smaller(window.part.contract, batch, places, error)
            # The frames of its forward hold tensors.
            error = piece = None
            release_memory()
            if self._in_backward:
                return None
            pieces.extendleft(reversed(smaller))
        assert loss is not None
        return loss

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around a forward and backward that no other rank waits for; notes whether the backward has begun."""
        engine, model, self._in_backward = self._host.accelerator, self._host.trained, False
        backward = engine.backward

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._in_backward = True
            return backward(*args, **kwargs)

        assert model is not None
        without = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
        with overridden(engine, "backward", noted), without:
            try:
                yield
            finally:
                sharing_no_buffers(model)

    def _known_pieces(self, contract: LossContract, batch: Any) -> list[Places]:
        """A micro-batch in as few pieces as are known to fit; whole, if nothing has failed yet."""
        blocks, group = max(contract.cut_by[0], 1), contract.cut_by[1]
        places = places_in(batch, blocks)
        if self.cap.limit is None or _why_whole(contract, batch):
            return [places]
        return in_pieces(places, group, self.cap.limit // (width_of(batch) * blocks))

    def _smaller(self, contract: LossContract, batch: Any, places: Places, error: Exception) -> list[Places]:
        """What ran out of memory, in two pieces; raises its error where it cannot be cut."""
        blocks, group = max(contract.cut_by[0], 1), contract.cut_by[1]
        rows, width, why = len(places) * blocks, width_of(batch), _why_whole(contract, batch)
        found = f"got a micro-batch of {rows} rows of {width} numbers, padding included, that runs out of memory"
        if any(own_hooks(each, AFTER) for each in self._host.model.parameters()):
            why = why or "an optimizer, or another hook, runs inside the backward"
        if self._in_backward and not self._is_empty:
            why = why or "gradients were there as its window began"
        if len(places) <= group:
            why = why or f"a single sample, at {places[0]} of its micro-batch, is too large"
        if why:
            words = "expected one that fits, or whose samples can run apart; set a smaller per_device_train_batch_size"
            self._host.warn_once("too large", f"{self._host.head}: {found}: {why}; {words}")
            raise error
        half = in_pieces(places, group, -(-len(places) // 2))
        fits = max(map(len, half)) * blocks
        self.cap.failed(rows * width, fits * width)
        self._keep()
        self._host.warn_once(
            "out of memory",
            f"{self._host.head}: {found}; it runs in pieces from now on, at the same gradient; to run none twice, set "
            f"per_device_train_batch_size to at most {fits // blocks} at that width, and more accumulation steps",
        )
        return half

    def _undo(self, window: Window) -> None:
        """Begin the window again: no gradient, no count, the random states it began with."""
        assert self._host.trained is not None
        for each in self._host.trained.parameters():
            each.grad = None
        self._host.delivery.gradient.drop()
        window.part, window.value = replace(window.part), None
        self._random.restore()

    def _keep(self) -> None:
        """Keep what was learnt for checkpoints and for report()."""
        self._states()[KEPT] = {"args": {}, "attributes": asdict(self.cap)}
        self._host.note(out_of_memory=asdict(self.cap))


def _why_whole(contract: LossContract, batch: Any) -> str:
    """Why a micro-batch cannot run in pieces; empty: it can."""
    if not contract.exact:
        return contract.doubt or contract.reason
    if not can_be_cut(batch, max(contract.cut_by[0], 1)):
        return "it has inputs whose rows are no samples"
    if not contract.cut_by[1] or contract.needs_forwards:
        return "it is not known that the losses of its samples add up"
    return ""


def average(model: DistributedDataParallel) -> None:
    """Average what is in ``.grad`` over the ranks, as DistributedDataParallel does after its last backward."""
    module = model.module
    model.module = _Nothing(model)
    try:
        model().backward()
    finally:
        model.module = module


class _Nothing(nn.Module):
    """Zero, that every parameter is used for, by no forward of the model and no hook on it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        # A parameter that no rank has used stays without a gradient, where unused ones are looked for.
        looks, own = model.find_unused_parameters, model.parameters()
        self._used = [each for each in own if each.requires_grad and not (looks and each.grad is None)]

    def forward(self) -> Tensor:
        return torch.stack([each.reshape(-1)[:0].sum() for each in self._used]).sum()
