"""Traces which bytes a model keeps from the forward to the backward, on tensors that have no memory.

The trace counts the bytes of all tensors after each operation, as a GPU's kernels keep them. From the same step it
works out what activation checkpointing of the model's blocks would keep.
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

_SAMPLES: Final = (2, 3)  # some operations and models treat a batch of 1 differently
_TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCING: Final = slice(2, None)  # the courses of a trace in which weights already have gradients
_CHUNKS: Final = 4  # of an MLP; see `trace_changes`
_UNKNOWN_MARGIN: Final = 0.35  # see `Activations.margin`


def trace_activations(
    model: nn.Module, example: Example | Callable[[int], Example], precision: Precision = "bf16"
) -> Activations:
    """Trace what one forward of `model` keeps for its backward, at two micro-batches and without memory for tensors.

    Both passes run in training mode on torch's fake tensors, with a GPU's kernels (see `DeviceKernels`). The outputs,
    in fp32, and the loss live until the backward ends, as in most loops. Each parameter's gradient is freed as soon as
    autograd has computed it, since the plan counts gradients separately. The model does not change.

    The parts of the working space grow at different rates. Each operation therefore gets its own line in the
    micro-batch, and the highest lines are kept. In a row of identical blocks only a few are traced (`trace_few`).

    Args:
        model: any module; its parameters may be on `meta` or partitioned (`ds_shape`).
        example: keyword arguments, positional arguments or one tensor, for any number of samples along the first
            dimension; or a function from a number of samples to these. Without a scalar or a `loss` among the outputs,
            the trace computes a cross-entropy over each output.
        precision: of the computation. The result has all weights in this precision, as under ZeRO; its `autocast` field
            has the weights in their own dtypes.

    Raises:
        ConfigError: the model cannot be traced: the example does not fit, or the forward reads a tensor's values.
    """
    make = example if callable(example) else _resizer(_without_idle_mask(model, example))

    def trace(*, autocast: bool) -> Activations:
        dtype = None if autocast else _TYPES.get(precision)
        regime = torch.autocast("cpu", _TYPES[precision]) if autocast else nullcontext()

        def trace_with(samples: int) -> Trace:
            run = partial(_trace, model, make(samples), dtype, regime)
            return trace_few(model, run) or run()

        return _affine(*map(trace_with, _SAMPLES))

    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs wrong shapes; their error is reported anyway
    try:
        with working(f"tracing a step of the {type(model).__name__}"), replaced(log, "disabled", True):
            found = replace(trace(autocast=False), sample_length=_sequence_length(make(1)) or 1)
            if precision == "no":
                return found
            return replace(found, autocast=replace(trace(autocast=True), sample_length=found.sample_length))
    except Exception as error:  # a forward may fail in any way on tensors without values
        reason = (str(error).splitlines() or [""])[0]
        message = f"{type(model).__name__} cannot be traced: {type(error).__name__}: {reason}"
        fix = "Give inputs that its forward takes; plan a forward that reads values by its sizes."
        raise ConfigError([Problem("plan", "", message, fix)]) from error


def find_activations(
    model: nn.Module, sizes: ModelSizes, batch: Any, precision: Precision, *, guesses: bool = False
) -> Activations:
    """Return what a forward keeps: traced if possible, otherwise by formula, otherwise unknown.

    Args:
        model: the user's module.
        sizes: the model's sizes.
        batch: a batch like the loop's; None if none is available.
        precision: of the computation.
        guesses: whether to assume samples of a usual length if `batch` shows no length.
    """
    for example in forward_arguments(model, batch):
        try:
            return trace_activations(model, example, precision)
        except ConfigError:  # noqa: PERF203 - the loop does not pass these arguments; try the next
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
    source = f"unknown, so {_UNKNOWN_MARGIN:.0%} of the memory stays free for them"
    return Activations(source=source, margin=_UNKNOWN_MARGIN)


def trace_changes(model: nn.Module, trace: Callable[[], Activations]) -> dict[str, Activations]:
    """Trace what a forward would keep after each of two changes that a user can make; the keys say what to write.

    The function changes the model, traces it and undoes the change. MLPs are the modules named `mlp` in repeated
    blocks, as in most transformers models. A mixture of experts and an MLP with a replaced forward are left out.

    Args:
        model: the user's module.
        trace: traces the model in its current form; a change for which `trace` raises `ConfigError` is left out.
    """
    blocks, found = repeated_blocks(model), {}
    if mlps := [mlp for block in blocks for name, mlp in block.named_children() if name == "mlp" and _is_plain(mlp)]:
        with _restored(mlps), suppress(ConfigError):
            for mlp in mlps:
                chunk_layer(mlp, _CHUNKS)
            found[f"chunk_layer(block.mlp, {_CHUNKS}) of zero_plugin.long_context for every block"] = trace()
    if blocks:
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())  # transformers
        with _restored([model, *blocks]), suppress(ConfigError):
            for block in () if recomputes else blocks:
                block.forward = wraps(block.forward)(partial(checkpoint, block.forward, use_reentrant=False))
            model.forward = _saving_on_cpu(model.forward)
            found["activation checkpointing under torch.autograd.graph.save_on_cpu(pin_memory=True)"] = trace()
    return found


def _is_plain(mlp: nn.Module) -> bool:
    """Return whether the MLP has the forward of its class and contains no expert."""
    return "forward" not in vars(mlp) and not any(is_expert(name) for name, _ in mlp.named_parameters())


def _saving_on_cpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' own attributes on exit."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _sequence_length(batch: Any) -> int:
    """Return the tokens of one sample, from the first integer matrix in the batch; 0 without one."""
    matrices = (leaf for leaf in list_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() == 2)
    return next((leaf.shape[1] for leaf in matrices if not leaf.is_floating_point()), 0)


def _trace(model: nn.Module, example: Example, dtype: torch.dtype | None, regime: AbstractContextManager[Any]) -> Trace:
    """Trace one step with all weights in `dtype` (None: in their own dtypes) and the forward under `regime`."""
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
            batch = map_leaves(_fake, example)  # the loop holds it in addition to what the model gets
            with regime:
                outputs = run(map_leaves(narrowed, batch))
            outputs = map_leaves(to_fp32, outputs)
            loss = _loss(outputs)
            saved, moved, flops, forward = tape.live, tape.moved, tape.flops + kernels.flops, len(tape.after)
            blocks.end_forward(outputs)
            # Not torch.autograd.backward: torch suspends `DeviceKernels` in it, but forwards that checkpoints run again
            # need that mode.
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
    """Runs a function with a model whose parameters are replaced by other tensors, in the backward too."""

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
    """Return the lines through the traces of two samples and of three."""
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
    """Return the most bytes above the saved ones, as the lines of the operations that can be highest."""
    kept = _line(two.saved, three.saved)
    after, after_of_three = (list(chain(*found.courses[courses])) for found in (two, three))
    if len(after) != len(after_of_three):  # the forward takes another path with three samples
        after, after_of_three = [max(after, default=two.saved)], [max(after_of_three, default=three.saved)]
    alive = map(_line, after, after_of_three)
    above = [Affine(line.fixed - kept.fixed, line.per_sample - kept.per_sample) for line in alive]
    return highest(above if courses == _REDUCING and above else [Affine(), *above])


def _line(two: int, three: int) -> Affine:
    """Return the line through the bytes of two samples and of three."""
    return Affine(3 * two - 2 * three, three - two)


def _without_idle_mask(model: nn.Module, example: Example) -> Example:
    """Return the example without a padding mask of ones, which transformers drops if it can read the mask's values."""
    if isinstance(example, Mapping) and hasattr(model, "main_input_name"):
        mask = example.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.device.type != "meta" and bool(mask.all()):
            return {**example, "attention_mask": None}
    return example


def _resizer(example: Example) -> Callable[[int], Example]:
    """Return a function from a number of samples to an example like this one.

    The example's own number of samples is the most common first dimension of its tensors.
    """
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
    """Return a scalar to run the backward from.

    It is the `loss` among the outputs, otherwise their first scalar. Without either, `log_softmax` of every output
    replaces the script's cross-entropy, because it needs about the same memory.
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
    """Return an unpartitioned tensor on the CPU; under fake tensors it has no memory."""
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
    """Make transformers treat each sample as one sequence.

    Otherwise transformers detects packed sequences from the values of the positions. For a fake tensor it assumes the
    worst case and builds a mask of `tokens²`, which a real run does not have. A release that builds this mask in every
    training run, as 4.57 does, is not changed.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(masking, name) or getattr(masking, name)(torch.arange(2, device="cpu")[None]) is not None:
        return nullcontext()
    return replaced(masking, name, lambda *_args, **_kwargs: None)
