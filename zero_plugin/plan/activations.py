"""Traces what a model keeps from the forward to the backward, with tensors that have no memory.

Counted are the bytes of all tensors from operation to operation, as a GPU's kernels keep them; and, worked out from one
traced step, what activation checkpointing of the model's blocks would keep.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from zero_plugin.config.installed import replaced
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.distributed.messages import working
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.long_context.chunks import chunk_layer
from zero_plugin.plan.blocks import Trace, repeated_blocks, trace_few, watch_blocks
from zero_plugin.plan.decoder import decoder_activations
from zero_plugin.plan.live_bytes import DeviceKernels, LiveBytes
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
_REDUCING: Final = slice(2, None)  # of a trace's courses, those in which weights have gradients
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
        with working(f"tracing a step of the {type(model).__name__}"), replaced(log, "disabled", True):
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
            replaced(saved_tensors_hooks, "__enter__", lambda hooks: tape.enter_hooks(hooks)),
            replaced(saved_tensors_hooks, "__exit__", lambda *hooks: tape.exit_hooks(*hooks)),
            watch_blocks(repeated_blocks(model), tape) as blocks,
        ):
            gradients: list[int] = []

            def drop(parameter: Tensor) -> None:
                parameter.grad = None
                gradients.append(len(tape.after))

            for parameter in weights.values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
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
            first = min(gradients, default=len(tape.after))
            courses = (tape.after[:forward], tape.after[forward:first], tape.after[first:])
            found = Trace(saved, flops, courses, moved=moved)
            if not blocks.passes or tape.has_cpu:
                return found
            return replace(found, checkpointed=blocks.checkpointed(found))

    with _no_packing(), fake, kernels, torch.enable_grad(), _training(model):
        weights: dict[str, Tensor] = {
            name: nn.Parameter(narrowed(_fake(parameter)), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
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
    found = Activations(
        _line(two.saved, three.saved),
        _above(two, three, slice(None)),
        _above(two, three, _REDUCING),
        moved=_line(two.moved, three.moved),
        flops_per_sample=three.flops - two.flops,
        source="traced at micro-batches 2 and 3",
    )
    if two.checkpointed is None or three.checkpointed is None:
        return found
    two, three = two.checkpointed, three.checkpointed
    return replace(
        found,
        checkpointed=_line(two.saved, three.saved),
        checkpointed_transient=_above(two, three, slice(1, None)),
        checkpointed_late=_above(two, three, _REDUCING),
        checkpointed_forward=_above(two, three, slice(1)),
    )


def _above(two: Trace, three: Trace, courses: slice) -> Highest:
    """The most above the bytes saved. Each operation has its line; the batch tells which is highest."""
    kept = _line(two.saved, three.saved)
    after, after_of_three = (list(chain(*found.courses[courses])) for found in (two, three))
    if len(after) != len(after_of_three):  # the forward takes another way with three samples
        after, after_of_three = [max(after, default=two.saved)], [max(after_of_three, default=three.saved)]
    alive = map(_line, after, after_of_three)
    above = [Affine(line.fixed - kept.fixed, line.per_sample - kept.per_sample) for line in alive]
    return highest(above if courses == _REDUCING and above else [Affine(), *above])


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

    Of a fake tensor it takes the worst, and makes a mask of `tokens²` where a training run has none. A release that
    makes that mask in each training run, as 4.57 does, is left as it is.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(masking, name) or getattr(masking, name)(torch.arange(2, device="cpu")[None]) is not None:
        return nullcontext()
    return replaced(masking, name, lambda *_args, **_kwargs: None)
