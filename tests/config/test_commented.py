"""Written configs have a sentence next to each key. A file is written completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.config.commented import config_text, key_comments, replace_file, write_config
from zero_plugin.config.keys import LAUNCH_FIELDS, SHORT_FIELDS, LaunchSettings
from zero_plugin.config.launch_settings import compiler_schema, launch_schema
from zero_plugin.errors import ConfigError, MachineError


def options(schema: dict[str, Any]) -> list[str]:
    return [
        str(option)
        for branch in (schema, *schema.get("anyOf", ()))
        for option in branch.get("enum", ["true", "false"] if branch.get("type") == "boolean" else [])
    ]


def test_every_key_has_a_sentence_with_every_option() -> None:
    """Every launch key and short field fits on one line with all its options. A new option must be added there too."""
    below = {*LAUNCH_FIELDS, *SHORT_FIELDS, "deepspeed_config_file"}
    top = {*LaunchSettings.model_fields, "compute_environment", "deepspeed_config"}
    compiling = compiler_schema()["dynamo_config"]["properties"]
    assert set(key_comments()) == {
        *((name,) for name in (*top, "dynamo_config")),
        *(("deepspeed_config", name) for name in below),
        *(("dynamo_config", name) for name in compiling),
    }
    for path, comment in key_comments().items():
        assert len(comment) < 105
        missing = [word for word in options(launch_schema()["properties"].get(path[-1], {})) if word not in comment]
        assert missing == [], path


def test_the_suffix_chooses_the_language() -> None:
    """`.json` is JSON, which has no comments. Any other suffix is YAML."""
    assert config_text({"num_processes": 2}, Path("a.json")) == '{\n  "num_processes": 2\n}\n'
    text = config_text({"num_processes": 2}, Path("a.yaml"))
    assert yaml.safe_load(text) == {"num_processes": 2}
    assert text.count("#") == 2


def test_wrong_values_are_not_written(tmp_path: Path) -> None:
    """The check comes first."""
    with pytest.raises(ConfigError, match="num_processes"):
        write_config({"num_processes": 0}, tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Text that cannot be encoded fails midway: the old file stays, without any part of the new one."""
    file = tmp_path / "a.yaml"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "x" * 100_000 + "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
    assert file.read_text() == "old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """A default config that is kept elsewhere is rewritten there."""
    (tmp_path / "link.yaml").symlink_to("kept.yaml")
    replace_file(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "kept.yaml").read_text() == "new"


def test_a_place_that_is_no_file(tmp_path: Path) -> None:
    """The error has the system's reason, and no file is left."""
    with pytest.raises(MachineError, match=r"cannot be written: is a directory.*--config_file"):
        replace_file(tmp_path, "text")
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []
