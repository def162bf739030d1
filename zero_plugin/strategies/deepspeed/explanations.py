"""Explain errors of torch and DeepSpeed in a backward or a step, and refuse an engine's own calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from zero_plugin.errors import Foreign, LoopError, raise_clearer
from zero_plugin.strategies.base import DIRECT_BACKWARD, OWN_GRADIENTS, SecondGradientError, describe_second_gradient
from zero_plugin.strategies.deepspeed.nvme import describe_failed_swap

_TORCH = "torch/lib/libtorch_cpu.so"
SECOND_BACKWARD = (
    "a second backward through one forward of the {model}: ZeRO stage 3 has released its weights after the first.\n"
    "Add the losses and call backward() once, call the model again for the second loss, or use stage 2."
)


def _describe_released(module: nn.Module, model: str, **_: Any) -> str:
    is_set = any(p.grad is not None and p.grad.numel() == 0 < getattr(p, "ds_numel", 0) for p in module.parameters())
    return OWN_GRADIENTS if is_set else SECOND_BACKWARD.format(model=model)


def _describe_second(*, is_nested: bool, **_: Any) -> str:
    return describe_second_gradient("At ZeRO stages 2 and 3 only one of them would count", is_nested=is_nested)


def _describe_sparse(module: nn.Module, model: str, **_: Any) -> str:
    names = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    which = f"of {', '.join(names[:4])}" if names else "of a parameter"
    return (
        f"the gradient {which} of the {model} is a sparse tensor, but DeepSpeed partitions only dense ones.\nCall "
        "torch.nn.functional.embedding with sparse=False, or train without DeepSpeed (distributed_type: MULTI_GPU)."
    )


_OF_EMPTY_WEIGHTS = (
    # A product with a weight that was released after the first backward through the weight's forward.
    Foreign(r"size of tensor \w \(0\) must match", _TORCH, _describe_released),
    # The gradient of a tensor that was empty in the forward.
    Foreign(
        r"invalid gradient at index \d+ - got \[0\]",
        _TORCH,
        "the loss was computed from parameters of the {model} outside of its forward, where they are empty at ZeRO "
        "stage 3.\nReplace a penalty on weights by the optimizer's weight_decay, or use stage 2.",
    ),
)
_STAGE_2 = "deepspeed/runtime/zero/stage_1_and_2.py"
_OF_ALL_STAGES = (
    Foreign("", "", describe_failed_swap, AssertionError, "deepspeed.runtime.swap_tensor."),
    # A parameter that gets two gradients in one backward. A hook of the script may raise the same messages.
    Foreign("has already been reduced", _STAGE_2, _describe_second, AssertionError, "deepspeed."),
    Foreign("'NoneType' object has no attribute 'numel'", "", _describe_second, AttributeError, "deepspeed."),
    Foreign("", "", _describe_second, SecondGradientError),
    Foreign("(?i)sparse", _TORCH, _describe_sparse),
)


def explain(error: BaseException, engine: Any, folders: tuple[Path, ...], *, is_nested: bool) -> None:
    """Raise a clearer error for an error in a backward or a step; return if no row matches.

    Args:
        error: the error.
        engine: the engine.
        folders: the NVMe folders of the engine.
        is_nested: whether the running backward's loss depends on no weight: then its hook runs other backwards.
    """
    module: nn.Module = engine.module
    rows = (*_OF_EMPTY_WEIGHTS, *_OF_ALL_STAGES) if engine.zero_optimization_partition_weights() else _OF_ALL_STAGES
    model = type(module).__name__
    raise_clearer(error, rows, module=module, model=model, folders=folders, is_nested=is_nested)


def runs_forward(engine: Any) -> bool:
    """Return whether a forward of the engine is running; a function in it may compute gradients (a tiled loss)."""
    # Look at all threads: autograd has one for each device. Do not store a frame in a variable: one frame is this
    # function's own, which would then keep itself and all its callers' variables alive.
    return any(_is_in_forward(frame, engine) for frame in sys._current_frames().values())


def _is_in_forward(frame: FrameType | None, engine: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is engine:
            return True
        frame = frame.f_back
    return False


def refuse_engine_backward(*_: Any, **__: Any) -> NoReturn:
    """Refuse the engine's `backward`, which would divide the loss or step."""
    raise LoopError(DIRECT_BACKWARD.replace("loss.backward()", "model.backward(loss)"))


def refuse_engine_step(*_: Any, **__: Any) -> NoReturn:
    """Refuse the engine's `step`, which would ignore the accumulation window."""
    raise LoopError("model.step() was called; call optimizer.step() of the optimizer from prepare().")
