"""A cluster from stated values, this machine's values, and known facts of GPUs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from zero_plugin.errors import ConfigError
from zero_plugin.plan.machines import KNOWN_DEVICES, UNNAMED, find_device, state_cluster
from zero_plugin.plan.situation import Cluster

GIB = 2**30
HERE = Cluster(
    device_bytes=10 * GIB,
    host_bytes=100 * GIB,
    devices=2,
    device_name="NVIDIA something",
    flops={"no": 1.0, "bf16": 2.0, "fp16": 2.0},
    memory_bandwidth=3.0,
    pcie_bandwidth=4.0,
    adam_bandwidth=5.0,
    nvme_bytes=GIB,
    nvme_read=6.0,
    nvme_write=7.0,
    sources={"adam_bandwidth": "measured", "nvme_read": "measured", "host_bytes": "this machine"},
)
CPU = replace(HERE, device_name="CPU")


def test_known_gpu_is_another_machine() -> None:
    """`--gpu` uses nothing of this machine. Every speed has its source, and CPU memory is stated."""
    cluster = state_cluster(gpu="h100", gpus=8, nodes=2, host_memory=64 * GIB, here=HERE)
    assert cluster.processes == 16
    assert cluster.device_bytes == 81559 * 2**20
    assert cluster.host_bytes == 64 * GIB
    assert cluster.adam_bandwidth != HERE.adam_bandwidth
    assert cluster.flops == {"no": 0.4 * 67e12, "bf16": 0.4 * 989e12, "fp16": 0.4 * 989e12}
    for field in fields(Cluster):
        if field.name.endswith("bandwidth") or field.name in ("flops", "nvme_read", "nvme_write"):
            assert getattr(cluster, field.name)
            assert cluster.sources[field.name]
    assert cluster.sources["host_bytes"] == cluster.sources["nodes"] == "stated"


def test_host_memory_that_nobody_tells() -> None:
    """It is assumed to equal the GPUs' memory, and this is logged."""
    cluster = state_cluster(gpu="A100-40GB", gpus=4)
    assert cluster.host_bytes == 4 * cluster.device_bytes
    assert "assumed" in cluster.sources["host_bytes"]


def test_this_machine_with_less_memory() -> None:
    """Stated values replace this machine's own. The others keep their values and sources."""
    cluster = state_cluster(gpu_memory=4 * GIB, gpus=1, here=HERE)
    assert (cluster.device_bytes, cluster.devices, cluster.host_bytes) == (4 * GIB, 1, 100 * GIB)
    assert cluster.flops == HERE.flops
    assert cluster.sources["adam_bandwidth"] == "measured"
    assert cluster.sources["device_bytes"] == "stated"


def test_stated_memory_where_no_gpu_is() -> None:
    """Speeds are one GPU's for any memory. The host is this one: the same plan on every CPU."""
    cluster = state_cluster(gpu_memory=31 * GIB, host_memory=64 * GIB, here=CPU)
    assert cluster.device_bytes == 31 * GIB
    assert cluster.flops == find_device(UNNAMED).flops
    assert cluster.sources["flops"].startswith(f"as {UNNAMED}'s: GPU model unknown")
    assert (cluster.devices, cluster.adam_bandwidth) == (2, 5.0)
    assert (cluster.nvme_bytes, cluster.nvme_read, cluster.nvme_write) == (GIB, 6.0, 7.0)
    assert cluster.sources["adam_bandwidth"] == cluster.sources["nvme_read"] == "measured"


def test_cpu_as_it_is() -> None:
    """Without stated values, this machine is planned for, with or without a GPU."""
    assert state_cluster(here=CPU) == CPU


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({}, "--gpu: the memory of a GPU is not known"),
        ({"gpu": "A1000"}, "Did you mean A6000?"),
        ({"gpu": "T4", "gpus": 0}, "--gpus: 0 is below 1"),
        ({"gpu": "T4", "nodes": -1}, "--nodes: -1 is below 1"),
        ({"gpu_memory": 24}, "--gpu_memory: 24 is 24 bytes"),
        ({"gpu": "T4", "host_memory": 512}, "--host_memory: 512 is 512 bytes"),
        ({"gpu": "T4", "nvme": 2}, "Write the unit too"),
    ],
)
def test_wrong(stated: dict[str, Any], told: str) -> None:
    """Unreadable values are refused with the flag and legal values."""
    with pytest.raises(ConfigError) as error:
        state_cluster(**stated)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("rtx4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("l40s", "L40S"),
        ("A100", "A100-40GB"),
        ("A100-80", "A100-80GB"),
        ("a100_80g", "A100-80GB"),
        ("A100 80 GB", "A100-80GB"),
        ("A100 (80 GiB)", "A100-80GB"),
        ("V100-32G", "V100-32GB"),
        ("RTX 3090 24", "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("NVIDIA TITAN RTX", "TITAN-RTX"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla P100-SXM2-16GB", "P100-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIe-16GB"),
        ("NVIDIA A30-PCIe", "A30"),
        ("NVIDIA H20", "H20-96GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA B200", "B200-180GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        *((device.name, device.name) for device in KNOWN_DEVICES),
    ],
)
def test_names(name: str, known: str) -> None:
    """Names work as drivers write them, as people type them, and as the table has them."""
    assert find_device(name).name == known


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "RTX 4090 Mobile",
        "RTX 4090 Notebook GPU",
        "RTX 4090 D",
        "NVIDIA RTX PRO 6000 Blackwell Max Q Workstation Edition",
        "NVIDIA H20-3e",
        "L40 S",
        "A100 X",
        "8 x A100-80GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Quadro RTX 6000",
        "L4000",
        "H100 94GB",
        "H100-94",
        "RTX",
        "80GB",
        "A",
        "",
    ],
)
def test_names_that_mean_no_known_gpu(name: str) -> None:
    """No name is stretched: another memory size, or a part of a name, is another GPU or none."""
    with pytest.raises(ConfigError):
        find_device(name)


def test_bytes_choose_no_speed() -> None:
    """80 GB and 80 GiB are planned alike."""
    decimal, binary = (state_cluster(gpu_memory=size, gpus=8) for size in (80 * 10**9, 80 * GIB))
    assert replace(decimal, device_bytes=0, host_bytes=0, sources={}) == replace(
        binary, device_bytes=0, host_bytes=0, sources={}
    )


def test_volta_and_turing_have_no_bf16() -> None:
    """Their tensor cores take fp16 only, so bf16 runs at fp32's speed."""
    for name in ("V100-32GB", "T4"):
        flops = find_device(name).flops
        assert flops["bf16"] == flops["no"] < flops["fp16"]


def test_rows_are_of_data_sheets() -> None:
    """Each row names its sheet. A variant with its own row has slower links than the usual device."""
    by_name = {device.name: device for device in KNOWN_DEVICES}
    assert len(by_name) == len(KNOWN_DEVICES)
    for device in KNOWN_DEVICES:
        assert device.sheet
        assert device.fp32_tflops < device.tensor_tflops * 1.1
        assert 8 * 1024 < device.mebibytes < 300 * 1024
    for name, usual in (("A100-PCIe-80GB", "A100-80GB"), ("H100-PCIe-80GB", "H100-80GB"), ("H800-80GB", "H100-80GB")):
        assert by_name[name].link_bandwidth < by_name[usual].link_bandwidth
