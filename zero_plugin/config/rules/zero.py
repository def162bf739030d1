"""Rules for ZeRO's keys and offload: which stage reads a key, what the key needs, and what excludes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.keys import CLIPPING, TRAINING, ZERO
from zero_plugin.config.parallelism import SEQUENCE_KEY
from zero_plugin.config.rules.training import STAGE, Asked, is_count, is_number, needs_gpu
from zero_plugin.config.tree import AUTO, show
from zero_plugin.errors import Problem

_SUM: Final = "gradient_allreduce_op"


def _keys_of_another_stage(asked: Asked) -> Iterator[Problem]:
    for key, stages in ((key.name, key.stages) for key in TRAINING if key.stages):
        if asked.stage is not None and asked.stage not in stages and asked.says_something(key):
            known = " and ".join(map(str, stages)) if len(stages) < 3 else "1, 2 and 3"
            why = f"only stage{'s' if len(stages) > 1 else ''} {known} read{'s' if len(stages) == 1 else ''} it"
            other = asked.how_to_set(STAGE, " or ".join(map(str, stages)), key)
            fix = f"Delete it, or {other[0].lower()}{other[1:]}."
            yield asked.no_effect(key, f"{why}, and {asked.stage_said}", fix)


def _reduction(asked: Asked) -> Iterator[Problem]:
    prescale, factor = asked.is_on("prescale_gradients"), asked.value("gradient_predivide_factor", default=1)
    divides = is_number(factor) and factor != 1
    scattered = asked.value(f"{ZERO}.reduce_scatter", default=True) is True and asked.stage in (1, 2, 3)
    if prescale and divides and not scattered:
        why = f"prescale_gradients is true at {asked.written('prescale_gradients')}"
        yield asked.no_effect("gradient_predivide_factor", why, "Keep one of the two.")
    for key, holds in (("prescale_gradients", prescale), ("gradient_predivide_factor", divides)):
        if holds and scattered:
            needs = "while ZeRO reduces by reduce_scatter"
            fix = f"Delete it, or write {ZERO}.reduce_scatter: false."
            if asked.stage == 1:  # stages 2 and 3 refuse to start
                yield asked.no_effect(key, needs.removeprefix("while "), fix)
            else:
                yield asked.error(key, f"{show(asked.value(key))} {needs}", fix)
    if asked.value(_SUM) == "sum":
        shared = asked.value(SEQUENCE_KEY)
        shares = is_count(shared) and shared > 1
        for holds, what in (
            (asked.stage == 3, f"at ZeRO stage 3, and {asked.stage_said}"),
            # A sum would count each sample `shared` times; a mean is right: see `long_context.group`.
            (shares, f"with {SEQUENCE_KEY} {shared}: it would count each sample {shared} times"),
            (asked.is_on("compile.deepcompile"), "with compile.deepcompile"),
        ):
            if holds:
                yield asked.error(_SUM, f"sum is refused {what}", "Write mean.")


def _unused_parameters(asked: Asked) -> Iterator[Problem]:
    """Warn that the key has no effect: DeepSpeed looks for unused parameters only in the norm of CPU gradients."""
    key = f"{ZERO}.ignore_unused_parameters"
    if asked.value(key) is False and asked.stage in (1, 2) and asked.offload("optimizer") in ("none", None):
        yield asked.no_effect(key, "parameters without gradient are found only if the optimizer is offloaded to CPU")


def _muon(asked: Asked) -> Iterator[Problem]:
    key = f"{ZERO}.save_muon_momentum_buffer_in_memory"
    others = asked.optimizer != "muon" and asked.value("optimizer.type") is not AUTO
    if asked.stage == 3 and asked.is_on(key) and others:
        yield asked.no_effect(key, "only optimizer.type: Muon reads it")


def _zero_plus_plus(asked: Asked) -> Iterator[Problem]:
    size, processes = asked.value(f"{ZERO}.zero_hpz_partition_size"), asked.value("num_processes")
    if is_count(size) and is_count(processes) and asked.stage == 3 and processes % min(size, processes):
        message = f"{size} does not divide num_processes {processes}"
        fix = "Write the number of processes of one node. Each node then holds one copy of the weights."
        yield asked.error(f"{ZERO}.zero_hpz_partition_size", message, fix)
    quantized = f"{ZERO}.zero_quantized_gradients"
    if asked.stage == 3 and asked.is_on(quantized) and asked.value(f"{ZERO}.reduce_scatter") is False:
        message = f"true needs reduce_scatter, which is false at {asked.written(f'{ZERO}.reduce_scatter')}"
        yield asked.error(quantized, message, "Write reduce_scatter: true, or delete one of the two.")
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if asked.stage == 3 and asked.is_on(f"{ZERO}.{key}"):
            yield from needs_gpu(asked, f"{ZERO}.{key}", "Delete one of the two.")


def _gradient_norm(asked: Asked) -> Iterator[Problem]:
    key = f"{ZERO}.compute_grad_norm"
    if asked.value(key) is not False:
        return
    clipping = asked.value(CLIPPING.name)
    accumulates_in_fp32 = asked.value("data_types.grad_accum_dtype") == "fp32"
    for holds, against in (
        (asked.stage in (0, 3), f"needs ZeRO stage 1 or 2, but {asked.stage_said}"),
        (is_number(clipping) and clipping > 0, f"but {CLIPPING.name} is {clipping}, which needs the norm"),
        (asked.offload("optimizer") in ("cpu", "nvme"), "does not go with an offloaded optimizer"),
        (
            asked.stage == 1 and asked.precision == "bf16" and accumulates_in_fp32,
            "does not go with bf16 and data_types.grad_accum_dtype: fp32 at stage 1",
        ),
    ):
        if holds:
            yield asked.error(key, f"false {against}", "Delete it.")


STAGES: Final = (_keys_of_another_stage, _reduction, _unused_parameters, _muon, _zero_plus_plus, _gradient_norm)


_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_PARAM: Final = "zero_optimization.offload_param"
# The lowest stage that offloads to a device. DeepSpeed itself accepts any stage, and silently ignores offload below it.
_LOWEST: Final = {_OPTIMIZER: {"cpu": 1, "nvme": 3}, _PARAM: {"cpu": 3, "nvme": 3}}
_NVME_ONLY: Final = {
    _OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    _PARAM: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
_NOWHERE: Final = {_OPTIMIZER: ("ratio", "cpuadam_cores_perc", "pin_memory"), _PARAM: ("pin_memory",)}


def check_offload(asked: Asked) -> Iterator[Problem]:
    """Check both offload sections: required stages, NVMe path, `ratio`, SuperOffload, and keys without effect."""
    for section in (_OPTIMIZER, _PARAM):
        yield from _device(asked, section)
        yield from _idle_keys(asked, section)
    fast_init_key, params = f"{_OPTIMIZER}.fast_init", asked.offload("param")
    if asked.is_on(fast_init_key) and asked.offload("optimizer") == "nvme" and params in ("none", "cpu"):
        reason = f"only parameters on NVMe are read by fast_init, and {_PARAM}.device is {params}"
        yield asked.no_effect(fast_init_key, reason)
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
    if isinstance(device, str):
        where = f" at {asked.written(f'{section}.device')}" if asked.entry(f"{section}.device") else ""
        yield from asked.idle([f"{section}.{key}" for key in keys.get(device, ())], f"the device is {device}{where}")


def _ratio(asked: Asked) -> Iterator[Problem]:
    key, ratio = f"{_OPTIMIZER}.ratio", asked.value(f"{_OPTIMIZER}.ratio")
    if not is_number(ratio) or ratio >= 1 or asked.stage is None:
        return
    if asked.stage < 3:
        fix = f"{asked.how_to_set(STAGE, '3')}, or delete it."
        yield asked.error(key, f"{ratio} needs ZeRO stage 3, but {asked.stage_said}", fix)
    elif asked.optimizer not in ("", "adam", "adamw") or asked.is_on("optimizer.params.torch_adam"):
        message = f"{ratio}, but only DeepSpeed's own Adam steps on CPU and GPU at the same time"
        yield asked.error(key, message, "Write optimizer.type: AdamW or Adam without torch_adam, or delete the ratio.")
    elif asked.offload("optimizer") == "nvme":
        yield asked.no_effect(key, "an optimizer on nvme updates all parameters on the CPU")
    elif asked.offload("optimizer") == "cpu" and asked.on_cpu:
        yield asked.no_effect(key, f"there is no other device than the CPU, as use_cpu is true at {asked.on_cpu}")
    elif asked.offload("optimizer") == "cpu" and not asked.has("zero_optimization.sub_group_size"):
        message = (
            f"{ratio} splits off full sub-groups, and zero_optimization.sub_group_size is 1e9 where none is written. "
            "A smaller share per process is one group, all of which goes to the CPU"
        )
        fix = "Write zero_optimization.sub_group_size: a tenth of the parameters per process, or less."
        yield asked.warning(key, message, fix)


def _super_offload(asked: Asked) -> Iterator[Problem]:
    key = f"{_OPTIMIZER}.super_offload"
    if not asked.is_on(key):
        if asked.offload("optimizer") != "none":
            why = "only super_offload: true reads it, which is not supported"
            yield from asked.idle([f"{_OPTIMIZER}.cpuadam_cores_perc"], why)
        return
    message = "true, but its steps on the CPU begin inside backward(), before the loop asks for a step"
    yield asked.error(key, message, "Delete it; offload_optimizer without it updates the weights in optimizer.step().")


def _aio(asked: Asked) -> Iterator[Problem]:
    devices = [asked.offload(what) for what in ("optimizer", "param")]
    # GPUDirect Storage: DeepSpeed looks for CUDA even if nothing is offloaded.
    refused = list(needs_gpu(asked, "aio.use_gds")) if asked.is_on("aio.use_gds") else []
    yield from refused
    if all(device in ("none", "cpu") for device in devices) and not asked.has("checkpoint.writer"):
        keys = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
        idle = keys if refused else (*keys, "use_gds")
        yield from asked.idle([f"aio.{key}" for key in idle], "nothing is offloaded to nvme")


def check_zenflow(asked: Asked) -> Iterator[Problem]:
    """Refuse ZenFlow, which decides on its own which backwards update weights."""
    key = f"{ZERO}.zenflow"
    if asked.has(key) and asked.entry(key) is None:  # an entry is null or {}
        message = "is not supported: its engine decides which backwards update the weights, and here the loop does"
        yield asked.error(key, message, "Delete it; offload_optimizer without it updates all weights in each step.")
