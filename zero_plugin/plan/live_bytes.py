"""Tracks which bytes are alive during one step on tensors without memory, with a GPU's kernels instead of the CPU's."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zero_plugin.tensors.nested import map_leaves, to_fp32

_ASK_DEVICE: Final = torch.ops.prim.device.default
_CONVERT: Final = torch.ops.aten._to_copy.default
_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default
_STEPS: Final = (64, 128)  # lengths at which `_recurrent_workspace` measures, to extrapolate to any number of steps
_ENTER_HOOKS: Final = saved_tensors_hooks.__enter__
_EXIT_HOOKS: Final = saved_tensors_hooks.__exit__


@dataclass(slots=True)
class Storage:
    """A storage that is alive. Times are numbers of operations.

    Attributes:
        size: bytes.
        born: when it was created.
        used: when an operation last read or returned it.
        converted: whether it is a copy, in another dtype, of a tensor that does not count (see `LiveBytes`).
    """

    size: int
    born: int
    used: int
    converted: bool = False


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the bytes alive after each operation. A storage counts once, with all its views.

    Attributes:
        live: bytes alive now.
        after: bytes alive after each operation, in order.
        flops: floating-point operations so far (a multiplication and an addition are two). Only operations that torch's
            own counter knows count: matrix products, convolutions, attention.
        moved: bytes that `save_on_cpu` holds now; see `enter_hooks`.
        has_cpu: whether `save_on_cpu` was entered.
        hooks: number of `saved_tensors_hooks` that are entered now.

    Args:
        apart: tensors that do not count, such as parameters.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.after: list[int] = []
        self.flops = 0.0
        self.moved = 0
        self.has_cpu = False
        self.hooks = 0
        self._apart = {tensor.untyped_storage()._cdata: tensor for tensor in apart}
        self._alive: dict[int, Storage] = {}  # by address

    def born(self, tensor: Tensor) -> int:
        """Return after how many operations the tensor's storage was first seen; -1 if it does not count."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return -1 if found is None else found.born

    def alive(self, begin: int, end: int, apart: Collection[int]) -> list[Storage]:
        """Return the storages alive now that were first seen between two numbers of operations.

        Args:
            begin, end: numbers of operations.
            apart: addresses of storages that do not count.
        """
        return [found for key, found in self._alive.items() if begin <= found.born < end and key not in apart]

    def enter_hooks(self, hooks: saved_tensors_hooks) -> None:
        """Replace `saved_tensors_hooks.__enter__`: what `save_on_cpu` saves is freed until the backward needs it again.

        Without this, `save_on_cpu` would move nothing, since fake tensors are on the CPU.
        """
        if isinstance(hooks, save_on_cpu):
            self.has_cpu = True
            hooks = saved_tensors_hooks(self._move, lambda comes_back: comes_back())
        self.hooks += 1
        _ENTER_HOOKS(hooks)

    def exit_hooks(self, hooks: saved_tensors_hooks, *error: object) -> None:
        """Replace `saved_tensors_hooks.__exit__`."""
        self.hooks -= 1
        _EXIT_HOOKS(hooks, *error)

    def _move(self, tensor: Tensor) -> Callable[[], Tensor]:
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.numel() * tensor.element_size()
        is_dense = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) == tensor.numel()
        comes_back = partial(torch.empty_strided, shape, strides) if is_dense else partial(torch.empty, shape)
        moved = partial(comes_back, dtype=tensor.dtype)
        self.moved += size
        weakref.finalize(moved, self._come_back, size)
        return moved

    def _come_back(self, size: int) -> None:
        self.moved -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storages of its results."""
        kwargs = kwargs or {}
        if func is _ASK_DEVICE and isinstance(args[0], FakeTensor):  # two of three calls; torch's own answer is slow
            return args[0].fake_device
        result = func(*args, **kwargs)
        if func is _RECURRENT:
            result = (*result[:3], torch.empty(_recurrent_workspace(*args), dtype=torch.uint8))
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


def _recurrent_workspace(rows: Tensor, *args: Any) -> int:
    """Return the bytes that an LSTM layer keeps in addition to its output.

    A kernel on fake tensors does not report them. They are those of torch's CPU kernel, measured with few steps and
    extrapolated. cuDNN does not report its workspace.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in (rows[0], *args[:6]))
    settings = tuple(tuple(value) if isinstance(value, list) else value for value in args[6:])
    few, more = (_workspace_of(steps, shapes, settings) for steps in _STEPS)
    return few + (more - few) * (rows.shape[0] - _STEPS[0]) // (_STEPS[1] - _STEPS[0])


