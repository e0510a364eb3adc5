"""Ragged samples of every kind: eight each, the same every time."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.heads.head import VOCABULARY, Batch, Sample, collate

LENGTHS = (5, 17, 9, 3, 22, 11, 6, 14)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(
    *, masked: Callable[[int, int], int] | None = None, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[Sample]:
    """Token samples; ``masked(index, length)`` gives how many leading labels are a masked prompt."""
    g = generator(seed)
    prompt = masked or (lambda index, length: (index * 3) % (length - 1) if index % 3 else 1)
    samples = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4, VOCABULARY, (length,), generator=g)
        labels = ids.clone()
        labels[: prompt(index, length)] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def with_labels(
    labels: Callable[[int, Sample, torch.Generator], Tensor], base: Sequence[Sample] | None = None
) -> list[Sample]:
    g = generator(1)
    return [{**sample, "labels": labels(index, sample, g)} for index, sample in enumerate(base or text())]


def without_targets(samples: Sequence[Sample], rows: Container[int] | None = None) -> list[Sample]:
    """Copies whose labels are no targets: of these rows, or of all."""
    blank = [{**sample, "labels": _no_targets(sample["labels"])} for sample in samples]
    return [blank[i] if rows is None or i in rows else dict(sample) for i, sample in enumerate(samples)]


def _no_targets(labels: Any) -> Any:
    if isinstance(labels, dict):
        return {key: value[:0] for key, value in labels.items()}
    return torch.full_like(labels, -100)


def alike() -> list[Sample]:
    """Text of one length, for models whose loss of a row moves with the padding beside it."""
    return text(lengths=(12,) * 8)


def first_is_target(index: int, length: int) -> int:
    return 0


def masked_tokens(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    labels = sample["input_ids"].clone()
    labels[torch.rand(len(labels), generator=g) < 0.6] = -100
    labels[index % len(labels)] = 7
    return labels


def token_classes(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    labels = torch.randint(0, 4, sample["input_ids"].shape, generator=g)
    labels[index % 2 :: 3] = -100
    labels[-1] = 1
    return labels


def one_class(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    return torch.tensor(index % 3)


def right_or_wrong(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    return torch.tensor(index % 2)


def some_unlabelled(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    return torch.tensor(-100 if index in (1, 4, 6) else index % 3)


def choices() -> list[Sample]:
    """Two texts each, of which one is right."""
    samples = []
    for index, sample in enumerate(text()):
        ids = torch.stack([sample["input_ids"], sample["input_ids"].flip(0)])
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(index % 2)})
    return samples


def _with_padded(samples: Sequence[Sample], **fills: int) -> Batch:
    """Several texts a sample, padded to one width."""
    width = max(sample["input_ids"].shape[1] for sample in samples)

    def padded(key: str, value: Tensor) -> Tensor:
        return F.pad(value, (0, width - value.shape[1]), value=fills[key]) if key in fills else value

    return collate([{key: padded(key, value) for key, value in sample.items()} for sample in samples])


def with_padded_choices(samples: Sequence[Sample]) -> Batch:
    return _with_padded(samples, input_ids=0, attention_mask=0)


def with_padded_texts(samples: Sequence[Sample]) -> Batch:
    return _with_padded(samples, input_ids=0, labels=-100)


def with_end(samples: Sequence[Sample], end: int = 2) -> list[Sample]:
    """The same texts with a token at their end, which sequence to sequence models classify by."""
    ended = []
    for sample in samples:
        ids = torch.cat([sample["input_ids"], torch.tensor([end])])
        ended.append({**sample, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return ended


def with_boxes(samples: Sequence[Sample]) -> list[Sample]:
    """The place of every token on its page."""

    def box(length: int) -> Tensor:
        at = torch.arange(length)
        return torch.stack([at, at, at + 5, at + 7], dim=-1)

    return [{**sample, "bbox": box(len(sample["input_ids"]))} for sample in samples]


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def images(
    labels: Callable[[int, torch.Generator], Any], size: int = 32, dtype: torch.dtype = torch.float64
) -> list[Sample]:
    g = generator(2)
    return [{"pixel_values": normal(g, 3, size, size).to(dtype), "labels": labels(i, g)} for i in range(8)]


def segments(index: int, g: torch.Generator) -> Tensor:
    labels = torch.randint(0, 4, (32, 32), generator=g)
    labels[: 4 * index] = 255
    return labels


def videos(key: str = "pixel_values") -> list[Sample]:
    g = generator(2)
    return [{key: normal(g, 2, 3, 16, 16), "labels": torch.tensor(index % 3)} for index in range(8)]


def heard(samples: Sequence[Sample]) -> list[Sample]:
    """The labels of texts, beside a spectrogram of 8 bins and 16 steps."""
    g = generator(5)
    return [{"input_features": normal(g, 8, 16), "labels": sample["labels"]} for sample in samples]


def speech() -> list[Sample]:
    g = generator(5)
    return [
        {"input_values": normal(g, 400), "labels": torch.randint(1, 12, (2 + index,), generator=g)}
        for index in range(8)
    ]


def replaced_tokens(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    return (torch.rand(len(sample["input_ids"]), generator=g) < 0.3).long()


def masked_images() -> list[Sample]:
    g = generator(6)
    return [
        {"pixel_values": normal(g, 3, 32, 32), "bool_masked_pos": torch.rand(16, generator=g) < 0.2 + 0.08 * index}
        for index in range(8)
    ]


def series() -> list[Sample]:
    g = generator(7)
    samples = []
    for index in range(8):
        observed = torch.ones(4, dtype=torch.float64)
        observed[4 - index % 4 :] = 0.0
        samples.append(
            {
                "past_values": normal(g, 8),
                "past_time_features": normal(g, 8, 1),
                "past_observed_mask": torch.ones(8, dtype=torch.float64),
                "future_values": normal(g, 4),
                "future_time_features": normal(g, 4, 1),
                "future_observed_mask": observed,
            }
        )
    return samples


def without(key: str, samples: Sequence[Sample]) -> list[Sample]:
    return [{name: value for name, value in sample.items() if name != key} for sample in samples]


def answers(outside: int = 2) -> list[Sample]:
    samples = []
    for index, sample in enumerate(without("labels", alike())):
        start, end = (99, 99) if index % 4 == outside else (index % 5, 5 + index % 6)
        samples.append({**sample, "start_positions": torch.tensor(start), "end_positions": torch.tensor(end)})
    return samples


def pairs() -> list[Sample]:
    g = generator(8)
    return [{**sample, "pixel_values": normal(g, 3, 16, 16)} for sample in without("labels", text(lengths=(6,) * 8))]


def with_return_loss(samples: Sequence[Sample]) -> Batch:
    return {**collate(samples), "return_loss": True}


def with_shift_labels(samples: Sequence[Sample]) -> Batch:
    batch = collate(samples)
    batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def boxes(index: int, g: torch.Generator) -> dict[str, Tensor]:
    count = 1 + index % 3
    return {
        "class_labels": torch.randint(0, 3, (count,), generator=g),
        "boxes": 0.25 + 0.5 * torch.rand(count, 4, generator=g),
    }


def next_sentence(samples: Sequence[Sample]) -> list[Sample]:
    return [{**sample, "next_sentence_label": torch.tensor(index % 2)} for index, sample in enumerate(samples)]


def double() -> list[Sample]:
    """Choices of which one is right, each of them a text to be predicted."""
    samples = []
    for sample in choices():
        ids = sample["input_ids"]
        last = torch.full((2,), ids.shape[1] - 1)
        samples.append({"input_ids": ids, "labels": ids.clone(), "mc_labels": sample["labels"], "mc_token_ids": last})
    return samples
