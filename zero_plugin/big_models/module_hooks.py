"""Hooks that run code before and after a module's forward, with its arguments and its output.

One hook brings a module's weights and inputs to one device for the forward. Another one stores the weights of layers in
a small dtype, and computes in a larger one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from zero_plugin.big_models.placement import find_place
from zero_plugin.tensors.modules import SharedTensors, Slot, tensor_slots
from zero_plugin.tensors.nested import find_device, send_to_device

_P = ParamSpec("_P")
_R = TypeVar("_R")

_META: Final = torch.device("meta")
# Layers that only compute with their own weights.
_LAYERS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


class ModelHook:
    """A base class for code around a module's forward. Override the methods that you need.

    Attributes:
        no_grad: whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is added. Return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ARG002
        """Run before the forward. Return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """Run after the forward. Return the output for the caller."""
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Run instead of `post_forward` if `pre_forward` or the forward raises."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module when the hook is removed. Return the module."""
        return module


class SequentialHook(ModelHook):
    """A hook that runs several hooks one after another."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Call each hook's `init_hook`."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call each hook with the arguments from the previous one."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Call each hook with the output of the previous one."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Call each hook's `interrupted`."""
        for hook in self.hooks:
            hook.interrupted(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Call each hook's `detach_hook`."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the module's `forward`, even if code calls `forward` directly.

    Args:
        module: the module, changed in place.
        hook: the hook; it replaces an existing one.
        append: keep an existing hook, and run this one after it.

    Returns:
        The module.
    """
    held: Any = module
    present: ModelHook | None = getattr(module, "_hf_hook", None)
    if present is not None:
        remove_hook_from_module(module)
    chained = SequentialHook(present, hook) if append and present is not None else hook
    forward = held.forward
    chained.init_hook(module)
    held._old_forward = forward
    held._hf_hook = chained
    # A partial of a module-level function can be copied and pickled with the model, and is then bound to the copy.
    held.forward = functools.update_wrapper(functools.partial(_forward, module), forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the module's hook, if any, and restore its own `forward`.

    Args:
        module: the module, changed in place.
        recurse: remove the hooks of all submodules too.

    Returns:
        The module.
    """
    held: Any = module
    if hasattr(module, "_hf_hook"):
        held._hf_hook.detach_hook(module)
        del held._hf_hook
    if hasattr(module, "_old_forward"):
        del held.forward
        if getattr(module.forward, "__func__", None) is not getattr(held._old_forward, "__func__", held._old_forward):
            held.forward = held._old_forward  # the module had a `forward` of its own, different from its class's
        del held._old_forward
    for guarded in ("to", "cuda"):  # replaced by `dispatch_model`
        held.__dict__.pop(guarded, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)


def untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a method to run without tracing when `torch.compile` traces its caller."""
    kept: list[Callable[_P, _R]] = []  # created on first use, because importing torch's compiler takes seconds

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not kept:
            kept.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return kept[0](*args, **kwargs)

    return call


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    held: Any = module
    hook = cast(ModelHook, held._hf_hook)
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = held._old_forward(*args, **kwargs)
    except BaseException:
        hook.interrupted(module)
        raise
    return hook.post_forward(module, output)


class AlignDevicesHook(ModelHook):
    """A hook that brings weights and inputs to `execution_device` for the forward.

    Offloaded weights are on the meta device between forwards. The hook loads them from `weights_map` when the forward
    begins, without gradients, and removes them when it ends or raises.

    Args:
        execution_device: the device of the forward; None leaves tensors on their devices.
        offload: remove weights after the forward.
        io_same_device: move the output to the input's device.
        weights_map: name → value of an offloaded tensor. Values may be read from disk on access. Tensors that are not
            in it stay on the execution device. By default the module's own values, in CPU memory.
        offload_buffers: remove buffers of the state dict too. Other buffers stay on the execution device.
        place_submodules: include the weights of submodules.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        tied_params_map: tied weights, shared by all hooks of one model, to hold each of them in memory once.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: SharedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = SharedTensors() if tied_params_map is None else tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}  # of offloaded tensors, by name
        self._inside: list[list[tuple[Slot, Tensor]]] = []  # for each running forward: loaded slots, tensors before

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the tensors that stay to their device, and remove offloaded ones."""
        slots = list(tensor_slots(module, recurse=self.place_submodules))
        may_leave = (slot for slot in slots if slot.is_persistent and (self.offload_buffers or not slot.is_buffer))
        leaving = {slot.name: slot.tensor for slot in may_leave} if self.offload else {}
        if self.weights_map is None:
            self.weights_map = {name: tensor.to("cpu") for name, tensor in leaving.items()}
        for slot in slots:
            old = slot.tensor
            if slot.name in leaving and slot.name in self.weights_map:
                self.original_devices[slot.name] = old.device
                slot.tensor = self.tied_params_map.move(old, _META)
            elif self.execution_device is not None:
                slot.tensor = self._move(slot, old, find_place(self.execution_device))
        return module

    @untraced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the weights, and move the arguments to their device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        self._inside.append([])
        if self.offload:
            self._bring_in(module)
        if self.execution_device is None:
            return args, kwargs
        moved: tuple[tuple[Any, ...], dict[str, Any]] = (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )
        return moved

    @untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove the weights, and move the output to the input's device if configured."""
        self.interrupted(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    @untraced
    def interrupted(self, module: nn.Module) -> None:  # noqa: ARG002
        """Remove the weights."""
        for slot, outside in self._inside.pop() if self._inside else ():
            slot.tensor = outside

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module's tensors, on their devices from before the hook."""
        for slot in tensor_slots(module, recurse=self.place_submodules):
            device = self.original_devices.get(slot.name, _META)
            if device != _META:
                assert self.weights_map is not None
                slot.tensor = self.tied_params_map.move(slot.tensor, device, self.weights_map[slot.name])
        return module

    def _bring_in(self, module: nn.Module) -> None:
        if self.weights_map is None or self.execution_device is None:
            return
        device = find_place(self.execution_device)
        for slot in tensor_slots(module, recurse=self.place_submodules):
            outside = slot.tensor
            if slot.name in self.original_devices and outside.is_meta and device != _META:
                value = self.weights_map[slot.name]
                if value.shape != outside.shape:
                    raise ValueError(
                        f"{slot.name} of {type(slot.owner).__name__} has shape {tuple(outside.shape)}; the stored "
                        f"weight has {tuple(value.shape)}"
                    )
                slot.tensor = self.tied_params_map.move(outside, device, value, trainable=False)
                self._inside[-1].append((slot, outside))

    def _move(self, slot: Slot, old: Tensor, device: torch.device) -> Tensor:
        try:
            return self.tied_params_map.move(old, device)
        except ValueError as error:
            hint = "load its weights first" if slot.is_persistent else "build the model with include_buffers=False"
            raise ValueError(f"{slot.name} of {type(slot.owner).__name__}: {error}; {hint}") from error


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the module's own weights are offloaded after its forward."""
    return _offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: int | str | torch.device | None = None) -> Iterator[None]:
    """Give the module's own parameters their values inside the context.

    Args:
        module: a module with an offloading hook, or any other.
        execution_device: the parameters' device inside; by default that of the forward, or their current device.
    """
    hook = _offloading_hook(module)
    if hook is None:
        held = [slot for slot in tensor_slots(module, recurse=False) if not slot.is_buffer]
        outside = [slot.tensor for slot in held]
        shared = SharedTensors()
        try:
            if execution_device is not None:
                for slot in held:
                    slot.tensor = shared.move(slot.tensor, find_place(execution_device))
            yield
        finally:
            for slot, tensor in zip(held, outside, strict=True):
                if slot.tensor.device != tensor.device:
                    with torch.no_grad():
                        tensor.copy_(slot.tensor)  # keep changes that were made inside
                    slot.tensor = tensor
        return
    usual = hook.execution_device
    try:
        hook.execution_device = usual if execution_device is None else execution_device
        hook.pre_forward(module)
        yield
    finally:
        hook.execution_device = usual
        hook.interrupted(module)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a dispatched model, with its values on the CPU. Weights on disk are memory-mapped.

    Raises:
        ValueError: some tensors have no values.
    """
    return {name: tensor.to("cpu") for name, tensor in stored_values(model, model.state_dict().items())}


def stored_values(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with their values. Each value is read only when its tensor is reached.

    Args:
        model: any model. For a dispatched model, offloaded values are read from CPU memory or disk.
        tensors: the model's tensors, with their names.

    Raises:
        ValueError: a tensor has no values.
    """
    hooks = {prefix: _offloading_hook(module) for prefix, module in model.named_modules(remove_duplicate=False)}
    stored = {
        f"{prefix}.{name}".lstrip("."): (hook.weights_map, name)
        for prefix, hook in hooks.items()
        if hook is not None and hook.weights_map is not None
        for name in hook.original_devices
    }
    for name, tensor in tensors:
        if not tensor.is_meta:
            yield name, tensor
        elif name in stored:
            weights, key = stored[name]
            yield name, weights[key].to(tensor.dtype)
        else:
            raise ValueError(f"{name} is on the meta device and has no values")


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Tensor | str],
    device_to_put_offload: int | str | torch.device | None = "cpu",
) -> dict[str, Tensor | str]:
    """Replace a module's entries in a complete state dict by tensors that have values.

    Args:
        module: a module of a dispatched model.
        module_name: the full name of one of its weights, e.g. `layers.0.weight`.
        state_dict: the state dict of the complete model.
        device_to_put_offload: the device for values that were offloaded.

    Returns:
        The same `state_dict`.
    """
    parent, dot, _ = module_name.rpartition(".")
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for key, tensor in module.state_dict().items():
            if (name := f"{parent}{dot}{key}") in state_dict:
                state_dict[name] = tensor
    return state_dict


def _offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload), None)


class LayerwiseCastingHook(ModelHook):
    """A hook that converts the module's weights to one dtype for the forward, and to another one between forwards.

    Args:
        storage_dtype: the dtype between forwards.
        compute_dtype: the dtype in the forward.
        non_blocking: do not wait for copies.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the module to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the module to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the module back to the storage dtype."""
        self.interrupted(module)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Convert the module back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Put a `LayerwiseCastingHook` on every linear and convolution layer.

    Values are rounded to the storage dtype. The rounding happens when the hook is added, and does not accumulate.

    Args:
        module: the module, changed in place.
        storage_dtype: for example `torch.float8_e4m3fn`.
        compute_dtype: for example `torch.bfloat16`.
        skip_modules_pattern: regular expressions. Modules whose names match one are unchanged, with all submodules.
        skip_modules_classes: classes of modules that are unchanged, with all submodules.
        non_blocking: do not wait for copies.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    remaining = [("", module)]
    while remaining:
        name, part = remaining.pop()
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, _LAYERS):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            remaining.extend((f"{name}.{key}".lstrip("."), child) for key, child in part.named_children())
