"""The schema of DeepSpeed's configuration for checks and editors, its defaults, and its removed keys."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

from zero_plugin.config.document import RENAMED_KEYS
from zero_plugin.config.keys import CLIPPING, CONFIG_FILE, LAUNCH_FIELDS, SHORT_FIELDS
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING, compiler_schema, launch_schema
from zero_plugin.config.tree import KeyPath, freeze

_OPEN: Final = ({"type": "null"}, {"const": "auto"})  # legal for every launch key


@functools.cache
def deepspeed_schema() -> Mapping[str, Any]:
    """Return the JSON Schema of a DeepSpeed configuration."""
    text = resources.files("zero_plugin.config").joinpath("schema/deepspeed.schema.json").read_text("utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


def yaml_schema() -> Mapping[str, Any]:
    """Return the JSON Schema of a launch YAML. `deepspeed_config` may hold short fields and DeepSpeed's own keys."""
    deepspeed = deepspeed_schema()
    launch = {name: _or_open(field) for name, field in launch_schema()["properties"].items()}
    ignored = {name: {"description": f"Has no effect here ({why})."} for name, (why, _) in WITHOUT_MEANING.items()}
    refused = {name: {"description": fix, "deprecated": True} for name, (_, fix) in REFUSED_KEYS.items()}
    short = {name: key_schema(path) for name, path in SHORT_FIELDS.items()}
    file = {
        CONFIG_FILE.name: {
            "description": "A DeepSpeed JSON; a relative path starts at this file's folder.",
            "type": ["string", "null"],
        }
    }
    inside = {**deepspeed["properties"], **short, **{name: launch[name] for name in LAUNCH_FIELDS}, **file}
    closed = {"additionalProperties": False, "patternProperties": {"^_": True}}
    training = {
        "description": "How DeepSpeed trains: short fields, or DeepSpeed's own keys, or the path of a JSON.",
        "type": ["object", "null"],
        "properties": inside,
        **closed,
    }
    return {
        "$schema": deepspeed["$schema"],
        "title": f"zero_plugin launch configuration, {deepspeed['title'].removesuffix(' configuration')}",
        "type": "object",
        "properties": {**launch, **ignored, **refused, **compiler_schema(), **file, "deepspeed_config": training},
        **closed,
    }


def key_schema(path: KeyPath, kind: str | None = None) -> Mapping[str, Any] | None:
    """Return the schema of the key at `path`, or None if there is no such key.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's `type` as the schema spells it.
    """
    sections = [deepspeed_schema()]
    for part in path:
        named = [section["properties"][part] for section in sections if part in section.get("properties", {})]
        sections = named or [s["additionalProperties"] for s in sections if s.get("additionalProperties")]
        branches = [branch for section in sections for branch in section.get("allOf", ())]
        sections += [branch["then"] for branch in branches if kind in types_of(branch)]
    return sections[-1] if sections else None


