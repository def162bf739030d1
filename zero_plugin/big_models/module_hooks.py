"""Hooks run code before and after a module's forward, with its arguments and its output.

One brings a module's weights and inputs to one device for the forward; another keeps the weights of layers in a small
dtype, and computes in a larger one.
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
# Layers that do nothing but compute with their own weights.
_LAYERS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


class ModelHook:
    """What runs around a module's forward; override what is needed.

    Attributes:
        no_grad: the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """When the hook comes to the module, which is returned."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ARG002
        """Before the forward; returns the arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """After the forward; returns what the caller gets."""
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Instead of `post_forward` when `pre_forward` or the forward raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """When the hook leaves the module, which is returned."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after another."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each hook gets the arguments of the one before."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each hook gets the output of the one before."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Each hook's."""
        for hook in self.hooks:
            hook.interrupted(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let a hook run around the module's `forward`, also where that is called by name.

    Args:
        module: changed in place.
        hook: takes the place of the one that is there.
        append: run it after the one that is there instead.

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
    # A partial of a function of this module: a copied or pickled model takes it along, bound to the copy.
    held.forward = functools.update_wrapper(functools.partial(_forward, module), forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off, if there is one, and give the module its own `forward` back.

    Args:
        module: changed in place.
        recurse: off all modules inside too.

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
            held.forward = held._old_forward  # it was the module's alone, not its class's
        del held._old_forward
    for guarded in ("to", "cuda"):  # by `dispatch_model`
        held.__dict__.pop(guarded, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all modules inside."""
    remove_hook_from_module(module, recurse=True)


def untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method, run as it is where `torch.compile` traces what calls it."""
    kept: list[Callable[_P, _R]] = []  # made when it is needed, because it takes seconds to import torch's compiler

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
    """Weights and inputs are on `execution_device` in the forward.

    Offloaded weights are on the meta device between forwards. They come in, out of `weights_map`, when the forward
    begins, require no gradients, and leave when it ends or raises.

    Args:
        execution_device: where the forward runs; None leaves tensors where they are.
        offload: weights leave after the forward.
        io_same_device: the output goes to where the input was.
        weights_map: values of offloaded tensors by name, which may be read only when they are taken; what it does not
            have stays on the execution device. By default the module's own values, in CPU memory.
        offload_buffers: buffers of the state dict leave too; others stay on the execution device.
        place_submodules: the weights of modules inside, too.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        tied_params_map: what the hooks of one model share, so that a tied weight is in memory once.
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
        self._inside: list[list[tuple[Slot, Tensor]]] = []  # for each running forward, what came in and what was there

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place what stays, and take out what is offloaded."""
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
        """Bring the weights in, and the arguments to them."""
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
        """Take the weights out, and the output to where the input was."""
        self.interrupted(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    @untraced
    def interrupted(self, module: nn.Module) -> None:  # noqa: ARG002
        """Take the weights out."""
        for slot, outside in self._inside.pop() if self._inside else ():
            slot.tensor = outside

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module back what it held before the hook, where it held it."""
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
    """Whether weights of the module itself leave after its forward."""
    return _offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: int | str | torch.device | None = None) -> Iterator[None]:
    """Inside, the module's own parameters have values.

    Args:
        module: with a hook that offloads, or any.
        execution_device: where they are inside; by default where the forward runs, or where they are.
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
                        tensor.copy_(slot.tensor)  # what was written into it inside
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
    """The state dict of a dispatched model, with its values on the CPU; what is on disk stays there, memory-mapped.

    Raises:
        ValueError: some tensors have no values.
    """
    return {name: tensor.to("cpu") for name, tensor in stored_values(model, model.state_dict().items())}


def stored_values(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their values, each read when it is its turn.

    Args:
        model: any; of a dispatched one, what is off its device is taken from where it is.
        tensors: the model's, with their names.

    Raises:
        ValueError: one has no values.
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
        state_dict: of the complete model.
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
    """The module's weights have one dtype in its forward and another between forwards.

    Args:
        storage_dtype: between forwards.
        compute_dtype: in the forward.
        non_blocking: do not wait for copies.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the module to the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the module to the dtype of the forward."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the module back to the dtype of storage."""
        self.interrupted(module)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Convert the module back to the dtype of storage."""
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

    Values lose what the storage dtype cannot hold; a loss is seen at once, and does not grow.

    Args:
        module: changed in place.
        storage_dtype: for example `torch.float8_e4m3fn`.
        compute_dtype: for example `torch.bfloat16`.
        skip_modules_pattern: regular expressions; modules where one is found in the name stay as they are, with all
            inside.
        skip_modules_classes: classes of modules that stay as they are, with all inside.
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
