"""Names ways of training in a few words, for tables, pictures and messages."""

from __future__ import annotations

from zero_plugin.plan.situation import Setup

__all__ = ["name_setup"]


def name_setup(setup: Setup) -> str:
    """E.g. "stage 3, optimizer 40 % on cpu, parameters on cpu, checkpointing"; the micro-batch is not part of it."""
    parts = ["DDP" if setup.stage is None else f"stage {setup.stage}"]
    if setup.offload_optimizer != "none":
        share = "" if setup.ratio == 1.0 else f" {setup.ratio:.0%}"
        parts.append(f"optimizer{share} on {setup.offload_optimizer}")
    if setup.offload_param != "none":
        parts.append(f"parameters on {setup.offload_param}")
    if setup.activation_checkpointing:
        parts.append("checkpointing")
    return ", ".join(parts)
