"""`dummy_forward`: a branch of a model takes part in a step on processes that have no data for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zero_plugin.tensors.nested import list_leaves, map_leaves


def dummy_forward(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run `module` on dummy inputs and return a zero to add to the model's activations or loss.

    Call it in the model's forward, in the place of the real call, on processes whose batch has no data for the module:

        if images is not None:
            hidden = hidden + self.vision(images)
        else:
            hidden = hidden + dummy_forward(self.vision, hidden.new_zeros(1, 3, 224, 224))

    `new_zeros` gives the inputs the dtype and device of the activations, which no engine casts here.

    So every process uses the same parameters, as ZeRO stages 2 and 3 and DDP need it. The module's parameters get
    gradients of exactly 0 from this call, also if its activations or derivatives are infinite or nan. Inputs get none.
    The module runs in its current mode: dropout draws random numbers, and BatchNorm counts the inputs in its running
    statistics.

    Args:
        module: a part of the model, trained or frozen. If the real call uses only some of its outputs, pass a function
            that returns these: `lambda x: self.vision(x).last_hidden_state`. Outputs that only one process uses would
            have gradients on that process alone.
        *args: for its forward, e.g. zeros of the smallest legal shape.
        **kwargs: the same.

    Returns:
        A scalar that is 0, on the device of the outputs and in their dtype.

    Raises:
        TypeError: the outputs have no tensor of floating-point numbers.
    """
    args, kwargs = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    leaves = list_leaves(module(*args, **kwargs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
    if not outputs:
        raise TypeError(
            f"dummy_forward() got no tensor of floating-point numbers from the {type(module).__name__}.\n"
            "Pass a module whose forward returns tensors, or a tuple, list or dict of them."
        )
    for node in _nodes_of(outputs):
        if any(_is_leaf(below) for below, _ in node.next_functions):
            node.register_hook(_zeros)
    zero: Tensor = _Zero.apply(*outputs)  # type: ignore[no-untyped-call]
    return zero


class _Zero(torch.autograd.Function):
    """A zero that depends on tensors; they get gradients of 0. A product with 0 would be nan for infinite numbers."""

    @staticmethod
    def forward(ctx: FunctionCtx, *outputs: Tensor) -> Tensor:
        ctx.likes = [(output.shape, output.dtype, output.device) for output in outputs]  # type: ignore[attr-defined]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


def _zeros(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    """Replace the gradients of a node's inputs: a product of 0 with an infinite activation is nan."""
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _nodes_of(outputs: list[Tensor]) -> Iterator[Any]:
    """The nodes of the graph of tensors, without the leaves."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        below = {function for function, _ in node.next_functions if function is not None and not _is_leaf(function)}
        waiting += below - seen
        seen |= below


def _is_leaf(node: Any) -> bool:
    """Whether a node adds to the `grad` of a leaf."""
    return hasattr(node, "variable")
