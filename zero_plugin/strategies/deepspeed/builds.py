"""What is done before DeepSpeed compiles an op, in every program that this package starts or that imports it.

Nothing of DeepSpeed is imported here: `launch` has this run while a script imports it.
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
    """From now on each op, when it is first used, is an error in place of a failed build or of an endless wait.

    Args:
        builder: the class `OpBuilder`, from which all builders inherit.
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
        show_messages(quiet=os.environ.get("RANK", "0") != "0")  # a script of another layer has not set them up
        with working(f"compiling DeepSpeed's {self.name}, once for this machine"):
            return load(self, *args, **kwargs)

    Patches().replace(builder, "jit_load", watched)


@contextmanager
def showing_refusals() -> Iterator[None]:
    """Inside, what `watch_builders` refuses is raised as it is; classes of DeepSpeed's raise an error of their own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, MachineError):
            raise error.__cause__ from None
        raise


def omit_shared_memory_op(compatible_ops: dict[str, bool]) -> None:
    """Omit an op whose build takes 20 seconds of each first run on a CPU, and that only inference kernels use."""
    compatible_ops["deepspeed_shm_comm"] = False


# What a script's own import of DeepSpeed is followed by, by the module that has been executed.
AFTER_IMPORT = {
    "deepspeed.ops": lambda module: omit_shared_memory_op(module.__compatible_ops__),
    "deepspeed.ops.op_builder.builder": lambda module: watch_builders(module.OpBuilder),
}
