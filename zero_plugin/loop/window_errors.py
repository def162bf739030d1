"""Errors about accumulation windows; each message names the mistake in the loop and its fix."""

from __future__ import annotations

from typing import Final

from zero_plugin.errors import LoopError

_FAILED: Final = (
    "a backward or a step of this model has failed, and the gradients that it left must not be applied.\n"
    "Call optimizer.zero_grad() before you continue: it drops the gradients and starts a new accumulation window."
)
# By call that completes the gradients: why no backward may run between this call and the step.
_TOO_LATE: Final = {
    "clip_grad_norm_()": "the clipped norm would not be the step's",
    "clip_grad_value_()": "the gradients that it adds would not be clamped",
}
_SCALED: Final = "the gradients that it adds would have the loss scale, which was divided out of the others"
_APART: Final = (
    "This happens at the end of a stream, whose length is unknown. Use a map-style dataset, or leave out the last "
    "batches of a stream. Or accumulate the models together: `with accelerator.accumulate(one, other):`. Or freeze a "
    "model for the losses of the other one: model.requires_grad_(False) before the forward."
)


def failed_gradients() -> LoopError:
    """Return the error for gradients that a failed backward or step has left."""
    return LoopError(_FAILED)


def missing_step(steps: int, count: int, backwards: int) -> LoopError:
    """Return the error for a backward after the window's last one, without a step between them.

    Args:
        steps: the configured micro-batches of a window.
        count: the micro-batches that the window had.
        backwards: backwards since the last step.
    """
    if count < steps:  # the epoch has ended earlier
        return LoopError(
            f"optimizer.step() was not called at the end of the epoch. Its last accumulation window has "
            f"{count} micro-batches; gradient_accumulation_steps is {steps}.\n"
            "Call optimizer.step() after every backward: it acts at the end of a window. Or step by hand "
            f"`if (i + 1) % {steps} == 0 or i + 1 == len(loader)`."
        )
    return LoopError(
        f"backward() ran {backwards} times without optimizer.step(), but gradient_accumulation_steps is "
        f"{steps}.\nCall optimizer.step() after every backward (it acts on every {steps}th), or set "
        "gradient_accumulation_steps to the number of backwards between two steps of this loop."
    )


def two_backwards_in_a_batch(steps: int) -> LoopError:
    """Return the error for a second backward in one batch of a prepared loader, without `accumulate()`."""
    return LoopError(
        "backward() ran twice in one batch of the prepared loader, outside accumulate(), and "
        f"gradient_accumulation_steps is {steps}: it is ambiguous whether these are two micro-batches, or "
        "two losses of one.\nWrap each micro-batch in `with accelerator.accumulate(model):`, with one "
        "backward() inside if the loop splits the loader's batches, or with all losses of a batch inside."
    )


def early_step(steps: int, backwards: int, *, may_be_the_end: bool) -> LoopError:
    """Return the error for a step inside a window that is not called after every micro-batch.

    Args:
        steps: the configured micro-batches of a window.
        backwards: backwards since the last step.
        may_be_the_end: whether this may be the end of a loader that is not prepared.
    """
    found = f"optimizer.step() comes after {backwards} backwards, but gradient_accumulation_steps is {steps}.\n"
    if may_be_the_end:
        return LoopError(
            f"{found}The previous windows had {steps}: if this is the end of the data, prepare() the loader. Then its "
            "end is known, and the gradients are averaged over the shorter window."
        )
    return LoopError(
        f"{found}Set gradient_accumulation_steps to {backwards}, or wrap each micro-batch in "
        "`with accelerator.accumulate(model):`."
    )


def late_backward(call: str) -> LoopError:
    """Return the error for a backward after a call that needs complete gradients, and before the step.

    Args:
        call: the call of the script.
    """
    return LoopError(
        f"backward() after {call} and before optimizer.step(): {_TOO_LATE.get(call, _SCALED)}.\n"
        f"Call {call} after the window's last backward()."
    )


def clipped_after_step(call: str) -> LoopError:
    """Return the error for clipping gradients that a step has already applied.

    Args:
        call: the call of the script.
    """
    return LoopError(
        f"{call} was called after optimizer.step(), which has applied and cleared the gradients.\n"
        f"Call {call} after accelerator.backward(loss) and before optimizer.step()."
    )


def different_sizes(sizes: list[str]) -> LoopError:
    """Return the error for accumulated gradients from windows that need different corrections.

    Args:
        sizes: a phrase for each window.
    """
    return LoopError(
        "the accumulated gradients of a model come from accumulation windows of different sizes: "
        f"{', '.join(sizes)}. The sizes were not known in time.\n{_APART}"
    )


def used_gradients(count: int, taken_for: int) -> LoopError:
    """Return the error for a step of another model that has used the gradients with another correction.

    Args:
        count: the micro-batches of the window.
        taken_for: the number that the step of the other model assumed.
    """
    return LoopError(
        f"an accumulation window has {count} micro-batches, but another model's optimizer has applied gradients of "
        f"their losses as though it had {taken_for}. Its size was not known in time.\n{_APART}"
    )
