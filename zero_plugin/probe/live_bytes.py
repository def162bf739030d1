"""Follows the bytes of all tensors that a computation makes, from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["LiveBytes", "Storage"]

_ASK_DEVICE: Final = torch.ops.prim.device.default
_CONVERT: Final = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class Storage:
    """A storage that is alive. Times are numbers of operations.

    Attributes:
        size: bytes.
        born: when it was made.
        used: when an operation last took or gave it.
        converted: whether it is one of the tensors apart in another type.
    """

    size: int
    born: int
    used: int
    converted: bool = False


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: which storages are alive after each operation. A storage counts once, with all its views.

    Attributes:
        live: bytes alive now.
        after: bytes alive after each operation, in order.
        flops: floating-point operations so far (a multiplication and an addition are two), of those that torch's own
            counter knows: matrix products, convolutions, attention.

    Args:
        apart: tensors that do not count, such as parameters.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.after: list[int] = []
        self.flops = 0.0
        self._apart = {tensor.untyped_storage()._cdata: tensor for tensor in apart}
        self._alive: dict[int, Storage] = {}  # by address

    def born(self, tensor: Tensor) -> int:
        """After how many operations its storage was first seen; -1 for one that does not count."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return -1 if found is None else found.born

    def alive(self, begin: int, end: int, apart: Collection[int]) -> list[Storage]:
        """The storages alive now that were first seen from one number of operations to another.

        Args:
            begin, end: numbers of operations.
            apart: addresses of storages that do not count.
        """
        return [found for key, found in self._alive.items() if begin <= found.born < end and key not in apart]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it made."""
        kwargs = kwargs or {}
        if func is _ASK_DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, and slow ones
            return args[0].fake_device
        result = func(*args, **kwargs)
        for taken in args:
            if isinstance(taken, Tensor) and (known := self._alive.get(taken.untyped_storage()._cdata)):
                known.used = len(self.after)
        is_converted = func is _CONVERT and args[0].untyped_storage()._cdata in self._apart
        for made in result if isinstance(result, list | tuple) else (result,):
            if isinstance(made, Tensor):
                self._note(made, is_converted)
        self.after.append(self.live)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result

    def _note(self, tensor: Tensor, is_converted: bool) -> None:
        storage = tensor.untyped_storage()
        key, size, now = storage._cdata, storage.nbytes(), len(self.after)
        if key not in self._alive and key not in self._apart:
            self.live += size
            self._alive[key] = Storage(size, now, now, is_converted)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        del self._alive[key]
        self.live -= size
