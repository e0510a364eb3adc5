"""Tiny heads of every kind the promise is made for, with ragged samples and a reference that knows no Trainer.

A head's reference is the loss of the whole global batch in one forward, in float64. Dropout is off in every config, so
that training mode is a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from packaging.version import Version
from torch import Tensor, nn

#: Float64 from end to end: what is left is the rounding of sums in another order.
FLOAT64 = 1e-12
#: The library computes the loss in float32 inside a float64 model (``logits.float()``).
FLOAT32_LOSS = 1e-6


def before(release: str) -> bool:
    """What the stock Trainer gets wrong depends on the release these tests run on."""
    return Version(hf.__version__) < Version(release)


VOCABULARY = 48
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Sample = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """One kind of loss.

    Attributes:
        build: a new model, in float64, the same every time.
        samples: eight ragged samples.
        tolerance: relative, of parameter change, loss and gradient norm.
        stock_wrong: the installed stock Trainer is off by more than 1e-3 for the split (1, 8).
        loss: loss of a batch as the promise defines it, where that is not what the model returns for the full batch.
        router: coefficient of the model's router loss, which is a mean over micro-batches and ranks by convention.
        arguments, trainer: further keyword arguments of TrainingArguments and of the Trainer.
        told_false: ``model_accepts_loss_kwargs`` is set False after ``Trainer.__init__``, as LLaMA-Factory does.
        exact: False for a loss that is no weighted mean over items; its reference is the mean over micro-batches.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: Sequence[Sample]
    tolerance: float = FLOAT32_LOSS
    stock_wrong: bool = True
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    router: float = 0.0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[Sequence[Sample]], Batch] | None = None
    exact: bool = True
    told_false: bool = False

    def batch(self, samples: Sequence[Sample]) -> Batch:
        return (self.collate or collate)(samples)

    def reference_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.loss is not None:
            return self.loss(model, dict(batch))
        return model(**batch)["loss"]


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad token-wise inputs on the right, stack the rest, keep lists of dicts."""
    batch: Batch = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if not isinstance(values[0], Tensor):
            batch[key] = values
        elif values[0].ndim == 1:
            fill = -100 if "labels" in key else 0
            batch[key] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
        else:
            batch[key] = torch.stack(values)
    return batch


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        model = build().to(dtype)
        # Heads start near zero: spread the logits, so that one token's loss is not another's.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3.0)
        return model

    return built


# --- data -----------------------------------------------------------------------------------------------------------

LENGTHS = (5, 17, 9, 3, 22, 11, 6, 14)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(
    *, masked: Callable[[int, int], int] | None = None, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[Sample]:
    """Token samples; ``masked(index, length)`` gives how many leading labels are a masked prompt."""
    g = _generator(seed)
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
    g = _generator(1)
    return [{**sample, "labels": labels(index, sample, g)} for index, sample in enumerate(base or text())]


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


def images(
    labels: Callable[[int, torch.Generator], Any], size: int = 32, dtype: torch.dtype = torch.float64
) -> list[Sample]:
    g = _generator(2)
    return [
        {"pixel_values": torch.randn(3, size, size, generator=g, dtype=torch.float64).to(dtype), "labels": labels(i, g)}
        for i in range(8)
    ]


# --- losses written out ---------------------------------------------------------------------------------------------


def shifted_cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits.double(), labels, label_smoothing=smoothing, reduction=reduction)


def func_with_number(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return shifted_cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def func_with_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return shifted_cross_entropy(outputs["logits"], labels)


def func_by_hand(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """No loss function of torch in it, so nothing can be watched."""
    logits, labels = outputs["logits"][:, :-1].double(), labels[:, 1:]
    valid = labels != -100
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(log_p * valid).sum() / num_items_in_batch


def func_with_constant(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A constant without a graph where there is no target, as LLaMA-Factory's DFT loss returns."""
    if not bool((labels[:, 1:] != -100).any()):
        return torch.tensor(0.0, dtype=torch.float64)
    return func_by_hand(outputs, labels, num_items_in_batch)


def func_reference(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return shifted_cross_entropy(model(**batch)["logits"], labels)


def smoothing_reference(epsilon: float, shift: bool = True) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        logits = model(**batch)["logits"].double()
        if shift:
            return shifted_cross_entropy(logits, labels, smoothing=epsilon)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=epsilon)

    return loss


# --- plain modules --------------------------------------------------------------------------------------------------


