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
import zero_plugin.launch
import zero_plugin.machine
import zero_plugin.plan

# What needs no torch: whole packages, and the modules of others that commands use before they start anything.
COLD_PACKAGES = [zero_plugin.cli, zero_plugin.config, zero_plugin.launch, zero_plugin.machine, zero_plugin.plan]
WARM = {
    "zero_plugin.launch.rendezvous",  # a subclass of torch's, imported by the process that runs torchrun's engine
    "zero_plugin.cli.selftest_worker",
    "zero_plugin.plan.activations",  # these read live models, or build some
    "zero_plugin.plan.live_bytes",
    "zero_plugin.plan.blocks",
    "zero_plugin.plan.speeds",
}
COLD_MODULES = [
    name
    for package in COLD_PACKAGES
    for name in (
        package.__name__,
        *(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
    if name not in WARM
]


@pytest.mark.parametrize("module", COLD_MODULES)
def test_importing_loads_no_torch(module: str) -> None:
    """A process that imports only this module has neither torch nor DeepSpeed in `sys.modules`."""
    code = f"import sys, {module}; print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


ROOT = Path(zero_plugin.config.__file__).parents[1]


def _imported_anywhere(file: Path) -> Iterator[tuple[str, int]]:
    """Also within functions, and by name; with the line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom():
                yield node.module or "", node.lineno
            case ast.Import():
                yield from ((alias.name, node.lineno) for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name, node.lineno


@pytest.mark.parametrize(
    ("package", "home"), [("deepspeed", "strategies/deepspeed"), ("torch_xla", "machine/xla_runtime.py")]
)
def test_a_package_is_imported_in_one_place(package: str, home: str) -> None:
    """DeepSpeed in one folder, torch_xla in one file."""
    found = {
        file.relative_to(ROOT): line
        for file in ROOT.rglob("*.py")
        for name, line in _imported_anywhere(file)
        if name.split(".")[0] == package
    }
    elsewhere = {file: line for file, line in found.items() if not file.is_relative_to(home)}
    assert found.keys() > elsewhere.keys(), f"nothing in {home} imports {package}"
    assert not elsewhere
