"""Fresh processes for these tests: Python as a user starts it, under the command line or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_accum_fix.cli.inherit import VARIABLE

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "hf_accum_fix", "run")


def environment(*pythonpath: Path | str, **variables: str) -> dict[str, str]:
    """This process's environment, without what other runs left, and with exactly this PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((VARIABLE, "HF_ACCUM_FIX"))}
    for name in ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    scripts = str(Path(sys.executable).parent)
    kept |= {"PATH": os.pathsep.join([scripts, kept.get("PATH", "")])}
    if pythonpath:
        kept["PYTHONPATH"] = os.pathsep.join(map(str, pythonpath))
    return {**kept, **variables}


def with_bytecode_in(folder: Path) -> dict[str, str]:
    """Variables that let the second process find what the first has compiled, as it is where pip has installed."""
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def python(
    *words: str | Path, path: Sequence[Path | str] = (ROOT,), cwd: Path = ROOT, code: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What a fresh Python of these arguments has come to; it has to end with this code, unless that is None."""
    done = start([sys.executable, *words], environment(*path, **variables), cwd, 280)
    assert code is None or done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-4000:]}"
    return done


def recipe(name: str, *words: str | Path, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """The same of a recipe."""
    return python(ROOT / "recipes" / f"{name}.py", *words, code=code)


def start(
    command: Sequence[str | Path], env: Mapping[str, str], cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The finished process, with its output as text."""
    words = [str(word) for word in command]
    return subprocess.run(words, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def unread(*words: str | Path) -> int:
    """The exit code of our command line where nobody reads what it writes, as in ``... 2>&1 | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "hf_accum_fix", *map(str, words)]
        return subprocess.run(command, env=environment(), cwd=ROOT, stdout=writing, stderr=writing).returncode
    finally:
        os.close(writing)
