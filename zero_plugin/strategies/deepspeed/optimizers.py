"""Choose the optimizer that an engine runs, and refuse models and configurations that an engine cannot train."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import OptimizerSection, Resolved
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.strategies.base import SessionRequest, describe_renormalizing
from zero_plugin.strategies.deepspeed.optimizer_trial import why_not_elementwise
from zero_plugin.strategies.deepspeed.patches import Patches
from zero_plugin.strategies.torch_optimizers import Lion, build_optimizer

_log = logging.getLogger(__name__)

_OF_MUP = frozenset({"muadam", "muadamw", "musgd"})  # DeepSpeed imports these from the package mup
# DeepSpeed implements these for ZeRO, although their update depends on a tensor's shape or norm.
_BUILT_BY_ENGINE_ONLY = frozenset({"lamb", "muon", *_OF_MUP})
_TORCH_CLASSES: Final[Mapping[str, type[Optimizer]]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
}
_DECOUPLED: Final = "decoupled_weight_decay"
# The options of each group that DeepSpeed's kernels read at every step.
_KERNEL_OPTIONS: Final[Mapping[type[Optimizer], set[str]]] = {
    torch.optim.Adam: {"lr", "betas", "eps", "weight_decay", _DECOUPLED},
    torch.optim.AdamW: {"lr", "betas", "eps", "weight_decay", _DECOUPLED},
    torch.optim.Adagrad: {"lr", "eps", "weight_decay"},
    Lion: {"lr", "betas", "weight_decay"},
}
_SPEED_OPTIONS: Final = ("foreach", "fused", "capturable")  # they select an implementation
_ADAGRAD_OPTIONS: Final = ("lr", "lr_decay", "weight_decay", "eps", "maximize", "differentiable", "foreach", "fused")
_UNTESTED: Final = "zero_allow_untested_optimizer"
_FORCE: Final = "zero_force_ds_cpu_optimizer"
_RATIO: Final = ("zero_optimization", "offload_optimizer", "ratio")


def engine_optimizer(request: SessionRequest, device: torch.device) -> Optimizer | None:
    """Return the optimizer for `deepspeed.initialize`; None if the engine builds it from the configuration's section.

    ZeRO updates flat partitions, so updates that depend on a tensor's shape or norm are refused.

    Raises:
        ConfigError: the optimizer is not elementwise, and the stage is 1 or more; or the optimizer is offloaded, and
            does not match the configuration's `ratio` or `zero_force_ds_cpu_optimizer`; or its package is not
            installed.
    """
    resolved, placeholder = request.resolved, request.optimizer
    offloaded = resolved.offload_device("optimizer") != "none"
    if isinstance(placeholder, DummyOptim):
        section = resolved.optimizer
        assert section is not None, "resolution gives every placeholder a section"
        groups = [{**section.params, **group} for group in placeholder.param_groups]
        if _engine_builds(section, groups, resolved, device):
            kind = section.type.lower()
            if kind in _OF_MUP:
                _check_mup(section, resolved)
            if kind not in _BUILT_BY_ENGINE_ONLY:
                decoupled = kind == "adamw" or (kind == "adam" and section.params.get("adam_w_mode", True))
                _check_full_offload(section.type, resolved, adamw=bool(decoupled))
            return None
        optimizer = build_optimizer(section, placeholder.params)
    else:
        assert placeholder is not None
        optimizer = placeholder
    _refuse_idle_groups(optimizer, resolved, has_schedulers=bool(request.schedulers))
    if resolved.zero_stage > 0:
        _refuse_unless_elementwise(optimizer, request.model, resolved)
    replacement: Optimizer | None = None
    if offloaded:
        replacement = _cpu_optimizer(optimizer, resolved) if _forced(resolved) is not False else None
        _check_kernel(optimizer, replacement, request)
    if replacement is None and type(optimizer) is torch.optim.Adagrad:
        replacement = FlatAdagrad([dict(group) for group in optimizer.param_groups], optimizer.defaults)
    if replacement is None:
        return optimizer
    _move_schedulers(request.schedulers, replacement)
    # Unprepared objects on the script's optimizer, e.g. another library's scheduler, must drive the new one.
    optimizer.param_groups = replacement.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers would warn that it never steps
    return replacement


def _refuse_idle_groups(optimizer: Optimizer, resolved: Resolved, *, has_schedulers: bool) -> None:
    """Refuse a group that DeepSpeed drops although schedulers have its rate, or that stages 1 and 2 fail at."""
    for index, group in enumerate(optimizer.param_groups):
        fails = resolved.zero_stage in (1, 2) and not any(p.requires_grad for p in group["params"])
        if (has_schedulers and not group["params"]) or (fails and group["params"]):
            what = "no parameters" if not group["params"] else "no parameters that require gradients"
            raise LoopError(
                f"prepare() got an optimizer whose parameter group {index} has {what}, which DeepSpeed cannot step.\n"
                "Leave the group out, of the optimizer and of its schedulers."
            )


def _check_mup(section: OptimizerSection, resolved: Resolved) -> None:
    """Refuse an optimizer of a package that is not installed."""
    try:
        importlib.import_module("mup")
    except ImportError:
        entry = resolved.tree.get("optimizer", "type")
        message = f"{section.type} is of the package mup, which cannot be imported"
        fix = "Type `pip install mup`, or write AdamW or SGD."
        raise ConfigError([Problem(entry.origin.where if entry else "", "optimizer.type", message, fix)]) from None


def _forced(resolved: Resolved) -> bool | None:
    """Return the value that the user has written for `zero_force_ds_cpu_optimizer`, or None."""
    entry = resolved.tree.get(_FORCE)
    return bool(entry.value) if entry is not None and entry.origin.typed_by_user else None


def _engine_builds(
    section: OptimizerSection, groups: list[dict[str, Any]], resolved: Resolved, device: torch.device
) -> bool:
    """Return whether DeepSpeed builds the section's optimizer, by its own class or a kernel with all options."""
    kind, offloaded = section.type.lower(), resolved.offload_device("optimizer") != "none"
    if kind in _BUILT_BY_ENGINE_ONLY:
        return True
    if kind not in _TORCH_CLASSES:
        return False
    if kind in ("adam", "adamw") and section.params.get("torch_adam"):
        return offloaded or device.type != "cpu"
    typed = {name for group in groups for name in group}
    if typed.intersection(_SPEED_OPTIONS) or (offloaded and "set_grad_none" in typed):
        return False  # DeepSpeed's constructor has no such argument
    if _options_of_torch_alone(_TORCH_CLASSES[kind], groups):
        return False
    return _forced(resolved) is not False if offloaded else kind != "adagrad" and device.type != "cpu"


