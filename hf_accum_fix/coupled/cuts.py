"""Where a coupled loss is cut: the modules that return one vector per sample, which only the loss brings together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
        "BlipModel": _PROJECTIONS,
        "CLIPModel": _PROJECTIONS,
        "CLIPSegModel": _PROJECTIONS,
        "MetaClip2Model": _PROJECTIONS,
        "OwlViTModel": _PROJECTIONS,
        "Owlv2Model": _PROJECTIONS,
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
    """The modules at which the loss of a model is cut, by name; empty: its class has no row, so that they are searched.

    Args:
        model: as trained; an adapter may wrap it.
        named: what the user has named: names in the model, or the ends of such names.

    Raises:
        UnsupportedSetupError: if a name is no module's, or that of several.
    """
    modules, found = dict(model.named_modules()), dict[str, nn.Module]()
    for name, each in modules.items() if not named else ():
        if (below := CUTS.get(type(each).__name__)) is not None:
            return {f"{name}.{part}".strip("."): each.get_submodule(part) for part in below}
    for name in named:
        fitting = [each for each in modules if each == name or each.endswith(f".{name}")]
        if len(fitting) != 1:
            raise UnsupportedSetupError(
                f"got coupled={name!r}, which names {len(fitting)} modules of {type(model).__name__}; expected one; "
                "pass a name of model.named_modules()"
            )
        found[fitting[0]] = modules[fitting[0]]
    return found


@contextmanager
def hooked(modules: Mapping[str, nn.Module], does: Callable[[str, Any], Any]) -> Iterator[None]:
    """Let ``does``, (name, outputs) -> others or None, see what modules return, and replace it."""
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(lambda _, __, outputs, name=name: does(name, outputs))
            stack.callback(handle.remove)
        yield


def nearest_to_the_loss(
    model: nn.Module, forward: Callable[[], Tensor], samples: int, without: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The modules with one vector per sample that its loss reaches first, by name.

    Args:
        model: as trained.
        forward: a loss of it with its graph.
        samples: of its batch.
        without: names that are passed over.
    """
    made: dict[Any, str] = {}
    modules = {name: each for name, each in model.named_modules() if name not in without}

    def note(name: str, outputs: Any) -> None:
        vectors = _vectors(outputs)
        if vectors is not None and vectors.grad_fn is not None and len(vectors) == samples:
            made[vectors.grad_fn] = name

    with hooked(modules, note):
        pending, seen, found = [forward().grad_fn], set[Any](), set[str]()
    while pending:
        node = pending.pop()
        if node in made:
            found.add(made[node])
        elif node is not None and node not in seen:
            seen.add(node)
            pending += [below for below, _ in node.next_functions]
    return {name: module for name, module in modules.items() if name in found}


def vectors_in(outputs: Any, name: str) -> Tensor:
    """The vectors of the samples in what a module returned, [samples, width].

    Raises:
        UnsupportedSetupError: if it returned anything else.
    """
    if (vectors := _vectors(outputs)) is not None:
        return vectors
    found = _held(outputs)
    if isinstance(found, Tensor):
        size = f"a tensor of {tuple(found.shape)} ({found.numel() * found.element_size():,} bytes a micro-batch)"
    else:
        size = type(outputs).__name__
    raise UnsupportedSetupError(
        f"got {size} from {name or 'the model'}; expected one vector per sample, [samples, width], or an output with "
        f"{' or '.join(_ENTRIES)}; name another module in coupled="
    )


def _held(outputs: Any) -> Any:
    """The tensor in what a module returned, or the entry that holds the vectors; None: there is none."""
    if isinstance(outputs, Mapping):
        return next((outputs[entry] for entry in _ENTRIES if outputs.get(entry) is not None), None)
    return outputs


def _vectors(outputs: Any) -> Tensor | None:
    found = _held(outputs)
    return found if isinstance(found, Tensor) and found.ndim == 2 else None


def with_vectors(outputs: Any, vectors: Tensor) -> Any:
    """What a module returned, with other vectors; a new object."""
    if isinstance(outputs, Tensor):
        return vectors
    entry = next(entry for entry in _ENTRIES if outputs.get(entry) is not None)
    copied = outputs.copy() if type(outputs) is dict else type(outputs)(**outputs)
    copied[entry] = vectors
    return copied
