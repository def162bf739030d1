"""The bytes of all tensors while a model is traced, from operation to operation, as a GPU's kernels keep them.

And, worked out from one traced step, what activation checkpointing of its blocks would keep.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zero_plugin.tensors.nested import list_leaves, map_leaves, to_fp32

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


# What CUDA's autocast runs in fp32 and the CPU's does not, of what models are made of (torch's "Automatic Mixed
# Precision package", "CUDA Ops that can autocast to float32").
_WIDE: Final = frozenset(
    (
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss),
        *(F.smooth_l1_loss, F.softplus, F.normalize, F.cosine_similarity, F.binary_cross_entropy_with_logits, F.kl_div),
        *(torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.pow, torch.rsqrt, torch.exp),
        *(torch.log, torch.sum, torch.prod, torch.cumsum, torch.norm, Tensor.softmax, Tensor.log_softmax, Tensor.pow),
        *(Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm),
    )
)
_GROUPED: Final = (getattr(F, "grouped_mm", None), torch._grouped_mm)  # the first is torch 2.10's
_MULTI_HEAD: Final = inspect.signature(F.multi_head_attention_forward)


class DeviceKernels(TorchFunctionMode):
    """While it is entered, operations on CPU tensors keep what CUDA's keep: right in shapes and bytes, not in values.

    * Attention is one kernel, which keeps queries, keys, values, bias, output, and the logarithm of each soft-max in
      fp32 (FlashAttention-2, arXiv:2307.08691; the memory-efficient kernel keeps the same).
    * The product of a mixture's experts counts as one, too.
    * Dropout keeps a mask of one byte per element, where the CPU keeps a tensor of the input's type.
    * Autocast runs in fp32 what CUDA's does.

    Attributes:
        flops: floating-point operations of the attention kernels' forwards; a causal one computes half of the scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, as a GPU would."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # what it calls inside is not seen here
            return _attend_in_heads(*args, **kwargs)
        if func in _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
            return _GroupedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        if func is torch.Tensor.data_ptr:
            return 0  # there is no memory, and a GPU's is aligned, which transformers looks at up to torch 2.10
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
        dropout_p: float = 0.0,  # noqa: ARG002 - the kernels keep a seed
        is_causal: bool = False,
        scale: float | None = None,  # noqa: ARG002
        enable_gqa: bool = False,  # noqa: ARG002
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # each call makes its own bias of the mask
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        self.flops += 2 * scores * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return, no-untyped-call]


