"""``hf-accum-fix doctor --model``: verify a trainer of a small model on made-up samples, on the CPU."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.verification.report import STOCK, VerificationReport, could_not_tell
from hf_accum_fix.verification.verify import verify

_WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS: Final = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head", "n_heads")
#: The limits of other sizes, by their names. The width follows from the number of heads, because rotary positions
#: depend on the head size; the vocabulary stays, because it holds the special tokens.
_LARGEST: Final = {
    r"(layers?|heads?|per_tok)$": 2,
    r"(num_\w*|routed_)experts$": 4,
    r"intermediate_size$|d_ff$|ffn_dim$|hidden_dim$": 64,
    r"embedding_size$|word_embed_proj_dim$|image_size$": 32,
    r"patch_size$": 8,
}
#: Endings of the classes whose labels can be made up: those of every token, one of every sample, boxes.
_OF_TOKENS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_OF_SAMPLES: Final = ("ForSequenceClassification", "ForImageClassification")
_OF_BOXES: Final = "ForObjectDetection"
#: Tokens of the samples: eight micro-batches of two.
_LENGTHS: Final = (7, 12, 5, 9, 8, 11, 6, 10) * 2


def verified(asked: str) -> VerificationReport:
    """Verify a class of transformers, or that of a checkpoint's folder with its settings, built small.

    Raises:
        OptionsError: if it is neither.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        # Models print to stdout, where the report goes.
        with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:
            return verify(_trainer(_small_model(asked), folder), [(2, 8)])
    except OptionsError:
        raise
    except Exception as error:  # anything that a third-party model raises
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
        words = f"{asked} could not be built small and trained on made-up samples ({reason}); verify your own script"
        return VerificationReport("Trainer", asked, transformers.__version__, STOCK, could_not_tell(words))


def _small_model(asked: str) -> Any:
    config: Any = transformers.AutoConfig.from_pretrained(asked) if Path(asked).is_dir() else None
    name = asked if config is None else (config.architectures or ["no class"])[0]
    head: Any = getattr(transformers, name, None)
    if not (isinstance(head, type) and issubclass(head, transformers.PreTrainedModel)):
        like = get_close_matches(name, [each for each in dir(transformers) if "For" in each]) or ["BertForMaskedLM"]
        raise OptionsError(
            f"got {name!r}; expected a model class of transformers {transformers.__version__}, such as "
            f"{', '.join(like)}, or the folder of a checkpoint that names one"
        )
    if not name.endswith((*_OF_TOKENS, *_OF_SAMPLES, _OF_BOXES)):
        raise TypeError(f"no labels can be made up for {name}")
    made: Any = head.config_class
    config = made() if config is None else config
    if hasattr(config, "backbone_config"):
        # The sizes of backbone, neck and head follow from one another; denoising queries are drawn at random.
        few = {"num_queries": 10, "num_denoising": 0, "decoder_layers": 2}
        vars(config).update({key: most for key, most in few.items() if key in vars(config)})
        return head(config)
    settings = {name: value for name, value in config.to_diff_dict().items() if type(value) in (bool, int, float)}
    config = made(**{**settings, "num_labels": config.num_labels, **_small(config)})
    for each in (config, _text_config(config)):
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(each, name, None) is None:
                setattr(each, name, 0)
    return head(config)


def _small(config: Any) -> dict[str, Any]:
    """The sizes of a small config of the same class, nested configs included."""
    sizes = {name: value for name, value in vars(config).items() if type(value) is int}
    small: dict[str, Any] = {}
    for end, most in _LARGEST.items():
        small |= {name: min(value, most) for name, value in sizes.items() if re.search(end, name)}
    heads = next((name for name in _HEADS if sizes.get(name)), None)
    width = next((name for name in _WIDTHS if name in sizes), None)
    if heads is not None and width is not None:
        small[width] = sizes[width] // sizes[heads] * small[heads]
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            small[name] = {**_small(value), "model_type": value.model_type}
    return small


def _text_config(config: Any) -> Any:
    """The config of the inner language model, if there is one; releases before 4.45 lack the method."""
    return config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)


def _trainer(model: Any, folder: str) -> Any:
    size: Any = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 1, "use_cpu": True}
    quiet: Any = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = transformers.TrainingArguments(folder, **size, **quiet, remove_unused_columns=False)
    samples = [_sample(model, place, length) for place, length in enumerate(_LENGTHS)]
    return transformers.Trainer(model=model, args=arguments, train_dataset=samples, data_collator=_batch)


def _sample(model: Any, place: int, length: int) -> dict[str, Any]:
    """A text, or an image, with labels."""
    config, name, generator = model.config, type(model).__name__, torch.Generator().manual_seed(place)
    sample: dict[str, Any]
    if model.main_input_name == "input_ids" or hasattr(config, "text_config"):
        vocabulary = int(_text_config(config).vocab_size)
        ids = torch.randint(vocabulary // 8, vocabulary // 2, (length,), generator=generator)
        if isinstance(end := getattr(config, "eos_token_id", None), int) and 0 <= end < vocabulary:
            # Encoder-decoders classify by it.
            ids[-1] = end
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    elif model.main_input_name == "pixel_values":
        size = 32 if name.endswith(_OF_BOXES) else getattr(config, "image_size", 32)
        shape = (getattr(config, "num_channels", 3), *(size if isinstance(size, (list, tuple)) else (size, size)))
        sample = {"pixel_values": torch.randn(shape, generator=generator)}
    else:
        raise TypeError(f"{model.main_input_name} cannot be made up")
    if name.endswith(_OF_BOXES):
        boxes = 0.2 + 0.2 * torch.rand(1 + place % 3, 4, generator=generator)
        return {**sample, "labels": {"class_labels": torch.arange(len(boxes)) % config.num_labels, "boxes": boxes}}
    if name.endswith(_OF_SAMPLES):
        return {**sample, "labels": torch.tensor(0.3 * place if config.num_labels == 1 else place % config.num_labels)}
    if name.endswith("ForTokenClassification"):
        return {**sample, "labels": ids % config.num_labels}
    # Some first labels stay: some releases count them although no token predicts them.
    return {**sample, "labels": torch.where(torch.arange(length) < place % 4, -100, ids)}


def _batch(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pad tokens on the right, list boxes, stack the rest."""
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        values, padding = [sample[name] for sample in samples], -100 if name == "labels" else 0
        batch[name] = values
        if isinstance(first, Tensor):
            batch[name] = pad_sequence(values, True, padding) if first.ndim == 1 else torch.stack(values)
    return batch
