"""What configurations need, read off real documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.cli.doctor_machine import Needs, find_needs
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.launch.flags import document_from_flags

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
NVME = {"device": "nvme", "nvme_path": "/data"}


def needs_of(folder: Path, deepspeed: dict[str, Any], gpus: int = 0, **launch: Any) -> Needs:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", **launch, "deepspeed_config": deepspeed}))
    document = document_from_flags({"config_file": str(file)})
    return find_needs(document, launch_settings(document), gpus)


@pytest.mark.parametrize(
    ("zero", "optimizer", "gpus", "ops"),
    [
        ({"stage": 2}, ADAM, 0, ()),
        ({"stage": 2}, ADAM, 2, ("fused_adam",)),
        ({"stage": 2}, {"type": "AdamW", "params": {"torch_adam": True}}, 2, ()),
        ({"stage": 2}, None, 2, ()),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ADAM, 2, ("cpu_adam",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, None, 0, ("cpu_adam",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"type": "Lion"}, 0, ("cpu_lion",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"type": "Adagrad"}, 0, ("cpu_adagrad",)),
        ({"stage": "auto", "offload_optimizer": {"device": "auto"}}, ADAM, 2, ("cpu_adam", "fused_adam")),
        ({"stage": 3, "offload_param": NVME}, ADAM, 0, ("pin_memory", "async_io")),
        ({"stage": 3, "offload_optimizer": NVME}, ADAM, 0, ("cpu_adam", "pin_memory", "async_io")),
    ],
    ids=str,
)
def test_ops(
    zero: dict[str, Any], optimizer: dict[str, Any] | None, gpus: int, ops: tuple[str, ...], tmp_path: Path
) -> None:
    """Kernels by optimizer and device, and asynchronous I/O for NVMe."""
    training = {"zero_optimization": zero, **({"optimizer": optimizer} if optimizer else {})}
    assert needs_of(tmp_path, training, gpus).ops == ops


def test_no_kernel_is_built_where_torchs_own_is_offloaded(tmp_path: Path) -> None:
    """`zero_force_ds_cpu_optimizer: false` lets a machine without a compiler offload."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    training = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    assert needs_of(tmp_path, training, 0).ops == ()


def test_folders_and_locked_memory(tmp_path: Path) -> None:
    """Each folder once; the swap buffers of every process, in the type of training."""
    zero = {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "buffer_count": 4, "buffer_size": 1000}}
    needs = needs_of(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}}, num_processes=3)
    assert needs.nvme_folders == ("/data",)
    assert needs.locked_bytes == 3 * 4 * 1000 * 2
    assert needs_of(tmp_path, {"zero_optimization": zero}, num_processes=3).locked_bytes == 3 * 4 * 1000 * 4


def test_a_run_without_zero_needs_nothing_of_deepspeed(tmp_path: Path) -> None:
    """DDP by a document that also has a ZeRO section."""
    needs = needs_of(tmp_path, {"zero_optimization": {"stage": 2}}, distributed_type="MULTI_CPU", num_processes=2)
    assert needs == Needs(processes=2)


def test_processes_are_those_of_this_machine(tmp_path: Path) -> None:
    """Of eight on two machines, four; without a number, one for each GPU."""
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    several = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1"}
    assert needs_of(tmp_path, zero, num_processes=8, **several).processes == 4
    assert needs_of(tmp_path, zero, gpus=3).processes == 3
    assert needs_of(tmp_path, zero, gpus=3).offloads_to_host
