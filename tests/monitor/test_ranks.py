"""What ranks are compared by: losses, gradients, replicas, samples and pace; with real ranks in test_two_ranks.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy
import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor import LossMeter, Monitor, NoiseScale, RankGradients, SharedSamples, rank_gradients, rank_loss
from hf_accum_fix.monitor.callbacks import samples_of
from hf_accum_fix.monitor.deviation import Deviation, Shifts
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.pace import Pace, PaceReading
from hf_accum_fix.monitor.rank_gradients import RankGradientsReading
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.ranks import read_together
from hf_accum_fix.monitor.replicas import Replicas, _sum_of_bits
from tests.monitor.quadratic import Quadratic
from tests.monitor.side_by_side import OneOf, side_by_side
from tests.monitor.test_callbacks import FlatParameter


def alarms(means: numpy.ndarray, error: float = 1.0, tolerance: float = 0.0) -> list[tuple[int, int]]:
    """Readings and ranks of the alarms, of the ranks' means: [readings, ranks], in their errors."""
    shifts, found, ranks = Shifts(), [], means.shape[1]
    for reading, row in enumerate(means.tolist(), start=1):
        differences = [its - (sum(row) - its) / (ranks - 1) for its in row]
        error_of = error * (ranks / (ranks - 1)) ** 0.5
        named = shifts.add([Deviation(rank, its, error_of, 40, tolerance) for rank, its in enumerate(differences)])
        found += [] if named is None else [(reading, named.rank)]
    return found


@pytest.mark.parametrize(("ranks", "since"), [(2, 0), (4, 40)])
def test_a_shift_is_named_once_it_has_lasted_and_again_after_twice_as_long(ranks: int, since: int) -> None:
    means = numpy.random.default_rng(1).normal(size=(since + 130, ranks))
    means[since:, -1] += 4.0
    found = alarms(means)
    assert {rank for _, rank in found} == {ranks - 1}
    assert since + 20 < found[0][0] <= since + 30 and all(later >= found[0][0] + 60 for later, _ in found[1:])


def test_what_is_within_the_tolerance_is_no_shift_and_losses_that_never_vary_may_be_one() -> None:
    still = numpy.tile([0.0, 1.0], (40, 1))
    assert alarms(still, error=0.0, tolerance=0.1) == [(30, 1)] and alarms(still, error=0.0, tolerance=1.1) == []
    noisy = still * 3 + numpy.random.default_rng(3).normal(size=(40, 2))
    assert alarms(noisy) == [(30, 1)] and alarms(noisy, tolerance=3.0) == []


def test_ranks_that_come_and_go_begin_anew() -> None:
    shifts, off = Shifts(), [Deviation(0, -5.0, 1.0), Deviation(1, 5.0, 1.0)]
    for _ in range(29):
        assert shifts.add(off) is None
    assert shifts.add([*off, Deviation(2, 0.0, 1.0)]) is None
    assert [shifts.add(off) is not None for _ in range(30)] == [False] * 29 + [True]


def test_a_rank_that_is_early_is_none_that_lags() -> None:
    shifts, either = Shifts(only_above=True), Shifts()
    early = [Deviation(rank, its, 1.0) for rank, its in enumerate((-6.0, 2.0, 2.0, 2.0))]
    named = [(shifts.add(early), either.add(early)) for _ in range(60)]
    assert all(above is None for above, _ in named) and any(its is not None and its.rank == 0 for _, its in named)


def a_reading(draw: numpy.random.Generator, micro_batches: int, items: numpy.ndarray) -> LossReading:
    """Losses of micro-batches of so many items a rank at most, with heavy tails now and then."""
    n = draw.integers(1, items[:, None] + 1, size=(len(items), micro_batches)).astype(float)
    x = 2 + 0.3 * draw.standard_t(4, size=n.shape) + 1.5 * (draw.exponential(size=n.shape) - 1) / numpy.sqrt(n)
    s = x * n
    sums = zip(n.sum(1), s.sum(1), (s * s).sum(1), (s * n).sum(1), (n * n).sum(1), strict=True)
    return LossReading(tuple(Moments(micro_batches, *map(float, of_rank)) for of_rank in sums))


