"""What a request becomes where no engine trains: weights in fp32, and torch's own optimizer with the states it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.optimizers import build_optimizer
from zero_plugin.placeholders import DummyOptim
from zero_plugin.resolve.resolved import OptimizerSection
from zero_plugin.strategies.base import SessionRequest

__all__ = ["keep_weights_in_fp32", "torch_optimizer"]


def keep_weights_in_fp32(request: SessionRequest) -> None:
    """Turn 16-bit weights that are trained into fp32, aloud: updates below their last bit would be lost.

    ZeRO keeps fp32 masters beside 16-bit weights, or trains in fp32 where no mixed precision is asked for. Frozen
    weights stay as they are under mixed precision, where autocast joins the types.
    """
    if request.optimizer is None:
        return
    halved = [p for p in request.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    trained = [p for p in halved if p.requires_grad]
    if not trained:
        return
    chosen = halved if request.resolved.precision == "no" else trained
    for p in chosen:
        p.data = p.data.float()
        for states, key, value in _states_of(request.optimizer, p):
            if value.dtype in (torch.bfloat16, torch.float16):
                states[key] = value.float()
    request.say(
        f"{len(chosen)} parameters of the {type(request.model).__name__} came in 16 bits and are trained in fp32, as "
        "under ZeRO; mixed_precision says what they compute in"
    )


def torch_optimizer(request: SessionRequest) -> Optimizer | None:
    """The request's optimizer, with a placeholder replaced by what the config's section describes.

    States that it was given before go where its parameters are by now, as torch's `load_state_dict` would put them.
    """
    if not isinstance(request.optimizer, DummyOptim):
        for group in () if request.optimizer is None else request.optimizer.param_groups:
            for p in group["params"]:
                for states, key, value in _states_of(request.optimizer, p):
                    if key != "step" or group.get("capturable") or group.get("fused"):
                        states[key] = value.to(p.device)
        return request.optimizer
    section = request.resolved.optimizer
    assert section is not None, "resolution gives every placeholder a section"
    return build_optimizer(_fused(section, request.model), request.optimizer.params)


def _states_of(optimizer: Optimizer | DummyOptim | None, p: Tensor) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Each state of a parameter that is a tensor, with the dict that holds it and its name there."""
    states = getattr(optimizer, "state", {}).get(p, {})  # a wrapper of another library may have none
    return [(states, key, value) for key, value in states.items() if isinstance(value, Tensor)]


def _fused(section: OptimizerSection, model: nn.Module) -> OptimizerSection:
    """The section with torch's fused kernel for Adam and AdamW: the same update in one pass, several times faster.

    Not where the section itself says how. SGD and Adagrad stay as they are: those kernels refuse sparse gradients.
    """
    says_how = {"fused", "foreach", "capturable", "differentiable"} & section.params.keys()
    served = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    if section.type.lower() not in ("adam", "adamw") or says_how or not served:
        return section
    return OptimizerSection(section.type, {**section.params, "fused": True})
