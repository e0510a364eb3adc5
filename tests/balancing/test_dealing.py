"""The two ways into a dataloader, on loaders as accelerate makes them; what a loader does that must not be dealt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from hf_accum_fix.data.balancing import Dealer, Samples
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.options import BalanceOptions
from tests.loop.steps import take_steps
from tests.numerics.epochs import Stream
from tests.numerics.heads import HEADS
from tests.numerics.parity import cut, reference_step

QUIET = {"progress": False}


def texts(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Samples whose tokens are all their own number, 1 to 30 of them."""
    choose = random.Random(seed)
    return [{"input_ids": [number] * choose.randint(1, 30)} for number in range(count)]


def padded(rows: Sequence[dict[str, list[int]]]) -> torch.Tensor:
    width = max(len(row["input_ids"]) for row in rows)
    return torch.tensor([row["input_ids"] + [-1] * (width - len(row["input_ids"])) for row in rows])


def numbers(batch: torch.Tensor) -> list[int]:
    return sorted(batch[:, 0].tolist())


def windows_of(batches: Sequence[Any], steps: int) -> list[list[int]]:
    """The samples of each window of one rank."""
    return [sorted(n for batch in batches[at : at + steps] for n in batch) for at in range(0, len(batches), steps)]


def prepared(rows: Any, batch_size: int = 2, *, ranks: int = 1, rank: int = 0, **kwargs: Any) -> Any:
    """A loader as accelerate prepares it for one of several ranks, in this process."""
    more = {key: kwargs.pop(key) for key in ("even_batches", "split_batches") if key in kwargs}
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=padded, **kwargs)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=True, **more)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_window_keeps_its_samples_and_its_micro_batches(drop_last: bool, workers: int) -> None:
    rows = texts(51)
    stock = [numbers(batch) for batch in prepared(rows, 4, drop_last=drop_last)]
    loader = Dealer(BalanceOptions(), **QUIET).around(prepared(rows, 4, drop_last=drop_last, num_workers=workers), 5)
    batches = list(loader)
    assert len(batches) == len(loader) == len(stock)
    assert windows_of([*map(numbers, batches)], 5) == windows_of(stock, 5)
    assert sum(map(torch.numel, batches)) < sum(map(torch.numel, prepared(rows, 4, drop_last=drop_last)))
    # A second epoch is as whole as the first.
    assert windows_of([numbers(batch) for batch in loader], 5) == windows_of(stock, 5)


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [36, 37, 50, 53])
def test_the_ranks_together_have_stocks_samples(count: int, ranks: int, drop_last: bool, split_batches: bool) -> None:
    rows, steps, size = texts(count), 3, 2 * ranks if split_batches else 2

    def of(rank: int) -> Any:
        return prepared(rows, size, ranks=ranks, rank=rank, drop_last=drop_last, split_batches=split_batches)

    stock = [[numbers(batch) for batch in of(rank)] for rank in range(ranks)]
    loaders = [Dealer(BalanceOptions(), **QUIET).around(of(rank), steps) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    # No sample is lost or repeated that stock does not repeat, whatever the sizes.
    for slot in range(0, len(stock[0]), steps):
        window = slice(slot, slot + steps)
        wanted = Counter(n for own in stock for batch in own[window] for n in batch)
        assert Counter(n for own in batches for batch in own[window] for n in numbers(batch)) == wanted
    assert [len(own) for own in batches] == [len(own) for own in stock] == [len(loader) for loader in loaders]
    assert len({len(batch) for own in batches for batch in own}) > 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_epoch_goes_on_where_it_was(ranks: int) -> None:
    rows = texts(48)
    torch.manual_seed(3)

    def of(rank: int) -> Any:
        loader = DataLoader(rows, batch_size=2, collate_fn=padded, shuffle=True)
        loader = prepare_data_loader(
            loader, num_processes=ranks, process_index=rank, put_on_device=True, use_seedable_sampler=True, data_seed=5
        )
        return Dealer(BalanceOptions(), **QUIET).around(loader, 4)

    for rank in range(ranks):
        loader = of(rank)
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        for epoch in (0, 1, 2):
            resumed = skip_first_batches(of(rank), 4)
            resumed.set_epoch(epoch)
            assert [batch.tolist() for batch in resumed] == epochs[epoch][4:]


def test_lengths_are_read_once_for_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(list[Any]):
        asked = 0

        def __getitem__(self, row: Any) -> Any:
            Counting.asked += 1
            return super().__getitem__(row)

    rows, dealer = Counting(texts(20)), Dealer(BalanceOptions())
    dealer.around(prepared(rows, 2), 2)
    dealer.around(prepared(rows, 4), 5)
    assert Counting.asked == 20
    assert capsys.readouterr().err.count("balance_windows: lengths: 100%") == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (BalanceOptions(), [3, 5, 2]),
        (BalanceOptions(truncated_to=4), [3, 4, 2]),
        (BalanceOptions(lengths="tokens"), [7, 8, 9]),
        (BalanceOptions(lengths=lambda sample: len(sample["input_ids"]) + 100), [103, 105, 102]),
    ],
)
@pytest.mark.parametrize("kind", ["list", "datasets", "transformed"])
def test_what_a_length_is(options: BalanceOptions, wanted: list[int], kind: str) -> None:
    rows: Any = [{"input_ids": [1] * n, "tokens": t} for n, t in ((3, 7), (5, 8), (2, 9))]
    if kind != "list":
        rows = datasets.Dataset.from_list(rows)
    if kind == "transformed" and options.lengths is None:
        # What the transform makes of a row is what counts, not what lies in the column.
        rows.set_transform(lambda batch: {"input_ids": [ids * 2 for ids in batch["input_ids"]]})
        wanted = [min(2 * n, options.truncated_to or 99) for n in (3, 5, 2)]
    assert Dealer(options, **QUIET)._lengths(rows, None, "length") == wanted


