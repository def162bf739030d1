"""Check that all processes have the same software, configuration, kind of device, models and optimizers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from torch import nn
from torch.optim import Optimizer

from zero_plugin.config.document import Document
from zero_plugin.config.installed import installed_version
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.tree import Tree, dotted
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.differences import compare
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LaunchError, LoopError
from zero_plugin.strategies.optimizer_states import describe_states
from zero_plugin.strategies.torch_optimizers import describe_optimizer

_SOFTWARE: Final = ("zero-plugin", "torch", "deepspeed", "transformers")
# Keys that may differ between machines; all others affect the training.
_OF_A_MACHINE: Final = frozenset(
    {
        "debug",
        "enable_cpu_affinity",
        "gpu_ids",
        "grace_period",
        "log_dir",
        "log_timestamps",
        "verbose",
        "machine_rank",
        "main_process_ip",
        "monitor_interval",
        "num_cpu_threads_per_process",
        "nvme_path",
        "quiet",
        "rdzv_conf",
        "role",
        "tee",
    }
)
_PLAIN: Final = (bool, int, float, str, tuple, type(None))


@collective("Accelerator", waits_for_all=True)
def check_same_run(document: Document, processes: Processes) -> None:
    """Compare versions, device kind and configuration with the other processes; collective.

    Raises:
        LaunchError: a value differs; the error lists each value and the ranks and hosts that have it.
    """
    if processes.world_size == 1:
        return
    own = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: installed_version(name) or "not installed" for name in _SOFTWARE},
        "device": processes.device.type,
        **_settings(document.launch),
        **_settings(document.deepspeed),
    }
    if differences := compare(own):
        raise LaunchError(
            f"the processes of this run differ:\n{differences}\n"
            "Every machine needs the same versions, the same kind of device and the same configuration."
        )


def check_same_models(models: Sequence[nn.Module], optimizers: Sequence[Optimizer | DummyOptim]) -> None:
    """Compare the arguments of `prepare` with those on the other processes; collective.

    Raises:
        LoopError: the parameters differ in name, shape, dtype or `requires_grad`, or the optimizers differ; the error
            lists each value and the ranks that have it.
    """
    own: dict[str, str] = {}
    for number, model in enumerate(models, 1):
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, p in model.named_parameters():
            trained = "" if p.requires_grad else ", frozen"
            shape = tuple(getattr(p, "ds_shape", p.shape))
            own[f"{prefix}{name}"] = f"{shape} {str(p.dtype).removeprefix('torch.')}{trained}"
    for number, optimizer in enumerate(optimizers, 1):
        facts = optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
        own[f"optimizer {number}"] = type(optimizer).__name__
        own[f"optimizer {number}: lr of each group"] = ", ".join(map(str, facts.group_lrs))
        if isinstance(optimizer, Optimizer) and getattr(optimizer, "state", None):
            own[f"optimizer {number}: state"] = describe_states(optimizer)
        own |= {f"optimizer {number}: {k}": str(v) for k, v in facts.given.items() if isinstance(v, _PLAIN)}
    if differences := compare(own):
        raise LoopError(
            f"prepare() got different objects on different processes:\n{differences}\n"
            "Every process must build the same models and optimizers, with the same frozen layers."
        )


def _settings(tree: Tree) -> dict[str, str]:
    return {dotted(path): str(entry.value) for path, entry in tree.entries.items() if path[-1] not in _OF_A_MACHINE}
