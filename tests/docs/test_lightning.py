"""The page on Lightning names keys, flags and methods that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from pages import ROOT

import zero_plugin
from zero_plugin.config.keys import FLAGS
from zero_plugin.config.schema import key_schema, yaml_schema

PAGE = ROOT / "docs/tutorial/from-lightning.md"


def rows() -> Iterator[tuple[str, str]]:
    """Yield the two cells of each row of each table."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.endswith("| here |"):
            argument, here = line.strip("| ").split(" | ")
            yield argument, here


NAMED = sorted({span for _, here in rows() for span in re.findall(r"`([^`]+)`", here)})


def exists(named: str) -> bool:
    """Return whether a flag, a call, a variable, a ready config, or a key with its value is legal."""
    if named.startswith("zero-plugin "):
        return True
    if named.startswith("--"):
        return named.removeprefix("--").split()[0] in FLAGS
    if call := re.match(r"([\w.]+)\(", named):
        owner: Any = {"accelerator": zero_plugin.Accelerator}.get(call[1].partition(".")[0], zero_plugin)
        return hasattr(owner, call[1].rpartition(".")[2])
    if named in ("PL_DEEPSPEED_CONFIG_PATH", "ZERO_PLUGIN_DEBUG=1") or (ROOT / f"ds_configs/{named}.yaml").exists():
        return True
    key, _, value = named.partition(": ")
    launch = yaml_schema()["properties"]
    short = launch["deepspeed_config"]["properties"]
    schema = launch.get(key) or short.get(key) or key_schema(tuple(key.split(".")))
    if schema and value:
        jsonschema.validate(yaml.safe_load(value), schema)
    return bool(schema)


@pytest.mark.parametrize("named", NAMED)
def test_what_replaces_an_argument_exists(named: str) -> None:
    """Each name in a table's second column is legal here, and so is the value with it."""
    assert exists(named)


def test_each_argument_has_one_row() -> None:
    """No argument of `DeepSpeedStrategy` is listed twice, and each has a key or a reason."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Arguments of `DeepSpeedStrategy`")[2].partition("\n## ")[0]
    arguments = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert len(arguments) == len(set(arguments)) == 46
    unnamed = [here for _, here in rows() if "`" not in here]
    assert [here for here in unnamed if not here.startswith(("none", "your loop"))] == []
