"""Simulated trainings on several ranks, healthy and faulty, in numpy: what each monitor would have measured.

A network of one hidden layer learns overlapping clouds of points, ten steps a log, several runs side by side.
`monitor_audit.py` counts the monitors' alarms on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
from numpy import ndarray

from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.rank_gradients import RankGradientsReading

POINTS, HIDDEN, CLASSES, BATCH, LOG_EVERY = 16, 24, 5, 16, 10
#: Steps of a learning rate that restarts, and of an epoch of sorted data.
_RESTART, _EPOCH = 160, 64


@dataclass(frozen=True)
class Scenario:
    """One case: a run that is simulated."""

    ranks: int = 4
    persists: int = 1  # micro-batches of a rank over which its difficulty stays the same
    difficulty: float = 0.0  # deviation of the logarithm of the points' noise, redrawn when it no longer persists
    batch: int = BATCH  # points of a micro-batch, 16 at most
    ragged: bool = False  # micro-batches of 1 to 16 points
    weights: bool = False  # every point counts as so many items, lognormal
    heavy_tails: bool = False  # some points far away
    schedule: str = ""  # "warm-up" over 500 steps, "restarts" every 160, "stable, then decay", "" steady
    grows: bool = False  # the batch is 4 points up to a third of the run, 8 up to two thirds
    clip: float = math.inf  # norm that gradients are clipped to
    hard: float = 0.0  # share of micro-batches that are five times as noisy
    curriculum: str = ""  # noise grows over the run ("noise"), or so do the classes, from two on ("classes")
    order: str = ""  # of sorted data: "dealt" to the ranks in turns, a "shard" of its own for each, "" shuffled
    samples: int = 0  # points of a rank's fixed shard; 0 draws new ones for ever
    epoch: int = 0  # steps of an epoch, the last of which has 1 or 2 points a rank; 0: none
    domain: int = 0  # micro-batches over which a rank sees two classes alone; 0: none
    experts: int = 1  # hidden layers, of which each point goes through one
    dropout: float = 0.0  # share of the hidden units that are dropped
    rewards: bool = False  # a policy gradient: actions are drawn and rewarded, the mean reward is the baseline
    scale: float = 1.0  # factor of the loss
    fault: str = ""  # of the last rank
    amount: float = 0.0  # size of the fault
    since: int = 0  # logs before the fault

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step, of so many in all."""
        part = {
            "": 1.0,
            "warm-up": min(1.0, (step + 1) / 500),
            "restarts": 0.5 + 0.5 * math.cos(math.pi * (step % _RESTART) / _RESTART),
            "stable, then decay": min(1.0, (step + 1) / 100, 5 * (1 - step / steps)),
        }
        return 0.2 * part[self.schedule]


