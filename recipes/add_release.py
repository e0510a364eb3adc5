"""Add the installed transformers to the releases that tests have run, if every seam fits.

    python recipes/in_release.py 5.25.0 -- python recipes/add_release.py

Writes hf_accum_fix/upstream/releases.json, the one list of releases for tests, CI and doctor, and the newest stack
into recipes/in_release.py, which imports nothing else; prints what is left to do. If a seam is missing or does not fit,
it prints that, writes nothing and exits with 1.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import transformers.trainer
from packaging.version import Version

from hf_accum_fix.options import Options
from hf_accum_fix.upstream.environment import detect, fingerprint
from hf_accum_fix.upstream.plan import make_plan

RELEASES = Path(__file__).resolve().parents[1] / "hf_accum_fix/upstream/releases.json"
IN_RELEASE = Path(__file__).with_name("in_release.py")

LEFT = """{release} is in {file}; {bodies}. Left to do, and to commit with it:
  new defects in hf_accum_fix/upstream/defects.json, new names in seams.py, every published release before {release}
  python recipes/release_matrix.py {release}
  pytest -m releases_all"""


def main() -> int:
    environment = detect()
    refusal = make_plan(environment, Options()).refusal
    release = Version(transformers.__version__)
    if refusal is not None or release.is_prerelease or release.local:
        print(refusal or f"got transformers {release}; expected a final release", file=sys.stderr)
        return 1
    releases = json.loads(RELEASES.read_text(encoding="utf-8"))
    for key in ("published", "tested"):
        releases[key] = sorted({*releases[key], str(release)}, key=Version)
    new = []
    for name in [state.seam.name for state in environment.seams]:
        body = fingerprint(vars(transformers.trainer.Trainer)[name])
        if body not in releases["bodies"][name]:
            releases["bodies"][name].append(body)
            new.append(name)
    RELEASES.write_text(json.dumps(releases, indent=1) + "\n", encoding="utf-8")
    script = IN_RELEASE.read_text(encoding="utf-8")
    newest = re.sub(r'^NEWEST = ".*"$', f'NEWEST = "{releases["tested"][-1]}"', script, flags=re.MULTILINE)
    IN_RELEASE.write_text(newest, encoding="utf-8")
    bodies = (
        f"to be read, because their bodies are new: {', '.join(new)}" if new else "no wrapped method has a new body"
    )
    print(LEFT.format(release=release, file=RELEASES.name, bodies=bodies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
