"""What DeepSpeed would train otherwise than plain torch, or fail at in words of its own: found before it is begun."""

from __future__ import annotations

import os

import torch
from torch import nn

from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.base import SessionRequest

__all__ = ["refuse_unfit"]


def refuse_unfit(request: SessionRequest) -> None:
    """Refuse a model or a configuration that no engine can train as it is.

    Raises:
        ConfigError: the configuration asks for what DeepSpeed's own launcher alone makes possible.
        LoopError: parameters are partitioned already, or of a type that ZeRO does not train; gradients would be sparse.
    """
    _refuse_partitioned(request)
    _refuse_wide_types(request.model)
    if request.optimizer is None and request.resolved.zero_stage < 3:
        return  # there is no engine
    _refuse_writer(request.resolved)
    if request.optimizer is not None:
        _refuse_sparse_gradients(request.model)


def _refuse_partitioned(request: SessionRequest) -> None:
    """Refuse a model that was built for stage 3 at another stage."""
    stage = request.resolved.zero_stage
    if stage < 3 and any(hasattr(p, "ds_id") for p in request.model.parameters()):
        raise LoopError(
            f"the parameters of the {type(request.model).__name__} were partitioned when it was built, but it is "
            f"prepared at ZeRO stage {stage}, where they are whole.\n"
            "Write zero_stage: 3, or build the model outside init_model()."
        )


def _refuse_wide_types(model: nn.Module) -> None:
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float64 or p.is_complex()]
    if wide:
        found = model.get_parameter(wide[0]).dtype
        raise LoopError(
            f"prepare() got a {type(model).__name__} with {len(wide)} parameters of float64 or complex types, e.g. "
            f"{wide[0]} ({found}): ZeRO trains in 32 and 16 bits, and would leave digits out.\n"
            "Convert them before (model.float(); torch.view_as_real for complex ones), or train without ZeRO."
        )


def _refuse_writer(resolved: Resolved) -> None:
    """Refuse DeepSpeed's fast writer where the engine, which is built with it, would not find its machines."""
    writer = ("checkpoint", "writer")
    leaf = next((entry for path, entry in resolved.tree.entries.items() if path[:2] == writer), None)
    if leaf is not None and leaf.value is not None and "CROSS_SIZE" not in os.environ:
        message = "reads the number of machines from CROSS_SIZE, which only DeepSpeed's own launcher sets"
        fix = "Delete it: save_state() writes checkpoints itself, each process its part."
        raise ConfigError([Problem(leaf.origin.where, ".".join(writer), message, fix)])


def _refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse embeddings whose gradients are sparse tensors, which no partition of DeepSpeed's can hold."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            kind = type(module).__name__
            raise LoopError(
                f"prepare() got a {type(model).__name__} whose {name or 'whole'} is {kind}(sparse=True): its gradients "
                "are sparse tensors, and DeepSpeed partitions dense ones.\n"
                f"Build the {kind} with sparse=False, or train without DeepSpeed (distributed_type: MULTI_GPU)."
            )
