"""Four ways to in-batch negatives over a whole batch: error of the gradient, time and memory, on one batch.

    OMP_NUM_THREADS=1 python recipes/coupled_cost.py                  # two minutes on a core
    python recipes/coupled_cost.py --pairs 32 --windows 2             # a look

A bi-encoder (BERT, 3.3 million parameters) learns 128 pairs of 64 tokens by InfoNCE with a learnt temperature, in
float32, by micro-batches of 8 pairs:

    at once          one forward of all pairs; the reference
    stock            accumulation, the mean of their losses
    cached           CachedMultipleNegativesRankingLoss of sentence-transformers; its temperature is fixed
    features         as open_clip's --accum-freq: features of all micro-batches without gradient; then each micro-batch
                     again with gradient, and the loss of all, whose backward adds up
    exact            accumulation_windows(coupled_loss="exact")

Error: relative, of the encoder's gradient and of the temperature's, against "at once" in float64. Seconds: median of a
window. Memory: by how much the process grew, at most. The output folder gets results.json and table.md.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import shared
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from tqdm import tqdm
from transformers import BertConfig, BertModel

from hf_accum_fix import accumulation_windows

TOKENS, MICRO_BATCH, SCALE = 64, 8, 20.0
Batch = dict[str, Tensor]


class Encoder(nn.Module):
    """The mean of BERT's last states: one vector per text, as sentence-transformers hands it over."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertModel(BertConfig(vocab_size=8000, **sizes, **none), add_pooling_layer=False)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        states = self.bert(input_ids=features["input_ids"]).last_hidden_state
        return {"sentence_embedding": states.mean(dim=1)}


class BiEncoder(nn.Module):
    """An encoder for both texts of a pair, and InfoNCE."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.log_scale = Encoder(), nn.Parameter(torch.tensor(SCALE).log())

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        one, other = (self.encoder({"input_ids": batch[side]})["sentence_embedding"] for side in ("one", "other"))
        return one, other

    def of_vectors(self, one: Tensor, other: Tensor) -> Tensor:
        logits = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T * self.log_scale.exp()
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def forward(self, one: Tensor, other: Tensor) -> dict[str, Tensor]:
        return {"loss": self.of_vectors(*self.vectors({"one": one, "other": other}))}


def pairs_of(count: int) -> Batch:
    """Pairs that share half of their tokens."""
    draw = torch.Generator().manual_seed(1)
    one, other = (torch.randint(5, 8000, (count, TOKENS), generator=draw) for _ in range(2))
    other[:, : TOKENS // 2] = one[:, : TOKENS // 2]
    return {"one": one, "other": other}


def micro_batches(batch: Batch) -> list[Batch]:
    return [
        {side: its[at : at + MICRO_BATCH] for side, its in batch.items()}
        for at in range(0, len(batch["one"]), MICRO_BATCH)
    ]


# --- ways: each adds the gradient of a batch to ``.grad``, again and again; after each it yields ----------------------


def at_once(model: BiEncoder, batch: Batch, windows: int) -> Iterator[None]:
    for _ in range(windows):
        model(**batch)["loss"].backward()
        yield


def stock(model: BiEncoder, batch: Batch, windows: int) -> Iterator[None]:
    parts = micro_batches(batch)
    for _ in range(windows):
        for part in parts:
            (model(**part)["loss"] / len(parts)).backward()
        yield


def cached(model: BiEncoder, batch: Batch, windows: int) -> Iterator[None]:
    encoder = SentenceTransformer(modules=[model.encoder], device="cpu")
    loss = CachedMultipleNegativesRankingLoss(encoder, scale=SCALE, mini_batch_size=MICRO_BATCH)
    for _ in range(windows):
        features = [{"input_ids": batch[side]} for side in ("one", "other")]
        loss(features, torch.empty(0)).backward()
        yield


def features(model: BiEncoder, batch: Batch, windows: int) -> Iterator[None]:
    parts = micro_batches(batch)
    for _ in range(windows):
        with torch.no_grad():
            sides = [list(side) for side in zip(*map(model.vectors, parts), strict=True)]
        for at, part in enumerate(parts):
            both = [
                torch.cat([*side[:at], live, *side[at + 1 :]])
                for side, live in zip(sides, model.vectors(part), strict=True)
            ]
            model.of_vectors(*both).backward()
        yield


def exact(model: BiEncoder, batch: Batch, windows: int) -> Iterator[None]:
    parts = micro_batches(batch)
    options: dict[str, Any] = {"coupled_loss": "exact", "coupled": ("encoder",)}
    for window in accumulation_windows(parts * windows, steps=len(parts), **options):
        for part in window:
            with window.micro_batch(model):
                window.loss(model, part).backward()
        yield


WAYS: dict[str, Callable[[BiEncoder, Batch, int], Iterator[None]]] = {
    way.__name__.replace("_", " "): way for way in (at_once, stock, cached, features, exact)
}


def reference(count: int) -> dict[str, Tensor]:
    """The gradient of all pairs at once, in float64."""
    model = BiEncoder().double()
    model(**pairs_of(count))["loss"].backward()
    return gradients(model)


def gradients(model: BiEncoder) -> dict[str, Tensor]:
    """Of the encoder in a row, and of the temperature where there is one, in float64."""
    parts = {"encoder": [*model.encoder.parameters()], "temperature": [model.log_scale]}
    return {
        name: torch.cat([each.grad.double().flatten() for each in its if each.grad is not None])
        for name, its in parts.items()
        if its[0].grad is not None
    }


def measured(way: str, count: int, windows: int, wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    """Errors, seconds and memory of a way, in a process of its own."""
    model, batch = BiEncoder(), pairs_of(count)
    before, seconds, found, begun = most_memory(), list[float](), dict[str, Tensor](), time.perf_counter()
    for _ in WAYS[way](model, batch, windows):
        seconds.append(time.perf_counter() - begun)
        found = found or gradients(model)
        model.zero_grad()
        begun = time.perf_counter()
    errors = {name: float((each - wanted[name]).norm() / wanted[name].norm()) for name, each in found.items()}
    # The first window has what is done once.
    return {"way": way, **errors, "seconds": statistics.median(seconds[1:]), "MiB": most_memory() - before}


def most_memory() -> float:
    """Of this process so far [MiB], on Linux; getrusage's is its parent's, where that has more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = shared.Parser(__doc__, "coupled_cost")
    parser.add_argument("--pairs", type=int, default=128, help=f"of the batch, a multiple of {MICRO_BATCH}")
    parser.add_argument("--windows", type=int, default=5, help="times that each way runs it, two or more (default: 5)")
    options = parser.parse_args()
    if options.pairs < 2 * MICRO_BATCH or options.pairs % MICRO_BATCH or options.windows < 2:
        parser.error(f"got --pairs {options.pairs} --windows {options.windows}; expected two micro-batches of 8, and 2")
    wanted, rows = reference(options.pairs), []
    for way in tqdm(WAYS, unit="way"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measured, (way, options.pairs, options.windows, wanted)))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    head = ("way", "encoder's gradient off", "temperature's", "seconds a window", "memory [MiB]")
    fixed = [f"{row['temperature']:.1e}" if "temperature" in row else "fixed" for row in rows]
    table = shared.markdown(head, [
        (row["way"], f"{row['encoder']:.1e}", its, f"{row['seconds']:.2f}", f"{row['MiB']:.0f}")
        for row, its in zip(rows, fixed, strict=True)
    ])  # fmt: skip
    (options.output / "table.md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
