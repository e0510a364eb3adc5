"""A proof: the gradient of a global batch as projections, with what it depends on, to hold other layouts against."""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as pairs
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.verification.projection import BUCKETS, ROWS, Projected, distance_squared, product
from hf_accum_fix.verification.report import Kind, Verdict, could_not_tell

_FORMAT: Final = 1
#: Another layout adds up in another order: this many tolerances of the proof are noise, or machine epsilons of the
#: coarser side, by whether it has 16 bits.
_ACROSS: Final = 4.0
_ROUNDINGS: Final = {False: 64.0, True: 4.0}
_WIDEST: Final = 0.1
#: A parameter's error counts from this part of the mean parameter's gradient on.
_SMALL: Final = 1e-2
#: Below this factor some of the gradient is missing.
_LOST: Final = 0.9
#: Names that are listed.
_SHOWN: Final = 3


@dataclass(frozen=True)
class Side:
    """What one layout makes of a global batch; the same on every rank.

    Attributes:
        model: class of the model.
        layout: engine, ranks, samples x accumulation steps, in words; of a proof, how the full batch was computed.
        ranks, steps: W and G.
        eps: machine epsilon of the coarsest dtype that it computes in.
        releases: by package.
        parameters: shape, dtype and hash of the initial values, by name.
        samples: a hash of each, sorted.
        gradient: of the trained parameters, before clipping.
    """

    model: str
    layout: str
    ranks: int
    steps: int
    eps: float
    releases: Mapping[str, str]
    parameters: Mapping[str, tuple[list[int], str, int]]
    samples: Sequence[str]
    gradient: Mapping[str, Projected]


