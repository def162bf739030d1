"""The machines that a plan is for: stated by the user, measured here, or taken from a GPU's data sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from zero_plugin.config.amounts import LEAST_MEMORY, show_bytes
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.situation import Cluster

# The fraction of its data sheet's peak that a GPU reaches in training: 0.40-0.41 for Granite-7B on A100s with ZeRO-3
# and FSDP (Hugging Face's comparison of the two), 50 of 125 TFLOPS on V100s (ZeRO-3 Offload's announcement).
ATTAINABLE: Final = 0.4

_PCIE3, _PCIE4, _PCIE5 = 12e9, 25e9, 55e9  # bytes/s of 16 lanes, each way, as measured for copies from pinned memory


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """One GPU, as its manufacturer's data sheet describes it.

    Attributes:
        name: the name for `--gpu`: the model, the form if it is not the usual one, and the memory if there are several
            sizes. If a model exists with and without NVLink's own socket (SXM), the one with it is the usual form.
        mebibytes: memory as `nvidia-smi` shows it, slightly less than the advertised size.
        tensor_tflops: dense peak in 16 bits with sums in fp32.
        fp32_tflops: peak in fp32 without TF32, which is torch's default.
        memory_gb_s: gigabytes per second of its memory.
        pcie: bytes per second between it and CPU memory, each way.
        nvlink_gb_s: gigabytes per second to its peers, each way; 0 without NVLink, or if NVLink needs a bridge that is
            sold separately.
        bf16: whether its tensor cores support bf16; otherwise bf16 runs at the speed of fp32.
        sheet: the document that the numbers are from.
    """

    name: str
    mebibytes: int
    tensor_tflops: float
    fp32_tflops: float
    memory_gb_s: float
    pcie: float
    nvlink_gb_s: float = 0.0
    bf16: bool = True
    sheet: str = "NVIDIA's data sheet"

    @property
    def flops(self) -> dict[Precision, float]:
        """Operations per second that training reaches, by precision."""
        tensor, single = (ATTAINABLE * tflops * 1e12 for tflops in (self.tensor_tflops, self.fp32_tflops))
        return {"no": single, "bf16": tensor if self.bf16 else single, "fp16": tensor}

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second to a peer; without NVLink half of PCIe's, since every byte crosses PCIe twice."""
        return self.nvlink_gb_s * 1e9 or self.pcie / 2


_TURING, _ADA = "NVIDIA's Turing architecture whitepaper", "NVIDIA's Ada architecture whitepaper"
_BLACKWELL = "NVIDIA's RTX Blackwell architecture whitepaper"
_AMPERE, _AMD = "NVIDIA's GA102 whitepaper", "AMD's data sheet"
_C2C = 450e9  # between a Grace CPU and its GPU, each way

