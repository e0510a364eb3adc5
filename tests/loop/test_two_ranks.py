"""Hand-written loops on two real gloo ranks: unequal items, unequal windows, ranks that end apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hf_accum_fix
from hf_accum_fix import Items, LossContract, Reduction, accumulation_windows
from hf_accum_fix.window.state import ATTEMPTS
from tests.distributed.test_two_ranks import blank_on_second_rank
from tests.loop.steps import OURS, epoch, own_batches, take_steps
from tests.numerics.heads import HEADS, Head, Sample, before
from tests.numerics.parity import Step, cut, reference_step
from tests.ranks import join, on_ranks

SPLITS = ((4, 1), (2, 2), (1, 4))
CASES = (
    *(("bert-mlm", split, False) for split in SPLITS),
    *((name, (2, 2), False) for name in ("llama-position-0", "lora", "mixtral")),
    *((name, (1, 4), True) for name in ("llama", "bert-mlm", "no-kwargs", "uses-tensor")),
)


def error(step: Step, reference: Step) -> float:
    """The worst of gradient, loss and norm, relative."""
    return max(step.errors(reference).values())


def cases() -> dict[str, Any]:
    """Every head and cut, also with a rank that has no item."""
    rows = {}
    for name, (per_device, accumulate), blanked in CASES:
        head = HEADS[name]
        samples = blank_on_second_rank(head.samples) if blanked else head.samples
        reference = reference_step(head, cut(samples, per_device))
        row: dict[str, Any] = {"tolerance": max(head.tolerance, 1e-6)}
        for way in OURS:
            row[way] = error(take_steps(head, samples, per_device, accumulate, way)[0], reference)
        if not blanked:
            # The mean of the ranks' and micro-batches' means, where the count recipe cannot say what is wrong.
            row["stock"] = take_steps(head, samples, per_device, accumulate, "accumulate")[0].error(reference)
        rows[f"{name} {per_device}x{accumulate}{' without items' * blanked}"] = row
    return rows


#: Heads with listed boxes sum their number over ranks in every forward, and would wait for one another.
UNEQUAL = ("bert-mlm",) if before("5.23") else ("bert-mlm", "yolos", "LwDetrForObjectDetection")


def six_pieces(head: Head) -> list[list[Sample]]:
    """Micro-batches of one sample, the last one without a target."""
    pieces = cut(head.samples, 1)[:6]
    if head.model.startswith("LwDetr"):
        # It divides by boxes times its groups of queries, but by 1 where there are none.
        return pieces
    pieces[5] = blank_on_second_rank([pieces[5][0]] * 2)[1:]
    return pieces


def unequal(name: str, reference: Step) -> dict[str, Any]:
    """Four micro-batches on the first rank, two on the second."""
    head = HEADS[name]
    pieces = six_pieces(head)
    mine = pieces[:4] if dist.get_rank() == 0 else pieces[4:]
    # Yolos has parameters that it does not use.
    ddp = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
    step, _, _ = take_steps(head, head.samples, 1, 4, "plain", batches=[head.batch(piece) for piece in mine], ddp=ddp)
    return {"plain": error(step, reference), "tolerance": max(head.tolerance, 1e-6)}


def repeated() -> dict[str, Any]:
    """Seven samples by twos and twos: the second rank's last micro-batch has one of its own, or none but repeated."""
    rows, head = dict[str, Any](), HEADS["bert-mlm"]
    hf_accum_fix.observations.clear()
    for count, drop in product((7, 5), (True, False)):
        samples = head.samples[:count]
        step, _, _ = take_steps(head, samples, 2, 2, "windows", drop_duplicates=drop)
        rows[f"{count}{' dropped' * drop}"] = error(step, reference_step(head, cut(samples, 2)))
    runs = hf_accum_fix.report().to_dict()["runs"]
    rows["reported"] = [(run["repeated_samples"], run["repeated_samples_dropped"]) for run in runs]
    return rows


