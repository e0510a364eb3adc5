"""DATA: what is wrong with gradient accumulation in transformers, release by release, and is mended here.

G is gradient_accumulation_steps, W the number of data-parallel ranks, N the items of the global batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from packaging.version import Version

from hf_accum_fix.upstream.seams import SEAMS

_REPOSITORY: Final = "https://github.com/huggingface/transformers"
_KEBAB_CASE: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong upstream in a range of releases.

    Attributes:
        name: kebab-case, stable: what users look for.
        summary: what happens, in one line.
        since: first release read that has it (the reading starts at 4.38.2).
        until: first release without it; None while the newest one has it.
        seam: the Trainer method through which it is mended.
        source: where it is reported or, where nobody has, the line of the release.
        remove_when: what has to happen before the row can go.
        evidence: "run" where the released wheel was measured, "read" where its source was only read.
        gradient: what the right gradient comes out multiplied by; empty where no one factor says it.
        who: whose runs it meets.
        wrong: the equation of what upstream computes.
        right: the equation of what it should.
    """

    name: str
    summary: str
    since: str
    until: str | None
    seam: str
    source: tuple[str, ...]
    remove_when: str
    evidence: Literal["run", "read"]
    gradient: str = ""
    who: str = ""
    wrong: str = ""
    right: str = ""

    def __post_init__(self) -> None:
        """Refuse a row that is not well formed: a slip here is a slip of ours, so it is a ValueError."""
        if not _KEBAB_CASE.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not kebab-case")
        if self.until is not None and Version(self.since) >= Version(self.until):
            raise ValueError(f"{self.name}: since {self.since} is not before until {self.until}")
        if not self.source or not all(link.startswith("https://") for link in self.source):
            raise ValueError(f"{self.name}: needs https links, has {self.source!r}")
        if self.seam not in {seam.name for seam in SEAMS}:
            raise ValueError(f"{self.name}: {self.seam!r} is not a seam")

    @property
    def override(self) -> str:
        """The function that mends it, as "module:key of its table"."""
        return f"hf_accum_fix.overrides:{self.seam}"

    @property
    def range(self) -> str:
        """The releases that have it, in words."""
        return f"{self.since} on" if self.until is None else f"{self.since} to before {self.until}"

    def is_in(self, release: Version) -> bool:
        """Whether a release has it; dev and rc builds count as the release they lead to."""
        base = Version(release.base_version)
        return Version(self.since) <= base and (self.until is None or base < Version(self.until))


def _issue(number: int) -> str:
    return f"{_REPOSITORY}/issues/{number}"


def _pull(number: int) -> str:
    return f"{_REPOSITORY}/pull/{number}"


def _line(release: str, number: int, file: str = "trainer.py") -> str:
    return f"{_REPOSITORY}/blob/v{release}/src/transformers/{file}#L{number}"


def _floor(release: str) -> str:
    return f"transformers {release} is the oldest release supported"


