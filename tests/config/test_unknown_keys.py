"""Messages for keys that DeepSpeed has removed, that belong elsewhere, or that are misspelt."""

# ruff: noqa: E501 - a row of the table is one line

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.read import read_document
from zero_plugin.config.schema import RETIRED_KEYS

Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """Return the problems of one JSON, as `key: message | fix`."""

    def find(values: Mapping[str, Any]) -> list[str]:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(values))
        found = find_problems(read_document(path))
        return [f"{p.key}: {p.message} | {p.fix}" for p in found if p.severity == "error"]

    return find


TABLE: list[tuple[str, dict[str, Any], str | None]] = [
    ("a removed section", {"amp": {"enabled": False}}, "amp: removed in DeepSpeed 0.19.8, even when disabled"),
    ("a removed key", {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size: removed in DeepSpeed 0.19.7"),
    ("a value out of range", {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "0 is not legal here"),
    ("a removed type", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}}}, "OneBitAdam"),
    ("a key inside a list", {"tensor_parallel": {"partition_config": {"layer_specs": [{"patern": ["q"]}]}}}, "partition_config.layer_specs[0].patern: unknown key | Did you mean patterns?"),
    ("a value inside a list", {"tensor_parallel": {"partition_config": {"layer_specs": [{}, {"partition_type": "colum"}]}}}, "layer_specs[1].partition_type: \"colum\" is not legal here | Did you mean column?"),
    ("an optimizer's name", {"optimizer": {"type": "Adamw2", "params": {}}}, "Did you mean AdamW?"),
    ("a schedule's name", {"scheduler": {"type": "WarmupDecay", "params": {}}}, "Did you mean WarmupDecayLR?"),
    ("a parameter's name", {"optimizer": {"type": "AdamW", "params": {"weight_decai": 0}}}, "Did you mean weight_decay?"),
    ("a parameter of a torch optimizer", {"optimizer": {"type": "Rprop", "params": {"eta": [0.5, 1.2]}}}, "Did you mean etas?"),
    ("a parameter of a torch schedule", {"scheduler": {"type": "StepLR", "params": {"stepsize": 3}}}, "Did you mean step_size?"),
    ("an enumerated value", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpus"}}}, "Did you mean cpu?"),
    ("a key one level too high", {"zero_optimization": {"stage": 3, "nvme_path": "/x"}}, "It belongs in zero_optimization.offload_param or zero_optimization.offload_optimizer."),
    ("a key one level too low", {"fp16": {"enabled": True, "gradient_clipping": 1.0}}, "It belongs at the top level."),
    ("a parameter beside params", {"optimizer": {"type": "AdamW", "lr": 1e-3}}, "It belongs in optimizer.params."),
    ("a parameter at the top", {"warmup_num_steps": 3}, "It belongs in scheduler.params."),
    ("a parameter of other types", {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "write another optimizer.type, that has it"),
    ("two spellings", {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16: bf16 is written too"),
    ("a comment", {"_why": 1, "zero_optimization": {"stage": 1, "_why": {"deep": 1}}}, None),
    ("a section that is no section", {"zero_optimisation": {"stage": 3}}, "Did you mean zero_optimization?"),
    ("pipeline", {"pipeline": {"seed_layer": True}}, "Did you mean seed_layers?"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_unknown_keys(values: dict[str, Any], said: str | None, problems: Problems) -> None:
    """The error has the key's fate, its right place, or the likely key."""
    found = problems(values)
    if said is None:
        assert found == []
    else:
        assert len(found) == 1
        assert said in found[0]


@pytest.mark.parametrize("path", RETIRED_KEYS, ids=".".join)
def test_retired_keys(path: tuple[str, ...], problems: Problems) -> None:
    """Each is refused under its full name, with its fate and what to write."""
    values: Any = None
    for part in reversed(path):
        values = {part: values}
    if path[0] == "optimizer":
        values["optimizer"]["type"] = "AdamW"
    message, fix = RETIRED_KEYS[path]
    assert f"{'.'.join(path)}: {message} | {fix}" in problems(values)
