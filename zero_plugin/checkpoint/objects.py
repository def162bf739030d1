"""Objects in files, without pickled code.

A single object is written by `torch.save` or as safetensors, and read without running code. Nested Python containers
become a JSON file, with their tensors in a safetensors file next to it. The states of Python's, NumPy's and torch's
random number generators are stored as nested containers.
"""

from __future__ import annotations

import base64
import codecs
import json
import logging
import math
import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from zero_plugin.distributed.collectives import gather_values, num_processes
from zero_plugin.distributed.seeding import set_seed
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.modules import as_dtype
from zero_plugin.tensors.nested import map_leaves
from zero_plugin.tensors.safetensors_files import TYPE_NAMES, encode_header

_logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset((type(None), bool, int, str))  # JSON writes these directly; most stored values are these
_TYPE: Final = "$type"  # marks a type that JSON lacks: {"$type": name, "value": its content}

# Functions and classes that rebuild NumPy arrays, and torch's and NumPy's random states. They hold numbers, not code.
# NumPy 2 has renamed a module, and files may have either name.
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
    """Write an object, on every process that calls this function.

    Args:
        obj: any object that `torch.save` accepts.
        file: a path, or for `torch.save` also a file opened for writing.
        safe_serialization: write a dict of tensors as safetensors, each shared tensor once.
    """
    if safe_serialization:
        save_file(without_shared_tensors(obj), file, metadata={"format": "pt"})
    else:
        torch.save(map_leaves(_portable, obj) if "torch_xla" in sys.modules else obj, file)


def _portable(leaf: Any) -> Any:
    """Move a tensor from an XLA device to the CPU. Otherwise the file could only be read with torch_xla."""
    return leaf.cpu() if isinstance(leaf, Tensor) and leaf.device.type == "xla" else leaf


def read_object(file: str | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of `torch.save` with tensors, NumPy arrays and plain containers.

    Args:
        file: a path, or a file opened for reading.
        map_location: the device for tensors, see `torch.load`.
        **kwargs: further arguments of `torch.load`; `weights_only=False` runs the code in a pickle.
    """
    with torch.serialization.safe_globals(NUMPY_CLASSES):
        return torch.load(file, map_location=map_location, **{"weights_only": True, **kwargs})


def tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and bytes of a tensor's storage. They are equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def without_shared_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict in a form that safetensors can hold: contiguous tensors that share no memory.

    Of identical tensors, only the first name is kept, with a warning. Tensors that share memory otherwise are copied.
    """
    kept: dict[str, Any] = {}
    storages: set[Any] = set()
    removed = names_of_same_memory(tensors)
    for name, tensor in tensors.items():
        if name in removed:
            continue
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor_storage(tensor)
            tensor = tensor.clone().contiguous() if storage in storages else tensor.contiguous()
            storages.add(storage)
        kept[name] = tensor
    if removed:
        _logger.warning(
            f"Removed shared tensors {list(removed)}: each is the same as one that is saved. A model that ties its "
            "weights, such as transformers models, has them again after loading."
        )
    return kept


def names_of_same_memory(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Map the further names of each tensor to its first name, for tensors that have several names."""
    further: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            view = (tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if (kept := first.setdefault(view, name)) != name:
                further[name] = kept
    return further


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """Nested containers in the form in which they are written.

    Attributes:
        text: the containers as JSON.
        tensors: name in `text` → tensor on the CPU, which may share memory with the original.
    """

    text: str
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def copy(self) -> EncodedTree:
        """Return a copy with its own memory."""
        return EncodedTree(self.text, {name: tensor.clone() for name, tensor in self.tensors.items()})

    def write(self, stem: Path) -> None:
        """Write `stem`.json, and the tensors, if any, to `stem`.safetensors."""
        stem.with_name(f"{stem.name}.json").write_text(self.text, encoding="utf-8")
        if self.tensors:
            write_tensors(stem.with_name(f"{stem.name}.safetensors"), self.tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors as safetensors. The library's own writer would build all bytes in memory first."""
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    header, ranges = encode_header(entries, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        for tensor in map(tensors.__getitem__, ranges):
            if tensor.numel():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def encode_nested(tree: Any, *, what: str) -> EncodedTree:
    """Encode nested containers as text and tensors.

    They may hold None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Counter, deque, torch
    tensors, shapes, dtypes and devices, NumPy arrays and numbers. A subclass is read back as its base class.

    Args:
        tree: the containers.
        what: their name in messages.

    Raises:
        CheckpointError: the containers hold another type; the message names its place and type.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, what, tensors)
    return EncodedTree(json.dumps(encoded, ensure_ascii=False) + "\n", tensors)


def read_nested(stem: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Any:
    """Read the files of `EncodedTree.write`. Tensors are on the CPU.

    Args:
        stem: the stem that was given to `EncodedTree.write`.
        read: function that returns the content of a file.

    Raises:
        DamagedError: `EncodedTree.write` cannot have written this content.
        OSError: the JSON file cannot be opened.
    """
    text, file = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.safetensors")
    now = file
    try:
        tensors = load(read(file)) if file.exists() else {}
        now = text
        return _decode(json.loads(read(text).decode("utf-8")), tensors)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise DamagedError(f"{now} cannot be read ({type(error).__name__}: {error}).") from error


def gather_nested(tree: Any, *, what: str) -> list[Any]:
    """Return the nested containers of all processes, process 0's first; see `encode_nested`. Collective."""
    if num_processes() == 1:
        return [tree]
    encoded = encode_nested(tree, what=what)
    tensors = base64.b64encode(save(dict(encoded.tensors))).decode("ascii")
    return [
        _decode(json.loads(text), load(base64.b64decode(data))) for text, data in gather_values([encoded.text, tensors])
    ]


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _typed("float", repr(float(value)))
    if isinstance(value, Tensor):
        return _typed("tensor", _keep(value, where, tensors))
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, bytes):
        return _encode_numpy(value, where, tensors)
    for name, kind, content, _ in _FORMS:
        if isinstance(value, kind):
            return _typed(name, _encode(content(value), where, tensors))
    if isinstance(value, list):
        return [
            item if type(item) in _PLAIN else _encode(item, f"{where}[{index}]", tensors)
            for index, item in enumerate(value)
        ]
    if isinstance(value, Mapping):
        if _TYPE not in value and not [key for key in value if not isinstance(key, str)]:
            return {
                str(key): item if type(item) in _PLAIN else _encode(item, f"{where}[{key!r}]", tensors)
                for key, item in value.items()
            }
        pairs = [
            [_encode(key, f"{where}, key {key!r}", tensors), _encode(item, f"{where}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return _typed("dict", pairs)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without pickle.\n"
        "Have state_dict() return numbers, strings, tensors, arrays, and lists, tuples, sets or dicts of them."
    )


def _encode_numpy(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.ma.MaskedArray):
        raise CheckpointError(f"{where} is a masked NumPy array. Have state_dict() return its data and its mask.")
    array = np.asarray(value)
    try:
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise CheckpointError(
            f"{where} has the NumPy dtype {array.dtype}, which safetensors files cannot hold.\n"
            "Have state_dict() return numbers or strings instead, e.g. by tolist()."
        ) from None
    return _typed("array" if isinstance(value, np.ndarray) else "number", _keep(tensor, where, tensors))


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or str(tensor.dtype) not in TYPE_NAMES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.layout}, {tensor.dtype}: safetensors files cannot hold it."
        )
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous()
    return name


def _typed(name: str, content: Any) -> dict[str, Any]:
    return {_TYPE: name, "value": content}


# Name, class, function to a JSON form, and function back. The order matters: a subclass must come before its base.
_FORMS: Final[tuple[tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any]], ...]] = (
    ("torch.Size", torch.Size, list, torch.Size),
    ("torch.dtype", torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), as_dtype),
    ("torch.device", torch.device, str, torch.device),
    ("complex", complex, lambda number: [number.real, number.imag], lambda parts: complex(*parts)),
    ("bytes", bytes | bytearray, lambda data: base64.b64encode(data).decode("ascii"), base64.b64decode),
    ("tuple", tuple, list, tuple),
    ("set", set, lambda items: sorted(items, key=repr), set),
    ("frozenset", frozenset, lambda items: sorted(items, key=repr), frozenset),
    ("deque", deque, lambda items: [list(items), items.maxlen], lambda parts: deque(*parts)),
    ("Counter", Counter, dict, Counter),
)
_DECODERS: Final = {"float": float, "dict": dict, **{name: decode for name, _, _, decode in _FORMS}}


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


