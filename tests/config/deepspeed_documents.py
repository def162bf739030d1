"""Draw DeepSpeed configurations as people write them, with typos, and read them by DeepSpeed's parser."""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from zero_plugin.config.schema import DEEPSPEED_AUTO, RETIRED_KEYS, deepspeed_schema
from zero_plugin.config.tree import KeyPath

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

Config = dict[str, Any]
Schema = Mapping[str, Any]

TRIES: Final = (60, pytest.param(2_000, marks=pytest.mark.campaign))  # documents

_BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CORE: Final = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", *_BATCH)
_NUMBERS: Final = (0, 1, 2, 3, 4, 8, 64, 1000, 10**6, 5 * 10**8)
_WORDS: Final = ("x", "cpu", "/tmp/x", "1", "fp16", "bf16")
# Wrong for most keys: typos, and values to which parsers give different types.
STRAY: Final[tuple[Any, ...]] = (
    *(None, True, False, -1, 0, 1, 2, 3, 0.5, 1.0, 2.0, -0.5, 1e30, 10**40, "", "auto", "AUTO", "x", "none", "None"),
    *("true", "True", "yes", "y", "t", "on", "1", "0", "2", " 2 ", "2.0", "2e8", "1_000", "cpu", "CPU", "fp16", "FP16"),
    *("float16", "-1", [], [1], ["x"], ["auto"], {}, {"a": 1}, {"enabled": True}, {"type": "x"}),
)


def legal_value(draw: random.Random, schema: Schema) -> Any:
    """Draw a value that the schema allows at this place."""
    if "anyOf" in schema:
        return legal_value(draw, draw.choice(schema["anyOf"]))
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "properties" in schema:
        return section(draw, schema, 4)
    kinds = schema.get("type", "object")
    kind = kinds if isinstance(kinds, str) else draw.choice(kinds)
    if kind in ("integer", "number"):
        return _number(draw, kind, schema)
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
        items = schema.get("items", {"type": "string"})
        return [legal_value(draw, items) for _ in range(draw.randint(least, max(least, most)))]
    named = {"item": legal_value(draw, schema["additionalProperties"])} if schema.get("additionalProperties") else {}
    return {"boolean": draw.random() < 0.5, "null": None, "string": draw.choice(_WORDS), "object": named}[kind]


def _number(draw: random.Random, kind: str, schema: Schema) -> int | float:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 2 * 10**9)
    above = "exclusiveMinimum" in schema
    if kind == "integer":
        fitting = [n for n in _NUMBERS if (n > low if above else n >= low) and n <= high]
        return int(draw.choice(fitting or [high]))
    top = min(high, schema.get("exclusiveMaximum", high), 10)
    return float(round(low + (top - low) * draw.choice((0.1, 0.25, 0.5, 0.9)), 6))


def section(draw: random.Random, schema: Schema, most: int) -> Config:
    """Draw a section with a few of its keys, each legal. A type decides which parameters exist."""
    properties = dict(schema["properties"])
    found: Config = {}
    if "allOf" in schema:
        branch = draw.choice(schema["allOf"])
        found["type"] = legal_value(draw, branch["if"]["properties"]["type"])
        properties["params"] = branch["then"]["properties"]["params"]
    if "enabled" in properties and draw.random() < 0.7:
        found["enabled"] = True
    if draw.random() < 0.6:
        properties = {key: child for key, child in properties.items() if not child.get("deprecated")}
    for key in draw.sample(sorted(properties), min(len(properties), draw.randint(0, most))):
        found.setdefault(key, legal_value(draw, properties[key]))
    for key in properties[name].get("required", ()) if (name := "params") in properties else ():
        found.setdefault("params", {}).setdefault(key, legal_value(draw, properties["params"]["properties"][key]))
    return found


def _batch(draw: random.Random) -> Config:
    micro, steps = draw.choice((1, 2, 4)), draw.choice((1, 2, 8))
    whole = dict(zip(_BATCH, (micro * steps, micro, steps), strict=True))
    kept = draw.choice(((), (), _BATCH, _BATCH, _BATCH[:1], _BATCH[1:2], _BATCH[1:], _BATCH[:2], _BATCH[2:]))
    found: Config = {key: whole[key] for key in kept}
    if found and draw.random() < 0.2:
        found[draw.choice(list(found))] = draw.choice((0, -1, 3, 7, "auto", "auto", None, 2.0, "4"))
    return found


def _zero(draw: random.Random) -> Config:
    schema = deepspeed_schema()["properties"]["zero_optimization"]
    found = section(draw, {"properties": {k: v for k, v in schema["properties"].items() if k != "zenflow"}}, 5)
    found["stage"] = draw.choice((0, 1, 1, 2, 2, 2, 3, 3, 3, "auto"))
    for name in ("offload_optimizer", "offload_param"):
        found.pop(name, None)
        if draw.random() < 0.35:
            found[name] = section(draw, schema["properties"][name], 2)
            found[name]["device"] = device = draw.choice(("cpu", "cpu", "nvme", "none", "auto"))
            if device == "nvme" and draw.random() < 0.9:
                found[name]["nvme_path"] = "/tmp/x"
            if draw.random() < 0.8 and (device == "nvme" or (name, device) == ("offload_param", "cpu")):
                found["stage"] = 3
    return found


