"""Write one object to a file, by `torch.save` or as safetensors, and read it without running pickled code."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_plugin.nested import map_leaves

__all__ = ["NUMPY_CLASSES", "read_object", "tensor_storage", "without_shared_tensors", "write_object"]

_logger = logging.getLogger(__name__)

# What NumPy arrays, and torch's and NumPy's random states, are rebuilt with: numbers, no code. NumPy 2 has renamed a
# module that files name.
_REBUILT = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
NUMPY_CLASSES: list[Any] = [
    np.ndarray,
    np.dtype,
    codecs.encode,
    *(
        (function, f"numpy.{core}.multiarray.{name}")
        for name, function in _REBUILT.items()
        for core in ("core", "_core")
    ),
    *(kind for name in np.dtypes.__all__ if isinstance(kind := getattr(np.dtypes, name), type)),
]


def write_object(obj: Any, file: Any, *, safe_serialization: bool = False) -> None:
    """Write an object, on whichever process calls it.

    Args:
        obj: what `torch.save` takes.
        file: path, or for `torch.save` a file opened for writing.
        safe_serialization: write a dict of tensors as safetensors, each shared one once.
    """
    if safe_serialization:
        save_file(without_shared_tensors(obj), file, metadata={"format": "pt"})
    else:
        torch.save(map_leaves(_portable, obj) if "torch_xla" in sys.modules else obj, file)


def _portable(leaf: Any) -> Any:
    """A tensor on an XLA device in host memory: else nobody could read it without torch_xla."""
    return leaf.cpu() if isinstance(leaf, Tensor) and leaf.device.type == "xla" else leaf


def read_object(file: str | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """What `torch.save` wrote: tensors, NumPy arrays and plain containers.

    Args:
        file: path, or a file opened for reading.
        map_location: where tensors come to, as `torch.load` takes it.
        **kwargs: for `torch.load`; `weights_only=False` runs the code in a pickle.
    """
    with torch.serialization.safe_globals(NUMPY_CLASSES):
        return torch.load(file, map_location=map_location, **{"weights_only": True, **kwargs})


def tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Device, address and bytes of what the tensor's data lie in; equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def without_shared_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The dict as safetensors can hold it: contiguous, each memory once.

    Of tensors that are the same, only the first name is kept, with a warning; different parts of one memory are copied.
    """
    kept: dict[str, Any] = {}
    first: dict[Any, str] = {}
    storages: set[Any] = set()
    removed = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            kept[name] = tensor
            continue
        storage = tensor_storage(tensor)
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in first:
            removed.append(name)
            continue
        first[view] = name
        kept[name] = tensor.clone().contiguous() if storage in storages else tensor.contiguous()
        storages.add(storage)
    if removed:
        _logger.warning(
            f"Removed shared tensors {removed}: each is the same as one that is saved. A model that ties its weights, "
            "as transformers' do, has them again after loading."
        )
    return kept
