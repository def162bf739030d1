"""Lets stage 3 run modules whose parameters have no elements."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

__all__ = ["fetch_empty"]


def fetch_empty(engine: Any) -> None:
    """Have parameters without elements be there whenever a module's are to be.

    DeepSpeed gathers nothing for a module of whose parameters no element is missing, and then asserts that all of them
    were gathered.
    """
    empty: list[Any] = [p for p in engine.module.parameters() if getattr(p, "ds_numel", None) == 0]
    if not empty:
        return
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_with_empty(*args: Any, **kwargs: Any) -> None:
        for p in empty:
            if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                p.data = p.data.new_empty(p.ds_shape)
                p.ds_status = ZeroParamStatus.AVAILABLE
        fetch(*args, **kwargs)

    coordinator.fetch_sub_module = fetch_with_empty