@lru_cache(maxsize=256)
def _workspace_of(steps: int, shapes: tuple[tuple[int, ...], ...], settings: tuple[Any, ...]) -> int:
    with unset_fake_temporarily():
        tensors = (torch.zeros(steps, *shapes[0]), *map(torch.zeros, shapes[1:]))
        return _RECURRENT(*tensors, *settings)[3].numel()  # type: ignore[no-any-return]


# Functions used in models that CUDA's autocast runs in fp32 and the CPU's does not (torch's "Automatic Mixed Precision
# package", "CUDA Ops that can autocast to float32").
_WIDE: Final = frozenset(
    (
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss),
        *(F.smooth_l1_loss, F.softplus, F.normalize, F.cosine_similarity, F.binary_cross_entropy_with_logits, F.kl_div),
        *(torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.pow, torch.rsqrt, torch.exp),
        *(torch.log, torch.sum, torch.prod, torch.cumsum, torch.norm, Tensor.softmax, Tensor.log_softmax, Tensor.pow),
        *(Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm),
    )
)
_GROUPED: Final = (getattr(F, "grouped_mm", None), torch._grouped_mm)  # torch 2.10 added the first
_MULTI_HEAD: Final = inspect.signature(F.multi_head_attention_forward)


class DeviceKernels(TorchFunctionMode):
    """Mode in which operations on CPU tensors keep what CUDA's keep: shapes and bytes are right, values are not.

    * Attention is one kernel. It keeps queries, keys, values, bias, output, and the logarithm of each soft-max in fp32
      (FlashAttention-2, arXiv:2307.08691; the memory-efficient kernel keeps the same).
    * The product of a mixture's experts is one kernel too.
    * Dropout keeps a mask of one byte per element; the CPU keeps a tensor of the input's dtype.
    * Autocast runs the same functions in fp32 as CUDA's.

    Attributes:
        flops: floating-point operations of the attention kernels' forwards and of the experts' products. Causal
            attention computes half of the scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function as a GPU would."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # this mode does not see the calls inside
            return _attend_in_heads(*args, **kwargs)
        if func in _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
            return _GroupedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        if func is torch.Tensor.data_ptr:
            return 0  # no memory exists; a GPU's is aligned, which transformers checks up to torch 2.10
        if func in (F.dropout, torch.dropout):
            return _drop(*args, **kwargs)
        if func in _WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = map_leaves(to_fp32, args), map_leaves(to_fp32, kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.shape[:-2] != key.shape[:-2] and not enable_gqa:  # no fused kernel repeats keys unless requested
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # each call builds its own bias from the mask
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        self.flops += 2 * scores * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return, no-untyped-call]


class _FusedAttention(torch.autograd.Function):
    """A fused attention kernel.

    Shapes: query [..., heads, tokens, size], key and value [..., kv_heads, kv_tokens, size].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        *rest, tokens, width = query.shape
        if bias is None and value.shape[-1] == width:
            output = torch.empty_like(query)  # FlashAttention's output has the layout of the queries
        else:  # tokens are outside of heads in memory: joining the heads needs no copy
            output = query.new_empty((*rest[:-1], tokens, *rest[-1:], value.shape[-1])).movedim(-2, len(rest) - 1)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logarithms, bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        query, key, value, _, _, bias = ctx.saved_tensors
        wide = torch.empty_like(query, dtype=torch.float32)  # FlashAttention-2 sums the queries' gradient in fp32
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del wide
        return *made, torch.empty_like(bias) if bias is not None and bias.requires_grad else None


class _GroupedProduct(torch.autograd.Function):
    """The experts' product: rows [tokens, size] in groups, one matrix [size, out] per group. Works for any dtype.

    torch's own operation supports only bf16 on fake tensors.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _attend_in_heads(*args: Any, **kwargs: Any) -> Any:
    """Run `nn.MultiheadAttention` with torch's fused CPU kernel unless scores are requested.

    That kernel takes no dropout.
    """
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    if not call.arguments["need_weights"]:
        call.arguments["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*call.args, **call.kwargs)


def _drop(
    input: Tensor,  # noqa: A002 - torch's name; a caller may pass it as a keyword
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001 - it changes no bytes if something is kept for the backward
    *,
    train: bool | None = None,
) -> Tensor:
    is_active = training if train is None else train
    return torch.native_dropout(input, p, True)[0] if is_active and p > 0 else input
