"""Running something that draws at random, as if it had not been run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept(devices: Sequence[int] | None = None, device_type: str = "cuda") -> Iterator[None]:
    """Put back, also after an error, the random states of Python, numpy, torch on the CPU and on devices.

    Args:
        devices: their indices; None: every CUDA device there is.
        device_type: of the devices.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    used = list(range(torch.cuda.device_count())) if devices is None else list(devices)
    try:
        with torch.random.fork_rng(used, device_type=device_type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
