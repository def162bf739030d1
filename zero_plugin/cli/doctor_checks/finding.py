"""What one check found, and what a configuration needs of the machine that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_cpu, asks_for_deepspeed, asks_for_tpu
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import AUTO, Tree
from zero_plugin.machine.op_builds import needed_ops

Level = Literal["ok", "warning", "wrong", "left out"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table of `zero-plugin doctor`, or of `zero-plugin test`.

    Attributes:
        check: what was looked at.
        level: `wrong` is what the configuration cannot run with; `warning` what will cost time, or may be needed later.
        found: what is there, with its numbers.
        fix: the command or the edit that fixes it; never empty where `level` is `warning` or `wrong`.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run takes from one machine.

    Attributes:
        deepspeed: whether it is a ZeRO run.
        on_gpu: whether it computes on GPUs.
        processes: workers of this machine.
        ops: DeepSpeed's C++ and CUDA ops, by the names of their builders.
        nvme_folders: where offload keeps its files.
        locked_bytes: memory that all workers of the machine lock for NVMe offload at the least.
        offloads_to_host: whether weights or optimizer states lie in host memory.
        binds_cores: whether processes are bound to cores.
    """

    deepspeed: bool = False
    on_gpu: bool = False
    processes: int = 1
    ops: tuple[str, ...] = ()
    nvme_folders: tuple[str, ...] = ()
    locked_bytes: int = 0
    offloads_to_host: bool = False
    binds_cores: bool = False

    @property
    def cuda_ops(self) -> tuple[str, ...]:
        """Those of `ops` that nvcc compiles."""
        return tuple(op for op in self.ops if op in ("fused_adam", "fused_lion", "fused_lamb", "quantizer"))


def find_needs(document: Document, settings: LaunchSettings, gpus: int) -> Needs:
    """Read the needs off a checked document.

    Args:
        document: what would run.
        settings: its launch part.
        gpus: of this machine.
    """
    on_gpu = bool(gpus) and not asks_for_cpu(settings) and not asks_for_tpu(settings)
    processes = max(1, (settings.num_processes or (gpus if on_gpu else 1)) // settings.num_machines)
    if not asks_for_deepspeed(document, settings):
        return Needs(on_gpu=on_gpu, processes=processes, binds_cores=settings.enable_cpu_affinity)
    training = document.deepspeed
    zero = training.section("zero_optimization")
    devices = {what: zero.value(f"offload_{what}", "device") for what in ("optimizer", "param")}
    folders = [zero.value(f"offload_{what}", "nvme_path") for what, device in devices.items() if device == "nvme"]
    return Needs(
        deepspeed=True,
        on_gpu=on_gpu,
        processes=processes,
        ops=tuple(_ops(training, on_gpu=on_gpu)),
        nvme_folders=tuple(dict.fromkeys(str(folder) for folder in folders if folder not in (None, AUTO))),
        locked_bytes=processes * _swap_buffer_bytes(training) if devices["param"] == "nvme" else 0,
        offloads_to_host="cpu" in devices.values(),
        binds_cores=settings.enable_cpu_affinity,
    )


def _ops(training: Tree, *, on_gpu: bool) -> list[str]:
    kind = training.value("optimizer", "type")
    # Without a section the loop brings its own optimizer: nearly always an Adam.
    return needed_ops(training, "adamw" if kind in (None, AUTO) else str(kind).lower(), on_gpu=on_gpu)


def _swap_buffer_bytes(training: Tree) -> int:
    """Of the parameters' swap buffers in one process: their number and size are in the configuration."""

    def number(key: str) -> int:
        path = ("zero_optimization", "offload_param", key)
        value: Any = training.value(*path)
        if value in (None, AUTO):
            default = deepspeed_default(path)
            value = 0 if default is None else default[0]
        return int(value)

    half = any(training.value(name, "enabled") is not False and training.has_section(name) for name in ("bf16", "fp16"))
    return number("buffer_count") * number("buffer_size") * (2 if half else 4)
