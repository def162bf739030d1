"""A problem names its key as the user typed it: a short field, an older spelling, a flag's or a variable's field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.document import Document, from_environment, to_environment
from zero_plugin.config.find import (
    document_from_accelerate,
    lay_document,
    overlay_code,
    overlay_flags,
    read_assignments,
)
from zero_plugin.config.keys import SHORT_FIELDS
from zero_plugin.config.plugins import DeepSpeedPlugin
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.resolve.facts import Facts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.errors import ConfigError

WRONG = {**dict.fromkeys(SHORT_FIELDS, -7), "offload_optimizer_nvme_path": [1], "offload_param_nvme_path": [1]}


def keys(document: Document) -> list[str]:
    """Return the keys of all errors and warnings."""
    return [problem.key for problem in find_problems(document) if problem.severity != "note"]


def short(**fields: Any) -> Document:
    """Build a document in code whose DeepSpeed part has short fields."""
    return document_from_mapping({"distributed_type": "DEEPSPEED", "deepspeed_config": fields}, "a dict")


@pytest.mark.parametrize("name", SHORT_FIELDS)
def test_short_fields(name: str, tmp_path: Path) -> None:
    """Each has an illegal value, in a file and in a worker's document, and is named with that value."""
    file = tmp_path / "launch.yaml"
    file.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": {name: WRONG[name]}}))
    document = read_document(file)
    (problem,) = (p for p in find_problems(document) if "is not legal here" in p.message)
    assert (problem.key, problem.value) == (name, json.dumps(WRONG[name]))
    handed = from_environment({"ZERO_PLUGIN_DOCUMENT": to_environment(document)})
    assert handed is not None
    assert keys(handed) == keys(document)


def test_rules() -> None:
    """For values that are legal alone and not together, the fix has the same names."""
    document = short(zero_stage=1, offload_param_device="cpu", zero3_save_16bit_model=True)
    assert sorted(keys(document)) == ["offload_param_device", "zero3_save_16bit_model"]
    (problem,) = find_problems(short(zero_stage=1, offload_param_device="cpu"))
    assert problem.key == "offload_param_device"


@pytest.mark.parametrize(
    ("old", "written"),
    [
        ("zero_optimization.prefetch_bucket_size", {"zero_optimization": {"stage": 3, "prefetch_bucket_size": -3}}),
        ("zero_optimization.cpu_offload_param", {"zero_optimization": {"stage": 1, "cpu_offload_param": True}}),
        ("bfloat16.enabled", {"bfloat16": {"enabled": True}, "fp16": {"enabled": True}}),
        ("aio.thread_count", {"aio": {"thread_count": -2}}),
    ],
)
def test_older_spellings(old: str, written: dict[str, Any]) -> None:
    """A key that is read as another one keeps its typed name."""
    assert set(keys(document_from_mapping(written, "a dict"))) == {old}


def test_read_values_and_a_field_beside_a_key() -> None:
    """A value that is read as another one, and one that clashes with DeepSpeed's own key, keep their names."""
    assert keys(short(zero_stage="2")) == ["zero_stage"]
    assert keys(short(zero_stage=1, zero_optimization={"stage": 2})) == ["zero_stage"]


def test_flags() -> None:
    """Flags of short fields, and assignments by either name, keep their names."""
    path = ("deepspeed", "zero_optimization", "stage")
    assert keys(overlay_flags(Document(), {path: ("--zero_stage", 7)})) == ["zero_stage"]
    for key in ("zero_stage", "zero_optimization.stage"):
        assert keys(overlay_flags(Document(), read_assignments([f"{key}=7"], "--set"))) == [key]


def test_variables() -> None:
    """Problems of Accelerate's variables have the variable in their place."""
    asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "7"}
    document = document_from_accelerate(asked)
    assert document is not None
    (problem,) = find_problems(document)
    assert problem.headline.startswith("environment variable ACCELERATE_DEEPSPEED_ZERO_STAGE: zero_stage: 7 is not")


def test_code_against_a_file() -> None:
    """A dict and a plugin that contradict the launcher's document, and an argument next to a short field."""
    launched = short(zero_stage=2, gradient_clipping=1.0)
    for own in (short(zero_stage=3), DeepSpeedPlugin(zero_stage=3).document):
        with pytest.raises(ConfigError) as caught:
            lay_document(launched, own)
        assert [problem.key for problem in caught.value.problems] == ["zero_stage"]
    path = ("deepspeed", "zero_optimization", "stage")
    with pytest.raises(ConfigError) as caught:
        overlay_code(launched, {path: ("Accelerator(…)", 3)})
    assert [problem.key for problem in caught.value.problems] == ["zero_stage"]


def test_resolution() -> None:
    """A field that no source fills keeps its name."""
    with pytest.raises(ConfigError) as caught:
        resolve(short(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="auto"), Facts())
    assert [problem.key for problem in caught.value.problems] == ["offload_param_nvme_path"]
