"""Mixed precision: autocast, the loss scale of fp16, casting of inputs and outputs, and checks for finite gradients.

The loss scale follows the rule of DeepSpeed's ZeRO, so all strategies have the same scale.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_plugin.config.handlers import AutocastKwargs
from zero_plugin.errors import Foreign, raise_clearer
from zero_plugin.tensors.nested import map_leaves, to_fp32
from zero_plugin.tensors.wrappers import wrap_forward

_TWO_DTYPES = Foreign(
    "dtype|scalar type",
    "torch/lib/libtorch_cpu.so",
    "a layer cannot combine {dtype} weights with another dtype ({error}). The model has floating-point buffers that "
    'are not {dtype}: {names}.\nWrite "data_types": {{"buffer_dtype": "{short}"}} into the DeepSpeed configuration, or '
    "cast in the model's forward: x + self.table.to(x.dtype).",
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_as(precision: str, device_type: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
    """Return `torch.autocast` in the dtype of `precision`; for `no`, a context that does nothing."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device_type, _DTYPES[precision], **({} if handler is None else handler.to_kwargs()))


def run_under_autocast(
    module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], device_type: str
) -> Callable[[], None]:
    """Run `module.forward` under `autocast`, of `device_type`, and return fp32; the returned function undoes this.

    Other methods of the module that call submodules outside of the forward compute in fp32, with a warning.
    """
    watch = _Watch(module, device_type)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch.depth += 1
        try:
            with autocast():
                outputs = forward(*args, **kwargs)
        finally:
            watch.depth -= 1
        return map_leaves(to_fp32, outputs)

    unwrap = wrap_forward(module, run)

    def undo() -> None:
        watch.remove()
        unwrap()

    return undo