def walk_keys(schema: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield every key below `path` with its schema: parameters of all types, no keys below older spellings."""
    for name, child in schema.get("properties", {}).items():
        yield (*path, name), child
        if (*path, name) not in RENAMED_KEYS:
            yield from walk_keys(child, (*path, name))
    for holder in ("additionalProperties", "items"):
        if schema.get(holder):
            yield from walk_keys(schema[holder], path)
    for branch in schema.get("allOf", ()):
        yield from walk_keys(branch["then"]["properties"]["params"], (*path, "params"))


def types_of(branch: Mapping[str, Any]) -> list[str]:
    """Return the optimizer or scheduler types that an item of the section's `allOf` describes."""
    wanted = branch["if"]["properties"]["type"]
    return list(wanted["enum"]) if "enum" in wanted else [wanted["const"]]


def _or_open(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a launch key with null and `auto` added."""
    words = {key: field[key] for key in ("title", "description", "default") if key in field}
    wanted = {key: value for key, value in field.items() if key not in words}
    branches = wanted.get("anyOf", [wanted])
    return {**words, "anyOf": [*branches, *(extra for extra in _OPEN if extra not in branches)]}


NO_SUCCESSOR = "Delete it; nothing replaces it."

# By path: what happened to the key, and the fix.
RETIRED_KEYS: Final[Mapping[KeyPath, tuple[str, str]]] = {
    **{
        (key,): ("removed in DeepSpeed 0.19.7, even when disabled", NO_SUCCESSOR)
        for key in ("nebula", "compression_training", "quantize_training", "sparse_attention")
    },
    **{
        (key,): ("removed in DeepSpeed 0.19.8, even when disabled", fix)
        for key, fix in (
            ("amp", 'Delete it; write "bf16": {"enabled": true}.'),
            ("eigenvalue", NO_SUCCESSOR),
            ("elasticity", "Delete it; write the batch sizes out."),
            ("curriculum_learning", "Delete it, and choose samples in a sampler of the script's DataLoader."),
            ("progressive_layer_drop", NO_SUCCESSOR),
        )
    },
    ("sparse_gradients",): ("removed in DeepSpeed 0.19.8, even when false", NO_SUCCESSOR),
    ("graph_harvesting",): ("removed in DeepSpeed 0.19.8, even when false", NO_SUCCESSOR),
    ("zero_optimization", "mics_shard_size"): (
        "removed in DeepSpeed 0.19.7",
        "Delete it; zero_hpz_partition_size keeps a copy of the weights on each node.",
    ),
    ("zero_optimization", "mics_hierarchical_params_gather"): ("removed in DeepSpeed 0.19.7", NO_SUCCESSOR),
    ("zero_optimization", "zeropp_loco_param"): ("removed in DeepSpeed 0.19.8, even when null", NO_SUCCESSOR),
    ("zero_optimization", "grad_hooks"): ("no key of DeepSpeed, although its pages show it", NO_SUCCESSOR),
    ("zero_optimization", "cpu_offload_use_pin_memory"): (
        "DeepSpeed drops its value",
        "Write pin_memory inside offload_optimizer or offload_param.",
    ),
    ("activation_checkpointing", "partitioned_activations"): ("DeepSpeed ignores it", "Write partition_activations."),
    ("optimizer", "params", "max_grad_norm"): ("DeepSpeed refuses it here", f"Delete it; write {CLIPPING.name}."),
    ("allgather_size",): ("read only with the retired zero_optimization: true", NO_SUCCESSOR),
    **{
        ("compile", key): (
            "DeepSpeed's `compile` section no longer has it",
            "Delete it; call torch.compile in the script.",
        )
        for key in ("enabled", "disable", "backend", "kwargs")
    },
}

_REMOVED_OPTIMIZER = "DeepSpeed removed it by 0.19.7. Write AdamW (or Lamb)."
RETIRED_OPTIMIZERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _REMOVED_OPTIMIZER),
    "fusedadam": "Write AdamW: DeepSpeed uses its fused kernel automatically.",
    "deepspeedcpuadam": "Write AdamW: DeepSpeed uses its CPU kernel automatically under offload.",
}

_ADAM: Final = ("lr", "betas", "eps", "weight_decay")
# Parameters that are written out for an optimizer if they are absent: by type, those of every implementation.
_WRITTEN_OUT: Final = {
    "Adam": (*_ADAM, "adam_w_mode"),
    "AdamW": _ADAM,
    "Adagrad": ("lr", "eps", "weight_decay"),
    "Lamb": (*_ADAM, "bias_correction", "max_coeff", "min_coeff"),
    "Lion": ("lr", "betas", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}


def deepspeed_default(path: KeyPath, kind: str | None = None) -> tuple[Any] | None:
    """Return the default at `path` in a one-element tuple (a default may be None), or None if no default is known.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's type.
    """
    node = key_schema(path, kind) or {}
    return (node["default"],) if "default" in node else None


# Keys whose default DeepSpeed's parser refuses if it is written; an absent key means the same.
_LEFT_OUT: Final[Mapping[KeyPath, Any]] = {
    ("torch_autocast", "dtype"): None,
    ("torch_autocast", "lower_precision_safe_modules"): None,
    ("data_efficiency", "data_sampling", "dynamic_batching", "max_batch_size"): None,
    ("tensor_parallel", "dtype"): "float16",  # DeepSpeed needs a Python object, which no file can hold
}


def is_passed_on(path: KeyPath, value: Any) -> bool:
    """Return whether DeepSpeed accepts the value. Otherwise the key is left out."""
    return path not in _LEFT_OUT or value != _LEFT_OUT[path]


def _parameters(section: str, kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a type's parameters."""
    described = key_schema((section, "params"), kind)
    assert described is not None, kind
    return {name: key for name, key in described["properties"].items() if name != "last_batch_iteration"}


def _defaults(section: str, kind: str) -> dict[str, Any]:
    return {name: freeze(key["default"]) for name, key in _parameters(section, kind).items() if "default" in key}


# DeepSpeed's defaults by type in lower case. For Adam and Lion they are its kernels' defaults: an absent weight_decay
# is 0 (torch.optim.AdamW: 0.01), and Lion's second beta is 0.999 (the paper: 0.99).
OPTIMIZER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    kind.lower(): {name: _defaults("optimizer", kind)[name] for name in names} for kind, names in _WRITTEN_OUT.items()
}
_SCHEDULES: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# By type, as DeepSpeed writes it: the parameters with a default, and those without.
SCHEDULER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {kind: _defaults("scheduler", kind) for kind in _SCHEDULES}
SCHEDULER_REQUIRED: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(_parameters("scheduler", kind).keys() - SCHEDULER_DEFAULTS[kind].keys()) for kind in _SCHEDULES
}
# Fields whose value "auto" DeepSpeed itself understands, so it must reach DeepSpeed unchanged.
DEEPSPEED_AUTO: Final = frozenset(path for path, key in walk_keys(deepspeed_schema()) if key.get("default") == "auto")
