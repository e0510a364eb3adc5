"""DATA: the defects of gradient accumulation in transformers, release by release, and where each is fixed.

The equations are of one optimizer step. m runs over its micro-batches on all ranks, k over the ranks. S_m is the summed
loss of a micro-batch and n_m its items; N is the sum of all n_m, and N_k that of rank k. G is
gradient_accumulation_steps, r the micro-batches of a shorter window, W the number of data-parallel ranks. "grad" is the
gradient of the optimizer step, "log" the logged loss; without an entry it has the same factor as the gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from packaging.version import Version

from hf_accum_fix.upstream.seams import SEAMS, is_between

OLDEST_READ: Final = "4.38.2"
"""The oldest release whose source was read: a defect since this release may be older."""

_REPOSITORY: Final = "https://github.com/huggingface/transformers"
_KEBAB_CASE: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Factor(str, Enum):
    """Wrong gradient over right gradient; A: the accumulation steps given to the launcher."""

    G = "G"
    W = "W"
    G_W = "G x W"
    PER_G = "1 / G"
    PER_W = "1 / W"
    PER_G_W = "1 / (G x W)"
    PER_A = "1 / A"
    SHORT = "r / G"
    MORE_BY_ROWS = "N / (N + rows)"
    LESS_BY_ROWS = "N / (N - rows)"
    MORE_BY_IGNORED = "N / (N + ignored)"
    ROUTER = "G x W in the router's term"
    GPUS = "GPUs"
    PER_GPUS = "1 / GPUs"
    COPIES = "tensor-parallel size"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One defect of a range of releases.

    Attributes:
        name: kebab-case, stable: what users search for.
        summary: the effect, in one line.
        who: the affected runs, in one clause.
        wrong: the result, as an equation or in words.
        right: the correct result.
        since: first release with it, from `OLDEST_READ` on.
        until: first release without it; None while the newest one has it.
        seam: the Trainer method at which it is fixed.
        source: its report, else the line in a release.
        remove_when: when the row can be deleted; with ``until``: once no older release is supported.
        evidence: "run": measured on the released wheel; "read": found in the source.
        factors: wrong gradient over right gradient, one of several; empty: no single factor.
        where: the affected runs or windows, in words; empty: all.
        not_fixed: what to do instead, if this package does not fix it; empty: it does.
    """

    name: str
    summary: str
    who: str
    wrong: str
    right: str = "grad sum_m S_m / N"
    since: str
    until: str | None = None
    seam: str
    source: tuple[str, ...]
    remove_when: str = ""
    evidence: Literal["run", "read"] = "run"
    factors: tuple[Factor, ...] = ()
    where: str = ""
    not_fixed: str = ""

    def __post_init__(self) -> None:
        """Refuse a malformed row; it is our own mistake, so raise a ValueError."""
        if not _KEBAB_CASE.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not kebab-case")
        if self.until is not None and Version(self.since) >= Version(self.until):
            raise ValueError(f"{self.name}: since {self.since} is not before until {self.until}")
        empty = [field for field in ("summary", "who", "wrong", "right", "goes_when") if not getattr(self, field)]
        if empty:
            raise ValueError(f"{self.name}: {', '.join(empty)} is empty")
        if not self.source or not all(link.startswith("https://") for link in self.source):
            raise ValueError(f"{self.name}: needs https links, has {self.source!r}")
        if self.seam not in {seam.name for seam in SEAMS}:
            raise ValueError(f"{self.name}: {self.seam!r} is not a seam")

    @property
    def gradient(self) -> str:
        """Wrong gradient over right gradient, in symbols; empty: no single factor."""
        return " ".join(filter(None, (", or ".join(self.factors), self.where)))

    @property
    def goes_when(self) -> str:
        """When the row can be deleted."""
        return self.remove_when or (f"transformers {self.until} is the oldest release supported" if self.until else "")

    @property
    def range(self) -> str:
        """The affected releases, in words."""
        return f"{self.since} on" if self.until is None else f"{self.since} to before {self.until}"

    def is_in(self, release: Version) -> bool:
        """Whether a release has it; a dev or rc build counts as the release that it precedes."""
        return is_between(release, self.since, self.until)


def _issue(number: int) -> str:
    return f"{_REPOSITORY}/issues/{number}"


def _pull(number: int) -> str:
    return f"{_REPOSITORY}/pull/{number}"


def _line(release: str, number: int, file: str = "trainer.py") -> str:
    return f"{_REPOSITORY}/blob/v{release}/src/transformers/{file}#L{number}"


