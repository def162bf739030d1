"""Builds the torch optimizer that a configuration's `optimizer` section describes, and describes real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.defaults import OPTIMIZER_DEFAULTS
from zero_plugin.resolve.facts import OptimizerFacts
from zero_plugin.resolve.resolved import OptimizerSection

__all__ = ["Lion", "build_optimizer", "describe_optimizer"]

_ONLY_DEEPSPEED = ("lamb", "muon", "muadam", "muadamw", "musgd")
_SECTION = "the optimizer section"
# DeepSpeed's own classes by name, since only its strategy may import them.
_DEEPSPEED_CLASSES = {
    "deepspeedcpuadam": "adam",
    "fusedadam": "adam",
    "deepspeedcpulion": "lion",
    "fusedlion": "lion",
    "deepspeedcpuadagrad": "adagrad",
}


class Lion(Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): a step of size `lr` along the sign of interpolated momentum.

    It equals DeepSpeed's kernels but where that momentum is exactly 0 (the row of a token that never occurred): there
    the paper stands still, DeepSpeed's CPU kernel moves by -lr and its CUDA kernel by +lr.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: weights of the momentum in the update, and in the next momentum. Defaults are DeepSpeed's.
        weight_decay: decoupled: weights shrink by `lr * weight_decay` each step.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one update; with a closure, return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = momentum.mul(beta1).add_(parameter.grad, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


def build_optimizer(section: OptimizerSection, params: Iterable[Any]) -> Optimizer:
    """The torch optimizer that computes what DeepSpeed's would for the same section.

    Args:
        section: type as DeepSpeed understands it (`Adam` is AdamW unless `adam_w_mode` is false), parameters; absent
            ones take DeepSpeed's defaults.
        params: parameters or parameter groups; a group's own values win.

    Raises:
        ConfigError: the type, or a parameter, has no equal in torch.
    """
    kind = section.type.lower()
    arguments = {**OPTIMIZER_DEFAULTS.get(kind, {}), **section.params}
    groups = list(params)
    if "max_grad_norm" in arguments:
        _refuse("params.max_grad_norm", "DeepSpeed takes it from nowhere here.", "Write gradient_clipping instead.")
    if kind in _ONLY_DEEPSPEED:
        _refuse("type", f"{section.type} exists in DeepSpeed only.", "Train with DeepSpeed, or write AdamW.")
    build: Callable[..., Optimizer]
    if kind in ("adam", "adamw"):
        build = _adam_class(kind, arguments, groups)
    elif kind == "lion":
        _drop_state_precision(arguments, groups)
        build = Lion
    elif kind == "adagrad":
        _drop_state_precision(arguments, groups)
        build = torch.optim.Adagrad
    else:
        named = getattr(torch.optim, section.type, None)
        if not (isinstance(named, type) and issubclass(named, Optimizer)):
            fix = "Write AdamW, Adam, SGD, RMSprop, Adagrad, Lion, or an exact class name of torch.optim."
            _refuse("type", f"{section.type} is neither an optimizer of DeepSpeed nor one of torch.optim.", fix)
        build = named
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return build(groups, **arguments)
    except (TypeError, ValueError) as error:
        _refuse("params", str(error), f"Write the arguments of {section.type}.", error)


def _adam_class(kind: str, arguments: dict[str, Any], groups: list[Any]) -> type[Optimizer]:
    """Adam's or AdamW's class; takes DeepSpeed's own arguments out of `arguments`, honouring or refusing each."""
    decoupled = arguments.pop("adam_w_mode", True) or kind == "adamw"
    arguments.pop("torch_adam", None)  # it is torch's either way
    if not arguments.pop("bias_correction", True):
        fix = "Train with DeepSpeed, or remove the key."
        _refuse("params.bias_correction", "false: torch's Adam always corrects its bias.", fix)
    _drop_state_precision(arguments, groups)
    chosen: type[Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
    return chosen


def _drop_state_precision(arguments: dict[str, Any], groups: list[Any]) -> None:
    """`fp32_optimizer_states`: torch keeps states in the parameters' type, which is what false asks for."""
    if not arguments.pop("fp32_optimizer_states", False):
        return
    members = [p for item in groups for p in (item["params"] if isinstance(item, dict) else [item])]
    tensors = [p for member in members for p in (member if isinstance(member, list | tuple) else [member])]
    if any(isinstance(p, Tensor) and p.dtype != torch.float32 for p in tensors):
        fix = "Build the model in fp32 and let mixed_precision choose the type of computation."
        _refuse("params.fp32_optimizer_states", "true, but the parameters, and so torch's states, are not fp32.", fix)


def describe_optimizer(optimizer: Optimizer) -> OptimizerFacts:
    """What resolution may know of a real torch optimizer: its algorithm's name, its defaults, its groups' rates."""
    name = type(optimizer).__name__.lower()
    name = _DEEPSPEED_CLASSES.get(name, name)
    # A wrapper that does not call Optimizer.__init__ may have no defaults.
    given = {key: _plain(value) for key, value in getattr(optimizer, "defaults", {}).items()}
    decoupled = given.get("decoupled_weight_decay") or getattr(optimizer, "adam_w_mode", False)
    if name == "adam" and decoupled:
        name = "adamw"
    lrs = tuple(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    return OptimizerFacts(name=name, given=given, group_lrs=lrs)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _refuse(key: str, message: str, fix: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError([Problem(_SECTION, f"optimizer.{key}", message, fix)]) from cause
