"""Which optimizer and which schedules of one `prepare` call belong to which model, told by the parameters they hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.bigmodel.align import has_offloaded_params
from zero_plugin.errors import LoopError
from zero_plugin.placeholders import DummyOptim

__all__ = ["Pair", "holds_any", "pair_models", "parameters_left_out", "refuse_closure"]


class Pair(NamedTuple):
    """A model, its optimizer if it is to be trained, and the schedules built on that optimizer."""

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    schedules: tuple[Any, ...]


def pair_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | DummyOptim],
    schedules: Sequence[Any],
    prepared: Iterable[nn.Module],
) -> list[Pair]:
    """One pair for each of `models`, in their order.

    Args:
        models, optimizers, schedules: those of one `prepare` call.
        prepared: the users' modules of earlier calls.

    Raises:
        LoopError: an optimizer of no model or of several, two optimizers for one model, models that share parameters,
            a model spread over devices.
    """
    _refuse_shared(models, prepared)
    for model in models:
        _refuse_device_map(model)
    owners: dict[int, Optimizer | DummyOptim] = {}
    for optimizer in optimizers:
        model = _model_of(optimizer, models)
        if id(model) in owners:
            raise LoopError(
                f"prepare() got two optimizers of the {type(model).__name__}; build one, with parameter groups."
            )
        owners[id(model)] = optimizer
    return [
        Pair(model, optimizer, tuple(s for s in schedules if optimizer is not None and s.optimizer is optimizer))
        for model in models
        for optimizer in (owners.get(id(model)),)
    ]


def refuse_closure(optimizer: Any) -> None:
    """Refuse an optimizer that computes losses within its step, such as LBFGS.

    Raises:
        LoopError: its step cannot be called without a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise LoopError(
            f"prepare() got a {type(optimizer).__name__}, whose step() computes the loss itself, several times, in a "
            "closure: here gradients come from accelerator.backward(loss), once for each step.\nUse an optimizer that "
            "steps without a closure, such as AdamW; or train by plain torch on one device, without prepare()."
        )


def holds_any(optimizer: Optimizer | DummyOptim, model: nn.Module) -> bool:
    """Whether the optimizer holds a parameter of the model."""
    held = {id(p) for p in _parameters(optimizer)}
    return any(id(p) in held for p in model.parameters())


def parameters_left_out(optimizer: Optimizer | DummyOptim, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the model that get gradients, and that the optimizer does not hold."""
    held = {id(p) for p in _parameters(optimizer)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in held]


def _model_of(optimizer: Optimizer | DummyOptim, models: Sequence[nn.Module]) -> nn.Module:
    held = {id(p) for p in _parameters(optimizer)}
    counts = [sum(id(p) in held for p in model.parameters()) for model in models]
    most = max(range(len(models)), key=counts.__getitem__)
    if foreign := len(held) - counts[most]:
        others = [type(models[i]).__name__ for i, count in enumerate(counts) if count and i != most]
        if others:
            names = " and ".join([type(models[most]).__name__, *others])
            raise LoopError(
                f"prepare() got one optimizer for the parameters of several models ({names}).\n"
                "Build an optimizer for each, or put the models into one module, e.g. torch.nn.ModuleList, and prepare "
                "that."
            )
        before, now = _places(_parameters(optimizer)), _places(models[most].parameters())
        moved = f" They are on {before} and its own on {now}: it was moved after they were taken."
        raise LoopError(
            f"prepare() got an optimizer of which {foreign} of {len(held)} parameters are not the model's."
            f"{moved if before != now else ''}\n"
            "Build the optimizer from model.parameters() of the model in the same call, after every change to it."
        )
    return models[most]


def _places(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.device) for tensor in tensors}))


def _parameters(optimizer: Optimizer | DummyOptim) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        given = group["params"]
        parameters.extend([given] if isinstance(given, Tensor) else given)
    return parameters


def _refuse_shared(models: Sequence[nn.Module], prepared: Iterable[nn.Module]) -> None:
    owner: dict[int, nn.Module] = {}
    for model in (*prepared, *models):
        for p in model.parameters():
            other = owner.setdefault(id(p), model)
            if other is not model:
                raise LoopError(
                    f"prepare() got a {type(model).__name__} that shares parameters with a {type(other).__name__}, "
                    "which is prepared too.\nPrepare one module that holds both."
                )


def _refuse_device_map(model: nn.Module) -> None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise LoopError(
            f"prepare() got a {type(model).__name__} that was loaded with device_map: its layers lie on "
            f"{', '.join(sorted(places))}, and every process trains on one device.\nLoad it without device_map. Where "
            "it does not fit on one device, use ZeRO stage 3: from_pretrained() after Accelerator() then loads only "
            "this process' part."
        )
    if any(has_offloaded_params(module) for module in model.modules()):
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose weights are on its device in a forward only (cpu_offload, "
            "disk_offload): they get no gradients.\nPrepare it without; where it does not fit, use ZeRO stage 3 with "
            "offload_param_device: cpu."
        )
