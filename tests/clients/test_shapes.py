"""Other libraries' trainers, rebuilt small: what is special about each, on tiny models beside a float64 full batch.

The libraries are named where they were met; `recipes/README.md` holds what the real ones did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_accum_fix import observations
from tests.numerics.heads import Batch, Head, Sample, before
from tests.numerics.heads.samples import text
from tests.trainers.custom import CLASSES, DROPS, MLM
from tests.trainers.runs import Case, Ordered, Run, full_batch, full_batch_loss, run

EVERYDAY = (2, 4)
#: What stock is off by is asserted for the newest release: older ones divide by the steps where that one does not.
OTHER_STOCK = before("5.23.0")


def at(*chosen: tuple[int, int]) -> Any:
    """Splits of eight samples, of which one is for everyday."""
    marked = [pytest.param(each, marks=() if each == EVERYDAY else pytest.mark.slow) for each in chosen]
    return pytest.mark.parametrize("split", marked, ids=lambda split: f"{split[0]}x{split[1]}")


splits = at((2, 4), (3, 3))


def assert_exact(case: Case, split: tuple[int, int], *, stock_wrong: bool = True) -> None:
    """Stock is off where it is today, and ours takes the full batch's step, logs its loss, and says nothing."""
    wanted = full_batch(case)
    stock, ours = run(case, split, "stock"), run(case, split, "apply")
    off = stock.error(wanted)
    # A gradient of stock's that is not finite is off, too.
    assert OTHER_STOCK or (not off < 1e-2) is stock_wrong
    assert ours.error(wanted) <= case.floor
    assert_logged(ours, case)
    assert ours.exact and not ours.warned


def assert_logged(ours: Run, case: Case) -> None:
    # Before 5.0 the log is rounded to four digits.
    assert ours.logged_loss == pytest.approx(full_batch_loss(case), rel=1e-6, abs=6e-5 if before("5.0.0") else 0.0)


# --- a training_step of a trainer's own -------------------------------------------------------------------------------


