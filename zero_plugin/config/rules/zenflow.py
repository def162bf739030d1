"""ZenFlow: what it needs around it, and its intervals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.rules.asked import Asked, is_count
from zero_plugin.errors import Problem

__all__ = ["check_zenflow"]

_FLOW: Final = "zero_optimization.zenflow"


def check_zenflow(asked: Asked) -> Iterator[Problem]:
    """Stage, offload, overlap, and which of its intervals go together."""
    if not asked.has(_FLOW) or asked.entry(_FLOW) is not None:  # absent, or null or {}
        return
    if asked.stage == 0:
        yield asked.error(_FLOW, f"needs ZeRO stage 1, 2 or 3, but {asked.stage_said}", "Choose such a stage.")
    if asked.offload("optimizer") in ("none", "nvme"):
        message = f"needs the optimizer offloaded to cpu, but the device is {asked.offload('optimizer')}"
        fix = "Write zero_optimization.offload_optimizer.device: cpu, or delete zenflow."
        yield asked.error(_FLOW, message, fix)
    overlaps = asked.value("zero_optimization.overlap_comm", default=None)
    if asked.is_on(f"{_FLOW}.offload") and (overlaps is False or (overlaps is None and asked.stage in (1, 2))):
        message = "true needs zero_optimization.overlap_comm: true"
        yield asked.error(f"{_FLOW}.offload", message, "Write that, or false here.")
    yield from _intervals(asked)


def _intervals(asked: Asked) -> Iterator[Problem]:
    strategy = asked.value(f"{_FLOW}.select_strategy")
    select, update = asked.value(f"{_FLOW}.select_interval"), asked.value(f"{_FLOW}.update_interval")
    if strategy in ("step", "epoch") and not is_count(select):
        message = f"{strategy} needs select_interval as a number"
        yield asked.error(f"{_FLOW}.select_strategy", message, "Write select_interval, or select_strategy: auto.")
    if strategy not in ("step", "epoch") and is_count(select):
        message = f"{select} needs select_strategy step or epoch; with auto DeepSpeed refuses a number"
        yield asked.error(f"{_FLOW}.select_interval", message, "Write select_strategy, or delete it.")
    if strategy == "step" and is_count(select) and is_count(update) and select < update:
        message = f"{select} is less than update_interval {update} at {asked.written(f'{_FLOW}.update_interval')}"
        yield asked.error(f"{_FLOW}.select_interval", message, f"Write at least {update}.")
