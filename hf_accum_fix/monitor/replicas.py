"""Replicas that should hold the same numbers and do not.

Symptom: evaluation differs from rank to rank, or a resumed run jumps: DDP averages gradients, never parameters, so
that one element changed on one rank stays changed for good.

Random number generators are not compared: dropout draws other numbers on every rank, and should. Nor are the running
statistics of BatchNorm, which every rank keeps for itself (`check_batch_norm` looks at those).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.deviation import OF_TWO
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, by_rank, fingerprint, is_sharded

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd and without a pattern, so that differences in two tensors do not cancel in a sum (Knuth 1998, 6.4).
_MULTIPLIER = 2654435769


class Replicas:
    """Compare parameters, buffers and optimizer state over the ranks, bit for bit, every ``every`` steps.

    A check reads every number once: the bits of each tensor are summed as integers, so that no changed element is lost
    in rounding; one device sync and one collective of three integers a rank. Only where the ranks differ are tensors
    sent around, to find the one that differs. A sum does not see elements that have changed places.

    Args:
        model: wrapped or not.
        optimizer: its state is compared too; None: not compared (ZeRO keeps another part of it on every rank).
        ranks: the ranks that hold copies; None: torch.distributed.
        every: steps from one check to the next.

    Raises:
        UnsupportedSetupError: if a parameter is sharded: then no rank holds a copy of another's.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, ranks: Ranks | None = None, every: int = 100) -> None:
        self._model, self._optimizer = model, optimizer
        self._ranks = ranks or TorchRanks()
        self._every, self._step = every, 0
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                raise UnsupportedSetupError(
                    f"parameter {name} is sharded ({type(parameter).__name__}): the ranks hold parts, not copies; "
                    "expected data parallelism with whole replicas (DDP, ZeRO 1 and 2); leave this monitor out"
                )

    def step(self) -> Alarm | None:
        """Count an optimizer step, and check if it is due."""
        self._step += 1
        return self.check() if self._step % self._every == 0 else None

    def check(self) -> Alarm | None:
        """Compare now; every rank calls it and gets the same answer."""
        layouts, prints = self._fingerprints()
        total = sum((place * _MULTIPLIER | 1) * value for place, value in enumerate(prints, start=1))
        # Modulo 2^64, as int64 holds it.
        mine = torch.tensor([(total + 2**63) % 2**64 - 2**63, len(prints), fingerprint(layouts)])
        table = by_rank(self._ranks, mine).tolist()
        if all(row == table[0] for row in table):
            return None
        if len({tuple(row[1:]) for row in table}) == 1:
            return self._apart(list(layouts), prints)
        # Adding up tensors that are not the same would abort.
        return Alarm(
            "replicas-not-alike",
            f"the ranks hold {[row[1] for row in table]} tensors (parameters, buffers, optimizer state), or others by "
            "name, shape or type, and nothing is compared: one of them has not stepped as the others have; look for a "
            "step, a freeze or a load under `if rank == 0`; where ranks hold other parts of a model by design, give "
            "those that hold copies (ranks=)",
        )

    def _apart(self, names: list[str], prints: list[int]) -> Alarm:
        """The first tensor that differs, and the ranks on which it is not as on most."""
        columns = list(zip(*by_rank(self._ranks, torch.tensor(prints)).tolist(), strict=True))
        places = [place for place, column in enumerate(columns) if len(set(column)) > 1]
        column = columns[places[0]]
        most = Counter(column).most_common(1)[0][0]
        found = ", ".join(str(rank) for rank, value in enumerate(column) if value != most)
        return Alarm(
            "replicas-differ",
            f"{names[places[0]]} differs: rank {found}; {len(places)} of {len(names)} tensors differ in all"
            f"{OF_TWO if self._ranks.size == 2 else ''}; look for "
            "an update, a load or an initialisation under `if rank == 0`, a parameter that DDP does not reduce, or "
            "unreliable memory on that rank; broadcast the weights of a good rank, or go back to a checkpoint",
        )

    def _fingerprints(self) -> tuple[dict[str, str], list[int]]:
        """Type and shape by name, and the sum of the bits of each tensor modulo 2^64; one device sync for a device."""
        layouts, sums = {}, []
        for name, tensor in self._tensors():
            layouts[name] = f"{tensor.dtype} {list(tensor.shape)}"
            sums.append(_sum_of_bits(tensor))
        prints = [0] * len(sums)
        for device in {value.device for value in sums}:
            places = [place for place, value in enumerate(sums) if value.device == device]
            for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
                prints[place] = value
        return layouts, prints

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        found: list[tuple[str, Tensor]] = [(f"parameter {name}", its) for its, name in names.items()]
        local = {
            id(buffer)
            for module in self._model.modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            for buffer in module.buffers(recurse=False)
        }
        found += [(f"buffer {name}", buffer) for name, buffer in self._model.named_buffers() if id(buffer) not in local]
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer is not None else ()):
            for place, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"parameter {place} of group {number}")
                for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, (Tensor, int, float)):
                        found.append((f"{key} of {name}", torch.as_tensor(value)))
        return iter(found)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The bits of the elements, eight bytes at a time, read as integers and summed modulo 2^64: 0-dim int64.

    Eight bytes, because summing them needs no conversion: on a CPU twenty times as fast as element by element.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().flatten()
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    whole = len(flat) * size // 8 * 8 // size
    rest = flat[whole:].view(_BITS[size]).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest if whole else rest
