"""What of torch's own objects an engine can honour, and what it has no use for."""

from __future__ import annotations

from zero_plugin.choices import DDPCommunicationHookType
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.handlers import Handlers

__all__ = ["unused_handlers"]


def unused_handlers(handlers: Handlers) -> list[str]:
    """Lines on what a script set and an engine has no use for.

    Raises:
        ConfigError: it would train otherwise than the script says.
    """
    problems, lines = [], []
    if (ddp := handlers.ddp) is not None:
        hooks = {str(ddp.comm_hook), str(ddp.comm_wrapper)} - {str(DDPCommunicationHookType.NO)}
        if hooks:
            where, fix = "DistributedDataParallelKwargs(comm_hook=…)", "Write communication_data_type: fp16 or bf16."
            problems.append(Problem(where, "", f"{', '.join(sorted(hooks))}, but DeepSpeed has no DDP", fix))
        elif ddp.to_kwargs():
            lines.append(
                f"DistributedDataParallelKwargs({', '.join(ddp.to_kwargs())}): ZeRO has no DDP, and needs none"
            )
    if (scaler := handlers.scaler) is not None:
        for name, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
            if scaler.enabled and getattr(scaler, name) != fixed:
                where = f"GradScalerKwargs({name}={getattr(scaler, name)})"
                problems.append(Problem(where, "", f"DeepSpeed has {fixed} alone", "Leave it out."))
    if handlers.autocast is not None and handlers.autocast.to_kwargs():
        lines.append("AutocastKwargs: ZeRO has no autocast; the weights themselves are in the 16-bit type")
    if problems:
        raise ConfigError(problems)
    return lines
