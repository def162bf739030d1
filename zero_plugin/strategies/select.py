"""Select the strategy of a run."""

from __future__ import annotations

import os
from typing import NamedTuple

from zero_plugin.config.document import Document
from zero_plugin.config.installed import installed_version
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_deepspeed, dropped_zero
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import StrategyError
from zero_plugin.machine.xla_runtime import PJRT_DEVICE
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.torch_strategies import DdpStrategy, SingleStrategy, TorchStrategy
from zero_plugin.strategies.xla import XlaStrategy


class Selection(NamedTuple):
    """The selected strategy, and a sentence that names it and the reason."""

    strategy: Strategy
    reason: str


def select_strategy(
    document: Document,
    settings: LaunchSettings,
    processes: Processes,
    own: type[TorchStrategy] | None = None,
) -> Selection:
    """Return the strategy for this run.

    ZeRO runs if `distributed_type: DEEPSPEED` is configured, or if no type is configured and the document has a ZeRO
    section; otherwise DDP, or one device. Processes on XLA devices use XLA, unless ZeRO is configured explicitly.

    Args:
        document: the configuration.
        settings: the launch settings of the configuration.
        processes: the processes of the run.
        own: the class of the script's own strategy, or None.

    Raises:
        StrategyError: the configured strategy cannot run.
    """
    where = f"{processes.world_size} × {processes.device.type}"
    if own is not None:
        return _own_selection(own(processes), where, document, settings)
    if processes.device.type == "xla" and settings.distributed_type != "DEEPSPEED":
        settings = settings.model_copy(update={"distributed_type": "XLA"})  # as a TPU implies
        runtime = f"{PJRT_DEVICE} is {os.environ.get(PJRT_DEVICE, 'open')}"  # an import of torch_xla may have set it
        reason = f"XLA on {where}, {runtime}{_clause(dropped_zero(document, settings))}"
        return _selection(XlaStrategy(processes), reason, settings)
    if asks_for_deepspeed(document, settings):
        return _selection(_deepspeed(document, settings, processes), f"DeepSpeed on {where}", settings)
    note = _clause(dropped_zero(document, settings))
    if settings.distributed_type == "MULTI_GPU" and processes.device.type == "cpu":
        note += f"; {document.launch.entries[('distributed_type',)].origin.where} requests GPUs, but none is available"
    strategy: Strategy = SingleStrategy(processes) if processes.world_size == 1 else DdpStrategy(processes)
    return _selection(strategy, f"{strategy.name} on {where}{note}", settings)


def _own_selection(strategy: Strategy, where: str, document: Document, settings: LaunchSettings) -> Selection:
    name = type(strategy).__name__
    if asks_for_deepspeed(document, settings):
        raise StrategyError(
            f"Accelerator(strategy={name}), but the configuration requests DeepSpeed.\n"
            "Remove one of the two: the argument, or distributed_type: DEEPSPEED and the ZeRO section."
        )
    return _selection(strategy, f"{name} on {where}{_clause(dropped_zero(document, settings))}", settings)


def _selection(strategy: Strategy, reason: str, settings: LaunchSettings) -> Selection:
    strategy.checks = settings.checks
    return Selection(strategy, reason)


def _clause(sentence: str) -> str:
    return f"; {sentence}" if sentence else ""


def _deepspeed(document: Document, settings: LaunchSettings, processes: Processes) -> Strategy:
    if installed_version("deepspeed") is None:
        raise StrategyError(
            "The configuration requests DeepSpeed, which is not installed: pip install deepspeed\n"
            "Or run without ZeRO: --multi_gpu, or distributed_type: MULTI_CPU or MULTI_GPU in the configuration."
        )
    if (device := processes.device.type) not in ("cpu", "cuda"):
        raise StrategyError(f"The configuration requests DeepSpeed, but DeepSpeed does not run on {device}.")
    os.environ.setdefault("DS_ACCELERATOR", device)  # DeepSpeed chooses its device when it is imported
    from zero_plugin.strategies.deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(document, settings, processes)
