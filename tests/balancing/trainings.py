"""Trainings whose windows are dealt by length, on one rank or several, and the samples of each of their steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_accum_fix.data.packing import pack
from hf_accum_fix.options import BalanceOptions
from tests.data import runs
from tests.data.runs import Run
from tests.numerics.heads import HEADS, Head, Sample
from tests.numerics.heads.samples import text

#: One head for each way in which a loss is reduced, and for each way in which items are counted.
KINDS = (
    *("llama", "llama-position-0", "llama-smoothing", "lora", "gpt2-position-0", "llama-classification", "bert-mlm"),
    *("bert-tokens", "bert-classes", "bert-multi-label", "bert-answers", "electra", "t5", "bart-causal", "llava"),
    *("qwen-vl", "vit-regression", "masked-patches", "wav2vec2-ctc-mean", "wav2vec2-ctc-sum", "time-series"),
    *("func-with-number", "func-with-mean", "no-kwargs", "drops-kwargs", "declares-false", "uses-tensor", "uses-int"),
    *("told-false-after-init", "mean-of-sample-means", "mixtral", "llama-empty-micro-batches"),
    *("two-terms", "bert-pretraining", "yolos"),
)
#: b and G of a trajectory, and micro-batches of an epoch on every rank: windows of three, three and one.
ROWS, STEPS, MICRO_BATCHES, WINDOWS = 2, 3, 7, 3


def length_of(sample: Sample) -> int:
    """Tokens where there are any; else a power of two that the sample determines."""
    if "input_ids" in sample and "start_positions" not in sample:
        return len(sample["input_ids"])
    total = sum(float(value.double().abs().sum()) for value in sample.values() if isinstance(value, Tensor))
    return 2 ** (int(total * 1009) % 8)


BALANCE = BalanceOptions(lengths=length_of)


def dealt(head: Head, steps: int, ranks: int, rows: int) -> list[list[Sample]]:
    """The micro-batches that the head's samples are dealt into as one window, of all ranks."""
    plan = pack([length_of(sample) for sample in head.samples], steps, ranks, rows=rows)
    return [[head.samples[place] for place in micro_batch] for own in plan for micro_batch in own]


def train(
    output: Path, *, balance: bool | BalanceOptions, head: str = "llama", world_size: int = 1, stream: bool = False,
    patched: bool = True, rows: int = ROWS, **more: Any,
) -> Run:  # fmt: skip
    """Three epochs of texts of 3 to 40 tokens, with the patch on; the last micro-batch lacks one."""
    lengths = [3 + (index * 17) % 38 for index in range(ROWS * MICRO_BATCHES * world_size - 1)]
    samples = text(lengths=lengths, masked=lambda index, _: index % 3)
    given = {"num_train_epochs": 3, "max_steps": 3 * WINDOWS if stream else -1, **more}
    run = runs.train(
        HEADS[head], samples, "apply" if patched else "stock", output, stream=stream, per_device=rows,
        accumulate=STEPS, options={"balance_windows": balance}, **given,
    )  # fmt: skip
    return replace(run, windows=[sorted(window) for window in run.windows])
