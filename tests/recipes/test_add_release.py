"""A release is added with the bodies of its methods where everything fits; else nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers import Trainer

from hf_accum_fix.upstream.seams import TESTED_RELEASES
from recipes import add_release


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data without the installed release."""
    releases = json.loads(add_release.RELEASES.read_text())
    for kind in ("published", "tested"):
        releases[kind].remove(transformers.__version__)
    releases["bodies"]["train"].clear()
    file = tmp_path / "releases.json"
    file.write_text(json.dumps(releases))
    script = tmp_path / "in_release.py"
    script.write_text(add_release.IN_RELEASE.read_text().replace('NEWEST = "5.', 'NEWEST = "4.'))
    monkeypatch.setattr(add_release, "RELEASES", file)
    monkeypatch.setattr(add_release, "IN_RELEASE", script)
    return file


@pytest.mark.skipif(transformers.__version__ not in TESTED_RELEASES, reason="the installed release is no tested one")
def test_the_data_have_the_release_and_what_is_new_of_it(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(
        Path(add_release.__file__).parents[1].joinpath("hf_accum_fix/upstream/releases.json").read_text()
    )
    assert add_release.main() == 0
    added = json.loads(known.read_text())
    assert added["tested"] == whole["tested"] and added["published"] == whole["published"]
    [body] = added["bodies"].pop("train")
    assert body in whole["bodies"].pop("train") and added["bodies"] == whole["bodies"]
    assert "their bodies are new: train. Left" in capsys.readouterr().out
    recipe = Path(add_release.__file__).with_name("in_release.py").read_text()
    assert add_release.IN_RELEASE.read_text() == recipe and f'NEWEST = "{whole["tested"][-1]}"' in recipe


def test_a_release_that_lacks_a_seam_is_not_added(
    known: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = known.read_text()
    monkeypatch.delattr(Trainer, "get_train_dataloader")
    assert add_release.main() == 1 and known.read_text() == before
    assert "without Trainer.get_train_dataloader" in capsys.readouterr().err
