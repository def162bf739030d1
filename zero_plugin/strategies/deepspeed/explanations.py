"""Clearer errors instead of those of torch and DeepSpeed in a backward or a step; refusals of an engine's calls."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD, OWN_GRADIENTS, SecondGradientError, describe_second_gradient
from zero_plugin.strategies.deepspeed.nvme import explain_failed_swap

# torch's message for the gradient of a tensor that was empty in the forward.
_OF_EMPTY = re.compile(r"invalid gradient at index \d+ - got \[0\]")
# torch's message for a product with a weight that was released after the first backward through its forward.
_OF_RELEASED = re.compile(r"size of tensor \w \(0\) must match")
# DeepSpeed's and Python's messages for a parameter that gets two gradients in one backward.
_OF_SECOND_GRADIENTS = ("has already been reduced", "'NoneType' object has no attribute 'numel'")


def explain(error: BaseException, engine: Any, swap_folders: tuple[Path, ...], *, is_nested: bool) -> LoopError | None:
    """Return a clearer error to raise instead of one in a backward or a step; None to raise that one.

    Args:
        error: the error.
        engine: the engine.
        swap_folders: the NVMe folders of the engine.
        is_nested: whether the loss of the running backward depends on no weight, so that its hook runs others.
    """
    partitions = engine.zero_optimization_partition_weights()
    if partitions and (explained := _explain_empty_weights(error, engine.module)) is not None:
        return explained
    if (failed := explain_failed_swap(error, swap_folders)) is not None:
        return failed
    if _is_second_gradient(error):
        why = "At ZeRO stages 2 and 3 only one of them would count"
        return LoopError(describe_second_gradient(why, is_nested=is_nested))
    return _explain_sparse_gradients(error, engine.module)


def _explain_empty_weights(error: BaseException, module: nn.Module) -> LoopError | None:
    """Return a clearer error instead of torch's in a backward at stage 3; None for other errors."""
    if _OF_RELEASED.search(str(error)):
        is_set = any(
            p.grad is not None and p.grad.numel() == 0 < getattr(p, "ds_numel", 0) for p in module.parameters()
        )
        return LoopError(OWN_GRADIENTS) if is_set else second_backward(module)
    if not _OF_EMPTY.search(str(error)):
        return None
    return LoopError(
        f"the loss was computed from parameters of the {type(module).__name__} outside of its forward, where they are "
        "empty at ZeRO stage 3.\nReplace a penalty on weights by the optimizer's weight_decay, or use stage 2."
    )


def second_backward(module: nn.Module) -> LoopError:
    """Return the error for a second backward through one forward at stage 3."""
    return LoopError(
        f"a second backward through one forward of the {type(module).__name__}: ZeRO stage 3 has released its weights "
        "after the first.\nAdd the losses and call backward() once, call the model again for the second loss, or use "
        "stage 2."
    )


def _explain_sparse_gradients(error: BaseException, module: nn.Module) -> LoopError | None:
    """Return a clearer error instead of torch's where DeepSpeed meets a sparse gradient; None for other errors."""
    if not isinstance(error, RuntimeError) or "sparse" not in str(error).lower():
        return None
    names = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    which = f"of {', '.join(names[:4])}" if names else "of a parameter"
    return LoopError(
        f"the gradient {which} of the {type(module).__name__} is a sparse tensor, and DeepSpeed partitions dense "
        "ones.\nCall torch.nn.functional.embedding with sparse=False, or train without DeepSpeed "
        "(distributed_type: MULTI_GPU)."
    )


def _is_second_gradient(error: BaseException) -> bool:
    """Return whether a parameter got two gradients in one backward; a hook of the script may raise such words too."""
    if not any(words in str(error) for words in _OF_SECOND_GRADIENTS):
        return isinstance(error, SecondGradientError)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("deepspeed.")


def runs_forward(engine: Any) -> bool:
    """Return whether a forward of the engine runs, in which a function may compute gradients itself (a tiled loss)."""
    # Autograd computes gradients in a thread for each device. One frame is this function's own, which must not be in a
    # variable of its own: it would keep itself, and all that the functions around it have.
    return any(_is_in_forward(frame, engine) for frame in sys._current_frames().values())


def _is_in_forward(frame: FrameType | None, engine: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is engine:
            return True
        frame = frame.f_back
    return False


def refuse_engine_backward(*_: Any, **__: Any) -> NoReturn:
    """Replaces the engine's `backward`, which would divide the loss or step."""
    raise LoopError(DIRECT_BACKWARD.replace("loss.backward()", "model.backward(loss)"))


def refuse_engine_step(*_: Any, **__: Any) -> NoReturn:
    """Replaces the engine's `step`, which would ignore the accumulation window."""
    raise LoopError("model.step() was called; call optimizer.step() of the optimizer from prepare().")
