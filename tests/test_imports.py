"""The cold half (configuration, resolution, launching, the command line) never loads torch."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero_plugin.cli
import zero_plugin.config
import zero_plugin.doctor
import zero_plugin.launch
import zero_plugin.plan
import zero_plugin.resolve

COLD_PACKAGES = [
    zero_plugin.config,
    zero_plugin.resolve,
    zero_plugin.plan,
    zero_plugin.launch,
    zero_plugin.doctor,
    zero_plugin.cli,
]

COLD_MODULES = [
    name
    for package in COLD_PACKAGES
    for name in (
        package.__name__,
        *(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
]


@pytest.mark.parametrize("module", COLD_MODULES)
def test_importing_loads_no_torch(module: str) -> None:
    """A process that imports only this module has neither torch nor DeepSpeed in `sys.modules`."""
    code = f"import sys, {module}; print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


# What a folder may not import: what stands above it.
ABOVE = {
    "config": ("resolve", "probe", "strategies", "data", "checkpoint", "facade", "accelerator", "launch", "cli"),
    "plan": ("probe", "strategies", "data", "checkpoint", "facade", "accelerator", "launch", "cli"),
    "resolve": ("plan", "probe", "strategies", "data", "checkpoint", "facade", "accelerator", "launch", "cli"),
    "probe": ("strategies", "checkpoint", "facade", "accelerator", "launch", "cli"),
    "strategies": ("facade", "accelerator", "launch", "cli"),
    "data": ("facade", "accelerator", "launch", "cli"),
    "checkpoint": ("facade", "accelerator", "launch", "cli"),
    "facade": ("launch", "cli"),
    "launch": ("facade", "cli"),
    "doctor": ("facade", "accelerator", "cli"),
    "selftest": ("launch", "cli"),
}
ROOT = Path(zero_plugin.config.__file__).parents[1]


def _imported_at_top(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("layer", ABOVE)
def test_imports_run_one_way(layer: str) -> None:
    """No module of a layer imports, when it is loaded, from a layer above it."""
    above = {f"zero_plugin.{name}" for name in ABOVE[layer]}
    files = list((ROOT / layer).rglob("*.py"))
    assert files
    for file in files:
        wrong = {name for name in _imported_at_top(file) if ".".join(name.split(".")[:2]) in above}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_deepspeed_is_imported_in_its_folder_only() -> None:
    """Anywhere in a module, also within functions."""
    for file in ROOT.rglob("*.py"):
        if file.is_relative_to(ROOT / "strategies" / "deepspeed"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "deepspeed" for name in names), f"{file}:{node.lineno}"
