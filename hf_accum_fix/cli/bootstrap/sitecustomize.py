"""Run at the start of every Python process under ``hf-accum-fix run`` or ``verify``, which put this on PYTHONPATH.

Most of these processes never train, and some use another environment or another Python. So under ``run`` import nothing
that is not loaded already, wait for the import of ``transformers.trainer``, and only then import hf_accum_fix. Under
``verify``, verify the first Trainer that begins to train, instead. Also run the sitecustomize that this one hides.
"""

import os
import sys

TYPE_CHECKING = False  # Importing typing would take longer than running all of this.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_TRAINER = "transformers.trainer"
#: Carry the options of ``run``, which a launcher may drop, and the request of ``verify``.
_RUN, _VERIFY = "PYTHON_HF_ACCUM_FIX", "PYTHON_VERIFY_BY_HF_ACCUM_FIX"


class _Finder:
    """Find ``transformers.trainer`` by the finders after this one, and patch it once it is loaded."""

    done = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != _TRAINER:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(name, path, target)
            if spec:
                spec.loader = _Loader(spec.loader, self)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """Load a module by its own loader, then patch it; delegate everything else to that loader."""

    def __init__(self, loader: "Any", finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: "ModuleType") -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch()
        # Not reached after a refusal: the finder stays, so that every later import is refused too.
        self._finder.done = True
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def _patch() -> None:
    try:
        from hf_accum_fix.cli.inherit import apply_inherited
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "hf_accum_fix":
            raise
        if sys.stderr is not None:
            has_not = f"{sys.executable} has no hf_accum_fix, or one without a command line"
            sys.stderr.write(f"hf-accum-fix: NOT on: {has_not}; install it there\n")
    else:
        apply_inherited()


def _verify_instead_of_training() -> None:
    """Import the hf_accum_fix of this file, even if the script's own path has none."""
    above = os.path.dirname  # os.path, because pathlib is not loaded yet
    root = above(above(above(above(os.path.abspath(__file__)))))  # noqa: PTH100
    sys.path.insert(0, root)
    try:
        from hf_accum_fix.cli.instead import verify_instead_of_training

        verify_instead_of_training()
    except ImportError as error:
        sys.stderr.write(f"hf-accum-fix: cannot verify in {sys.executable}: it has no {error.name}; install it there\n")
    finally:
        sys.path.remove(root)


def _run_hidden_sitecustomize() -> None:
    """Import the sitecustomize that would have run without us; Python reports its errors."""
    folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would have to be imported
    ours = sys.modules.pop(__name__)
    place = sys.path.index(folder)
    del sys.path[place]
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours
    finally:
        sys.path.insert(place, folder)


_FINDER = _Finder()
if _VERIFY in os.environ:
    _verify_instead_of_training()
    _FINDER.done = _RUN not in os.environ
if not _FINDER.done:
    sys.meta_path.insert(0, _FINDER)
try:
    _run_hidden_sitecustomize()
finally:
    # The hidden sitecustomize may have replaced all finders, or imported the Trainer.
    if not _FINDER.done and _TRAINER in sys.modules:
        _patch()
    elif not _FINDER.done and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
