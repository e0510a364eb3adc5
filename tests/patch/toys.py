"""A transformers that is a toy, in fresh interpreters: its class Trainer can live anywhere, and takes as long to import
as a test wants.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import transformers
from packaging.version import Version

from hf_accum_fix.upstream.seams import ARGUMENTS, ATTRIBUTES, STATE, TRAINER, seams_of
from tests.cli.processes import ROOT, python

SEAMS = [seam.name for seam in seams_of(None)]
INSTALLED = transformers.__version__
#: What stands in, under a toy transformers, for the rooms that import the real one.
STAND_IN = f"""
import sys, types
ours = {{name: lambda wrapped, *_, **__: wrapped() for name in {SEAMS}}}
sys.modules["hf_accum_fix.overrides"] = types.SimpleNamespace(OVERRIDES=ours, hand_back=lambda _: None)
sys.modules["hf_accum_fix.evaluation"] = types.SimpleNamespace(evaluation_loop=None)
"""


def declared(target: str, indent: int = 0) -> str:
    """The lines by which a class or a module has the names that apply() looks for."""
    rows = (row for row in ATTRIBUTES if row.target == target and row.seen == "class" and row.is_in(Version(INSTALLED)))
    return "".join(f"{' ' * indent}{row.name} = None\n" for row in rows)


def toy_in(folder: Path, pause: float = 0.0) -> Path:
    """``pause``: before and after the class statement [s]."""
    methods = "".join(f"    def {seam.name}(self, {', '.join(seam.parameters)}): pass\n" for seam in seams_of(None))
    waiting = f"import time\ntime.sleep({pause})\n" if pause else ""
    files = {
        "__init__": f'__version__ = "{INSTALLED}"\n',
        "trainer_callback": "class CallbackHandler:\n"
        "    def on_train_begin(self, args, state, control): return control\n"
        f"class TrainerState:\n{declared(STATE, 4)}{declared('transformers.trainer_callback')}",
        "trainer_pt_utils": declared("transformers.trainer_pt_utils"),
        "models/auto/modeling_auto": declared("transformers.models.auto.modeling_auto"),
        "training_args": f"class TrainingArguments:\n{declared(ARGUMENTS, 4)}",
        "trainer": f"{waiting}from transformers.trainer_callback import CallbackHandler\n"
        f"{declared('transformers.trainer')}class Trainer:\n{declared(TRAINER, 4)}{methods}"
        f"    def loop(self): return CallbackHandler().on_train_begin(None, None, 'stock')\n{waiting}",
    }
    (folder / "transformers" / "models" / "auto").mkdir(parents=True)
    for name, text in files.items():
        (folder / "transformers" / f"{name}.py").write_text(text)
    return folder


def fresh(script: str, *folders: Path, returncode: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter whose first folders on the path are those given."""
    prelude = STAND_IN if any((folder / "transformers").is_dir() for folder in folders) else ""
    return python("-W", "ignore", "-c", prelude + script, path=(*folders, ROOT), code=returncode, **variables)