def collectives() -> dict[str, Any]:
    """Collectives of a window, after those that are corrected in any case, and reductions of gradients in it."""
    head = HEADS["bert-mlm"]
    model = torch.nn.parallel.DistributedDataParallel(head.build())
    reduced = []
    all_reduce = dist.all_reduce

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes no other annotation than its own
        reduced.append(1)
        return all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])

    windows = accumulation_windows(own_batches(head, head.samples, 1) * (ATTEMPTS + 1), steps=4)
    seen: list[str] = []
    counts = []
    for name in ("all_reduce", "all_gather_object", "all_gather", "broadcast", "reduce"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            seen.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    for window in epoch(windows, model):
        counts.append(list(seen))
        seen.clear()
        window.mean_loss()
        counts[-1].append(f"asked: {len(seen)}")
        seen.clear()
        if len(counts) == ATTEMPTS:
            model.register_comm_hook(None, reduce)
    return {"first window that is trusted": counts[ATTEMPTS], "end of the epoch": seen[:], "reductions": len(reduced)}


class Broken(torch.nn.Module):
    """Fails on one rank, in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no forward here")
        return {"loss": self.scale * input_ids.double().mean()}


class CountsAll(torch.nn.Module):
    """Sums a number over the ranks in every forward, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        count = (labels != -100).sum()
        dist.all_reduce(count.clone())
        losses = cross_entropy(self.layer(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": losses / count.clamp(min=1)}


def in_step() -> int:
    """Micro-batches trained by a model with a collective in its forward, where one rank has no target."""
    blank, model = bool(dist.get_rank()), torch.nn.parallel.DistributedDataParallel(CountsAll())
    labels = torch.full((2, 5), -100) if blank else torch.tensor([[0, 1, 2, 3, 0], [1, -100, 2, 0, 3]])
    windows = accumulation_windows([{"x": torch.ones(2, 5, 3), "labels": labels}] * 4, steps=2)
    return sum(len(window.batches) for window in epoch(windows, model))


def raised_by(call: Callable[[], Any]) -> tuple[str, float]:
    """What this rank raises, and after how long [s]."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


def failing(model: torch.nn.Module, *, labelled: bool = True, rule: Items | None = None) -> tuple[str, float]:
    """In the first window, where the second rank may have no labels."""
    batches = own_batches(HEADS["bert-mlm"], HEADS["bert-mlm"].samples, 1)
    if dist.get_rank() == 1 and not labelled:
        batches = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    contract = None if rule is None else LossContract(Reduction.MEAN, rule)

    def begin() -> None:
        window = next(iter(accumulation_windows(batches, steps=2, contract=contract)))
        window.loss(model, window.batches[0])

    return raised_by(begin)


def uneven(count: int) -> tuple[str, float]:
    """Where the second rank's dataloader ends after so many micro-batches."""
    head = HEADS["bert-mlm"]
    batches = own_batches(head, head.samples, 1)[: None if dist.get_rank() == 0 else count]
    return raised_by(lambda: take_steps(head, head.samples, 1, 2, "plain", batches=batches))


def rows_of() -> dict[str, Any]:
    """On each rank: what every test looks at."""
    # Before there are ranks, which heads with listed boxes would ask.
    references = {name: reference_step(HEADS[name], six_pieces(HEADS[name])) for name in UNEQUAL}
    join()
    model = HEADS["bert-mlm"].build()
    return {
        "cases": cases(),
        "unequal": {name: unequal(name, reference) for name, reference in references.items()},
        "uneven": [uneven(count) for count in (0, 2)],
        "failing": failing(Broken()),
        "in step": in_step(),
        "unlabelled": failing(model, labelled=False),
        "given": [failing(model, rule=Items(("label",))), failing(model, labelled=False, rule=Items(("labels",)))],
        "repeated": repeated(),
        "collectives": collectives(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """By one start of two ranks."""
    return on_ranks(rows_of, group=False)


def test_two_ranks_take_the_full_batch_step(ranks: list[dict[str, Any]]) -> None:
    for case, row in ranks[0]["cases"].items():
        for way in OURS:
            assert row[way] <= row["tolerance"], (case, row)
        assert row.get("stock", 1.0) > 1e-3, (case, row)
    for name, row in ranks[0]["unequal"].items():
        assert row["plain"] <= row["tolerance"], (name, row)
    # Ranks run equally many forwards to observe a loss; else one would wait in a collective of the model's.
    assert [rank["in step"] for rank in ranks] == [4, 4]


def test_ranks_that_end_apart_fail_or_lack_labels_are_told_on_both_at_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for raised, _ in rank["uneven"]:
            assert raised.startswith("UnevenRanksError: ")
            assert "unequal numbers of micro-batches in this window (rank 0 has 2, rank 1 has 0)" in raised
        raised, waited = rank["unlabelled"]
        missing = "rank 0: 2 micro-batches with ['labels']; rank 1: 2 micro-batches with no"
        assert raised.startswith(f"RankError: got {missing}") and waited < 5
    (one, waited), (other, _) = (rank["failing"] for rank in ranks)
    assert one.startswith("RankError: rank 0 stops, because of rank 1: ValueError: no forward here")
    assert other == "ValueError: no forward here" and waited < 5


def test_a_contract_that_counts_what_a_rank_lacks_is_told_on_both(ranks: list[dict[str, Any]]) -> None:
    refused = "ContractError: got a contract that counts by 'label"
    (neither, one), (none, lacks) = ([raised for raised, _ in rank["given"]] for rank in ranks)
    assert all(raised.startswith(refused) for raised in (neither, none, lacks))
    assert one.startswith(f"RankError: rank 0 stops, because of rank 1: {refused}")


def test_repeated_samples_are_left_out_where_that_is_asked(ranks: list[dict[str, Any]]) -> None:
    repeated = ranks[0]["repeated"]
    assert all(repeated[f"{count} dropped"] <= 1e-6 and repeated[str(count)] > 1e-3 for count in (7, 5))
    assert repeated["reported"] == [(1, True), (1, False), (3, True), (3, False)]


def test_one_small_collective_a_window_and_one_reduction_of_the_gradient(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["collectives"] == {
        "first window that is trusted": ["all_reduce", "asked: 1"], "end of the epoch": ["all_reduce"], "reductions": 1,
    }  # fmt: skip
