"""Checks before DeepSpeed compiles an op, in every program that this package starts or that imports the package.

Do not import DeepSpeed here: `launch` runs this module while a script imports DeepSpeed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zero_plugin.distributed.messages import show_messages, working
from zero_plugin.errors import MachineError
from zero_plugin.machine.op_builds import build_folder, describe_missing_tools, missing_builds, refuse_stale_build_locks
from zero_plugin.strategies.deepspeed.patches import Patches


def watch_builders(builder: Any) -> None:
    """Make each op raise on its first use, instead of a failed build or an endless wait.

    Args:
        builder: the class `OpBuilder`, the base class of all builders.
    """
    load = builder.jit_load
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        folder = build_folder(os.environ, torch.version.cuda)
        refuse_stale_build_locks([self.name], folder)
        if missing := describe_missing_tools([self.name], folder, os.environ):
            raise MachineError(missing)
        if not missing_builds([self.name], folder):
            return load(self, *args, **kwargs)
        show_messages(quiet=os.environ.get("RANK", "0") != "0")  # a script that uses only DeepSpeed has not set them up
        with working(f"compiling DeepSpeed's {self.name}, once for this machine"):
            return load(self, *args, **kwargs)

    Patches().replace(builder, "jit_load", watched)


@contextmanager
def showing_refusals() -> Iterator[None]:
    """Raise the errors of `watch_builders` unchanged: DeepSpeed's classes replace them by their own errors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, MachineError):
            raise error.__cause__ from None
        raise


def omit_shared_memory_op(compatible_ops: dict[str, bool]) -> None:
    """Omit an op that only inference kernels use. Its build takes 20 seconds of each first run on a CPU."""
    compatible_ops["deepspeed_shm_comm"] = False


# Calls after a script's own import of DeepSpeed, by the module that Python has executed.
AFTER_IMPORT = {
    "deepspeed.ops": lambda module: omit_shared_memory_op(module.__compatible_ops__),
    "deepspeed.ops.op_builder.builder": lambda module: watch_builders(module.OpBuilder),
}
