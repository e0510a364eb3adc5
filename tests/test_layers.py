"""The import arrows run one way: read from the source, so lazy imports count too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_accum_fix

PACKAGE = Path(hf_accum_fix.__file__).parent
MODULES = {
    ".".join(("hf_accum_fix", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
FRAMEWORKS = {"torch", "transformers", "accelerate", "peft"}


def imports(module: str) -> set[str]:
    """Every module that one imports, at the top, inside a function or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports relatively"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in FRAMEWORKS or name in MODULES}


def modules_of(package: str) -> list[str]:
    return sorted(name for name in MODULES if name == package or name.startswith(f"{package}."))


@pytest.mark.parametrize("module", modules_of("hf_accum_fix.accumulation"))
def test_accumulation_knows_no_trainer_and_no_release(module: str) -> None:
    allowed = ("torch", "hf_accum_fix.accumulation", "hf_accum_fix.errors")
    assert {name for name in imports(module) if not name.startswith(allowed)} <= {"hf_accum_fix"}


@pytest.mark.parametrize("module", modules_of("hf_accum_fix.upstream"))
def test_upstream_touches_no_tensor(module: str) -> None:
    allowed = ("hf_accum_fix.upstream", "hf_accum_fix.errors", "hf_accum_fix.options")
    assert {name for name in imports(module) if not name.startswith(allowed)} == set()


def test_upstream_runs_one_way() -> None:
    order = ["seams", "chain", "patch", "patchers", "defects", "environment", "plan"]
    assert {f"hf_accum_fix.upstream.{name}" for name in order} == set(modules_of("hf_accum_fix.upstream")[1:])
    for rank, name in enumerate(order):
        later = {f"hf_accum_fix.upstream.{other}" for other in order[rank:]}
        assert not imports(f"hf_accum_fix.upstream.{name}") & later, name


@pytest.mark.parametrize("module", modules_of("hf_accum_fix.monitor"))
def test_monitors_know_nothing_else_of_the_package(module: str) -> None:
    allowed = ("torch", "transformers", "hf_accum_fix.monitor", "hf_accum_fix.errors")
    assert {name for name in imports(module) if not name.startswith(allowed)} <= {"hf_accum_fix"}


def test_nothing_else_of_the_package_knows_the_monitors() -> None:
    knowing = {name for name in MODULES if any(found.startswith("hf_accum_fix.monitor") for found in imports(name))}
    assert knowing - {*modules_of("hf_accum_fix.monitor")} <= {"hf_accum_fix.cli.watch"}


def test_monitors_run_one_way() -> None:
    order = ["robust", "ranks", "pipeline", "text_logs", "run_logs", "watch", "picture", "alarms", "deviation", "loss"]
    order += ["rank_loss", "rank_gradients", "gradient_norm", "replicas", "batch_norm", "memory", "monitor"]
    order += ["loss_check", "callbacks"]
    assert {f"hf_accum_fix.monitor.{name}" for name in order} == set(modules_of("hf_accum_fix.monitor")[1:])
    for rank, name in enumerate(order):
        later = {f"hf_accum_fix.monitor.{other}" for other in order[rank:]}
        assert not imports(f"hf_accum_fix.monitor.{name}") & later, name


def test_reading_logs_needs_no_framework() -> None:
    for name in ("robust", "pipeline", "text_logs", "run_logs", "watch", "picture"):
        assert not imports(f"hf_accum_fix.monitor.{name}") & FRAMEWORKS, name


def test_few_modules_know_the_trainer() -> None:
    knowing = {name for name in MODULES if any(found.split(".")[0] == "transformers" for found in imports(name))}
    room = {"trainer", "cli.head", "monitor.callbacks"}
    rooms = {*modules_of("hf_accum_fix.overrides"), *modules_of("hf_accum_fix.verification")}
    assert knowing <= {*(f"hf_accum_fix.{name}" for name in room), *rooms}


def test_the_room_of_the_trainer_runs_one_way() -> None:
    order = ["session", "live", "loader", "settling", "routing", "certifying", "windows", "announcing", "steps"]
    order += ["training"]
    assert {f"hf_accum_fix.overrides.{name}" for name in order} == set(modules_of("hf_accum_fix.overrides")[1:])
    for rank, name in enumerate(order):
        later = {f"hf_accum_fix.overrides.{other}" for other in order[rank:]}
        assert not imports(f"hf_accum_fix.overrides.{name}") & later, name


def test_the_loop_knows_no_trainer() -> None:
    for name in ("loop", "engine", "duplicates", "shadow", "loss_log"):
        known = imports(f"hf_accum_fix.{name}")
        assert not any(found.startswith(("transformers", "hf_accum_fix.overrides")) for found in known), name


def test_nothing_depends_on_the_command_line() -> None:
    knowing = {name for name in MODULES if any(found.startswith("hf_accum_fix.cli") for found in imports(name))}
    assert knowing - {*modules_of("hf_accum_fix.cli")} == {"hf_accum_fix.__main__"}


def test_the_bootstrap_imports_nothing_before_the_trainer_is() -> None:
    tree = ast.parse(MODULES["hf_accum_fix.cli.bootstrap.sitecustomize"].read_text(encoding="utf-8"))
    at_once = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert at_once == {"os", "sys"}
    assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


def test_overrides_asks_which_defects_a_release_has_and_knows_no_patching() -> None:
    found = {name for module in modules_of("hf_accum_fix.overrides") for name in imports(module)}
    assert {name for name in found if name.startswith("hf_accum_fix.upstream")} == {"hf_accum_fix.upstream.defects"}


def test_the_light_modules_stay_light() -> None:
    for name in ("errors", "options", "observations"):
        assert not imports(f"hf_accum_fix.{name}") & FRAMEWORKS