def random_state(own: Sequence[torch.Generator | None] = ()) -> dict[str, Any]:
    """Return the states of this process's random generators, as nested containers of arrays and tensors.

    Args:
        own: further generators that belong to one object each, such as a loader; None for an object without one.
    """
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # Reading the state would create a CUDA context, even in a run on the CPU. So check first if CUDA is in use.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "xla": sys.modules["torch_xla"].core.xla_model.get_rng_state() if "torch_xla" in sys.modules else None,
        "own": [None if generator is None else generator.get_state() for generator in own],
    }


def restore_random_state(
    saved: Sequence[Mapping[str, Any]], rank: int, own: Sequence[torch.Generator | None] = ()
) -> str | None:
    """Restore the random generators from a checkpoint. Return a sentence if the checkpoint lacks this process.

    If all saved processes had equal states, for example after one `set_seed` for all, a new process gets the same
    state. Otherwise it is seeded from a saved process's state and its own rank.

    Args:
        saved: the states of each process that wrote the checkpoint.
        rank: this process's rank.
        own: see `random_state`; a newly seeded process keeps their states.
    """
    if not saved:
        return "random states: there are none in the checkpoint"  # an imported checkpoint
    if rank < len(saved):
        _restore(saved[rank], own)
        return None
    first = saved[0]
    if all(_same(first, other) for other in saved[1:]):
        _restore(first, own)
        return f"the random states of process {rank}, which is not in the checkpoint: it draws like the others"
    other: Tensor = saved[rank % len(saved)]["torch"]
    seed = zlib.crc32(other.numpy().tobytes()) + rank
    set_seed(seed)
    return f"the random states of process {rank}, which is not in the checkpoint: it is seeded with {seed}"


def _restore(state: Mapping[str, Any], own: Sequence[torch.Generator | None]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    # Checkpoints of earlier versions lack the keys `xla` and `own`.
    if state.get("xla") is not None and "torch_xla" in sys.modules:
        sys.modules["torch_xla"].manual_seed(state["xla"])
    for generator, then in zip(own, state.get("own", ()), strict=False):
        if generator is not None and then is not None:
            generator.set_state(then)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        torch.equal(one["torch"], other["torch"])
        and np.array_equal(one["python"][1], other["python"][1])
        and np.array_equal(one["numpy"][1], other["numpy"][1])
    )
