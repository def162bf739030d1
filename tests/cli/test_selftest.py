"""`zero-plugin test` without its processes: the configuration that it runs, and its reading of worker reports."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.cli.selftest import STEPS, Outcome, begun, document_of_test, note, read_outcomes
from zero_plugin.launch.flags import document_from_flags

# ---- The parts of a configuration that the self-test uses ------------------------------------------------------------


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
    """Stage, offload and precision stay. Batches, clipping, scheduler, monitors, restarts and logs are dropped."""
    launch, training = kept(tmp_path, "AdamW")
    assert launch == {"distributed_type", "num_processes", "mixed_precision"}
    assert training == {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "aio": {"queue_depth": 16},
    }


def test_an_optimizer_that_hides_wrong_gradients_is_replaced(tmp_path: Path) -> None:
    """An optimizer that hides wrong gradients is replaced: Lion steps by signs."""
    assert "optimizer" not in kept(tmp_path, "Lion")[1]


# ---- What workers write, and how the command reads it ----------------------------------------------------------------


def test_the_last_word_on_each_check_counts(tmp_path: Path) -> None:
    """The last entry of a check counts. An unfinished check stays unfinished and has a fix. A passed one has none."""
    file = tmp_path / "outcomes"
    assert read_outcomes(file) == []
    ended = Outcome("barrier", "ok", "2 processes", seconds=0.5)
    for outcome in (begun("barrier"), ended, begun("all_reduce")):
        note(outcome, file)
    assert read_outcomes(file) == [ended, begun("all_reduce")]
    assert [outcome.fix for outcome in read_outcomes(file)] == ["", STEPS["all_reduce"]]


def test_every_check_has_a_way_out() -> None:
    """Every check has a fix that is not empty."""
    assert all(begun(check).fix for check in STEPS)
