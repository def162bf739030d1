"""Every check of processes that share their samples, on two processes and on four."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

# The modules are found by name: conftest.py has made them importable.
MODULES = sorted(file.stem for file in Path(__file__).parent.glob("*_checks.py"))


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("module", "world", "name"),
    [
        pytest.param(
            module,
            world,
            name,
            id=f"{module.removesuffix('_checks')}-{world}-{name}",
            marks=[pytest.mark.campaign] if {name, (name, world)} & getattr(checks, "RARE", set()) else [],
        )
        for module in MODULES
        for checks in [importlib.import_module(module)]
        for name, (worlds, _) in checks.CHECKS.items()
        for world in worlds
    ],
)
def test_check(module: str, world: int, name: str, long_context_outcome: Callable[[str, int, str], None]) -> None:
    """The check holds on every process; its docstring says what it holds."""
    long_context_outcome(module, world, name)
