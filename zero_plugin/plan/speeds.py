"""The speeds of this machine for computing and copying: each constant is measured in 0.1 s and stored in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Final

import torch

from zero_plugin.config.installed import installed_version
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.config.run_files import cache_folder, make_private_folder, replace_text
from zero_plugin.distributed.messages import working
from zero_plugin.errors import ConfigError
from zero_plugin.machine.hardware import available_cpu_memory, count_cores, lockable_bytes, look_at_disk
from zero_plugin.plan.machines import ASSUMED, find_device
from zero_plugin.plan.situation import CPU, Cluster

# The fraction of one large multiplication's speed that training steps reach: 125 of 250 TFLOPS on an A100.
_TRAINING_SHARE: Final = 0.5
_TYPES: Final[dict[Precision, torch.dtype]] = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS: Final = 0.1  # for repeating one measurement; see `_rate`
_COPIED: Final = 2**27  # bytes, more than a CPU or GPU cache holds
_ADAM_ELEMENTS: Final = 2**23
# GB/s of one link, each way. NVML numbers the versions: 1 is NVLink 1.0, of P100; 2 to 6 are 2.0 to 4.0, of V100 to
# H100; the next is 5.0, of B200. (NVIDIA's page "NVLink": its totals per GPU count both ways of all links.)
_NVLINK_GB_S: Final = {1: 20, **dict.fromkeys(range(2, 7), 25)}
_NEWER_NVLINK_GB_S: Final = 50
_ADAM_BYTES: Final = 28  # per element: reads fp32 weight, gradient and two states; writes all but the gradient


def measure_cluster(
    processes: int | None = None, nodes: int = 1, nvme_path: Path | None = None, cache: Path | None = None
) -> Cluster:
    """Return a cluster of `nodes` machines like this one.

    Speeds that `cache` lacks are measured, in about two seconds on a GPU. Memory is read on each call. Call this in
    only one process of a machine: several would slow down each other's measurements.

    Args:
        processes: on each node; by default one per GPU, or one without a GPU.
        nodes: machines, all like this one.
        nvme_path: folder for NVMe offload; measured on each call, with a file that is removed.
        cache: file of the measured constants; by default `constants_file()`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else CPU
    devices = processes or (torch.cuda.device_count() if device.type == "cuda" else 1)
    host_bytes, here = available_cpu_memory(), "this machine"
    device_bytes = host_bytes // devices
    if device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    speeds, measured = _speeds(device, name, cache or constants_file())
    flops = {precision: _TRAINING_SHARE * speeds[f"matmul {precision}"] for precision in _TYPES}
    constants = {
        "device_bytes": (device_bytes, here),
        "host_bytes": (host_bytes, here),
        "devices": (devices, here),
        "nodes": (nodes, ""),
        "memlock_bytes": (lockable_bytes(), ""),
        "flops": (flops, f"{_TRAINING_SHARE:.0%} of a large multiplication, {measured}"),
        "memory_bandwidth": (speeds["memory"], measured),
        "pcie_bandwidth": (speeds["pcie"], measured),
        "adam_bandwidth": (speeds["adam"], f"torch's fused AdamW on the CPU, {measured}"),
        "link_bandwidth": _link_bandwidth(device, name, speeds),
        "network_bandwidth": ASSUMED["network_bandwidth"],
        **_nvme(nvme_path),
    }
    return Cluster.from_constants(constants, name)


def _nvme(folder: Path | None) -> dict[str, tuple[float, str]]:
    disk = None if folder is None else look_at_disk(folder)
    source = f"measured in {folder}" if disk else ""
    return {
        "nvme_bytes": (disk.free if disk else 0, source),
        "nvme_read": ((disk.read if disk else None) or ASSUMED["nvme_read"][0], source),
        "nvme_write": ((disk.write if disk else None) or ASSUMED["nvme_write"][0], source),
    }


def constants_file() -> Path:
    """Return the file of measured constants: `zero_plugin/constants.json` in the user's cache folder."""
    return cache_folder(os.environ) / "zero_plugin" / "constants.json"