def _options_of_torch_alone(kind: type[Optimizer], groups: list[dict[str, Any]]) -> set[str]:
    """Return the options that a group has set and DeepSpeed's kernel for this algorithm would ignore."""
    known = {"params", *_KERNEL_OPTIONS[kind], *_SPEED_OPTIONS}
    options = inspect.signature(kind).parameters.keys() - known
    return {name for name in options for group in groups if group.get(name)}


def _cpu_optimizer(optimizer: Optimizer, resolved: Resolved) -> Any:
    """Return DeepSpeed's CPU optimizer with the same algorithm and groups; None without an equivalent one."""
    kind, groups = type(optimizer), [dict(group) for group in optimizer.param_groups]
    # torch implements AdamW as Adam with decoupled decay; DeepSpeedCPUAdam has one `adamw_mode` for all groups.
    decoupled = {bool(group.get(_DECOUPLED, kind is torch.optim.AdamW)) for group in groups}
    if kind not in _KERNEL_OPTIONS or _options_of_torch_alone(kind, groups) or len(decoupled) > 1:
        return None
    arguments = {name: optimizer.defaults[name] for name in _KERNEL_OPTIONS[kind] - {_DECOUPLED}}
    if kind is Lion:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, **arguments)
    if kind is torch.optim.Adagrad:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(groups, **arguments)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        [{**group, "bias_correction": True} for group in groups],
        **arguments,
        adamw_mode=decoupled.pop(),
        fp32_optimizer_states=not resolved.tree.value("bf16", "bf16_optimizer_states"),
    )