class SkippingStep(Ordered):
    """GLiClass's: no division at all, columns taken out on the way, and every error caught."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.train()
        try:
            inputs.pop("words", None)
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach() / self.args.gradient_accumulation_steps
        except Exception:
            model.zero_grad(set_to_none=True)
            return torch.tensor(0.0, requires_grad=True)


def with_words(head: Head) -> Head:
    """With a column that the model does not take."""
    return replace(head, collate=lambda samples: {**head.batch(samples), "words": ["a"] * len(samples)})


@at((8, 1), (2, 4))
def test_a_step_of_its_own_is_stocks_to_the_bit_and_said(split: tuple[int, int]) -> None:
    case = Case("gliclass-drops", with_words(DROPS), SkippingStep)
    stock, ours = run(case, split, "stock"), run(case, split, "apply")
    assert ours.same_bits(stock)
    assert not ours.exact and len(ours.warned) == (split[1] > 1)


# --- masks of a time series -------------------------------------------------------------------------------------------


class Series(nn.Module):
    """granite-tsfm's: the values that were observed, selected by their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(6, 4).double(), PretrainedConfig()

    def forward(
        self, past_values: Tensor, future_values: Tensor, future_observed_mask: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        outputs, observed = self.layer(past_values), future_observed_mask.bool()
        return {"loss": F.mse_loss(outputs[observed], future_values[observed]), "outputs": outputs}


def series(dtype: torch.dtype) -> list[Sample]:
    """Ragged, two of them without any value."""
    g = torch.Generator().manual_seed(0)
    found = []
    for place in range(8):
        observed = (torch.rand(4, generator=g) > 0.4) & (place not in (2, 5))
        past, future = (torch.randn(size, generator=g, dtype=torch.float64) for size in (6, 4))
        found.append({"past_values": past, "future_values": future, "future_observed_mask": observed.to(dtype)})
    return found


def stacked(samples: Sequence[Sample]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@splits
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_of_every_type(dtype: torch.dtype, split: tuple[int, int]) -> None:
    """Micro-batches without any observed value among them."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Series()

    head = replace(CLASSES, build=build, samples=series(dtype), collate=stacked)
    assert_exact(Case("granite", head, Ordered, loss=lambda model, batch: model(**batch)["loss"]), split)


# --- targets that are padding -----------------------------------------------------------------------------------------


def padding_as_targets(samples: Sequence[Sample]) -> Batch:
    """be-great's collator: labels are the padded tokens."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(sample["input_ids"]) for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


@at((8, 1), (2, 4))
def test_padding_among_the_targets_is_said_once(split: tuple[int, int]) -> None:
    warnings = int(split[1] > 1)
    head = replace(DROPS, samples=[{"input_ids": sample["input_ids"]} for sample in text()], collate=padding_as_targets)
    case = Case("great", head, Ordered)
    ours = run(case, split, "apply")
    assert (ours.error(full_batch(case)) > 0.1) is bool(warnings)
    assert not ours.exact and len(ours.warned) == warnings
    assert all("padding is among its targets" in each for each in ours.warned)


# --- rows in groups ---------------------------------------------------------------------------------------------------


class Reranker(nn.Module):
    """FlagEmbedding's: a query's passages are rows beside one another, told apart by a batch size of its own."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.model, self.queries = CLASSES.build(), queries
        self.config = self.model.config

    def forward(self, pair: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scores = self.model(**pair).logits[:, 0]
        grouped = scores.view(self.queries, -1)
        return {"loss": F.cross_entropy(grouped, torch.zeros(self.queries, dtype=torch.long)), "scores": scores}


def passages() -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(1, 40, (3, 5 + place % 3), generator=g)} for place in range(8)]


def of_queries(samples: Sequence[Sample]) -> Batch:
    width = max(sample["ids"].shape[1] for sample in samples)
    ids = torch.cat([F.pad(sample["ids"], (0, width - sample["ids"].shape[1])) for sample in samples])
    return {"pair": {"input_ids": ids, "attention_mask": (ids != 0).long()}}  # type: ignore[dict-item]


def rerank(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model.model(**batch["pair"]).logits[:, 0].view(-1, 3), torch.zeros(8, dtype=torch.long))


@at((2, 4), (1, 8))
def test_rows_in_groups_are_trained_right(split: tuple[int, int]) -> None:
    """It is not called exact: the model takes one number of queries alone, so that nothing can be taken apart."""
    head = replace(CLASSES, build=lambda: Reranker(split[0]), samples=passages(), collate=of_queries)
    case = Case("reranker", head, Ordered, loss=rerank)
    ours = run(case, split, "apply")
    assert ours.error(full_batch(case)) <= case.floor
    assert not ours.exact and len(ours.warned) == 1


class Embedder(nn.Module):
    """FlagEmbedding's: one query a sample, with several passages and teacher scores, and negatives of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CLASSES.build()
        self.config = self.model.config

    def forward(
        self, queries: Mapping[str, Tensor], passages: Mapping[str, Tensor], teacher_scores: Sequence[float]
    ) -> dict[str, Tensor]:
        asked, given = (self.model(**inputs).logits for inputs in (queries, passages))
        scores = (given.view(len(asked), -1, given.shape[-1]) * asked[:, None]).sum(-1)
        taught = torch.tensor(teacher_scores, dtype=scores.dtype).view(len(asked), -1).softmax(-1)
        distilled = -(scores.log_softmax(-1) * taught).sum(-1).mean()
        return {"loss": distilled + F.cross_entropy(scores, torch.zeros(len(asked), dtype=torch.long))}


def of_questions(samples: Sequence[Sample]) -> Batch:
    passages = of_queries(samples)["pair"]
    scores = [0.1 * float(row.sum() % 7) for sample in samples for row in sample["ids"]]
    asked = {key: value[::3] for key, value in passages.items()}  # type: ignore[attr-defined]
    return {"queries": asked, "passages": passages, "teacher_scores": scores}  # type: ignore[dict-item]


@at((2, 4), (1, 8))
def test_several_rows_of_some_inputs_for_each_sample(split: tuple[int, int]) -> None:
    head = replace(CLASSES, build=Embedder, samples=passages(), collate=of_questions)
    assert_exact(
        Case("embedder", head, Ordered, loss=lambda model, batch: model(**batch)["loss"]), split, stock_wrong=False
    )


# --- graphs, whose rows are nodes -------------------------------------------------------------------------------------


class Graphs(nn.Module):
    """PyTorch Geometric's tutorial: the mean over the nodes that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor, train_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        hidden = torch.tanh(hidden.index_add(0, edge_index[1], hidden[edge_index[0]]))
        logits = self.last(hidden)
        return {"loss": F.cross_entropy(logits[train_mask], y[train_mask]), "logits": logits}


def graphs() -> list[Sample]:
    g, found = torch.Generator().manual_seed(0), []
    for nodes in (5, 8, 6, 11, 7, 9, 5, 10):
        picked = torch.rand(nodes, generator=g) < 0.6
        picked[0] = True
        found.append(
            {
                "x": torch.randn(nodes, 3, generator=g, dtype=torch.float64),
                "edge_index": torch.randint(0, nodes, (2, 2 * nodes), generator=g),
                "y": torch.randint(0, 4, (nodes,), generator=g),
                "train_mask": picked,
            }
        )
    return found


def as_one_graph(samples: Sequence[Sample]) -> Batch:
    """Graphs beside one another; their edges count on."""
    starts = [sum(len(each["x"]) for each in samples[:place]) for place in range(len(samples))]
    edges = [each["edge_index"] + start for each, start in zip(samples, starts, strict=True)]
    joined = {key: torch.cat([each[key] for each in samples]) for key in ("x", "y", "train_mask")}
    return {**joined, "edge_index": torch.cat(edges, 1)}


@at((2, 4), (1, 8))
def test_graphs_whose_rows_are_nodes(split: tuple[int, int]) -> None:
    head = replace(CLASSES, build=Graphs, samples=graphs(), collate=as_one_graph)
    case = Case("graphs", head, Ordered, loss=lambda model, batch: model(**batch)["loss"])
    assert_exact(case, split)
    assert observations.recorded()[-1]["checked"].startswith("not: ")


# --- a loader without a collate_fn ------------------------------------------------------------------------------------


class Batches:
    """tasknet's: it collates by itself."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


def batches_of(samples: Sequence[Sample], size: int) -> list[Batch]:
    return [MLM.batch(samples[start : start + size]) for start in range(0, len(samples), size)]


class LoadsBatches(Ordered):
    def get_train_dataloader(self) -> Any:
        return Batches(batches_of(self.train_dataset, self.args.per_device_train_batch_size))


@splits
def test_a_loader_that_collates_nothing(split: tuple[int, int]) -> None:
    assert_exact(Case("loads", MLM, LoadsBatches), split)
