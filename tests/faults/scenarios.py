"""What goes wrong on one rank of two, and the training that it happens in.

Run by torchrun on two gloo ranks, something happens in the second micro-batch of the third window:

    torchrun --nproc_per_node 2 -m tests.faults.scenarios OUTPUT nothing|kill|terminate|resume
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.numerics.heads import HEADS, Batch, DropsKwargs, Sample, shifted_cross_entropy
from tests.numerics.parity import ClassRecorder, trainable, training_arguments
from tests.torchrun import leave

#: Four windows of three micro-batches of one sample, on each of two ranks.
STEPS, ACCUMULATE = 4, 3
HEAD = HEADS["drops-kwargs"]
#: The micro-batch in which it happens, on the second rank: the third of the second window.
AT = ACCUMULATE + 2

Collate = Callable[[Sequence[Sample]], Batch]


def on_second_rank() -> bool:
    return os.environ["RANK"] == "1"


def samples() -> list[Sample]:
    return (list(HEAD.samples) * 3)[: 2 * STEPS * ACCUMULATE]


def trainer(output: Path, **more: Any) -> Any:
    """A trainer of one epoch; ``more`` is of TrainingArguments or of the trainer."""
    own = {key: more.pop(key) for key in ("data_collator", "model") if key in more}
    given = {"learning_rate": 0.1, "max_steps": STEPS, "ddp_backend": "gloo", **more}
    made = {"model": HEAD.build(), "train_dataset": samples(), "data_collator": HEAD.batch, **own}
    return ClassRecorder(args=training_arguments(output, 1, ACCUMULATE, **given), **made)


class InMicroBatch:
    """A collator to which something happens on the second rank, in one micro-batch, or in all of them."""

    def __init__(self, happens: Callable[[Batch], Batch], at: int | None = AT) -> None:
        self.happens, self.at, self.seen = happens, at, 0

    def __call__(self, rows: Sequence[Sample]) -> Batch:
        batch, self.seen = HEAD.batch(rows), self.seen + 1
        return self.happens(batch) if on_second_rank() and self.at in (None, self.seen - 1) else batch


class AfterOthers(InMicroBatch):
    """The micro-batch before has other labels."""

    def __call__(self, rows: Sequence[Sample]) -> Batch:
        batch = super().__call__(rows)
        if on_second_rank() and self.seen == self.at:
            batch["label_ids"] = batch.pop("labels")
        return batch


def without_labels(batch: Batch) -> Batch:
    del batch["labels"]
    return batch


def raising(batch: Batch) -> Batch:
    raise ValueError("this sample cannot be read")


class Ending(IterableDataset[Sample]):
    """A stream that on the second rank ends after some samples, and is not dealt over ranks by accelerate."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Sample]:
        rows = samples()
        return iter(rows[: self.count] if on_second_rank() else rows)


class Uneven(ClassRecorder):
    """A trainer whose dataloader is its own."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Ending(ACCUMULATE), batch_size=1, collate_fn=HEAD.batch)


def uneven(output: Path) -> Any:
    args = training_arguments(output, 1, ACCUMULATE, max_steps=STEPS, ddp_backend="gloo")
    return Uneven(model=HEAD.build(), args=args, train_dataset=samples(), data_collator=HEAD.batch)


class OtherLoss(DropsKwargs):
    """A mean on the first rank, a sum on the second."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        reduction = "sum" if on_second_rank() else "mean"
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels, reduction=reduction)}


class InForward(DropsKwargs):
    """A model to whose loss something happens on the second rank, in one micro-batch."""

    def __init__(self, happens: Callable[[Tensor], Tensor], at: int = AT) -> None:
        super().__init__()
        self.happens, self.at, self.seen = happens, at, 0
        self.double().load_state_dict(HEAD.build().state_dict())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        outputs = super().forward(*args, **kwargs)
        self.seen += torch.is_grad_enabled()
        happens = torch.is_grad_enabled() and on_second_rank() and self.seen == self.at + 1
        return {**outputs, "loss": self.happens(outputs["loss"])} if happens else outputs


def nan(loss: Tensor) -> Tensor:
    return loss * math.nan


#: What must raise on every rank, by name: its trainer.
RAISING: dict[str, Callable[[Path], Any]] = {
    "labels-missing-at-first": lambda output: trainer(output, data_collator=InMicroBatch(without_labels, 0)),
    "labels-missing-everywhere": lambda output: trainer(output, data_collator=InMicroBatch(without_labels, None)),
    "labels-missing-later": lambda output: trainer(output, data_collator=InMicroBatch(without_labels)),
    "labels-missing-after-others": lambda out: trainer(out, data_collator=AfterOthers(without_labels, ACCUMULATE + 1)),
    "collator-raises-at-first": lambda output: trainer(output, data_collator=InMicroBatch(raising, 2)),
    "collator-raises-later": lambda output: trainer(output, data_collator=InMicroBatch(raising)),
    "iterator-ends": uneven,
    "contracts-differ": lambda output: trainer(output, model=OtherLoss().double()),
}


# --- a run that is cut ------------------------------------------------------------------------------------------------

#: The second micro-batch of the third window.
THIRD = 2 * ACCUMULATE + 1


def killed(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return loss


def launcher_terminated(loss: Tensor) -> Tensor:
    """What a cluster does whose time is up."""
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
    return loss


HAPPENS = {"kill": killed, "terminate": launcher_terminated}


def main(output: Path, what: str) -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = InForward(HAPPENS.get(what, torch.clone), THIRD)
    made = trainer(output, model=model, save_strategy="steps", save_steps=1)
    made.train(resume_from_checkpoint=True if what == "resume" else None)
    if dist.get_rank() == 0:
        end = {name: parameter.tolist() for name, parameter in trainable(made.model).items()}
        steps = [entry for entry in made.state.log_history if "loss" in entry]
        logged = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in steps]
        (output / "end.json").write_text(json.dumps({"parameters": end, "logged": logged}))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