def test_a_rank_with_few_items_is_as_usual_as_any_and_short_readings_are_put_together() -> None:
    draw, judge = numpy.random.default_rng(8), RankLoss()
    few = numpy.array([4, 400, 400, 400])
    found = [rank_loss.deviations(a_reading(draw, 10, few).ranks, [0, 1, 2, 3])[0] for _ in range(300)]
    # Its mean is off by several times what the others' are; in its own standard errors it is not.
    assert numpy.std([its.difference for its in found]) > 0.1 and numpy.std([its.deviate for its in found]) < 1.1
    for log in range(8):
        judge.judge(a_reading(draw, 1, few[1:3]))
        assert len(judge._shifts._past) == (log == 7)


def test_the_deviation_of_a_rank_by_hand() -> None:
    steps = [(1.0, 1.0, math.e), (2.0, 2.0, 2.0 * math.e)]
    exact = rank_gradients.deviations(steps)
    assert [each.difference for each in exact] == pytest.approx([-0.5, -0.5, 1.0])
    assert exact[2].unusual > 6
    assert all(each.unusual == 0 for each in rank_gradients.deviations(steps, tolerance=2.0))


def test_a_rank_whose_gradient_is_not_finite_is_named_at_once() -> None:
    alarm = RankGradients().judge(RankGradientsReading(((1.0, 1.0), (1.0, math.inf), (1.0, 2.0))))
    assert alarm is not None and alarm.kind == "rank-gradient-not-finite-1"
    scaled_down = RankGradientsReading(((1.0, math.inf), (1.0, math.inf)))
    assert RankGradients().judge(scaled_down) is None


def test_a_norm_is_made_of_its_parts() -> None:
    gradients = RankGradients()
    for scale in (1.0, 2.0):
        gradients.add(scale * torch.tensor([3.0, 0.0]))
        gradients.add(scale * torch.tensor([[4.0]], dtype=torch.bfloat16))
        gradients.end_of_step()
    assert gradients.read().norms == ((5.0, 10.0),)
    assert gradients.read().norms == ((),)


