"""Run at the start of every Python process of a script under ``hf-accum-fix verify``.

Verify the first Trainer that begins to train, instead. The sitecustomize that this one hides runs too.
"""

import os
import sys


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
    folder = os.path.dirname(__file__)  # noqa: PTH120
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


_verify_instead_of_training()
_run_hidden_sitecustomize()
