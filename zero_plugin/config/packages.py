"""Which packages are installed."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache  # each look parses the package's metadata anew
def installed_version(package: str) -> str | None:
    """The version of an installed package, None for one that is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