HEALTHY = {
    "plain, 2 ranks": Scenario(2),
    "plain, 4 ranks": Scenario(4),
    "plain, 16 ranks": Scenario(16),
    "ragged, 2 ranks": Scenario(2, ragged=True),
    "ragged, 4 ranks": Scenario(4, ragged=True),
    "heavy tails": Scenario(4, heavy_tails=True, difficulty=0.3),
    "lognormal weights": Scenario(4, weights=True),
    "batch of 2": Scenario(4, batch=2),
    "warm-up": Scenario(4, schedule="warm-up"),
    "restarts of 16 logs": Scenario(4, schedule="restarts"),
    "warm-up, stable, decay": Scenario(4, schedule="stable, then decay"),
    "a batch that grows": Scenario(4, grows=True),
    "clipping": Scenario(4, clip=0.3),
    "hard batches": Scenario(4, hard=0.05),
    "curriculum": Scenario(4, curriculum="noise"),
    "curriculum of classes": Scenario(4, curriculum="classes"),
    "overfitting": Scenario(4, samples=2000),
    "mixture of 4 experts": Scenario(4, experts=4),
    "dropout": Scenario(4, dropout=0.3),
    "rewards": Scenario(4, rewards=True),
    "rewards, 2 ranks": Scenario(2, rewards=True),
    "loss x 1e6": Scenario(4, scale=1e6),
    "loss x 1e-7": Scenario(4, scale=1e-7),
    "sorted data, dealt in turns": Scenario(4, order="dealt"),
    "sorted data, contiguous shards": Scenario(4, order="shard"),
    "difficulty persists for 3 micro-batches": Scenario(4, persists=3, difficulty=0.3),
    "for 10, mild": Scenario(4, persists=10, difficulty=0.15),
    "for 10, mild, 2 ranks": Scenario(2, persists=10, difficulty=0.15),
    "for 20, strong": Scenario(4, persists=20, difficulty=0.4),
    "for 20, strong, 2 ranks": Scenario(2, persists=20, difficulty=0.4),
    "for 20, strong, 16 ranks": Scenario(16, persists=20, difficulty=0.4),
    "for 100, strong": Scenario(4, persists=100, difficulty=0.4),
    "for 100, strong, 2 ranks": Scenario(2, persists=100, difficulty=0.4),
    "fixed shards, memorised": Scenario(4, samples=24),
    "fixed shards, memorised, 2 ranks": Scenario(2, samples=24),
    "1 to 2 of 16 points at the end of an epoch": Scenario(4, epoch=32),
    "domains that persist for 30": Scenario(4, domain=30),
    "domains that persist for 30, 2 ranks": Scenario(2, domain=30),
}
PLANTED = {
    "shuffled labels on a rank": Scenario(fault="labels", amount=1.0),
    "10 % label noise on a rank": Scenario(fault="labels", amount=0.1),
    "2 % label noise on a rank": Scenario(fault="labels", amount=0.02),
    "a rank's gradient x2": Scenario(fault="gradient", amount=2.0),
    "a rank's gradient x1.1": Scenario(fault="gradient", amount=1.1),
    "a rank's gradient zero": Scenario(fault="gradient", amount=0.0),
    "a rank's gradient zero, 16 ranks": Scenario(16, fault="gradient", amount=0.0),
    "exact duplicates": Scenario(fault="duplicates"),
    "shuffled from log 60": Scenario(fault="labels", amount=1.0, since=60),
    "a quarter shuffled from log 60": Scenario(fault="labels", amount=0.25, since=60),
    "inputs x1.5 from log 60": Scenario(fault="inputs", amount=1.5, since=60),
    "gradient x1.5 from log 60": Scenario(fault="gradient", amount=1.5, since=60),
    "gradient zero from log 60": Scenario(fault="gradient", amount=0.0, since=60),
    "loss nan from log 60": Scenario(fault="nan", since=60),
    "duplicates from log 60": Scenario(fault="duplicates", since=60),
} | {
    f"{name}, 2 ranks{f', from log {since}' if since else ''}": Scenario(2, fault=fault, amount=amount, since=since)
    for since in (0, 5, 20)
    for name, fault, amount in (
        ("shuffled labels", "labels", 1.0),
        ("a quarter shuffled", "labels", 0.25),
        ("inputs x1.5", "inputs", 1.5),
        ("gradient x1.5", "gradient", 1.5),
    )
}


@dataclass(frozen=True)
class Log:
    """What the monitors of one run read at one log."""

    loss: LossReading
    gradients: RankGradientsReading
    norms: list[tuple[float, float]]  # of every step's averaged gradient, with the step's items
    rate: float  # learning rate
    epoch: float = math.nan  # epochs so far of sorted data; nan: there are none


