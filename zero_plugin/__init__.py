"""Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_plugin.accelerator import Accelerator
    from zero_plugin.data.skip import skip_first_batches
    from zero_plugin.launch.basic_config import write_basic_config
    from zero_plugin.placeholders import DummyOptim, DummyScheduler
    from zero_plugin.progress import Progress
    from zero_plugin.seeding import set_seed, synchronize_rng_states
    from zero_plugin.utils.memory import find_executable_batch_size

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "DummyOptim",
    "DummyScheduler",
    "Progress",
    "find_executable_batch_size",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "write_basic_config",
]

# Names load on first use, so that `import zero_plugin` and the command line do not import torch.
_HOME = {
    "Accelerator": "zero_plugin.accelerator",
    "DummyOptim": "zero_plugin.placeholders",
    "DummyScheduler": "zero_plugin.placeholders",
    "Progress": "zero_plugin.progress",
    "find_executable_batch_size": "zero_plugin.utils.memory",
    "set_seed": "zero_plugin.seeding",
    "skip_first_batches": "zero_plugin.data.skip",
    "synchronize_rng_states": "zero_plugin.seeding",
    "write_basic_config": "zero_plugin.launch.basic_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from zero_plugin.utils.left_out import missing_name

        raise missing_name(__name__, name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
