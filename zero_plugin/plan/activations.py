"""Traces what a model keeps from the forward to the backward, with tensors that have no memory.

Counted are the bytes of all tensors from operation to operation, as a GPU's kernels keep them; and, worked out from one
traced step, what activation checkpointing of the model's blocks would keep.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, wraps
from itertools import accumulate, chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from zero_plugin.config.resolve.facts import Precision
from zero_plugin.distributed.messages import working
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.long_context.chunks import chunk_layer
from zero_plugin.plan.blocks import Trace, repeated_blocks, trace_few
from zero_plugin.plan.decoder import decoder_activations
from zero_plugin.plan.model_source import (
    Example,
    example_inputs,
    forward_arguments,
    full_shape,
    is_expert,
    usual_length,
)
from zero_plugin.plan.situation import Activations, Affine, Highest, ModelSizes, highest
from zero_plugin.tensors.nested import list_leaves, map_leaves, to_fp32

_SAMPLES: Final = (2, 3)  # not 1, which some operations and models treat apart
_TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CHUNKS: Final = 4  # of an MLP, in `trace_changes`
_UNKNOWN_MARGIN: Final = 0.35  # see `Activations.margin`


def trace_activations(
    model: nn.Module, example: Example | Callable[[int], Example], precision: Precision = "bf16"
) -> Activations:
    """What one forward of `model` keeps for its backward, traced at two micro-batches without memory for tensors.

    Both passes run in training mode on torch's fake tensors, with a GPU's kernels (see `DeviceKernels`). The outputs,
    in fp32, and the loss live until the backward ends, as in most loops. A parameter's gradient dies when it is made,
    since the plan counts gradients by themselves. The model stays as it is. What the working space is made of grows at
    different rates: every operation has its line, and the highest ones are kept. Of a row of like blocks few are traced
    (`trace_few`).

    Args:
        model: any module; its parameters may be on `meta` or partitioned (`ds_shape`).
        example: keyword arguments, positional ones or one tensor, of any number of samples along the first dimension;
            or a function from a number of samples to them. Without a scalar or a `loss` among the outputs, a
            cross-entropy over each is taken.
        precision: of the computation. What is returned has all weights in it, as under ZeRO; its `autocast` has the
            weights as they are.

    Raises:
        ConfigError: the model cannot be traced: the example does not fit, or the forward asks for a tensor's values.
    """
    make = example if callable(example) else _resizer(_without_idle_mask(model, example))

    def trace(*, autocast: bool) -> Activations:
        dtype = None if autocast else _TYPES.get(precision)
        regime = torch.autocast("cpu", _TYPES[precision]) if autocast else nullcontext()

        def trace_with(samples: int) -> Trace:
            run = partial(_trace, model, make(samples), dtype, regime)
            return trace_few(model, run) or run()

        return _affine(*map(trace_with, _SAMPLES))

    log = logging.getLogger("torch._subclasses.fake_tensor")  # of wrong shapes, whose error is reported anyway
    try:
        with working(f"tracing a step of the {type(model).__name__}"), _replaced(log, "disabled", True):
            found = replace(trace(autocast=False), sample_length=_sequence_length(make(1)) or 1)
            if precision == "no":
                return found
            return replace(found, autocast=replace(trace(autocast=True), sample_length=found.sample_length))
    except Exception as error:  # anything may come of a forward that meets tensors without values
        reason = (str(error).splitlines() or [""])[0]
        message = f"{type(model).__name__} cannot be traced: {type(error).__name__}: {reason}"
        fix = "Give inputs that its forward takes; a forward that looks at values has to be planned by its sizes."
        raise ConfigError([Problem("plan", "", message, fix)]) from error


def find_activations(
    model: nn.Module, sizes: ModelSizes, batch: Any, precision: Precision, *, guesses: bool = False
) -> Activations:
    """What a forward keeps: traced, else by formula, else unknown.

    Args:
        model: the user's module.
        sizes: its own.
        batch: as the loop's are; None where there is none.
        precision: of the computation.
        guesses: whether samples of a usual length stand for the loop's, where there is no batch to look at.
    """
    for example in forward_arguments(model, batch):
        try:
            return trace_activations(model, example, precision)
        except ConfigError:  # noqa: PERF203 - not the arguments that the loop passes
            continue
    length, why = _sequence_length(batch), ""
    if guesses and not length:
        length, why = usual_length(getattr(model, "config", None)), ", as no DataLoader shows what a sample is"
        with suppress(ConfigError):
            found = trace_activations(model, example_inputs(model, length), precision)
            return replace(found, source=f"{found.source} of inputs from model.config{why}")
    if length and sizes.hidden_size and sizes.layers and sizes.vocabulary:
        found = decoder_activations(sizes, length, precision)
        return replace(found, source=f"{found.source}{why}")
    source = f"unknown, so that {_UNKNOWN_MARGIN:.0%} of the memory stay free for them"
    return Activations(source=source, margin=_UNKNOWN_MARGIN)


def trace_changes(model: nn.Module, trace: Callable[[], Activations]) -> dict[str, Activations]:
    """What a forward would keep after each of two changes that a user can make, by what to write for it.

    They are made in the model itself, which is then traced, and undone. Its MLPs are the modules of that name in
    repeated blocks, as in most models of transformers; no mixture of experts, and none that has another forward.

    Args:
        model: the user's module.
        trace: of the model, as it is when called; a change that raises `ConfigError` there is left out.
    """
    blocks, found = repeated_blocks(model), {}
    if mlps := [mlp for block in blocks for name, mlp in block.named_children() if name == "mlp" and _is_plain(mlp)]:
        with _restored(mlps), suppress(ConfigError):
            for mlp in mlps:
                chunk_layer(mlp, _CHUNKS)
            found[f"chunk_layer(block.mlp, {_CHUNKS}) of zero_plugin.long_context for every block"] = trace()
    if blocks:
        by_itself = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())  # transformers
        with _restored([model, *blocks]), suppress(ConfigError):
            for block in () if by_itself else blocks:
                block.forward = wraps(block.forward)(partial(checkpoint, block.forward, use_reentrant=False))
            model.forward = _saving_on_cpu(model.forward)
            found["activation checkpointing under torch.autograd.graph.save_on_cpu(pin_memory=True)"] = trace()
    return found


def _is_plain(mlp: nn.Module) -> bool:
    """Whether it has the forward of its class, and no expert is a part of it."""
    return "forward" not in vars(mlp) and not any(is_expert(name) for name, _ in mlp.named_parameters())


def _saving_on_cpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules their own attributes again afterwards."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _sequence_length(batch: Any) -> int:
    """Tokens of one sample: of the first matrix of integers in the batch; 0 where there is none."""
    matrices = (leaf for leaf in list_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() == 2)
    return next((leaf.shape[1] for leaf in matrices if not leaf.is_floating_point()), 0)


def _trace(model: nn.Module, example: Example, dtype: torch.dtype | None, regime: AbstractContextManager[Any]) -> Trace:
    """One step with all weights in `dtype`, or as they are, and the forward under `regime`."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kernels = DeviceKernels()

    def narrowed(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def step(run: Callable[[Any], Any]) -> Trace:
        with (
            LiveBytes(weights.values()) as tape,
            watch_blocks(repeated_blocks(model), tape) as blocks,
            _replaced(saved_tensors_hooks, "__enter__", lambda hooks: tape.enter_hooks(hooks)),
        ):
            batch = map_leaves(_fake, example)  # which the loop holds, beside what the model gets
            with regime:
                outputs = run(map_leaves(narrowed, batch))
            outputs = map_leaves(to_fp32, outputs)
            loss = _loss(outputs)
            saved, moved, flops, forward = tape.live, tape.moved, tape.flops + kernels.flops, len(tape.after)
            blocks.end_forward(outputs)
            # Not torch.autograd.backward, during which torch suspends `DeviceKernels`: forwards that checkpoints run
            # again there need it.
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            found = Trace(saved, flops, (tape.after[:forward], tape.after[forward:]), moved=moved)
            if not blocks.passes or tape.has_cpu:
                return found
            return replace(found, checkpointed=blocks.checkpointed(found))

    with fake, kernels, torch.enable_grad(), _training(model), _no_packing():
        weights: dict[str, Tensor] = {
            name: nn.Parameter(narrowed(_fake(parameter)), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        for parameter in weights.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        weights |= {name: _fake(buffer) for name, buffer in model.named_buffers()}
        state = {f"model.{name}": tensor for name, tensor in weights.items()}
        return functional_call(_Step(model), state, (step,))  # type: ignore[no-any-return]


class _Step(nn.Module):
    """Calls a function with the model while other tensors stand in for its parameters, in the backward too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: Callable[[Callable[[Any], Any]], Trace]) -> Trace:
        return step(self._run)

    def _run(self, example: Any) -> Any:
        if isinstance(example, Mapping):
            return self.model(**example)
        return self.model(*example) if isinstance(example, list | tuple) else self.model(example)


def _affine(two: Trace, three: Trace) -> Activations:
    """The lines through the traces of two samples and of three."""
    saved, transient = _lines(two, three, slice(None))
    flops = three.flops - two.flops
    moved = _line(two.moved, three.moved)
    found = Activations(saved, transient, moved=moved, flops_per_sample=flops, source="traced at micro-batches 2 and 3")
    if two.checkpointed is None or three.checkpointed is None:
        return found
    line, forward = _lines(two.checkpointed, three.checkpointed, slice(1))
    _, backward = _lines(two.checkpointed, three.checkpointed, slice(1, None))
    return replace(found, checkpointed=line, checkpointed_transient=backward, checkpointed_forward=forward)


def _lines(two: Trace, three: Trace, courses: slice) -> tuple[Affine, Highest]:
    """Of the bytes saved, and of the most above them. Each operation has its line; the batch tells which is highest."""
    kept = _line(two.saved, three.saved)
    after, after_of_three = (list(chain(*found.courses[courses])) for found in (two, three))
    if len(after) != len(after_of_three):  # the forward takes another way with three samples
        after, after_of_three = [max(after)], [max(after_of_three)]
    alive = map(_line, after, after_of_three)
    above = (Affine(line.fixed - kept.fixed, line.per_sample - kept.per_sample) for line in alive)
    return kept, highest([Affine(), *above])


def _line(two: int, three: int) -> Affine:
    return Affine(3 * two - 2 * three, three - two)


def _without_idle_mask(model: nn.Module, example: Example) -> Example:
    """The example without a padding mask of ones, which transformers drops if it can read its values."""
    if isinstance(example, Mapping) and hasattr(model, "main_input_name"):
        mask = example.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.device.type != "meta" and bool(mask.all()):
            return {**example, "attention_mask": None}
    return example


def _resizer(example: Example) -> Callable[[int], Example]:
    """From a number of samples to an example like this one; its own number is the commonest first dimension."""
    firsts = Counter(leaf.shape[0] for leaf in list_leaves(example) if isinstance(leaf, Tensor) and leaf.dim())
    batch = max(firsts, key=lambda length: firsts[length], default=1)

    def resize(samples: int) -> Any:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch:
                return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
            return leaf

        return map_leaves(change, example)

    return resize


def _loss(outputs: Any) -> Tensor:
    """A scalar to run the backward from.

    It is the `loss` among the outputs, else their first scalar. If they have neither, `log_softmax` of every output
    replaces the cross-entropy that a script would compute: it needs about the same memory.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [leaf for leaf in list_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in found if leaf.dim() == 0]
    losses = scalars[:1] or [torch.log_softmax(leaf, -1).mean() for leaf in found]
    if not losses:
        raise ValueError("no output has a gradient")
    return torch.stack(losses).sum()


def _fake(leaf: Any) -> Any:
    """A tensor on the CPU, unpartitioned; under fake tensors one without memory."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(full_shape(leaf), dtype=leaf.dtype, device="cpu")


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _no_packing() -> AbstractContextManager[None]:
    """Have transformers take samples for one sequence each, which it otherwise reads from the positions' values.

    Of a fake tensor it takes the worst, and makes a mask of `tokens²` where a training run has none.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    return _replaced(masking, name, lambda *_args, **_kwargs: None) if hasattr(masking, name) else nullcontext()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_ASK_DEVICE: Final = torch.ops.prim.device.default
_CONVERT: Final = torch.ops.aten._to_copy.default
_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default
_STEPS: Final = (64, 128)
_ENTER_HOOKS: Final = saved_tensors_hooks.__enter__


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
        moved: bytes that `save_on_cpu` holds now; see `enter_hooks`.
        has_cpu: whether `save_on_cpu` was entered.

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

    def enter_hooks(self, hooks: saved_tensors_hooks) -> None:
        """In place of `saved_tensors_hooks.__enter__`: what `save_on_cpu` takes is gone until it comes back.

        By itself it would move nothing, since fake tensors are a CPU's.
        """
        if isinstance(hooks, save_on_cpu):
            self.has_cpu = True
            hooks = saved_tensors_hooks(self._move, lambda comes_back: comes_back())
        _ENTER_HOOKS(hooks)

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
        """Run an operation, and look at what it made."""
        kwargs = kwargs or {}
        if func is _ASK_DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, and slow ones
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
    """Bytes that a layer of an LSTM keeps beside its output, of which a kernel on fake tensors says nothing.

    It is what torch's kernel for CPUs keeps, of which the size is asked with few steps; what cuDNN keeps, nobody tells.
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
        **_: Any,  # a scale, and whether heads share their keys, change no bytes
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
    """`nn.MultiheadAttention` by torch's fused kernel for CPUs, which takes no dropout, unless scores are requested."""
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
            that is, and bytes; for weights that autocast converted it is the end of the complete forward.
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
        forward: operations of the complete forward, once it has ended.
    """

    tape: LiveBytes
    shared: set[int] = field(default_factory=set)
    passes: list[_Pass] = field(default_factory=list)
    forward: int | None = None

    def end_forward(self, outputs: Any) -> None:
        """To be called with the outputs when the complete forward has ended: later, blocks run a second time."""
        self.forward = len(self.tape.after)
        held = self.shared | {leaf.untyped_storage()._cdata for leaf in _counted(outputs, self.tape)}
        for own in self.passes:
            own.lost = sum(size for storage, size in own.inputs if storage() is None)
            found = self.tape.alive(own.begin, own.end, apart=own.outputs & held)
            own.kept = [(self.forward if kept.converted else kept.used + 1, kept.size) for kept in found]

    def checkpointed(self, step: Trace) -> Trace:
        """The step, had all blocks been checkpointed.

        A block's own bytes are absent from the end of its forward to the beginning of its backward, where it runs once
        more; its inputs stay until its backward ends. To be called after the backward.

        Args:
            step: as it was.
        """
        after, forward = self.tape.after, len(step.courses[0])
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
        second_forwards = []
        for own, cached in zip(self.passes, left, strict=True):
            if own.backward is not None:
                again = max(after[own.begin : own.end], default=own.live) - own.live - cached
                second_forwards.append(after[own.backward - 1] + totals[own.backward] - own.kept_bytes + again)
        saved = step.saved + sum(own.lost - own.kept_bytes for own in self.passes)
        return Trace(saved, step.flops, (alive[:forward], alive[forward:], second_forwards))


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
        if found.forward is None and not tape.has_cpu:  # whose hooks lie on top, and nothing is to be checkpointed
            step_in()
            inputs = {(leaf.untyped_storage()._cdata, tape.born(leaf)): leaf for leaf in _counted((args, kwargs), tape)}
            storages = [leaf.untyped_storage() for key, leaf in inputs.items() if key not in given]
            given.update(inputs)
            found.shared.update(storage._cdata for storage in storages)
            kept = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
            found.passes.append(_Pass(len(tape.after), tape.live, kept))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if found.forward is not None or tape.has_cpu:
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