def _check_kernel(optimizer: Optimizer, kernel: Optimizer | None, request: SessionRequest) -> None:
    """Log if torch's optimizer runs offloaded. Refuse an optimizer that the configuration does not allow.

    Args:
        optimizer: the optimizer of the script.
        kernel: DeepSpeed's kernel that replaces it, or None.
        request: the request of the session.
    """
    resolved, kind = request.resolved, type(optimizer)
    forced, name = resolved.tree.get(_FORCE), kind.__name__
    is_theirs = kernel is not None or kind.__module__.startswith("deepspeed.")
    left_out = sorted(_options_of_torch_alone(kind, optimizer.param_groups)) if kind in _KERNEL_OPTIONS else []
    why = f"has no {', '.join(left_out)}" if left_out else "has one kind of weight decay for all groups"
    if _forced(resolved) and not is_theirs and forced is not None:
        what = why if kind in _KERNEL_OPTIONS else f"does not implement {name}"
        message = f"true, but DeepSpeed's kernel for the CPU {what}"
        raise ConfigError([Problem(forced.origin.where, _FORCE, message, "Delete the key, or write false.")])
    if not is_theirs and kind in _KERNEL_OPTIONS:
        why = f"{_FORCE} is false" if _forced(resolved) is False else f"DeepSpeed's faster kernel {why}"
        _log.info(f"{name}: torch's own runs on the CPU, since {why}")
    idle = [option for option in _SPEED_OPTIONS if any(group.get(option) for group in optimizer.param_groups)]
    if kernel is not None and idle:
        _log.info(f"{name}: {', '.join(idle)} has no effect, since DeepSpeed's kernel for the CPU runs")
    is_adam = kind in (torch.optim.Adam, torch.optim.AdamW) and not left_out
    groups = optimizer.param_groups
    decoupled = is_adam and all(group.get(_DECOUPLED, kind is torch.optim.AdamW) for group in groups)
    _check_full_offload(name, resolved, adamw=decoupled or bool(getattr(optimizer, "adam_w_mode", False)))


def _check_full_offload(name: str, resolved: Resolved, *, adamw: bool) -> None:
    """Refuse a ratio below 1 if DeepSpeed would step the part on the device with another algorithm."""
    ratio = resolved.tree.get(*_RATIO)
    is_split = ratio is not None and isinstance(ratio.value, int | float) and ratio.value < 1
    if ratio is None or not is_split or adamw or resolved.zero_stage < 3:
        return
    message = f"{ratio.value}, but DeepSpeed steps the part on the device with AdamW, and the optimizer is {name}"
    fix = "Write 1.0, or train with AdamW."
    raise ConfigError([Problem(ratio.origin.where, ".".join(_RATIO), message, fix)])


def share_groups(engine: Any) -> None:
    """Make the AdamW for the part on the device (`ratio` below 1) share the offloaded optimizer's groups.

    DeepSpeed gives this AdamW a copy of the first group's options, which no learning-rate scheduler changes.
    """
    backup = getattr(engine.optimizer, "backup_optimizer", None)
    if backup is None:
        return
    for index, group in enumerate(engine.optimizer.optimizer.param_groups):
        for name, value in backup.param_groups[index].items():
            group.setdefault(name, value)
        backup.param_groups[index] = group


