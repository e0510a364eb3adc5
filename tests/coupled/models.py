"""Models whose loss couples the samples of a batch, tiny, in float64; a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from hf_accum_fix import accumulation_windows
from tests.numerics.parity import StockRecorder, Trained, moved, train, trainable, training_arguments

SAMPLES = 8

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IDS = {"bos_token_id": 0, "eos_token_id": 49, "pad_token_id": 1}
_TEXT = {"vocab_size": 50, "max_position_embeddings": 12, **_SIZES, **_IDS}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION = {**_SIZES, "image_size": 8, "patch_size": 4}


def _pair(kind: str, text: Mapping[str, Any] | None = None, **given: Any) -> Callable[[], nn.Module]:
    """A model of transformers with a text and a vision tower."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(
            text_config={**_TEXT, **(text or {})}, vision_config=_VISION, **given
        )
        return getattr(transformers, f"{kind}Model")(config)  # type: ignore[no-any-return]

    return make


def descend(model: nn.Module, losses: Sequence[Callable[[], Tensor]], rate: float = 0.05) -> dict[str, Tensor]:
    """How far steps of SGD move a model, one a loss."""
    before = trainable(model)
    for loss in losses:
        held = [each for each in model.parameters() if each.requires_grad]
        with torch.no_grad():
            for each, grad in zip(held, torch.autograd.grad(torch.enable_grad()(loss)(), held), strict=True):
                each -= rate * grad
    return moved(model, before)


def _dual() -> nn.Module:
    of_text = {key: _TEXT[key] for key in ("vocab_size", *_VISION) if key in _TEXT}
    text = transformers.BertConfig(**of_text, **_NO_DROPOUT)
    image = transformers.ViTConfig(**_VISION)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(image, text, projection_dim=12)
    return transformers.VisionTextDualEncoderModel(config)


