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

# Modules that need no torch: complete packages, and modules of others that commands use before any start.
COLD_PACKAGES = [zero_plugin.cli, zero_plugin.config, zero_plugin.launch, zero_plugin.machine, zero_plugin.plan]
WARM = {
    "zero_plugin.launch.rendezvous",  # a subclass of torch's, imported by the process that runs torchrun's engine
    "zero_plugin.cli.selftest_worker",
    "zero_plugin.plan.activations",  # these read or build live models
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


# Each module in its own process, forked from one with the shared imports.
IMPORTS = """
import importlib, os, sys
import jsonschema, pydantic, rich.table, typer, yaml
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        print(name, *({"torch", "deepspeed"} & set(sys.modules)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, list[str]]:
    """Return which of torch and DeepSpeed are loaded after importing a module.

    Modules that cannot be imported are absent.
    """
    command = [sys.executable, "-c", IMPORTS, *COLD_MODULES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {name: loaded for name, *loaded in map(str.split, run.stdout.splitlines())}


@pytest.mark.xdist_group("imports")
@pytest.mark.parametrize("module", COLD_MODULES)
def test_importing_loads_no_torch(module: str, loaded_by: dict[str, list[str]]) -> None:
    """A process that imports only this module has neither torch nor DeepSpeed in `sys.modules`."""
    assert loaded_by[module] == []


ROOT = Path(zero_plugin.config.__file__).parents[1]


def _imported_anywhere(file: Path) -> Iterator[tuple[str, int]]:
    """Return imports with their lines, also those within functions, and by name."""
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
    """DeepSpeed is imported in one folder, torch_xla in one file."""
    found = {
        file.relative_to(ROOT): line
        for file in ROOT.rglob("*.py")
        for name, line in _imported_anywhere(file)
        if name.split(".")[0] == package
    }
    elsewhere = {file: line for file, line in found.items() if not file.is_relative_to(home)}
    assert found.keys() > elsewhere.keys(), f"nothing in {home} imports {package}"
    assert not elsewhere
