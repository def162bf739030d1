"""The optimizer that an engine runs: the user's own algorithm, on DeepSpeed's kernel where there is an equal one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.optimizers import Lion, build_optimizer
from zero_plugin.placeholders import DummyOptim
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.base import SessionRequest

__all__ = ["engine_optimizer"]

# DeepSpeed implements these for ZeRO although their update depends on a tensor's shape or norm.
_BUILT_BY_ENGINE_ONLY = frozenset({"lamb", "muon", "muadam", "muadamw", "musgd"})


def engine_optimizer(request: SessionRequest, device: torch.device) -> Optimizer | None:
    """The optimizer to hand to `deepspeed.initialize`; None where the engine builds it from the config's section.

    ZeRO updates flat partitions, so an update that looks at a tensor's shape or norm would train, and differ: refused.

    Raises:
        ConfigError: the optimizer is not elementwise and the stage is 1 or more.
    """
    resolved = request.resolved
    offloaded = resolved.offload_device("optimizer") != "none"
    if isinstance(request.optimizer, DummyOptim):
        section = resolved.optimizer
        assert section is not None, "resolution gives every placeholder a section"
        kind = section.type.lower()
        if kind in _BUILT_BY_ENGINE_ONLY or (offloaded and kind in ("adam", "adamw", "adagrad", "lion")):
            return None
        if kind in ("adam", "adamw") and device.type != "cpu":
            return None  # DeepSpeed's fused CUDA kernel, or torch's with torch_adam
        if kind == "lion" and device.type != "cpu":
            return None
        optimizer = build_optimizer(section, request.optimizer.params)
    else:
        assert request.optimizer is not None
        optimizer = request.optimizer
    if resolved.zero_stage > 0:
        _refuse_unless_elementwise(optimizer, resolved)
    replacement: Optimizer | None = _equal_kernel(optimizer, offloaded=offloaded)
    if replacement is None:
        return optimizer
    _move_schedules(request.schedules, replacement)
    # What the script has built on its own optimizer and not prepared, such as another library's schedule, drives this.
    optimizer.param_groups = replacement.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules warn where it never steps
    return replacement


def _equal_kernel(optimizer: Optimizer, *, offloaded: bool) -> Any:
    """The same algorithm with the same groups as an object that DeepSpeed runs better, or at all; else None."""
    groups = [dict(group) for group in optimizer.param_groups]
    defaults = optimizer.defaults
    kind = type(optimizer)
    plain = not any(defaults.get(flag) for flag in ("amsgrad", "maximize", "differentiable", "decoupled_weight_decay"))
    # torch implements AdamW as Adam with decoupled decay, so both are told by class.
    if kind is torch.optim.AdamW:
        plain = not any(defaults.get(flag) for flag in ("amsgrad", "maximize", "differentiable"))
    if kind in (torch.optim.Adam, torch.optim.AdamW) and offloaded and plain:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        keep = ("lr", "betas", "eps", "weight_decay")
        arguments = {name: defaults[name] for name in keep}
        return DeepSpeedCPUAdam(
            [{**group, "bias_correction": True} for group in groups],
            **arguments,
            adamw_mode=kind is torch.optim.AdamW,
        )
    if kind is Lion and offloaded:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, **{name: defaults[name] for name in ("lr", "betas", "weight_decay")})
    if kind is torch.optim.Adagrad:
        simple = plain and not defaults["lr_decay"] and not defaults["initial_accumulator_value"]
        if offloaded and simple:
            from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

            return DeepSpeedCPUAdagrad(groups, **{name: defaults[name] for name in ("lr", "eps", "weight_decay")})
        return FlatAdagrad(groups, defaults)
    return None


class FlatAdagrad(Optimizer):
    """torch's Adagrad with its states made at the first step.

    DeepSpeed rebuilds `torch.optim.Adagrad` over its flat partitions with one group and the default arguments, because
    torch's makes its states in the constructor; that loses the groups and detaches the schedule.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not with_gradient:
                continue
            states = [self._state(p, group) for p in with_gradient]
            adagrad(
                with_gradient,
                [p.grad for p in with_gradient],
                [state["sum"] for state in states],
                [state["step"] for state in states],
                has_sparse_grad=False,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                lr_decay=group["lr_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=group["foreach"],
            )
        return loss

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])
        return state


