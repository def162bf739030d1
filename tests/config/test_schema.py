"""The shipped schema against the installed DeepSpeed, and as an editor would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.retired import RETIRED_KEYS
from zero_plugin.config.translate import one_spelling
from zero_plugin.config.tree import Origin, Tree

# section -> the model that DeepSpeed parses it with
MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.zenflow": "deepspeed.runtime.zenflow.zenflow_config.ZenFlowConfig",
    "zero_optimization.leaf_module": "deepspeed.runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "comet": "deepspeed.monitor.config.CometConfig",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "timers.throughput": "deepspeed.utils.config.DeepSpeedThroughputTimerConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    "tensor_parallel.tp": "deepspeed.runtime.tensor_parallel.config.TPConfig",
    "compile": "deepspeed.compile.config.CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config.HybridEngineConfig",
    "weight_quantization": "deepspeed.inference.config.WeightQuantConfig",
}

_LIST_FIELDS = """
import importlib, json, sys
found = {}
for section, name in json.loads(sys.argv[1]).items():
    module, _, cls = name.rpartition(".")
    fields = getattr(importlib.import_module(module), cls).model_fields
    found[section] = [field.alias or key for key, field in fields.items()]
print("FIELDS" + json.dumps(found))
"""


def section_schema(section: str) -> Mapping[str, Any]:
    schema = deepspeed_schema()
    for part in section.split("."):
        schema = schema["properties"][part]
    return schema


@pytest.fixture(scope="module")
def installed_fields() -> dict[str, list[str]]:
    """Field names of the installed DeepSpeed's models, from a process of its own: it prints and builds on import."""
    run = subprocess.run(
        [sys.executable, "-c", _LIST_FIELDS, json.dumps(MODELS)],
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("FIELDS"))
    found: dict[str, list[str]] = json.loads(line.removeprefix("FIELDS"))
    return found


@pytest.mark.parametrize("section", MODELS)
def test_sections_hold_what_the_installed_deepspeed_has(section: str, installed_fields: dict[str, list[str]]) -> None:
    """Every field of DeepSpeed's model is in the schema, or read as one that is, or refused by name; and no other."""
    parts = tuple(section.split("."))
    known = set(section_schema(section)["properties"])
    fields = set(installed_fields[section])
    moved = {
        key
        for key in fields - known
        if one_spelling(Tree.from_nested({parts[0]: {key: 1}}, lambda _: Origin("file", "x")))[1]
    }
    retired = {key for key in fields - known if (*parts, key) in RETIRED_KEYS}
    assert fields - moved - retired == known


def test_schema_is_a_schema() -> None:
    """It is valid itself, closed at the top, and takes `auto` for every scalar as it stands in an editor."""
    schema = deepspeed_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    editor = jsonschema.Draft202012Validator(schema)
    leaves = [(key, child) for key, child in schema["properties"].items() if "anyOf" in child]
    assert len(leaves) > 20
    for key, _ in leaves:
        assert editor.is_valid({key: "auto"}), key
    assert not editor.is_valid({"zero_optimisation": {}})
    assert editor.is_valid({"_comment": "why", "zero_optimization": {"_comment": ["why"], "stage": "auto"}})
    assert not editor.is_valid({"optimizer": {"type": "AdamW", "params": {"lr": 1, "betta": 1}}})


def test_defaults_are_legal() -> None:
    """Every default that the schema names satisfies the schema it stands in."""
    checked = 0
    pending: list[Any] = [deepspeed_schema()]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if "default" in node and ("anyOf" in node or "const" in node):
                jsonschema.validate(node["default"], node)
                checked += 1
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    assert checked > 250
