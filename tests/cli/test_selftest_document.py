"""What of a configuration the self-test runs by."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.cli.selftest import document_of_test
from zero_plugin.launch.flags import document_from_flags

CONFIG = """
distributed_type: DEEPSPEED
num_processes: 2
max_restarts: 3
min_machines: 1
log_dir: logs
mixed_precision: bf16
deepspeed_config:
  train_batch_size: 64
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  bf16: {enabled: true}
  optimizer: {type: KIND, params: {lr: 1.0e-3}}
  scheduler: {type: WarmupLR, params: {warmup_num_steps: 10}}
  tensorboard: {enabled: true, output_path: runs}
  zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}
  aio: {queue_depth: 16}
"""


def kept(folder: Path, kind: str) -> tuple[set[str], dict[str, object]]:
    file = folder / "config.yaml"
    file.write_text(CONFIG.replace("KIND", kind))
    document = document_of_test(document_from_flags({"config_file": str(file)}))
    return {path[0] for path in document.launch}, document.to_deepspeed()


def test_stage_offload_and_precision_stay(tmp_path: Path) -> None:
    """The loop's batches, clipping and schedule go, and so do monitors, restarts and log folders."""
    launch, training = kept(tmp_path, "AdamW")
    assert launch == {"distributed_type", "num_processes", "mixed_precision"}
    assert training == {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "aio": {"queue_depth": 16},
    }


def test_an_optimizer_that_hides_wrong_gradients_is_replaced(tmp_path: Path) -> None:
    """Lion steps by signs."""
    assert "optimizer" not in kept(tmp_path, "Lion")[1]
