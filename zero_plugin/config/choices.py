"""Words that scripts choose from and compare with, as `accelerate.utils` has them.

Members show as their own text under `str`. `DistributedType` says how the processes of a run work together.
"""

from __future__ import annotations

import os
from enum import Enum, EnumMeta
from typing import Literal, cast

Checks = Literal["all", "start", "off"]  # which mistakes of a script are looked for while it trains


class EnumWithContains(EnumMeta):
    """Lets `"bf16" in PrecisionType` ask for a value, which Python 3.10 and 3.11 refuse."""

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration whose members show as their values."""

    def __str__(self) -> str:
        return cast(str, self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values."""
        return [str(member) for member in cls]


class PrecisionType(str, BaseEnum):
    """What a model computes in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(BaseEnum):
    """Experiment trackers; `ALL` is every one that is installed."""

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
    """Random number generators that processes can be given the same state of; `GENERATOR` is a loader's own."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    GENERATOR = "generator"


class DynamoBackend(str, BaseEnum):
    """Compilers behind `torch.compile`; `NO` compiles nothing."""

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
    """What DDP does to gradients on their way between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class ComputeEnvironment(str, Enum):
    """Where a launch configuration says it runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


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


TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on, 1, and 0 for n, no, f, false, off, 0, in any case; True and False with `to_bool`.

    Raises:
        ValueError: another word.
    """
    word = value.lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(f"invalid truth value {value!r}; write one of {', '.join(TRUE_WORDS + FALSE_WORDS)}")
    return word in TRUE_WORDS if to_bool else int(word in TRUE_WORDS)


def is_switched_on(variable: str) -> bool:
    """Whether the environment variable holds a word for true; another word is none for false, and no error."""
    return os.environ.get(variable, "").strip().lower() in TRUE_WORDS


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable as `str_to_bool` reads it.

    Raises:
        ValueError: it is none of the words for true and false.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))
