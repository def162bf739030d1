"""`dummy_forward`: run a branch of a model on processes whose batch has no data for this branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zero_plugin.tensors.nested import list_leaves, map_leaves


def dummy_forward(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run `module` on dummy inputs and return a zero to add to the model's activations or loss.

    Call it in the model's forward, instead of the real call, on processes whose batch has no data for the module:

        if images is not None:
            hidden = hidden + self.vision(images)
        else:
            hidden = hidden + dummy_forward(self.vision, hidden.new_zeros(1, 3, 224, 224))

    `new_zeros` gives the inputs the dtype and device of the activations. No engine casts inputs at this place.

    With this call every process uses the same parameters, as ZeRO stages 2 and 3 and DDP require. The call gives the
    module's parameters gradients of exactly 0, even if activations or derivatives are infinite or nan. The inputs get
    no gradients. The module runs in its current mode: dropout draws random numbers, and BatchNorm counts the inputs in
    its running statistics.

    Args:
        module: a part of the model, trained or frozen. If the real call uses only some outputs, pass a function that
            returns only these: `lambda x: self.vision(x).last_hidden_state`. Otherwise, outputs that only one process
            uses have gradients on that process alone.
        *args: arguments of the forward, e.g. zeros of the smallest legal shape.
        **kwargs: keyword arguments of the forward.

    Returns:
        A scalar 0 with the device and dtype of the outputs.

    Raises:
        TypeError: the outputs contain no floating-point tensor.
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
    """A zero that depends on tensors and gives them gradients of 0; a product with 0 would be nan for infinities."""

    @staticmethod
    def forward(ctx: FunctionCtx, *outputs: Tensor) -> Tensor:
        ctx.likes = [(output.shape, output.dtype, output.device) for output in outputs]  # type: ignore[attr-defined]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


def _zeros(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    """Replace the gradients of a node's inputs by zeros: 0 times an infinite activation is nan."""
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _nodes_of(outputs: list[Tensor]) -> Iterator[Any]:
    """Iterate over the nodes of the tensors' graph, without the leaves."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        below = {function for function, _ in node.next_functions if function is not None and not _is_leaf(function)}
        waiting += below - seen
        seen |= below


def _is_leaf(node: Any) -> bool:
    """Return whether a node accumulates into the `grad` of a leaf."""
    return hasattr(node, "variable")
