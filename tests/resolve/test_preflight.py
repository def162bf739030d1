"""What no script can mend is found without one."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.read import document_from_mapping
from zero_plugin.resolve.preflight import find_hopeless

AUTO_EVERYWHERE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}


def test_what_a_script_fills_is_no_problem() -> None:
    """Open fields of the batch, the optimizer, the schedule and the model wait for the script."""
    document = document_from_mapping(AUTO_EVERYWHERE, "config")
    assert find_hopeless(document, accelerator="cpu", processes=2, strategy="deepspeed") == ()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}},
            "zero_optimization.offload_param.device",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            "train_batch_size",
        ),
    ],
)
def test_what_no_script_can_fill_is_named(changes: dict[str, Any], key: str) -> None:
    """A stage or device that only the planner could choose, fp16 on a CPU, and batch sizes that do not multiply."""
    document = document_from_mapping({**AUTO_EVERYWHERE, **changes}, "config")
    problems = find_hopeless(document, accelerator="cpu", processes=2, strategy="deepspeed")
    assert [problem.key for problem in problems] == [key]
