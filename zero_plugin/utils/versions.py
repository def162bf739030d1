"""Compare the version of an installed package with another."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version, parse

from zero_plugin.utils.constants import STR_OPERATION_TO_FUNC


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return the result of comparing two versions by `operation`.

    Args:
        library_or_version: the name of an installed package, or a parsed version.
        operation: one of `<`, `<=`, `==`, `!=`, `>=`, `>`.
        requirement_version: the other version.

    Raises:
        ValueError: `operation` is another string.
        PackageNotFoundError: the package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"compare_versions(operation={operation!r}): write one of {list(STR_OPERATION_TO_FUNC)}")
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with `version` by `operation`; torch itself is not imported."""
    return compare_versions("torch", operation, version)
