"""Which files below a folder are launch configs or DeepSpeed configurations."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from zero_plugin.config.files import parse_file
from zero_plugin.config.launch_settings import LaunchSettings
from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.translate import SHORT_FIELDS
from zero_plugin.errors import ConfigError

__all__ = ["config_files", "looks_like_config"]

_SUFFIXES: Final = (".yaml", ".yml", ".json")
_OTHERS_CODE: Final = ("node_modules", "site-packages", "__pycache__")

# Keys that no other kind of file has at its top.
_TELLING: Final = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "deepspeed_config",
    "deepspeed_config_file",
    "distributed_type",
    "zero_stage",
)
_NEAR: Final = 0.9  # likeness from 0 to 1: a slip in a long word, not merely a word that begins alike
_MOST_KEYS: Final = 50  # looked at in a file; a configuration has fewer
_TELLING_IN_BROKEN_TEXT: Final = re.compile(rf"""(?m)^[\s{{,]*["']?({"|".join(_TELLING)})["']?\s*:""")


def config_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The YAML and JSON files below `folder` that are configurations, and those that are something else.

    Hidden folders, virtual environments and other people's code are not looked into, links are not followed.
    """
    known: tuple[list[Path], list[Path]] = [], []
    for path in _files_below(folder):
        known[0 if looks_like_config(path) else 1].append(path)
    return known


def looks_like_config(path: Path) -> bool:
    """Whether a file is meant as a configuration: by a key that nothing else has, or by most of its keys."""
    try:
        keys = list(parse_file(path, []).value)
    except ConfigError:
        try:
            return _TELLING_IN_BROKEN_TEXT.search(path.read_text("utf-8-sig", "replace")) is not None
        except OSError:
            return True  # that it cannot be read is worth telling
    known = {*LaunchSettings.model_fields, *SHORT_FIELDS, *deepspeed_schema()["properties"]}
    of_config = [near for key in keys[:_MOST_KEYS] if (near := _nearest(key, known.union(_TELLING)))]
    return any(near in _TELLING for near in of_config) or 2 * len(of_config) > len(keys)


def _nearest(key: str, words: Collection[str]) -> str:
    """The word that `key` is, perhaps with a slip; "" where there is none."""
    if key in words:
        return key
    return next(iter(difflib.get_close_matches(key, words, n=1, cutoff=_NEAR)), "")


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(root, name)))
        yield from (Path(root, name) for name in sorted(names) if name.lower().endswith(_SUFFIXES))


def _is_skipped(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _OTHERS_CODE or (folder / "pyvenv.cfg").exists()
