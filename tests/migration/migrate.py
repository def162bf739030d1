"""The complete migration of a script: `accelerate` becomes `zero_plugin` in its import lines."""

from __future__ import annotations

import re

_IMPORT = re.compile(r"^(\s*)(from|import) accelerate\b", flags=re.MULTILINE)


def migrate(source: str) -> str:
    """Return the text of an Accelerate script for this package."""
    return _IMPORT.sub(r"\1\2 zero_plugin", source)
