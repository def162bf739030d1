"""GPUs that a plan can be made for without having one: memory, speed by number type, bandwidths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.facts import Precision

__all__ = ["ATTAINABLE", "KNOWN_DEVICES", "KnownDevice", "find_device", "nearest_device"]

# The share of its data sheet's peak that a GPU reaches in training: 0.40-0.41 for Granite-7B on A100s with ZeRO-3 and
# FSDP (Hugging Face's comparison of the two), 50 of 125 TFLOPS on V100s (ZeRO-3 Offload's announcement).
ATTAINABLE: Final = 0.4

_PCIE3, _PCIE4, _PCIE5 = 12e9, 25e9, 55e9  # of 16 lanes, each way, as copies from pinned memory measure


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """One GPU, from its maker's data sheet.

    Attributes:
        name: as `--gpu` takes it.
        mebibytes: memory as `nvidia-smi` shows it, which is a little less than what it is sold with.
        tensor_tflops: dense peak in 16 bits with sums in fp32.
        fp32_tflops: peak in fp32, TF32 off, as torch has it.
        memory_gb_s: gigabytes per second of its memory.
        pcie: bytes per second between it and the host, each way.
        nvlink_gb_s: gigabytes per second to its peers, each way; 0 without NVLink.
        bf16: whether its tensor cores take bf16; else bf16 runs as fp32.
    """

    name: str
    mebibytes: int
    tensor_tflops: float
    fp32_tflops: float
    memory_gb_s: float
    pcie: float
    nvlink_gb_s: float = 0.0
    bf16: bool = True

    @property
    def memory_bytes(self) -> int:
        """Of the whole device."""
        return self.mebibytes * 2**20

    @property
    def flops(self) -> dict[Precision, float]:
        """Operations per second that training reaches, by precision."""
        tensor, single = (ATTAINABLE * tflops * 1e12 for tflops in (self.tensor_tflops, self.fp32_tflops))
        return {"no": single, "bf16": tensor if self.bf16 else single, "fp16": tensor}

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second to a peer; without NVLink a half of PCIe's, as every byte crosses it twice."""
        return self.nvlink_gb_s * 1e9 or self.pcie / 2


KNOWN_DEVICES: Final = (
    KnownDevice("T4", 15360, 65, 8.1, 320, _PCIE3, bf16=False),
    KnownDevice("V100-16GB", 16160, 125, 15.7, 900, _PCIE3, 150, bf16=False),
    KnownDevice("V100-32GB", 32510, 125, 15.7, 900, _PCIE3, 150, bf16=False),
    KnownDevice("A10", 23028, 125, 31.2, 600, _PCIE4),
    KnownDevice("A10G", 23028, 70, 31.5, 600, _PCIE4),
    KnownDevice("L4", 23034, 121, 30.3, 300, _PCIE4),
    KnownDevice("RTX-3090", 24576, 71, 35.6, 936, _PCIE4),
    KnownDevice("RTX-4090", 24564, 165, 82.6, 1008, _PCIE4),
    KnownDevice("RTX-5090", 32607, 209, 104.8, 1792, _PCIE5),
    KnownDevice("A6000", 49140, 155, 38.7, 768, _PCIE4),
    KnownDevice("L40S", 46068, 362, 91.6, 864, _PCIE4),
    KnownDevice("A100-40GB", 40536, 312, 19.5, 1555, _PCIE4, 300),
    KnownDevice("A100-80GB", 81920, 312, 19.5, 2039, _PCIE4, 300),
    KnownDevice("H100-80GB", 81559, 989, 67, 3350, _PCIE5, 450),
    KnownDevice("H200-141GB", 143771, 989, 67, 4800, _PCIE5, 450),
    KnownDevice("B200-180GB", 183359, 2250, 75, 8000, _PCIE5, 900),
)


def find_device(name: str) -> KnownDevice:
    """The GPU of that name, as `--gpu` or a driver writes it: `a100-80gb`, `A100`, `NVIDIA A100-SXM4-80GB`, `rtx4090`.

    Of two that fit a name without a memory size, the smaller is meant.

    Raises:
        ConfigError: the name is not known; the message lists those that are.
    """
    wanted = _words(name)
    found = [device for device in KNOWN_DEVICES if _names(device.name, wanted)]
    if not found:
        known = [device.name for device in KNOWN_DEVICES]
        near = get_close_matches(name.upper(), known, 1, 0.5)
        fix = f"{f'Did you mean {near[0]}? ' if near else ''}Known: {', '.join(known)}. For another write --gpu_memory."
        raise ConfigError([Problem("--gpu", "", f"{name!r} is no GPU that is known here", fix)])
    return found[0]


def nearest_device(memory_bytes: int) -> KnownDevice:
    """Of those that are known, the one whose memory is nearest; of two as near, the slower."""
    return min(KNOWN_DEVICES, key=lambda device: (abs(device.memory_bytes - memory_bytes), device.tensor_tflops))


def _words(name: str) -> set[str]:
    """`NVIDIA GeForce RTX 4090` and `rtx4090` as words to compare; `-80`, `80G` and `80 GB` are all `80gb`."""
    joined = re.sub(r"rtx[\s_-]*(?=\d)", "rtx", name.lower())
    sized = re.sub(r"(?<=[^a-z0-9.])(\d{2,3})(?:\s*gi?b?)?(?![a-z0-9.])", r"\1gb", joined)
    return set(re.findall(r"\d+gb|[a-z]+\d+[a-z]*|\d+", sized))


def _names(known: str, wanted: set[str]) -> bool:
    """Whether the words of a name mean that device: its model's, and its memory's where they tell one."""
    model, *memory = re.sub(r"rtx-", "rtx", known.lower()).split("-")
    told = {word for word in wanted if re.fullmatch(r"\d+gb", word)}
    plain = model.removeprefix("rtx")
    return (model in wanted or (plain != model and plain in wanted)) and (not told or not memory or memory[0] in told)
