"""The cold half (configuration, resolution, launching, the command line) never loads torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import zero_plugin.cli
import zero_plugin.config
import zero_plugin.launch
import zero_plugin.resolve

COLD_PACKAGES = [zero_plugin.config, zero_plugin.resolve, zero_plugin.launch, zero_plugin.cli]

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
