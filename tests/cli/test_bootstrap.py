"""The sitecustomize that ``run`` puts first: in processes with a stand-in for transformers and for this package."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix.cli.inherit import BOOTSTRAP, VARIABLE, apply_inherited, environment_for, inherited_options
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.options import Options
from tests.cli.processes import environment, start

ON = "hf-accum-fix: stand-in is on\n"
TRAINER = "class Trainer:\n    patched = False\n"


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a transformers.trainer, and an hf_accum_fix that notes on the class, and says, that it is on."""
    folder, lines = tmp_path / "stand_in", "from transformers.trainer import Trainer; Trainer.patched = True"
    lines += f"; import sys; sys.stderr.write({ON!r})"
    for name in ("transformers", "hf_accum_fix", "hf_accum_fix/cli"):
        write(folder / name / "__init__.py", "")
    write(folder / "transformers/trainer.py", TRAINER)
    write(folder / "hf_accum_fix/cli/inherit.py", f"def apply_inherited():\n    {lines}\n")
    return folder


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def python(script: str, *pythonpath: Path | str, flags: tuple[str, ...] = (), **variables: str) -> tuple[str, str]:
    """What a process that has the bootstrap folder first prints, to stdout and stderr."""
    done = start([sys.executable, *flags, "-c", script], environment(BOOTSTRAP, *pythonpath, **variables), Path("/"))
    return done.stdout, done.stderr


PATCHED = "import transformers.trainer as t; print(t.Trainer.patched)"


def test_nothing_else_is_touched(stand_in: Path) -> None:
    script = (
        "import sys, json, transformers;"
        "print(json.dumps([sorted({*sys.modules} - {'sitecustomize'}), sys.path, len(sys.meta_path)]))"
    )
    out, printed = python(script, stand_in)
    modules, path, finders = json.loads(out)
    without = start([sys.executable, "-c", script], environment(stand_in), Path("/"))
    assert modules == json.loads(without.stdout)[0]
    assert [path[0], *path[2:]] == json.loads(without.stdout)[1] and path[1] == BOOTSTRAP
    assert finders == json.loads(without.stdout)[2] + 1
    assert printed == ""