def logs(scenario: Scenario, runs: int, count: int, seed: int) -> Iterator[list[Log]]:
    """Log after log, for each of the runs."""
    its, draw = scenario, numpy.random.default_rng(seed)
    lead = (runs, its.ranks)
    data = _Data(its, draw, lead, count * LOG_EVERY)
    # [runs, 1, experts, points, hidden] and [runs, 1, experts, hidden, classes]
    first = draw.normal(size=(runs, 1, its.experts, POINTS, HIDDEN)) / math.sqrt(POINTS)
    second = draw.normal(size=(runs, 1, its.experts, HIDDEN, CLASSES)) / math.sqrt(HIDDEN)
    router = draw.normal(size=(runs, 1, POINTS, its.experts))
    baseline = numpy.full((runs, 1, 1), 1 / CLASSES)
    for log in range(count):
        table = numpy.zeros((*lead, 3, 3))
        norms, averaged = numpy.zeros((*lead, LOG_EVERY)), numpy.zeros((runs, LOG_EVERY))
        counts = numpy.zeros((runs, LOG_EVERY))
        faulty = its.fault if log >= its.since else ""
        rate = its.rate(log * LOG_EVERY, count * LOG_EVERY)
        for place in range(LOG_EVERY):
            step = log * LOG_EVERY + place
            labels, points, weights = data.micro_batch(step, faulty)
            items = weights.sum(-1)
            counts[:, place] = items.sum(1)
            chosen = numpy.eye(its.experts)[(points @ router).argmax(-1)]  # [runs, ranks, batch, experts]
            inner = numpy.tanh(points[:, :, None] @ first)  # [runs, ranks, experts, batch, hidden]
            kept = numpy.moveaxis(chosen, -1, 2)[..., None] / (1 - its.dropout)
            if its.dropout:
                kept = kept * (draw.random(inner.shape) >= its.dropout)
            logits = (inner * kept @ second).sum(2)
            likely = numpy.exp(logits - logits.max(-1, keepdims=True))
            likely /= likely.sum(-1, keepdims=True)
            wanted, worth = numpy.eye(CLASSES)[labels], numpy.ones(labels.shape)
            if its.rewards:
                action = (likely.cumsum(-1) < draw.random((*labels.shape, 1))).sum(-1).clip(max=CLASSES - 1)
                reward = (action == labels) + 0.3 * draw.normal(size=labels.shape)
                worth = reward - baseline
                baseline = 0.99 * baseline + 0.01 * reward.mean((1, 2), keepdims=True)
                wanted = numpy.eye(CLASSES)[action]
            worth = its.scale * worth
            of_point = -numpy.log((likely * wanted).sum(-1) + 1e-12) * worth
            loss = (of_point * weights).sum(-1) / items
            if faulty == "nan":
                loss[:, -1] = math.nan
            back = ((likely - wanted) * (worth * weights / items[..., None])[..., None])[:, :, None]
            of_second = (inner * kept).swapaxes(-1, -2) @ back
            hidden = (back @ second.swapaxes(-1, -2)) * kept * (1 - inner**2)
            of_first = points[:, :, None].swapaxes(-1, -2) @ hidden
            if faulty == "gradient":
                of_first[:, -1] *= its.amount
                of_second[:, -1] *= its.amount
            norms[..., place] = _norm(of_first, of_second)
            mean_first, mean_second = of_first.mean(1, keepdims=True), of_second.mean(1, keepdims=True)
            norm = _norm(mean_first, mean_second)[:, 0]
            averaged[:, place] = norm
            pace = its.rate(step, count * LOG_EVERY) / its.scale * numpy.minimum(1.0, its.clip / norm)
            pace = pace[:, None, None, None, None]
            first, second = first - pace * mean_first, second - pace * mean_second
            row = numpy.stack([loss * items, items, numpy.ones(lead)], -1)
            table += row[..., :, None] * row[..., None, :]
        yield [
            Log(
                LossReading(tuple(_moments(of_rank) for of_rank in table[run].tolist())),
                RankGradientsReading(tuple(map(tuple, norms[run].tolist()))),
                list(zip(averaged[run].tolist(), counts[run].tolist(), strict=True)),
                rate,
                (log + 1) * LOG_EVERY / _EPOCH if its.order else math.nan,
            )
            for run in range(runs)
        ]


