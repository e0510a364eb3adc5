"""Projections of gradients, and hashes of parameters and samples, as of whole tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from hf_accum_fix.engines.engine import bare_name

#: Each element is added, with a random sign, to one random bucket of each row: 64 projections, float64.
ROWS: Final = 4
BUCKETS: Final = 16
#: Elements that are projected at once.
_BLOCK: Final = 1 << 16


def project(name: str, value: Tensor) -> Tensor:
    """Project a whole gradient: products and distances of projections are on average the gradients', to 18 % (1 sd).

    The random numbers follow from the name and an element's place, so they are the same on every device and release.
    """
    draws = np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    found = np.zeros((ROWS, BUCKETS))
    for block in torch.split(value.detach().flatten(), _BLOCK):
        x, bits = block.double().cpu().numpy(), draws.random_raw(len(block))
        for row in found:
            row += np.bincount((bits % BUCKETS).astype(np.int64), np.where(bits & BUCKETS, -x, x), BUCKETS)
            bits = bits // (2 * BUCKETS)
    return torch.from_numpy(found.flatten()) / math.sqrt(ROWS)


def projections_of(gradients: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    """The first rank's projections of gradients, by name (None: zero); shards are gathered one parameter at a time."""
    nothing = torch.zeros(ROWS * BUCKETS, dtype=torch.float64)
    return _of_first({name: nothing if each is None else project(name, _whole(each)) for name, each in gradients})


def fingerprint(model: nn.Module) -> dict[str, tuple[list[int], str, int]]:
    """Shape, dtype and hash of the values of every parameter, by name: the first rank's."""
    found = {}
    for name, each in named(model):
        in_shards = hasattr(each, "ds_shape")
        with import_module("deepspeed").zero.GatheredParameters([each]) if in_shards else nullcontext():
            whole = _whole(each)
            found[name] = ([*whole.shape], str(each.dtype).removeprefix("torch."), hash_of(whole))
    return _of_first(found)


def hash_of(*values: Any) -> int:
    """A hash of tensors by shape and values, whatever their dtype, and of other values by what Python prints."""
    digest = hashlib.sha256()
    for each in values:
        digest.update(repr([*each.shape] if isinstance(each, Tensor) else each).encode())
        for block in torch.split(each.detach().flatten(), _BLOCK) if isinstance(each, Tensor) else ():
            digest.update(block.double().cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their names in the model itself."""
    for name, each in model.named_parameters():
        yield bare_name(name), each


def _whole(value: Any) -> Tensor:
    """A tensor out of its shards, offloaded ones too: a collective."""
    found: Tensor = value.to(value.device_mesh.device_type).full_tensor() if hasattr(value, "full_tensor") else value
    return found


def _of_first(found: dict[str, Any]) -> dict[str, Any]:
    shared: dict[str, Any] = gather_object([found])[0]
    return shared
