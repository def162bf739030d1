"""`backward`: divide a loss by its window's size, compute its gradients, and count the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_plugin.data.active import RUNNING
from zero_plugin.data.loader import DataLoaderAdapter
from zero_plugin.errors import LoopError
from zero_plugin.loop import together, window_errors
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run
from zero_plugin.loop.training import Training
from zero_plugin.loop.window import Phase, Window
from zero_plugin.strategies.base import LOSS_OF_OTHERS, Session, release_failed_backward
from zero_plugin.strategies.precision import Measured


def backward(run: Run, prepared: Prepared, loss: Tensor, **kwargs: Any) -> None:
    """Add the gradients of `loss`; see `Accelerator.backward`.

    Args:
        run: the run.
        prepared: the prepared objects.
        loss: a scalar, or a tensor with `gradient`.
        **kwargs: for `torch.autograd.backward`; `gradient` is its `grad_tensors`.
    """
    if "gradient" in kwargs:
        kwargs["grad_tensors"] = kwargs.pop("gradient")
    _check_loss(loss, has_gradient=kwargs.get("grad_tensors") is not None)
    first_steps = prepared.first_steps
    if not prepared.trained and first_steps.allows_plain_backward(run.strategy, run.processes.world_size):
        prepared.window = prepared.waiting_windows[-1][0]
        run_plain_backward(prepared.waiting_windows, loss, **kwargs)
        return
    if run.strategy.checks != "off" and first_steps.is_due():
        _refuse_other_start(run)
        first_steps.check(loss, prepared.waiting)
    if run.sequence is not None:
        run.sequence.check_same_loss(loss)
    reached = run_backward(prepared.trained, prepared.untrained, loss, **kwargs)
    prepared.window = reached[0].window


def run_backward(
    trained: Sequence[Training], untrained: Sequence[Training], loss: Tensor, **kwargs: Any
) -> Sequence[Training]:
    """Accumulate the gradients of `loss` in every model that it depends on, and count the micro-batch in their windows.

    Args:
        trained: all models with an optimizer. With several, each session notices whether gradients reach its model.
        untrained: the models without an optimizer; gradients may pass through them.
        loss: a scalar.
        **kwargs: for `torch.autograd.backward`.

    Returns:
        The models of `trained` that the loss depends on.

    Raises:
        LoopError: an earlier backward or step has failed; or see `Window.count_backward`, `end`.
    """
    if len(trained) > 1:
        reached = _run_through_several(trained, loss, **kwargs)
    else:
        reached = trained
        run_through_one(trained[0].window, trained[0].session, loss, **kwargs)
    for training in untrained:
        training.session.close_backward(reached=False)
    return reached


def run_through_one(window: Window, session: Session, loss: Tensor, **kwargs: Any) -> None:
    """Accumulate the gradients of a loss that depends on no other trained model."""
    if window.phase is Phase.FAILED:  # check first: a micro-batch without gradients must not be counted
        raise window_errors.failed_gradients()
    window.count_backward()
    if window.own.divisor != 1:
        loss = loss / window.own.divisor
    is_first = begin(window, session, loss, ends_window=window.ends_here)
    try:
        torch.autograd.backward(session.scale_loss(loss), **kwargs)
    except BaseException as error:
        abandon(window, session, reached=True)
        session.raise_clearer(error)
        raise
    reached = session.has_reached(loss, is_first=is_first)
    end(window, session, reached=reached)
    if not reached and session.scales_loss:
        raise LoopError(LOSS_OF_OTHERS)


def _run_through_several(trained: Sequence[Training], loss: Tensor, **kwargs: Any) -> Sequence[Training]:
    """Accumulate the gradients of a loss that may depend on several models. Only the backward shows on which."""
    if trained[0].resolved.precision == "fp16":
        together.share_loss_scale([(training.window, training.session) for training in trained])
    named = [training for training in trained if training.window.in_context]
    divisor = together.share_divisor([(training.window, training.session) for training in named or trained])
    for training in trained:
        training.reached = False
        begin(training.window, training.session, loss, ends_window=training.window.next_backward_ends)
    try:
        scaled = trained[0].session.scale_loss(loss)
        torch.autograd.backward(scaled if divisor == 1 else scaled / divisor, **kwargs)
    except BaseException as error:
        for training in trained:
            abandon(training.window, training.session, reached=training.reached)
        for training in trained:
            training.session.raise_clearer(error)
        raise
    for training in trained:
        end(training.window, training.session, reached=training.reached)
    reached = [training for training in trained if training.reached]
    _count(reached, [training.window for training in named], trained[0].window.steps)
    return reached


def _count(reached: Sequence[Training], named: Sequence[Window], steps: int) -> None:
    """Count a backward in the windows of the models that its gradients have reached.

    Args:
        reached: these models.
        named: the windows of the models that the script passed to `accumulate()`.
        steps: micro-batches per optimizer step.

    Raises:
        LoopError: the backward reached no model, or the micro-batch could belong to more than one model.
    """
    if not reached:
        raise LoopError("the loss of this backward() depends on no parameter of the prepared models that are trained.")
    if not named and steps > 1 and len(reached) > 1:
        raise LoopError(
            f"the loss of this backward() reaches {_names(reached)}, and gradient_accumulation_steps is {steps}: "
            "without accumulate() it is ambiguous which model the micro-batch belongs to.\n"
            "If gradients only pass through a model, freeze it: model.requires_grad_(False) before the forward. If the "
            "loss trains all of them, wrap each micro-batch in `with accelerator.accumulate(one, other):`."
        )
    ends = all(window.ends_here for window in named)
    for training in reached:
        if not named or training.window.in_context:
            training.window.count_backward()
        else:
            together.count_foreign_backward(training.window, ends=ends, windows=named)


def run_plain_backward(windows: Sequence[together.WindowOf], loss: Tensor, **kwargs: Any) -> None:
    """Run torch's own backward: no model was prepared with its optimizer.

    Args:
        windows: the default window, which no optimizer steps, and the windows of optimizers without a prepared model.
            The loss is divided by the micro-batches of the last window. Without such optimizers, backwards outside
            `accumulate()` are not counted.
        loss: a scalar.
        **kwargs: for `torch.autograd.backward`.

    Raises:
        LoopError: the gradients are already complete, and were corrected to the window's size.
    """
    # Without accumulate() only windows with an optimizer count.
    counted = [pair for pair in windows if pair[1] is not None or pair[0].in_context]
    for window, _ in counted:
        if window.phase is Phase.FAILED:
            raise window_errors.failed_gradients()
    for window, _ in counted:
        window.count_backward()
    divisor = together.share_divisor(counted or windows[-1:])
    torch.autograd.backward(loss if divisor == 1 else loss / divisor, **kwargs)
    for window, _ in windows:
        if window.phase not in (Phase.COMPLETE, Phase.CLIPPED):
            window.enter(Phase.ACCUMULATED)
        elif together.correction(window) != 1.0:
            window.enter(Phase.FAILED)
            raise window_errors.late_backward(window.completed_by)


def begin(window: Window, session: Session, loss: Tensor, *, ends_window: bool) -> bool:
    """Prepare a session for a backward whose loss may depend on its model; `end` or `abandon` follows.

    Returns:
        Whether no gradients were accumulated before this backward.

    Raises:
        LoopError: an earlier backward or step has failed; or see `Session.open_backward`.
    """
    if window.phase is Phase.FAILED:
        raise window_errors.failed_gradients()
    is_first = window.phase in (Phase.EMPTY, Phase.APPLIED)
    if window.keeps_gradients is None and window.phase is Phase.APPLIED:
        # Gradients that are still in `p.grad` show that the script has not called zero_grad() since the step.
        window.keeps_gradients = session.drop_applied()
    session.open_backward(loss, ends_window=ends_window, is_first=is_first)
    return is_first


def end(window: Window, session: Session, *, reached: bool) -> None:
    """Finish a backward. Collective if `reached` and gradients are partitioned.

    Raises:
        LoopError: the backward has reached the model between a clipping and the step; or see `Session.close_backward`.
    """
    try:
        session.close_backward(reached=reached)
        if not reached:
            return
        if window.phase in (Phase.EMPTY, Phase.ACCUMULATED, Phase.APPLIED):
            window.enter(Phase.ACCUMULATED)
        elif session.adds_to_complete_gradients and together.correction(window) == 1.0:
            window.measured = Measured()  # as in plain torch: the step checks again whether all gradients are finite
        else:
            raise window_errors.late_backward(window.completed_by)
    except BaseException as error:
        window.enter(Phase.FAILED)
        session.raise_clearer(error)
        raise


def abandon(window: Window, session: Session, *, reached: bool) -> None:
    """Clean up after a backward that raised; some gradients may have reached the model."""
    release_failed_backward()
    if session.abandon_backward(reached=reached):
        window.enter(Phase.FAILED)


def _refuse_other_start(run: Run) -> None:
    """Refuse a resumed run that did not load its checkpoint, or whose batches cannot be split as before."""
    if run.must_resume:
        raise LoopError(
            "auto_resume is configured, but this script trains without loading a checkpoint.\n"
            "Call accelerator.resume() after prepare(), or remove auto_resume."
        )
    loader, cut = RUNNING.current, run.micro_batches_per_loader_batch
    if cut > 1 and isinstance(loader, DataLoaderAdapter) and loader.cut != cut:
        raise LoopError(
            f"memory ran out before. Since then each batch of a loader is split into {cut} micro-batches. The batches "
            f"of this loader (batch_size={loader.batch_size}) cannot be split: the global batch would change.\n"
            f"Use a batch_size that is a multiple of {cut}."
        )


def _check_loss(loss: Any, *, has_gradient: bool) -> None:
    """Refuse a loss that cannot be differentiated; the error explains what to pass instead.

    Args:
        loss: the argument of `backward`.
        has_gradient: whether `gradient` is given; a loss of several elements needs it.
    """
    kind = type(loss).__name__
    if not isinstance(loss, Tensor):
        fix = "the tensor itself, without item() or float()"
        if isinstance(loss, Mapping):
            fix = "its loss, e.g. backward(output.loss)" if hasattr(loss, "loss") else 'its loss, e.g. output["loss"]'
        elif isinstance(loss, list | tuple):
            fix = "one tensor: the element that is the loss, or the sum of several losses"
        raise LoopError(f"backward() got a {kind}, but it takes the loss as a tensor.\nPass {fix}.")
    if loss.numel() != 1 and not has_gradient:
        raise LoopError(
            f"backward() got a loss of shape {tuple(loss.shape)}, but it takes a scalar.\n"
            "Pass loss.mean() or loss.sum(), or backward(loss, gradient=…) with a tensor of the loss's shape."
        )
    if not loss.requires_grad:
        raise LoopError(
            f"backward() got a loss ({loss.dtype}) without a graph: no parameter that requires gradients is in it.\n"
            "Compute it outside torch.no_grad(), without detach() or item(), from a model whose parameters "
            "require gradients, in a floating dtype."
        )


def _names(trainings: Sequence[Training]) -> str:
    names = [type(training.session.module).__name__ for training in trainings]
    return f"{', '.join(names[:-1])} and {names[-1]}"