def _precision(draw: random.Random) -> Config:
    properties = deepspeed_schema()["properties"]
    halves = draw.choice(((), ("fp16",), ("bf16",), ("bf16",), ("fp16", "bf16")))
    found: Config = {half: section(draw, properties[half], 2) for half in halves}
    if len(found) == 2 and draw.random() < 0.8:
        found[draw.choice(halves)]["enabled"] = False
    return found


def draw_document(draw: random.Random) -> Config:
    """Draw one configuration, with a typo in three of five."""
    properties = deepspeed_schema()["properties"]
    found = {**_batch(draw), **_precision(draw)}
    if draw.random() < 0.85:
        found["zero_optimization"] = _zero(draw)
    for name, chance in (("optimizer", 0.5), ("scheduler", 0.25)):
        if draw.random() < chance:
            found[name] = section(draw, properties[name], 2)
            if draw.random() < 0.6:
                found[name]["type"] = {"optimizer": "AdamW", "scheduler": "WarmupLR"}[name]
                found[name].pop("params", None)
    others = sorted(set(properties) - set(_CORE))
    for name in draw.sample(others, draw.choice((0, 0, 1, 1, 2, 3))):
        found[name] = legal_value(draw, properties[name])
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        draw.choice(_SLIPS)(draw, found)
    return found


def documents(tries: int) -> Iterator[Config]:
    """Return the same documents in every test, so results about one document can be compared."""
    draw = random.Random(17)
    for _ in range(tries):
        yield draw_document(draw)


# ---- slips -----------------------------------------------------------------------------------------------------------


def keys_of(config: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """List every key of a configuration, sections too."""
    if isinstance(config, dict):
        for name, child in config.items():
            yield (*path, name)
            yield from keys_of(child, (*path, name))


def _holder(config: Config, path: KeyPath) -> Config:
    for part in path[:-1]:
        config = config[part]
    return config


def _a_key(draw: random.Random, config: Config) -> KeyPath:
    return draw.choice(list(keys_of(config)) or [("train_batch_size",)])


def _wrong_value(draw: random.Random, config: Config) -> None:
    path = _a_key(draw, config)
    _holder(config, path)[path[-1]] = copy.deepcopy(draw.choice(STRAY))


def _near_miss(draw: random.Random, config: Config) -> None:
    *_, name = path = _a_key(draw, config)
    at = draw.randrange(len(name))
    bent = (name[:at] + name[at + 1 :], name + "s", name.replace("_", "-"), name.upper(), name.replace("_", ""))
    _holder(config, path)[draw.choice(bent)] = _holder(config, path).pop(name, 1)


def _misplaced(draw: random.Random, config: Config) -> None:
    path = _a_key(draw, config)
    value = _holder(config, path).pop(path[-1], 1)
    sections = [config, *(v for v in config.values() if isinstance(v, dict))]
    draw.choice(sections)[path[-1]] = value


def _other_name(draw: random.Random, config: Config) -> None:
    """Draw a name that DeepSpeed knows elsewhere or has retired, for a section that may not have it."""
    if draw.random() < 0.3:
        *above, name = draw.choice(sorted(RETIRED_KEYS))
        target = config
        for part in above:
            child = target.setdefault(part, {})
            target = child if isinstance(child, dict) else {}
    else:
        name = draw.choice(_names_of_deepspeed())
        target = draw.choice([config, *(value for value in config.values() if isinstance(value, dict))])
    target[name] = copy.deepcopy(draw.choice(STRAY))


_SLIPS: Final = (_wrong_value, _wrong_value, _wrong_value, _near_miss, _misplaced, _other_name)


# ---- DeepSpeed's side ------------------------------------------------------------------------------------------------


@functools.cache
def _names_of_deepspeed() -> list[str]:
    """Return every name that its parser stores, including the keys of all its sections."""
    sections = {"offload_param": {}, "offload_optimizer": {}, "zenflow": {"topk_ratio": 0.1}}
    full = {"train_batch_size": 1, "zero_optimization": sections, "weight_quantization": {}, "comms_logger": {}}
    return sorted({str(path[-1]) for path in keys_of(parse(full))})


def without_auto(config: Any, path: KeyPath = ()) -> Any:
    """Return a copy without the open keys, which a run would fill before DeepSpeed sees them."""
    if not isinstance(config, dict):
        return copy.deepcopy(config)
    kept = {k: v for k, v in config.items() if v != "auto" or (*path, k) in DEEPSPEED_AUTO}
    return {key: without_auto(value, (*path, key)) for key, value in kept.items()}


def without(config: Config, path: KeyPath) -> Config:
    """Return a copy without the key."""
    changed = copy.deepcopy(config)
    holder: Any = changed
    for part in path[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(path[-1], None)
    return changed


def parse(config: Config) -> Config:
    """Return the result of DeepSpeed's parser for a configuration of one process.

    Raises:
        Exception: of any kind, if the parser refuses the configuration.
    """
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    joined, comm.comm.cdb = comm.comm.cdb, None  # an earlier test's group, which may have ended
    try:
        parsed = vars(DeepSpeedConfig(copy.deepcopy(config)))
    finally:
        comm.comm.cdb = joined
    return {name: _plain(value) for name, value in parsed.items() if name != "_param_dict"}


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        return {name: _plain(child) for name, child in vars(value).items()}
    return value
