"""Flags and files become one checked document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError
from zero_plugin.launch.flags import document_from_flags


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    Path("ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    Path("zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 1}\n"
    )
    Path("one.yaml").write_text("distributed_type: 'NO'\n")
    Path("zero0.json").write_text(json.dumps({"zero_optimization": {"stage": 0}, "gradient_clipping": 0.5}))
    Path("zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}))
    return tmp_path


def values(document: Document) -> dict[str, Any]:
    """Return every value by its dotted path. Training keys start with `deepspeed`."""
    trees = (document.launch, document.deepspeed.under("deepspeed"))
    return {".".join(path): entry.value for tree in trees for path, entry in tree.entries.items()}


STAGE = "deepspeed.zero_optimization.stage"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {}),
        ({"num_processes": "2"}, {"num_processes": 2}),
        ({"cpu": True}, {"distributed_type": None, "use_cpu": True}),
        ({"config_file": "ddp.yaml", "cpu": True}, {"distributed_type": "MULTI_CPU", "use_cpu": True}),
        ({"config_file": "one.yaml", "cpu": True, "num_processes": "2"}, {"distributed_type": "MULTI_CPU"}),
        ({"cpu": True, "use_deepspeed": True}, {"distributed_type": "DEEPSPEED", "use_cpu": True}),
        ({"cpu": True, "zero_stage": "2"}, {"distributed_type": "DEEPSPEED", "use_cpu": True, STAGE: 2}),
        ({"multi_gpu": True}, {"distributed_type": "MULTI_GPU", "use_cpu": False}),
        ({"use_deepspeed": True}, {"distributed_type": "DEEPSPEED"}),
        ({"zero_stage": "3"}, {"distributed_type": "DEEPSPEED", STAGE: 3}),
        ({"zero_stage": "auto"}, {"distributed_type": "DEEPSPEED", STAGE: AUTO}),
        ({"gradient_clipping": "0.5"}, {"deepspeed.gradient_clipping": 0.5}),
        ({"gradient_accumulation_steps": "4"}, {"deepspeed.gradient_accumulation_steps": 4}),
        ({"mixed_precision": "no"}, {"mixed_precision": "no"}),
        ({"mixed_precision": "BF16"}, {"mixed_precision": "bf16"}),
        ({"dynamo_backend": "no"}, {"dynamo_config.dynamo_backend": "no"}),
        ({"dynamo_use_dynamic": True}, {"dynamo_config.dynamo_use_dynamic": True}),
        ({"num_processes": "2.0"}, {"num_processes": 2}),
        ({"config_file": "ddp.yaml", "num_processes": "null"}, {"num_processes": None}),
        ({"zero_stage": "3", "zero3_init_flag": "false"}, {"zero3_init_flag": False, STAGE: 3}),
        (
            {"zero_stage": "3", "zero3_save_16bit_model": "true"},
            {"deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
        ),
        (
            {"zero_stage": "3", "offload_param_device": "nvme", "offload_param_nvme_path": "/disk"},
            {
                "deepspeed.zero_optimization.offload_param.device": "nvme",
                "deepspeed.zero_optimization.offload_param.nvme_path": "/disk",
            },
        ),
        ({"config_file": "zero.yaml"}, {STAGE: 2, "mixed_precision": "bf16"}),
        ({"config_file": "zero.yaml", "zero_stage": "1", "mixed_precision": "no"}, {STAGE: 1, "mixed_precision": "no"}),
        ({"config_file": "zero.json"}, {"distributed_type": "DEEPSPEED", STAGE: 3}),
        ({"deepspeed_config_file": "zero.json"}, {"distributed_type": "DEEPSPEED", STAGE: 3}),
        ({"config_file": "ddp.yaml", "use_deepspeed": True, "zero_stage": "2"}, {STAGE: 2, "num_processes": 4}),
        ({"config_file": "zero.yaml", "cpu": True}, {"distributed_type": "DEEPSPEED", "use_cpu": True, STAGE: 2}),
        ({"config_file": "zero.json", "cpu": True}, {"distributed_type": "DEEPSPEED", "use_cpu": True, STAGE: 3}),
        (
            {"deepspeed_config_file": "zero0.json", "cpu": True},
            {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed.gradient_clipping": 0.5},
        ),
        (
            {"config_file": "ddp.yaml", "deepspeed_config_file": "zero0.json"},
            {"distributed_type": "MULTI_GPU", "deepspeed.gradient_clipping": 0.5},
        ),
    ],
    ids=str,
)
def test_flags_override_the_file(flags: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each flag overrides the file at its key. ZeRO's flags and a DeepSpeed JSON imply DEEPSPEED.

    `--cpu` chooses the device only: ZeRO stays ZeRO, and any other run is data parallelism on the CPU.
    """
    found = values(document_from_flags(flags))
    assert {key: found.get(key) for key in expected} == expected
    if not flags:
        assert found == {}


