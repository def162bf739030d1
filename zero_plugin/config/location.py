"""Where the configuration of a command lies that names none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["CONFIG_VARIABLE", "default_config_file", "find_config_file"]

CONFIG_VARIABLE: Final = "ZERO_PLUGIN_CONFIG_FILE"

_OF_ACCELERATE: Final = ("default_config.yaml", "default_config.yml", "default_config.json")


def default_config_file(environ: Mapping[str, str]) -> Path:
    """The user's default file, whether it exists or not: `$HF_HOME/zero_plugin/default_config.yaml`."""
    return _hugging_face_home(environ) / "zero_plugin" / "default_config.yaml"


def find_config_file(environ: Mapping[str, str]) -> Path | None:
    """The file for a command that names none, or None.

    In this order: what `$ZERO_PLUGIN_CONFIG_FILE` names, whether it exists or not; the user's default file; the default
    file that `accelerate config` wrote.
    """
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    accelerate = _hugging_face_home(environ) / "accelerate"
    candidates = [default_config_file(environ), *(accelerate / name for name in _OF_ACCELERATE)]
    # os.access, since Path.is_file raises where a folder above may not be searched
    return next((path for path in candidates if os.access(path, os.F_OK)), None)


def _hugging_face_home(environ: Mapping[str, str]) -> Path:
    """The folder that Hugging Face's libraries share, found by their rule."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expanduser(home))  # noqa: PTH111 - Path.expanduser raises for a user without a home