KNOWN_DEVICES: Final = (
    KnownDevice("T4", 15360, 65, 8.1, 320, _PCIE3, bf16=False),
    KnownDevice("P100-16GB", 16280, 21.2, 10.6, 732, _PCIE3, 80, bf16=False),
    KnownDevice("P100-PCIe-16GB", 16280, 18.7, 9.3, 732, _PCIE3, bf16=False),
    KnownDevice("V100-16GB", 16160, 125, 15.7, 900, _PCIE3, 150, bf16=False),
    KnownDevice("V100-32GB", 32510, 125, 15.7, 900, _PCIE3, 150, bf16=False),
    KnownDevice("V100-PCIe-16GB", 16160, 112, 14, 900, _PCIE3, bf16=False),
    KnownDevice("V100-PCIe-32GB", 32510, 112, 14, 900, _PCIE3, bf16=False),
    KnownDevice("RTX-2080-Ti", 11264, 53.8, 13.4, 616, _PCIE3, bf16=False, sheet=_TURING),
    KnownDevice("TITAN-RTX", 24220, 130.5, 16.3, 672, _PCIE3, bf16=False, sheet=_TURING),
    KnownDevice("A10", 23028, 125, 31.2, 600, _PCIE4),
    KnownDevice("A10G", 23028, 70, 31.5, 600, _PCIE4, sheet="Amazon's description of g5 instances"),
    KnownDevice("A30", 24576, 165, 10.3, 933, _PCIE4),
    KnownDevice("A40", 46068, 149.7, 37.4, 696, _PCIE4),
    KnownDevice("L4", 23034, 121, 30.3, 300, _PCIE4),
    KnownDevice("L40", 46068, 181, 90.5, 864, _PCIE4),
    KnownDevice("L40S", 46068, 362, 91.6, 864, _PCIE4),
    KnownDevice("RTX-3090", 24576, 71, 35.6, 936, _PCIE4, sheet=_AMPERE),
    KnownDevice("RTX-3090-Ti", 24564, 80, 40, 1008, _PCIE4, sheet=_AMPERE),
    KnownDevice("RTX-4080", 16376, 97.5, 48.7, 717, _PCIE4, sheet=_ADA),
    KnownDevice("RTX-4090", 24564, 165, 82.6, 1008, _PCIE4, sheet=_ADA),
    KnownDevice("RTX-5080", 16303, 112.6, 56.3, 960, _PCIE5, sheet=_BLACKWELL),
    KnownDevice("RTX-5090", 32607, 209, 104.8, 1792, _PCIE5, sheet=_BLACKWELL),
    KnownDevice("A6000", 49140, 155, 38.7, 768, _PCIE4),
    KnownDevice("RTX-6000-Ada", 49140, 364, 91.1, 960, _PCIE4),
    KnownDevice("RTX-PRO-6000", 97887, 503.8, 126, 1792, _PCIE5, sheet=_BLACKWELL),
    KnownDevice("A100-40GB", 40536, 312, 19.5, 1555, _PCIE4, 300),
    KnownDevice("A100-80GB", 81920, 312, 19.5, 2039, _PCIE4, 300),
    KnownDevice("A100-PCIe-40GB", 40960, 312, 19.5, 1555, _PCIE4),
    KnownDevice("A100-PCIe-80GB", 81920, 312, 19.5, 1935, _PCIE4),
    KnownDevice("A800-80GB", 81920, 312, 19.5, 2039, _PCIE4, 200),
    KnownDevice("H100-80GB", 81559, 989, 67, 3350, _PCIE5, 450),
    KnownDevice("H100-PCIe-80GB", 81559, 756, 51, 2000, _PCIE5),
    KnownDevice("H100-NVL-94GB", 95830, 835, 60, 3900, _PCIE5, 300),
    KnownDevice("H800-80GB", 81559, 989, 67, 3350, _PCIE5, 200),
    KnownDevice("H20-96GB", 97871, 148, 44, 4000, _PCIE5, 450),
    KnownDevice("H200-141GB", 143771, 989, 67, 4800, _PCIE5, 450),
    KnownDevice("H200-NVL-141GB", 143771, 835, 60, 4800, _PCIE5, 450),
    KnownDevice("GH200-96GB", 97871, 989, 67, 4000, _C2C, 450),
    KnownDevice("GH200-144GB", 147456, 989, 67, 4900, _C2C, 450),
    KnownDevice("B200-180GB", 183359, 2250, 75, 8000, _PCIE5, 900),
    KnownDevice("GB200-186GB", 189471, 2500, 80, 8000, _C2C, 900),
    KnownDevice("B300-288GB", 275040, 2250, 75, 8000, _PCIE5, 900),
    KnownDevice("MI250X-64GB", 65520, 191.5, 23.9, 1638, _PCIE4, 50, sheet=f"{_AMD}; one of its two dies"),
    KnownDevice("MI300X-192GB", 196592, 1307, 163.4, 5300, _PCIE5, 448, sheet=_AMD),
    KnownDevice("MI325X-256GB", 262128, 1307, 163.4, 6000, _PCIE5, 448, sheet=_AMD),
)
# If only a GPU's memory is known, this GPU's speeds order the strategies. The order is the same for GPUs of all sizes.
UNNAMED: Final = "A100-80GB"
# Words in a name that mean another GPU than the name without them, or several GPUs. A GPU with a word that no row has
# is unknown.
_FORMS: Final = frozenset({"ada", "laptop", "maxq", "mig", "mobile", "notebook", "nvl", "pcie", "super", "ti"}) | {
    *("d", "e", "s", "x"),  # RTX 4090 D, H20-3e, L40 S, A100 X; and 8 x A100
}
_OF_THE_CPU: Final = {"gh200": "480gb"}  # CPU memory that drivers append to the name


