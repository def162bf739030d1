"""How the processes of a run work together, by the names that scripts compare with."""

from __future__ import annotations

from enum import Enum

__all__ = ["DistributedType"]


class DistributedType(str, Enum):
    """How the processes of a run work together.

    A run is `NO`, `MULTI_CPU`, `MULTI_GPU`, `DEEPSPEED` or `XLA`. The others are never a run's; they are here because
    scripts written for Accelerate compare with them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    XLA = "XLA"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