DEFECTS: Final = (
    Defect(
        name="mean-of-micro-batch-means",
        summary="Micro-batches and ranks are averaged as if each held equally many items.",
        since="4.38.2",
        until=None,
        seam="compute_loss",
        source=(_issue(37766),),
        remove_when="every head divides by the item count of the global batch",
        evidence="run",
    ),
    Defect(
        name="rank-means-averaged",
        summary="The item count is that of one rank (average_tokens_across_devices is off by default).",
        since="4.46.0",
        until="4.54.0",
        seam="get_batch_samples",
        source=(_issue(34242), _pull(34373), _pull(39395)),
        remove_when=_floor("4.54.0"),
        evidence="run",
    ),
    Defect(
        name="loss-times-steps",
        summary="Every loss is multiplied by G, even where the head does not divide; the log shows it.",
        since="4.46.0",
        until="4.46.2",
        seam="training_step",
        source=(_issue(34263), _pull(34373)),
        remove_when=_floor("4.46.2"),
        evidence="run",
        gradient="G",
    ),
    Defect(
        name="undivided-gradient-right-log",
        summary="Heads without item count are divided by G after the backward pass, for the log only.",
        since="4.46.2",
        until="4.48.0",
        seam="training_step",
        source=(_pull(35207), _pull(35438)),
        remove_when=_floor("4.48.0"),
        evidence="run",
        gradient="G",
    ),
    Defect(
        name="item-count-dropped",
        summary="The item count is taken but not handed to the heads that would divide by it.",
        since="4.47.0",
        until="4.47.1",
        seam="training_step",
        source=(_line("4.47.0", 3652),),
        remove_when=_floor("4.47.1"),
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="item-count-dropped-again",
        summary="The item count is, once more, not handed to the heads that would divide by it.",
        since="4.48.0",
        until="4.48.1",
        seam="training_step",
        source=(_issue(35787), _pull(35651)),
        remove_when=_floor("4.48.1"),
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="loss-without-labels-undivided",
        summary="A head with **kwargs and no `labels` gets no item count, and no division by G either.",
        since="4.48.1",
        until="4.53.0",
        seam="training_step",
        source=(_line("4.49.0", 3732), "https://github.com/huggingface/trl/issues/4104"),
        remove_when=_floor("4.53.0"),
        evidence="read",
        gradient="G",
    ),
    Defect(
        name="short-window-divisor",
        summary="The short last window of an epoch, r micro-batches long, is divided by G.",
        since="4.48.0",
        until="4.55.0",
        seam="training_step",
        source=(_issue(38837), _pull(39659)),
        remove_when=_floor("4.55.0"),
        evidence="run",
        gradient="r / G in that window",
    ),
    Defect(
        name="epoch-tail-not-trained",
        summary="The last window of an epoch is fetched and stepped by wrong counts: its data are lost, or leak.",
        since="4.38.2",
        until="4.52.0",
        seam="train",
        source=(_issue(37777), _pull(37923)),
        remove_when=_floor("4.52.0"),
        evidence="run",
    ),
    Defect(
        name="last-micro-batch-not-reduced",
        summary="DDP reduces on every micro-batch but the last: ranks drift apart.",
        since="4.46.2",
        until="4.46.3",
        seam="training_step",
        source=(_pull(34373),),
        remove_when=_floor("4.46.3"),
        evidence="run",
    ),
    Defect(
        name="gradient-divided-twice",
        summary="accelerate divides the gradient by G once more; the log looks right.",
        since="5.2.0",
        until="5.5.4",
        seam="training_step",
        source=(_issue(45305), _pull(45349)),
        remove_when=_floor("5.5.4"),
        evidence="run",
        gradient="1 / G",
    ),
    Defect(
        name="head-drops-item-count",
        summary="A head takes **kwargs but ignores the item count: BERT, T5 and most since 5.0.0.",
        since="4.47.0",
        until=None,
        seam="compute_loss",
        source=(_issue(47688), _issue(37766)),
        remove_when="every head that takes **kwargs divides by the item count, or says that it does not",
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="llava-mean-loss",
        summary="LLaVA and five relatives take **kwargs but keep the mean of their own cross entropy.",
        since="4.49.0",
        until="4.52.0",
        seam="compute_loss",
        source=(_pull(36044), "https://github.com/hiyouga/LLaMA-Factory/issues/7443"),
        remove_when=_floor("4.52.0"),
        evidence="run",
        gradient="G",
    ),
    Defect(
        name="compiled-module-signature",
        summary="torch.compile's wrapper takes **kwargs, whatever the loss of the module inside does.",
        since="4.47.0",
        until=None,
        seam="compute_loss",
        source=(_line("5.23.0", 521),),
        remove_when="the loss, not a signature, decides whether it is divided",
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="loss-func-mean-not-divided",
        summary="A compute_loss_func that returns a mean is taken to have divided by the item count.",
        since="4.46.0",
        until=None,
        seam="compute_loss",
        source=(_issue(43595), _pull(43651)),
        remove_when="the loss, not the presence of compute_loss_func, decides whether it is divided",
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="regression-and-multi-label-mean",
        summary="Regression and multi-label losses ignore the item count: ViT and others.",
        since="4.56.0",
        until=None,
        seam="compute_loss",
        source=(_line("5.23.0", 108, "loss/loss_utils.py"),),
        remove_when="ForSequenceClassificationLoss divides by the item count in all three branches",
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="ctc-sum-divided",
        summary='ctc_loss_reduction="sum" is divided by G as if it were a mean.',
        since="4.48.0",
        until="5.0.0",
        seam="compute_loss",
        source=(_line("4.49.0", 3732),),
        remove_when=_floor("5.0.0"),
        evidence="run",
        gradient="1 / G",
    ),
    Defect(
        name="router-loss-times-steps",
        summary="A mixture of experts adds its router loss undivided to a loss that is divided.",
        since="4.46.0",
        until=None,
        seam="compute_loss",
        source=(_issue(48690), _pull(48691)),
        remove_when="the router loss comes out with the configured coefficient whatever G and W",
        evidence="run",
        gradient="G x W in the router's term",
    ),
    Defect(
        name="label-smoothing-mean",
        summary="Label smoothing takes its own mean, and that is not divided by G.",
        since="4.46.0",
        until="5.15.0",
        seam="compute_loss",
        source=(_issue(46731), _pull(46734), _pull(47261)),
        remove_when=_floor("5.15.0"),
        evidence="run",
        gradient="G x W",
    ),
    Defect(
        name="label-smoothing-drops-router-loss",
        summary="Label smoothing takes the labels from the model, which then adds no router loss.",
        since="4.38.2",
        until=None,
        seam="compute_loss",
        source=(_line("5.23.0", 2156),),
        remove_when="the smoothed loss carries the router's term",
        evidence="run",
    ),
    Defect(
        name="label-smoothing-unshifted",
        summary="Label smoothing does not shift for heads off the causal list, such as LLaVA.",
        since="4.38.2",
        until=None,
        seam="compute_loss",
        source=(_line("5.23.0", 2186),),
        remove_when="smoothing shifts where the model's own loss shifts",
        evidence="read",
    ),
    Defect(
        name="first-label-counted",
        summary="Position 0 of every row is counted, though a shifted loss never reaches it.",
        since="4.46.2",
        until="5.10.1",
        seam="get_batch_samples",
        source=(_pull(46204),),
        remove_when=_floor("5.10.1"),
        evidence="run",
        gradient="N / (N + rows)",
    ),
    Defect(
        name="first-label-still-counted",
        summary="Position 0 is still counted where loss_type is None: GPT-2 and nine more.",
        since="5.10.1",
        until=None,
        seam="get_batch_samples",
        source=(_line("5.23.0", 2331),),
        remove_when="the shift is read off the loss, not off loss_type",
        evidence="run",
        gradient="N / (N + rows)",
    ),
    Defect(
        name="virtual-tokens-undercounted",
        summary="Prompt tuning makes position 0 a target, which is no longer counted.",
        since="5.10.1",
        until=None,
        seam="get_batch_samples",
        source=(_line("5.23.0", 2335), _pull(46204)),
        remove_when="the count knows of virtual tokens",
        evidence="run",
        gradient="(N + rows) / N",
    ),
    Defect(
        name="ignore-index-miscounted",
        summary="Semantic segmentation ignores 255 but counts every label other than -100.",
        since="5.9.0",
        until=None,
        seam="get_batch_samples",
        source=(_line("5.23.0", 154, "loss/loss_utils.py"), _line("5.23.0", 2335)),
        remove_when="the count uses the loss's own ignore index",
        evidence="read",
        gradient="N / (N + ignored)",
    ),
    Defect(
        name="window-without-items-is-nan",
        summary="A micro-batch or a window without a single item makes the loss 0 / 0.",
        since="4.38.2",
        until=None,
        seam="compute_loss",
        source=(_line("5.23.0", 47, "loss/loss_utils.py"),),
        remove_when="a window without items logs zero and leaves the gradient at zero",
        evidence="run",
    ),
)


def is_present(name: str, release: str) -> bool:
    """Whether a release has the defect of this name.

    Raises:
        KeyError: if there is no such row.
    """
    return {defect.name: defect for defect in DEFECTS}[name].is_in(Version(release))
