"""Saving, unwrapping and small helpers, under the names of `accelerate.utils.other`."""

from __future__ import annotations

import functools
import socket
from typing import IO, Any

from torch import nn

from zero_plugin.checkpoint.objects import read_object, without_shared_tensors, write_object
from zero_plugin.config.amounts import show_bytes
from zero_plugin.launch.flags import write_basic_config as write_basic_config
from zero_plugin.loop.state import PartialState
from zero_plugin.tensors.wrappers import compile_regions as compile_regions
from zero_plugin.tensors.wrappers import extract_model
from zero_plugin.tensors.wrappers import has_compiled_regions as has_compiled_regions
from zero_plugin.tensors.wrappers import is_compiled_module as is_compiled_module
from zero_plugin.utils.lazy import stand_in

clean_state_dict_for_safetensors = without_shared_tensors
convert_bytes = show_bytes


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object with `torch.save` on the main process only.

    Args:
        obj: the object to save.
        f: a path, or a file opened for writing.
        save_on_each_node: save on each machine's main process.
        safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_object(obj, f, safe_serialization=safe_serialization)


def load(f: str | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load the file of a `save`: tensors, NumPy arrays and plain containers, without running pickled code.

    Args:
        f: a path, or a file opened for reading.
        map_location: the device of the tensors, as in `torch.load`.
        **kwargs: for `torch.load`; `weights_only=False` runs the code in a pickle.
    """
    return read_object(f, map_location, **kwargs)


def wait_for_everyone() -> None:
    """Wait until every process has reached this call."""
    PartialState().wait_for_everyone()


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside DDP, DataParallel or a DeepSpeed engine.

    Args:
        model: a wrapped model, or any other.
        keep_fp32_wrapper: keep the forward under autocast. If False, restore the class's own forward: the model can
            then be pickled.
        keep_torch_compile: return a compiled model in its compiled form, with the inner model inside.
        recursive: also unwrap submodules.
    """
    return extract_model(
        model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile, recursive=recursive
    )


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination`, dict by dict, and return `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Get an attribute by a dotted name."""
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a function or class, or of another object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a server answers on this port of this machine; None is 29500, the launcher's own port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