def _llama_factory(number: int) -> str:
    return f"https://github.com/hiyouga/LLaMA-Factory/issues/{number}"


_MEANS: Final = "grad 1/(G W) sum_m S_m / n_m"
_UNDIVIDED: Final = "grad 1/W sum_m S_m / n_m"
_TIMES_RANKS: Final = "grad sum_m S_m / n_m"

_EVALUATION: Final = "use eval_loss=True, or turn average_tokens_across_devices off"
_ONE_PROCESS_A_GPU: Final = "train() refuses torch.nn.DataParallel: start one process per GPU with accelerate launch"
_NO_APEX: Final = "train() refuses apex: use torch's own bf16 or fp16"
_DATA_PARALLEL_ONLY: Final = "train() refuses ranks that split samples: use data-parallel ranks"

DEFECTS: Final = (
    Defect(
        name="mean-of-micro-batch-means",
        summary="Micro-batches and ranks are averaged as if each held equally many items.",
        who="every head up to 4.45; since then heads that take no item count or declare accepts_loss_kwargs = False",
        wrong=_MEANS,
        since="4.38.2",
        seam="compute_loss",
        source=(_issue(37766),),
        remove_when="every head divides by the item count of the global batch",
    ),
    Defect(
        name="rank-means-averaged",
        summary="Each rank divides by its own item count (average_tokens_across_devices is off by default).",
        who="heads that divide by the item count; W > 1",
        wrong="grad 1/W sum_k (sum of S_m on rank k) / N_k",
        since="4.46.0",
        until="4.54.0",
        seam="get_batch_samples",
        source=(_issue(34242), _pull(34373), _pull(39395)),
    ),
    Defect(
        name="loss-times-steps",
        summary="Every loss is multiplied by G, even where the head does not divide; the log shows it.",
        who="heads that take no **loss_kwargs: BERT, T5, GPT-2, every classifier; G > 1",
        wrong=_UNDIVIDED,
        since="4.46.0",
        until="4.46.2",
        seam="training_step",
        source=(_issue(34263), _pull(34373)),
        factors=(Factor.G,),
    ),
    Defect(
        name="undivided-gradient-right-log",
        summary="Without an item count, the loss is divided by G after the backward pass, for the log only.",
        who="heads that take no **loss_kwargs (up to 4.47.0), and batches without `labels`; G > 1",
        wrong="grad 1/W sum_m S_m / n_m, log 1/(G W) sum_m S_m / n_m",
        since="4.46.2",
        until="4.48.0",
        seam="training_step",
        source=(_pull(35207), _pull(35438)),
        factors=(Factor.G,),
    ),
    Defect(
        name="undivided-as-if-counted",
        summary="Items are counted for every head, so no loss is divided by G; the log shows it.",
        who="heads that take no **kwargs; G > 1",
        wrong=_UNDIVIDED,
        since="4.47.1",
        until="4.48.0",
        seam="training_step",
        source=(_line("4.47.1", 3689), _pull(35438)),
        factors=(Factor.G,),
    ),
    Defect(
        name="item-count-dropped",
        summary="Items are counted, but the number is not passed to the heads that would divide by it.",
        who="heads that take **kwargs; G > 1, and W > 1 with average_tokens_across_devices",
        wrong=_UNDIVIDED,
        since="4.47.0",
        until="4.47.1",
        seam="training_step",
        source=(_line("4.47.0", 3652),),
        factors=(Factor.G, Factor.G_W),
    ),
    Defect(
        name="item-count-dropped-again",
        summary="The item count is again not passed to the heads that would divide by it.",
        who="heads that take **kwargs; G > 1, and W > 1 with average_tokens_across_devices",
        wrong=_UNDIVIDED,
        since="4.48.0",
        until="4.48.1",
        seam="training_step",
        source=(_issue(35787), _pull(35651)),
        factors=(Factor.G, Factor.G_W),
    ),
    Defect(
        name="loss-without-labels-undivided",
        summary="A head with **kwargs and no `labels` gets no item count, and no division by G either.",
        who="heads that take **kwargs and targets with another name, such as question answering; G > 1",
        wrong=_UNDIVIDED,
        since="4.48.1",
        until="4.53.0",
        seam="training_step",
        source=(_line("4.49.0", 3732), "https://github.com/huggingface/trl/issues/4104"),
        factors=(Factor.G,),
    ),
    Defect(
        name="short-epoch-divisor",
        summary="An epoch of r < G micro-batches is one step, and its mean is divided by G.",
        who="every head; epochs shorter than one window",
        wrong="grad 1/(G W) sum_m S_m / n_m over r W micro-batches",
        since="4.38.2",
        until="4.46.0",
        seam="training_step",
        source=(_line("4.45.2", 2406),),
        factors=(Factor.SHORT,),
    ),
    Defect(
        name="short-window-divisor",
        summary="The short last window of an epoch, r micro-batches long, is divided by G.",
        who="heads that do not divide by the item count; epochs that are no multiple of G",
        wrong="grad 1/(G W) sum_m S_m / n_m over r W micro-batches",
        since="4.48.0",
        until="4.55.0",
        seam="training_step",
        source=(_issue(38837), _pull(39659)),
        factors=(Factor.SHORT,),
        where="in that window",
    ),
    Defect(
        name="gradient-divided-twice",
        summary="accelerate divides the gradient by G once more; the log looks right.",
        who="every head; G > 1, except under DeepSpeed",
        wrong="grad 1/G sum_m S_m / N, log sum_m S_m / N",
        since="5.2.0",
        until="5.5.4",
        seam="training_step",
        source=(_issue(45305), _pull(45349)),
        factors=(Factor.PER_G,),
    ),
    Defect(
        name="launcher-steps-divide-again",
        summary="`accelerate launch --gradient_accumulation_steps A` divides by A once more.",
        who="runs launched with that option, or with its environment variable set",
        wrong="grad 1/A sum_m S_m / N, log sum_m S_m / N",
        since="4.46.2",
        until="5.2.0",
        seam="training_step",
        source=(_line("4.46.3", 4960), "https://github.com/huggingface/accelerate/issues/3533"),
        factors=(Factor.PER_A,),
    ),
    Defect(
        name="head-drops-item-count",
        summary="A head takes **kwargs but ignores the item count; its mean is not divided by G.",
        who="custom and remote modules with **kwargs, and hundreds of heads of the library; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="4.47.0",
        seam="compute_loss",
        source=(_issue(47688), _issue(37766)),
        remove_when="every head that takes **kwargs divides by the item count, or declares that it does not",
        factors=(Factor.G_W,),
    ),
    Defect(
        name="generic-head-drops-item-count",
        summary="The generic classification heads take **kwargs but ignore the item count.",
        who="Llama, Qwen, Mistral ... ForSequenceClassification and ForTokenClassification; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="4.54.0",
        seam="compute_loss",
        source=(_issue(47688), _line("5.23.0", 190, "modeling_layers.py")),
        remove_when="modeling_layers.py passes **kwargs on to the loss, and the loss divides by the item count",
        factors=(Factor.G_W,),
    ),
    Defect(
        name="classic-head-drops-item-count",
        summary="Heads that compute cross entropy themselves take **kwargs but ignore the item count.",
        who="BERT, RoBERTa, T5, BART, Whisper, Wav2Vec2 and some 380 more classes; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="5.0.0",
        seam="compute_loss",
        source=(_issue(47688), _line("5.23.0", 1125, "models/bert/modeling_bert.py")),
        remove_when="those heads divide by the item count, or declare accepts_loss_kwargs = False",
        factors=(Factor.G_W,),
    ),
    Defect(
        name="undivided-mean-times-ranks",
        summary="Without accumulation, a mean is multiplied by W, as if it were part of a sum.",
        who="heads that take **kwargs and return their own mean; G = 1, W > 1",
        wrong=_TIMES_RANKS,
        since="4.54.0",
        seam="compute_loss",
        source=(_line("5.23.0", 2207), _pull(39395)),
        remove_when="only a loss that was divided by the global item count is multiplied by W",
        factors=(Factor.W,),
    ),
    Defect(
        name="llava-mean-loss",
        summary="LLaVA and five relatives take **kwargs but keep the mean of their own cross entropy.",
        who="LLaVA, LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision, Video-LLaVA, VipLLaVA; G > 1",
        wrong=_UNDIVIDED,
        since="4.49.0",
        until="4.52.0",
        seam="compute_loss",
        source=(_pull(36044), _llama_factory(7443)),
        factors=(Factor.G,),
    ),
    Defect(
        name="compiled-module-signature",
        summary="torch.compile's wrapper takes **kwargs; the wrapped module gets a num_items_in_batch it rejects.",
        who="modules compiled before the Trainer gets them whose forward takes no **kwargs",
        wrong="TypeError in the first forward",
        since="4.47.1",
        seam="compute_loss",
        source=(_line("5.23.0", 521),),
        remove_when="upstream reads the signature of the wrapped module",
    ),
    Defect(
        name="loss-func-mean-not-divided",
        summary="A compute_loss_func that returns a mean is treated as if it divided by the item count.",
        who="compute_loss_func that ignores num_items_in_batch; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="4.46.0",
        seam="compute_loss",
        source=(_issue(43595), _pull(43651)),
        remove_when="the loss, not the presence of compute_loss_func, decides whether it is divided",
        factors=(Factor.G_W,),
    ),
    Defect(
        name="loss-func-without-count",
        summary="compute_loss_func gets None instead of the item count.",
        who="compute_loss_func with a head that takes no **kwargs; in 4.47.0 with any head",
        wrong="num_items_in_batch = None",
        right="num_items_in_batch = N",
        since="4.46.2",
        until="4.47.1",
        seam="training_step",
        source=(_line("4.46.3", 5050), _issue(36331)),
        factors=(Factor.G,),
        where="if it then takes a mean",
    ),
    Defect(
        name="loss-func-without-count-again",
        summary="compute_loss_func again gets None instead of the item count.",
        who="compute_loss_func with any head",
        wrong="num_items_in_batch = None",
        right="num_items_in_batch = N",
        since="4.48.0",
        until="4.48.1",
        seam="training_step",
        source=(_line("4.48.0", 3676), _issue(36331)),
    ),
    Defect(
        name="loss-func-skipped-without-labels",
        summary="compute_loss_func is not called without `labels` in the batch; the head's own loss is trained.",
        who="compute_loss_func and targets with another name",
        wrong="the loss is the head's own",
        right="the loss is compute_loss_func's",
        since="4.46.0",
        until="4.57.0",
        seam="compute_loss",
        source=(_line("4.56.2", 4112),),
    ),
    Defect(
        name="loss-func-not-times-ranks",
        summary="The global item count is passed, but the loss is not multiplied by W.",
        who="compute_loss_func with a head that takes no **kwargs; average_tokens_across_devices, W > 1",
        wrong="grad 1/W sum_m S_m / N",
        since="4.47.1",
        until="4.49.0",
        seam="compute_loss",
        source=(_pull(35743),),
        factors=(Factor.PER_W,),
    ),
    Defect(
        name="regression-and-multi-label-mean",
        summary="Regression and multi-label losses ignore the item count: ViT and others.",
        who="image, video and audio classifiers that pass **kwargs on; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="4.56.0",
        seam="compute_loss",
        source=(_line("5.23.0", 107, "loss/loss_utils.py"),),
        remove_when="ForSequenceClassificationLoss divides by the item count in all three branches",
        factors=(Factor.G_W,),
    ),
    Defect(
        name="ctc-sum-divided-by-accelerate",
        summary="accelerate divides a sum by G as if it were a mean.",
        who="heads that return a sum, such as CTC with reduction sum; G > 1 or W > 1",
        wrong="grad 1/(G W) sum_m S_m",
        right="grad sum_m S_m",
        since="4.38.2",
        until="4.46.0",
        seam="compute_loss",
        source=(_line("4.45.2", 3518),),
        factors=(Factor.PER_G_W,),
    ),
    Defect(
        name="ctc-sum-divided",
        summary='ctc_loss_reduction="sum" is divided by G as if it were a mean.',
        who="heads that return a sum and take no **kwargs: CTC with reduction sum; G > 1 or W > 1",
        wrong="grad 1/(G W) sum_m S_m",
        right="grad sum_m S_m",
        since="4.48.0",
        until="5.0.0",
        seam="compute_loss",
        source=(_line("4.49.0", 3732),),
        factors=(Factor.PER_G_W,),
    ),
    Defect(
        name="router-loss-times-steps",
        summary="A mixture of experts adds its router loss undivided to a loss that is divided.",
        who="mixtures of experts with output_router_logits; A_m is the router's term; G > 1 or W > 1",
        wrong="grad (sum_m S_m / N + sum_m A_m)",
        right="grad (sum_m S_m / N + 1/(G W) sum_m A_m)",
        since="4.46.0",
        seam="compute_loss",
        source=(_issue(48690), _pull(48691)),
        remove_when="the router loss has the configured coefficient for every G and W",
        factors=(Factor.ROUTER,),
    ),
    Defect(
        name="label-smoothing-mean",
        summary="Label smoothing takes its own mean, which is not divided by G.",
        who="label_smoothing_factor > 0 and a head that takes **kwargs; G > 1 or W > 1",
        wrong=_TIMES_RANKS,
        since="4.46.0",
        until="5.15.0",
        seam="compute_loss",
        source=(_issue(46731), _pull(46734), _pull(47261)),
        factors=(Factor.G_W,),
    ),
    Defect(
        name="label-smoothing-drops-router-loss",
        summary="Label smoothing removes the labels from the inputs, so the model adds no router loss.",
        who="label_smoothing_factor > 0 and a mixture of experts; A_m is the router's term",
        wrong="grad sum_m S_m / N",
        right="grad (sum_m S_m / N + 1/(G W) sum_m A_m)",
        since="4.38.2",
        seam="compute_loss",
        source=(_line("5.23.0", 2156),),
        remove_when="the smoothed loss carries the router's term",
    ),
    Defect(
        name="label-smoothing-unshifted",
        summary="Label smoothing shifts the labels only for heads on the causal list; LLaVA is not on it.",
        who="label_smoothing_factor > 0 and a causal head with another name: LLaVA, custom and remote classes",
        wrong="each logit is scored against the token it has read",
        right="each logit is scored against the next token",
        since="4.38.2",
        seam="compute_loss",
        source=(_line("5.23.0", 2186),),
        remove_when="smoothing shifts where the model's own loss shifts",
    ),
    Defect(
        name="first-label-counted",
        summary="Position 0 of every row is counted, although a shifted loss ignores it.",
        who="causal heads that divide by the item count; rows whose first label is not masked",
        wrong="grad sum_m S_m / (N + rows)",
        since="4.46.2",
        until="5.10.1",
        seam="get_batch_samples",
        source=(_pull(46204),),
        factors=(Factor.MORE_BY_ROWS,),
    ),
    Defect(
        name="first-label-still-counted",
        summary="Position 0 is counted if loss_type is None, also in releases since 5.10.1.",
        who="GPT-2 (since 4.48.3) and nine more, custom and remote modules; rows whose first label is not masked",
        wrong="grad sum_m S_m / (N + rows)",
        since="4.46.2",
        seam="get_batch_samples",
        source=(_line("5.23.0", 2331),),
        remove_when="the shift is read from the loss, not from loss_type",
        factors=(Factor.MORE_BY_ROWS,),
    ),
    Defect(
        name="first-column-not-counted",
        summary="Position 0 is never counted, although an unshifted loss includes it.",
        who="compute_loss_func and custom heads with targets aligned to the logits",
        wrong="grad sum_m S_m / (N - rows)",
        since="4.46.0",
        until="4.46.2",
        seam="get_batch_samples",
        source=(_line("4.46.1", 5045),),
        factors=(Factor.LESS_BY_ROWS,),
    ),
    Defect(
        name="aligned-targets-undercounted",
        summary="Position 0 of an encoder-decoder is not counted, although its targets are not shifted.",
        who="Florence-2, and custom encoder-decoders whose name maps to the causal loss",
        wrong="grad sum_m S_m / (N - rows)",
        since="5.10.1",
        until="5.15.0",
        seam="get_batch_samples",
        source=(_line("5.14.1", 521), _line("5.14.1", 2161)),
        factors=(Factor.LESS_BY_ROWS,),
    ),
    Defect(
        name="virtual-tokens-undercounted",
        summary="Prompt tuning makes position 0 a target, but it is not counted.",
        who="PEFT prompt tuning and similar methods; rows whose first label is not masked",
        wrong="grad sum_m S_m / (N - rows)",
        since="5.10.1",
        seam="get_batch_samples",
        source=(_line("5.23.0", 2330), _pull(46204)),
        remove_when="the count includes virtual tokens",
        factors=(Factor.LESS_BY_ROWS,),
    ),
    Defect(
        name="ignore-index-miscounted",
        summary="Every label other than -100 is counted, even if the loss has another ignore index.",
        who="compute_loss_func and custom heads that divide by the item count and ignore another index",
        wrong="grad sum_m S_m / (N + ignored)",
        since="4.46.0",
        seam="get_batch_samples",
        source=(_line("5.23.0", 2335), _line("5.23.0", 154, "loss/loss_utils.py")),
        remove_when="the count uses the loss's own ignore index",
        factors=(Factor.MORE_BY_IGNORED,),
    ),
    Defect(
        name="window-without-items-is-nan",
        summary="A micro-batch or a window without items makes the loss 0 / 0.",
        who="truncated or fully masked samples, heads that return their own mean",
        wrong="log nan",
        right="log sum_m S_m / N, and 0 where N = 0",
        since="4.38.2",
        seam="compute_loss",
        source=(_line("5.23.0", 47, "loss/loss_utils.py"),),
        remove_when="a window without items logs zero and leaves the gradient at zero",
    ),
    Defect(
        name="nan-filter-in-the-log",
        summary="The log replaces the nan of a micro-batch by the sum of the window so far.",
        who="micro-batches without items, logging_nan_inf_filter left on",
        wrong="log: the sum so far counts twice",
        right="log sum_m S_m / N",
        since="4.38.2",
        seam="training_step",
        source=(_line("5.23.0", 1917),),
        remove_when="a nan is excluded from the logged mean, or a micro-batch without items gives zero",
    ),
    Defect(
        name="loss-scaled-in-place",
        summary="`loss *= ...` overwrites a tensor that the backward pass may need.",
        who="losses such as a root; G > 1 up to 4.46.1, then W > 1 with average_tokens_across_devices",
        wrong="RuntimeError in the backward pass",
        since="4.46.0",
        seam="compute_loss",
        source=(_line("4.46.1", 3605), _line("5.23.0", 2207)),
        remove_when="the loss is scaled out of place",
    ),
    Defect(
        name="averaging-gathers-nothing",
        summary="Gathering the item count raises if there is none, such as at the end of an epoch.",
        who="average_tokens_across_devices, W > 1; more than one epoch, or batches without `labels`",
        wrong="TypeError: Unsupported types (NoneType)",
        since="4.46.2",
        until="4.48.0",
        seam="get_batch_samples",
        source=(_issue(35387), _issue(35076), _pull(35399)),
    ),
    Defect(
        name="averaging-times-ranks-without-count",
        summary="The loss is multiplied by W although no items were counted.",
        who="batches without `labels`, heads that take **kwargs; average_tokens_across_devices, W > 1",
        wrong="grad 1/G sum_m S_m / n_m, from 4.48.1 on grad sum_m S_m / n_m",
        since="4.48.0",
        until="4.49.0",
        seam="compute_loss",
        source=(_line("4.48.3", 3759), _pull(35743)),
        factors=(Factor.W, Factor.G_W),
        where="from 4.48.1 on",
    ),
    Defect(
        name="count-gathered-from-the-cpu",
        summary="The item count is gathered on the device of the labels, and NCCL rejects CPU tensors.",
        who="batches that the data loader leaves on the CPU; average_tokens_across_devices, W > 1 on GPUs",
        wrong="Tensors must be CUDA and dense",
        since="4.46.2",
        until="4.57.0",
        seam="get_batch_samples",
        source=(_issue(38035), _issue(39896), _pull(40773)),
        evidence="read",
    ),
    Defect(
        name="evaluation-loss-times-ranks",
        summary="The evaluation loss is multiplied by W.",
        who="average_tokens_across_devices, W > 1, heads that take **kwargs",
        wrong="eval_loss W mean_m S_m / n_m",
        right="eval_loss mean_m S_m / n_m",
        since="4.46.2",
        until="4.49.0",
        seam="compute_loss",
        source=(_issue(35078), _pull(35743)),
        not_fixed=_EVALUATION,
    ),
    Defect(
        name="evaluation-mean-times-ranks",
        summary="The evaluation loss of a head that gets the item count and ignores it is multiplied by W.",
        who="W > 1, heads that take **kwargs and return their own mean: BERT, most classifiers",
        wrong="eval_loss W mean_m S_m / n_m",
        right="eval_loss mean_m S_m / n_m",
        since="4.57.0",
        seam="compute_loss",
        source=(_line("5.23.0", 3262),),
        remove_when="an evaluated loss is multiplied by the ranks only where the head divided by their items",
        not_fixed=_EVALUATION,
    ),
    Defect(
        name="epoch-tail-not-trained",
        summary="An epoch counts floor(micro-batches / G) steps, so training ends before the last samples.",
        who="epochs that are no multiple of G micro-batches, num_train_epochs given",
        wrong="max_steps = epochs * floor(micro-batches / G)",
        right="max_steps = epochs * ceil(micro-batches / G)",
        since="4.38.2",
        until="4.52.0",
        seam="train",
        source=(_issue(36297), _pull(37923)),
    ),
    Defect(
        name="remainder-of-examples",
        summary="The length of the last window is computed from the number of samples, not of micro-batches.",
        who="epochs that are no multiple of G micro-batches, per_device_train_batch_size or W > 1",
        wrong="the last window has samples % G micro-batches: the rest is never trained, or leaks into the next epoch",
        right="the last window has micro-batches % G",
        since="4.46.0",
        until="4.52.0",
        seam="train",
        source=(_issue(37777), _pull(37923)),
    ),
    Defect(
        name="tail-carried-into-next-epoch",
        summary="The last r micro-batches of an epoch share one step with the first G - r of the next.",
        who="epochs that are no multiple of G micro-batches, and longer than G",
        wrong="one step over two epochs; those left over at the end are never trained",
        right="a step of its own for the r micro-batches",
        since="4.38.2",
        until="4.47.0",
        seam="train",
        source=(_issue(22098), _line("4.45.2", 2411), _line("4.46.3", 2435)),
    ),
    Defect(
        name="two-counts-in-one-step",
        summary="A step over two epochs divides its micro-batches by the counts of two windows.",
        who="heads that divide by the item count; epochs that are no multiple of G micro-batches",
        wrong="grad (the tail's S over the tail's N, plus the other part's S over its own window's N)",
        since="4.46.0",
        until="4.47.0",
        seam="train",
        source=(_llama_factory(6639),),
    ),
    Defect(
        name="stream-tail-not-stepped",
        summary="The short last window of a stream gets no step; its gradient is added to the next epoch's.",
        who="datasets without a length, epochs that are no multiple of G micro-batches",
        wrong="grad (the tail's S over the tail's N, plus the next window's S over that window's N)",
        right="a step of its own for the tail",
        since="4.47.0",
        seam="train",
        source=(_line("5.23.0", 1889), _line("5.23.0", 2546)),
        remove_when="the loop steps when the iterator ends",
    ),
    Defect(
        name="last-micro-batch-not-reduced",
        summary="DDP synchronises every micro-batch but the last, so the ranks diverge.",
        who="W > 1 under DDP; with G = 1 nothing is ever synchronised",
        wrong="each rank steps by a gradient of its own",
        since="4.46.2",
        until="4.46.3",
        seam="training_step",
        source=(_line("4.46.2", 2477), _pull(34373)),
    ),
    Defect(
        name="step-across-epochs-not-synchronised",
        summary="The step across two epochs ends without DDP synchronisation, so the ranks diverge.",
        who="W > 1 under DDP; epochs that are no multiple of G micro-batches",
        wrong="each rank steps by a gradient of its own",
        since="4.46.2",
        until="4.47.0",
        seam="train",
        source=(_line("4.46.3", 2477), _line("4.46.3", 2435)),
    ),
    Defect(
        name="short-epoch-not-synchronised",
        summary="The only step of an epoch shorter than G is not synchronised, so the ranks diverge.",
        who="W > 1 under DDP; epochs of r < G micro-batches",
        wrong="each rank steps by a gradient of its own",
        since="4.38.2",
        until="4.46.3",
        seam="train",
        source=(_line("4.45.2", 2387), _line("4.45.2", 2406)),
    ),
    Defect(
        name="deepspeed-divides-again",
        summary="DeepSpeed's engine divides an already divided loss by G again.",
        who="DeepSpeed; heads that divide by the item count, and from 4.48.0 on every head; G > 1",
        wrong="grad 1/G sum_m S_m / N",
        since="4.46.2",
        until="4.49.0",
        seam="training_step",
        source=(_pull(35808),),
        evidence="read",
        factors=(Factor.PER_G,),
    ),
    Defect(
        name="deepspeed-no-sync-refused",
        summary="The loop calls DeepSpeed's no_sync, which ZeRO 2 and 3 reject.",
        who="DeepSpeed from 0.16 on, ZeRO 2 or 3; G > 1",
        wrong="AssertionError: no_sync is not compatible with ZeRO",
        since="4.46.2",
        until="4.47.1",
        seam="train",
        source=(_issue(34984), _pull(35157)),
        evidence="read",
        not_fixed="use transformers 4.47.1 or newer, or DeepSpeed before 0.16",
    ),
    Defect(
        name="apex-undivided",
        summary="apex scales a loss that was not divided by G.",
        who="apex; heads that do not divide by the item count, and up to 4.45 every head; G > 1",
        wrong=_UNDIVIDED,
        since="4.38.2",
        until="5.0.0",
        seam="training_step",
        source=(_line("4.57.6", 4057),),
        evidence="read",
        factors=(Factor.G,),
        not_fixed=_NO_APEX,
    ),
    Defect(
        name="apex-returns-no-loss",
        summary="With apex, training_step returns None, which the loop cannot add.",
        who="apex",
        wrong="TypeError in the first step",
        since="4.46.2",
        until="4.56.0",
        seam="training_step",
        source=(_line("4.55.4", 3847),),
        evidence="read",
        not_fixed=_NO_APEX,
    ),
    Defect(
        name="data-parallel-mean-of-shares",
        summary="Partial sums, one per GPU, are averaged instead of added.",
        who="torch.nn.DataParallel; heads that divide by the item count (4.46.2 and 4.46.3 raise)",
        wrong="grad 1/GPUs sum_m S_m / N",
        since="4.46.0",
        until="4.50.0",
        seam="compute_loss",
        source=(_issue(37474),),
        evidence="read",
        factors=(Factor.PER_GPUS,),
        not_fixed=_ONE_PROCESS_A_GPU,
    ),
    Defect(
        name="data-parallel-count-not-split",
        summary="The item count has no axis along which DataParallel can split it.",
        who="torch.nn.DataParallel; heads that divide by the item count",
        wrong="chunk expects at least a 1-dimensional tensor",
        since="4.50.0",
        until="4.51.0",
        seam="get_batch_samples",
        source=(_issue(36492), _pull(36967)),
        evidence="read",
        not_fixed=_ONE_PROCESS_A_GPU,
    ),
    Defect(
        name="data-parallel-batch-lost",
        summary="The item count has one element, so DataParallel runs one GPU and drops the others' samples.",
        who="torch.nn.DataParallel; heads that divide by the item count",
        wrong="grad of the first GPU's samples / N",
        since="4.51.0",
        until="4.57.0",
        seam="get_batch_samples",
        source=(_pull(40799), _issue(38938)),
        evidence="read",
        not_fixed=_ONE_PROCESS_A_GPU,
    ),
    Defect(
        name="data-parallel-count-approximated",
        summary="Each GPU divides by N / GPUs, rounded down, however many items it holds.",
        who="torch.nn.DataParallel with average_tokens_across_devices off",
        wrong="grad 1/GPUs sum_m S_m / floor(N / GPUs)",
        since="4.57.0",
        seam="get_batch_samples",
        source=(_line("5.23.0", 2346),),
        remove_when="the item count covers all GPUs, with all options",
        evidence="read",
        not_fixed=_ONE_PROCESS_A_GPU,
    ),
    Defect(
        name="data-parallel-gathered-loss-times-gpus",
        summary="A loss of the gathered outputs is multiplied by the number of GPUs.",
        who="torch.nn.DataParallel with compute_loss_func or label smoothing",
        wrong="grad GPUs sum_m S_m / N",
        since="4.57.0",
        seam="compute_loss",
        source=(_line("5.23.0", 2207),),
        remove_when="only losses computed on each GPU are multiplied",
        evidence="read",
        factors=(Factor.GPUS,),
        not_fixed=_ONE_PROCESS_A_GPU,
    ),
    Defect(
        name="tensor-parallel-loss-times-copies",
        summary="The loss is multiplied by the number of all ranks, including those with the same samples.",
        who="tensor parallelism by parallelism_config; heads that divide by the item count",
        wrong="grad tp sum_m S_m / N",
        since="4.56.0",
        until="5.10.0",
        seam="compute_loss",
        source=(_pull(45994), _issue(39648)),
        evidence="read",
        factors=(Factor.COPIES,),
    ),
    Defect(
        name="tensor-parallel-count-not-gathered",
        summary="The count of one rank is divided by the tensor-parallel size, although it was never summed.",
        who="tensor parallelism with average_tokens_across_devices off",
        wrong="grad tp/W sum_k (sum of S_m on rank k) / N_k",
        since="4.56.0",
        seam="get_batch_samples",
        source=(_line("5.23.0", 2355),),
        remove_when="the count is divided only where it was gathered",
        evidence="read",
        factors=(Factor.COPIES,),
    ),
    Defect(
        name="sequence-parallel-mean-of-means",
        summary="DeepSpeed sequence parallelism averages micro-batches as if each held equally many items.",
        who="DeepSpeed sequence parallelism (ALST); G > 1 or W > 1",
        wrong=_MEANS,
        since="5.0.0",
        seam="compute_loss",
        source=(_line("5.23.0", 2153),),
        remove_when="the sum over the sequence-parallel group is divided by the global item count",
        evidence="read",
        not_fixed=_DATA_PARALLEL_ONLY,
    ),
)


def is_present(name: str, release: str) -> bool:
    """Whether a release has the defect of this name.

    Raises:
        KeyError: if there is no such row.
    """
    return {defect.name: defect for defect in DEFECTS}[name].is_in(Version(release))
