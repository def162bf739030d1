"""`HfDeepSpeedConfig`: questions to a DeepSpeed configuration by dotted key, as scripts and transformers ask them."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_plugin.config.read import parse_file
from zero_plugin.errors import ConfigError, Problem


class HfDeepSpeedConfig:
    """A DeepSpeed configuration as a plain dict.

    Args:
        config_file_or_dict: path of a DeepSpeed JSON, a dict, which is copied, or the JSON's text, also as URL-safe
            base64.

    Attributes:
        config: the dict, which answers follow when it changes.

    Raises:
        ConfigError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        parsed = parse_configuration(config_file_or_dict)
        self.config: dict[str, Any]
        if isinstance(parsed, dict):
            self.config = parsed
        else:
            problems: list[Problem] = []
            self.config = parse_file(Path(parsed), problems).plain()
            if problems:
                raise ConfigError(problems)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dict that holds, or would hold, a dotted key, with the key's last part; None for a missing dict."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, e.g. `zero_optimization.stage`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key with all below it.

        Raises:
            ValueError: it is not there, and `must_exist`.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"there is no {ds_key_long} in the DeepSpeed configuration.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the key is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the key is there and not true."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether the ZeRO stage is 2."""
        return bool(self.get_value("zero_optimization.stage", -1) == 2)

    def is_zero3(self) -> bool:
        """Whether the ZeRO stage is 3."""
        return bool(self.get_value("zero_optimization.stage", -1) == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters leave the device."""
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)


def parse_configuration(given: Any) -> dict[str, Any] | str:
    """A DeepSpeed configuration as scripts name one: a copy of its keys, or the path of its file.

    Args:
        given: see `HfDeepSpeedConfig`, whose objects, and transformers', are taken too.

    Raises:
        ConfigError: it is neither keys nor a path nor a configuration's text.
    """
    config = getattr(given, "config", given)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, os.PathLike):
        return str(os.fspath(config))
    if not isinstance(config, str):
        fix = "Pass the path of a DeepSpeed JSON, or a dict."
        raise ConfigError([Problem("hf_ds_config", "", f"a {type(config).__name__} is no configuration", fix)])
    for text in (config, _decoded(config)):
        if text.lstrip().startswith("{"):
            try:
                parsed: dict[str, Any] = json.loads(text)
            except ValueError as error:
                fix = "Pass whole JSON, or the path of a file."
                raise ConfigError([Problem("hf_ds_config", "", f"broken JSON: {error}", fix)]) from None
            return parsed
    return config


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""
