"""Run by torchrun on two gloo ranks: hand-written loops through backends, beside plain SGD; JSON on rank 0.

The windows are as in the Trainer's trajectories: ragged, the second without an item on the second rank, the last
short. torchrun --nproc_per_node 2 -m tests.backends.loops OUTPUT.json "fsdp2-launched llama" ...
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import DataLoader

from hf_accum_fix import SeamError, accumulation_windows
from tests.backends.rows import BACKENDS, DEEPSPEED, Backend
from tests.backends.trajectory import (
    CLIPPED,
    RATE,
    SPLITS,
    UNCLIPPED,
    Trajectory,
    built,
    gathered,
    offloading_on_a_cpu,
    reference,
    samples_of,
    unset_hf_deepspeed_config,
    variables,
    without_compiling,
)
from tests.backends.trajectory import HEADS as DECODERS
from tests.backends.two_ranks import PATIENCE, errors
from tests.numerics.heads import HEADS, Head
from tests.numerics.parity import Step, cut, pass_over_imports, reference_step, trainable
from tests.torchrun import leave_with

#: Heads, and which of their layers FSDP wraps: one takes the number, one returns the mean over its own items, and one
#: would not even be called with it.
LOOP_HEADS = {
    "llama": (DECODERS["llama"], "LlamaDecoderLayer"),
    "bert": (HEADS["bert-tokens"], "BertLayer"),
    "no-kwargs": (HEADS["no-kwargs"], "Embedding"),
    "mixtral": (HEADS["mixtral"], "MixtralDecoderLayer"),
}


def accelerator(backend: Backend, per_device: int, accumulate: int, max_norm: float) -> Accelerator:
    """A new one for this backend, on CPU ranks; made inside the backend's variables."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState(cpu=True, backend="gloo")
    given: dict[str, Any] = {"mixed_precision": "bf16" if backend.compute is torch.bfloat16 else "no"}
    if backend.wrapped == DEEPSPEED:
        without_compiling()
        config = {
            **backend.arguments["deepspeed"],
            "train_micro_batch_size_per_gpu": per_device,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": max_norm,
        }
        given["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    else:
        # accelerate shards on devices alone; from here on it is its own code, on the CPU.
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    return Accelerator(gradient_accumulation_steps=accumulate, **given)


def train(
    head: Head,
    backend: Backend,
    split: tuple[int, int],
    max_norm: float,
    *,
    stock: bool = False,
    router_loss: str = "mean",
) -> Trajectory:
    """One epoch by accumulation windows, or by ``accelerator.accumulate``."""
    per_device, accumulate = split
    unset_hf_deepspeed_config()
    model = built(head, backend)
    start = trainable(model)
    losses, norms = [], []
    with variables(backend.environment), offloading_on_a_cpu():
        live = accelerator(backend, per_device, accumulate, max_norm)
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
            for window in accumulation_windows(loader, live, router_loss=router_loss):
                for batch in window:
                    with window.micro_batch(model):
                        live.backward(window.loss(model, batch))
                if backend.wrapped == DEEPSPEED:
                    norms += [float(model.get_global_grad_norm())] if backend.reports_norm else []
                else:
                    norms.append(float(full(live.clip_grad_norm_(model.parameters(), max_norm))))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(window.mean_loss()))
        end = gathered(model, backend)
        unset_hf_deepspeed_config()
    return Trajectory({name: end[name] - start[name] for name in start}, losses, norms)


def uneven(backend: Backend) -> list[list[str]]:
    """What each rank raises where the second one's dataloader has a micro-batch less: at once, later, with routing."""
    rank, found = dist.get_rank(), []
    for head_name, window, router_loss in (("llama", 1, "mean"), ("llama", 2, "mean"), ("mixtral", 2, "exact")):
        head = LOOP_HEADS[head_name][0]
        batches = [head.batch([sample]) for sample in samples_of(head)[:4]]
        raised = ""
        with variables(backend.environment):
            live = accelerator(backend, 1, 2, UNCLIPPED)
            model: Any = built(head, backend)
            model, optimizer = live.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
            try:
                for each in accumulation_windows(batches[: 2 * window - rank], live, router_loss=router_loss):
                    for batch in each:
                        with each.micro_batch(model):
                            live.backward(each.loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            except SeamError as refusal:
                raised = str(refusal)
        ranks = [""] * 2
        dist.all_gather_object(ranks, raised)
        found.append(ranks)
    return found


def unequal(backend: Backend) -> float:
    """The error of a window of four micro-batches on the first rank and two on the second."""
    head = LOOP_HEADS["bert"][0]
    pieces = cut(head.samples, 1)[:6]
    mine = pieces[:4] if dist.get_rank() == 0 else pieces[4:]
    with variables(backend.environment):
        live = accelerator(backend, 1, 4, UNCLIPPED)
        model: Any = built(head, backend)
        start = trainable(model)
        model, optimizer = live.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for window in accumulation_windows([head.batch(piece) for piece in mine], live):
            for batch in window:
                with window.micro_batch(model):
                    live.backward(window.loss(model, batch))
            optimizer.step()
        end = gathered(model, backend)
    return Step({name: end[name] - start[name] for name in start}, 0.0, 0.0).error(reference_step(head, pieces))


def full(norm: Any) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for case in cases:
        # A rank that waits for ever says where.
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        name, head_name = case.split()
        if head_name in ("uneven", "unequal"):
            rows.append({"case": case, head_name: (uneven if head_name == "uneven" else unequal)(BACKENDS[name])})
            continue
        backend, (head, layer) = BACKENDS[name], LOOP_HEADS[head_name]
        backend = replace(backend, environment={**backend.environment, "FSDP_TRANSFORMER_CLS_TO_WRAP": layer})
        row: dict[str, Any] = {"case": case, "runs": []}
        for split, max_norm, stock in (
            *((split, UNCLIPPED, False) for split in SPLITS),
            (SPLITS[0], CLIPPED, False),
            (SPLITS[0], UNCLIPPED, True),
        ):
            pass_over_imports()
            exact, wanted = (reference(head, max_norm, backend, exact=exact) for exact in (True, False))
            noise = reference(head, max_norm, backend, by=1, order=-1).error(wanted)
            run = {"split": split, "max_norm": max_norm, "noise": noise, "stock": stock}
            row["runs"].append(run)
            try:
                found = train(head, backend, split, max_norm, stock=stock)
            except Exception:
                # Of both ranks alike, or the other one would wait for ever.
                run["raised"] = traceback.format_exc()[-3000:]
                continue
            run["exact"] = found.error(exact)
            if not stock:
                run.update(errors(found, wanted))
        rows.append(row)
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