def _refuse_unless_elementwise(optimizer: Optimizer, resolved: Resolved) -> None:
    """Steps of the same optimizer on a small matrix, and apart on the halves of its flattened copy, must agree."""
    allowed = resolved.tree.get("zero_allow_untested_optimizer")
    if allowed is not None and allowed.value is True and allowed.origin.typed_by_user:
        return
    if type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS:
        return  # torch's and DeepSpeed's own, of which some run on a GPU only
    name = type(optimizer).__name__
    try:
        same = _updates_elementwise(optimizer)
        why = "its update depends on the shape or norm of whole tensors, and ZeRO updates flat pieces of them"
    except Exception as error:  # noqa: BLE001 - any optimizer may come here; what it raises is the reason shown
        same, why = False, f"it could not be tried on a flat tensor ({type(error).__name__}: {error})"
    if not same:
        raise ConfigError(
            [
                Problem(
                    "prepare(optimizer)",
                    "optimizer",
                    f"{name} cannot run at ZeRO stage {resolved.zero_stage}: {why}. It would train, and differ.",
                    "Use stage 0 or DDP with it, or an elementwise optimizer (AdamW, Adam, SGD, RMSprop, Lion, "
                    'Adagrad). If you know better: "zero_allow_untested_optimizer": true.',
                )
            ]
        )


def _updates_elementwise(optimizer: Optimizer) -> bool:
    shape, steps = (8, 16), 3
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn((1 + steps, *shape), generator=generator, dtype=torch.float64)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        whole = _update(optimizer, options, start, gradients).flatten()
        # Each half has an optimizer of its own, as each process has: statistics over all tensors count too.
        halves = zip(*(tensor.flatten().chunk(2) for tensor in (start, *gradients)), strict=True)
        pieces = torch.cat([_update(optimizer, options, first, list(rest)) for first, *rest in halves])
        if not torch.allclose(whole, pieces, rtol=1e-5, atol=0.0):
            return False
    return True


def _update(optimizer: Optimizer, options: dict[str, Any], start: Tensor, gradients: list[Tensor]) -> Tensor:
    """How far an optimizer of the same class and options takes `start`."""
    parameter = torch.nn.Parameter(start.clone())
    # A large step shows every difference, and a schedule may have set the present one to 0.
    group = {**options, "params": [parameter], **({"lr": 0.1} if "lr" in options else {})}
    if "capturable" in group:
        group["capturable"] = False  # about CUDA graphs only, and refused for tensors on the CPU
    trial = _like(optimizer, [group])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        trial.step()
    return parameter.detach() - start


def _like(optimizer: Optimizer, params: list[Any]) -> Optimizer:
    """An optimizer of the same class and arguments over `params`."""
    if isinstance(optimizer, FlatAdagrad):
        return FlatAdagrad(params, optimizer.defaults)
    # `defaults` holds the constructor's arguments, and where a class is built on another (torch's AdamW on Adam) also
    # arguments that only the base takes.
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    arguments = {k: v for k, v in optimizer.defaults.items() if (takes_any or k in accepted) and k != "params"}
    return type(optimizer)(params, **arguments)


def _move_schedules(schedules: Iterable[Any], optimizer: Optimizer) -> None:
    """Make schedules that were built on another optimizer drive this one."""
    step = optimizer.step

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    # torch's schedules look for this mark to warn of a schedule that runs ahead of its optimizer.
    counted_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted_step  # type: ignore[method-assign]
    pending = list(schedules)
    while pending:
        schedule = pending.pop()
        schedule.optimizer = optimizer
        pending.extend(getattr(schedule, "_schedulers", ()))
