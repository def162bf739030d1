"""What other releases of DeepSpeed knew, what is said of it, and the schemas that editors get."""

# ruff: noqa: E501 - a row of the table is one line

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from zero_plugin.config import schema as registry
from zero_plugin.config.check import find_problems
from zero_plugin.config.read import read_document
from zero_plugin.config.schema import (
    KNOWN_RELEASES,
    changed_defaults,
    deepspeed_schema,
    default_changes,
    installed_release,
    key_schema,
    release_note,
    yaml_schema,
)
from zero_plugin.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
DUMPS = REPOSITORY.parent / "shared" / "reference" / "deepspeed_versions"
DUMPED = [path.stem.removeprefix("fields_") for path in sorted(DUMPS.glob("fields_*.json"))]
SECTIONS = {
    "runtime.zero.config.DeepSpeedZeroConfig": "zero_optimization",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "runtime.zenflow.zenflow_config.ZenFlowConfig": "zero_optimization.zenflow",
    "runtime.precision_config.DeepSpeedFP16Config": "fp16",
    "runtime.precision_config.DeepSpeedBF16Config": "bf16",
    "compile.config.CompileConfig": "compile",
    "runtime.config.HybridEngineConfig": "hybrid_engine",
    "monitor.config.TensorBoardConfig": "tensorboard",
    "monitor.config.WandbConfig": "wandb",
    "monitor.config.CSVConfig": "csv_monitor",
    "monitor.config.CometConfig": "comet",
    "comm.config.CommsLoggerConfig": "comms_logger",
    "utils.config.DeepSpeedThroughputTimerConfig": "timers.throughput",
    "runtime.tensor_parallel.config.TPConfig": "tensor_parallel.tp",
    "runtime.tensor_parallel.config.TPTrainingConfig": "tensor_parallel",
    "inference.config.WeightQuantConfig": "weight_quantization",
}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
# Top-level keys that some release's constants name, by the constant where that is not the key in capitals.
CONSTANTS = {
    "GRADIENT_CLIPPING",
    "MANAGED_GRADIENT_ACCUMULATION",
    "GRADIENT_ALLREDUCE_OP",
    "DISABLE_PYTHON_GC",
    "LOG_LEVEL",
}
CONSTANTS |= {"SPARSE_GRADIENTS", "GRAPH_HARVESTING", "STEPS_PER_PRINT", "DUMP_STATE", "MEMORY_BREAKDOWN"}


@pytest.mark.skipif(not DUMPED, reason="the dumps of DeepSpeed's releases are not beside this checkout")
@pytest.mark.parametrize("release", DUMPED)
def test_derived_models_are_those_of_the_release(release: str) -> None:
    """Every section that a release parses with a model has its keys, with their defaults and ranges, and no other."""
    models = json.loads((DUMPS / f"fields_{release}.json").read_text())["models"]
    compared = 0
    for model, section in SECTIONS.items():
        path, fields = tuple(section.split(".")), models.get(f"deepspeed.{model}")
        schema = key_schema(path, release=release)
        if fields is None:  # a section that came later, or was still parsed by hand
            assert schema is None or section in ("fp16", "bf16"), section
            continue
        assert schema is not None, section
        names = {name for field, said in fields.items() for name in (field, said["alias"]) if name}
        assert set(schema["properties"]) == names - {"cpu_offload_use_pin_memory"}, section
        for field, said in fields.items():
            key = schema["properties"].get(said["alias"] or field, {})
            for bound in said["meta"]:
                word, _, number = bound.partition("(")[2].rstrip(")").partition("=")
                assert any(branch.get(BOUNDS[word]) == float(number) for branch in key["anyOf"]), (section, field)
            if "default" in key and not key.get("deprecated"):
                default = said["default"].removeprefix("torch.") if field == "dtype" else said["default"]
                assert key["default"] == default, (section, field)
                compared += 1
    assert compared > 80


@pytest.mark.skipif(not DUMPED, reason="the dumps of DeepSpeed's releases are not beside this checkout")
@pytest.mark.parametrize("release", DUMPED)
def test_derived_constants_are_those_of_the_release(release: str) -> None:
    """What a release parses by hand at the top is there in that release only, with the default of that release."""
    constants = json.loads((DUMPS / f"constants_{release}.json").read_text())
    top = deepspeed_schema(release)["properties"]
    for name in CONSTANTS:
        assert (name in constants) == (name.lower() in top), name
        if name in constants and "DEFAULT" not in constants[name] and name != "GRADIENT_ALLREDUCE_OP":
            default = top[name.lower()].get("default")
            assert str(float(default) if name == "GRADIENT_CLIPPING" else default) == str(
                float(constants[name]) if name == "GRADIENT_CLIPPING" else constants[name]
            ), name
    assert ("AMP_ENABLED" in constants) == ("amp" in top)
    assert ("EIGENVALUE_ENABLED" in constants) == ("eigenvalue" in top)
    assert ("SPARSE_MODE" in constants) == ("sparse_attention" in top)
    assert ("PLD_ENABLED" in constants) == ("progressive_layer_drop" in top)
    assert ("TORCH_AUTOCAST_ENABLED" in constants) == ("torch_autocast" in top)
    assert ("PARAM_DTYPE" in constants) == ("param_dtype" in top["data_types"]["properties"])


