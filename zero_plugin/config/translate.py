"""Accelerate's short fields and DeepSpeed's other spellings, as the one key path that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from zero_plugin.config.tree import Entry, Path, Tree, dotted
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem, Severity

__all__ = ["LAUNCH_FIELDS", "SHORT_FIELDS", "one_spelling", "precision_from_switch", "translate_short_fields"]

_ZERO = "zero_optimization"

# Fields under `deepspeed_config` that stand for a key of DeepSpeed's.
SHORT_FIELDS: Final[Mapping[str, Path]] = {
    "zero_stage": (_ZERO, "stage"),
    "offload_optimizer_device": (_ZERO, "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": (_ZERO, "offload_optimizer", "nvme_path"),
    "offload_param_device": (_ZERO, "offload_param", "device"),
    "offload_param_nvme_path": (_ZERO, "offload_param", "nvme_path"),
    "zero3_save_16bit_model": (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}

# Fields under `deepspeed_config` that concern the launch or the model, not DeepSpeed's own configuration.
LAUNCH_FIELDS: Final = (
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "zero3_init_flag",
)


def _device(offload: Any) -> Any:
    return {True: "cpu", False: "none"}.get(offload, offload) if isinstance(offload, bool) else offload


def _same(value: Any) -> Any:
    return value


# Spellings that DeepSpeed 0.19 still takes for another key: fields' names behind their aliases, and deprecated keys.
_OTHER_SPELLINGS: Final[Mapping[Path, tuple[Path, Callable[[Any], Any]]]] = {
    **{
        (_ZERO, name): ((_ZERO, f"stage3_{name}"), _same)
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    (_ZERO, "stage3_gather_fp16_weights_on_model_save"): (
        (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
        _same,
    ),
    ("aio", "thread_count"): (("aio", "intra_op_parallelism"), _same),
    (_ZERO, "cpu_offload"): ((_ZERO, "offload_optimizer", "device"), _device),
    (_ZERO, "cpu_offload_param"): ((_ZERO, "offload_param", "device"), _device),
    ("tensor_parallel", "tensor_parallel"): (("tensor_parallel", "tp"), _same),
    ("tensor_parallel", "replace_with_kernel_inject"): (("tensor_parallel", "kernel_inject"), _same),
    ("bfloat16",): (("bf16",), _same),
}

# Of these, the ones that DeepSpeed is giving up: it warns of them, or drops their value.
_DEPRECATED: Final = (
    (_ZERO,),
    ("aio", "thread_count"),
    (_ZERO, "stage3_gather_fp16_weights_on_model_save"),
    (_ZERO, "cpu_offload"),
    (_ZERO, "cpu_offload_param"),
)


def translate_short_fields(fields: Mapping[Path, Entry]) -> dict[Path, Entry]:
    """Short fields under the key paths they stand for; an NVMe path of `none`, Accelerate's default, is left out."""
    return {
        SHORT_FIELDS[path[0]]: entry
        for path, entry in fields.items()
        if not (path[0].endswith("nvme_path") and entry.value in (None, "", "none", "None"))
    }


def one_spelling(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Every key under the one spelling that the rest of the package looks for, and a finding for each that was moved.

    A key that stands beside its other spelling is left where it is: the check refuses it as unknown. So is one whose
    place is taken by a value in its section's stead, unless that is null or empty and says nothing.
    """
    entries: dict[Path, Entry] = {}
    moved: dict[Path, Entry] = {}
    notes: list[Problem] = []
    for path, entry in tree.entries.items():
        read, value, old = path, entry.value, path
        if path == (_ZERO,) and isinstance(value, bool):  # how a file said it before ZeRO had stages
            read, value = (_ZERO, "stage"), int(value)
        for other, (new, convert) in _OTHER_SPELLINGS.items():
            if path[: len(other)] == other and not tree.has_section(*new) and not _is_taken(tree, new):
                read, value, old = new + path[len(other) :], convert(value), other
                break
        (entries if read == path else moved)[read] = Entry(value, entry.origin)
        if read != path:
            severity: Severity = "warning" if old in _DEPRECATED else "note"
            fix, shown = f"Write {dotted(read)}: {show(value)}.", show(entry.value)
            notes.append(Problem(entry.origin.where, dotted(path), f"read as {dotted(read)}", fix, shown, severity))
    return Tree(entries).replace(moved), notes


def _is_taken(tree: Tree, path: Path) -> bool:
    above = [tree.entries[path[:n]].value for n in range(1, len(path)) if path[:n] in tree.entries]
    return any(value is not None and value != {} for value in above)


def precision_from_switch(launch: Tree) -> tuple[Tree, list[Problem]]:
    """Accelerate's `fp16` at the top, from before there was `mixed_precision`, under that name, and what to tell of it.

    Beside `mixed_precision` Accelerate passes over it; here it must agree.
    """
    switch, precision = launch.get("fp16"), launch.get("mixed_precision")
    if switch is None or not isinstance(switch.value, bool):
        return launch, []
    where, shown, rest = switch.origin.where, show(switch.value), launch.without("fp16")
    if precision is None or precision.value is None:
        read = "fp16" if switch.value else "no"
        fix = f"Write mixed_precision: {read}."
        rest = rest.replace({("mixed_precision",): Entry(read, switch.origin)})
        return rest, [Problem(where, "fp16", "read as mixed_precision", fix, shown, "warning")]
    if switch.value == (precision.value == "fp16"):
        return rest, [Problem(where, "fp16", "has no effect beside mixed_precision", "Delete it.", shown, "warning")]
    message = f"{shown}, but mixed_precision is {show(precision.value)} at {precision.origin.where}"
    return rest, [Problem(where, "fp16", message, "Delete it.")]
