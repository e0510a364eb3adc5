"""A proof: the gradient of a global batch as projections, with what it depends on, to hold other layouts against."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import accelerate
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.engines.difference import factor_in_words
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.overrides.trainer_facts import data_ranks, parallel_size
from hf_accum_fix.verification.copies import AtTheStep, StepReached, engine_of, gradients_of
from hf_accum_fix.verification.projection import BUCKETS, ROWS, fingerprint, hash_of, projections_of
from hf_accum_fix.verification.reference import MIXED, Reference, Scene
from hf_accum_fix.verification.report import Kind, Verdict, could_not_tell, off_by
from hf_accum_fix.verification.restore import unseen, without_dropout
from hf_accum_fix.verification.sample import Drawn, draw, leaves

_FORMAT: Final = 2
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
class Proof:
    """What one layout makes of a global batch, the same on every rank; saved, that of the full batch."""

    model: str  # class of the model
    #: Engine, ranks, samples x accumulation steps, in words; of a saved one, how the full batch was computed.
    layout: str
    ranks: int  # W
    steps: int  # G
    eps: float  # machine epsilon of the coarsest dtype that it computes in
    releases: Mapping[str, str]  # by package
    samples: Sequence[int]  # a hash of each, sorted
    parameters: Mapping[str, tuple[list[int], str, int]]  # shape, dtype and hash of the initial values, by name
    gradient: Mapping[str, Tensor]  # of the trained parameters, before clipping
    items: float | None = None  # as in the report
    tolerance: float = 0.0  # as in the report

    def save(self, path: Path) -> None:
        """Write it as JSON: about 1.3 KB a parameter, whatever its size."""
        gradient = {name: each.tolist() for name, each in self.gradient.items()}
        path.write_text(json.dumps({"format": _FORMAT, **vars(self), "gradient": gradient}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Proof:
        """Read it.

        Raises:
            OptionsError: if the file is none.
        """
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            form, each = read.pop("format"), partial(torch.tensor, dtype=torch.float64)
            read["gradient"] = {name: each(its).reshape(ROWS * BUCKETS) for name, its in read["gradient"].items()}
            if form != _FORMAT:
                raise ValueError(form)
            return cls(**read)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise OptionsError(
                f"got {path}, which is no proof ({type(error).__name__}); expected a file of this release's "
                "hf-accum-fix verify --save; save it again"
            ) from error


class Against(NamedTuple):
    """A layout held against a proof; true if its gradient is the proof's."""

    verdict: Verdict  # the answer, in words
    error: float | None  # relative error of the gradient; None: nothing could be compared
    limit: float  # largest one that counts as the same
    here: Proof  # what was run
    proof: Proof  # what it was held against

    def __bool__(self) -> bool:
        return bool(self.verdict)

    def __str__(self) -> str:
        proof, here = self.proof, self.here
        made, ran = (" ".join(map(" ".join, each.releases.items())) for each in (proof, here))
        count = "" if proof.items is None else f" with {proof.items:g} items"
        lines = [
            f"{self.verdict}\nhere: {here.model}, {here.layout}",
            f"proof: {len(proof.samples)} samples{count}, {proof.layout}; {made}",
        ]
        if self.error is not None:
            lines.append(
                f"the same: a relative error up to {self.limit:.1e}; errors are told from {ROWS * BUCKETS} projections "
                f"of each of {len(proof.gradient)} parameters, to a third of themselves"
            )
        return "\n".join(lines + ([f"note: here are other releases: {ran}"] if ran != made else []))

    def to_dict(self) -> dict[str, Any]:
        """The answer as data for JSON."""
        side = {name: value for name, value in vars(self.here).items() if name not in ("gradient", "parameters")}
        answer = {"ok": bool(self), "verdict": self.verdict.to_dict(), "error": self.error}
        return {**answer, "limit": self.limit, "side": side}


def proof_of(scene: Scene, reference: Reference, drawn: Drawn) -> Proof:
    """The proof of a global batch that `verify` has computed.

    Raises:
        UnsupportedSetupError: for a loss or samples that another layout cannot have.
    """
    if scene.contract.has_router_loss:
        raise UnsupportedSetupError(
            "got a model with a router loss, which depends on the split; expected none; set output_router_logits=False"
        )
    found, gradient = _of_layout(scene.trainer, scene.every, drawn), scene.projected(reference.gradient)
    types = sorted({found.parameters[each][1] for each in gradient})
    return replace(
        found,
        layout=f"{reference.words}, {' and '.join(types)}",
        gradient=gradient,
        items=scene.count(scene.every),
        tolerance=reference.tolerance,
    )