def test_changed_defaults() -> None:
    """The keys whose default depends on the release are known, with what it was before."""
    assert set(changed_defaults()) == {
        ("gradient_clipping",),
        ("bf16", "check_grad_overflow"),
        ("bf16", "immediate_grad_update"),
        ("zero_optimization", "offload_param", "pin_memory"),
        ("zero_optimization", "offload_optimizer", "pin_memory"),
    }
    assert default_changes(("gradient_clipping",)) == (("0.19.3", 0.0),)
    assert default_changes(("scheduler", "params", "warmup_max_lr"), "WarmupLR") == (("0.17.2", 0.001),)
    assert default_changes(("fp16", "enabled")) == default_changes(("no", "such", "key")) == ()
    clipping = {release: key_schema(("gradient_clipping",), release=release) for release in ("0.19.2", "0.19.3")}
    assert [key and key["default"] for key in clipping.values()] == [0.0, 1.0]


Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """The problems of one JSON in one release, as `key: message | fix`."""

    def find(values: Mapping[str, Any], release: str | None = None) -> list[str]:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(values))
        found = find_problems(read_document(path, release), release)
        return [f"{p.key}: {p.message} | {p.fix}" for p in found if p.severity == "error"]

    return find


MICS = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
TABLE: list[tuple[str, dict[str, Any], str | None, str | None]] = [
    ("a key of a later release", {"managed_gradient_accumulation": False}, "0.19.3", "added in DeepSpeed 0.19.4; this is 0.19.3"),
    ("the same in its first release", {"managed_gradient_accumulation": False}, "0.19.4", None),
    ("a key inside, of a later release", {"bf16": {"enabled": True, "bf16_optimizer_states": False}}, "0.18.2", "bf16.bf16_optimizer_states: added in DeepSpeed 0.18.3; this is 0.18.2"),
    ("a section of a later release", {"torch_autocast": {"enabled": True}}, "0.17.1", "torch_autocast: added in DeepSpeed 0.17.2"),
    ("a removed section", {"amp": {"enabled": False}}, None, "amp: removed in DeepSpeed 0.19.8, even when disabled"),
    ("the same before", {"amp": {"enabled": False, "opt_level": "O1"}}, "0.19.7", None),
    ("a removed key", MICS, "0.19.7", "mics_shard_size: removed in DeepSpeed 0.19.7"),
    ("the same before its removal", MICS, "0.19.6", None),
    ("a typo in a removed section", {"elasticity": {"min_gpu": 1}}, "0.19.7", "elasticity.min_gpu: unknown key | Did you mean min_gpus?"),
    ("a range that was wider", {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "0.19.5", None),
    ("the same now", {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, None, "0 is not legal here"),
    ("a type of a later release", {"optimizer": {"type": "Muon", "params": {}}}, "0.17.5", "optimizer.type: \"Muon\" is legal in DeepSpeed 0.19.8, but not in 0.17.5"),
    ("a parameter of a later release", {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}}, "0.18.2", "added in DeepSpeed 0.18.3"),
    ("a removed type", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}}}, None, "OneBitAdam"),
    ("the same before", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}}}, "0.19.6", None),
    ("a typo in its parameters", {"optimizer": {"type": "OneBitAdam", "params": {"freeze_steps": 9}}}, "0.19.6", "Did you mean freeze_step?"),
    ("a key inside a list", {"tensor_parallel": {"partition_config": {"layer_specs": [{"patern": ["q"]}]}}}, None, "partition_config.layer_specs[0].patern: unknown key | Did you mean patterns?"),
    ("a value inside a list", {"tensor_parallel": {"partition_config": {"layer_specs": [{}, {"partition_type": "colum"}]}}}, None, "layer_specs[1].partition_type: \"colum\" is not legal here | Did you mean column?"),
    ("an optimizer's name", {"optimizer": {"type": "Adamw2", "params": {}}}, None, "Did you mean AdamW?"),
    ("a schedule's name", {"scheduler": {"type": "WarmupDecay", "params": {}}}, None, "Did you mean WarmupDecayLR?"),
    ("a parameter's name", {"optimizer": {"type": "AdamW", "params": {"weight_decai": 0}}}, None, "Did you mean weight_decay?"),
    ("a parameter of a torch optimizer", {"optimizer": {"type": "Rprop", "params": {"eta": [0.5, 1.2]}}}, None, "Did you mean etas?"),
    ("a parameter of a torch schedule", {"scheduler": {"type": "StepLR", "params": {"stepsize": 3}}}, None, "Did you mean step_size?"),
    ("an enumerated value", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpus"}}}, None, "Did you mean cpu?"),
    ("a key one level too high", {"zero_optimization": {"stage": 3, "nvme_path": "/x"}}, None, "It belongs in zero_optimization.offload_param or zero_optimization.offload_optimizer."),
    ("a key one level too low", {"fp16": {"enabled": True, "gradient_clipping": 1.0}}, None, "It belongs at the top level."),
    ("a parameter beside params", {"optimizer": {"type": "AdamW", "lr": 1e-3}}, None, "It belongs in optimizer.params."),
    ("a parameter at the top", {"warmup_num_steps": 3}, None, "It belongs in scheduler.params."),
    ("a parameter of other types", {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, None, "write another optimizer.type, that has it"),
    ("two spellings", {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, None, "bfloat16: stands beside bf16"),
    ("a comment", {"_why": 1, "zero_optimization": {"stage": 1, "_why": {"deep": 1}}}, None, None),
    ("a section that is no section", {"zero_optimisation": {"stage": 3}}, None, "Did you mean zero_optimization?"),
    ("pipeline", {"pipeline": {"seed_layer": True}}, None, "Did you mean seed_layers?"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "release", "said"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_keys_by_release(values: dict[str, Any], release: str | None, said: str | None, problems: Problems) -> None:
    """A key is refused in the releases that do not have it, with the release that does or what was meant."""
    found = problems(values, release)
    if said is None:
        assert found == []
    else:
        assert len(found) == 1
        assert said in found[0]


def test_a_release_that_is_not_known() -> None:
    """It is an error that names the nearest; the installed one is never an error, but a note where it is not known."""
    with pytest.raises(ConfigError, match=r"0\.18\.77 is no DeepSpeed release known here\s+Did you mean 0\.18\.9\?"):
        deepspeed_schema("0.18.77")
    assert installed_release() in KNOWN_RELEASES
    assert release_note() == ""


@pytest.mark.parametrize(
    ("installed", "stands_for"), [("0.20.1+cu130", "0.19.8"), ("0.18.10", "0.18.9"), ("0.14.0", "0.16.9")]
)
def test_an_installed_release_that_is_not_known(
    installed: str, stands_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest known release before it stands for it, else the oldest, and one sentence says so."""
    monkeypatch.setattr(registry, "_installed", lambda: installed)
    assert installed_release() == stands_for
    assert deepspeed_schema()["title"] == f"DeepSpeed {stands_for} configuration"
    assert release_note().startswith(f"DeepSpeed {installed} is installed")
    assert release_note().endswith(stands_for)


CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.*"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid_for_an_editor(path: Path) -> None:
    """Every shipped configuration satisfies the schema as any JSON Schema validator reads it, and a typo does not."""
    values = yaml.safe_load(path.read_text())
    schema = deepspeed_schema() if path.suffix == ".json" else yaml_schema()
    editor = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in editor.iter_errors(values)] == []
    assert not editor.is_valid({**values, "gradient_clippin": 1.0})


@pytest.mark.parametrize("release", [KNOWN_RELEASES[0], KNOWN_RELEASES[-1]])
def test_yaml_schema(release: str) -> None:
    """The YAML's schema is one, describes every key, and takes short fields beside whole sections and open fields."""
    schema = yaml_schema(release)
    jsonschema.Draft202012Validator.check_schema(schema)
    training = schema["properties"]["deepspeed_config"]["properties"]
    assert all(key["description"] for key in [*schema["properties"].values(), *training.values()])
    editor = jsonschema.Draft202012Validator(schema)
    short = {"zero_stage": 3, "offload_param_device": "cpu", "zero3_init_flag": True, "fp16": {"enabled": "auto"}}
    assert editor.is_valid({"mixed_precision": "auto", "num_processes": None, "deepspeed_config": short})
    assert editor.is_valid({"fsdp_config": {}, "_note": 1, "deepspeed_config": {"deepspeed_config_file": "ds.json"}})
    for wrong in ({"zero_stag": 3}, {"zero_stage": 4}, {"fp16": {"enable": True}}):
        assert not editor.is_valid({"deepspeed_config": wrong}), wrong
    assert not editor.is_valid({"num_proceses": 2})
