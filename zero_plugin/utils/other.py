"""Saving, unwrapping and small questions, as `accelerate.utils.other` has them."""

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
    """`torch.save` on the main process only.

    Args:
        obj: what to save.
        f: path, or file opened for writing.
        save_on_each_node: on each machine's main process.
        safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_object(obj, f, safe_serialization=safe_serialization)


def load(f: str | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """What `save` wrote: tensors, NumPy arrays and plain containers, without running pickled code.

    Args:
        f: path, or file opened for reading.
        map_location: where tensors come to, as `torch.load` takes it.
        **kwargs: for `torch.load`; `weights_only=False` runs the code in a pickle.
    """
    return read_object(f, map_location, **kwargs)


def wait_for_everyone() -> None:
    """Return when every process has come here."""
    PartialState().wait_for_everyone()


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The model inside DDP, DataParallel or a DeepSpeed engine.

    Args:
        model: wrapped, or not.
        keep_fp32_wrapper: leave its forward as it is; else the class' own comes back, so that it can be pickled.
        keep_torch_compile: of a compiled model, give the compiled one, with the inner model inside.
        recursive: take submodules out of theirs too.
    """
    return extract_model(
        model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile, recursive=recursive
    )


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put what `source` holds into `destination`, dict by dict, and return that."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`getattr` with a dotted name."""
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """A function's or class' qualified name; of another object, its class'."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something answers on this port of this machine; None is 29500, the launcher's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
