"""Versions are compared as releases, not as texts."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import parse

from zero_plugin.utils.versions import compare_versions, is_torch_version


@pytest.mark.parametrize(
    ("operation", "expected"), [("<", True), ("<=", True), ("!=", True), ("==", False), (">=", False), (">", False)]
)
def test_every_comparison(operation: str, expected: bool) -> None:
    """2.9 is older than 2.10."""
    assert compare_versions(parse("2.9"), operation, "2.10") is expected


def test_an_installed_package_by_name() -> None:
    """The version of a named package is looked up."""
    assert compare_versions("torch", "==", importlib.metadata.version("torch"))
    assert is_torch_version(">=", "2.9")
    assert not is_torch_version("<", "2.9.0")


def test_another_operation_is_an_error() -> None:
    """The message names the legal operations."""
    with pytest.raises(ValueError, match=r"operation='=>'.*'>='"):
        compare_versions("torch", "=>", "1")
