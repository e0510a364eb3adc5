"""The loss of a whole window in each of its micro-batches, for losses that couple samples.

A contrastive loss takes the other samples of its batch as negatives, so its mean over micro-batches is not the loss of
the global batch. But it sees the samples only through the vectors that the model makes of them, y = f(x), each from one
sample. So a window runs twice:

    first, without gradient:   y_j of every micro-batch j is kept, and those of the other ranks are gathered
    second, in training:       once micro-batch j has made y_j, its loss gets cat(y_1, .., y_j with gradient, .., y_GW)

The unchanged loss of micro-batch j is then L, that of the global batch, and its gradient is dL/dy_j dy_j/dw. The sum
over j is the gradient of the global batch. L is averaged over G micro-batches and W ranks, as any loss that is the same
in all of them: that is right for parameters behind the vectors (a temperature), which get all of dL/dw each time. The
gradient of y_j is multiplied by G W instead.

Source: the two passes are GradCache's (Gao et al., 2021, arXiv:2101.06983), which caches dL/dy instead of y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.look import errors_of_forward
from hf_accum_fix.accumulation.preserve import PythonState, random_states
from hf_accum_fix.coupled.cuts import hooked, vectors_in, with_vectors
from hf_accum_fix.errors import ContractError

#: The vectors, or labels, of each micro-batch, by module and call, or by input.
Kept = dict[str, list[Tensor]]


@dataclass
class WholeWindow:
    """The vectors of a window's samples, and where the loss gets them.

    Attributes:
        modules: that return one vector per sample, by name.
        ranks: whose samples the loss gets, W.
        kept: of the window: of this rank's micro-batches, or of all ranks' in order.
        first: the place of this rank's first micro-batch among them.
        micro_batches: G, of this rank.
        compares: the vectors of both passes are compared, and the losses of its micro-batches.
        drift: the largest difference of vectors, relative to the largest number; 0-dim; None: not compared.
        losses: to be compared.
    """

    modules: Mapping[str, nn.Module]
    ranks: int = 1
    kept: Kept = field(default_factory=dict)
    first: int = 0
    micro_batches: int = 0
    compares: bool = True
    drift: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    _states: list[PythonState] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    def collect(self, batches: Sequence[Any], forward: Callable[[Any], object]) -> None:
        """Keep the vectors of every micro-batch, by one forward without gradient each, in the order of training."""
        self.kept, self.first, self.micro_batches, self._states = {}, 0, len(batches), []
        for place, batch in enumerate(batches):
            self._states.append(random_states())
            for name, labels in _labels(batch):
                self.kept.setdefault(f"input {name}", []).append(labels)
            with torch.no_grad(), self._hooked(self._keep), errors_of_forward():
                forward(batch)
            short = sorted(key for key, each in self.kept.items() if len(each) != place + 1)
            if short:
                raise ContractError(
                    f"got {short[0]} in some of a window's micro-batches only; expected it in all of them; with "
                    "coupled_loss='exact' each has to call the same modules and have the same labels"
                )

    @contextmanager
    def micro_batch(self, place: int) -> Iterator[None]:
        """Around the forward of a micro-batch in training, number ``place``: its loss gets the vectors of all."""
        self._states[place].restore()
        with self._hooked(lambda key, vectors: self._joined(key, vectors, self.first + place)):
            yield

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch's inputs with the labels of the window, which belong to the vectors."""
        return {**batch, **{name: torch.cat(self.kept[f"input {name}"]).to(own.device) for name, own in _labels(batch)}}

    def _keep(self, key: str, vectors: Tensor) -> None:
        self.kept.setdefault(key, []).append(vectors.detach())

    def _joined(self, key: str, vectors: Tensor, place: int) -> Tensor:
        """The vectors of the window, those of this micro-batch with gradient."""
        # A checkpoint around a module calls it again in the backward.
        before = self.kept[key][place].to(vectors) if key in self.kept else vectors[:0]
        if before.shape != vectors.shape:
            raise ContractError(
                f"got {tuple(vectors.shape)} from {key}, and {tuple(before.shape)} as its vectors were collected; "
                "expected the same; with coupled_loss='exact' a module has to return the same for the same samples"
            )
        if self.compares:
            drift = (vectors.detach() - before).abs().amax() / before.abs().amax().clamp(min=1e-30)
            self.drift = drift if self.drift is None else torch.maximum(self.drift, drift)
        if vectors.requires_grad:
            # In a new tensor: others may use the module's own output.
            vectors = vectors * 1.0
            times = self.micro_batches * self.ranks
            vectors.register_hook(lambda grad: grad * times)  # type: ignore[no-untyped-call]
        others = [each.to(vectors) for each in self.kept[key]]
        return torch.cat([*others[:place], vectors, *others[place + 1 :]])

    @contextmanager
    def _hooked(self, does: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        """Let ``does`` see, or replace, the vectors that each call of a module returns."""
        self._calls = dict.fromkeys(self.modules, 0)

        def hook(name: str, outputs: Any) -> Any:
            call, self._calls[name] = self._calls[name], self._calls[name] + 1
            vectors = does(f"{name or 'the model'}, call {call + 1}", vectors_in(outputs, name))
            return None if vectors is None else with_vectors(outputs, vectors)

        with hooked(self.modules, hook):
            yield


def _labels(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The labels of a micro-batch's samples."""
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if "label" in name and isinstance(value, Tensor) and value.ndim > 0:
            yield name, value
