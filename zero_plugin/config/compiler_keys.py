"""`dynamo_config`, by which a launch config asks for `torch.compile`, as Accelerate writes it and as flags say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from zero_plugin.config.tree import AUTO, Entry, Path, Tree, dotted
from zero_plugin.config.validation import did_you_mean, legal, show, validator
from zero_plugin.errors import Problem

__all__ = ["COMPILER_KEYS", "COMPILER_PREFIX", "asked_compiler", "compiler_problems", "compiler_schema"]

COMPILER_KEYS: Final = ("dynamo_config", "dynamo_backend")  # the second alone is an older Accelerate's
COMPILER_PREFIX: Final = "dynamo_"

_LEGAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "backend": {
        "enum": [
            *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
            *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
            *("hpu_backend", "neuron"),
        ]
    },
    "mode": {"enum": ["default", "reduce-overhead", "max-autotune"]},
    **{name: {"type": "boolean"} for name in ("use_fullgraph", "use_dynamic", "use_regional_compilation")},
}


def asked_compiler(launch: Tree) -> dict[str, Entry]:
    """What is asked for, by name: `backend`, `mode`, `use_fullgraph`, `use_dynamic`, `use_regional_compilation`."""
    return {name: Entry(_read(name, entry.value), entry.origin) for _, name, entry in _written(launch)}


def compiler_problems(launch: Tree) -> Iterator[Problem]:
    """Names that `torch.compile` has no argument for, and values that it does not take."""
    for path, name, entry in _written(launch):
        if name not in _LEGAL:
            near = did_you_mean(path[-1], [COMPILER_PREFIX + known for known in _LEGAL])
            fix = f"Did you mean {near}?" if near else f"Legal here: {', '.join(COMPILER_PREFIX + n for n in _LEGAL)}."
            yield Problem(entry.origin.where, dotted(path), "unknown key", fix)
        elif not validator(_LEGAL[name]).is_valid(_read(name, entry.value)):
            near = did_you_mean(str(entry.value), _LEGAL[name].get("enum", []))
            fix = f"Did you mean {near}? Write" if near else "Write"
            message = f"{show(entry.value)} is not legal here"
            yield Problem(entry.origin.where, dotted(path), message, f"{fix} {legal(_LEGAL[name])}.")


def compiler_schema() -> dict[str, Any]:
    """JSON Schema of the two keys, for editors, which know no capitals."""
    below = {COMPILER_PREFIX + name: schema if "type" in schema else {} for name, schema in _LEGAL.items()}
    described = "How models are compiled by torch.compile."
    section = {"description": described, "type": ["object", "null"], "properties": below}
    return {"dynamo_config": section, "dynamo_backend": {"description": described, "deprecated": True}}


def _written(launch: Tree) -> Iterator[tuple[Path, str, Entry]]:
    """Path, name and entry of all that says something; what stands in `dynamo_config` comes last, and so counts."""
    for key in reversed(COMPILER_KEYS):
        for path, entry in launch.entries.items():
            if path[0] == key and entry.value not in (None, AUTO, "", {}):
                yield path, path[-1].removeprefix(COMPILER_PREFIX), entry


def _read(name: str, value: Any) -> Any:
    """Accelerate writes compilers in capitals; YAML 1.1 reads `no` as false."""
    if name == "backend" and value is False:
        return "no"
    text = value.lower() if isinstance(value, str) else value
    return text == "true" if name.startswith("use_") and text in ("true", "false") else text