class TokenModel(nn.Module):
    """A language model of one's own; subclasses say what they do with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def logits(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + torch.tanh(self.mix(hidden)).cumsum(dim=1) / 4
        return self.head(hidden)

    def mean(self, input_ids: Tensor, labels: Tensor, reduction: str = "mean") -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"loss": shifted_cross_entropy(logits, labels, reduction=reduction), "logits": logits}


class NoKwargs(TokenModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> dict[str, Tensor]:
        return self.mean(input_ids, labels)


class DropsKwargs(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        return self.mean(input_ids, labels)


class DeclaresFalse(DropsKwargs):
    accepts_loss_kwargs = False


class UsesTensor(TokenModel):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        if num_items_in_batch is None:
            return self.mean(input_ids, labels)
        out = self.mean(input_ids, labels, reduction="sum")
        return {**out, "loss": out["loss"] / num_items_in_batch}


class UsesItem(UsesTensor):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        number = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).item()
        return super().forward(input_ids, labels, number)


class UsesInt(UsesTensor):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels, None if num_items_in_batch is None else int(num_items_in_batch))


class MeanOfSampleMeans(TokenModel):
    """The mean over samples of each sample's own token mean: its items are samples, though its labels are tokens."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        logits, labels = self.logits(input_ids)[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()}


class AttendedOnly(TokenModel):
    """Leaves out what the attention mask does, as LLaVA did up to 4.51."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        attended = attention_mask[:, 1:] != 0
        logits, labels = self.logits(input_ids)[:, :-1][attended], labels[:, 1:][attended]
        return {"loss": F.cross_entropy(logits, labels)}


class RootOfMean(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.mean(input_ids, labels)["loss"].sqrt()}


class TwoTerms(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, kind: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        out = self.mean(input_ids, labels)
        return {"loss": out["loss"] + F.cross_entropy(out["logits"][:, 0, :2], kind)}


# --- library heads --------------------------------------------------------------------------------------------------


def llama(**overrides: Any) -> nn.Module:
    config = hf.LlamaConfig(
        **{**TINY, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, **overrides}
    )
    return hf.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config)


ROUTER = 0.3


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **TINY,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER,
        max_position_embeddings=64,
        pad_token_id=0,
        experts_implementation="eager",
    )
    return hf.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = hf.Qwen3MoeConfig(
        **TINY,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER,
        max_position_embeddings=64,
        pad_token_id=0,
        experts_implementation="eager",
    )
    return hf.Qwen3MoeForCausalLM(config)


IMAGE_TOKEN = 3


def llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text_config = hf.LlamaConfig(**TINY, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text_config, image_token_index=IMAGE_TOKEN, image_seq_length=4
    )
    model = hf.LlavaForConditionalGeneration(config)
    # What the features of the last layer do not reach stays out of the gradient, on one rank and two.
    for name, parameter in model.named_parameters():
        if "vision" in name:
            parameter.requires_grad_(False)
    return model


def llava_samples() -> list[Sample]:
    g = _generator(4)
    # Up to 4.44 the model itself spreads one token over the four patches.
    tokens = 1 if before("4.45") else 4
    samples = []
    for sample in text():
        ids = torch.cat([torch.full((tokens,), IMAGE_TOKEN), sample["input_ids"]])
        labels = torch.cat([torch.full((tokens,), -100), sample["labels"]])
        pixels = torch.randn(3, 16, 16, generator=g, dtype=torch.float64)
        samples.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}
        )
    return samples


def bert(head: str, **overrides: Any) -> Callable[[], nn.Module]:
    config = dict(TINY, **NO_DROPOUT, max_position_embeddings=64, pad_token_id=0, **overrides)
    return lambda: getattr(hf, head)(hf.BertConfig(**config))


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def bart(head: str) -> Callable[[], nn.Module]:
    config = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
    return lambda: getattr(hf, head)(hf.BartConfig(**config))


def vit(**overrides: Any) -> Callable[[], nn.Module]:
    config = dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        **NO_DROPOUT,
    )
    return lambda: hf.ViTForImageClassification(hf.ViTConfig(**{**config, **overrides}))


class FrozenBatchNorm(nn.BatchNorm2d):
    """Keeps its statistics, as fine-tuning with small batches does."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


def segformer(freeze: bool = True) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = hf.SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            num_labels=4,
        )
        model = hf.SegformerForSemanticSegmentation(config)
        if freeze:
            model.decode_head.batch_norm = FrozenBatchNorm(16)
        return model

    return build


def segments(index: int, g: torch.Generator) -> Tensor:
    labels = torch.randint(0, 4, (32, 32), generator=g)
    labels[: 4 * index] = 255
    return labels


