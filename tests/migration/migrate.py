"""The whole migration of a script: in its import lines, `accelerate` becomes `zero_plugin`."""

from __future__ import annotations

import re

_IMPORT = re.compile(r"^(\s*)(from|import) accelerate\b", flags=re.MULTILINE)


def migrate(source: str) -> str:
    """The text of an Accelerate script for this package."""
    return _IMPORT.sub(r"\1\2 zero_plugin", source)
