"""Lets go of what DeepSpeed keeps of an engine at stage 3 that has ended: else the next model's memory comes on top."""

from __future__ import annotations

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

__all__ = ["forget_module"]


def forget_module(module: nn.Module) -> None:
    """Drop what holds `module`, its partitions and its optimizer as long as the process lives.

    * The stack of modules whose forward runs begins with each module that was ever partitioned.
    * What an engine found out about its modules is cached by a decorator, for all engines in one cache. Others that
      still train find it out anew.
    """
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other is not module]
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