def wav2vec2_ctc(reduction: str) -> Callable[[], nn.Module]:
    config = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "conv_dim": [8, 8],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "feat_extract_norm": "layer",
        "feat_proj_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.0,
        "mask_time_prob": 0.0,
        "apply_spec_augment": False,
        "ctc_loss_reduction": reduction,
        "pad_token_id": 0,
        "ctc_zero_infinity": True,
        "do_stable_layer_norm": True,
    }
    return lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**config))


def speech() -> list[Sample]:
    g = _generator(5)
    return [
        {
            "input_values": torch.randn(400, generator=g, dtype=torch.float64),
            "labels": torch.randint(1, 12, (2 + index,), generator=g),
        }
        for index in range(8)
    ]


def electra_discriminator() -> nn.Module:
    return hf.ElectraForPreTraining(
        hf.ElectraConfig(**TINY, **NO_DROPOUT, embedding_size=16, max_position_embeddings=64, pad_token_id=0)
    )


def replaced_tokens(index: int, sample: Sample, g: torch.Generator) -> Tensor:
    return (torch.rand(len(sample["input_ids"]), generator=g) < 0.3).long()


def masked_patches() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        encoder_stride=8,
        **NO_DROPOUT,
    )
    return hf.ViTForMaskedImageModeling(config)


def masked_images() -> list[Sample]:
    g = _generator(6)
    return [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=g, dtype=torch.float64),
            "bool_masked_pos": torch.rand(16, generator=g) < 0.2 + 0.08 * index,
        }
        for index in range(8)
    ]


def time_series() -> nn.Module:
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=6,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    return hf.TimeSeriesTransformerForPrediction(config)


def series() -> list[Sample]:
    g = _generator(7)
    samples = []
    for index in range(8):
        observed = torch.ones(4, dtype=torch.float64)
        observed[4 - index % 4 :] = 0.0
        samples.append(
            {
                "past_values": torch.randn(8, generator=g, dtype=torch.float64),
                "past_time_features": torch.randn(8, 1, generator=g, dtype=torch.float64),
                "past_observed_mask": torch.ones(8, dtype=torch.float64),
                "future_values": torch.randn(4, generator=g, dtype=torch.float64),
                "future_time_features": torch.randn(4, 1, generator=g, dtype=torch.float64),
                "future_observed_mask": observed,
            }
        )
    return samples


def answers(outside: int = 2) -> list[Sample]:
    samples = []
    for index, sample in enumerate(text(lengths=(12,) * 8)):
        start = 99 if index % 4 == outside else index % 5
        end = 99 if index % 4 == outside else 5 + index % 6
        sample = {key: value for key, value in sample.items() if key != "labels"}
        samples.append({**sample, "start_positions": torch.tensor(start), "end_positions": torch.tensor(end)})
    return samples


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text_config = dict(
        sizes, vocab_size=VOCABULARY, max_position_embeddings=64, eos_token_id=2, pad_token_id=0, bos_token_id=1
    )
    config = hf.CLIPConfig(
        text_config=text_config, vision_config=dict(sizes, image_size=16, patch_size=8), projection_dim=8
    )
    return hf.CLIPModel(config)


def pairs() -> list[Sample]:
    g = _generator(8)
    return [
        {
            **{key: value for key, value in sample.items() if key != "labels"},
            "pixel_values": torch.randn(3, 16, 16, generator=g, dtype=torch.float64),
        }
        for sample in text(lengths=(6,) * 8)
    ]


def with_return_loss(samples: Sequence[Sample]) -> Batch:
    return {**collate(samples), "return_loss": True}


def with_shift_labels(samples: Sequence[Sample]) -> Batch:
    batch = collate(samples)
    batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama_tokens(), config)


def llama_tokens() -> nn.Module:
    config = hf.LlamaConfig(
        **TINY, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, num_labels=4, classifier_dropout=0.0
    )
    return hf.LlamaForTokenClassification(config)


def prompt_tuning() -> nn.Module:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(llama(), config)


def qwen_vl() -> nn.Module:
    """A head that declares ``accepts_loss_kwargs = False``; its image patches have no sample axis."""
    config = hf.Qwen2_5_VLConfig(
        text_config=dict(
            TINY,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=0,
            rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
        ),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=1,
        vision_end_token_id=2,
        video_token_id=40,
    )
    model = hf.Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "visual" in name:
            parameter.requires_grad_(False)
    return model


def qwen_vl_samples() -> list[Sample]:
    """One image of 4 x 4 patches, merged to 4 tokens, before each text."""
    g = _generator(9)
    samples = []
    for sample in text():
        ids = torch.cat([torch.tensor([1] + [IMAGE_TOKEN] * 4 + [2]), sample["input_ids"].clamp(max=39)])
        labels = torch.cat([torch.full((6,), -100), sample["labels"]])
        samples.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": labels,
                "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
                "pixel_values": torch.randn(16, 48, generator=g, dtype=torch.float64),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
            }
        )
    return samples


