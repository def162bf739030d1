"""The shipped schema compared with the installed DeepSpeed and torch: an upgrade that drifts fails here, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launching import run_afresh

from zero_plugin.config.document import RENAMED_KEYS, one_spelling
from zero_plugin.config.installed import TESTED, is_newer
from zero_plugin.config.schema import (
    RETIRED_KEYS,
    deepspeed_schema,
    key_schema,
    types_of,
    walk_keys,
    yaml_schema,
)
from zero_plugin.config.tree import KeyPath, Origin, Tree

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

# Differences between the schema and the model's annotation, for limits that DeepSpeed states elsewhere.
OTHER_TYPES = {
    "zero_optimization.stage": "an enum of the stages",
    "zero_optimization.zenflow.select_strategy": "its validator takes auto, step and epoch",
    "zero_optimization.zenflow.select_interval": "its validator takes auto and whole numbers",
    "zero_optimization.zenflow.update_interval": "its validator takes auto and whole numbers",
    "zero_optimization.legacy_stage1": "the engine refuses true",
    "tensor_parallel.dtype": "a torch.dtype, named",
    "tensor_parallel.tp.mpu": "an object of Python",
    "tensor_parallel.tp.tp_group": "an object of Python",
    "compile.passes": "its items are listed",
}
NARROWER = {
    "zero_optimization.stage": "an enum of the stages",
    "fp16.loss_scale": "its validator",
    "fp16.loss_scale_window": "its validator",
    "fp16.min_loss_scale": "its validator",
}

# `…_DEFAULT` of a module -> the section whose keys follow, in capitals
SECTIONS = {
    "deepspeed.runtime.swap_tensor.constants.AIO_": "aio",
    "deepspeed.runtime.activation_checkpointing.config.ACT_CHKPT_": "activation_checkpointing",
    "deepspeed.profiling.constants.FLOPS_PROFILER_": "flops_profiler",
    "deepspeed.autotuning.constants.AUTOTUNING_": "autotuning",
    "deepspeed.autotuning.constants.MODEL_INFO_": "autotuning.model_info",
    "deepspeed.runtime.data_pipeline.constants.DATA_EFFICIENCY_": "data_efficiency",
    "deepspeed.runtime.data_pipeline.constants.DATA_SAMPLING_": "data_efficiency.data_sampling",
    "deepspeed.runtime.data_pipeline.constants.CURRICULUM_LEARNING_": (
        "data_efficiency.data_sampling.curriculum_learning"
    ),
    "deepspeed.runtime.data_pipeline.constants.DYNAMIC_BATCHING_": "data_efficiency.data_sampling.dynamic_batching",
    "deepspeed.runtime.data_pipeline.constants.DATA_ROUTING_": "data_efficiency.data_routing",
    "deepspeed.runtime.data_pipeline.constants.RANDOM_LTD_": "data_efficiency.data_routing.random_ltd",
    "deepspeed.runtime.model_checkpointing.constants.CHECKPOINT_": "checkpoint",
    "deepspeed.runtime.constants.TORCH_AUTOCAST_": "torch_autocast",
    "deepspeed.runtime.constants.": "",
}
# constants with another key name; None: no key of its own
NAMED = {
    "ACT_CHKPT_DEFAULT": None,  # all constants of the section
    "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT": (
        "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled"
    ),
    "CHECKPOINT_SERIALIZATION_DEFAULT": "checkpoint.checkpoint_serialization",
    "CHECKPOINT_WRITER_DEFAULT": None,  # a section
    "CHECKPOINT_WRITER_TYPE_DEFAULT": "checkpoint.writer.type",
    "CHECKPOINT_IO_BUFFER_SIZE_DEFAULT": "checkpoint.writer.io_buffer_size",
    "CHECKPOINT_IO_BUFFER_DOUBLE_DEFAULT": "checkpoint.writer.io_buffer_double",
    "CHECKPOINT_IO_MULTIPLIER_DEFAULT": "checkpoint.writer.io_multiplier",
    "CHECKPOINT_IO_STATISTICS_DEFAULT": "checkpoint.writer.show_statistics",
    "CHECKPOINT_DATA_PARALLEL_DEFAULT": "checkpoint.writer.data_parallel",
    "CHECKPOINT_WRITER_DECOUPLED_DEFAULT": "checkpoint.writer.decoupled",
    "CHECKPOINT_TAG_VALIDATION_DEFAULT": "checkpoint.tag_validation",
    "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT": "checkpoint.parallel_write.pipeline_stage",
    "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT": "checkpoint.load_universal",
    "USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT": "checkpoint.use_node_local_storage",
    "GRAD_ACCUM_DTYPE_DEFAULT": "data_types.grad_accum_dtype",
    "PARAM_DTYPE_DEFAULT": "data_types.param_dtype",
    "BUFFER_DTYPE_DEFAULT": "data_types.buffer_dtype",
    "KEEP_IN_FP32_MODULES_DEFAULT": "data_types.keep_in_fp32_modules",
    "USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT": "use_data_before_expert_parallelism",
    "LEGACY_FUSION_DEFAULT": "optimizer.legacy_fusion",
    "OPTIMIZER_TYPE_DEFAULT": None,  # no optimizer
    "SCHEDULER_TYPE_DEFAULT": None,  # no scheduler
}


pytestmark = pytest.mark.xdist_group("schema")  # of one of pytest's processes, since `installed` takes seconds


@pytest.fixture(scope="module")
def installed(forked_alone: dict[str, str]) -> Mapping[str, Any]:
    """Return the facts of the installed DeepSpeed and torch.

    A separate process reads them, since DeepSpeed prints and builds on import.
    """
    asked = {"models": MODELS, "modules": sorted({name.rpartition(".")[0] for name in SECTIONS})}
    script = Path(__file__).with_name("describe_deepspeed.py")
    run = run_afresh(script, json.dumps(asked), **forked_alone, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("DESCRIBED"))
    described: Mapping[str, Any] = json.loads(line.removeprefix("DESCRIBED"))
    return described


def section_keys(section: str) -> Mapping[str, Any]:
    schema = key_schema(tuple(section.split(".")))
    assert schema is not None
    keys: Mapping[str, Any] = schema["properties"]
    return keys


def branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [branch for branch in schema.get("anyOf", [schema]) if branch != {"const": "auto"}]


def kinds(schema: Mapping[str, Any]) -> set[Any]:
    """Return the JSON types and the single values that a key may have, except `auto`."""
    found: set[Any] = set()
    for branch in branches(schema):
        if "enum" in branch:
            found |= {("value", option) for option in branch["enum"]}
        else:
            found |= {branch["type"]} if isinstance(branch.get("type"), str) else set(branch.get("type", ["any"]))
    return found


def bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return {word: branch[word] for branch in branches(schema) for word in words if word in branch}


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


@pytest.mark.parametrize("section", MODELS)
def test_sections_are_those_of_the_models(section: str, installed: Mapping[str, Any]) -> None:
    """Every field, alias, type, default, range and deprecation is the model's. No other key exists."""
    fields, keys = installed["models"][section], section_keys(section)
    names = {name for field, said in fields.items() for name in (field, said["alias"]) if name}
    retired = {path[-1] for path in RETIRED_KEYS if ".".join(path[:-1]) == section} & names
    assert set(keys) == names - retired
    for field, said in fields.items():
        name = said["alias"] or field
        if name in retired:
            continue
        key, full = keys[name], f"{section}.{name}"
        if field != name:
            assert RENAMED_KEYS[(*section.split("."), field)] == (*section.split("."), name), full
        assert bool(key.get("deprecated")) == said["deprecated"], full
        if (*section.split("."), name) in RENAMED_KEYS and said["default"] is None:
            continue
        if full not in OTHER_TYPES:
            wanted = {tuple(kind) if isinstance(kind, list) else kind for kind in said["kinds"]}
            assert kinds(key) == wanted, full
        if full not in NARROWER:
            assert bounds(key) == said["bounds"], full
        if "default" in key:
            assert same(key["default"], said["default"]) or f"torch.{key['default']}" == said["default"], full
        else:
            assert "properties" in key, f"{full} has no default"


