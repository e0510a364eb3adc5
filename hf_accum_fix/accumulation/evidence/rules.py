"""Ways of counting the items of a batch, and whether losses compose by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.evidence.forwards import WatchedLoss
from hf_accum_fix.accumulation.window import Items


def composing_rules(
    batches: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    rules: Sequence[Items] | None = None,
    tolerance: float = 1e-5,
) -> tuple[Items, ...]:
    """The rules by which the loss of a batch is the mean of its two parts' losses, positions of text among them.

    Args:
        batches: the batch and its parts.
        losses: of the three.
        rules: the ways of counting; None: all that the inputs offer.
        tolerance: relative, of two losses that are the same.
    """
    positions = [
        Items((key,), ignore_index=None)
        for key, value in batches[0].items()
        if isinstance(value, Tensor) and value.ndim > 1 and not value.is_floating_point()
    ]
    every = dict.fromkeys((*(ways_of_counting(batches[0], ()) if rules is None else rules), *positions))
    return told_apart(
        [rule for rule in every if composes(rule, batches, losses, tolerance)], batches, losses, tolerance
    )


def counted_alike(rules: Sequence[Items], window: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every rule counts the same shares of a window, so that it does not matter which is the right one."""
    return in_proportion([[count_by(rule, batch) for batch in window] for rule in rules])


def in_proportion(counts: Sequence[Sequence[float]]) -> bool:
    """Whether every row of counts has the same shares of its sum."""
    shares = [[count / (sum(each) or 1.0) for count in each] for each in counts]
    return all(abs(a - b) <= 1e-9 for each in shares for a, b in zip(each, shares[0], strict=True))


def nearly_alike(losses: Sequence[float], tolerance: float) -> bool:
    """Whether the losses of a batch and its parts are too near to tell to 1 % by what they are weighed."""
    return 0.01 * (max(losses) - min(losses)) <= tolerance * max(map(abs, losses))


def told_apart(
    rules: Sequence[Items], batches: Sequence[Mapping[str, Any]], losses: Sequence[float], tolerance: float
) -> tuple[Items, ...]:
    """The rules by which losses compose, if that tells them from others: two parts that are alike fit any rule."""
    if nearly_alike(losses, tolerance):
        return ()
    shares = [count_by(rule, batches[1]) / count_by(rule, batches[0]) for rule in rules]
    return tuple(rules) if all(abs(share - shares[0]) <= 1e-9 for share in shares) else ()


def odds_of(rule: Items, batches: Sequence[Mapping[str, Any]]) -> int:
    """How many shares of a batch its first part might have had as easily as the one that a rule counts.

    A loss weighed by something else has the same share by chance, and one sample of two far sooner than 5 labels of 17.
    """
    part, whole = (round(count_by(rule, batch)) for batch in (batches[1], batches[0]))
    return Fraction(part, whole).denominator if whole else 1


def weighs_up(losses: Sequence[float], counts: Sequence[float], tolerance: float) -> bool:
    """Whether  L(AB) n(AB) = L(A) n(A) + L(B) n(B)  for counts given."""
    if 0.0 in counts:
        return False
    error = losses[0] - (losses[1] * counts[1] + losses[2] * counts[2]) / counts[0]
    return abs(error) <= tolerance * max(abs(loss) for loss in losses)


def ways_of_counting(inputs: Mapping[str, Any], calls: Sequence[WatchedLoss]) -> Iterator[Items]:
    """Every way of counting that the inputs offer, the more telling first."""
    ignored = list(dict.fromkeys([c.ignore_index for c in calls if c.ignore_index is not None] + [-100]))
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim > 0}
    tokens = tensors.get("input_ids")
    if "start_positions" in tensors and tokens is not None and tokens.ndim > 1 and tokens.shape[1] in ignored:
        yield Items(("start_positions", "end_positions"), ignore_index=None, width_of="input_ids")
    labels = [key for key in tensors if "label" in key]
    labels.sort(key=lambda key: (key != "shift_labels", key != "labels"))
    for key in labels:
        value = tensors[key]
        if value.is_floating_point():
            yield Items((key,), ignore_index=None)
            continue
        mask = "attention_mask" if _same_shape(tensors.get("attention_mask"), value) else None
        for ignore in ignored:
            if value.ndim == 2 and key != "shift_labels":
                yield Items((key,), ignore, shift=True)
            yield Items((key,), ignore)
            if value.ndim == 2 and mask is not None:
                yield Items((key,), ignore, shift=True, mask=mask)
                yield Items((key,), ignore, mask=mask)
    yield from listed_targets(inputs)
    masks = [key for key in tensors if "mask" in key and (_is_mask(tensors[key]) or "observed" in key)]
    telling = [key for key in masks if "attention" not in key]
    yield from (Items((key,), ignore_index=0) for key in sorted(telling, key=lambda key: "past" in key))
    yield Items()
    yield from (Items((key,), ignore_index=0) for key in masks if key not in telling)


def listed_targets(inputs: Mapping[str, Any]) -> Iterator[Items]:
    """Ways of counting the rows of what is listed for each sample: the boxes of an image, or its masks."""
    for key, value in inputs.items():
        if "label" not in key or not isinstance(value, (list, tuple)) or not value:
            continue
        if isinstance(value[0], Tensor):
            yield Items((key,), None, entry="")
        elif isinstance(value[0], Mapping):
            yield from (Items((key,), None, entry=each) for each in value[0] if "label" in each)


def _is_mask(value: Tensor) -> bool:
    return not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())


def rules_counting_as(calls: Sequence[WatchedLoss], rules: Sequence[Items], inputs: Mapping[str, Any]) -> list[Items]:
    """The rules that count what one of these mean loss calls reduced over."""
    means = {call.items for call in calls if call.mean}

    def classes(rule: Items) -> int:
        # Of targets given as one number for each class the call may have taken the largest.
        value = inputs[rule.keys[0]] if rule.keys else None
        return value.shape[-1] if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 else 1

    return [rule for rule in rules if means & {(count := count_by(rule, inputs)), count / classes(rule)}]


def count_by(rule: Items, inputs: Mapping[str, Any]) -> float:
    """The items of a batch, on the host."""
    return float(rule.count(inputs))


def nearest_rules(rules: Sequence[Items], inputs: Mapping[str, Any], count: float) -> list[Items]:
    """The rules whose count is nearest, if near enough to be that count but for rounding."""
    nearest = min(abs(count_by(rule, inputs) - count) for rule in rules)
    if nearest > max(0.25, 1e-4 * count):
        return []
    return [rule for rule in rules if abs(count_by(rule, inputs) - count) == nearest]


def composes(
    rule: Items,
    batches: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    tolerance: float,
) -> bool:
    """Whether  L(AB) n(AB) = L(A) n(A) + L(B) n(B)."""
    counts = [rule.count(batch) for batch in batches]
    whole, one, other = (float(rule.divisor(count)) for count in counts)
    if not float(counts[0]) or 0.0 in (one, other):
        return False
    error = abs(losses[0] - (losses[1] * one + losses[2] * other) / whole)
    return error <= tolerance * max(abs(loss) for loss in losses)


def is_close(a: float, b: float, tolerance: float = 1e-5) -> bool:
    """Whether two numbers agree, relative to the larger."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _same_shape(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape
