"""The DeepSpeed configuration for a script built on Accelerate or on transformers' Trainer, which fill some `auto`."""

from __future__ import annotations

from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Path, Tree
from zero_plugin.resolve.defaults import DEEPSPEED_AUTO, deepspeed_default
from zero_plugin.resolve.draft import holds_auto
from zero_plugin.resolve.resolved import PLACEMENT, Resolved, plain

__all__ = ["config_for_scripts"]

_ZERO: Final = "zero_optimization"
_HALVES: Final = (("fp16", "enabled"), ("bf16", "enabled"))

# What the loop alone knows: absent, too, it is the script's. Accelerate takes an absent accumulation for 1, DeepSpeed
# an absent clipping for 1.0, and both would win over the script.
_THE_LOOPS: Final[tuple[Path, ...]] = (
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("gradient_clipping",),
)
# What Accelerate 1.15 fills in `prepare`, or transformers 5.23 from TrainingArguments; at another `auto` they stop.
_FILLED_BY_SCRIPTS: Final = frozenset(
    [
        *_THE_LOOPS,
        *_HALVES,
        *((_ZERO, key) for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")),
        (_ZERO, "stage3_param_persistence_threshold"),
        *(("optimizer", "params", name) for name in ("lr", "betas", "eps", "weight_decay")),
        *(("scheduler", "params", f"warmup_{name}") for name in ("min_lr", "max_lr", "num_steps")),
        ("scheduler", "params", "total_num_steps"),
    ]
)


def config_for_scripts(document: Document, resolved: Resolved) -> dict[str, Any] | None:
    """A DeepSpeed configuration in which `auto` stands only where such a script fills it; None as long as the plan that
    would choose the stage, or where to offload, waits for the model.

    It is what the user wrote, with our value for every other `auto`, and with all that was found for ZeRO. What this
    package sets so that DeepSpeed's engine keeps our loop's contract is left out: such a script has another one.

    Args:
        document: what was asked for, with ZeRO.
        resolved: the same, resolved as far as it can be before a run.
    """
    if any(path in resolved.missing for path in PLACEMENT):
        return None
    values: dict[Path, Any] = dict.fromkeys(_THE_LOOPS, AUTO)
    for path, entry in document.deepspeed.entries.items():
        if path == ("gradient_clipping",) and entry.value is None:
            values[path] = 0.0  # null is "none" here, and 1.0 in DeepSpeed
        elif path in _THE_LOOPS and not entry.origin.typed_by_user:
            values[path] = AUTO  # a plan's, which the script does not know
        elif entry.value is not None:
            values[path] = _value(path, entry.value, resolved.tree)
    for path, entry in resolved.tree.entries.items():
        if path not in values and (path[0] == _ZERO or path[-1] == "torch_adam"):
            values[path] = _value(path, entry.value, resolved.tree)
    if resolved.zero_stage == 3:  # without it Accelerate and the Trainer cannot save a model
        values.setdefault((_ZERO, "stage3_gather_16bit_weights_on_model_save"), True)
    config: dict[str, Any] = {}
    for path, value in values.items():
        if value is not None:
            section = config
            for part in path[:-1]:
                section = section.setdefault(part, {})
            section[path[-1]] = plain(value)
    return config


def _value(path: Path, asked: Any, resolved: Tree) -> Any:
    """The value to write at `path`; None leaves the key to DeepSpeed."""
    if path in _FILLED_BY_SCRIPTS and (asked is AUTO or (path not in _HALVES and not holds_auto(asked))):
        return asked
    found = resolved.value(*path)
    if not holds_auto(found):
        return found
    if path in DEEPSPEED_AUTO:
        return None  # DeepSpeed's own word, and its default, at which Accelerate stops
    default = deepspeed_default(path, resolved.value("optimizer", "type"))
    return AUTO if default is None else default[0]
