"""The DeepSpeed configuration for scripts that fill `auto` themselves."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.resolve import config_for_scripts, resolve_before_run

LOOPS = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)


def written(asked: dict[str, Any]) -> dict[str, Any]:
    document = document_from_mapping({"distributed_type": "DEEPSPEED", "deepspeed_config": asked}, "code")
    resolved = resolve_before_run(document, accelerator="cuda", processes=2, strategy="deepspeed")
    return config_for_scripts(document, resolved)


def test_what_the_loop_knows_stays_open() -> None:
    """Unwritten batch, accumulation and clipping are the script's. For an absent value, Accelerate takes 1."""
    found = written({"zero_stage": 2})
    assert {key: found[key] for key in LOOPS} == LOOPS
    assert found["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert set(found) == {*LOOPS, "zero_optimization"}  # no part of our loop's contract


def test_what_is_written_stays() -> None:
    """Typed values arrive unchanged, `null` for clipping as no clipping."""
    asked = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": ["auto", 0.95]}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/disk"},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }
    found = written(asked)
    assert found["train_batch_size"] == 8
    assert found["gradient_accumulation_steps"] == 2
    assert found["gradient_clipping"] == 0.0
    assert found["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    zero = found["zero_optimization"]
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is False


def test_auto_stays_only_where_a_script_fills_it() -> None:
    """transformers' published configuration keeps its `auto`. A key that neither library fills gets a value."""
    theirs = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    ours = {
        "overlap_comm": "auto",
        "allgather_bucket_size": "auto",  # no code reads it, and DeepSpeed's default is even
        "sub_group_size": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "zenflow": {"select_interval": "auto"},
    }
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    schedule = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    found = written(
        {
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {**params, "bias_correction": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "auto"}},
            "zero_optimization": {"stage": 3, **theirs, **ours},
        }
    )
    zero = found["zero_optimization"]
    assert {key: zero[key] for key in theirs} == theirs
    assert {key: zero.get(key) for key in ours} == {
        "overlap_comm": True,
        "allgather_bucket_size": 500_000_000,
        "sub_group_size": 1_000_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zenflow": None,
    }
    assert found["bf16"] == {"enabled": "auto"}
    assert found["optimizer"]["params"] == {**params, "bias_correction": True}
    assert found["scheduler"]["params"] == {**schedule, "warmup_type": "linear"}


@pytest.mark.parametrize(("stage", "gathers"), [(2, None), (3, True)])
def test_a_model_can_be_saved_at_stage_3(stage: int, gathers: bool | None) -> None:
    """Without the key, Accelerate's `get_state_dict` fails after training."""
    assert (
        written({"zero_stage": stage})["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save") is gathers
    )
