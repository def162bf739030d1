"""One backward through the models that are trained: whose gradients it makes, and whose micro-batch it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.errors import LoopError
from zero_plugin.training import Training

__all__ = ["run_backward", "run_loose_backward"]


def run_backward(
    trainings: Sequence[Training], untrained: Sequence[Training], loss: Tensor, **kwargs: Any
) -> Sequence[Training]:
    """Add the gradients of `loss` to every model that it reaches, and count it in their windows.

    Args:
        trainings: all that have an optimizer; of several, each watches its gradients.
        untrained: the others, through which gradients may pass.
        loss: scalar.
        **kwargs: for `torch.autograd.backward`.

    Returns:
        Those reached.

    Raises:
        LoopError: see `Session.open_backward`, `Session.close_backward` and `AccumulationWindow.count_backward`; or it
            cannot be told whose micro-batch the loss is.
    """
    if len(trainings) == 1:
        window = trainings[0].window
        window.count_backward()
        divided = loss if window.divisor == 1 else loss / window.divisor
        trainings[0].session.backward(divided, ends_window=window.ends_here, **kwargs)
        reached = trainings
    else:
        reached = _run_through_several(trainings, loss, **kwargs)
    for training in untrained:
        training.session.close_backward(reached=False)
    return reached


def run_loose_backward(window: AccumulationWindow, loss: Tensor, *, counts: bool, **kwargs: Any) -> None:
    """Torch's own backward, of a loss that trains nothing that was prepared with its optimizer.

    Args:
        window: its number of micro-batches divides the loss.
        loss: scalar.
        counts: whether an optimizer steps by this window, so that outside `accumulate()` backwards are counted.
        **kwargs: for `torch.autograd.backward`.
    """
    if counts or window.in_context:
        window.count_backward()
    divisor = window.divisor
    torch.autograd.backward(loss if divisor == 1 else loss / divisor, **kwargs)


def _run_through_several(trainings: Sequence[Training], loss: Tensor, **kwargs: Any) -> Sequence[Training]:
    _share_loss_scale(trainings)
    steps = trainings[0].window.steps
    for training in trainings:
        training.reached = False
        training.session.open_backward(ends_window=training.window.next_backward_ends, loss=loss)
    try:
        scaled = trainings[0].session.scale_loss(loss)
        torch.autograd.backward(scaled if steps == 1 else scaled / steps, **kwargs)
    except BaseException:
        for training in trainings:
            training.session.abandon_backward(reached=training.reached)
        raise
    for training in trainings:
        training.session.close_backward(reached=training.reached)
    reached = [training for training in trainings if training.reached]
    _count(trainings, reached, steps)
    return reached


def _count(trainings: Sequence[Training], reached: Sequence[Training], steps: int) -> None:
    if not reached:
        raise LoopError("the loss of this backward() depends on no parameter of the prepared models that are trained.")
    by_hand = not any(training.window.in_context for training in trainings)
    if by_hand and steps > 1 and len(reached) > 1:
        raise LoopError(
            f"the loss of this backward() reaches {_names(reached)}, and gradient_accumulation_steps is {steps}: "
            "without accumulate() it cannot be told whose micro-batch it is.\n"
            "Where it only runs through a model, freeze that one for it: model.requires_grad_(False) before the "
            "forward. Where it trains them all, wrap each micro-batch in `with accelerator.accumulate(one, other):`."
        )
    for training in reached:
        if by_hand or training.window.in_context:
            training.window.count_backward()
        else:
            training.window.count_stray()


def _share_loss_scale(trainings: Sequence[Training]) -> None:
    """Under fp16, give all models the smallest loss scale among them: one loss has one scale."""
    if trainings[0].resolved.precision != "fp16":
        return
    scales = [training.session.loss_scale for training in trainings]
    for training, scale in zip(trainings, scales, strict=True):
        if scale != min(scales):
            training.session.set_loss_scale(min(scales))


def _names(trainings: Sequence[Training]) -> str:
    names = [type(training.session.module).__name__ for training in trainings]
    return f"{', '.join(names[:-1])} and {names[-1]}"
