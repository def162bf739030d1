"""Problems that no script can fix are found before the script runs."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.errors import ConfigError

AUTO_EVERYWHERE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}
PLANNED: dict[str, Any] = {
    "stage": "auto",
    "overlap_comm": "auto",
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "sub_group_size": "auto",
    "offload_optimizer": {"device": "auto", "ratio": "auto", "pin_memory": "auto"},
    "offload_param": {"device": "auto"},
}


def test_what_a_script_fills_is_no_problem() -> None:
    """Open fields of the batch, the optimizer, the schedule, the model and its plan wait for the script."""
    for config in (AUTO_EVERYWHERE, {**AUTO_EVERYWHERE, "zero_optimization": PLANNED}):
        document = document_from_mapping(config, "config")
        resolve_before_run(document, accelerator="cpu", processes=2, strategy="deepspeed")


def test_what_depends_on_the_plan_waits_for_it() -> None:
    """No rule takes an open stage for 0, or an open device for none. All dependent values stay open."""
    document = document_from_mapping({"zero_optimization": PLANNED}, "config")
    found = resolve_before_run(document, accelerator="cpu", processes=2, strategy="deepspeed")
    zero = {path for path in found.missing if path[0] == "zero_optimization"}
    assert {".".join(path[1:]) for path in zero} == {
        "stage",
        "overlap_comm",
        "stage3_gather_16bit_weights_on_model_save",
        "sub_group_size",
        "offload_optimizer.device",
        "offload_optimizer.ratio",
        "offload_optimizer.pin_memory",
        "offload_param.device",
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            "train_batch_size",
        ),
    ],
)
def test_what_no_script_can_fill_is_named(changes: dict[str, Any], key: str) -> None:
    """fp16 on a CPU, and batch sizes that do not multiply, are named."""
    document = document_from_mapping({**AUTO_EVERYWHERE, **changes}, "config")
    with pytest.raises(ConfigError) as caught:
        resolve_before_run(document, accelerator="cpu", processes=2, strategy="deepspeed")
    assert [problem.key for problem in caught.value.problems] == [key]
