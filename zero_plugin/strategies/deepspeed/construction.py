"""Gather the partitioned parameters of submodules that the constructor of a module uses under `zero.Init`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.overrides import TorchFunctionMode

# Up to this number of elements stay gathered until the constructor that uses them has ended.
_KEPT_ELEMENTS: Final = 2**26
_TENSOR: Final[Any] = torch.Tensor  # Any, because mypy takes the attributes for values
# Functions that answer for a partitioned parameter without a gather.
_SHAPES: Final[dict[Any, Callable[..., Any]]] = {
    _TENSOR.shape.__get__: lambda p: p.ds_shape,
    _TENSOR.ndim.__get__: lambda p: len(p.ds_shape),
    _TENSOR.dim: lambda p: len(p.ds_shape),
    _TENSOR.ndimension: lambda p: len(p.ds_shape),
    _TENSOR.size: lambda p, dim=None: p.ds_shape if dim is None else p.ds_shape[dim],
    _TENSOR.numel: lambda p: p.ds_numel,
    _TENSOR.nelement: lambda p: p.ds_numel,
    torch.numel: lambda p: p.ds_numel,
}
# Functions whose result is the same for a partitioned parameter.
_FACTS: Final = frozenset(
    [
        *(
            getattr(_TENSOR, name).__get__
            for name in ("dtype", "device", "is_meta", "is_leaf", "requires_grad", "grad")
        ),
        *(getattr(_TENSOR, name).__set__ for name in ("requires_grad", "grad")),
        *(_TENSOR.requires_grad_, _TENSOR.is_floating_point, torch.is_floating_point),
    ]
)


class UsedByConstructors(TorchFunctionMode):
    """A mode that gathers partitioned parameters that a constructor uses, until the next module is constructed.

    `zero.Init` partitions the parameters of each module at the end of its constructor. The constructor of the module
    around it would then find empty tensors: `nn.Transformer` and nanoGPT initialize them again, without effect, and
    `nn.TransformerEncoder` copies them. This mode gathers a parameter at its use, and keeps the values that rank 0
    writes. Its shape is known without a gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gathered: list[Any] = []
        self._is_paused = False  # while DeepSpeed partitions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = [] if self._is_paused else list(_partitioned_in((*args, *kwargs.values())))
        if used and func in _SHAPES:
            return _SHAPES[func](*args, **kwargs)
        # DeepSpeed frees a parameter by giving it an empty tensor.
        frees = func is _TENSOR.data.__set__ and not args[1].numel()
        if used and func not in _FACTS and not frees:
            if sum(p.ds_numel for p in self._gathered) > _KEPT_ELEMENTS:
                self.release()
            used[0].all_gather(param_list=used)
            self._gathered += used
        return func(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Partition the gathered parameters again, and gather none inside this context."""
        self.release()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def release(self) -> None:
        """Partition the parameters again. Collective."""
        was_paused, self._is_paused = self._is_paused, True
        # Not parameters that `Module.apply`, or a context of the script, has partitioned again.
        left = [p for p in self._gathered if p.ds_status is ZeroParamStatus.AVAILABLE]
        self._gathered = []
        with zero.GatheredParameters(left, modifier_rank=0):
            pass
        self._is_paused = was_paused

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is None:
            self.release()


def _partitioned_in(values: Iterable[Any]) -> Iterator[Any]:
    """Return the partitioned parameters among the arguments of a function, each once."""
    found: dict[int, Any] = {}
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= {id(p): p for p in _partitioned_in(value)}
        elif isinstance(value, nn.Parameter) and getattr(value, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
            found[id(value)] = value
    return iter(found.values())
