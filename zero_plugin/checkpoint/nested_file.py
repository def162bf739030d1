"""Nested Python containers as a JSON file, with their tensors in a safetensors file beside it; no pickle."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from zero_plugin.checkpoint.durable import write_text
from zero_plugin.checkpoint.safetensors_file import DTYPE_NAMES, write_file
from zero_plugin.errors import CheckpointError

__all__ = ["EncodedTree", "encode_nested", "read_nested", "write_nested"]

T = TypeVar("T")

_TYPE: Final = "$type"  # marks what JSON has no form for: {"$type": name, "value": its content}


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """Nested containers as they are written.

    Attributes:
        text: JSON.
        tensors: name in `text` → tensor on the CPU, which may be live memory.
    """

    text: str
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def copy(self) -> EncodedTree:
        """The same in memory of its own."""
        return EncodedTree(self.text, {name: tensor.clone() for name, tensor in self.tensors.items()})

    def write(self, stem: Path) -> None:
        """Write `stem`.json, and the tensors, if any, to `stem`.safetensors."""
        write_text(stem.with_name(f"{stem.name}.json"), self.text)
        if self.tensors:
            write_file(stem.with_name(f"{stem.name}.safetensors"), self.tensors, {"format": "pt"})


def encode_nested(tree: Any, *, what: str) -> EncodedTree:
    """Nested containers as text and tensors.

    They may hold None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Counter, deque, torch
    tensors, shapes, dtypes and devices, NumPy arrays and numbers. Subclasses come back as these.

    Args:
        tree: the containers.
        what: how messages call it.

    Raises:
        CheckpointError: it holds anything else; the message says where, and what.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, what, tensors)
    return EncodedTree(json.dumps(encoded, ensure_ascii=False) + "\n", tensors)


def write_nested(tree: Any, stem: Path, *, what: str) -> None:
    """`encode_nested`, and write it."""
    encode_nested(tree, what=what).write(stem)


def read_nested(stem: Path) -> Any:
    """What `EncodedTree.write` wrote; tensors are on the CPU."""
    encoded = json.loads(stem.with_name(f"{stem.name}.json").read_text(encoding="utf-8"))
    file = stem.with_name(f"{stem.name}.safetensors")
    return _decode(encoded, load_file(file) if file.exists() else {})


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    def all_of(items: Any) -> list[Any]:
        return [_encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(items)]

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _typed("float", repr(float(value)))
    if isinstance(value, Tensor):
        return _typed("tensor", _keep(value, where, tensors))
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value, where, tensors)
    for name, kind, content in _CONTAINERS:
        if isinstance(value, kind):
            return _typed(name, _encode(content(value), where, tensors))
    if isinstance(value, list):
        return all_of(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TYPE not in value:
            return {str(key): _encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
        pairs = [
            [_encode(key, f"{where}, key {key!r}", tensors), _encode(item, f"{where}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return _typed("dict", pairs)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without pickle.\n"
        "Have state_dict() return numbers, texts, tensors, arrays, and lists, tuples, sets or dicts of them."
    )


def _encode_numpy(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    array = np.asarray(value)
    try:
        tensor = torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise CheckpointError(
            f"{where} is a NumPy array of {array.dtype}, which safetensors files cannot hold."
        ) from None
    return _typed("array" if isinstance(value, np.ndarray) else "number", _keep(tensor, where, tensors))


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.layout}, {tensor.dtype}: safetensors files cannot hold it."
        )
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous()
    return name


def _typed(name: str, content: Any) -> dict[str, Any]:
    return {_TYPE: name, "value": content}


# Name, type and what it is written as; a Counter is a dict, so that the order matters.
_CONTAINERS: Final[tuple[tuple[str, Any, Callable[[Any], Any]], ...]] = (
    ("torch.Size", torch.Size, list),
    ("torch.dtype", torch.dtype, lambda dtype: str(dtype).removeprefix("torch.")),
    ("torch.device", torch.device, str),
    ("complex", complex, lambda number: [number.real, number.imag]),
    ("bytes", bytes | bytearray, lambda data: base64.b64encode(data).decode("ascii")),
    ("tuple", tuple, list),
    ("set", set, lambda items: sorted(items, key=repr)),
    ("frozenset", frozenset, lambda items: sorted(items, key=repr)),
    ("deque", deque, lambda items: [list(items), items.maxlen]),
    ("Counter", Counter, dict),
)

_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "torch.Size": torch.Size,
    "torch.dtype": lambda name: getattr(torch, name),
    "torch.device": torch.device,
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda parts: deque(*parts),
    "Counter": Counter,
    "dict": dict,
}


def _decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TYPE not in encoded:
        return {key: _decode(item, tensors) for key, item in encoded.items()}
    name, content = encoded[_TYPE], encoded["value"]
    if name in ("tensor", "array", "number"):
        tensor = tensors[content]
        return tensor if name == "tensor" else tensor.numpy() if name == "array" else tensor.numpy()[()]
    return _DECODERS[name](_decode(content, tensors))
