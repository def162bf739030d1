"""States the machines that a plan is for: as typed, as this machine was found to be, or as a known GPU's data sheet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.amounts import LEAST_MEMORY
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.amounts import show_gib
from zero_plugin.plan.known_devices import ATTAINABLE, KnownDevice, find_device, nearest_device
from zero_plugin.plan.situation import Cluster

__all__ = ["ASSUMED", "state_cluster"]

# What a node is taken to have where nobody has said or measured it, and why.
ASSUMED: Final[dict[str, tuple[float, str]]] = {
    "network_bandwidth": (25e9, "assumed: 200 Gb/s per node"),
    "adam_bandwidth": (50e9, "assumed: by it Llama 2 7B takes the CPU 4 s a step, as ZenFlow's authors report"),
    "nvme_read": (2.5e9, "assumed: a quarter of what DeepNVMe's authors measured on four Gen4 disks"),
    "nvme_write": (1.25e9, "assumed: a quarter of what DeepNVMe's authors measured on four Gen4 disks"),
}
_FIELDS: Final = {
    "gpu_memory": "device_bytes",
    "host_memory": "host_bytes",
    "nvme": "nvme_bytes",
    "gpus": "devices",
    "nodes": "nodes",
}
_MEMORIES: Final = ("gpu_memory", "host_memory", "nvme")
_OF_DEVICE: Final = ("flops", "memory_bandwidth", "link_bandwidth", "pcie_bandwidth")
_OF_NODE: Final = (
    *("host_bytes", "nodes", "devices", "memlock_bytes", "adam_bandwidth"),
    *("nvme_bytes", "nvme_read", "nvme_write"),
)


def state_cluster(
    *,
    gpu: str | None = None,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    nvme: int | None = None,
    here: Cluster | None = None,
) -> Cluster:
    """The machines that are stated, with the source of every constant.

    A stated GPU is another machine: nothing of `here` is taken for it. Without one, what is not stated is `here`'s; if
    `here` has no GPU either, speeds are those of the known GPU whose memory is nearest to `gpu_memory`.

    Args:
        gpu: a name of `known_devices.KNOWN_DEVICES`.
        gpu_memory: bytes of one GPU.
        host_memory: bytes of one node, for all its processes; where it is not known, as much as its GPUs have.
        gpus: of one node.
        nodes: machines.
        nvme: free bytes of one node's NVMe disk.
        here: this machine, as `probe.constants.measure_cluster` found it.

    Raises:
        ConfigError: a GPU of that name is not known, a number is too small, or nothing tells the memory of a device.
    """
    given = {"gpu_memory": gpu_memory, "host_memory": host_memory, "nvme": nvme, "gpus": gpus, "nodes": nodes}
    numbers = {flag: number for flag, number in given.items() if number is not None}
    for flag, number in numbers.items():
        if number < 1:
            raise _problem(flag, f"{number} is below 1", "Write 1 or more.")
        if flag in _MEMORIES and number < LEAST_MEMORY:
            raise _problem(flag, f"{number} is {number} bytes, which holds no model", "Write the unit too, e.g. 24GiB.")
    if gpu is not None:
        base = _of_known(find_device(gpu))
    elif here is not None and (here.device_name != "CPU" or gpu_memory is None):
        base = here
    elif gpu_memory is not None:
        base = _of_memory(gpu_memory, here)
    else:
        fix = "Write --gpu A100-80GB, or --gpu_memory 24GiB --host_memory 64GiB --gpus 8."
        raise _problem("gpu", "nothing tells how much memory a GPU has", fix)
    changes: dict[str, Any] = {_FIELDS[flag]: number for flag, number in numbers.items()}
    cluster = replace(base, **changes, sources={**base.sources, **dict.fromkeys(changes, "stated")})
    return cluster if cluster.host_bytes else _with_assumed_host(cluster)


def _of_known(device: KnownDevice) -> Cluster:
    sheet = f"{device.name}'s data sheet"
    sources = {"device_bytes": sheet, **dict.fromkeys(_OF_DEVICE, sheet)}
    sources["flops"] = f"{ATTAINABLE:.0%} of {sheet}"
    if not device.nvlink_gb_s:
        sources["link_bandwidth"] = "half of PCIe: no NVLink"
    return Cluster(
        device_bytes=device.memory_bytes,
        host_bytes=0,
        device_name=device.name,
        flops=device.flops,
        memory_bandwidth=device.memory_gb_s * 1e9,
        link_bandwidth=device.link_bandwidth,
        pcie_bandwidth=device.pcie,
        network_bandwidth=ASSUMED["network_bandwidth"][0],
        adam_bandwidth=ASSUMED["adam_bandwidth"][0],
        nvme_read=ASSUMED["nvme_read"][0],
        nvme_write=ASSUMED["nvme_write"][0],
        sources=sources | {name: reason for name, (_, reason) in ASSUMED.items()},
    )


def _of_memory(memory_bytes: int, here: Cluster | None) -> Cluster:
    """A GPU of which only the memory is known, in this machine where there is one."""
    like = nearest_device(memory_bytes)
    cluster = _of_known(like)
    sources = {**cluster.sources, **dict.fromkeys(_OF_DEVICE, f"as {like.name}, whose memory is nearest")}
    cluster = replace(cluster, device_name="", sources=sources)
    if here is None:
        return cluster
    known = {name: here.sources[name] for name in _OF_NODE if name in here.sources}
    return replace(cluster, **{name: getattr(here, name) for name in _OF_NODE}, sources={**sources, **known})


def _with_assumed_host(cluster: Cluster) -> Cluster:
    size = cluster.device_bytes * cluster.devices
    reason = f"assumed: {show_gib(size)}, as much as the node's GPUs; --host_memory states it"
    return replace(cluster, host_bytes=size, sources={**cluster.sources, "host_bytes": reason})


def _problem(flag: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(f"--{flag}", "", message, fix)])
