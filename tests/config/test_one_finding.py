"""A key has one finding, however many faults: no user gets two messages about one value."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.launch_settings import launch_schema
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.schema import deepspeed_schema, walk_keys
from zero_plugin.errors import ConfigError, Problem

ZERO = {"zero_optimization": {"stage": 2}}
WRONG: tuple[Any, ...] = ("x", -1, 0.5, "true", True, [], "cpu")


def findings(config: dict[str, Any]) -> list[Problem]:
    try:
        return find_problems(document_from_mapping(config, "here"))
    except ConfigError as error:
        return list(error.problems)


def with_all_keys(value: Any, stage: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration in which each key of the schema except the stage has this value."""
    config: dict[str, Any] = {}
    paths = {path for path, _ in walk_keys(deepspeed_schema())}
    for path in paths - {longer[:n] for longer in paths for n in range(len(longer))}:
        section = config
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value
    config["zero_optimization"]["stage"] = stage
    return config


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_no_key_has_two(value: Any, stage: int) -> None:
    """This holds for all keys together, and for each launch key with a stage."""
    launch = {name: value for name in launch_schema()["properties"] if name != "deepspeed_config"}
    for config in (
        with_all_keys(value, stage),
        {**launch, "deepspeed_config": {"zero_optimization": {"stage": stage}}},
    ):
        found = findings(config)
        assert len(found) > 20
        counts = Counter((problem.where, problem.key) for problem in found if problem.key)
        assert {name: count for name, count in counts.items() if count > 1} == {}


@pytest.mark.parametrize(
    ("config", "key", "severity", "message"),
    [
        ({"compile": {"double_buffer": "x"}}, "compile.double_buffer", "error", '"x" is not legal here'),
        ({"compile": {"disable": "x"}}, "compile.disable", "error", "DeepSpeed's `compile` section no longer has it"),
        ({**ZERO, "compile": {"double_buffer": "false"}}, "compile.double_buffer", "warning", "has no effect"),
        ({"bfloat16": {"enabled": "x"}}, "bfloat16.enabled", "error", '"x" is not legal here'),
        ({**ZERO, "aio": {"thread_count": 4}}, "aio.thread_count", "warning", "has no effect"),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "activation_checkpointing.contiguous_memory_optimization",
            "error",
            "true needs partition_activations: true and number_checkpoints",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_most_severe_is_shown(config: dict[str, Any], key: str, severity: str, message: str) -> None:
    """An error about the value comes before its interpretation and before its missing effect."""
    (found,) = (problem for problem in findings(config) if problem.key == key)
    assert found.severity == severity
    assert message in found.message
