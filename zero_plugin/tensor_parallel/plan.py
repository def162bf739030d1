"""Plans for splitting a model: the layers, and the places of the cuts.

A *column* layer computes a part of its outputs, so its weight is cut along the outputs. A *row* layer gets a part of
its inputs, and the sum over the processes is its output. Layers between a column layer and a row layer compute with a
part of the features.

Plans come from three places, in this order: `tensor_parallel_plan` of a module (a script's own model), the tables of
this file, and the `base_model_tp_plan` of a transformers configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from torch import nn

from zero_plugin.tensors.modules import as_pretrained

Style = Literal["column", "row", "vocabulary", "partial"]
OWN_PLAN: Final = "tensor_parallel_plan"  # attribute of a script's own model


class UnsplittableError(Exception):
    """A model, or one of its layers, cannot be split. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive outputs of a column layer, or inputs of a row layer, that are divided among the processes.

    Attributes:
        size: number of outputs or inputs.
        unit: number of consecutive ones that stay together, e.g. those of one attention head.
        may_repeat: whether each process gets a unit even if there are fewer units than processes.
        what: the units' name, for errors.
    """

    size: int
    unit: int = 1
    may_repeat: bool = False
    what: str = "features"


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """The way to split one layer.

    Attributes:
        style: `column`, `row`, `vocabulary` (an embedding or a head, cut along the words), or `partial` (not split, but
            computes with a part of the features, so its gradient is a part of a sum).
        sections: the sections along the cut dimension; empty for one section of all features.
    """

    style: Style
    sections: tuple[Section, ...] = ()


@dataclass
class Plan:
    """The way to split a model.

    Attributes:
        layers: by the module's name.
        regions: names of the modules whose inputs go to column layers only: one `enter` serves all of these.
        sizes: attributes that count features or heads: (module, attribute, value of one process).
        heads: names of the modules that compute logits.
    """

    layers: dict[str, SplitLayer] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    sizes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


def find_plan(model: nn.Module, processes: int) -> Plan:
    """Return how `model` is split over `processes`.

    Raises:
        UnsplittableError: no plan is known, or the model cannot be split in this way.
    """
    plan = Plan()
    for place, module in _planned_modules(model):
        if (patterns := getattr(module, OWN_PLAN, None)) is not None:
            _add_own(plan, place, module, patterns, processes)
        else:
            _add_pretrained(plan, place, module, processes)
    if not plan.layers and not any(getattr(module, OWN_PLAN, None) == {} for module in model.modules()):
        raise UnsplittableError(
            f"it is not known how to split a {type(model).__name__}: it is no transformers model with a plan, and has "
            f"no {OWN_PLAN}"
        )
    return plan


def _planned_modules(module: nn.Module, place: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost modules with a plan of their own, and transformers models."""
    if getattr(module, OWN_PLAN, None) is not None or as_pretrained(module) is module:
        yield place, module
        return
    for name, child in module.named_children():
        yield from _planned_modules(child, f"{place}{name}.")


# ---- plans of scripts ------------------------------------------------------------------------------------------------


def _add_own(plan: Plan, place: str, module: nn.Module, patterns: Any, processes: int) -> None:
    """Add a script's plan: `{pattern of module names: style or SplitLayer, pattern of attributes: "divide"}`."""
    if not isinstance(patterns, Mapping):
        raise UnsplittableError(f"its {OWN_PLAN} is a {type(patterns).__name__}; give a dict of patterns")
    for pattern, wanted in patterns.items():
        if wanted == "divide":
            _divide(plan, module, pattern, processes)
            continue
        layer: Any = SplitLayer(wanted) if isinstance(wanted, str) else wanted  # type: ignore[arg-type]  # checked below
        if not isinstance(layer, SplitLayer) or layer.style not in ("column", "row", "vocabulary", "partial"):
            raise UnsplittableError(
                f"its {OWN_PLAN} has {wanted!r} for {pattern!r}; write column, row, vocabulary, partial or divide"
            )
        found = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            raise UnsplittableError(f"no module matches the pattern {pattern!r} of its {OWN_PLAN}")
        plan.layers.update({place + name: layer for name in found})


