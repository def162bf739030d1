"""Resolves `zero_optimization` and the keys of the whole engine.

Settles `zero_optimization` and the engine-wide keys that this package needs DeepSpeed to run with.

How many elements DeepSpeed reduces, gathers and keeps unpartitioned at a time, by the model's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from zero_plugin.config.resolve.draft import Draft, deepspeed_default
from zero_plugin.config.resolve.facts import ModelFacts

# A reduction of fewer elements than the floor is bound by latency, not bandwidth (h² is one million at h = 1024). Above
# the ceiling, DeepSpeed's own default, nothing gets faster and the buffer only takes memory.
_BUCKET_FLOOR: Final = 25_000_000
_BUCKET_CEILING: Final = 500_000_000
# Gathering a tensor below the floor costs a collective and saves nothing; each one below the threshold stays
# unpartitioned on every device, so the ceiling bounds that.
_PERSISTENT_FLOOR: Final = 10_000
_PERSISTENT_CEILING: Final = 1_000_000


def choose_bucket(model: ModelFacts, share: float = 1.0) -> tuple[int, str] | None:
    """`share` × hidden² elements (transformers' rule), or the largest parameter; clamped, at most the whole model.

    Returns:
        Elements and the reason; None where the model tells nothing.
    """
    if model.hidden_size:
        wanted = int(share * model.hidden_size**2)
        source = f"{share:g} × {model.hidden_size}², {model.hidden_size_reason}"
    elif model.largest_parameter:
        wanted, source = int(share * model.largest_parameter), f"{share:g} × the largest parameter"
    else:
        return None
    size = min(max(wanted, _BUCKET_FLOOR), _BUCKET_CEILING)
    if size != wanted:
        source += f", kept within {_BUCKET_FLOOR:,} to {_BUCKET_CEILING:,} elements"
    if model.parameters and size > model.parameters:
        size, source = model.parameters, "all parameters of the model"
    return size + size % 2, source  # DeepSpeed asserts that the all-gather's is even


def choose_persistence_threshold(model: ModelFacts) -> tuple[int, str] | None:
    """10 × hidden elements (transformers' rule): norms and biases stay unpartitioned; None without a hidden size."""
    if not model.hidden_size:
        return None
    wanted = 10 * model.hidden_size
    size = min(max(wanted, _PERSISTENT_FLOOR), _PERSISTENT_CEILING)
    clamped = "" if size == wanted else f", kept within {_PERSISTENT_FLOOR:,} to {_PERSISTENT_CEILING:,}"
    return size, f"10 × {model.hidden_size}, {model.hidden_size_reason}{clamped}"


_ZERO: Final = "zero_optimization"
_STAGE: Final = (_ZERO, "stage")
_PLAN: Final = "plan of the memory, which needs the model"
_OFFLOADS: Final[tuple[Literal["offload_optimizer", "offload_param"], ...]] = ("offload_optimizer", "offload_param")

Rule = Callable[[Draft], tuple[Any, str] | None]  # None: the model would tell, and a run will bring it


def settle_zero(draft: Draft) -> None:
    """Settle the stage, the offload devices, and every key of the section that depends on them or on the model."""
    if not draft.on_deepspeed:
        _settle_without_engine(draft)
        return
    for path in draft.facts.planned:
        if path[0] == _ZERO and draft.is_unsettled(*path):
            draft.put_planned(path)
    if draft.is_open(*_STAGE):
        fix = "Write 1, 2 or 3: 2 splits gradients and optimizer states, 3 the weights too."
        draft.miss(_STAGE, _PLAN, fix)
    elif draft.get(*_STAGE) is None:
        draft.put(_STAGE, 0, "no ZeRO stage is configured", "default")
    for offload in _OFFLOADS:
        if draft.is_open(_ZERO, offload, "device"):
            draft.miss((_ZERO, offload, "device"), _PLAN, "Write none, cpu or nvme.")
            _leave_open(draft, offload)
        elif draft.value(_ZERO, offload, "device", default="none") != "none":
            _settle_offload(draft, offload)
    for key, rule in _RULES.items():
        path = (_ZERO, *key.split("."))
        if draft.is_open(*path) and not draft.is_missing(*path):
            found = rule(draft)
            if found is None:
                draft.miss(path, "model to tell its size", "Prepare the model.")
            else:
                draft.put(path, *found)
    _settle_overlap(draft)


def settle_engine(draft: Draft) -> None:
    """Write the keys without which DeepSpeed's engine would break the loop contract, or change with its release."""
    if not draft.on_deepspeed:
        return
    for key, value, reason in (
        ("managed_gradient_accumulation", False, "optimizer.step() is the one place where parameters change"),
        ("zero_allow_untested_optimizer", True, "this package itself checks that the optimizer works on flat pieces"),
        ("zero_force_ds_cpu_optimizer", False, "the optimizer of the loop is kept, also under offload"),
    ):
        if draft.is_unsettled(key):
            draft.put((key,), value, reason)
    _require_gpu(draft)
    _require_whole_expert_groups(draft)
    if draft.get("steps_per_print") is None:
        draft.put(("steps_per_print",), None, "DeepSpeed prints no step lines", "default")
    path = ("data_types", "grad_accum_dtype")
    if draft.is_open(*_STAGE):  # before a run
        if draft.is_open(*path):
            draft.miss(path, _PLAN, "Write fp32, fp16 or bf16.")
        return
    halved = draft.value("bf16", "bf16_master_weights_and_grads", default=False)
    if draft.is_unsettled(*path) and draft.value("bf16", "enabled") and _stage(draft) >= 1 and not halved:
        why = "bf16 has 8 bits of mantissa: sums of gradients lose what is below 1/256 of them"
        draft.put(path, "fp32", why, logged=True)
    elif draft.is_open(*path):
        draft.put(path, None, "gradients accumulate in the model's own type", "default")
    unchecked = draft.value("bf16", "enabled") and draft.value("bf16", "check_grad_overflow") is False
    flat = _stage(draft) == 2 or (_stage(draft) == 1 and draft.value(*path) != "fp32")
    if unchecked and not flat:
        draft.say(
            f"bf16.check_grad_overflow = false has no effect at stage {_stage(draft)} in this DeepSpeed: a step whose "
            "gradients are not finite is skipped all the same."
        )


def _require_gpu(draft: Draft) -> None:
    """ZeRO++ quantizes by kernels of CUDA's, whoever has chosen the device."""
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if draft.facts.machine.accelerator == "cpu" and draft.facts.complete and draft.value(_ZERO, key):
            draft.refuse((_ZERO, key), "true, but this run is on a CPU, and its kernels need a GPU.", "Delete it.")


def _require_whole_expert_groups(draft: Draft) -> None:
    """Experts are divided among groups of processes of one size."""
    sizes = ("autoep_size", "expert_tensor_parallel_size")
    each, processes = [draft.value("expert_parallel", key, default=1) for key in sizes], draft.facts.machine.processes
    if not (draft.facts.complete and draft.value("expert_parallel", "enabled")) or not all(
        isinstance(size, int) for size in each
    ):
        return
    if processes % (width := each[0] * each[1]):
        divisors = [str(size) for size in range(1, processes + 1) if processes % size == 0]
        times = "" if each[1] == 1 else f" × expert_tensor_parallel_size {each[1]} = {width}"
        draft.refuse(
            ("expert_parallel", "autoep_size"),
            f"{each[0]}{times}, which does not divide the run's {processes} processes.",
            f"Write a size of which this is {' or '.join(divisors)}, or start another number of processes.",
        )


def _settle_without_engine(draft: Draft) -> None:
    """Off DeepSpeed nothing of the section runs: an open stage or device is none, so that nobody is misled."""
    reason = f"the {draft.facts.strategy} path has no ZeRO"
    if draft.is_open(_ZERO, "stage"):
        draft.put((_ZERO, "stage"), 0, reason)
    for offload in _OFFLOADS:
        if draft.is_open(_ZERO, offload, "device"):
            draft.put((_ZERO, offload, "device"), "none", reason)


def _settle_offload(draft: Draft, offload: Literal["offload_optimizer", "offload_param"]) -> None:
    if draft.is_unsettled(_ZERO, offload, "pin_memory"):
        cuda = draft.facts.machine.accelerator == "cuda"
        why = "pinned memory makes copies to the GPU asynchronous" if cuda else "there is no GPU to copy to"
        draft.put((_ZERO, offload, "pin_memory"), cuda, why)
    ratio = (_ZERO, offload, "ratio")
    if draft.is_open(*ratio) and not draft.facts.complete:
        draft.miss(ratio, _PLAN, "Write a number from 0 to 1.")
    nvme_path = (_ZERO, offload, "nvme_path")
    if draft.is_open(*nvme_path) and draft.value(_ZERO, offload, "device") == "nvme":
        draft.refuse(nvme_path, "auto cannot know a folder.", "Write a folder on a local NVMe drive.")


def _leave_open(draft: Draft, offload: str) -> None:
    """Before a run: nothing of the section is known as long as its device is not."""
    for path in draft.still_open():
        if path[:2] == (_ZERO, offload) and not draft.facts.complete:
            draft.miss(path, _PLAN, "Write a value.")


def _settle_overlap(draft: Draft) -> None:
    """`overlap_comm`: DeepSpeed's "null means stage 3" written out; below stage 2 the engine refuses to start with it.

    It changes speed and no number, so a typed true is turned off there, and logged, rather than refused.
    """
    path = (_ZERO, "overlap_comm")
    stage = _stage(draft)
    if draft.is_open(*_STAGE):
        if draft.is_open(*path):
            draft.miss(path, _PLAN, "Write true or false.")
    elif draft.get(*path) is None:
        draft.put(path, stage == 3, "DeepSpeed overlaps communication at stage 3 only", "default")
    elif draft.value(*path) and stage < 2:
        draft.put(path, False, f"DeepSpeed cannot overlap communication at stage {stage} here; no number changes")
        draft.say(f"{_ZERO}.overlap_comm: true has no effect at stage {stage}, DeepSpeed overlaps from stage 2 up.")


def _of_model(choose: Callable[[ModelFacts], tuple[int, str] | None], key: str) -> Rule:
    def rule(draft: Draft) -> tuple[int, str] | None:
        model = draft.facts.model
        return (model and choose(model)) or _default_of_run(draft, key)

    return rule


def _sub_group_size(draft: Draft) -> tuple[int, str] | None:
    """A tenth of the partition where `ratio` splits the sub-groups: with one group a ratio below 1 has no effect."""
    model: ModelFacts | None = draft.facts.model
    if draft.is_missing(_ZERO, "offload_optimizer", "ratio"):
        return None
    ratio = draft.value(_ZERO, "offload_optimizer", "ratio", default=1.0)
    if ratio == 1:
        return _default("sub_group_size")
    if model is None or not model.parameters:
        return _default_of_run(draft, "sub_group_size")
    partition = model.parameters // draft.facts.machine.processes
    why = f"a tenth of one process's {partition:,} elements, so that ratio {ratio:g} can split them"
    return max(1, partition // 10), why


def _swap_buffer(draft: Draft) -> tuple[int, str] | None:
    """Elements of one swap buffer: the largest parameter has to fit."""
    model = draft.facts.model
    if model is None or not model.largest_parameter:
        return _default_of_run(draft, "offload_param.buffer_size")
    least, reason = _default("offload_param.buffer_size")
    if model.largest_parameter <= least:
        return least, f"{reason}, larger than every parameter"
    return model.largest_parameter, "the largest parameter has to fit"


def _kept_in_ram(draft: Draft) -> tuple[int, str]:
    """Elements of the parameters that stay in RAM under NVMe offload."""
    if draft.value(_ZERO, "offload_param", "device") == "nvme":
        return 0, "device is nvme, so parameters go there (DeepSpeed's 1e9 would keep most models in RAM)"
    return _default("offload_param.max_in_cpu")


def _gather_on_save(draft: Draft) -> tuple[bool, str] | None:
    if draft.is_open(*_STAGE):
        return None
    stage = _stage(draft)
    partitioned = "at stage 3 no process has unpartitioned weights"
    return stage == 3, partitioned if stage == 3 else "below stage 3 weights are not partitioned"


_RULES: Final[dict[str, Rule]] = {
    "reduce_bucket_size": _of_model(choose_bucket, "reduce_bucket_size"),
    "allgather_bucket_size": _of_model(choose_bucket, "reduce_bucket_size"),
    "stage3_prefetch_bucket_size": _of_model(partial(choose_bucket, share=0.9), "stage3_prefetch_bucket_size"),
    "stage3_param_persistence_threshold": _of_model(choose_persistence_threshold, "stage3_param_persistence_threshold"),
    "sub_group_size": _sub_group_size,
    "stage3_gather_16bit_weights_on_model_save": _gather_on_save,
    "offload_param.buffer_size": _swap_buffer,
    "offload_param.max_in_cpu": _kept_in_ram,
}


def _default_of_run(draft: Draft, key: str) -> tuple[Any, str] | None:
    """DeepSpeed's default for a model that tells nothing; before a run nothing, since its model may."""
    return _default(key) if draft.facts.complete else None


def _default(key: str) -> tuple[Any, str]:
    found = deepspeed_default((_ZERO, *key.split(".")))
    assert found is not None, key
    return found[0], "DeepSpeed's default"


def _stage(draft: Draft) -> int:
    return int(draft.value(_ZERO, "stage", default=0))
