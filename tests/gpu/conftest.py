"""Tests that need a GPU. `make gpu` runs them, and they are skipped elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from device import ON_GPU

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests if the tests train on the CPU."""
    for item in items:
        if item.path.is_relative_to(HERE) and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and ZERO_PLUGIN_TEST_DEVICE=cuda, as `make gpu`"))
