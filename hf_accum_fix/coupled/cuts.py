"""Where a coupled loss is cut: the modules that return one vector per sample, which only the loss brings together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.errors import UnsupportedSetupError

_PROJECTIONS = ("text_projection", "visual_projection")
_TOWERS = ("text_model", "vision_model")

#: By the name of a model's class: its modules that return one vector per sample; "": the model itself.
CUTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "AltCLIPModel": _PROJECTIONS,
        "ChineseCLIPModel": _PROJECTIONS,
        "ClapModel": ("text_projection", "audio_projection"),
        "CLIPModel": _PROJECTIONS,
        "Siglip2Model": _TOWERS,
        "SiglipModel": _TOWERS,
        "VisionTextDualEncoderModel": _PROJECTIONS,
        # sentence-transformers
        "SentenceTransformer": ("",),
    }
)
#: The entries of outputs that hold one vector per sample.
_ENTRIES = ("pooler_output", "sentence_embedding")


def cuts_of(model: nn.Module, named: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The modules at which the loss of a model is cut, by name.

    Args:
        model: as trained; an adapter may wrap it.
        named: what the user has named: names in the model, or the ends of such names.

    Raises:
        UnsupportedSetupError: if a name is no module's, or no name is known.
    """
    modules = dict(model.named_modules())
    if not named:
        for name, each in modules.items():
            if (below := CUTS.get(type(each).__name__)) is not None:
                return {f"{name}.{part}".strip("."): each.get_submodule(part) for part in below}
        raise UnsupportedSetupError(
            f"got coupled_loss='exact' for {type(model).__name__}; expected a model whose modules with one vector per "
            f"sample are known ({', '.join(sorted(CUTS))}); name them, as in coupled=('text_projection',)"
        )
    found = dict[str, nn.Module]()
    for name in named:
        fitting = [each for each in modules if each == name or each.endswith(f".{name}")]
        if len(fitting) != 1:
            raise UnsupportedSetupError(
                f"got coupled={name!r}, which names {len(fitting)} modules of {type(model).__name__}; expected one; "
                "pass a name of model.named_modules()"
            )
        found[fitting[0]] = modules[fitting[0]]
    return found


def vectors_in(outputs: Any, name: str) -> Tensor:
    """The vectors of the samples in what a module returned, [samples, width].

    Raises:
        UnsupportedSetupError: if it returned anything else.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = next((outputs[entry] for entry in _ENTRIES if outputs.get(entry) is not None), None)
    if isinstance(found, Tensor) and found.ndim == 2:
        return found
    if isinstance(found, Tensor):
        size = f"a tensor of {tuple(found.shape)} ({found.numel() * found.element_size():,} bytes a micro-batch)"
    else:
        size = type(outputs).__name__
    raise UnsupportedSetupError(
        f"got {size} from {name or 'the model'}; expected one vector per sample, [samples, width], or an output with "
        f"{' or '.join(_ENTRIES)}; name another module in coupled="
    )


def with_vectors(outputs: Any, vectors: Tensor) -> Any:
    """What a module returned, with other vectors; a new object."""
    if isinstance(outputs, Tensor):
        return vectors
    entry = next(entry for entry in _ENTRIES if outputs.get(entry) is not None)
    copied = outputs.copy() if type(outputs) is dict else type(outputs)(**outputs)
    copied[entry] = vectors
    return copied
