"""Every check of several models under one Accelerator, on every path it is for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from everyday import marks_of

# The modules are found by name: conftest.py has made them importable.
MODULES = sorted(file.stem for file in Path(__file__).parent.glob("*_checks.py"))


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("module", "world", "name"),
    [
        pytest.param(module, world, name, id=f"{module.removesuffix('_checks')}-{world}-{name}", marks=marks)
        for module in MODULES
        for checks in [importlib.import_module(module).CHECKS]
        for name, marks in marks_of(checks).items()
        for world in checks[name][0]
    ],
)
def test_check(module: str, world: int, name: str, several_outcome: Callable[[str, int, str], None]) -> None:
    """The check holds on every process; its docstring says what it holds."""
    several_outcome(module, world, name)
