"""Where a coupled loss is cut: the modules that return a tensor per sample, which only the loss brings together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.errors import UnsupportedSetupError

_PROJECTIONS = ("text_projection", "visual_projection")
_PROJECTED = ("AltCLIP", "ChineseCLIP", "Blip", "CLIP", "CLIPSeg", "MetaClip2", "OwlViT", "Owlv2")
#: By the name of a model's class: its modules that return a tensor per sample; "": the model itself.
CUTS: Mapping[str, Sequence[str]] = MappingProxyType(
    dict.fromkeys((f"{each}Model" for each in (*_PROJECTED, "VisionTextDualEncoder")), _PROJECTIONS)
    | dict.fromkeys(("SiglipModel", "Siglip2Model"), ("text_model", "vision_model"))
    # A root of a mean over the pixels of all samples; and a loss may have a second encoder as a guide.
    | {"GLPNForDepthEstimation": ("head",), "SentenceTransformer": ("",)}
)
#: The most numbers of a sample, such as a map of 1024 x 1024; outputs of every token over a vocabulary are above it.
_MOST = 2**20
_ENTRIES = ("pooler_output", "sentence_embedding")  # of outputs, that hold one vector per sample


def cuts_of(model: nn.Module, named: Sequence[str] = (), beside: Sequence[object] = ()) -> dict[str, nn.Module]:
    """The modules at which the loss of a model is cut, by name; empty: its class has no row, so that they are searched.

    ``named``: names in the model, or the ends of such names; UnsupportedSetupError if one is no module's, or that of
    several. ``beside``: objects that hold more modules, such as a trainer its loss with a guide model.
    """
    seen, found = set[nn.Module](), dict[str, nn.Module]()
    modules = dict(model.named_modules(seen))
    for name, each in [pair for holder in beside for pair in vars(holder).items()]:
        # A loss by data set.
        for key, part in each.items() if isinstance(each, dict) else [("", each)]:
            if isinstance(part, nn.Module):
                modules.update(part.named_modules(seen, f"{name}.{key}".strip(".")))
    for name, each in modules.items() if not named else ():
        # FSDP2 makes a class of its own below the model's.
        for part in next((CUTS[base.__name__] for base in type(each).__mro__ if base.__name__ in CUTS), ()):
            found[f"{name}.{part}".strip(".")] = each.get_submodule(part)
    for name in named:
        fitting = [name] if name in modules else [each for each in modules if each.endswith(f".{name}")]
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
    """The modules with one vector per sample, or several, that a loss reaches first, by name; ``without``: some."""
    made: dict[Any, str] = {}
    modules = {name: each for name, each in model.named_modules() if name not in without}

    def note(name: str, outputs: Any) -> None:
        vectors = _vectors(outputs)
        # Of several: the passages of a question, flattened.
        if vectors is not None and vectors.ndim == 2 and vectors.grad_fn is not None and len(vectors) % samples == 0:
            made[vectors.grad_fn] = name

    with hooked(modules, note):
        loss = forward()
    found = {made[node] for node in nodes_of(loss, made) if node in made}
    return {name: module for name, module in modules.items() if name in found}


def nodes_of(loss: Tensor, ends: Container[Any] = ()) -> Iterator[Any]:
    """The nodes of a loss's graph, down to ``ends``."""
    pending, seen = [(loss * 1.0).grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [] if node in ends else [below for below, _ in node.next_functions]


def vectors_in(outputs: Any, name: str) -> Tensor:
    """The vectors of the samples in what a module returned, or maps, [samples, ...]; an error, if it has none."""
    vectors = _vectors(outputs)
    if vectors is not None and vectors.ndim > 1 and vectors[:1].numel() <= _MOST:
        return vectors
    size = type(outputs).__name__
    if vectors is not None:
        size = f"a tensor of {tuple(vectors.shape)} ({vectors.numel() * vectors.element_size():,} bytes a micro-batch)"
    raise UnsupportedSetupError(
        f"got {size} from {name or 'the model'}; expected a tensor of at most {_MOST:,} numbers per sample, "
        f"[samples, ...], or an output with {' or '.join(_ENTRIES)}; name another module in coupled="
    )


def _vectors(outputs: Any) -> Tensor | None:
    """The tensor that a module returned, or the entry of its outputs that holds the vectors; None: there is none."""
    if isinstance(outputs, Mapping):
        outputs = next((outputs[entry] for entry in _ENTRIES if outputs.get(entry) is not None), None)
    return outputs if isinstance(outputs, Tensor) else None


def with_vectors(outputs: Any, vectors: Tensor) -> Any:
    """What a module returned, with other vectors; a new object."""
    if isinstance(outputs, Tensor):
        return vectors
    entry = next(entry for entry in _ENTRIES if outputs.get(entry) is not None)
    return type(outputs)(**{**outputs, entry: vectors})