def _divide(plan: Plan, module: nn.Module, pattern: str, processes: int) -> None:
    """Divide an attribute of the matching modules, e.g. `*.attn.n_head`, by the number of processes."""
    path, _, attribute = pattern.rpartition(".")
    found = [part for name, part in module.named_modules() if fnmatchcase(name, path) and hasattr(part, attribute)]
    if not found:
        raise UnsplittableError(f"no attribute matches the pattern {pattern!r} of its {OWN_PLAN}")
    for part in found:
        value = getattr(part, attribute)
        if not isinstance(value, int) or value % processes:
            raise UnsplittableError(f"{pattern} is {value!r}, which {processes} processes do not divide")
        plan.sizes.append((part, attribute, value // processes))


# ---- plans of transformers models ------------------------------------------------------------------------------------

_QUERY: Final = ("q_proj", "query")
_KEYS: Final = ("k_proj", "v_proj", "key", "value")
# Of models without a plan in transformers, or whose plan gathers what it has split.
_TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "phi3": {
        "layers.*.self_attn.qkv_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
}
_STYLES: Final[Mapping[str, Style]] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial",
}


def _add_pretrained(plan: Plan, place: str, model: Any, processes: int) -> None:
    """Add the plan of a transformers model.

    Raises:
        UnsplittableError: transformers has no plan for the model, or the plan has a style that is not known.
    """
    base, kind = model.base_model, type(model).__name__
    prefix = place if base is model else f"{place}{model.base_model_prefix}."
    table = _TABLES.get(model.config.model_type) or getattr(base.config, "base_model_tp_plan", None)
    if not table:
        raise UnsplittableError(f"transformers has no plan for a {kind} (base_model_tp_plan)")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsplittableError(f"a {kind} has an encoder and a decoder, which have no plan")
    used: set[str] = set()
    for name, module in base.named_modules():
        pattern = next((pattern for pattern in table if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        used.add(pattern)
        style = _STYLES.get(table[pattern])
        if style is None:
            raise UnsplittableError(f"{name} of a {kind} has the style {table[pattern]!r}, which is not known")
        parent_name, _, leaf = name.rpartition(".")
        parent = base.get_submodule(parent_name)
        layer = SplitLayer(style, _sections(leaf, module, parent, model.config, style))
        plan.layers[prefix + name] = layer
        if style == "column" and prefix + parent_name not in plan.regions:
            plan.regions.append(prefix + parent_name)
            _add_sizes(plan, parent, model.config, processes)
    if not used:
        raise UnsplittableError(f"no layer of the {kind} matches the plan of transformers ({', '.join(table)})")
    _add_vocabulary(plan, place, model)


def _heads(config: Any) -> tuple[int, int, int]:
    """Return the number of query heads, of key heads, and the size of a head."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, size


def _is_attention(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    return bool(names & {*_QUERY, "qkv_proj", "query_key_value", "c_attn"})


def _sections(leaf: str, module: Any, parent: nn.Module, config: Any, style: str) -> tuple[Section, ...]:
    """Return the sections of a layer, whose units are attention heads in an attention."""
    if style == "partial":
        return ()
    queries, keys, size = _heads(config)
    query = Section(queries * size, size, what="attention heads")
    key = Section(keys * size, size, may_repeat=True, what="key heads")
    if leaf in _QUERY or (style == "row" and _is_attention(parent)):
        return (query,)
    if leaf in _KEYS:
        return (key,)
    if leaf == "qkv_proj":
        return (query, key, key)
    if leaf == "c_attn":
        return (query, query, query)
    if leaf == "query_key_value":  # the query, key and value of one head after the other
        return (Section(3 * queries * size, 3 * size, what="attention heads"),)
    if leaf == "gate_up_proj":
        half = getattr(module, "base_layer", module).out_features // 2
        return (Section(half), Section(half))
    return ()


def _add_sizes(plan: Plan, attention: nn.Module, config: Any, processes: int) -> None:
    """Add the attributes of an attention that count heads or features."""
    if not _is_attention(attention):
        return
    queries, keys, size = _heads(config)
    own_queries, own_keys = queries // processes, max(1, keys // processes)
    values = {
        "num_key_value_groups": own_queries // own_keys,
        "num_heads": own_queries,
        "num_attention_heads": own_queries,
        "num_key_value_heads": own_keys,
        "split_size": own_queries * size,
    }
    plan.sizes += [(attention, name, value) for name, value in values.items() if hasattr(attention, name)]
    if hasattr(attention, "config") and hasattr(attention, "qkv_proj"):  # its forward reads the number of heads there
        own = copy.copy(attention.config)
        own.num_attention_heads = own_queries  # type: ignore[union-attr]
        plan.sizes.append((attention, "config", own))


def _add_vocabulary(plan: Plan, place: str, model: Any) -> None:
    """Add the embedding of words and the head, cut along the words."""
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings() if model.base_model is not model else None
    if not (isinstance(head, nn.Linear) and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))):
        return  # e.g. a classifier: its head has few outputs, and stays whole
    vocabulary = SplitLayer("vocabulary")
    plan.layers[place + names[id(head)]] = vocabulary
    plan.heads.append(place + names[id(head)])
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == head.out_features:
        plan.layers[place + names[id(embedding)]] = vocabulary
