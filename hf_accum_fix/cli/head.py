"""``hf-accum-fix doctor --model``: observe the loss of a head in one training step on made-up samples.

The head is a class of transformers, built from its default config with small sizes, or a local checkpoint. It runs on
the CPU, in a `GlobalBatchTrainer`, at learning rate 0.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_accum_fix.accumulation.reduction import Reduction
from hf_accum_fix.confirmation import unconfirmed
from hf_accum_fix.errors import AccumFixError, ContractError, OptionsError
from hf_accum_fix.observations import recorded
from hf_accum_fix.options import SWITCH, enabled
from hf_accum_fix.trainer import GlobalBatchTrainer
from hf_accum_fix.upstream.defects import DEFECTS, Factor, is_present
from hf_accum_fix.verification.explanation import defects_with, traits_of

_WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS: Final = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head", "n_heads")
#: The limit of every other size in a config. The width follows from the number of heads, because rotary positions
#: depend on the head size; the vocabulary stays, because it holds the special tokens.
_LARGEST: Final = {
    **dict.fromkeys((*_HEADS, "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "moe_intermediate_size", "image_size"), 32),
    "patch_size": 8,
}
#: Tasks of transformers' automatic classes whose heads can be fed.
_TASKS: Final = (
    "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "VISION_2_SEQ", "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "IMAGE_CLASSIFICATION",
)  # fmt: skip
_LENGTHS: Final = (7, 12, 5, 9, 8, 11, 6, 10) * 2
"""Tokens of the samples: eight micro-batches of two."""


def observe_head(asked: str) -> dict[str, Any]:
    """Build a class or model type of transformers, or load a checkpoint's folder, and observe its loss in one window.

    Returns:
        "built": description of the model; "observed": as in `Report.runs`; "defects": names of those that stock's
        factor shows.

    Raises:
        OptionsError: if ``asked`` is none of them.
        ContractError: if it cannot be built, fed or trained.
    """
    if not enabled():
        raise ContractError(f"got {SWITCH}={os.environ[SWITCH]}, which switches the observation off; unset it")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = Path(asked)
    try:
        # Trainer and models print to stdout, where the report goes.
        with redirect_stdout(sys.stderr):
            model = _checkpoint(folder) if folder.is_dir() else _small_model(asked)
            head = type(model).__name__
            built = f"{head} of {asked}" if folder.is_dir() else f"a small {head}"
            others = [each for each in heads_of(asked) if each != head]
            built = f"{built} (other heads: {', '.join(others)})" if others else built
            trainer, run = _trained(model)
            return {"built": built, "observed": run, "defects": _named(trainer, run)}
    except AccumFixError:
        raise
    except Exception as error:  # anything that a third-party model raises
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
        raise ContractError(
            f"{asked} could not be built and trained on made-up samples: {reason}; train it by your own script with "
            "apply(), and print hf_accum_fix.report()"
        ) from error


def _small_model(name: str) -> Any:
    head = getattr(transformers, next(iter(heads_of(name)), name), None)
    if isinstance(head, type) and issubclass(head, transformers.PreTrainedModel):
        config_class: Any = head.config_class
        return head(config_class(**_small_fields(config_class())))
    raise OptionsError(
        f"got {name!r}; expected a folder, model type or model class of transformers {transformers.__version__}, "
        f"such as {', '.join(suggestions(name)) or 'bert or BertForMaskedLM'}"
        + ("; download it first and pass its folder" if "/" in name else "")
    )


@cache
def _heads() -> dict[str, tuple[str, ...]]:
    """The supported heads of each model type, the most common one first."""
    modeling_auto = import_module("transformers.models.auto.modeling_auto")
    found: dict[str, dict[str, None]] = {}
    for task in _TASKS:
        for kind, named in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            for name in (named,) if isinstance(named, str) else named:
                if _ending(name):
                    found.setdefault(kind, {})[name] = None
    return {kind: tuple(names) for kind, names in found.items()}


def heads_of(asked: str) -> tuple[str, ...]:
    """The heads of a model type, whatever its separators; empty for other names."""
    return next((heads for kind, heads in _heads().items() if _joined(kind) == _joined(asked)), ())


def suggestions(asked: str) -> list[str]:
    """Up to three heads of the model in a name, those of the same task first; empty if it names no model."""
    words = _words(asked)
    spans = {"".join(words[at:end]) for at in range(len(words)) for end in range(at, len(words) + 1)}
    named = [kind for kind in _heads() if _joined(kind) in spans]
    if not named:
        return []
    heads = _heads()[max(named, key=len)]
    stems = {word[:4] for word in words}
    return sorted(heads, key=lambda head: -len(stems & {word[:4] for word in _words(head)}))[:3]


def _words(name: str) -> list[str]:
    """Split a name in camel case, or with separators, into words."""
    parts = re.findall(r"[A-Z]+[a-z]*\d*|[a-z]+\d*|\d+", name)
    return [part.lower() for part in parts]


def _joined(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _small_fields(config: Any) -> dict[str, Any]:
    """The arguments of a small config of the same class, nested configs included."""
    sizes = {name: value for name, value in vars(config).items() if type(value) is int}
    fields: dict[str, Any] = {name: min(sizes[name], most) for name, most in _LARGEST.items() if name in sizes}
    heads = next((name for name in _HEADS if sizes.get(name)), None)
    width = next((name for name in _WIDTHS if name in sizes), None)
    if heads is not None and width is not None:
        fields[width] = sizes[width] // sizes[heads] * fields[heads]
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            fields[name] = {**_small_fields(value), "model_type": value.model_type}
    return fields


def _checkpoint(folder: Path) -> Any:
    """The model of a folder; without weights in it, randomly initialised."""
    config = transformers.AutoConfig.from_pretrained(folder)
    named = (config.architectures or heads_of(config.model_type) or [None])[0]
    head: Any = getattr(transformers, named or "", None)
    if head is None:
        raise ContractError(
            f"got the architecture {named} in the config of {folder}; expected a class of transformers "
            f"{transformers.__version__}, since doctor runs no remote code; call hf_accum_fix.verify() in your script"
        )
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return head.from_pretrained(folder, local_files_only=True)
    return head(config)


def _trained(model: Any) -> tuple[Any, dict[str, Any]]:
    """Train one window of eight micro-batches of two samples; return the trainer and the window's record."""
    ending = _ending(type(model).__name__)
    if ending is None:
        raise ContractError(f"got {type(model).__name__}; expected a class whose name ends in {', '.join(_LABELS)}")
    for config in (model.config, _text_config(model.config)):
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    samples = _samples(ending, model.config)
    known = inspect.signature(model.forward).parameters
    unknown = samples[0].keys() - known.keys() - {"attention_mask"}
    if unknown:
        raise ContractError(f"got {type(model).__name__}, whose forward takes no {', '.join(sorted(unknown))}")
    samples = [{name: value for name, value in sample.items() if name in known} for sample in samples]
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=len(_LENGTHS) // 2,
            max_steps=1,
            learning_rate=0.0,
            optim="sgd",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = GlobalBatchTrainer(model=model, args=arguments, train_dataset=samples, data_collator=_batch)
        trainer.remove_callback(transformers.PrinterCallback)
        with unconfirmed():
            trainer.train()
    *_, run = recorded()
    return trainer, run