def test_defaults_of_what_is_parsed_by_hand(installed: Mapping[str, Any]) -> None:
    """Every default in DeepSpeed's constants is the schema's. A constant without a key means a missing key."""
    seen = 0
    for constant, value in installed["constants"].items():
        short = constant.rpartition(".")[2]
        if short.startswith(("FP16_", "BFLOAT16_")):
            continue  # left from before these sections had models
        path = NAMED.get(
            short, next(f"{s}.{constant[len(p) : -8].lower()}" for p, s in SECTIONS.items() if constant.startswith(p))
        )
        if path is None:
            continue
        key = key_schema(tuple(path.strip(".").split(".")))
        assert key is not None, f"{constant} has no key {path}"
        if "properties" in key or key.get("type") == ["object", "null"]:
            assert value is None, constant
            continue
        default = key["default"]
        assert same(default, value) or str(default).upper() == value, constant
        seen += 1
    assert seen > 80


BY_HAND = {"aio", "activation_checkpointing", "flops_profiler", "autotuning", "data_efficiency", "data_types"}
BY_HAND |= {"checkpoint", "torch_autocast"}
LITERAL = {"root_degree", "thread_count"}  # a key that the code spells out, and one that we read


def test_keys_of_what_is_parsed_by_hand(installed: Mapping[str, Any]) -> None:
    """Every key at the top or in a hand-parsed section is a word of DeepSpeed's constants, or read by its name."""
    words = {*installed["words"], *installed["read_by_name"], *LITERAL}
    paths = [path for path, _ in walk_keys(deepspeed_schema()) if path[0] in BY_HAND]
    assert len(paths) > 100
    assert {path[-1] for path in paths} <= words