def find_device(name: str) -> KnownDevice:
    """Return the GPU of that name, as `--gpu` or a driver writes it.

    Examples: `a100-80gb`, `A100`, `NVIDIA A100-SXM4-80GB`, `rtx4090`. If a name without a memory size fits two GPUs,
    the smaller one is returned.

    Raises:
        ConfigError: the name is not known; the message lists the known names.
    """
    wanted = _words(name)
    found = [device for device in KNOWN_DEVICES if _names(device.name, wanted)]
    if not found and "pcie" in wanted:  # a card's name may contain "PCIe" even if the model has no other form
        found = [d for d in KNOWN_DEVICES if not d.nvlink_gb_s and _names(d.name, wanted - {"pcie"})]
    if not found:
        known = {device.name.upper(): device.name for device in KNOWN_DEVICES}
        near = get_close_matches(name.upper(), known, 1, 0.5)
        meant = f"Did you mean {known[near[0]]}? " if near else ""
        fix = f"{meant}Known: {', '.join(known.values())}. For another write --gpu_memory."
        raise _problem("gpu", f"{name!r} is not a known GPU", fix)
    return found[0]


def peak_flops(name: str, precision: Precision) -> float | None:
    """Return the floating-point operations per second in that GPU's data sheet; None if the GPU is not known.

    Args:
        name: as a driver writes it.
        precision: of the computation; fp32 is without TF32.
    """
    try:
        device = find_device(name)
    except ConfigError:
        return None
    return device.flops[precision] / ATTAINABLE


def _words(name: str) -> set[str]:
    """Split a name like `NVIDIA GeForce RTX 4090` or `rtx4090` into comparable words.

    The forms `-80`, `80G` and `80 GB` all become `80gb`.
    """
    joined = re.sub(r"(titan[\s_-]*rtx)", "titanrtx", re.sub(r"max[\s_-]q\b", "maxq", name.lower()))
    joined = re.sub(r"rtx[\s_-]*(pro)?[\s_-]*(?=\d)", r"rtx\1", joined)
    sized = re.sub(r"(?<=[^a-z0-9.])(\d{2,3})(?:\s*gi?b?)?(?![a-z0-9.])", r"\1gb", joined)
    return set(re.findall(r"\d+gb|[a-z]+\d+[a-z]*|\d+|[a-z]+", sized))


def _names(known: str, wanted: set[str]) -> bool:
    """Return whether the words of a name mean that device: the same model and form, and no different memory size."""
    words = _words(known)
    form, memory = words & _FORMS, {word for word in words if re.fullmatch(r"\d+gb", word)}
    (model,) = words - form - memory
    sizes = {word for word in wanted if re.fullmatch(r"\d+gb", word)} - {_OF_THE_CPU.get(model)}
    plain = model.removeprefix("rtx")
    is_model = model in wanted or (plain != model and plain in wanted)
    return is_model and form == wanted & _FORMS and (not sizes or not memory or memory <= sizes)


