"""A script started by Accelerate's launcher follows the launcher's flags, which arrive as environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import to_environment
from zero_plugin.config.find import document_from_accelerate, find_document, overlay_code
from zero_plugin.config.read import document_from_mapping
from zero_plugin.errors import ConfigError

PLAIN = {  # the exports of `accelerate launch script.py` without further flags
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
}


def test_nothing_asked_for() -> None:
    """The launcher's default exports contradict no argument."""
    assert document_from_accelerate({}) is None
    assert document_from_accelerate(PLAIN) is None


def test_flags_of_ddp() -> None:
    """Precision, CPU, accumulation: each has the precedence of a flag and names its variable."""
    document = document_from_accelerate(
        {
            "ACCELERATE_USE_CPU": "True",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        }
    )
    assert document is not None
    check_document(document)
    assert document.launch.value("use_cpu") is True
    assert document.deepspeed.value("gradient_accumulation_steps") == 4
    entry = document.launch.get("mixed_precision")
    assert entry is not None
    assert (entry.value, entry.origin.kind) == ("bf16", "flag")
    assert entry.origin.where == "environment variable ACCELERATE_MIXED_PRECISION"
    path = ("mixed_precision",)
    with pytest.raises(ConfigError, match='"fp16" in code, but "bf16" at environment variable ACCELERATE_MIXED'):
        overlay_code(document, {path: ("Accelerator(mixed_precision='fp16')", "fp16")})


def test_the_device_that_a_variable_names() -> None:
    """`cpu` is use_cpu. `cuda` and a GPU's number, as Ray sets it, set no key. Another device is an error."""
    document = document_from_accelerate({**PLAIN, "ACCELERATE_TORCH_DEVICE": "cpu"})
    assert document is not None
    entry = document.launch.get("use_cpu")
    assert entry is not None
    assert (entry.value, entry.origin.where) == (True, "environment variable ACCELERATE_TORCH_DEVICE")
    for device in ("cuda", "cuda:3"):
        assert document_from_accelerate({"ACCELERATE_TORCH_DEVICE": device}) is None
    with pytest.raises(ConfigError, match=r"mps is not supported\n.*ACCELERATE_TORCH_DEVICE=cuda:0 for a GPU"):
        document_from_accelerate({"ACCELERATE_TORCH_DEVICE": "mps"})


def test_flags_of_deepspeed() -> None:
    """Every field arrives, also NVMe paths that a script sets. Without a stage it is Accelerate's 2."""
    document = document_from_accelerate(
        {
            **PLAIN,
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_CONFIG_DS_FIELDS": "",
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/fast",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Experts",
        }
    )
    assert document is not None
    check_document(document)
    assert document.to_deepspeed() == {
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert document.launch.value("distributed_type") == "DEEPSPEED"
    assert document.launch.value("zero3_init_flag") is False
    assert document.launch.value("deepspeed_moe_layer_cls_names") == "Experts"
    by_default = document_from_accelerate({"ACCELERATE_USE_DEEPSPEED": "true"})
    assert by_default is not None
    assert by_default.deepspeed.value("zero_optimization", "stage") == 2


def test_its_file(tmp_path: Path) -> None:
    """DeepSpeed's file is read with its places."""
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1},\n "gradient_accumulation_steps": 8}')
    document = document_from_accelerate(
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    )
    assert document is not None
    entry = document.deepspeed.get("gradient_accumulation_steps")
    assert entry is not None
    assert (entry.value, entry.origin.kind, entry.origin.where) == (8, "file", f"{path}:2:2")


def test_without_deepspeed_its_variables_say_nothing() -> None:
    """They have no effect, as in Accelerate, whose plugin alone reads them."""
    assert document_from_accelerate({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}) is None


def test_what_is_not_there_is_refused() -> None:
    """One error names FSDP, Megatron-LM and parallelism settings with what to launch instead. The check refuses fp8."""
    with pytest.raises(ConfigError) as caught:
        document_from_accelerate(
            {
                "ACCELERATE_USE_FSDP": "true",
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_TP_SIZE": "2",
                "PARALLELISM_CONFIG_SP_SIZE": "2",
            }
        )
    assert len(caught.value.problems) == 2
    assert "PARALLELISM_CONFIG_TP_SIZE: 2 is not supported" in str(caught.value)
    assert "zero_stage 3" in str(caught.value)
    document = document_from_accelerate({"ACCELERATE_MIXED_PRECISION": "fp8"})
    assert document is not None
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION: mixed_precision"):
        check_document(document)


def test_sequence_parallelism() -> None:
    """Here it is one key, with the variable as its place. Without the switch the variable has no effect."""
    environ = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "4"}
    document = document_from_accelerate(environ)
    assert document is not None
    entry = document.deepspeed.entries["sequence_parallel_size",]
    assert (entry.value, entry.origin.where) == (4, "environment variable PARALLELISM_CONFIG_SP_SIZE")
    assert document_from_accelerate({"PARALLELISM_CONFIG_SP_SIZE": "4"}) is None


def test_this_launchers_document_goes_first() -> None:
    """`zero-plugin launch` exports both, for scripts that use Accelerate itself. Its own document is complete."""
    own = document_from_mapping({"mixed_precision": "bf16"}, "test")
    environ = {"ZERO_PLUGIN_DOCUMENT": to_environment(own), "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert find_document(None, environ).launch.value("mixed_precision") == "bf16"
    del environ["ZERO_PLUGIN_DOCUMENT"]
    assert find_document(None, environ).launch.value("mixed_precision") == "fp16"