@pytest.mark.parametrize(
    "flags",
    [
        {"zero_stage": "2"},
        {"use_deepspeed": True},
        {"config_file": "zero.yaml"},
        {"deepspeed_config_file": "zero.json"},
    ],
    ids=str,
)
def test_zero_on_the_cpu_is_noted_once(flags: dict[str, Any]) -> None:
    """The flag chooses the device like `use_cpu: true`, which already logs the note."""
    (note,) = document_from_flags({**flags, "cpu": True}).notes
    assert note.headline == "--cpu: chooses the device only: ZeRO is requested, and runs on the CPU"
    assert note.severity == "note"
    assert document_from_flags(flags).notes == ()


def test_a_json_named_by_a_flag_replaces_the_files_training_part_whole() -> None:
    """No key of the YAML's `deepspeed_config` remains with the flag's JSON. The YAML's launch keys do."""
    found = values(document_from_flags({"config_file": "zero.yaml", "deepspeed_config_file": "zero.json"}))
    assert "deepspeed.gradient_clipping" not in found
    assert found[STAGE] == 3
    assert found["mixed_precision"] == "bf16"


def test_what_a_json_replaces_is_said() -> None:
    """A file's training part that the flag's JSON replaces is not dropped silently."""
    document = document_from_flags({"config_file": "zero.yaml", "deepspeed_config_file": "zero.json"})
    (note,) = document.notes
    assert note.headline == "--deepspeed_config_file: zero.json replaces the complete training part of zero.yaml"
    assert note.severity == "note"
    assert (
        document_from_flags(
            {"config_file": "ddp.yaml", "deepspeed_config_file": "zero.json", "use_deepspeed": True}
        ).notes
        == ()
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"cpu": True, "multi_gpu": True}, ["--cpu", "--multi_gpu"]),
        ({"cpu": True, "multi_gpu": True, "zero_stage": "2"}, ["--cpu", "--multi_gpu"]),
        ({"tpu": True, "use_deepspeed": True}, ["--tpu: contradicts --use_deepspeed"]),
        ({"config_file": "ddp.yaml", "zero_stage": "2"}, ["--zero_stage", "ddp.yaml:1", "--use_deepspeed"]),
        (
            {"multi_gpu": True, "deepspeed_config_file": "zero.json"},
            ["--deepspeed_config_file: the stage of 3 at zero.json:1", "--multi_gpu req", "Leave one of the two out"],
        ),
        (
            {"config_file": "ddp.yaml", "deepspeed_config_file": "zero.json"},
            ["--deepspeed_config_file: the stage of 3", "MULTI_GPU at ddp.yaml:1", "--use_deepspeed"],
        ),
        ({"zero_stage": "4"}, ["--zero_stage: 4 is", "0 to 3"]),
        ({"zero_stage": "2", "offload_param_device": "cpu"}, ["--offload_param_device", "Give --zero_stage 3, or"]),
        ({"config_file": "zero.yaml", "offload_param_device": "nvme"}, ["Give --zero_stage 3, or offload to none"]),
        ({"zero_stage": "3", "offload_param_device": "nvme"}, ["Give --offload_param_nvme_path a local folder"]),
        (
            {"zero_stage": "3", "offload_optimizer_device": "nvme"},
            ["nvme without a path", "Give --offload_optimizer_nvme_path a local folder"],
        ),
        ({"config_file": "one.yaml", "num_processes": "2"}, ["Give --num_processes 1, or one of --multi_gpu"]),
        ({"mixed_precision": "bf17"}, ["--mixed_precision", "bf17", "bf16"]),
        ({"num_processes": "two"}, ["--num_processes", "two"]),
        ({"dynamo_mode": "fast"}, ["--dynamo_mode", "reduce-overhead"]),
        ({"tee": "4"}, ["--tee", "from 0 to 3"]),
        ({"config_file": "none.yaml"}, ["none.yaml"]),
        ({"deepspeed_config_file": "zero.yaml"}, ["--deepspeed_config_file", "zero.yaml is a launch config"]),
        ({"module": True, "no_python": True}, ["--module", "--no_python"]),
        ({"sequence_length": "2048"}, ["--sequence_length: has no effect without --model", "Add --model"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_an_error_that_names_the_flag(flags: dict[str, Any], parts: list[str]) -> None:
    """A contradiction or an illegal value names the flag, the contradicted value and what to write."""
    with pytest.raises(ConfigError) as caught:
        document_from_flags(flags)
    for part in parts:
        assert part in str(caught.value)


def test_all_problems_come_at_once() -> None:
    """A bad flag together with a contradiction gives one error with both."""
    with pytest.raises(ConfigError) as caught:
        document_from_flags({"cpu": True, "multi_gpu": True, "mixed_precision": "bf17"})
    assert len(caught.value.problems) == 2


def test_default_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --config_file: `$ZERO_PLUGIN_CONFIG_FILE`, then the user's default file, then none."""
    default = folder / "home" / "zero_plugin" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("num_processes: 7\n")
    assert values(document_from_flags({}))["num_processes"] == 7
    monkeypatch.setenv("ZERO_PLUGIN_CONFIG_FILE", "ddp.yaml")
    assert values(document_from_flags({}))["num_processes"] == 4
    assert values(document_from_flags({"config_file": "zero.yaml"})).get("num_processes") is None
    monkeypatch.setenv("ZERO_PLUGIN_CONFIG_FILE", "gone.yaml")
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file\n.*no --config_file is given"):
        document_from_flags({})


def test_a_default_file_with_problems_says_why_it_was_read(folder: Path) -> None:
    """Accelerate's default may request unsupported features. The user named no file, so the error explains it, once."""
    default = folder / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("distributed_type: FSDP\nnum_proceses: 2\n")
    with pytest.raises(ConfigError) as caught:
        document_from_flags({"mixed_precision": "bf17"})
    assert len(caught.value.problems) == 3
    assert str(caught.value).count("zero-plugin config") == 1


def test_an_empty_name_is_not_the_default_file() -> None:
    """`--config_file "$CONFIG"` with the variable unset is an error, not a launch without a config."""
    with pytest.raises(ConfigError):
        document_from_flags({"config_file": ""})


@pytest.mark.parametrize(
    "flags",
    [
        {"use_deepspeed": True},
        {"offload_optimizer_device": "cpu"},
        {"config_file": "ddp.yaml", "use_deepspeed": True},
    ],
    ids=str,
)
def test_zero_asked_for_without_a_stage_is_stage_2(flags: dict[str, str | bool]) -> None:
    """A file that requests DeepSpeed gets stage 2. A JSON without a stage keeps its stage 0."""
    assert document_from_flags(flags).deepspeed.value("zero_optimization", "stage") == 2
    Path("plain.json").write_text('{"steps_per_print": 5}')
    named = document_from_flags({"deepspeed_config_file": "plain.json"})
    assert not named.deepspeed.has_section("zero_optimization")


ACCELERATES = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": {
        "gradient_accumulation_steps": 2,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def test_accelerates_config_means_the_same_as_json() -> None:
    """`accelerate config` output means the same in both formats. A schedule counts processes, as with Accelerate."""
    Path("default.yaml").write_text(yaml.safe_dump(ACCELERATES))
    Path("default.json").write_text(json.dumps(ACCELERATES, indent=2, sort_keys=True))
    in_yaml, in_json = (document_from_flags({"config_file": f"default.{end}"}) for end in ("yaml", "json"))
    assert values(in_yaml) == values(in_json)
    assert values(in_json)[STAGE] == 3
    assert launch_settings(in_json).scheduler_counts == "processes"
    assert in_json.notes == ()
