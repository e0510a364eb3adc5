"""Two steps of a small Llama whose samples are cut over two ranks, beside float64 SGD over the global batches.

By DeepSpeed's Ulysses, or by accelerate's context parallelism, whose attention needs a GPU; here another one takes its
place, which gathers keys and values of all ranks. Everything but that kernel is the real path.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mixtral.modeling_mixtral import MixtralModel

from hf_accum_fix import observations
from tests.backends.rows import DEEPSPEED, FSDP2, LAUNCHED_DEEPSPEED, Backend, launched_fsdp, zero
from tests.backends.trajectory import furthest, trained_on, variables, without_compiling
from tests.numerics.parity import applied, moved, recorder, relative, trainable, training_arguments
from tests.ranks import on_ranks, selected

Adapt = Callable[[nn.Module], nn.Module]
CUT, RATE, CLIPPED, UNCLIPPED = 2, 0.5, 0.5, 1e30
#: Of four samples in a row, since gloo gathers equal widths alone; two ranks hold as many positions of each.
LENGTHS = (16, 12, 14)
#: The first and the last target of each sample, over and over: in some all lie in the second half, on one rank.
RAGGED = ((1, 16), (3, 16), (12, 16), (7, 16), (14, 16), (2, 7), (9, 16), (5, 16))
#: Every target of the global batch lies on the first rank of its two, or on the second.
ON_THE_FIRST, ON_THE_SECOND = ((1, 8), (3, 6)), ((10, 16), (9, 12))


@dataclass
class Cut:
    """Two steps."""

    error: float  # of the parameter change, relative
    factor: float  # the change's part along the right one, by that one
    loss: float  # the larger relative error of the two logged ones
    norm: float | None  # of the gradients before clipping, likewise; None: DeepSpeed tells none at stage 0
    report: dict[str, Any]  # `hf_accum_fix.report`'s last run; empty: there is none


def samples(targets: Sequence[tuple[int, int]], count: int) -> list[dict[str, Tensor]]:
    """Ragged samples, of which some have few targets."""
    generator, made = torch.Generator().manual_seed(7), []
    for at in range(count):
        (first, end), place = targets[at % len(targets)], torch.arange(LENGTHS[at // 4 % len(LENGTHS)])
        tokens = torch.randint(5, 61, place.shape, generator=generator)
        labels = tokens.masked_fill((place < first) | (place >= end), -100)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": place})
    return made


def stacked(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The collator: what is filled up on the right, no causal model sees."""
    fill = {"labels": -100}
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill.get(key, 0))
        for key in rows[0]
    }


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "sdpa",
}  # fmt: skip


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def lora(model: nn.Module) -> nn.Module:
    """Adapters that are not zero, and nothing else that is trained."""
    from peft import LoraConfig, get_peft_model

    adapted = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)
    return get_peft_model(model, adapted)  # type: ignore[arg-type]


