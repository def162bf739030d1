"""Print, as JSON, the configuration facts of the installed DeepSpeed and torch; run as a separate script."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

_PLAIN = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    dict: "object",
    list: "array",
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def kinds(annotation: Any) -> list[Any]:
    """Return the JSON types, and the single values, that an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [kind for argument in arguments for kind in kinds(argument)]
    if origin is typing.Literal:
        return [["value", argument] for argument in arguments]
    if annotation is type(None):
        return ["null"]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [["value", member.value] for member in annotation]
    if origin in (list, tuple) or annotation in (list, tuple):
        return ["array"]
    if origin is dict or hasattr(annotation, "model_fields"):
        return ["object"]
    return [_PLAIN.get(annotation, "any")]


def plain(value: Any) -> Any:
    """Return a default in its JSON form."""
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if value is inspect.Parameter.empty:
        return "<required>"
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple | dict) else str(value)


def models(names: dict[str, str]) -> dict[str, Any]:
    """Return each pydantic model's fields: type, default, alias, range, whether it is deprecated."""
    described = {}
    for section, name in names.items():
        module, _, cls = name.rpartition(".")
        fields = getattr(importlib.import_module(module), cls).model_fields
        described[section] = {
            key: {
                "kinds": kinds(field.annotation),
                "default": plain(field.get_default(call_default_factory=True)),
                "alias": field.alias,
                "bounds": {_BOUNDS[b]: getattr(m, b) for m in field.metadata for b in _BOUNDS if hasattr(m, b)},
                "deprecated": bool((field.json_schema_extra or {}).get("deprecated")),
            }
            for key, field in fields.items()
        }
    return described


def constants(modules: list[str]) -> dict[str, Any]:
    """Return every `…_DEFAULT` of the modules with the defaults of DeepSpeed's hand-parsed sections."""
    found = {}
    for name in modules:
        for key, value in vars(importlib.import_module(name)).items():
            if key.endswith("_DEFAULT"):
                found[f"{name}.{key}"] = plain(value)
    return found


def words(modules: list[str]) -> list[str]:
    """Return every text that those modules name, including the keys."""
    return sorted({v for name in modules for v in vars(importlib.import_module(name)).values() if isinstance(v, str)})


def muon() -> dict[str, Any]:
    """Return the defaults of Muon's two halves: for matrices, and for all other parameters."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam

    halves = [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": half} for half in (True, False)]
    own, adam = MuonWithAuxAdam(halves).param_groups
    return {
        "muon": {name: plain(own[name]) for name in DeepSpeedEngine._MUON_HALF_KEYS},
        "adam": {name: plain(adam[name]) for name in DeepSpeedEngine._ADAM_HALF_KEYS},
    }


def signature(cls: Any) -> dict[str, Any]:
    """Return a class's arguments after the first, with their defaults."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    return {p.name: plain(p.default) for p in parameters if p.kind is not p.VAR_KEYWORD}


def main() -> None:
    """Describe the objects that the JSON on the command line requests."""
    asked = json.loads(sys.argv[1])
    import torch
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import config, lr_schedules

    expert = [f for f in dataclasses.fields(AutoEPConfig) if f.init]
    schedules = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    schedulers = {
        n: c for n, c in vars(torch.optim.lr_scheduler).items() if inspect.isclass(c) and not n.startswith("_")
    }
    described = {
        "models": models(asked["models"]),
        "constants": constants(asked["modules"]),
        "words": words(asked["modules"]),
        "muon": muon(),
        "expert_parallel": {f.name: plain(f.default) for f in expert},
        "pipeline": config.get_pipeline_config({}),
        "optimizer_names": config.DEEPSPEED_OPTIMIZERS,
        "removed": list(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        "removed_of_zero": list(config._REMOVED_ZERO_CONFIG_KEYS),
        "read_by_name": sorted(set(re.findall(r"param_dict\.get\(\s*[\"'](\w+)", inspect.getsource(config)))),
        "kernels": {
            c.__name__: signature(c) for c in (FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPULion)
        }
        | {"DeepSpeedCPUAdagrad": signature(DeepSpeedCPUAdagrad)},
        "schedules": {name: signature(cls) for name, cls in schedules.items()},
        "torch_optimizers": {n: signature(c) for n, c in vars(torch.optim).items() if inspect.isclass(c)},
        "torch_schedulers": {n: signature(c) for n, c in schedulers.items()},
    }
    print("DESCRIBED" + json.dumps(described))


if __name__ == "__main__":
    main()
