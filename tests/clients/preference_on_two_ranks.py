"""TRL's sampling trainers on two ranks, compared with a float64 full batch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.clients.preference import LLAMA, PREFERENCES, Preference, preference_step
from tests.logged import logged
from tests.numerics.parity import Step, step_along

#: Answers of a micro-batch x micro-batches of a window, on each rank.
SPLITS = ((4, 1), (2, 2), (1, 4))
BY_TOKENS = "GRPO by tokens of a micro-batch"
#: Their micro-batches all divide by the same number.
ALIKE = ("GRPO", "RLOO")

Made = Mapping[str, Tensor]


@contextmanager
def kept(kind: Preference, made: list[Made]) -> Iterator[None]:
    """Keep what a trainer makes of its prompts, for each micro-batch that it trains."""
    stock = kind.stock.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        made.append({name: inputs[name].clone() for name in names})
        return stock(self, model, inputs, *args, **kwargs)

    kind.stock.compute_loss = compute_loss
    try:
        yield
    finally:
        del kind.stock.compute_loss


def mean_over_tokens(made: Sequence[Made]) -> Step:
    """The policy gradient's step of every answer of both ranks, a mean over all of their tokens."""
    model = LLAMA().double()
    terms: list[Tensor] = []
    for each in made:
        for row, advantage in enumerate(each["advantages"].double()):
            prompt = each["prompt_ids"][row][each["prompt_mask"][row].bool()]
            answer = each["completion_ids"][row][each["completion_mask"][row].bool()]
            logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            chances = -F.cross_entropy(logits, answer, reduction="none")
            terms.append(-advantage * (chances - chances.detach()).exp())
    return step_along(model, torch.cat(terms).mean())


def rows_of_all() -> list[dict[str, Any]]:
    """A row of each trainer at each split, the same on every rank."""
    folder, rows = Path(tempfile.gettempdir()) / "preference", []
    for name in (BY_TOKENS, *ALIKE):
        kind = PREFERENCES[name]
        for split in SPLITS if name == BY_TOKENS else SPLITS[1:2]:
            row: dict[str, Any] = {"trainer": name, "split": split}
            steps = {}
            for path in ("stock", "apply"):
                made: list[Made] = []
                with kept(kind, made), logged() as warned:
                    steps[path] = step = preference_step(kind, path, *split, folder, ddp_backend="gloo")
                everywhere: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, made)
                wanted = mean_over_tokens([each for rank in everywhere for each in rank])
                row[path] = {"gradient": step.error(wanted), "loss": abs(step.loss - wanted.loss), "warned": warned}
                row["tokens"] = [[int(each["completion_mask"].sum()) for each in rank] for rank in everywhere]
            row["same bits"] = all(
                torch.equal(steps["apply"].change[key], c) for key, c in steps["stock"].change.items()
            )
            rows.append(row)
    return rows