class _Data:
    """Micro-batches of every run and rank."""

    def __init__(self, scenario: Scenario, draw: numpy.random.Generator, lead: tuple[int, int], steps: int) -> None:
        self._its, self._draw, self._lead, self._steps = scenario, draw, lead, steps
        self._centres = draw.normal(size=(lead[0], 1, CLASSES, POINTS))
        self._level = scenario.difficulty * draw.normal(size=lead)
        self._domain = draw.integers(CLASSES, size=lead)
        shard = (*lead, scenario.samples)
        self._shard_labels = draw.integers(CLASSES, size=shard)
        self._shard = self._points(self._shard_labels, 1.5 * draw.normal(size=(*shard, POINTS)))

    def micro_batch(self, step: int, fault: str) -> tuple[ndarray, ndarray, ndarray]:
        """Labels and weights [runs, ranks, batch], and points [runs, ranks, batch, points]."""
        its, draw, runs = self._its, self._draw, self._lead[0]
        labels = self._labels(step)
        size = (*labels.shape, POINTS)
        noise = draw.standard_t(3, size=size) if its.heavy_tails else draw.normal(size=size)
        points = self._points(labels, self._scale(step)[..., None, None] * noise)
        if its.samples:
            chosen = draw.integers(its.samples, size=labels.shape)
            labels = numpy.take_along_axis(self._shard_labels, chosen, -1)
            points = numpy.take_along_axis(self._shard, chosen[..., None], -2)
        if fault == "duplicates":
            labels[:, -1], points[:, -1] = labels[:, 0], points[:, 0]
        if fault == "inputs":
            points[:, -1] *= its.amount
        if fault == "labels":
            wrong = draw.random((runs, BATCH)) < its.amount
            labels[:, -1] = numpy.where(wrong, draw.integers(CLASSES, size=(runs, BATCH)), labels[:, -1])
        return labels, points, self._weights(step)

    def _labels(self, step: int) -> ndarray:
        its, draw = self._its, self._draw
        size = (*self._lead, BATCH)
        if its.domain:
            moved = draw.random(self._lead) < 1 / its.domain
            self._domain = numpy.where(moved, draw.integers(CLASSES, size=self._lead), self._domain)
            return (self._domain[..., None] + draw.integers(2, size=size)) % CLASSES
        classes = 2 + int((CLASSES - 2) * step / self._steps + 0.5) if its.curriculum == "classes" else CLASSES
        return draw.integers(classes, size=size)

    def _scale(self, step: int) -> ndarray:
        its, draw = self._its, self._draw
        redrawn = draw.random(self._lead) < 1 / its.persists
        self._level = numpy.where(redrawn, its.difficulty * draw.normal(size=self._lead), self._level)
        scale = 1.5 * numpy.exp(self._level)
        if its.curriculum == "noise":
            scale = scale * (0.5 + step / self._steps)
        if its.order:
            ranks = self._lead[1] if its.order == "shard" else 1
            scale = scale * (0.5 + (numpy.arange(self._lead[1]) % ranks + step % _EPOCH / _EPOCH) / ranks)
        if its.hard:
            scale = scale * numpy.where(draw.random(self._lead) < its.hard, 5.0, 1.0)
        return scale

    def _weights(self, step: int) -> ndarray:
        its, draw, (runs, ranks) = self._its, self._draw, self._lead
        batch = 4 * 2 ** (3 * step // self._steps) if its.grows else its.batch
        weights = (numpy.arange(BATCH) < batch) * numpy.ones((runs, ranks, 1))
        if its.weights:
            weights = weights * draw.lognormal(size=weights.shape)
        if its.ragged:
            weights = (numpy.arange(BATCH) < draw.integers(1, BATCH + 1, size=self._lead)[..., None]).astype(float)
        if its.epoch and step % its.epoch == its.epoch - 1:
            weights = (numpy.arange(BATCH) < draw.integers(1, 3, size=(runs, 1, 1))) * numpy.ones((runs, ranks, 1))
        return weights

    def _points(self, labels: ndarray, noise: ndarray) -> ndarray:
        centres = numpy.broadcast_to(self._centres, (*self._lead, CLASSES, POINTS))
        return numpy.take_along_axis(centres, labels[..., None], -2) + noise


def _norm(*gradients: ndarray) -> ndarray:
    """Of every run and rank."""
    return numpy.sqrt(sum((each**2).sum((2, 3, 4)) for each in gradients))


def _moments(table: list[list[float]]) -> Moments:
    return Moments(table[2][2], table[1][2], table[0][2], table[0][0], table[0][1], table[1][1])