class FlatAdagrad(Optimizer):
    """torch's Adagrad, but with states that the first step creates.

    torch's class creates them in the constructor. DeepSpeed therefore rebuilds it over its flat partitions, with one
    group and the default arguments. This loses the groups and detaches the learning-rate scheduler.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not with_gradient:
                continue
            states = [self._state(p, fused=bool(group["fused"])) for p in with_gradient]
            adagrad(
                with_gradient,
                [p.grad for p in with_gradient],
                [state["sum"] for state in states],
                [state["step"] for state in states],
                has_sparse_grad=False,
                **{name: group[name] for name in _ADAGRAD_OPTIONS},
            )
        return loss

    def _state(self, parameter: Tensor, *, fused: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device=parameter.device if fused else "cpu")
            # As in torch: from the constructor's argument, not from the group's option.
            state["sum"] = torch.full_like(parameter, self.defaults["initial_accumulator_value"])
        return state


def _refuse_unless_elementwise(optimizer: Optimizer, model: nn.Module, resolved: Resolved) -> None:
    """Refuse an optimizer whose steps on small parameters differ from steps on flat partitions of them."""
    allowed, name = resolved.tree.get(_UNTESTED), type(optimizer).__name__
    if allowed is not None and allowed.value is True and allowed.origin.typed_by_user:
        return
    if type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS:
        return  # torch's and DeepSpeed's own; some run only on a GPU
    if allowed is not None and allowed.value is False:
        message = f"false, and {name} is not among the optimizers that DeepSpeed has tested with ZeRO"
        fix = "Delete the key: this package itself tests the optimizer on partitions. Or use Adam, AdamW or Adagrad."
        raise ConfigError([Problem(allowed.origin.where, _UNTESTED, message, fix)])
    if (why := why_not_elementwise(optimizer, model, resolved.zero_stage)) is not None:
        message = (
            f"{name} cannot run at ZeRO stage {resolved.zero_stage}: {why}. The trained weights would differ from "
            "those of plain PyTorch."
        )
        fix = (
            "Use stage 0 or DDP with it, or an elementwise optimizer (AdamW, Adam, SGD, RMSprop, Lion, Adagrad). To "
            'use it all the same, set "zero_allow_untested_optimizer": true.'
        )
        raise ConfigError([Problem("prepare(optimizer)", "optimizer", message, fix)])


def _move_schedulers(schedulers: Iterable[Any], optimizer: Optimizer) -> None:
    """Attach schedulers that were built on another optimizer to this one."""
    step = optimizer.step

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    # torch's schedulers look for this mark. Without it they warn of a scheduler ahead of its optimizer.
    counted_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    Patches().replace(optimizer, "step", counted_step)
    pending = list(schedulers)
    while pending:
        scheduler = pending.pop()
        scheduler.optimizer = optimizer
        pending.extend(getattr(scheduler, "_schedulers", ()))


def refuse_unfit(request: SessionRequest) -> None:
    """Refuse a model or a configuration that no engine can train as it is.

    Raises:
        ConfigError: the configuration requests a feature that only DeepSpeed's own launcher makes possible.
        LoopError: parameters are already partitioned, or have a dtype that ZeRO does not train; gradients are sparse; a
            module takes no hooks; or a forward writes into weights.
    """
    _refuse_partitioned(request)
    _refuse_wide_types(request.model)
    if request.optimizer is None and request.resolved.zero_stage < 3:
        return  # no engine is built
    _refuse_writer(request.resolved)
    _refuse_scripted(request.model)
    if request.optimizer is not None:
        _refuse_sparse_gradients(request.model)
        if (which := describe_renormalizing(request.model)) is not None:
            raise LoopError(
                f"prepare() got a {type(request.model).__name__} that ZeRO cannot train: {which}, but the step would "
                "overwrite these with its own copy.\nBuild them without max_norm, and scale the rows in the forward, "
                "or train without DeepSpeed (distributed_type: MULTI_GPU)."
            )


def _refuse_partitioned(request: SessionRequest) -> None:
    """Refuse a model that was built for stage 3 at another stage."""
    stage = request.resolved.zero_stage
    if stage < 3 and any(hasattr(p, "ds_id") for p in request.model.parameters()):
        raise LoopError(
            f"the parameters of the {type(request.model).__name__} were partitioned when it was built, but it is "
            f"prepared at ZeRO stage {stage}, where they are not partitioned.\n"
            "Write zero_stage: 3, or build the model outside init_model()."
        )


def _refuse_wide_types(model: nn.Module) -> None:
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float64 or p.is_complex()]
    if wide:
        found = model.get_parameter(wide[0]).dtype
        raise LoopError(
            f"prepare() got a {type(model).__name__} with {len(wide)} parameters of float64 or complex dtypes, e.g. "
            f"{wide[0]} ({found}): ZeRO trains in 32 and 16 bits only.\n"
            "Convert them before (model.float(); torch.view_as_real for complex ones), or train without ZeRO."
        )


def _refuse_scripted(model: nn.Module) -> None:
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        which = f"whose {scripted[0]} is" if scripted[0] else "that is"
        raise LoopError(
            f"prepare() got a {type(model).__name__} {which} made by torch.jit.script or torch.jit.trace. It takes no "
            "hooks, but ZeRO needs hooks to gather weights and reduce gradients.\nGive prepare() the module itself, "
            "and script the result of accelerator.unwrap_model after the training; or train without DeepSpeed."
        )


def _refuse_writer(resolved: Resolved) -> None:
    """Refuse DeepSpeed's fast writer if the engine could not find its machines when it builds the writer."""
    writer = ("checkpoint", "writer")
    leaf = next((entry for path, entry in resolved.tree.entries.items() if path[:2] == writer), None)
    if leaf is not None and leaf.value is not None and "CROSS_SIZE" not in os.environ:
        message = "reads the number of machines from CROSS_SIZE, which only DeepSpeed's own launcher sets"
        fix = "Delete it: save_state() writes checkpoints in parallel itself."
        raise ConfigError([Problem(leaf.origin.where, ".".join(writer), message, fix)])


def _refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients, which DeepSpeed cannot partition."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            kind = type(module).__name__
            raise LoopError(
                f"prepare() got a {type(model).__name__} whose {name or 'root'} is {kind}(sparse=True): its gradients "
                "are sparse tensors, but DeepSpeed partitions only dense ones.\n"
                f"Build the {kind} with sparse=False, or train without DeepSpeed (distributed_type: MULTI_GPU)."
            )