class OtherRank:
    """A second rank that holds what this one holds."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums.append(tensor)
        return tensor + tensor.flip(0)


def in_parts() -> nn.Module:
    """A model whose ranks hold parts of it."""
    model = nn.Linear(3, 4)
    model.weight = FlatParameter(torch.zeros(4, 3))
    return model


#: What is done, and words of the refusal.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gradients": (lambda: RankGradients(OtherRank()).attach(nn.Linear(1, 1)), "expected DistributedDataParallel"),  # type: ignore[arg-type]
    "noise scale": (lambda: NoiseScale(Quadratic(), ranks=OtherRank()), "expected DistributedDataParallel"),
    "noise scale of parts": (lambda: NoiseScale(in_parts()), "sharded"),
    "replicas": (lambda: Replicas(in_parts()), "the ranks hold parts, not copies"),
    "several losses": (lambda: LossMeter().update(torch.ones(4), 4), r"got a loss of shape \[4\]; expected one number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_watched_is_refused(name: str) -> None:
    watch, words = REFUSED[name]
    with pytest.raises(UnsupportedSetupError, match=words):
        watch()


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int8, torch.bool, torch.complex64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_is_that_of_the_numbers_wherever_they_lie(dtype: torch.dtype) -> None:
    for count in (1, 3, 8, 1001):
        lying = (10 * torch.randn(count + 3)).to(dtype)[3:]
        assert _sum_of_bits(lying) == _sum_of_bits(lying.clone())
        changed = lying.clone()
        changed[count // 2] = changed[count // 2] + 1 if dtype is not torch.bool else ~changed[count // 2]
        assert _sum_of_bits(lying) != _sum_of_bits(changed)
    images = torch.randn(2, 3, 5, 7).to(dtype)
    assert _sum_of_bits(images) == _sum_of_bits(images.to(memory_format=torch.channels_last))
    assert _sum_of_bits(torch.zeros(0, dtype=dtype)) == 0
    assert _sum_of_bits(images[0, 0, 0, 0]) == _sum_of_bits(images[0, 0, 0, :1])


def test_every_so_many_steps_one_sum_of_three_integers_a_rank() -> None:
    model, ranks = nn.Linear(3, 4), OtherRank()
    replicas = Replicas(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks, every=3)
    for _ in range(7):
        assert replicas.step() is None
    assert [(tensor.shape, tensor.dtype) for tensor in ranks.sums] == [((2, 3), torch.int64)] * 2


STEPS, BATCH, LOG_EVERY = 60, 8, 10


def places(fault: str, rank: int, ranks: int) -> Tensor:
    """Indices [steps, batch] of the samples that a rank is given."""
    draw = torch.Generator().manual_seed(3)
    every = torch.randperm(STEPS * BATCH * ranks * 2, generator=draw)[: STEPS * BATCH * ranks]
    mine = every[rank::ranks]
    if fault == "small data, shuffled over the ranks":
        mine = torch.cat([torch.randperm(64, generator=draw)[rank::ranks] for _ in range(STEPS * BATCH)])
    elif rank == ranks - 1 and fault == "later":
        mine = every[0::ranks].roll(3 * BATCH)
    elif rank == ranks - 1 and fault == "in another order":
        mine = every[0::ranks].view(-1, BATCH * LOG_EVERY)
        mine = mine[:, torch.randperm(mine.shape[1], generator=draw)].flatten()
    elif rank == ranks - 1 and fault == "one in four":
        mine = torch.where(torch.arange(len(mine)) % 4 == 0, every[0::ranks], mine)
    return mine[: STEPS * BATCH].view(STEPS, BATCH)


def told(ranks: int, feed: Callable[[int], Iterable[Tensor]], every: int) -> list[tuple[int, str, str]]:
    """Steps, kinds and messages of the alarms, where every rank is given what is fed to it."""

    def work(its: OneOf) -> list[tuple[int, str, str]]:
        samples, found = SharedSamples(its), []
        for step, rows in enumerate(feed(its.rank), start=1):
            samples.update(rows)
            if step % every == 0 and (alarm := samples.judge(samples.read())) is not None:
                found.append((step, alarm.kind, alarm.message))
        return found

    results = side_by_side(work, ranks)
    assert all(its == results[0] for its in results)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
def test_a_share_of_one_half_and_more_is_told(dtype: torch.dtype) -> None:
    def kinds(fault: str, ranks: int) -> list[tuple[int, str, str]]:
        factors = torch.arange(1, 6)
        return told(ranks, lambda rank: (places(fault, rank, ranks)[..., None] * factors).to(dtype), LOG_EVERY)

    for fault in ("later", "in another order"):
        found = kinds(fault, 3)
        assert found[0][:2] == (20, "ranks-share-samples") and "ranks 0 and 2" in found[0][2]
    assert kinds("none", 3) == [] and kinds("one in four", 3) == []
    assert kinds("small data, shuffled over the ranks", 2) == []


@pytest.mark.parametrize("handed_over", ["images", "indices", "labels in their order"])
def test_augmented_samples_are_found_by_what_stays_the_same(handed_over: str) -> None:
    """Both ranks read one order, with crops and noise of their own, rank 1 three micro-batches later."""

    def feed(rank: int) -> Iterator[Tensor]:
        draw, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
        order, classes = torch.randperm(4096, generator=draw), torch.randint(10, (4096,), generator=draw)
        for place in range(80):
            rows = order[8 * (place + 3 - 3 * rank) :][:8]
            left = int(torch.randint(5, (), generator=own))
            images = torch.sin(rows[:, None] * torch.arange(1.0, 37.0))[:, left : left + 32]
            images = images + 0.01 * torch.randn(images.shape, generator=own)
            yield {"images": images, "indices": rows, "labels in their order": classes[rows][None]}[handed_over]

    kinds = [kind for _, kind, _ in told(2, feed, 20)]
    assert kinds == ([] if handed_over == "images" else ["ranks-share-samples"] * 3)


def test_the_trainer_s_ranks_are_compared_without_their_padding() -> None:
    def feed(rank: int) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(12):
            ids = torch.randint(1, 99, (8, 6), generator=draw)
            # Rank 1 gets them in another order, and padded further, by a number that is no zero.
            ids = nn.functional.pad(ids.flip(0), (0, 2), value=7) if rank else ids
            mask = torch.ones_like(ids)
            mask[:, 6:] = 0
            found = samples_of({"attention_mask": mask, "input_ids": ids})
            assert found is not None
            yield found

    assert [kind for _, kind, _ in told(2, feed, 4)] == ["ranks-share-samples"] * 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lags(extra: float) -> list[tuple[int, str]]:
    """Logs and kinds of the alarms where the last of two ranks takes so much longer [s] than a step's 0.1 s.

    Every rank's own time is skewed noise; the first one saves and evaluates before each log.
    """

    def work(its: OneOf) -> list[tuple[int, str]]:
        model, clock = nn.Linear(1, 1), Clock()
        pace = Pace(model, its, clock=clock)
        draw, found = numpy.random.default_rng(7), []
        for step in range(1, 311):
            own = 0.1 * draw.lognormal(0, 0.3, size=2) + numpy.array([5.0 * (step % 10 == 0), extra])
            clock.now += own[its.rank]
            model(torch.ones(1, 1))
            clock.now += own.max() - own[its.rank] + 0.1  # the last backward, and the wait for the slowest
            pace.step()
            model.eval()
            model(torch.ones(1, 1))
            model.train()
            if step % 10 == 0 and (alarm := pace.judge(pace.read())) is not None:
                found.append((step // 10, alarm.kind))
        return found

    one, other = side_by_side(work)
    assert one == other
    return one


def test_a_rank_that_lags_is_named_in_seconds_however_large_and_a_healthy_run_is_not() -> None:
    assert lags(0.1)[0] == (30, "rank-lags-1") and {kind for _, kind in lags(0.1)} == {"rank-lags-1"}
    assert lags(0.0) == []
    pace = Pace(nn.Identity())
    alarms = [pace.judge(PaceReading((0.1, 1.1), 1.3, 10)) for _ in range(30)]
    assert alarms[-1] is not None and alarms[-1].message.startswith("rank 1: ready 1 s later than the others")


def test_one_process_and_nothing_to_judge_say_nothing() -> None:
    judge, full = RankLoss(), Moments(10, 100, 200, 4000, 2000, 1000)
    assert judge.judge(LossReading((full,))) is None
    assert judge.judge(LossReading((Moments(), Moments(), full))) is None and not judge._shifts._past
    samples = SharedSamples()
    samples.update(torch.arange(0))
    samples.update(torch.arange(3))
    seen = samples.read()
    assert len(seen.now[0]) == 3 and samples.judge(seen) is None
    pace = Pace(nn.Linear(1, 1))
    pace.step()
    reading = pace.read()
    assert reading == PaceReading((0.0,), 0.0, 0) and pace.judge(reading) is None and reading.lag(0) == 0


def test_what_one_rank_cannot_watch_is_left_out_on_all() -> None:
    """Also what is checked between two logs, before the first of them."""

    def work(ranks: OneOf) -> dict[str, float]:
        model = nn.Linear(3, 2)
        if ranks.rank:
            model.weight.placements = ()
        monitor = Monitor(model, ranks=ranks)
        if ranks.rank:
            monitor.samples(torch.arange(3))
        for _ in range(3):
            monitor.step(1.0, norm=1.0)
        return monitor.log()

    assert all(found["loss"] == 1.0 for found in side_by_side(work))


def test_read_together_is_read_apart() -> None:
    def work(ranks: OneOf) -> bool:
        def monitors() -> tuple[LossMeter, RankGradients, SharedSamples]:
            meter, gradients, samples = LossMeter(ranks), RankGradients(ranks), SharedSamples(ranks)
            draw = torch.Generator().manual_seed(ranks.rank)
            for step in range(9 + ranks.rank):
                meter.update(torch.rand((), generator=draw), step)
                gradients.add(torch.rand(5, generator=draw))
                gradients.end_of_step()
                samples.update(torch.randint(99, (3, 2), generator=draw))
            return meter, gradients, samples

        return list(read_together(ranks, monitors()).values()) == [each.read() for each in monitors()]

    assert side_by_side(work, 3) == [True] * 3
