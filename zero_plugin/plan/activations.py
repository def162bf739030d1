"""Traces what a model keeps from the forward to the backward, with tensors that have no memory."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.live_model import Example, repeated_blocks
from zero_plugin.plan.situation import Activations, Affine, Highest, highest
from zero_plugin.plan.traced_bytes import DeviceKernels, LiveBytes, watch_blocks
from zero_plugin.tensors.nested import list_leaves, map_leaves, to_fp32

_SAMPLES: Final = (2, 3)  # not 1, which some operations and models treat apart
_TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Trace:
    """Bytes alive after the forward and after each operation of a step, of which `forward` are the forward's; the same
    with checkpointing; floating-point operations."""

    saved: int
    forward: int
    after: list[int]
    checkpointed: tuple[int, list[int]] | None
    flops: float


def trace_activations(
    model: nn.Module,
    example: Example | Callable[[int], Example],
    precision: Precision = "bf16",
) -> Activations:
    """What one forward of `model` keeps for its backward, traced at two micro-batches without memory for tensors.

    Both passes run in training mode on torch's fake tensors, with a GPU's kernels (see `DeviceKernels`). The outputs,
    in fp32, and the loss live until the backward ends, as in most loops. A parameter's gradient dies when it is made,
    since the plan counts gradients by themselves. The model stays as it is. What the working space is made of grows at
    different rates: every operation has its line, and the highest ones are kept.

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
        return _affine(*(_trace(model, make(samples), dtype, regime) for samples in _SAMPLES))

    try:
        with _no_warnings_of_fakes():
            found = replace(trace(autocast=False), sample_length=_length(make(1)))
            if precision == "no":
                return found
            return replace(found, autocast=replace(trace(autocast=True), sample_length=found.sample_length))
    except Exception as error:  # anything may come of a forward that meets tensors without values
        reason = (str(error).splitlines() or [""])[0]
        message = f"{type(model).__name__} cannot be traced: {type(error).__name__}: {reason}"
        fix = "Give inputs that its forward takes; a forward that looks at values has to be planned by its sizes."
        raise ConfigError([Problem("plan", "", message, fix)]) from error


def _trace(
    model: nn.Module,
    example: Example,
    dtype: torch.dtype | None,
    regime: AbstractContextManager[Any],
) -> _Trace:
    """One step with all weights in `dtype`, or as they are, and the forward under `regime`."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kernels = DeviceKernels()

    def narrowed(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def step(run: Callable[[Any], Any]) -> _Trace:
        with LiveBytes(weights.values()) as tape, watch_blocks(repeated_blocks(model), tape) as blocks:
            batch = map_leaves(_fake, example)  # which the loop holds, beside what the model gets
            with regime:
                outputs = run(map_leaves(narrowed, batch))
            outputs = map_leaves(to_fp32, outputs)
            loss = _loss(outputs)
            saved, forward, flops = tape.live, len(tape.after), tape.flops + kernels.flops
            blocks.end_forward(outputs)
            # torch.autograd.backward would leave the mode of the kernels, in which checkpoints run forwards again
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            checkpointed = blocks.checkpointed(saved) if blocks.passes else None
        return _Trace(saved, forward, tape.after, checkpointed, flops)

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

    def forward(self, step: Callable[[Callable[[Any], Any]], _Trace]) -> _Trace:
        return step(self._run)

    def _run(self, example: Any) -> Any:
        if isinstance(example, Mapping):
            return self.model(**example)
        return self.model(*example) if isinstance(example, list | tuple) else self.model(example)


def _affine(two: _Trace, three: _Trace) -> Activations:
    """The lines through the traces of two samples and of three."""
    saved, transient = _lines(two.saved, two.after, three.saved, three.after)
    flops = three.flops - two.flops
    found = Activations(saved, transient, flops_per_sample=flops, source="traced at micro-batches 2 and 3")
    if two.checkpointed is None or three.checkpointed is None:
        return found
    (kept, after), (kept_of_three, after_of_three) = two.checkpointed, three.checkpointed
    line, forward = _lines(kept, after[: two.forward], kept_of_three, after_of_three[: three.forward])
    _, backward = _lines(kept, after[two.forward :], kept_of_three, after_of_three[three.forward :])
    return replace(found, checkpointed=line, checkpointed_transient=backward, checkpointed_forward=forward)


def _lines(saved: int, after: list[int], saved_of_three: int, after_of_three: list[int]) -> tuple[Affine, Highest]:
    """Of the bytes saved, and of the most above them. Each operation has its line; the batch tells which is highest."""
    kept = _line(saved, saved_of_three)
    if len(after) != len(after_of_three):  # the forward takes another way with three samples
        after, after_of_three = [max(after)], [max(after_of_three)]
    alive = map(_line, after, after_of_three)
    above = (Affine(line.fixed - kept.fixed, line.per_sample - kept.per_sample) for line in alive)
    return kept, highest([Affine(), *above])


def _line(two: int, three: int) -> Affine:
    return Affine(3 * two - 2 * three, three - two)


def _without_idle_mask(model: nn.Module, example: Example) -> Example:
    """Without a padding mask of ones, which transformers drops when it sees its values."""
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


def _length(example: Example) -> int:
    """Tokens of one sample: of the first matrix of integers."""
    for leaf in list_leaves(example):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.shape[1]
    return 1


def _loss(outputs: Any) -> Tensor:
    """The outputs' own loss, else a cross-entropy over each of them."""
    stated = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(stated, Tensor):
        return stated
    found = [leaf for leaf in list_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in found if leaf.dim() == 0]
    losses = scalars[:1] or [torch.log_softmax(leaf, -1).mean() for leaf in found]
    if not losses:
        raise ValueError("no output has a gradient")
    return torch.stack(losses).sum()


def _fake(leaf: Any) -> Any:
    """A tensor on the CPU, whole where it is partitioned; under fake tensors one without memory."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(tuple(getattr(leaf, "ds_shape", leaf.shape)), dtype=leaf.dtype, device="cpu")


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


def _no_warnings_of_fakes() -> AbstractContextManager[None]:
    """Without what torch prints of an operation that meets wrong shapes: the error that comes of it tells."""
    return _replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


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
