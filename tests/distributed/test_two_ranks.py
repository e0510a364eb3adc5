"""The promise on two real gloo ranks: unequal items, and a rank with none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.heads import HEADS, Head, Sample
from tests.numerics.heads.samples import without_targets
from tests.numerics.parity import Step, cut, pass_over_imports, reference_step, take_step
from tests.ranks import join, on_ranks, same_on_all_ranks, selected

SPLITS = ((4, 1), (2, 2), (1, 4))
#: A compiled module's DDP graph is dynamo's affair; DDP refuses reversible layers, which run a backward pass inside the
#: backward pass, and cannot take apart the outputs of Qwen3-VL's experts.
LEFT_OUT = ("compiled", "compiled-no-kwargs", "ReformerForMaskedLM", "Qwen3VLMoeForConditionalGeneration")

WITHOUT_ITEMS = (
    "llama", "mixtral", "uses-tensor", "bert-mlm", "no-kwargs", "llama-smoothing", "func-with-mean",
    "DetrForObjectDetection",
)  # fmt: skip


def blank_on_second_rank(samples: Sequence[Sample]) -> list[Sample]:
    """Every other sample without a target: at b=1 the second rank has no item at all."""
    return without_targets(samples, range(1, len(samples), 2))


def rows_of(cases: Sequence[str]) -> list[dict[str, Any]]:
    """On each rank: one step of each case, beside the float64 full batch."""
    # Before there are ranks: a detection head would average its number of boxes over them.
    references = [reference_of(case) for case in cases]
    join()
    return [row(case, reference) for case, reference in zip(cases, references, strict=True)]


def parse(case: str) -> tuple[Head, Sequence[Sample], int, int]:
    """Head, samples, samples of a micro-batch and micro-batches of a case."""
    name, split, *blanked = case.split(" ", maxsplit=2)
    head = HEADS[name]
    per_device, accumulate = map(int, split.split("x"))
    return head, blank_on_second_rank(head.samples) if blanked else head.samples, per_device, accumulate


def reference_of(case: str) -> Step:
    head, samples, per_device, _ = parse(case)
    pass_over_imports()
    return reference_step(head, cut(samples, per_device))


def row(case: str, reference: Step) -> dict[str, Any]:
    head, samples, *split = parse(case)
    pass_over_imports()
    found: dict[str, Any] = {"tolerance": head.tolerance, "stock_wrong": head.stock_wrong}
    steps: dict[str, Step] = {}
    for path in ("apply", "trainer", "stock") if split == [2, 2] else ("apply",):
        try:
            folder = Path(tempfile.gettempdir()) / "two_ranks"
            steps[path] = take_step(head, samples, *split, path, folder, ddp_backend="gloo")
            found[path] = steps[path].errors(reference)
        except (RuntimeError, TypeError) as error:
            # Of both ranks alike, or the other one would wait for ever.
            found[path] = {"raised": str(error)}
    if "apply" in steps:
        found["ranks_agree"] = same_on_all_ranks(steps["apply"].change)
    if "trainer" in steps:
        one, other = steps["apply"], steps["trainer"]
        same = all(torch.equal(one.change[key], other.change[key]) for key in one.change)
        found["same_bits"] = same and one.loss == other.loss
    return found


#: One of each way that a loss is reduced, at a cut that stock and the subclass take, too; the everyday tests run the
#: first of them.
REDUCED = (
    *("llama", "bert-classes", "no-kwargs", "wav2vec2-ctc-sum"),
    *("llama-smoothing", "lora", "bert-mlm", "bert-pretraining", "t5", "mixtral", "llava"),
    *("uses-tensor", "func-with-mean", "mean-of-sample-means"),
)
EVERYDAY = REDUCED[:4]
#: A rank's only micro-batch has no item and no graph, so that it alone runs another forward; a mean over padding, which
#: counts samples as well where both halves of a micro-batch are of one width.
OF_ONE = (("func-with-constant", (4, 1)), ("BambaForCausalLM", (4, 1)))


def every_case() -> Iterator[Any]:
    """Every head and cut, and some of them with a rank that has no item, as parameters."""
    for name, head in HEADS.items():
        for split in SPLITS if name not in LEFT_OUT else ():
            marks = [] if split == (2, 2) and name in EVERYDAY else [pytest.mark.slow]
            # One rank shows the losses of heads that stand for a class alone.
            shown = head.everyday and (split == (1, 4) or (split == (2, 2) and name in REDUCED))
            if (name, split) not in OF_ONE and (head.in_zoo or not shown):
                marks = [pytest.mark.thorough]
            yield pytest.param(f"{name} {split[0]}x{split[1]}", marks=marks)
    for name in WITHOUT_ITEMS:
        yield pytest.param(f"{name} 1x4 without items", marks=[] if name in EVERYDAY else [pytest.mark.slow])


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Of the cases that were selected, by one start of two ranks."""
    cases = selected(request)
    return dict(zip(cases, on_ranks(rows_of, cases, timeout=1500, group=False)[0], strict=True))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*every_case()])
def test_two_ranks_take_the_full_batch_step(case: str, rows: Any) -> None:
    check(rows[case])


def check(row: dict[str, Any]) -> None:
    for path in {"apply", "trainer"} & row.keys():
        assert "raised" not in row[path], row
        assert row[path]["gradient"] <= row["tolerance"], row
        assert row[path]["loss"] <= max(row["tolerance"], 1e-6), row
        assert row[path]["norm"] <= row["tolerance"], row
    assert row["ranks_agree"] and row.get("same_bits", True), row
    if row["stock_wrong"] and "stock" in row:
        assert "raised" in row["stock"] or row["stock"]["gradient"] > 1e-3, row
