"""The launch keys as a typed object."""

from __future__ import annotations

import pydantic
import pytest

from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_tpu, launch_settings
from zero_plugin.config.read import document_from_mapping


def settings_of(**launch: object) -> LaunchSettings:
    return launch_settings(document_from_mapping({"deepspeed_config": {}, **launch}, "code"))


def test_defaults_apply_to_absent_open_and_null_keys() -> None:
    """Absent, `auto` and `null` mean the default."""
    assert settings_of() == LaunchSettings()
    assert settings_of(num_processes="auto", mixed_precision="auto", num_machines=None) == LaunchSettings()
    assert settings_of().scheduler_counts == "processes"


def test_values_are_typed() -> None:
    """Numbers and booleans may be text. Lists may have any of Accelerate's forms."""
    settings = settings_of(num_processes="4", use_cpu="yes", same_network="False", gpu_ids=[0, 2], main_process_port=0)
    assert (settings.num_processes, settings.use_cpu, settings.same_network) == (4, True, False)
    assert (settings.gpu_ids, settings.main_process_port) == ("0,2", 0)
    assert settings_of(gpu_ids=1).gpu_ids == "1"
    assert settings_of(gpu_ids="0, 1").gpu_ids == "0,1"
    moe = {"deepspeed_config": {"deepspeed_moe_layer_cls_names": "A, B"}}
    assert settings_of(**moe).deepspeed_moe_layer_cls_names == ("A", "B")
    assert settings_of(distributed_type="deepspeed").distributed_type == "DEEPSPEED"


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("TPU", True), ("XLA", True), ("MULTI_GPU", False), ("DEEPSPEED", False), ("NO", None), (None, None)],
)
def test_who_asks_for_a_tpu(kind: str | None, asked: bool | None) -> None:
    """One type and its newer name do, another refuses. Without a type, a detected TPU is used."""
    assert asks_for_tpu(settings_of(distributed_type=kind)) is asked


def test_settings_are_frozen_and_every_field_is_described() -> None:
    """No code can change them later, and each field's docstring names its default."""
    with pytest.raises(pydantic.ValidationError):
        settings_of().num_processes = 3  # type: ignore[misc]
    assert all("Default" in (field.description or "") for field in LaunchSettings.model_fields.values())