# Assumed constants of a node that were neither stated nor measured, and the reason for each.
ASSUMED: Final[dict[str, tuple[float, str]]] = {
    "network_bandwidth": (25e9, "assumed: 200 Gb/s per node"),
    "adam_bandwidth": (50e9, "assumed: then a CPU step of Llama 2 7B takes 4 s, as ZenFlow's authors report"),
    "nvme_read": (2.5e9, "assumed: a quarter of what DeepNVMe's authors measured on four Gen4 disks"),
    "nvme_write": (1.25e9, "assumed: a quarter of what DeepNVMe's authors measured on four Gen4 disks"),
}
_DEVICE_FIELDS: Final = ("flops", "memory_bandwidth", "link_bandwidth", "pcie_bandwidth")
_NODE_FIELDS: Final = (
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
    network: float | None = None,
    here: Cluster | None = None,
) -> Cluster:
    """Return the machines that the arguments describe, with the source of every constant.

    If `gpu` is given, the user means another machine, and nothing is taken from `here`. Otherwise `here` provides what
    is not given. If `here` has no GPU, speeds are unknown: the speeds of one fixed GPU are used, whatever `gpu_memory`
    is.

    Args:
        gpu: a name of `KNOWN_DEVICES`.
        gpu_memory: bytes of one GPU.
        host_memory: bytes of one node, for all its processes; if unknown, as much as the node's GPUs have.
        gpus: of one node.
        nodes: machines.
        nvme: free bytes of one node's NVMe disk.
        network: bytes per second between two nodes, of each node.
        here: this machine, as measured by `measure_cluster`.

    Raises:
        ConfigError: a GPU of that name is not known, a number is too small, or the memory of a GPU is not known.
    """
    memories = {"gpu_memory": gpu_memory, "host_memory": host_memory, "nvme": nvme}
    for flag, number in {**memories, "gpus": gpus, "nodes": nodes}.items():
        if number is not None and number < 1:
            raise _problem(flag, f"{number} is below 1", "Write 1 or more.")
        if number is not None and flag in memories and number < LEAST_MEMORY:
            raise _problem(flag, f"{number} is {number} bytes, which holds no model", "Write the unit too, e.g. 24GiB.")
    if gpu is not None:
        base = _cluster_of(find_device(gpu))
    elif here is not None and (not here.is_of_cpus or gpu_memory is None):
        base = here
    elif gpu_memory is not None:
        base = _cluster_of_unnamed_gpu(gpu_memory, here)
    else:
        fix = "Write --gpu A100-80GB, or --gpu_memory 24GiB --host_memory 64GiB --gpus 8."
        raise _problem("gpu", "the memory of a GPU is not known", fix)
    given = {"device_bytes": gpu_memory, "host_bytes": host_memory, "nvme_bytes": nvme, "devices": gpus, "nodes": nodes}
    stated: dict[str, Any] = {**given, "network_bandwidth": network}
    stated = {name: number for name, number in stated.items() if number is not None}
    sources = {**base.sources, **dict.fromkeys(stated, "stated")}
    cluster = replace(base, **stated, sources=sources)
    if cluster.host_bytes:
        return cluster
    size = cluster.device_bytes * cluster.devices
    reason = f"assumed: {show_bytes(size)}, as much as the node's GPUs; --host_memory states it"
    return replace(cluster, host_bytes=size, sources={**sources, "host_bytes": reason})


def _cluster_of(device: KnownDevice) -> Cluster:
    sheet = f"{device.name}, by {device.sheet}"
    constants = {
        "device_bytes": (device.mebibytes * 2**20, sheet),
        "host_bytes": (0, ""),
        "flops": (device.flops, f"{ATTAINABLE:.0%} of {sheet}"),
        "memory_bandwidth": (device.memory_gb_s * 1e9, sheet),
        "link_bandwidth": (device.link_bandwidth, sheet if device.nvlink_gb_s else "half of PCIe: no NVLink"),
        "pcie_bandwidth": (device.pcie, sheet),
    }
    return Cluster.from_constants({**constants, **ASSUMED}, device.name)


def _cluster_of_unnamed_gpu(memory_bytes: int, here: Cluster | None) -> Cluster:
    """Return the cluster for a GPU of which only the memory is known; its speeds are those of `UNNAMED`.

    The node is this machine, if `here` is given.
    """
    cluster = _cluster_of(find_device(UNNAMED))
    unknown = f"as {UNNAMED}'s: GPU model unknown; `zero-plugin plan --gpu` takes a name"
    sources = {**cluster.sources, **dict.fromkeys(_DEVICE_FIELDS, unknown)}
    node: dict[str, Any] = {}
    if here is not None:
        node = {name: getattr(here, name) for name in _NODE_FIELDS}
        sources |= {name: here.sources[name] for name in _NODE_FIELDS if name in here.sources}
    return replace(cluster, device_name="", device_bytes=memory_bytes, sources=sources, **node)


def _problem(flag: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(f"--{flag}", "", message, fix)])
