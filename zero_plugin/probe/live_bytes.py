"""Follows the bytes of all tensors that a computation makes, from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["LiveBytes"]

_ASK_DEVICE: Final = torch.ops.prim.device.default
_CONVERT: Final = torch.ops.aten._to_copy.default


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: which storages are alive after each operation. A storage counts once, with all its views.

    Attributes:
        live: bytes alive now.
        after: bytes alive after each operation, in order.
        flops: floating-point operations so far (a multiplication and an addition are two), of those that torch's own
            counter knows: matrix products, convolutions, attention.
        converted: bytes made so far of the tensors apart, in another type.

    Args:
        apart: tensors that do not count, such as parameters.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.after: list[int] = []
        self.flops = 0.0
        self.converted = 0
        self._apart = {tensor.untyped_storage()._cdata: tensor for tensor in apart}
        self._born: dict[int, tuple[int, int]] = {}  # address of a storage → operations before it, bytes

    def born(self, tensor: Tensor) -> int:
        """After how many operations its storage was first seen; -1 for one that does not count."""
        return self._born.get(tensor.untyped_storage()._cdata, (-1, 0))[0]

    def alive(self, begin: int, end: int, apart: Collection[int]) -> int:
        """Bytes alive now of the storages that were first seen from one number of operations to another.

        Args:
            begin, end: numbers of operations.
            apart: addresses of storages that do not count.
        """
        found = ((key, size) for key, (born, size) in self._born.items() if begin <= born < end)
        return sum(size for key, size in found if key not in apart)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it made."""
        kwargs = kwargs or {}
        if func is _ASK_DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, and slow ones
            return args[0].fake_device
        result = func(*args, **kwargs)
        for made in result if isinstance(result, list | tuple) else (result,):
            if isinstance(made, Tensor):
                self._note(made)
        self.after.append(self.live)
        if func is _CONVERT and args[0].untyped_storage()._cdata in self._apart:
            self.converted += result.untyped_storage().nbytes()
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._born and key not in self._apart:
            self.live += size
            self._born[key] = len(self.after), size
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        del self._born[key]
        self.live -= size