def test_a_length_that_cannot_be_told_is_asked_for() -> None:
    unknown = r"a sample that holds \['pixel_values'\]; expected its length by its input_ids"
    for options, rows, words in (
        (BalanceOptions(), [{"pixel_values": 1}] * 8, unknown),
        (BalanceOptions(lengths="tokens"), texts(8), "expected its length by lengths='tokens'"),
    ):
        with pytest.raises(OptionsError, match=words):
            Dealer(options, **QUIET).around(prepared(rows), 2)


def test_rows_of_a_micro_batch_are_limited() -> None:
    rows = [{"input_ids": [1] * n} for n in (1, 1, 1, 1, 1, 1, 50, 50)]
    for most in (None, 3):
        dealt = Dealer(BalanceOptions(max_rows_per_micro_batch=most), **QUIET).around(prepared(rows), 4)
        assert (max(map(len, dealt)) > 3) == (most is None)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_dealt_as_it_comes(workers: int) -> None:
    rows = texts(30)
    stock = list(prepared_stream(rows))
    loader = Dealer(BalanceOptions(), **QUIET).around(prepared_stream(rows, num_workers=workers), 4)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(stock) == 8
        assert windows_of([*map(numbers, batches)], 4) == windows_of([*map(numbers, stock)], 4)
        assert sum(batch.numel() for batch in batches) < sum(batch.numel() for batch in stock)
        for batch in batches:
            for row in batch:
                number = int(row[0])
                assert row.tolist() == rows[number]["input_ids"] + [-1] * (len(row) - len(rows[number]["input_ids"]))


def prepared_stream(rows: list[Any], **kwargs: Any) -> Any:
    loader = DataLoader(Stream(rows), batch_size=4, collate_fn=padded, **kwargs)
    return prepare_data_loader(loader, dispatch_batches=False, put_on_device=True)


def test_samples_pass_a_loader_untouched_where_a_list_would_be_cut() -> None:
    """A dispatching loader cuts lists of rows, and says nothing; it is refused."""
    rows = [torch.full((3 + number % 3,), number) for number in range(8)]

    def of(collate: Any) -> Any:
        return prepare_data_loader(
            DataLoader(Stream(rows), batch_size=3, collate_fn=collate), dispatch_batches=True, put_on_device=True
        )

    cut = [row.tolist() for batch in of(list) for row in batch]
    assert cut != [row.tolist() for row in rows]
    for loader, words in (
        (of(torch.stack), "dispatch_batches"),
        (DataLoader(texts(8), batch_size=None), "a batch sam"),
    ):
        with pytest.raises(UnsupportedSetupError, match=words):
            Dealer(BalanceOptions(), **QUIET).around(loader, 2)
    kept = prepare_data_loader(
        DataLoader(Stream(rows), batch_size=3, collate_fn=Samples), dispatch_batches=False, put_on_device=True
    )
    assert all(row is wanted for row, wanted in zip((r for batch in kept for r in batch.rows), rows, strict=True))


def test_engines_that_meet_in_every_micro_batch() -> None:
    kinds = {
        ("NO", 0): False,
        ("MULTI_CPU", 0): False,
        ("FSDP", 0): True,
        ("DEEPSPEED", 1): False,
        ("DEEPSPEED", 3): True,
    }
    for (kind, stage), wanted in kinds.items():
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        live = SimpleNamespace(distributed_type=DistributedType[kind], state=state)
        assert waits_every_micro_batch(live) is wanted, (kind, stage)


def test_a_loop_over_accumulation_windows_takes_the_full_batch_step() -> None:
    """Dealt before it is handed over, in a loop of one's own; the head returns its own mean."""
    head = HEADS["bert-mlm"]
    loader = DataLoader(list(head.samples), batch_size=2, collate_fn=head.batch)  # type: ignore[arg-type]
    dealt = Dealer(BalanceOptions(), **QUIET).around(prepare_data_loader(loader, put_on_device=True), 4)
    assert len({len(batch["labels"]) for batch in dealt}) > 1
    step, _, _ = take_steps(head, head.samples, 2, 4, "windows", batches=dealt)
    assert step.error(reference_step(head, cut(head.samples, 2))) <= 1e-12


@pytest.mark.parametrize("stream", [False, True])
def test_repeated_samples_are_not_dropped_where_they_may_be_anywhere(stream: bool) -> None:
    rows = texts(30)
    loader = Dealer(BalanceOptions(), **QUIET).around(prepared_stream(rows) if stream else prepared(rows, ranks=2), 4)
    WithoutDuplicates(loader, False, print).check()
    with pytest.raises(UnsupportedSetupError, match="got length-balanced windows"):
        WithoutDuplicates(loader, True, print).check()
