"""Keeps the global batch size by more gradient accumulation in a run that continues with fewer machines."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zero_plugin.config.document import from_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.errors import LaunchError


def find_intended_processes(available: int, environ: Mapping[str, str]) -> int:
    """The number of processes that the configuration is meant for: the world size or, with `min_machines`, more.

    Args:
        available: the world size.
        environ: the environment variables of this process, in which the launcher passes the configured number.

    Raises:
        LaunchError: there are fewer processes than configured, and the configuration does not allow fewer.
    """
    launched = from_environment(environ)
    if launched is None:
        return available
    settings = launch_settings(launched)
    configured = settings.num_processes
    if configured is None or configured == available:
        return available
    least = (settings.min_machines or settings.num_machines) * (configured // settings.num_machines)
    if least <= available < configured:
        return configured
    raise LaunchError(
        f"the launcher was configured for {configured} processes, but the process group has {available}.\n"
        "Does the script, or what starts it, set or unset RANK, WORLD_SIZE or MASTER_ADDR? The launcher sets them."
    )


def redistribute_steps(steps: int, intended: int, available: int) -> int:
    """Micro-batches per optimizer step on each available process that keep the global batch size.

    Args:
        steps: micro-batches per optimizer step on each of the intended processes.
        intended: the number of processes that the global batch size is meant for.
        available: the number of processes that run.

    Raises:
        LaunchError: the micro-batches cannot be divided evenly.
    """
    own_steps, rest = divmod(steps * intended, available)
    if rest:
        multiple = available // math.gcd(available, intended)
        raise LaunchError(
            f"{available} of {intended} processes are left, which cannot keep the global batch size: the "
            f"{steps * intended} micro-batches of an optimizer step ({steps} on each of {intended}) cannot be divided "
            f"by {available}.\n"
            f"Write a multiple of {multiple} as gradient_accumulation_steps, with correspondingly smaller "
            "micro-batches; or raise --min_machines, to wait for more machines."
        )
    return own_steps