def of_window(rows: Sequence[Any], ranks: int, split: tuple[int, int], window: int, each_loads: bool) -> list[Any]:
    """The samples of a global batch: each rank loads its own, and shares them in turn, or both load the same."""
    (b, steps), found = split, []
    if not each_loads:
        size = b * steps * ranks // CUT
        return list(rows[window * size : (window + 1) * size])
    for group in range(ranks // CUT):
        for at in range(window * steps, (window + 1) * steps):
            batch = at // CUT * ranks + group * CUT + at % CUT
            found += rows[batch * b : (batch + 1) * b]
    return found


Windows = Sequence[Sequence[dict[str, Tensor]]]
#: Change of the parameters, losses and norms.
Steps = tuple[dict[str, Tensor], list[float], list[float]]


def along(loss_of: Callable[[nn.Module, Sequence[dict[str, Tensor]]], Tensor]) -> Callable[..., Steps]:
    """SGD over global batches, in float64: ``(model, windows, max_norm)``."""

    def steps(model: nn.Module, windows: Windows, max_norm: float) -> Steps:
        exact = copy.deepcopy(model).double()
        start, losses, norms = trainable(exact), [], []
        for rows in windows:
            exact.zero_grad()
            loss = loss_of(exact, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            norms.append(float(nn.utils.clip_grad_norm_(exact.parameters(), max_norm)))
            with torch.no_grad():
                for parameter in (each for each in exact.parameters() if each.grad is not None):
                    parameter -= RATE * parameter.grad
        return moved(exact, start), losses, norms

    return steps


def mean_of_targets(model: nn.Module, rows: Sequence[dict[str, Tensor]], smoothing: float = 0.0) -> Tensor:
    batch = stacked(rows)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    logits, labels = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)


plain_sgd = along(mean_of_targets)
#: Arguments of a training with smoothed labels.
SMOOTHING: dict[str, Any] = {
    "arguments": {"label_smoothing_factor": 0.2},
    "reference": along(functools.partial(mean_of_targets, smoothing=0.2)),
}  # fmt: skip


def rows_of(
    request: pytest.FixtureRequest, each: Callable[[list[str]], dict[str, Any]], ranks_of: Callable[[str], int]
) -> dict[str, Any]:
    """By case, of those that will run: what ``each`` finds, by one start of two ranks and one of four."""
    found: dict[str, Any] = {}
    for ranks in (2, 4):
        if cases := [case for case in dict.fromkeys(selected(request)) if ranks_of(case) == ranks]:
            found |= on_ranks(each, cases, ranks=ranks, timeout=60 + 30 * len(cases))[0]
    return found


def ulysses(ranks: int) -> dict[str, Any]:
    """The argument that cuts samples over two ranks; two of four ranks hold other samples."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    sizes = {"sp_size": CUT, "dp_replicate_size": 1, "dp_shard_size": ranks // CUT}
    return {"parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_handler=handler, **sizes)}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Around a training under Ulysses: its groups and its attention are the process's, and are made once."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    without_compiling()
    deepspeed.init_distributed("gloo")
    try:
        yield
    finally:
        parallel_state_sp._release_sequence_parallel_groups()
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def under_ulysses(
    stage: int, ranks: int, split: tuple[int, int], path: str, *, adapt: Adapt = lambda model: model,
    arguments: Mapping[str, Any] = MappingProxyType({}), **how: Any,
) -> Cut:  # fmt: skip
    """Two steps by the Trainer under DeepSpeed's sequence parallelism.

    ``split``: b and G; ``adapt``: what is made of the model; ``arguments``: of TrainingArguments; the rest: `stepped`
    """
    given = {**zero(stage), **ulysses(ranks), **arguments}
    backend = Backend(f"sp, ZeRO {stage}", DEEPSPEED, given, reports_norm=stage > 0)
    with variables(LAUNCHED_DEEPSPEED), applied(path), registered():
        return stepped(lambda: adapt(llama()), ranks, split, path, backend, **how)


def under_context(
    ranks: int, split: tuple[int, int], path: str, *, hands_number: bool = True, adapt: Adapt = lambda model: model,
    arguments: Mapping[str, Any] = MappingProxyType({}), options: Mapping[str, Any] = MappingProxyType({}), **how: Any,
) -> Cut:  # fmt: skip
    """The same under context parallelism; ``hands_number``: the model takes num_items_in_batch."""

    def build() -> nn.Module:
        model = adapt(llama())
        model.accepts_loss_kwargs = hands_number  # type: ignore[assignment]
        return model

    sizes = {"cp_size": CUT, "dp_replicate_size": 1, "dp_shard_size": ranks // CUT}
    given, attention = {"parallelism_config": ParallelismConfig(**sizes), **arguments}, OverRanks()
    launched = launched_fsdp(2, FSDP_AUTO_WRAP_POLICY="NO_WRAP")
    backend = Backend("cp", FSDP2, given, launched, prepare=attention.over)
    with applied(path, **options), attention.installed():
        return stepped(build, ranks, split, path, backend, **how)


def errors_of(
    kind: str, ranks: int, what: Any, splits: Sequence[tuple[int, int]], path: str
) -> list[dict[str, str | float]]:
    """Errors for each split; ``kind``: "sp", and ``what`` its ZeRO stage, or "cp", and whether the number is taken."""
    found: list[dict[str, str | float]] = []
    for split in splits:
        if kind == "sp":
            one = under_ulysses(what, ranks, split, path)
        else:
            one = under_context(ranks, split, path, hands_number=what)
        found.append({"split": f"{split[0]} x {split[1]}", "error": one.error, "loss": one.loss})
    return found


class OverRanks:
    """Attention of a part of each sample to all of it: softmax(q k' / sqrt(d)) v over the keys of all ranks."""

    def __init__(self) -> None:
        self.group: Any = None
        self.places: Tensor | None = None
        self.of_one: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def over(self, trainer: Any) -> None:
        self.group = trainer.accelerator.torch_device_mesh["cp"].get_group()

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        if self.group is None:
            # The reference's samples are whole.
            return self.of_one(module, q, k, v, *_, **given)  # type: ignore[no-any-return]
        assert self.places is not None
        keys, values = (Gathered.apply(each, self.group) for each in (k, v))
        every = [torch.empty_like(self.places) for _ in range(CUT)]
        dist.all_gather(every, self.places.contiguous(), group=self.group)
        later = torch.cat(every, -1)[:, None, None, :] > self.places[:, None, :, None]
        scores = (q @ keys.transpose(-1, -2) * given["scaling"]).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
                self.places = kwargs["position_ids"]
                return forward(model, *args, **kwargs)

            return noted

        with contextlib.ExitStack() as stack:
            for model in (LlamaModel, MixtralModel):
                stack.enter_context(mock.patch.object(model, "forward", noting(model.forward)))
            stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": self}))
            yield


class Gathered(torch.autograd.Function):
    """What the ranks hold, in a row along the sequence; the gradient of each part is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        every = [torch.empty_like(own) for _ in range(CUT)]
        dist.all_gather(every, own.contiguous(), group=group)
        return torch.cat(every, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        whole = grads[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(CUT, 2)[dist.get_rank(ctx.group)].contiguous(), None


def stepped(
    build: Callable[[], nn.Module], ranks: int, split: tuple[int, int], path: str, backend: Backend,
    max_norm: float = UNCLIPPED, targets: Sequence[tuple[int, int]] = RAGGED,
    reference: Callable[..., Steps] = plain_sgd,
) -> Cut:  # fmt: skip
    """Two steps of a model; ``reference``: what is right."""
    b, steps = split
    rows = samples(targets, 3 * ranks * b * steps)
    windows = [of_window(rows, ranks, split, window, backend.wrapped == DEEPSPEED) for window in range(2)]
    change, losses, norms = reference(build(), windows, max_norm)
    given = {"max_grad_norm": max_norm, "max_steps": 2, "learning_rate": RATE}
    arguments = functools.partial(training_arguments, Path(tempfile.gettempdir()) / "cut", *split, **given)
    make = functools.partial(recorder(path), train_dataset=rows, data_collator=stacked)
    found = trained_on(backend, build, arguments, make)
    along, whole = (sum(float((each[name] * change[name]).sum()) for name in change) for each in (found.change, change))
    runs = observations.recorded() if path != "stock" else ()
    return Cut(
        relative(found.change, change),
        along / whole,
        furthest(found.losses, losses),
        furthest(found.norms, norms) if found.norms else None,
        dict(runs[-1]) if runs else {},
    )