def hold_against(trainer: Any, proof: Proof) -> Against:
    """Train up to the first optimizer step, as the script would, and hold its gradient against a proof.

    Call it on every rank, in a process of its own: engines shard a model in place. Dropout and clipping are off; of the
    callbacks only the Trainer's own run.

    Raises:
        UnsupportedSetupError: if the gradient cannot be read, or the step is not reached.
    """
    args = trainer.args
    with unseen(trainer):
        drawn = draw(trainer, 1, None)
    # Ranks that cut their samples take turns with them, and ranks that share a model share its samples.
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps // parallel_size(trainer, "sp")
    rows = [drawn.windows[0][:own]]
    ranks = (gather_object(rows) if args.world_size > 1 else rows)[:: args.world_size // data_ranks(trainer)]
    without_dropout(trainer.model)
    # Before it trains: FSDP2 makes another class of it.
    here, reached = _of_layout(trainer, [row for rank in ranks for row in rank], drawn), dict[str, Tensor]()
    # Bypass __setattr__, which may validate on assignment.
    vars(args).update(max_grad_norm=0.0, eval_on_start=False)

    def ends() -> None:
        reached.update(projections_of(gradients_of(trainer)))
        raise StepReached

    trainer.callback_handler.callbacks = [DefaultFlowCallback(), AtTheStep(trainer, ends)]
    try:
        trainer.train()
    except StepReached:
        return judge(proof, replace(here, gradient=reached))
    raise UnsupportedSetupError("got a training without an optimizer step; expected one; check data and max_steps")


def _of_layout(trainer: Any, rows: Sequence[Any], drawn: Drawn) -> Proof:
    """All but the gradient."""
    if any("collator is random" in note for note in drawn.notes):
        raise UnsupportedSetupError(
            "got a random collator, which makes other batches of the same samples; expected one that does not; give it "
            "a fixed seed"
        )
    args, precision, parameters = trainer.args, trainer.accelerator.mixed_precision, fingerprint(trainer.model)
    dtypes = {getattr(torch, dtype) for _, dtype, _ in parameters.values()} | {MIXED.get(precision, torch.float64)}
    size, steps, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    words = [engine_of(trainer), f"{ranks} rank{'' if ranks == 1 else 's'}", f"{size} x {steps}", precision or "no"]
    return Proof(
        model=type(trainer.accelerator.unwrap_model(trainer.model)).__name__,
        layout=", ".join(each for each in words if each not in ("", "no")),
        ranks=data_ranks(trainer),
        steps=steps,
        eps=max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point),
        releases={each.__name__: str(each.__version__) for each in (transformers, accelerate, torch)},
        samples=sorted(hash_of(*leaves(drawn.collate([row]))) for row in rows),
        parameters=parameters,
        gradient={},
    )


def limit_across(tolerance: float, eps: float) -> float:
    """The largest relative error that is noise where another layout adds up in another order."""
    return min(_WIDEST, max(_ACROSS * tolerance, _ROUNDINGS[eps > 1e-5] * eps))


def judge(proof: Proof, here: Proof) -> Against:
    """Compare a layout's gradient with a proof's, if both are of the same model, weights and samples."""
    limit, names = limit_across(proof.tolerance, max(here.eps, proof.eps)), [*proof.gradient]
    if words := _incomparable(proof, here):
        return Against(could_not_tell(words), None, limit, here, proof)
    wanted = torch.stack([*proof.gradient.values()])
    found = torch.stack([here.gradient.get(name, torch.zeros_like(wanted[0])) for name in names])
    apart, norms = (found - wanted).norm(dim=1), wanted.norm(dim=1)
    error = float(apart.norm() / norms.norm())
    if math.isnan(error):
        return Against(could_not_tell("the gradient is nan"), None, limit, here, proof)
    if error <= limit:
        return Against(Verdict(Kind.EXACT, f"the proof's gradient, to {error:.1e}"), error, limit, here, proof)
    factor = float((found * wanted).sum() / wanted.square().sum())
    off = apart > _ACROSS * limit * norms.clamp(min=_SMALL * float(norms.square().mean().sqrt()))
    worst = apart.argsort(descending=True).tolist()
    if float((found - factor * wanted).norm() / norms.norm()) <= limit * max(1.0, abs(factor)):
        known = factor_in_words(factor, here.steps, here.ranks)
        words = f"{factor:.4g} times the proof's in every parameter" + (f" ({known})" if known else "")
    elif 0 < (count := int(off.sum())) <= len(names) // 2:
        ratios = ((found * wanted).sum(1) / wanted.square().sum(1)).tolist()
        alone = [names[at] + (f" ({ratios[at]:.3g} times)" if norms[at] else "") for at in worst if off[at]]
        words = f"{_listed(alone)} alone; the other {len(names) - count} are right"
    else:
        lost = ", as where micro-batches are lost" if factor < _LOST else ""
        most = _listed([names[at] for at in worst])
        words = f"another direction, along the proof's {factor:.4g} times{lost}; most in {most}"
    return Against(off_by(error, words), error, limit, here, proof)


def _incomparable(proof: Proof, here: Proof) -> str:
    """Why nothing can be said of two layouts; empty: it can."""
    ours, theirs = here.parameters, proof.parameters
    shapes = [{name: [*each[0]] for name, each in parameters.items()} for parameters in (theirs, ours)]
    others = [name for name in {**theirs, **ours} if shapes[0].get(name) != shapes[1].get(name)]
    if others := [*others, *sorted({*here.gradient} - {*proof.gradient})]:
        return (
            f"another model: {_listed(others)} of other shape, missing or trained in one alone; load the proof's model"
        )
    if weights := [name for name in ours if ours[name][2] != theirs[name][2]]:
        return (
            f"the initial weights differ: {_listed(weights)} of {len(ours)} parameters; load the checkpoint, or set "
            "the seed, of the proof"
        )
    lacking = Counter(here.samples) - Counter(proof.samples)
    if lacking or len(here.samples) != len(proof.samples):
        return (
            f"other samples: {len(here.samples)} here, of which the proof's {len(proof.samples)} lack "
            f"{sum(lacking.values())}; give both the same data, seed and number of samples in a step, over all ranks"
        )
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