@dataclass(frozen=True)
class Proof:
    """The side of the full batch; ``loss`` is the contract in words, the others are as in the report."""

    side: Side
    loss: str
    items: float | None
    floor: float
    tolerance: float

    def save(self, path: Path) -> None:
        """Write it as JSON: about 1 KB a parameter, whatever its size."""
        gradient = {
            name: [each.square, b64encode(each.projections.numpy().tobytes()).decode()]
            for name, each in self.side.gradient.items()
        }
        side = {**vars(self.side), "gradient": gradient}
        path.write_text(json.dumps({"format": _FORMAT, **vars(self), "side": side}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Proof:
        """Read it.

        Raises:
            OptionsError: if the file is none.
        """
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            form = read.pop("format")
            gradient = {
                name: Projected(torch.from_numpy(np.frombuffer(b64decode(text), np.float64).copy()), square)
                for name, (square, text) in read["side"]["gradient"].items()
            }
            proof = cls(**{**read, "side": Side(**{**read["side"], "gradient": gradient})})
            if form != _FORMAT or any(each.projections.numel() != ROWS * BUCKETS for each in gradient.values()):
                raise ValueError(form)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionsError(
                f"got {path}, which is no proof ({type(error).__name__}); expected a file of this release's "
                "hf-accum-fix verify --save; save it again"
            ) from error
        return proof


@dataclass(frozen=True)
class Against:
    """A layout held against a proof; true if its gradient is the proof's.

    Attributes:
        verdict: the answer, in words.
        error: relative error of the gradient; None: nothing could be compared.
        limit: largest one that counts as the same.
        side: what was run; without projections in `to_dict`.
        proof: what it was held against.
    """

    verdict: Verdict
    error: float | None
    limit: float
    side: Side
    proof: Proof

    def __bool__(self) -> bool:
        return self.verdict.kind is Kind.EXACT

    def __str__(self) -> str:
        made = " ".join(f"{name} {release}" for name, release in self.proof.side.releases.items())
        count = "" if self.proof.items is None else f" with {self.proof.items:g} items"
        of_proof = self.proof.side
        lines = [
            str(self.verdict),
            f"here: {self.side.model}, {self.side.layout}",
            f"proof: {len(of_proof.samples)} samples{count}, {of_proof.layout}; {made}",
        ]
        if self.error is not None:
            lines.append(
                f"the same: a relative error up to {self.limit:.1e}; errors are told from {ROWS * BUCKETS} projections "
                f"of each of {len(of_proof.gradient)} parameters, to a third of themselves"
            )
        if self.side.releases != of_proof.releases:
            lines.append(f"note: here are other releases: {' '.join(map(' '.join, self.side.releases.items()))}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The answer as data for JSON."""
        side = {name: value for name, value in vars(self.side).items() if name not in ("gradient", "parameters")}
        verdict = {"kind": self.verdict.kind.name.lower(), "words": self.verdict.words}
        return {"ok": bool(self), "verdict": verdict, "error": self.error, "limit": self.limit, "side": side}


def limit_across(tolerance: float, eps: float) -> float:
    """The largest relative error that is noise where another layout adds up in another order."""
    return min(_WIDEST, max(_ACROSS * tolerance, _ROUNDINGS[eps > 1e-5] * eps))


def judge(proof: Proof, side: Side) -> Against:
    """Compare a layout's gradient with the proof's, if both are of the same model, weights and samples."""
    eps = max(side.eps, proof.side.eps)
    limit = limit_across(proof.tolerance, eps)
    if words := _incomparable(proof.side, side):
        return Against(could_not_tell(words), None, limit, side, proof)
    wanted, found = proof.side.gradient, _filled(side.gradient, proof.side.gradient)
    square = sum(each.square for each in wanted.values())
    distances = {name: distance_squared(found[name].projections, wanted[name].projections) for name in wanted}
    error = math.sqrt(sum(distances.values()) / square)
    if not error > limit:
        if math.isnan(error):
            return Against(could_not_tell("the gradient is nan"), None, limit, side, proof)
        return Against(Verdict(Kind.EXACT, f"the proof's gradient, to {error:.1e}"), error, limit, side, proof)
    words = _why(wanted, found, distances, limit, (side.ranks, side.steps))
    return Against(Verdict(Kind.OFF, f"off, relative error {error:.2g}: {words}"), error, limit, side, proof)


def _incomparable(proof: Side, side: Side) -> str:
    """Why nothing can be said of two sides; empty: it can."""
    ours, theirs = side.parameters, proof.parameters
    names = [name for name in {**theirs, **ours} if name not in ours or name not in theirs]
    names += [name for name in ours if name in theirs and list(ours[name][0]) != list(theirs[name][0])]
    if names or {*side.gradient} - {*proof.gradient}:
        names += sorted({*side.gradient} - {*proof.gradient})
        return (
            f"another model: {_listed(names)} of other shape, missing or trained in one alone; load the proof's model"
        )
    if weights := [name for name in ours if ours[name][2] != theirs[name][2]]:
        return (
            f"the initial weights differ: {_listed(weights)} of {len(ours)} parameters; load the checkpoint, or set "
            "the seed, of the proof"
        )
    ours_only = Counter(side.samples) - Counter(proof.samples)
    if ours_only or len(side.samples) != len(proof.samples):
        return (
            f"other samples: {len(side.samples)} here, of which the proof's {len(proof.samples)} lack "
            f"{sum(ours_only.values())}; give both the same data, seed and number of samples in a step, over all ranks"
        )
    return ""


def _why(
    wanted: Mapping[str, Projected],
    found: Mapping[str, Projected],
    distances: Mapping[str, float],
    limit: float,
    numbers: tuple[int, int],
) -> str:
    """What a wrong gradient looks like: a factor, single parameters, or another direction."""
    square = sum(each.square for each in wanted.values())
    factor = sum(product(found[name].projections, wanted[name].projections) for name in wanted)
    factor /= sum(product(each.projections, each.projections) for each in wanted.values())
    rest = sum(distance_squared(found[n].projections, factor * wanted[n].projections) for n in wanted)
    if math.sqrt(rest / square) <= limit * max(1.0, abs(factor)):
        return f"{factor:.4g} times the proof's in every parameter{_named(factor, *numbers)}"
    least = _SMALL * math.sqrt(square / len(wanted))
    off = [
        name
        for name, each in wanted.items()
        if math.sqrt(distances[name]) > _ACROSS * limit * max(math.sqrt(each.square), least)
    ]
    off.sort(key=lambda name: -distances[name])
    if 0 < len(off) <= len(wanted) // 2:
        named = _listed([_of_one(name, wanted[name], found[name]) for name in off])
        return f"{named} alone; the other {len(wanted) - len(off)} are right"
    worst = sorted(distances, key=lambda name: -distances[name])
    lost = ", as where micro-batches are lost" if factor < _LOST else ""
    return f"another direction, along the proof's {factor:.4g} times{lost}; most in {_listed(worst)}"


def _of_one(name: str, wanted: Projected, found: Projected) -> str:
    own = product(wanted.projections, wanted.projections)
    if not own:
        return name
    ratio = product(found.projections, wanted.projections) / own
    return f"{name} ({ratio:.3g} times)"


def _named(factor: float, ranks: int, steps: int) -> str:
    """What a factor may be: W, G, G x W, or one over it."""
    of = {"W": ranks, "G": steps, **({"G x W": ranks * steps} if min(ranks, steps) > 1 else {})}
    found = [
        name if sign == 1 else f"1 / ({name})"
        for (name, number), sign in pairs(of.items(), (1, -1))
        if number != 1 and math.isclose(factor, number**sign, rel_tol=1e-2)
    ]
    return f" ({' or '.join(found)})" if found else ""


def _filled(found: Mapping[str, Projected], wanted: Mapping[str, Projected]) -> dict[str, Projected]:
    zero = Projected(torch.zeros(ROWS * BUCKETS, dtype=torch.float64), 0.0)
    return {name: found.get(name, zero) for name in wanted}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def hash_of(sample: Any) -> str:
    """A hash of a sample's content, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in _pieces(sample):
        digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
        value = value.numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.shape}".encode()
        yield value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for each in value:
            yield from _pieces(each)
    elif isinstance(value, (str, int, float, bool, type(None))):
        yield repr(value).encode()
    else:
        # Images and readers: by what they show as bytes, or by their type alone.
        yield type(value).__qualname__.encode()
        yield value.tobytes() if hasattr(value, "tobytes") else b""