def test_sections_of_other_shapes(installed: Mapping[str, Any]) -> None:
    """Expert parallelism has the dataclass's keys, the pipeline the parser's. DeepSpeed refuses the removed ones."""
    expert, pipeline = section_keys("expert_parallel"), section_keys("pipeline")
    unset = {name for name, default in installed["expert_parallel"].items() if "object object" in str(default)}
    assert unset == {"load_balance_coeff", "expert_w3"}
    assert {name: key.get("default") for name, key in expert.items() if name not in unset} == {
        name: default for name, default in installed["expert_parallel"].items() if name not in unset
    }
    assert {name: key["default"] for name, key in pipeline.items() if name != "use_reentrant"} == installed["pipeline"]
    removed = {path for path, (message, _) in RETIRED_KEYS.items() if message.startswith("removed in")}
    assert removed == {
        *((key,) for key in installed["removed"]),
        *(("zero_optimization", key) for key in installed["removed_of_zero"]),
    }
    assert set(installed["read_by_name"]) <= set(deepspeed_schema()["properties"])


def parameters(section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    schema = key_schema((section,))
    assert schema is not None
    for branch in schema["allOf"]:
        for name in types_of(branch):
            yield name, branch["then"]["properties"]["params"]["properties"]


def test_parameters_of_optimizers(installed: Mapping[str, Any]) -> None:
    """Every type takes its classes' arguments, with their defaults. AdamW's weight decay is DeepSpeed's."""
    described, kernels, by_torch = dict(parameters("optimizer")), installed["kernels"], installed["torch_optimizers"]
    names = key_schema(("optimizer", "type"))
    assert names is not None
    assert set(described) == set(names["anyOf"][0]["enum"])
    assert {name.lower() for name in described} >= set(installed["optimizer_names"])
    of_deepspeed = {
        "Adam": ("FusedAdam", "DeepSpeedCPUAdam"),
        "AdamW": ("FusedAdam", "DeepSpeedCPUAdam"),
        "Lamb": ("FusedLamb",),
        "Lion": ("FusedLion", "DeepSpeedCPULion"),
        "Adagrad": ("DeepSpeedCPUAdagrad",),
    }
    newer = is_newer(version("torch"), TESTED["torch"])  # its classes may take more; the schema's is the tested one
    own = {"torch_adam", "adam_w_mode"}  # the engine removes them from an Adam's parameters
    elsewhere = {"adamw_mode", "max_grad_norm"}  # set by adam_w_mode, by gradient_clipping
    for name, keys in described.items():
        classes = [kernels[kernel] for kernel in of_deepspeed.get(name, ())]
        if name in by_torch and name != "Muon":
            classes.append(by_torch[name])
        wanted = {a: default for arguments in reversed(classes) for a, default in arguments.items()}
        if name in ("Adam", "AdamW"):
            wanted = {a: default for a, default in wanted.items() if a not in own | {"decoupled_weight_decay"}}
            keys = {a: key for a, key in keys.items() if a not in own}
        wanted = {a: default for a, default in wanted.items() if a not in elsewhere and (a in keys or not newer)}
        if classes:
            assert {a: key["default"] for a, key in keys.items()} == wanted, name


def test_parameters_of_muon(installed: Mapping[str, Any]) -> None:
    """Muon takes the arguments of both its halves. If these differ, no common default exists."""
    keys, halves = dict(parameters("optimizer"))["Muon"], installed["muon"]
    for name in halves["muon"].keys() | halves["adam"].keys():
        defaults = {json.dumps(half[name]) for half in halves.values() if name in half}
        assert ([json.dumps(keys[name]["default"])] if "default" in keys[name] else []) == (
            list(defaults) if len(defaults) == 1 else []
        ), name


def test_parameters_of_schedules(installed: Mapping[str, Any]) -> None:
    """Every schedule takes its class's arguments, with its defaults. An argument without a default is required."""
    described = dict(parameters("scheduler"))
    known = {**installed["torch_schedulers"], **installed["schedules"]}
    assert set(described) >= set(installed["schedules"])
    for name, keys in described.items():
        assert set(keys) == set(known[name]), name
        for argument, default in known[name].items():
            assert keys[argument].get("default", "<required>") == default, f"{name}.{argument}"


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items(), ids=lambda path: ".".join(path))
def test_older_spellings_are_read(old: KeyPath, new: KeyPath) -> None:
    """Reading moves a value to the present name, and the schema has the same facts for both names."""
    moved, notes = one_spelling(Tree.from_nested(_nested(old, 1), lambda _: Origin("file", "x")))
    assert set(moved) == {new}
    assert len(notes) == 1
    told, key, present = {"description", "deprecated"}, key_schema(old), key_schema(new)
    assert key is not None
    assert present is not None
    if len(old) == len(new):
        assert {k: v for k, v in key.items() if k not in told} == {k: v for k, v in present.items() if k not in told}


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if path[1:] else value}