def with_flat_images(samples: Sequence[Sample]) -> Batch:
    batch = collate([{k: v for k, v in s.items() if k not in ("pixel_values", "image_grid_thw")} for s in samples])
    return {**batch, **{key: torch.cat([s[key] for s in samples]) for key in ("pixel_values", "image_grid_thw")}}


def yolos() -> nn.Module:
    config = hf.YolosConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=5,
        num_labels=3,
        **NO_DROPOUT,
    )
    return hf.YolosForObjectDetection(config)


def boxes(index: int, g: torch.Generator) -> dict[str, Tensor]:
    count = 1 + index % 3
    return {
        "class_labels": torch.randint(0, 3, (count,), generator=g),
        "boxes": 0.25 + 0.5 * torch.rand(count, 4, generator=g),
    }


def next_sentence(samples: Sequence[Sample]) -> list[Sample]:
    return [{**sample, "next_sentence_label": torch.tensor(index % 2)} for index, sample in enumerate(samples)]


# --- the table ------------------------------------------------------------------------------------------------------


def _heads() -> list[Head]:
    mlm = with_labels(masked_tokens)
    tokens = with_labels(token_classes)
    classes = with_labels(one_class)
    seq2seq = [{**s, "labels": s["input_ids"][: 2 + i]} for i, s in enumerate(text())]
    encoder_decoder = [{**s, "labels": torch.cat([s["input_ids"][:1], s["labels"][1:]])} for s in text()]
    sequence = {"num_labels": 3}
    two_terms = [{**s, "kind": torch.tensor(i % 2)} for i, s in enumerate(text())]
    multi = [{**s, "labels": torch.tensor([i % 2, 1, i % 3 == 0], dtype=torch.float64)} for i, s in enumerate(text())]
    empty = text(masked=lambda index, length: length if index in (1, 2, 3, 6) else 2)
    smooth = {"label_smoothing_factor": 0.1}
    return [
        Head("llama", seeded(llama), text(), stock_wrong=False),
        Head("llama-position-0", seeded(llama), text(masked=first_is_target), stock_wrong=False),
        Head("llama-empty-micro-batches", seeded(llama), empty, stock_wrong=False),
        Head("llama-shift-labels", seeded(llama), text(), stock_wrong=False, collate=with_shift_labels),
        Head(
            "llama-smoothing", seeded(llama), text(), stock_wrong=False, loss=smoothing_reference(0.1), arguments=smooth
        ),
        Head("gpt2-position-0", seeded(gpt2), text(masked=first_is_target)),
        Head("mixtral", seeded(mixtral), text(), router=ROUTER),
        Head(
            "mixtral-smoothing", seeded(mixtral), text(), router=ROUTER, loss=smoothing_reference(0.1), arguments=smooth
        ),
        Head("qwen3-moe", seeded(qwen3_moe), text(), router=ROUTER),
        Head("llava", seeded(llava), llava_samples(), stock_wrong=before("4.52")),
        Head(
            "llava-smoothing",
            seeded(llava),
            llava_samples(),
            loss=smoothing_reference(0.1),
            arguments=smooth,
        ),
        Head(
            "llama-classification",
            seeded(lambda: hf.LlamaForSequenceClassification(llama_config(num_labels=3))),
            classes,
        ),
        Head("bert-mlm", seeded(bert("BertForMaskedLM")), mlm, FLOAT64),
        Head("bert-empty-micro-batches", seeded(bert("BertForMaskedLM")), empty, FLOAT64),
        Head("bert-tokens", seeded(bert("BertForTokenClassification", num_labels=4)), tokens, FLOAT64),
        Head("bert-classes", seeded(bert("BertForSequenceClassification", **sequence)), classes, FLOAT64),
        Head("bert-multi-label", seeded(bert("BertForSequenceClassification", **sequence)), multi, FLOAT64),
        Head("bert-answers", seeded(bert("BertForQuestionAnswering")), answers(), FLOAT64),
        # Before 5.15 its attention weights are float32, and differ with the padding.
        Head("t5", seeded(t5), seq2seq, 1e-5 if before("5.15") else FLOAT64),
        Head("bart", seeded(bart("BartForConditionalGeneration")), seq2seq, FLOAT64),
        Head("bart-causal", seeded(bart("BartForCausalLM")), encoder_decoder, FLOAT64),
        Head("vit", seeded(vit(num_labels=3)), images(lambda i, g: torch.tensor(i % 3)), FLOAT64, stock_wrong=False),
        Head(
            "vit-regression",
            seeded(vit(num_labels=1)),
            images(lambda i, g: torch.tensor(0.3 * i, dtype=torch.float64)),
            FLOAT64,
        ),
        Head(
            "vit-multi-label",
            seeded(vit(num_labels=3, problem_type="multi_label_classification")),
            images(lambda i, g: torch.tensor([i % 2, 1, i % 3], dtype=torch.float64).clamp(max=1)),
            FLOAT64,
        ),
        Head("segformer", seeded(segformer()), images(segments), FLOAT64),
        Head("wav2vec2-ctc-mean", seeded(wav2vec2_ctc("mean")), speech()),
        Head("wav2vec2-ctc-sum", seeded(wav2vec2_ctc("sum")), speech(), stock_wrong=False),
        Head("electra", seeded(electra_discriminator), with_labels(replaced_tokens)),
        # Its denominator is the count plus 1e-5.
        Head("masked-patches", seeded(masked_patches), masked_images()),
        Head("time-series", seeded(time_series), series()),
        Head("lora", seeded(lora), tokens),
        Head("prompt-tuning", seeded(prompt_tuning), text(masked=first_is_target)),
        Head(
            "func-with-number",
            seeded(llama),
            text(),
            FLOAT64,
            stock_wrong=False,
            loss=func_reference,
            trainer={"compute_loss_func": func_with_number},
        ),
        Head(
            "func-with-mean",
            seeded(llama),
            text(),
            FLOAT64,
            loss=func_reference,
            trainer={"compute_loss_func": func_with_mean},
        ),
        Head(
            "func-by-hand",
            seeded(llama),
            text(masked=first_is_target),
            FLOAT64,
            stock_wrong=False,
            loss=func_reference,
            trainer={"compute_loss_func": func_by_hand},
        ),
        Head(
            "func-with-constant",
            seeded(llama),
            # On two ranks the stock step fails on both at once, so that neither waits for the other.
            text(masked=lambda index, length: length if index < 4 else 2),
            FLOAT64,
            loss=func_reference,
            trainer={"compute_loss_func": func_with_constant},
        ),
        Head("no-kwargs", seeded(NoKwargs), text(), FLOAT64),
        Head("drops-kwargs", seeded(DropsKwargs), text(), FLOAT64),
        Head("declares-false", seeded(DeclaresFalse), text(), FLOAT64),
        Head("uses-tensor", seeded(UsesTensor), text(masked=first_is_target), FLOAT64),
        Head("uses-item", seeded(UsesItem), text(), FLOAT64, stock_wrong=False),
        Head("uses-int", seeded(UsesInt), text(), FLOAT64, stock_wrong=False),
        Head("qwen-vl", seeded(qwen_vl), qwen_vl_samples(), collate=with_flat_images),
        Head("told-false-after-init", seeded(DropsKwargs), text(), FLOAT64, told_false=True),
        # Detection losses build float32 class weights of their own, so the whole head is run in float32.
        Head(
            "yolos",
            seeded(yolos, torch.float32),
            images(boxes, dtype=torch.float32),
            1e-5,
            stock_wrong=False,
            exact=False,
        ),
        Head("bert-pretraining", seeded(bert("BertForPreTraining")), next_sentence(mlm), FLOAT64, exact=False),
        Head("compiled", seeded(lambda: torch.compile(DropsKwargs(), backend="eager")), text(), FLOAT64),
        Head("compiled-no-kwargs", seeded(lambda: torch.compile(NoKwargs(), backend="eager")), text(), FLOAT64),
        Head("mean-of-sample-means", seeded(MeanOfSampleMeans), text(), FLOAT64),
        # On two ranks at b=1 the first rank's samples are all of one length and cannot tell whether the mask counts.
        Head("attended-only", seeded(AttendedOnly), text(lengths=(9, 5, 9, 17, 9, 3, 9, 11)), FLOAT64),
        Head("root-of-mean", seeded(RootOfMean), text(), FLOAT64, exact=False),
        Head("two-terms", seeded(TwoTerms), two_terms, FLOAT64, exact=False),
        Head("segformer-batch-norm", seeded(segformer(freeze=False)), images(segments), FLOAT64, exact=False),
        Head("clip", seeded(clip), pairs(), FLOAT64, stock_wrong=False, collate=with_return_loss, exact=False),
    ]


def llama_config(**overrides: Any) -> Any:
    return hf.LlamaConfig(
        **{**TINY, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, **overrides}
    )


HEADS: dict[str, Head] = {head.name: head for head in _heads()}
