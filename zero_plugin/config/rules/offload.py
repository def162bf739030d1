"""Offload: what needs which stage, device and path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.rules.asked import STAGE, Asked, is_number
from zero_plugin.errors import Problem

__all__ = ["check_offload"]

_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_PARAM: Final = "zero_optimization.offload_param"
# The lowest stage that offloads to a device; DeepSpeed itself takes each at any stage, and drops it silently below.
_LOWEST: Final = {_OPTIMIZER: {"cpu": 1, "nvme": 3}, _PARAM: {"cpu": 3, "nvme": 3}}
_NVME_ONLY: Final = {
    _OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    _PARAM: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_NOWHERE: Final = {_OPTIMIZER: ("ratio", "cpuadam_cores_perc", "pin_memory"), _PARAM: ("pin_memory",)}


def check_offload(asked: Asked) -> Iterator[Problem]:
    """Device and stage, NVMe and its path, partial offload and SuperOffload, keys that nothing reads."""
    for section in (_OPTIMIZER, _PARAM):
        yield from _device(asked, section)
        yield from _idle_keys(asked, section)
    fast, params = f"{_OPTIMIZER}.fast_init", asked.offload("param")
    if asked.is_on(fast) and asked.offload("optimizer") == "nvme" and params in ("none", "cpu"):
        yield asked.no_effect(fast, f"only parameters on nvme are read that way, and {_PARAM}.device is {params}")
    yield from _ratio(asked)
    yield from _super_offload(asked)
    yield from _aio(asked)


def _device(asked: Asked, section: str) -> Iterator[Problem]:
    at, path = f"{section}.device", f"{section}.nvme_path"
    device = asked.value(at)
    if device not in ("cpu", "nvme"):
        return
    lowest = _LOWEST[section][device]
    if asked.stage is not None and asked.stage < lowest:
        legal = " or ".join(["none", *(name for name, stage in _LOWEST[section].items() if stage <= asked.stage)])
        fix = f"{asked.how_to_set(STAGE, str(lowest), at)}, or offload to {legal} instead."
        yield asked.error(at, f"{device} needs ZeRO stage {lowest}, but {asked.stage_said}", fix)
    if device == "nvme" and asked.value(path) in (None, "", "none"):
        yield asked.error(at, "nvme without a path", f"{asked.how_to_set(path, 'a local folder', at)}.")


def _idle_keys(asked: Asked, section: str) -> Iterator[Problem]:
    device = asked.value(f"{section}.device", default="none")
    keys = {"cpu": _NVME_ONLY[section], "none": (*_NVME_ONLY[section], *_NOWHERE[section])}
    for key in keys.get(device, ()) if isinstance(device, str) else ():
        if asked.says_something(f"{section}.{key}"):
            where = f" at {asked.written(f'{section}.device')}" if asked.entry(f"{section}.device") else ""
            yield asked.no_effect(f"{section}.{key}", f"the device is {device}{where}")


def _ratio(asked: Asked) -> Iterator[Problem]:
    key, ratio = f"{_OPTIMIZER}.ratio", asked.value(f"{_OPTIMIZER}.ratio")
    if not is_number(ratio) or ratio >= 1 or asked.stage is None:
        return
    if asked.stage < 3:
        fix = f"{asked.how_to_set(STAGE, '3')}, or delete it."
        yield asked.error(key, f"{ratio} needs ZeRO stage 3, but {asked.stage_said}", fix)
    elif asked.optimizer not in ("", "adam", "adamw") or asked.is_on("optimizer.params.torch_adam"):
        message = f"{ratio}, but only DeepSpeed's own Adam steps on CPU and GPU at once"
        yield asked.error(key, message, "Write optimizer.type: AdamW or Adam without torch_adam, or delete the ratio.")
    elif asked.offload("optimizer") == "cpu" and not asked.has("zero_optimization.sub_group_size"):
        message = (
            f"{ratio} splits off whole sub-groups, and zero_optimization.sub_group_size is 1e9 where none is written: "
            "a smaller share per process is one group, which goes to the CPU whole"
        )
        fix = "Write zero_optimization.sub_group_size: a tenth of the parameters per process, or less."
        yield asked.warning(key, message, fix)


def _super_offload(asked: Asked) -> Iterator[Problem]:
    key = f"{_OPTIMIZER}.super_offload"
    if not asked.is_on(key):
        if asked.says_something(f"{_OPTIMIZER}.cpuadam_cores_perc") and asked.offload("optimizer") != "none":
            yield asked.no_effect(f"{_OPTIMIZER}.cpuadam_cores_perc", "only super_offload: true reads it")
        return
    if asked.stage is not None and asked.stage < 3:
        fix = f"{asked.how_to_set(STAGE, '3')}, or delete it."
        yield asked.error(key, f"true needs ZeRO stage 3, but {asked.stage_said}", fix)
    elif asked.offload("optimizer") in ("none", "nvme"):
        message = f"true needs the optimizer offloaded to cpu, but the device is {asked.offload('optimizer')}"
        yield asked.error(key, message, f"Write {_OPTIMIZER}.device: cpu, or delete it.")
    elif asked.document.launch.value("use_cpu") is True:
        use_cpu = asked.document.launch.entries["use_cpu",].origin.where
        yield asked.error(key, f"true needs a GPU, but use_cpu is true at {use_cpu}", "Keep one of the two.")


def _aio(asked: Asked) -> Iterator[Problem]:
    devices = [asked.offload(what) for what in ("optimizer", "param")]
    if all(device in ("none", "cpu") for device in devices) and not asked.has("checkpoint.writer"):
        for key in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"):
            if asked.says_something(f"aio.{key}"):
                yield asked.no_effect(f"aio.{key}", "nothing is offloaded to nvme")
    elif asked.is_on("aio.use_gds") and asked.document.launch.value("use_cpu") is True:
        use_cpu = asked.document.launch.entries["use_cpu",].origin.where
        yield asked.error("aio.use_gds", f"true needs a GPU, but use_cpu is true at {use_cpu}", "Keep one of the two.")
