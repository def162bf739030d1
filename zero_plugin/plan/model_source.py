"""The model that is planned for, by its configuration, its weights' headers, a function, or a few numbers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.packages import installed_version
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.decoder import DEFAULT_LENGTH, decoder_activations, decoder_sizes, usual_length
from zero_plugin.plan.situation import Activations, ModelSizes, ParameterSize

_FUNCTION: Final = re.compile(r"[\w.]+:\w+")
_EMBEDDING: Final = re.compile(r"embed|wte|lm_head")
_LAYER: Final = re.compile(r"\.(\d+)\.")
_GATED: Final = ("silu", "swish", "gelu_pytorch_tanh")  # Llama's, Gemma's; others have no gate
_KEYS: Final = {  # how configurations call what the formula needs
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "vocabulary": ("vocab_size",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_NO_DECODER: Final = ("is_encoder_decoder", "num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model is, or how large.

    Attributes:
        model: a transformers model's folder or its `config.json`, a folder of `*.safetensors`, or `module:function`,
            which returns a module, or a module and example inputs (see `trace_activations`).
        parameters, hidden_size, layers, vocabulary, heads, kv_heads, intermediate: of a decoder, where there is no
            model; beside a folder of weights, what those do not tell.
        trace: whether activations are traced where that can be; else they follow a decoder's formula.
    """

    model: str | None = None
    parameters: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    trace: bool = True

    @property
    def numbers(self) -> dict[str, int]:
        """Those given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if name not in ("model", "trace") and value is not None}


def open_model(
    source: ModelSource, sequence_length: int | None = None, precision: Precision = "bf16"
) -> tuple[ModelSizes, Activations]:
    """Sizes and activations; no weight is read or allocated, and torch is imported for a trace only.

    Args:
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        precision: of the computation.

    Raises:
        ConfigError: there is no such model, it cannot be traced, or too little is known of it.
    """
    if source.model is None:
        sizes = decoder_sizes(**source.numbers)  # type: ignore[arg-type]  # tied is no number
        return _by_formula(sizes, source.numbers, sequence_length or DEFAULT_LENGTH, precision)
    path = Path(source.model)
    config = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not config.is_file():
        return _from_weights(path, source, sequence_length or DEFAULT_LENGTH, precision)
    if source.numbers:
        raise _error(
            f"{_flag(next(iter(source.numbers)))} is given beside {source.model}, which has sizes of its own",
            "Leave one of them out.",
        )
    if config.is_file():
        if source.trace and installed_version("transformers"):
            from zero_plugin.plan.build_model import build_model, example_inputs

            model = build_model(config)
            length = sequence_length or usual_length(model.config)
            return _traced(model, example_inputs(model, length), precision, str(config))
        return _from_config(config, sequence_length, precision)
    if _FUNCTION.fullmatch(source.model):
        from zero_plugin.plan.build_model import call_function

        return _traced(*call_function(source.model, sequence_length), precision, source.model)
    raise _error(
        f"{source.model} is neither a file, nor a folder, nor module:function",
        "Name a transformers model's folder or config.json, a folder of *.safetensors, or module:function.",
    )


def _traced(model: Any, example: Any, precision: Precision, name: str) -> tuple[ModelSizes, Activations]:
    from zero_plugin.plan.activations import trace_activations
    from zero_plugin.plan.live_model import model_sizes

    return replace(model_sizes(model), source=name), trace_activations(model, example, precision)


def _by_formula(
    model: ModelSizes, numbers: Mapping[str, int], sequence_length: int, precision: Precision
) -> tuple[ModelSizes, Activations]:
    widths = {name: numbers.get(name) for name in ("heads", "kv_heads", "intermediate", "head_size")}
    return model, decoder_activations(model, sequence_length, precision, **widths)


def _from_config(file: Path, sequence_length: int | None, precision: Precision) -> tuple[ModelSizes, Activations]:
    """By the decoder's formula, with the sizes that a configuration states, and those of the weights beside it."""
    from zero_plugin.plan.model_facts import stated_width

    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _error(f"{file} cannot be read: {error}", "Give a transformers model's config.json.") from None
    if not isinstance(config, dict):
        raise _error(f"{file} holds no keys", "Give a transformers model's config.json.")
    text = config.get("text_config") or config
    numbers = {
        name: value
        for name, keys in _KEYS.items()
        if (value := next((text[key] for key in keys if isinstance(text.get(key), int)), None))
    }
    other = next((f"its {key}" for key in _NO_DECODER if config.get(key)), None)
    if other or "vocabulary" not in numbers:
        what = f"by {other or 'having no vocabulary'}, {file} is no plain decoder's"
        raise _error(what, "Have it traced: without --no_trace, and with transformers (pip install transformers).")
    hidden, _ = stated_width(config, "config.json")
    if hidden is None or "layers" not in numbers:
        raise _error(f"{file} states no width or no depth", "Give --params, --hidden_size and --layers instead.")
    if text.get("hidden_act", text.get("activation_function", "silu")) not in _GATED:
        # two matrices of 4h have the elements of three of 8/3·h
        numbers["intermediate"] = 2 * numbers.get("intermediate", 4 * hidden) // 3
    tied = bool(text.get("tie_word_embeddings", True))  # transformers' own default
    sizes = decoder_sizes(hidden_size=hidden, tied=tied, **numbers)
    names = config.get("architectures") or [config.get("model_type", "model")]
    sizes = replace(sizes, name=str(names[0]), source=str(file))
    return _by_formula(sizes, numbers, sequence_length or usual_length(config), precision)


def _from_weights(
    folder: Path, source: ModelSource, sequence_length: int, precision: Precision
) -> tuple[ModelSizes, Activations]:
    """From the headers of a folder of safetensors: every tensor's shape, and by its name which layer it is of."""
    from zero_plugin.plan.model_facts import common_width, is_expert, weight_shapes

    shapes = weight_shapes(folder, "plan")
    if not shapes:
        raise _error(f"{folder} holds neither config.json nor *.safetensors", "Name the folder of a model.")
    if source.parameters is not None:
        raise _error(f"--params is given beside {folder}, whose weights tell it", "Leave one of them out.")
    sizes = Counter((math.prod(shape), is_expert(name)) for name, shape in shapes.items())
    hidden = source.hidden_size or common_width(shapes.values())[0]
    depth = max((int(found[1]) + 1 for found in map(_LAYER.search, shapes) if found), default=None)
    tall = [shape[0] for name, shape in shapes.items() if len(shape) == 2 and _EMBEDDING.search(name)]
    model = ModelSizes(
        name=folder.name,
        parameters=tuple(ParameterSize(size, count, expert=expert) for (size, expert), count in sizes.items()),
        largest_module=max((size for size, _ in sizes), default=0),
        hidden_size=hidden,
        layers=source.layers or depth,
        vocabulary=source.vocabulary or max(tall, default=None),
        source=f"the headers of {folder}/*.safetensors",
    )
    return _by_formula(model, source.numbers, sequence_length, precision)


def _flag(number: str) -> str:
    return "--params" if number == "parameters" else f"--{number}"


def _error(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("plan", "", message, fix)])
