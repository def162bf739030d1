"""`is_<name>_available()` for packages and devices, under the names of `accelerate.utils.imports`."""

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
# `is_<name>_available` is True if one of these packages is installed.
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

# The module that adds the device to torch. This package does not train on these devices, but scripts ask for them.
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
    """Return whether one of the packages is installed, in a sufficient version."""
    for requirement in map(Requirement, PACKAGES[name]):
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(found, prereleases=True):
            return min_version is None or parse(found) >= parse(min_version)
    return False


def _has_device(name: str, *_: bool, **__: bool) -> bool:
    """Return whether torch can compute on this kind of device; the device is always checked, whatever the arguments."""
    import torch

    try:
        importlib.import_module(DEVICES[name])
    except ImportError:
        return False
    return hasattr(torch, name) and bool(getattr(torch, name).is_available())


def is_cuda_available() -> bool:
    """Return whether this machine has a CUDA GPU; processes can still be forked afterwards."""
    import torch

    # With this variable torch asks the driver's library (NVML), and does not initialize CUDA.
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether this machine has an AMD GPU."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether this machine has an Apple GPU, and torch is not older than `min_version`."""
    import torch

    return parse(torch.__version__) >= parse(min_version) and torch.backends.mps.is_available()


def is_xccl_available() -> bool:
    """Return whether torch was built with Intel's collectives."""
    import torch

    return torch.distributed.is_available() and torch.distributed.distributed_c10d.is_xccl_available()


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with process groups."""
    import torch

    return torch.distributed.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and `USE_TORCH_XLA` is not off; with a check, whether it runs on that."""
    if not (parse_flag_from_env("USE_TORCH_XLA", default=True) and _is_installed("torch_xla")):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    try:
        device: str = import_torch_xla().runtime.device_type()
    except MachineError:  # torch_xla is built for another torch release, and cannot run
        return False
    return device == "TPU" if check_is_tpu else device in ("GPU", "CUDA")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine computes in bfloat16; CPUs do."""
    import torch

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if is_cuda_available() else True


def is_fp16_available() -> bool:
    """Return True: torch computes in float16 on CUDA and CPU. DeepSpeed does not on a CPU."""
    return True


def is_fp8_available() -> bool:
    """Return whether a package for fp8 is installed; this package itself does not train in fp8."""
    return any(map(_is_installed, ("msamp", "transformer_engine", "torchao")))


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed with backends other than CUDA."""
    return _is_installed("bnb") and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_rich_available() -> bool:
    """Return whether `ACCELERATE_ENABLE_RICH` requests rich, which is always installed."""
    return parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_weights_only_available() -> bool:
    """Return True: every supported torch release can load without pickled code."""
    return True