def test_schema_is_a_schema() -> None:
    """It is valid itself and names its release. Its defaults are legal, and each key has a description."""
    schema = deepspeed_schema()
    assert schema["title"] == f"DeepSpeed {version('deepspeed').split('+')[0]} configuration"
    jsonschema.Draft202012Validator.check_schema(schema)
    checked = 0
    for path, key in walk_keys(schema):
        if path != ("optimizer", "params") and path != ("scheduler", "params"):
            assert key["description"].endswith("."), path
        if "default" in key:
            assert jsonschema.Draft202012Validator(key).is_valid(key["default"]), path
            checked += 1
    assert checked > 400


def test_schema_takes_open_and_commented_fields() -> None:
    """In an editor it takes comments and `auto` for every scalar, and is closed at every level."""
    schema = deepspeed_schema()
    editor = jsonschema.Draft202012Validator(schema)
    leaves = [key for key, child in schema["properties"].items() if "anyOf" in child]
    assert len(leaves) > 20
    for key in leaves:
        assert editor.is_valid({key: "auto"}), key
    assert editor.is_valid({"_comment": "why", "zero_optimization": {"_comment": ["why"], "stage": "auto"}})
    assert not editor.is_valid({"zero_optimisation": {}})
    assert not editor.is_valid({"optimizer": {"type": "AdamW", "params": {"lr": 1, "betta": 1}}})
    sections = [(path, key) for path, key in walk_keys(schema) if "properties" in key]
    assert len(sections) > 40
    assert all(key["additionalProperties"] is False for path, key in sections)


CONFIGS = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.*"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid_for_an_editor(path: Path) -> None:
    """Any JSON Schema validator accepts every shipped configuration, and refuses a typo."""
    values = yaml.safe_load(path.read_text())
    schema = deepspeed_schema() if path.suffix == ".json" else yaml_schema()
    editor = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in editor.iter_errors(values)] == []
    assert not editor.is_valid({**values, "gradient_clippin": 1.0})


def test_yaml_schema() -> None:
    """The YAML's schema is valid, describes every key, and takes short fields, complete sections and open fields."""
    schema = yaml_schema()
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