class _FusedAttention(torch.autograd.Function):
    """Shapes: query [..., heads, tokens, width], key and value [..., kv_heads, kv_tokens, width]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        *rest, tokens, _ = query.shape
        # tokens outside of heads in memory, as the kernels lay it out: joining the heads then costs no copy
        output = query.new_empty((*rest[:-1], tokens, *rest[-1:], value.shape[-1])).movedim(-2, len(rest) - 1)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logarithms, bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        query, key, value, _, _, bias = ctx.saved_tensors
        wide = torch.empty_like(query, dtype=torch.float32)  # FlashAttention-2 adds the queries' gradient up in fp32
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del wide
        return *made, torch.empty_like(bias) if bias is not None and bias.requires_grad else None


class _GroupedProduct(torch.autograd.Function):
    """The experts' product: rows [tokens, width] in groups, one matrix [groups, width, out] each. For any type.

    Fake tensors know it in bf16 only.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _attend_in_heads(*args: Any, **kwargs: Any) -> Any:
    """`nn.MultiheadAttention` by torch's fused kernel for CPUs, which takes no dropout, unless scores are asked for."""
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    if not call.arguments["need_weights"]:
        call.arguments["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*call.args, **call.kwargs)


def _drop(
    input: Tensor,  # noqa: A002 - torch's name, by which it may be given
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001 - which changes no bytes where something is kept for the backward
    *,
    train: bool | None = None,
) -> Tensor:
    is_active = training if train is None else train
    return torch.native_dropout(input, p, True)[0] if is_active and p > 0 else input


@dataclass(slots=True)
class _Pass:
    """One forward of a block, and its backward. Times are numbers of operations.

    Attributes:
        begin, end: of its forward.
        live: bytes alive when it began.
        inputs: the storages that it was given and no earlier block was, and their bytes.
        outputs: addresses of the storages that it made and returned.
        kept: what only the block's own backward needs: with checkpointing it is freed after use, and made again. When
            that is, and bytes; for weights that autocast converted it is the end of the whole forward.
        backward: when its backward begins; None where no gradient comes.
        lost: bytes of its inputs that died in the forward; with checkpointing they stay, for the second forward.
    """

    begin: int
    live: int
    inputs: list[tuple[weakref.ref[Any], int]]
    end: int = 0
    outputs: frozenset[int] = frozenset()
    kept: list[tuple[int, int]] = field(default_factory=list)
    backward: int | None = None
    lost: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(size for _, size in self.kept)


@dataclass(slots=True)
class BlockPasses:
    """All forwards of the watched blocks in one step, in order.

    Attributes:
        tape: of the step.
        shared: addresses of the storages that something else than a block's own backward needs.
        passes: the forwards.
        forward: operations of the whole forward, once it has ended.
    """

    tape: LiveBytes
    shared: set[int] = field(default_factory=set)
    passes: list[_Pass] = field(default_factory=list)
    forward: int | None = None

    def end_forward(self, outputs: Any) -> None:
        """To be called when the whole forward has ended, with what it returned: later, blocks run a second time."""
        self.forward = len(self.tape.after)
        held = self.shared | {leaf.untyped_storage()._cdata for leaf in _counted(outputs, self.tape)}
        for own in self.passes:
            own.lost = sum(size for storage, size in own.inputs if storage() is None)
            found = self.tape.alive(own.begin, own.end, apart=own.outputs & held)
            own.kept = [(self.forward if kept.converted else kept.used + 1, kept.size) for kept in found]

    def checkpointed(self, saved: int) -> tuple[int, list[int]]:
        """Bytes alive after the forward, and after each operation and each second forward, had all been checkpointed.

        A block's own bytes are absent from the end of its forward to the beginning of its backward, where it runs once
        more; its inputs stay until its backward ends. To be called after the backward.

        Args:
            saved: bytes alive after the forward as it was.
        """
        after = self.tape.after
        # What is alive even now, as a cache of keys, is not made with checkpointing.
        left = [sum(kept.size for kept in self.tape.alive(p.begin, p.end, apart=p.outputs)) for p in self.passes]
        begins = sorted(own.backward for own in self.passes if own.backward is not None)
        changes = [0] * (len(after) + 1)
        for own, cached in zip(self.passes, left, strict=True):
            changes[own.end] += own.lost
            for time, size in own.kept:
                changes[time] -= size
            if own.backward is not None:
                changes[own.backward] += own.kept_bytes
                end = next((begin for begin in begins if begin > own.backward), len(after))
                changes[end] -= own.lost + cached
        totals = list(accumulate(changes))
        alive = [size + total for size, total in zip(after, totals, strict=False)]
        for own, cached in zip(self.passes, left, strict=True):
            if own.backward is not None:
                again = max(after[own.begin : own.end], default=own.live) - own.live - cached
                alive.append(after[own.backward - 1] + totals[own.backward] - own.kept_bytes + again)
        return saved + sum(own.lost - own.kept_bytes for own in self.passes), alive


@contextmanager
def watch_blocks(blocks: Sequence[nn.Module], tape: LiveBytes) -> Iterator[BlockPasses]:
    """Collect each block's forwards and backwards while the tape is entered."""
    found = BlockPasses(tape)
    given: set[tuple[int, int]] = set()
    outside: list[saved_tensors_hooks] = []

    def save(tensor: Tensor) -> Tensor:
        found.shared.add(tensor.untyped_storage()._cdata)
        return tensor

    def step_out() -> None:
        outside.append(saved_tensors_hooks(save, lambda tensor: tensor))
        outside[-1].__enter__()

    def step_in() -> None:
        while outside:
            outside.pop().__exit__()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if found.forward is None:
            step_in()
            inputs = {(leaf.untyped_storage()._cdata, tape.born(leaf)): leaf for leaf in _counted((args, kwargs), tape)}
            storages = [leaf.untyped_storage() for key, leaf in inputs.items() if key not in given]
            given.update(inputs)
            found.shared.update(storage._cdata for storage in storages)
            kept = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
            found.passes.append(_Pass(len(tape.after), tape.live, kept))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if found.forward is not None:
            return
        step_out()
        own = found.passes[-1]
        made = [leaf for leaf in _counted(outputs, tape) if tape.born(leaf) >= own.begin]
        own.end = len(tape.after)
        own.outputs = frozenset(tensor.untyped_storage()._cdata for tensor in made)

        def arrive(_: Tensor) -> None:
            own.backward = len(tape.after)

        differentiable = [tensor for tensor in made if tensor.requires_grad]
        if differentiable:
            differentiable[0].register_hook(arrive)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        stack.callback(step_in)
        step_out()
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield found


def _counted(tree: Any, tape: LiveBytes) -> Iterable[Tensor]:
    return (leaf for leaf in list_leaves(tree) if isinstance(leaf, Tensor) and tape.born(leaf) >= 0)