class Towers(nn.Module):
    """Two encoders of one's own, and InfoNCE with a learnt temperature."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(12) if norm else nn.Tanh()
        self.one = nn.Sequential(nn.Linear(6, 12), middle, nn.Dropout(dropout), nn.Linear(12, 8))
        self.other = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 8))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def vectors(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, other = self.vectors(x, y)
        logits = one @ other.T * self.temperature.exp()
        right = torch.arange(len(logits))
        return {"loss": F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)}


class Supervised(Towers):
    """Supervised contrastive: samples of one class are positives of one another (Khosla et al., 2020)."""

    def forward(self, x: Tensor, y: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        one, other = self.vectors(x, y)
        logits = one @ other.T * self.temperature.exp()
        return {"logits": logits} if labels is None else {"loss": supervised({"logits": logits}, labels)}


def supervised(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """As a compute_loss_func, too."""
    alike = (labels[:, None] == labels[None, :]).to(outputs["logits"])
    return -(outputs["logits"].log_softmax(dim=1) * alike).sum(1).div(alike.sum(1)).mean()


class Passages(Towers):
    """Several passages of a question, flattened, as of DPR: the first is the right one."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, other = self.vectors(x, y.flatten(0, 1))
        logits = one @ other.T * self.temperature.exp()
        return {"loss": F.cross_entropy(logits, torch.arange(len(one)) * (len(other) // len(one)))}


class Queue(Towers):
    """MoCo: the vectors of the last batches are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, other = self.vectors(x, y)
        logits = one @ torch.cat([other, self.queue]).T * self.temperature.exp()
        self.queue.copy_(torch.cat([other.detach(), self.queue])[:4])
        return {"loss": F.cross_entropy(logits, torch.arange(len(one)))}


class Averaged(Towers):
    """MoCo v3, BYOL: keys are those of a moving average of an encoder, which every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.key = nn.Linear(5, 8), nn.Linear(5, 8).requires_grad_(False)
        self.key.load_state_dict(self.other.state_dict())

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for one, key in zip(self.other.parameters(), self.key.parameters(), strict=True):
            key.data = 0.9 * key.data + 0.1 * one.data
        one, other = self.vectors(x, y)
        right = torch.arange(len(one))
        return {"loss": sum(F.cross_entropy(each @ self.key(y).T, right) for each in (one, other))}  # type: ignore[dict-item]


class Pooled(nn.Module):
    """A bi-encoder whose texts are pooled by a function, and padded to the longest of a batch by zeros."""

    def __init__(self, as_module: bool = True) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.vectors = nn.Identity() if as_module else torch.Tensor.contiguous

    def states(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(self.words(x)), (x != 0)[..., None]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        pooled = ((states * mask).sum(1) / mask.sum(1) for states, mask in map(self.states, (x.long(), y.long())))
        one, other = (self.vectors(each) for each in pooled)
        return {"loss": F.cross_entropy(one @ other.T, torch.arange(len(one)))}


class Late(Pooled):
    """Late interaction, as of ColBERT: the loss takes a vector of each token, and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        (one, ones), (other, others) = ([self.vectors(s), self.masks(mask)] for s, mask in map(self.states, (x, y)))
        scores = torch.einsum("aid,bjd->abij", one, other).masked_fill(~others[:, :, 0][None, :, None], -1e9)
        best = scores.amax(-1).masked_fill(~ones[:, :, 0][:, None], 0.0).sum(-1)
        return {"loss": F.cross_entropy(best, torch.arange(len(one)))}


class RootOfMean(nn.Module):
    """A root of a mean over all samples, as of GLPN."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.encoder(x) - y[:, :3]).square().mean().sqrt()}


def _depth() -> nn.Module:
    none = {**_NO_DROPOUT, "drop_path_rate": 0.0}
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "num_attention_heads": [1] * 4, "mlp_ratios": [2] * 4}
    model = transformers.GLPNForDepthEstimation(transformers.GLPNConfig(**sizes, **none, decoder_hidden_size=8))
    for each in model.modules():
        # As those have it who fine-tune with few samples.
        if isinstance(each, nn.BatchNorm2d):
            each.train = lambda mode=True, of=each: nn.Module.train(of, False)  # type: ignore[method-assign]
    return model.train()


@dataclass(frozen=True)
class Coupled:
    """One model."""

    make: Callable[[], nn.Module]  # without its dtype
    samples: Sequence[Mapping[str, Tensor]]  # as its collator gets them
    constant: Mapping[str, Any] = field(default_factory=dict)  # inputs that are the same for every batch
    options: Mapping[str, Any] = field(default_factory=dict)  # besides ``coupled_loss``
    given: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the Trainer
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None  # of the whole batch; None: the model's
    tolerance: float = 1e-12  # relative, of the gradient; of float64: sums in another order
    stock_ends: bool = False  # stock scales a loss in place that its last operation has saved, which is an error

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(dtype)

    def batch(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {key: torch.stack([each[key] for each in samples]) for key in samples[0]} | dict(self.constant)

    def full(self, model: nn.Module, samples: Sequence[Mapping[str, Tensor]] = ()) -> Tensor:
        """The loss of all samples at once."""
        batch = self.batch(samples or self.samples)
        return self.loss(model, batch) if self.loss is not None else model(**batch)["loss"]

    def loop(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        steps: int,
        scale: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> Any:
        """The windows of a loop of one's own, each once its backwards are run."""
        for window in accumulation_windows(batches, steps=steps, coupled_loss="exact", **self.options):
            for batch in window:
                with window.micro_batch(model):
                    scale(window.loss(model, batch)).backward()
            yield window

    def batches(self, rows: int) -> list[dict[str, Any]]:
        return [self.batch(self.samples[at : at + rows]) for at in range(0, len(self.samples), rows)]

    def train(self, path: str, cut: tuple[int, int], folder: Path, **given: Any) -> Trained:
        """One step, or as many as ``given``, by stock, the patch or the subclass."""
        arguments = {**given}
        options = arguments.pop("options", {"coupled_loss": "exact", **self.options})
        kind, model = arguments.pop("kind", StockRecorder), arguments.pop("model", None)

        def make() -> Any:
            return kind(
                model=self.build() if model is None else model,
                args=training_arguments(folder, *cut, **arguments),
                train_dataset=list(self.samples),
                data_collator=self.batch,
                **self.given,
            )

        return train(make, path, **(options if path == "apply" else {}))


def _of_texts() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 48, (SAMPLES, 10), generator=g)
    ids[:, -1] = 49
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=g, dtype=torch.float64)
    return [{"input_ids": row, "pixel_values": image} for row, image in zip(ids, pixels, strict=True)]


def _of_patches() -> list[dict[str, Tensor]]:
    """As SigLIP 2 has images: patches, and how many there are."""
    g, rows = torch.Generator().manual_seed(3), _of_texts()
    patches = torch.randn(SAMPLES, 4, 48, generator=g, dtype=torch.float64)
    sizes = {"pixel_attention_mask": torch.ones(4, dtype=torch.long), "spatial_shapes": torch.tensor([2, 2])}
    return [{**row, **sizes, "pixel_values": each} for row, each in zip(rows, patches, strict=True)]


def _of_numbers(classes: int = 0) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    x, y = (torch.randn(SAMPLES, width, generator=g, dtype=torch.float64) for width in (6, 5))
    rows = [{"x": x[at], "y": y[at]} for at in range(SAMPLES)]
    return [{**row, "labels": torch.tensor(at % classes)} for at, row in enumerate(rows)] if classes else rows


def _of_words(longest: int) -> list[dict[str, Tensor]]:
    """Texts of two words to ``longest``, with zeros up to it; `Padded` takes the needless ones away."""
    g = torch.Generator().manual_seed(5)
    x, y = (torch.randint(1, 50, (SAMPLES, longest), generator=g) for _ in range(2))
    for at in range(SAMPLES):
        x[at, 2 + at % (longest - 1) :], y[at, 2 + 3 * at % (longest - 1) :] = 0, 0
    return [{"x": x[at], "y": y[at]} for at in range(SAMPLES)]


class Padded(Coupled):
    """To the longest text of a batch."""

    def batch(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {key: each[:, each.any(0)] for key, each in super().batch(samples).items()}


def _of_depths() -> list[dict[str, Tensor]]:
    """Depth maps, with ever more pixels that were not measured."""
    g = torch.Generator().manual_seed(4)
    pixels = torch.randn(SAMPLES, 3, 32, 32, generator=g, dtype=torch.float64)
    depths = 9 * torch.rand(SAMPLES, 32, 32, generator=g, dtype=torch.float64)
    for at, each in enumerate(depths):
        each[: 3 * at] = 0.0
    return [{"pixel_values": each, "labels": depth} for each, depth in zip(pixels, depths, strict=True)]


_RETURNS = {"return_loss": True}
_OWN = {"coupled": ("one", "other")}

MODELS: Mapping[str, Coupled] = {
    "CLIP": Coupled(_pair("CLIP", projection_dim=12), _of_texts(), _RETURNS),
    "SigLIP": Coupled(_pair("Siglip", {"projection_size": 16}), _of_texts(), _RETURNS),
    "ChineseCLIP": Coupled(_pair("ChineseCLIP", _NO_DROPOUT, projection_dim=12), _of_texts(), _RETURNS),
    "AltCLIP": Coupled(_pair("AltCLIP", {**_NO_DROPOUT, "project_dim": 16}, projection_dim=12), _of_texts(), _RETURNS),
    "MetaClip2": Coupled(_pair("MetaClip2", projection_dim=12), _of_texts(), _RETURNS),
    "CLIPSeg": Coupled(_pair("CLIPSeg", projection_dim=12), _of_texts(), _RETURNS),
    "OwlViT": Coupled(_pair("OwlViT", projection_dim=12), _of_texts(), _RETURNS),
    "Owlv2": Coupled(_pair("Owlv2", projection_dim=12), _of_texts(), _RETURNS),
    "Blip": Coupled(_pair("Blip", {**_NO_DROPOUT, "sep_token_id": 3}, projection_dim=12), _of_texts(), _RETURNS),
    # It resizes its positions in float32.
    "Siglip2": Coupled(_pair("Siglip2", {"projection_size": 16}), _of_patches(), _RETURNS, tolerance=1e-8),
    "VisionTextDualEncoder": Coupled(_dual, _of_texts(), _RETURNS),
    "GLPN, BatchNorm frozen": Coupled(_depth, _of_depths(), stock_ends=True),
    "InfoNCE of one's own": Coupled(Towers, _of_numbers(), options=_OWN),
    "InfoNCE of one's own, found": Coupled(Towers, _of_numbers()),
    "flattened passages": Coupled(
        Passages, [{**row, "y": torch.stack([row["y"], row["y"].flip(0)])} for row in _of_numbers()]
    ),
    "mean pooling, padded to the longest": Padded(Pooled, _of_words(9)),
    "late interaction": Coupled(Late, _of_words(9), options={"coupled": ("vectors", "masks")}),
    "supervised contrastive": Coupled(Supervised, _of_numbers(3), options=_OWN),
    "two classes by a flag": Coupled(
        Supervised, [{**row, "labels": row["labels"] > 0} for row in _of_numbers(2)], options=_OWN
    ),
    "supervised, by a compute_loss_func": Coupled(
        Supervised,
        _of_numbers(3),
        options=_OWN,
        given={"compute_loss_func": supervised},
        loss=lambda model, batch: supervised(model(batch["x"], batch["y"]), batch["labels"]),
    ),
}
