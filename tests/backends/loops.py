"""Hand-written loops through backends, one epoch in the windows of the Trainer's trajectories."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor
from torch.utils.data import DataLoader

from hf_accum_fix import accumulation_windows
from tests.backends import trajectory
from tests.backends.rows import DEEPSPEED, Backend
from tests.backends.trajectory import RATE, Trajectory, built, gathered, samples_of, variables
from tests.loop.steps import epoch
from tests.numerics.heads import HEADS, Head
from tests.numerics.parity import trainable

#: Heads, and which of their layers FSDP wraps: one takes the number, one returns the mean over its own items, and one
#: would not even be called with it.
LOOP_HEADS = {
    "llama": (trajectory.HEADS["llama"], "LlamaDecoderLayer"),
    "bert": (HEADS["bert-tokens"], "BertLayer"),
    "no-kwargs": (HEADS["no-kwargs"], "Embedding"),
    "mixtral": (HEADS["mixtral"], "MixtralDecoderLayer"),
}


def accelerator(backend: Backend, per_device: int, accumulate: int, max_norm: float) -> Accelerator:
    """A new one for this backend, on CPU ranks; made inside the backend's variables."""
    trajectory.fresh_state()
    given: dict[str, Any] = {"mixed_precision": "bf16" if backend.compute is torch.bfloat16 else "no"}
    if backend.wrapped == DEEPSPEED:
        trajectory.without_compiling()
        sizes = {"train_micro_batch_size_per_gpu": per_device, "gradient_accumulation_steps": accumulate}
        config = {**backend.arguments["deepspeed"], **sizes, "gradient_clipping": max_norm}
        given["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    else:
        trajectory.sharding_on()
    return Accelerator(gradient_accumulation_steps=accumulate, **given)


def train(
    head: Head, backend: Backend, split: tuple[int, int], max_norm: float, *, stock: bool = False,
    router_loss: str = "mean", told: int | None = None,
) -> Trajectory:  # fmt: skip
    """One epoch by accumulation windows, or by ``accelerator.accumulate``; ``told``: the steps the engine knows of."""
    per_device, accumulate = split
    trajectory.unset_hf_deepspeed_config()
    model = built(head, backend)
    start = trainable(model)
    losses, norms = [], []
    with variables(backend.environment), trajectory.offloading_on_a_cpu():
        live = accelerator(backend, per_device, told or accumulate, max_norm)
        loader: Any = DataLoader(samples_of(head), batch_size=per_device, collate_fn=head.batch)  # type: ignore[arg-type]
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
        model, optimizer, loader = live.prepare(model, optimizer, loader)
        assert backend.wrapped in [cls.__name__ for cls in type(model).__mro__], type(model)
        if stock:
            for batch in loader:
                with live.accumulate(model):
                    live.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            windows = accumulation_windows(loader, live, steps=accumulate, router_loss=router_loss)
            for window in epoch(windows, model, optimizer, live):
                if backend.wrapped == DEEPSPEED:
                    norms += [float(model.get_global_grad_norm())] if backend.reports_norm else []
                else:
                    norms.append(float(full(live.clip_grad_norm_(model.parameters(), max_norm))))
                losses.append(float(window.mean_loss()))
        end = gathered(model, backend)
        trajectory.unset_hf_deepspeed_config()
    return Trajectory({name: end[name] - start[name] for name in start}, losses, norms)


def full(norm: Any) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]
