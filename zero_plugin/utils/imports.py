"""Which packages and devices this machine has, as scripts ask: `is_<name>_available()`."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.version import parse

from zero_plugin.config.choices import parse_flag_from_env
from zero_plugin.errors import MachineError
from zero_plugin.machine.xla_runtime import import_torch_xla
from zero_plugin.utils.environment import patch_environment
from zero_plugin.utils.lazy import stand_in

_CALLED_ALIKE: Final = """
    amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib numpy pandas peft pytest sagemaker
    schedulefree swanlab timm torch_xla torchdata torchvision tqdm trackio transformer_engine transformers triton wandb
"""
# What `is_<name>_available` asks for: one of these, installed.
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name.replace("_", "-"),) for name in _CALLED_ALIKE.split()},
    "4bit_bnb": ("bitsandbytes>=0.39.0",),
    "8bit_bnb": ("bitsandbytes>=0.37.2",),
    "aim": ("aim<4",),
    "bnb": ("bitsandbytes",),
    "lomo": ("lomo-optim",),
    "megatron_lm": ("megatron-core>=0.8.0",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "msamp": ("ms-amp",),
    "pynvml": ("nvidia-ml-py", "pynvml"),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "torchao": ("torchao>=0.6.1",),
    "torchdata_stateful_dataloader": ("torchdata>=0.8.0",),
}

# The module that adds the device to torch. The package trains on CUDA and CPU; a script may ask for any.
DEVICES: Final[dict[str, str]] = {
    "hpu": "habana_frameworks.torch",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "neuron": "torch_neuronx",
    "npu": "torch_npu",
    "sdaa": "torch_sdaa",
    "xpu": "torch",
}


def __getattr__(name: str) -> Any:
    asked = name.removeprefix("is_").removesuffix("_available")
    if name == f"is_{asked}_available" and asked in PACKAGES:
        return functools.partial(_is_installed, asked)
    if name == f"is_{asked}_available" and asked in DEVICES:
        return functools.partial(_has_device, asked)
    return stand_in(__name__, name)


def _is_installed(name: str, min_version: str | None = None) -> bool:
    """Whether one of the packages is installed, in a version that serves."""
    for requirement in map(Requirement, PACKAGES[name]):
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(found, prereleases=True):
            return min_version is None or parse(found) >= parse(min_version)
    return False


def _has_device(name: str, *_: bool, **__: bool) -> bool:
    """Whether torch can compute on such a device here; whether a device is there is always looked at."""
    import torch

    try:
        importlib.import_module(DEVICES[name])
    except ImportError:
        return False
    return hasattr(torch, name) and bool(getattr(torch, name).is_available())


def is_cuda_available() -> bool:
    """Whether there is a CUDA GPU, asked of the driver's library, so that processes can still be forked after."""
    import torch

    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether there is an AMD GPU."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple GPU, and torch is no older than `min_version`."""
    import torch

    return parse(torch.__version__) >= parse(min_version) and torch.backends.mps.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with Intel's collectives."""
    import torch

    return torch.distributed.is_available() and torch.distributed.distributed_c10d.is_xccl_available()


def is_torch_distributed_available() -> bool:
    """Whether torch was built with process groups."""
    import torch

    return torch.distributed.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed, and `USE_TORCH_XLA` does not say no; with a check, whether it runs on that."""
    if not (parse_flag_from_env("USE_TORCH_XLA", default=True) and _is_installed("torch_xla")):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    try:
        device: str = import_torch_xla().runtime.device_type()
    except MachineError:  # it is built for another torch, so it runs on nothing
        return False
    return device == "TPU" if check_is_tpu else device in ("GPU", "CUDA")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine computes in bfloat16; CPUs do."""
    import torch

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if is_cuda_available() else True


def is_fp16_available() -> bool:
    """True: torch computes in float16 on CUDA and CPU; DeepSpeed does not on a CPU."""
    return True


def is_fp8_available() -> bool:
    """Whether a package for fp8 is installed; this package itself does not train in it."""
    return any(map(_is_installed, ("msamp", "transformer_engine", "torchao")))


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes is installed with its back ends other than CUDA."""
    return _is_installed("bnb") and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_rich_available() -> bool:
    """Whether rich is installed, and `ACCELERATE_ENABLE_RICH` asks for it."""
    return parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_weights_only_available() -> bool:
    """True: every torch that this package runs with loads without pickled code."""
    return True