def _named(trainer: Any, run: Mapping[str, Any]) -> list[str]:
    """The defects of the installed release that explain stock's factor."""
    factor, router, steps = run["stock_gradient_factor"], run["stock_router_factor"], run["accumulation_steps"]
    found: list[str] = []
    if router is not None and abs(router - 1) > 1e-3:
        found += [
            each.name
            for each in DEFECTS
            if Factor.ROUTER in each.factors and is_present(each.name, transformers.__version__)
        ]
    if factor is None or abs(factor - 1) <= 1e-3:
        return found
    labels = [sample.get("labels") for sample in trainer.train_dataset]
    factors = dict.fromkeys((Factor.G, Factor.G_W), float(steps)) | dict.fromkeys(
        (Factor.PER_G, Factor.PER_G_W), 1 / steps
    )
    if all(each is not None and each.ndim > 0 for each in labels):
        counted = sum(int((each != -100).sum()) for each in labels)
        shifted = sum(int((each[1:] != -100).sum()) for each in labels)
        factors |= {Factor.MORE_BY_ROWS: shifted / counted, Factor.LESS_BY_ROWS: counted / shifted}
    return [*found, *defects_with(factor, factors, traits_of(trainer, Reduction(run["reduction"]), labels))]


def _text_config(config: Any) -> Any:
    """The config of the inner language model, if there is one; releases before 4.45 lack the method."""
    return config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)


def _batch(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Pad tokens on the right, stack the rest."""
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        padding = -100 if name == "labels" else 0
        ragged = values[0].ndim == 1
        batch[name] = pad_sequence(values, batch_first=True, padding_value=padding) if ragged else torch.stack(values)
    return batch


def _samples(ending: str, config: Any) -> list[dict[str, Tensor]]:
    """Made-up samples with the labels of a class name's ending."""
    inputs = _images(config) if ending == "ForImageClassification" else _texts(config)
    return [{**sample, **_LABELS[ending](place, sample, config)} for place, sample in enumerate(inputs)]


def _texts(config: Any) -> list[dict[str, Tensor]]:
    """Texts of several lengths, without special tokens except the last, which ends the text."""
    vocabulary = int(_text_config(config).vocab_size)
    end = getattr(config, "eos_token_id", None)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(vocabulary // 8, vocabulary // 2, (length,), generator=generator) for length in _LENGTHS]
    if isinstance(end, int) and 0 <= end < vocabulary:
        for text in texts:
            text[-1] = end
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]


def _images(config: Any) -> list[dict[str, Tensor]]:
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(len(_LENGTHS), getattr(config, "num_channels", 3), height, width, generator=generator)
    return [{"pixel_values": image} for image in images]


def _targets(place: int, sample: Mapping[str, Tensor], _: Any) -> dict[str, Tensor]:
    labels = sample["input_ids"].clone()
    # Leave some first labels unmasked: some releases count them although no token predicts them.
    labels[: place % 4] = -100
    return {"labels": labels}


def _classes(_: int, sample: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    return {"labels": sample["input_ids"] % config.num_labels}


def _class(place: int, _: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    return {"labels": torch.tensor(0.3 * place if config.num_labels == 1 else place % config.num_labels)}


def _answer(_: int, __: Mapping[str, Tensor], ___: Any) -> dict[str, Tensor]:
    return {"start_positions": torch.tensor(1), "end_positions": torch.tensor(3)}


_LABELS: Final[Mapping[str, Callable[[int, Mapping[str, Tensor], Any], dict[str, Tensor]]]] = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"), _targets),
    "ForTokenClassification": _classes,
    "ForSequenceClassification": _class,
    "ForQuestionAnswering": _answer,
    "ForImageClassification": _class,
}
"""The labels for each ending of a class name."""


def _ending(name: str) -> str | None:
    return next((ending for ending in _LABELS if name.endswith(ending)), None)
