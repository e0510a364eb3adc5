"""The loss of a whole window in each of its micro-batches, for losses that couple samples.

A contrastive loss takes the other samples of its batch as negatives, so its mean over micro-batches is not the loss of
the global batch. But it sees the samples only through the vectors that the model makes of them, y = f(x), each from one
sample. So a window runs twice (Gao et al., 2021, arXiv:2101.06983, who keep dL/dy instead of y):

    first, without gradient:   y_j of every micro-batch j is kept, and those of the other ranks are gathered
    second, in training:       once micro-batch j has made y_j, its loss gets cat(y_1, .., y_j with gradient, .., y_GW)

The unchanged loss of micro-batch j is then L, that of the global batch, and its gradient is dL/dy_j dy_j/dw. The sum
over j is the gradient of the global batch. L is averaged over G micro-batches and W ranks, as any loss that is the same
in all of them: that is right for parameters behind the vectors (a temperature), which get all of dL/dw each time. The
gradient of y_j is multiplied by G W instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.coupled.cuts import hooked, vectors_in, with_vectors
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.look import errors_of_forward
from hf_accum_fix.trace.preserve import PythonState, random_states

#: The kind of a micro-batch, and the call of a module, or the input.
Key = tuple[str, str]


@dataclass
class WholeWindow:
    """The vectors of a window's samples, and where the loss gets them."""

    modules: Mapping[str, nn.Module]  # that return one vector per sample, by name
    ranks: int = 1  # whose samples the loss gets, W
    #: Of each micro-batch of this rank, or of all ranks in order; empty: the window is not cut.
    kept: dict[Key, list[Tensor]] = field(default_factory=dict)
    first: dict[Key, int] = field(default_factory=dict)  # the place of this rank's first micro-batch among them
    kinds: list[str] = field(default_factory=list)  # of this rank's micro-batches; a loss gets those of its own
    micro_batches: int = 0  # of all ranks whose samples the loss gets
    #: By kind, of its micro-batches; and 1 plus the relative differences of vectors in the second pass.
    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    _states: list[PythonState] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)
    _place: int = 0

    def collect(self, batches: Sequence[Any], forward: Callable[[Any], object]) -> None:
        """Keep the vectors of every micro-batch, by one forward without gradient each, in the order of training."""
        self.kept, self.first, self._states, self.losses = {}, {}, [], {}
        self.kinds, self.micro_batches = [kind_of(each) for each in batches], len(batches)
        for self._place, batch in enumerate(batches):
            self._states.append(random_states())
            for name, labels in _labels(batch):
                self._keep(f"input {name}", labels)
            with torch.no_grad(), self._hooked(self._keep), errors_of_forward():
                forward(batch)

    @contextmanager
    def micro_batch(self, place: int) -> Iterator[None]:
        """Around the forward of a micro-batch in training, number ``place``: its loss gets the vectors of all."""
        self._place = place
        if self.kept:
            self._states[place].restore()
        with self._hooked(self._joined) if self.kept else nullcontext():
            yield

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch's inputs with the labels of the window, which belong to the vectors."""
        kind = self.kinds[0] if len({*self.kinds}) == 1 else kind_of(batch)
        of = {name: self.kept.get((kind, f"input {name}"), [own]) for name, own in _labels(batch)}
        return {**batch, **{name: torch.cat(its).to(batch[name].device) for name, its in of.items()}}

    def note(self, loss: Tensor) -> None:
        """What a micro-batch adds to the logged loss of its rank: of all of one kind the same."""
        if self.kept and self.modules:
            self.losses.setdefault(self.kinds[self._place], []).append(loss * len(self.kinds))

    def _keep(self, what: str, vectors: Tensor) -> None:
        self.kept.setdefault((self.kinds[self._place], what), []).append(vectors.detach())

    def _joined(self, what: str, vectors: Tensor) -> Tensor:
        """The vectors of the window, those of this micro-batch with gradient."""
        kind = self.kinds[self._place]
        its = self.kept.get((kind, what), [])
        place = self.first.get((kind, what), 0) + self.kinds[: self._place].count(kind)
        # A checkpoint around a module calls it again in the backward.
        before = its[place].to(vectors) if place < len(its) else vectors[:0]
        if before.shape != vectors.shape:
            raise ContractError(
                f"got {tuple(vectors.shape)} from {what}, and {tuple(before.shape)} as its vectors were collected; "
                "expected the same; with coupled_loss='exact' a module has to return the same for the same samples"
            )
        if vectors.requires_grad:
            drift = (vectors.detach() - before).abs().amax() / before.abs().amax().clamp(min=1e-30)
            self.losses.setdefault("vectors", [torch.ones_like(drift)]).append(1 + drift)
            # In a new tensor: others may use the module's own output.
            vectors = vectors * 1.0
            times = len(self.kinds) * self.ranks * len(its) / self.micro_batches
            vectors.register_hook(lambda grad: grad * times)  # type: ignore[no-untyped-call]
        return torch.cat([vectors if at == place else each.to(vectors) for at, each in enumerate(its)])

    @contextmanager
    def _hooked(self, does: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        """Let ``does`` see, or replace, the vectors that each call of a module returns."""
        self._calls = dict.fromkeys(self.modules, 0)

        def hook(name: str, outputs: Any) -> Any:
            call, self._calls[name] = self._calls[name], self._calls[name] + 1
            vectors = does(f"{name or 'the model'}, call {call + 1}", vectors_in(outputs, name))
            return None if vectors is None else with_vectors(outputs, vectors)

        # sentence-transformers may embed columns in one forward, one after the other: no rows of samples.
        merging = sys.modules.get("sentence_transformers.base.losses.merged_forward")
        with hooked(self.modules, hook), nullcontext() if merging is None else merging.column_merging_disabled():
            yield


def kind_of(batch: Any) -> str:
    """What micro-batches have in common that can be one batch: the names of their inputs, and the data set's."""
    pairs = batch.items() if isinstance(batch, Mapping) else ()
    return repr(sorted((name, value if isinstance(value, str) else "") for name, value in pairs))


def _labels(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The labels of a micro-batch's samples."""
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if "label" in name and isinstance(value, Tensor) and value.ndim > 0:
            yield name, value