def _speeds(device: torch.device, name: str, cache: Path) -> tuple[dict[str, float], str]:
    """Return operations and bytes per second by name, and when they were measured."""
    threads = f"{torch.get_num_threads()} threads of {count_cores()} cores"
    key = f"{name}, torch {torch.__version__}, {os.uname().nodename}, {threads}"
    read = None
    with suppress(OSError, ValueError):
        read = json.loads(cache.read_text())
    kept = read if isinstance(read, dict) else {}  # includes other machines that share the folder
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # not measured here yet, or by another version
        speeds = {what: float(speed) for what, speed in kept[key]["speeds"].items()}
        if speeds.keys() == _MEASURES.keys():
            return speeds, f"measured on {kept[key]['day']}"
    with working(f"measuring the speed of this machine ({name})"):
        speeds = {what: measure(device) for what, measure in _MEASURES.items()}
    with suppress(OSError):  # without a writable folder the next run measures again
        make_private_folder(cache.parent)
        replace_text(cache, json.dumps({**kept, key: {"day": str(date.today()), "speeds": speeds}}, indent=1))
    return speeds, "measured now"


def _multiply(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a multiplication of square matrices."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return _rate(device, lambda: torch.mm(a, b), 2 * size**3)


def _copy_within(device: torch.device) -> float:
    """Return the bytes per second of a copy within the device, read and written."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(device, lambda: target.copy_(source), 2 * _COPIED)


def _copy_to_device(device: torch.device) -> float:
    """Return the bytes per second from page-locked CPU memory to the device; on a CPU, from memory to memory."""
    source = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    return _rate(device, lambda: target.copy_(source, non_blocking=True), _COPIED)


def _update_on_host(_: torch.device) -> float:
    """Return the bytes per second of CPU memory that torch's fused AdamW moves.

    DeepSpeed's optimizer is 1.2 times as fast. The measurement uses all cores that this process may use, because all
    processes of a node share them and update at the same time.
    """
    parameter = torch.zeros(_ADAM_ELEMENTS, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(count_cores())
    try:
        return _rate(torch.device("cpu"), optimizer.step, _ADAM_BYTES * _ADAM_ELEMENTS)
    finally:
        torch.set_num_threads(threads)


def _rate(device: torch.device, work: Callable[[], object], amount: float) -> float:
    """Return `amount` per second in the fastest run: what slows down a run is not the machine's speed."""

    def run() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run()
    began, fastest = time.perf_counter(), run()
    while time.perf_counter() - began < _SECONDS:
        fastest = min(fastest, run())
    return amount / max(fastest, 1e-9)


def _link_bandwidth(device: torch.device, name: str, speeds: dict[str, float]) -> tuple[float, str]:
    """Return the bytes per second between two devices, and the source of the number.

    Measuring this would take two processes. The number is therefore what the driver reports about the links, otherwise
    a data sheet's, otherwise what PCIe allows.
    """
    if device.type == "cpu":
        return speeds["memory"] / 4, "assumed: a quarter of the memory's; both ends read and write"
    if (links := _active_links(device)) is not None:
        if not links:
            return speeds["pcie"] / 2, "half of PCIe's: the driver reports no active NVLink"
        return 1e9 * sum(links), f"{len(links)} active NVLinks, by the driver"
    try:
        known = find_device(name)
    except ConfigError:
        return speeds["pcie"] / 2, "assumed: half of PCIe's"
    return known.link_bandwidth, f"{known.name}'s data sheet; install nvidia-ml-py to use the driver's numbers"


def _active_links(device: torch.device) -> list[int] | None:
    """Return the gigabytes per second, each way, of a GPU's active NVLinks; None if the driver gives no answer."""
    if installed_version("nvidia-ml-py") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
    links = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # the GPU has fewer links, or none
            if pynvml.nvmlDeviceGetNvLinkState(gpu, link) == pynvml.NVML_FEATURE_ENABLED:
                links.append(_NVLINK_GB_S.get(pynvml.nvmlDeviceGetNvLinkVersion(gpu, link), _NEWER_NVLINK_GB_S))
    return links


_MEASURES: Final[dict[str, Callable[[torch.device], float]]] = {
    **{f"matmul {name}": partial(_multiply, dtype=dtype) for name, dtype in _TYPES.items()},
    "memory": _copy_within,
    "pcie": _copy_to_device,
    "adam": _update_on_host,
}
