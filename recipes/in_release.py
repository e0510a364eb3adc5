"""Run a command under several transformers releases, in environments made for them, each torch shared by all.

    python recipes/in_release.py 5.24.0 -- pytest
    python recipes/in_release.py 4.49.0 5.24.0 -- accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py \
        --output results/{release}

The first call makes a virtual environment with torch, the newest release and this package with its extras in
.environments/; every further release gets a small one that takes everything else from there. An environment is made
whole or not at all, and is made once: delete .environments/ to start again. The recipe shows its steps and their time;
pip's output is in pip.log in its folder. ``{release}`` in the command is replaced by the release. "newest" is
the newest that tests have run. Pin packages of an environment after an @: 4.46.3@accelerate==0.26.0@peft==0.13.2.
A pinned torch gets its own environment, shared by all releases with it: 4.41.0@torch==2.2.2@numpy==1.26.4.

Needs nothing but Python 3.10 or newer. Exit code: the first that is not 0; 1 where an environment can't be made; 2 for
a wrong call.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has none: there, make one environment at a time.
    fcntl = None

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".environments"
#: recipes/add_release.py writes it, so that this file needs no other.
NEWEST = "5.24.0"
TORCH = "torch==2.13.0"
RELEASE = re.compile(r"\d+\.\d+\.\d+(@[\w-]+[<>=]=[\w.]+)*")
BIN = "Scripts" if os.name == "nt" else "bin"
MINUTE = 60.0
#: Lines of pip that show its progress.
DOING = re.compile(r"^ *((?:Collecting|Downloading|Using cached|Building|Installing) .*)", re.MULTILINE)
#: Packages that a release may require in older versions than the newest environment holds.
BESIDE_TRANSFORMERS = ("accelerate", "datasets", "peft")
#: Packages that a release or a pin, named by how it begins, needs older than metadata says: newer ones fail with it.
OLDER = {
    "4.38": ("accelerate<1", "peft<0.12"),
    "4.41": ("peft<0.14",),
    "4.42": ("peft<0.14", "pyarrow<20"),
    "numpy==1": ("datasets<4", "pandas<3", "pyarrow<20"),
}


class NotMadeError(SystemExit):
    """An environment can't be made; uncaught, it ends the program with its message and exit code 1."""


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    releases = [re.sub(r"^newest\b", NEWEST, release) for release in arguments[:at]]
    command = arguments[at + 1 :]
    if not releases or not command or not all(map(RELEASE.fullmatch, releases)):
        print("usage: python recipes/in_release.py RELEASE [RELEASE ...] -- COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    code = 0
    for release in releases:
        scripts = environment(release) / BIN
        words = [word.replace("{release}", release) for word in command]
        print(f"transformers {release}: {' '.join(words)}", flush=True)
        # Run a script that only the newest environment holds by this release's Python, too.
        script = next((s for s in (scripts / words[0], ENVIRONMENTS / NEWEST / BIN / words[0]) if s.exists()), None)
        if script is not None and not words[0].startswith("python"):
            written_in_python = script.read_bytes()[:2] == b"#!"
            words = [*([str(scripts / "python")] if written_in_python else []), str(script), *words[1:]]
        path = os.pathsep.join([str(scripts), os.environ.get("PATH", "")])
        words[0] = shutil.which(words[0], path=path) or words[0]
        done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PATH": path}, check=False)
        code = code or done.returncode
    return code


def folder_of(release: str) -> Path:
    """Where the environment of a release is, or would be."""
    return ENVIRONMENTS / re.sub(r"[<>=]+", "-", release)


def environment(release: str) -> Path:
    """The folder of a release's environment, made if it is not there."""
    if release == NEWEST:
        # torch first and alone: a range would take the newest build, with its CUDA packages.
        return made(NEWEST, [TORCH], [f"transformers=={release}", "-e", f"{ROOT}[dev,recipes]"])
    version, *pins = release.split("@")
    wanted = [f"transformers=={version}", *BESIDE_TRANSFORMERS, *older(version, pins), *pins]
    torch = [made(folder_of(pin).name, [pin]) for pin in pins if pin.startswith("torch==")]
    return made(folder_of(release).name, wanted, shared=[*torch, environment(NEWEST)])


def older(version: str, pins: Sequence[str]) -> list[str]:
    """The pins of `OLDER` for a release and the packages that are pinned with it."""
    return [each for name, old in OLDER.items() if any(map(re.compile(name).match, (version, *pins))) for each in old]


def made(name: str, *installs: Sequence[str], shared: Sequence[Path] = ()) -> Path:
    """The folder of an environment, made if it is not there: whole or not at all.

    Args:
        name: of its folder in .environments/.
        installs: requirements, installed one list after the other.
        shared: environments that provide everything else, pip included; the first that has a package.

    Raises:
        NotMadeError: pip failed; the message has the end of its output, and the path of the rest.
    """
    folder = ENVIRONMENTS / name
    if (folder / "complete").exists():
        return folder
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        if fcntl is not None:
            # pip holds it too, and may go on where this recipe was killed.
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _make(folder, installs, shared, lock)
    return folder


def _make(folder: Path, installs: Sequence[Sequence[str]], shared: Sequence[Path], lock: IO[str]) -> None:
    shown, steps, started = folder.relative_to(ROOT), 1 + len(installs), time.monotonic()
    print(f"{shown}, step 1 of {steps}: a virtual environment", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=not shared, symlinks=os.name != "nt")
    link = "".join(f"import site; site.addsitedir({str(_site_packages(each))!r})\n" for each in shared)
    (_site_packages(folder) / "shared.pth").write_text(link)
    pip = [str([*shared, folder][0] / BIN / "python"), "-m", "pip", "--python", str(folder / BIN / "python")]
    for step, requirements in enumerate(installs, 2):
        print(f"{shown}, step {step} of {steps}: pip install {' '.join(requirements)}", flush=True)
        log = folder / "pip.log"
        code = _logged([*pip, "install", *requirements], log, lock)
        if code:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise NotMadeError(f"pip install {' '.join(requirements)}: exit code {code}\n{end}\nAll of it is in {log}")
    (folder / "complete").touch()
    print(f"{shown} is made, in {_minutes(time.monotonic() - started)}", flush=True)


def _logged(command: list[str], log: Path, lock: IO[str]) -> int:
    """The exit code of a command that writes into a log; show its time and pip's progress every minute.

    On a terminal every second, in one line that is overwritten.
    """
    started, terminal = time.monotonic(), sys.stdout.isatty()
    with (
        log.open("ab") as file,
        subprocess.Popen(command, stdin=lock, stdout=file, stderr=subprocess.STDOUT) as running,
    ):
        while True:
            try:
                code = running.wait(timeout=1 if terminal else MINUTE)
            except subprocess.TimeoutExpired:
                doing = DOING.findall(log.read_text(errors="replace")) or [""]
                line = f"    {_minutes(time.monotonic() - started)}  {doing[-1]}"[:79]
                print(f"\r{line:79}" if terminal else line, end="" if terminal else "\n", flush=True)
            else:
                if terminal:
                    print(f"\r{'':79}", end="\r", flush=True)
                return code


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
