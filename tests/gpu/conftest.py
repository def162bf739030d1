"""What only a GPU can show: `make gpu` runs it there, elsewhere it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from device import ON_GPU

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests where the tests train on the CPU."""
    for item in items:
        if item.path.is_relative_to(HERE) and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and ZERO_PLUGIN_TEST_DEVICE=cuda, as `make gpu`"))
