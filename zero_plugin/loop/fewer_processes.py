"""A run that has lost machines, and may go on without them, keeps its global batch by more accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zero_plugin.config.handover import from_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.errors import LaunchError


def find_intended_processes(found: int, environ: Mapping[str, str]) -> int:
    """How many processes the configuration speaks of: those that have met or, with `min_machines`, maybe more.

    Args:
        found: processes that have met.
        environ: of this process, where the launcher left how many it was asked for.

    Raises:
        LaunchError: fewer have met than the launcher was asked for, and it was not told that fewer will do.
    """
    launched = from_environment(environ)
    if launched is None:
        return found
    settings = launch_settings(launched)
    asked = settings.num_processes
    if asked is None or asked == found:
        return found
    least = (settings.min_machines or settings.num_machines) * (asked // settings.num_machines)
    if least <= found < asked:
        return asked
    raise LaunchError(
        f"the launcher was asked for {asked} processes, but {found} {'has' if found == 1 else 'have'} met.\n"
        "Was RANK, WORLD_SIZE or MASTER_ADDR set or unset in the script, or in what starts it? They are the launcher's."
    )


def redistribute_steps(steps: int, intended: int, found: int) -> int:
    """Micro-batches per optimizer step and process, so that all processes together have as many as intended.

    Args:
        steps: micro-batches on each of the intended processes.
        intended: processes that the global batch is meant for.
        found: processes that there are.

    Raises:
        LaunchError: they cannot be shared out evenly.
    """
    share, rest = divmod(steps * intended, found)
    if rest:
        multiple = found // math.gcd(found, intended)
        raise LaunchError(
            f"{found} of {intended} processes are left, which cannot keep the global batch: the {steps * intended} "
            f"micro-batches of an optimizer step ({steps} on each of {intended}) do not divide among {found}.\n"
            f"Write a multiple of {multiple} as gradient_accumulation_steps, with micro-batches as much smaller; or "
            "raise --min_machines, to wait for more machines."
        )
    return share
