"""Enumerations and truth words that scripts choose from and compare with, compatible with `accelerate.utils`.

`str` of a member returns its value. `DistributedType` names how the processes of a run work together.
"""

from __future__ import annotations

import os
from enum import Enum, EnumMeta
from typing import Literal, cast

Checks = Literal["all", "start", "off"]  # how long the run looks for mistakes in the training loop


class EnumWithContains(EnumMeta):
    """Metaclass that allows `"bf16" in PrecisionType`, which Python 3.10 and 3.11 refuse."""

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration whose members print as their values."""

    def __str__(self) -> str:
        return cast(str, self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return all values."""
        return [str(member) for member in cls]


class PrecisionType(str, BaseEnum):
    """The dtype that a model computes in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(BaseEnum):
    """Experiment trackers. `ALL` means every installed one."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"


class RNGType(BaseEnum):
    """Random number generators whose state processes can share. `GENERATOR` is the loader's own."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    GENERATOR = "generator"


class DynamoBackend(str, BaseEnum):
    """Compilers behind `torch.compile`. `NO` compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(BaseEnum):
    """DDP's compression of gradients on their way between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class ComputeEnvironment(str, Enum):
    """The place where a launch configuration runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DistributedType(str, Enum):
    """The way in which the processes of a run work together.

    A run is `NO`, `MULTI_CPU`, `MULTI_GPU`, `DEEPSPEED` or `XLA`. No run has one of the others. They exist because
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


TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for y, yes, t, true, on, 1, and 0 for n, no, f, false, off, 0, in any case; a bool with `to_bool`.

    Raises:
        ValueError: the value is another word.
    """
    word = value.lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(f"invalid truth value {value!r}; write one of {', '.join(TRUE_WORDS + FALSE_WORDS)}")
    return word in TRUE_WORDS if to_bool else int(word in TRUE_WORDS)


def is_switched_on(variable: str) -> bool:
    """Return whether the environment variable holds a word for true. Any other word counts as false, without error."""
    return os.environ.get(variable, "").strip().lower() in TRUE_WORDS


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the environment variable as `str_to_bool` reads it.

    Raises:
        ValueError: the variable holds no word for true or false.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))
