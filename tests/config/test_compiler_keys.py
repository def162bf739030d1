"""`dynamo_config`: the torch.compile settings of Accelerate's launch configs."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import asked_compiler
from zero_plugin.config.read import document_from_mapping
from zero_plugin.errors import ConfigError


def read(keys: dict[str, Any]) -> Document:
    document = document_from_mapping({"num_processes": 1, **keys}, "code")
    check_document(document)
    return document


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({}, {}),
        ({"dynamo_config": {}}, {}),
        ({"dynamo_config": None, "dynamo_backend": "auto"}, {}),
        ({"dynamo_backend": False}, {"backend": "no"}),
        ({"dynamo_backend": "NO"}, {"backend": "no"}),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": "true"}},
            {"backend": "inductor", "mode": "default", "use_dynamic": True},
        ),
        (
            {"dynamo_config": {"backend": "eager", "use_regional_compilation": True}},
            {"backend": "eager", "use_regional_compilation": True},
        ),
        ({"dynamo_backend": "NO", "dynamo_config": {"dynamo_backend": "EAGER"}}, {"backend": "eager"}),
    ],
    ids=str,
)
def test_what_is_asked_for(keys: dict[str, Any], asked: dict[str, Any]) -> None:
    """Keys work with or without `dynamo_`, in any case. The section overrides an older Accelerate's key."""
    assert {name: entry.value for name, entry in asked_compiler(read(keys).launch).items()} == asked


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"dynamo_backend": "gcc"}, ['"gcc" is not legal here', "inductor"]),
        ({"dynamo_config": {"dynamo_mod": "default"}}, ["dynamo_config.dynamo_mod", "unknown key", "dynamo_mode?"]),
        ({"dynamo_config": {"dynamo_use_dynamic": 7}}, ["7 is not legal here", "true or false"]),
        ({"dynamo_config": "inductor"}, ["dynamo_config", "unknown key"]),
    ],
    ids=str,
)
def test_what_is_wrong(keys: dict[str, Any], parts: list[str]) -> None:
    """The error has the legal values and comes before anything starts."""
    with pytest.raises(ConfigError) as caught:
        read(keys)
    for part in parts:
        assert part in str(caught.value)


def test_a_config_that_is_written_again_keeps_it() -> None:
    """It keeps Accelerate's names, in the section."""
    text = read({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}).to_accelerate_yaml()
    assert "dynamo_config:\n  dynamo_backend: INDUCTOR\n" in text