def test_spawned_workers_are_patched(stand_in: Path, tmp_path: Path) -> None:
    main = write(
        tmp_path / "main.py",
        "import multiprocessing\n"
        "def patched():\n"
        "    from transformers.trainer import Trainer\n"
        "    print(Trainer.patched)\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=patched)\n"
        "    worker.start()\n"
        "    worker.join()\n",
    )
    done = start([sys.executable, main], environment(BOOTSTRAP, stand_in), tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", ON)


def test_a_process_without_the_patch_prints_that_whatever_was_printed_before(tmp_path: Path) -> None:
    """A launcher on another Python, or on another machine, prints "is on"; the rank that trains stock is this one."""
    write(tmp_path / "transformers/__init__.py", "")
    write(tmp_path / "transformers/trainer.py", TRAINER)
    write(tmp_path / "hf_accum_fix/__init__.py", "")  # of an age without a command line
    for rank in ({}, {"RANK": "1", "PYTHON_HF_ACCUM_FIX_ANNOUNCED": "1"}, {"LOCAL_RANK": "3"}):
        out, printed = python(PATCHED, tmp_path, **rank)
        assert out == "False\n" and printed.startswith("hf-accum-fix: NOT on: ") and printed.count("\n") == 1


@pytest.mark.parametrize("refusal", ["RuntimeError('no')", "SystemExit('no')"])
def test_no_further_attempt_gets_a_stock_trainer(refusal: str, stand_in: Path) -> None:
    write(stand_in / "hf_accum_fix/cli/inherit.py", f"def apply_inherited():\n    raise {refusal}\n")
    script = (
        "for attempt in range(2):\n"
        "    try:\n"
        "        import transformers.trainer\n"
        "        print('stock')\n"
        "    except BaseException as error:\n"
        "        print(error)\n"
    )
    assert python(script, stand_in) == ("no\nno\n", "")


FINDERS = "[BuiltinImporter, FrozenImporter, PathFinder]"
#: The sitecustomize that ours hides; those that clear the finders do not remove ours.
THEIRS = {
    "prints": "sys.path.append('/added')",
    "clears": f"sys.meta_path.clear(); sys.meta_path += {FINDERS}",
    "another list": f"sys.meta_path = {FINDERS}",
    "and imports": f"sys.meta_path[:] = {FINDERS}; import transformers.trainer",
}


@pytest.mark.parametrize("name", THEIRS)
def test_the_hidden_one_runs_and_is_the_module_and_ours_stays(name: str, stand_in: Path, tmp_path: Path) -> None:
    begins = (
        "import sys; from importlib.machinery import PathFinder, BuiltinImporter, FrozenImporter; print('theirs'); "
    )
    hidden = write(tmp_path / "theirs" / "sitecustomize.py", begins + THEIRS[name])
    script = f"import sys; print(sys.modules['sitecustomize'].__file__, sys.path[1], sys.path[-1]); {PATCHED}"
    out, printed = python(script, hidden.parent, stand_in)
    first, second, patched = out.splitlines()
    assert (first, patched, printed) == ("theirs", "True", ON)
    assert second.startswith(f"{hidden} {BOOTSTRAP} ") and second.endswith(" /added") == (name == "prints")


def test_pythonpath_of_the_user_is_kept_behind_ours_and_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"/one:/two": ":/one:/two", "": "", "/one:": f":/one:{tmp_path}"}
    for before, behind in {**paths, "src:../two": f":{tmp_path}/src:{tmp_path.parent}/two"}.items():
        handed = environment_for({}, {"PYTHONPATH": before.replace(":", os.pathsep), "HOME": "/"})
        assert handed["PYTHONPATH"] == BOOTSTRAP + behind.replace(":", os.pathsep)
        assert handed["HOME"] == "/"
    assert environment_for({}, {})["PYTHONPATH"] == BOOTSTRAP and Path(BOOTSTRAP).is_absolute()


def test_the_options_travel() -> None:
    switches = {"eval_loss": True, "drop_duplicates": True, "balance_windows": True}
    words = {"router_loss": "exact", "accumulate_in": "float32"}
    given = environment_for({"allow_foreign": ["a.b", "c.d"], **words, **switches}, {})
    assert inherited_options(given) == Options(allow_foreign=("a.b", "c.d"), **words, **switches)
    assert inherited_options({}) == Options()
    assert VARIABLE.startswith("PYTHON")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"allow_foreign": ["nodot"]}', '{"allow_foreign": 3}'])
def test_a_variable_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(OptionsError):
        inherited_options({VARIABLE: text})


def theirs(self: Any, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> None:
    """Another package's replacement of compute_loss."""


FOREIGN = f"{__name__}.theirs"


def test_it_is_on_with_the_options_that_travelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(f"{VARIABLE}_ANNOUNCED", raising=False)
    monkeypatch.setenv(VARIABLE, environment_for({"allow_foreign": [FOREIGN]}, {})[VARIABLE])
    monkeypatch.setattr(Trainer, "compute_loss", theirs)
    apply_inherited()
    assert capsys.readouterr().err.count(f"hf-accum-fix: {hf_accum_fix.__version__} is on and fits transformers ") == 1
    handle = hf_accum_fix.active_handle()
    assert handle is not None and handle.active and handle.options.allow_foreign == (FOREIGN,)
    hf_accum_fix.revert()


def test_a_refusal_is_no_error_that_a_script_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(Trainer, "compute_loss", theirs)
    with pytest.raises(SystemExit, match=f"hf-accum-fix: got {FOREIGN} in place of Trainer.compute_loss"):
        apply_inherited()
    assert hf_accum_fix.active_handle() is None
