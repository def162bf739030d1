"""The launch config that suits this machine, without a question."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from zero_plugin.config.commented import write_config
from zero_plugin.config.location import default_config_file
from zero_plugin.launch.machine import Machine, look_at_machine

__all__ = ["basic_values", "best_precision", "write_basic_config"]


def basic_values(machine: Machine, mixed_precision: str) -> dict[str, Any]:
    """A launch config in Accelerate's layout: ZeRO-2 over several GPUs, all devices of a TPU, else one process.

    ZeRO-2 rather than DDP, because it sends what DDP sends and keeps less; one process has nothing to split.
    """
    if machine.tpu and not machine.gpus:
        return {"distributed_type": "XLA", "mixed_precision": mixed_precision}
    if machine.gpus < 2:
        alone = {"num_processes": 1, "use_cpu": machine.gpus == 0}
        return {"distributed_type": "NO", "mixed_precision": mixed_precision, **alone}
    return {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": mixed_precision,
        "num_processes": machine.gpus,
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"},
    }


def best_precision(machine: Machine) -> str:
    """bf16 where there is a TPU, or GPUs that compute in it, else no."""
    if not machine.gpus:
        return "bf16" if machine.tpu else "no"
    from zero_plugin.probe.machine import probe_machine  # imports torch, which counting the GPUs has done already

    return "bf16" if probe_machine("cuda").bf16 else "no"


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a launch config for this machine, as `accelerate.utils.write_basic_config` does; a file is never replaced.

    Args:
        mixed_precision: `no`, `fp16`, `bf16` or `auto`.
        save_location: the file; by default the one that `zero-plugin launch` reads when it is given none.

    Returns:
        The file's path; False, with a printed sentence, if there is one already.

    Raises:
        ConfigError: such a precision is not legal.
        MachineError: the file cannot be written.
    """
    file = default_config_file(os.environ) if save_location is None else Path(save_location)
    if file.exists():
        print(f"{file} exists and is left as it is. Run `zero-plugin config`, or name another file.")  # noqa: T201
        return False
    write_config(basic_values(look_at_machine(), mixed_precision.lower()), file)
    return file