class _Watch:
    """A watch that warns once if a submodule is called outside of the module's forward.

    Copies of the module, including pickled ones, are not watched.

    Args:
        module: the module to watch, or None.
        device_type: the device type of the forward's autocast.

    Attributes:
        depth: the number of the module's forwards that are running.
    """

    def __init__(self, module: nn.Module | None = None, device_type: str = "cpu") -> None:
        self.depth = 0
        self._device_type = device_type
        self._kind = type(module).__name__
        self._hooks = [] if module is None else [c.register_forward_pre_hook(self) for c in module.children()]

    def __call__(self, child: nn.Module, _: Any) -> None:
        if self.depth or not self._hooks or not torch.is_grad_enabled():
            return
        if not torch.is_autocast_enabled(self._device_type):
            self.remove()
            warnings.warn(
                f"the {type(child).__name__} of a prepared {self._kind} is called outside of its forward: it "
                "computes in fp32, not under autocast. Call the prepared model, or write "
                "`with accelerator.autocast():` around the call.",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


def most_skips(initial: float, smallest: float, hysteresis: int, backoff: float = 0.5) -> int:
    """Return how many skipped steps in a row stop a run: by then the scale has reached its minimum.

    The first `hysteresis` - 1 skips do not change the scale. The next log2(initial / smallest) skips halve it. One more
    shows that the scale was not the cause.
    """
    halvings = 0
    while initial > smallest:
        initial *= backoff
        halvings += 1
    return halvings + max(1, hysteresis)


# 18, with the defaults of the `fp16` section. Also used without a dynamic scale: fp32, bf16, a fixed scale.
DEFAULT_MOST_SKIPS = most_skips(2.0**16, 1.0, 2)


class FoundInf:
    """Whether a gradient is not finite, as a number on the device. A fused optimizer skips its step by this number.

    Args:
        value: a new scalar tensor in fp32: 1 if a gradient is not finite, 0 otherwise; `found_inf` of `GradScaler`.

    Attributes:
        value: the given tensor.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        # Reading `value` would wait for all queued work. Its copy is ready as soon as the event is.
        self._copy = value.to("cpu", non_blocking=value.is_cuda)
        self._copied = torch.cuda.current_stream(value.device).record_event() if value.is_cuda else None
        self._found: bool | None = None  # the result of `read`

    def read(self) -> bool:
        """Return the number as a bool. The first call waits for its computation, but not for work queued later."""
        if self._found is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._found = bool(self._copy)
        return self._found


class Measured(NamedTuple):
    """The known facts about the complete gradients of a window.

    Attributes:
        finite: whether all of them are finite, or a `FoundInf` on the device; None if not checked.
        norm: the norm before clipping (scalar, fp32); None if not computed.
        limit: the norm at which the step itself will clip.
    """

    finite: bool | FoundInf | None = None
    norm: Tensor | None = None
    limit: float = inf


class LossScale:
    """The dynamic or fixed loss scale: lowered after skipped steps, raised after a number of applied ones.

    Args:
        section: the `fp16` section: `loss_scale` (0: dynamic, otherwise fixed), `initial_scale_power`,
            `loss_scale_window`, `hysteresis`, `consecutive_hysteresis`, `min_loss_scale`. Defaults are DeepSpeed's.
        growth, backoff: the factors that raise and lower the scale; DeepSpeed supports only the defaults.

    Attributes:
        value: the current loss scale.
        most_skips: see the function `most_skips`.
    """

    def __init__(self, section: Mapping[str, Any], growth: float = 2.0, backoff: float = 0.5) -> None:
        self._growth = growth
        self._backoff = backoff
        fixed = float(section.get("loss_scale") or 0.0)
        self._dynamic = fixed == 0.0
        self._window = int(section.get("loss_scale_window", 1000))
        self._hysteresis = max(1, int(section.get("hysteresis", 2)))
        self._refills = bool(section.get("consecutive_hysteresis", False))
        self._smallest = float(section.get("min_loss_scale", 1))
        self._patience = self._hysteresis  # skips left until the scale is lowered, this one included
        self._good = 0  # applied steps since the last skip
        self.value = 2.0 ** int(section.get("initial_scale_power", 16)) if self._dynamic else fixed
        self.most_skips = (
            most_skips(self.value, self._smallest, self._hysteresis, backoff) if self._dynamic else DEFAULT_MOST_SKIPS
        )

    def update(self, *, skipped: bool) -> None:
        """Update the scale after a step."""
        if not self._dynamic:
            return
        if skipped:
            self._good = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.value = max(self.value * self._backoff, self._smallest)
            return
        grows = self._good > 0 and self._good % self._window == 0
        if self._refills or grows:
            self._patience = self._hysteresis
        if grows:
            self.value *= self._growth
        self._good += 1

    def state(self) -> dict[str, float]:
        """Return the state for checkpoints: scale, applied steps since the last skip, skips left until lowering."""
        return {"value": self.value, "good_steps": self._good, "patience": self._patience}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a `state`. A fixed scale does not change."""
        if self._dynamic:
            self.value, self._good = float(state["value"]), int(state["good_steps"])
            self._patience = int(state["patience"])


def all_finite(gradients: list[Tensor], factor: float = 1.0, before_reading: Callable[[], None] | None = None) -> bool:
    """Multiply the gradients by `factor` and return whether all are finite, in one pass as in torch's GradScaler.

    On XLA, finite gradients count as not finite if the sum over a parameter overflows its dtype. The norm for clipping
    overflows earlier.

    Args:
        gradients: dense or sparse gradients.
        factor: the inverse of the loss scale; not used on XLA.
        before_reading: called before the result is read from the device.
    """
    kinds = {(gradient.device, gradient.dtype, gradient.is_sparse) for gradient in gradients}
    for device, dtype, is_sparse in kinds:
        tensors = gradients  # nearly always: all gradients are of one kind
        if is_sparse or dtype.is_complex or len(kinds) > 1:
            kind = device, dtype, is_sparse
            tensors = [dense(g) for g in gradients if (g.device, g.dtype, g.is_sparse) == kind]
        if device.type == "xla" and factor == 1.0:
            # Each recorded operation costs time on XLA, and in-place operations copy.
            sums = torch.stack([tensor.sum() for tensor in tensors])
            if before_reading is not None:
                before_reading()
            if not all(map(isfinite, sums.tolist())):
                return False
            continue
        flag = _flag(device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, _number(factor, device))
        if before_reading is not None:
            before_reading()
        if flag.item():
            flag.zero_()
            return False
    return True


def find_nonfinite(gradients: list[Tensor]) -> FoundInf | None:
    """Check for nonfinite gradients without a read; None for no gradients, several kinds, sparse or complex ones."""
    kinds = {(gradient.device, gradient.dtype, gradient.is_sparse) for gradient in gradients}
    if len(kinds) != 1 or gradients[0].is_sparse or gradients[0].is_complex():
        return None
    device = gradients[0].device
    found = torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, _number(1.0, device))
    return FoundInf(found)


def dense(gradient: Tensor) -> Tensor:
    """Return a dense, real view of a gradient, which may be sparse or complex."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


# The tensors are cached: creating them at each step would take longer than the pass over a small model.


@cache
def _flag(device: torch.device) -> Tensor:
    """Return the tensor into which the kernel writes 1 if a value is not finite; 0 between two calls."""
    return torch.zeros(1, device=device)


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)


def compute_in(model: nn.Module, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Cast floating-point inputs of `model` to `dtype`, and floating-point outputs to fp32.

    The loss is computed as without mixed precision. Buffers keep their dtype, as with DeepSpeed: if a layer cannot
    combine their dtype with its weights' dtype, the error names the buffers.

    Returns:
        The functions that undo this.
    """
    if dtype == torch.float32:
        return []

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_leaves(cast, args), map_leaves(cast, kwargs)

    undo = [
        model.register_forward_pre_hook(cast_inputs, with_kwargs=True).remove,
        model.register_forward_hook(lambda _module, _inputs, outputs: map_leaves(to_fp32, outputs)).remove,
    ]
    wide = [name for name, b in model.named_buffers() if b.is_floating_point() and b.dtype != dtype]
    if wide:
        naming = functools.partial(_run_naming_buffers, wide, str(dtype).removeprefix("torch."))
        undo.append(wrap_forward(model, naming))
    return undo


def _run_naming_buffers(wide: list[str], dtype: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        names = ", ".join(wide[:6]) + (f" and {len(wide) - 6} more" if len(wide) > 6 else "")
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        raise_clearer(error, [_TWO_DTYPES], dtype=dtype, short=short, names=names)
        raise
