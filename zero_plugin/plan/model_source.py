"""The model that is planned for: its sizes, and inputs for its forward. No weight is read or allocated.

The model is a live module, or it is named by its configuration, its weights' headers, a function, or a few numbers.
torch is imported only to build a model.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from zero_plugin.config.installed import installed_version
from zero_plugin.config.resolve.facts import ModelFacts, Precision
from zero_plugin.config.rules.training import is_count
from zero_plugin.distributed.messages import working
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.situation import Activations, ModelSizes, ParameterSize
from zero_plugin.tensors.safetensors_files import read_header, read_keys, weight_files

if TYPE_CHECKING:
    from torch import Tensor, nn

_AGAIN: Final = "Download the file again."
_FUNCTION: Final = re.compile(r"[\w.]+:\w+")
_HUB_NAME: Final = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_HUB_SECONDS: Final = 10.0  # timeout of one request
_EMBEDDING: Final = re.compile(r"embed|wte|lm_head")
_LAYER: Final = re.compile(r"\.(\d+)\.")
_GATED: Final = ("silu", "swish", "gelu_pytorch_tanh")  # Llama's and Gemma's activations; others have no gate
KEYS: Final = {  # names in configurations of the numbers that the formula needs
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "vocabulary": ("vocab_size",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_DECODERS_OWN: Final = ("vocabulary", "heads")  # Mamba and RWKV have no heads
_NO_DECODER: Final = (
    *("is_encoder_decoder", "num_local_experts", "num_experts", "n_routed_experts"),
    "type_vocab_size",  # BERT and its variants have it
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model, or its size in numbers.

    Attributes:
        model: a transformers model's folder or its `config.json`, a folder of `*.safetensors`, a model's name on the
            Hugging Face hub, or `module:function`. The function returns a module, or a module and example inputs (see
            `trace_activations`).
        parameters, hidden_size, layers, vocabulary, heads, kv_heads, intermediate: of a decoder, if `model` is None.
            With a folder of weights, numbers that the weights do not show.
        trace: whether to trace activations if possible; otherwise a decoder's formula gives them.
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
        """The given sizes, by name."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("model", "trace") and value is not None
        }


def open_model(
    source: ModelSource, sequence_length: int | None = None, precision: Precision = "bf16"
) -> tuple[ModelSizes, Activations]:
    """Return the sizes and activations of a model.

    No weight is read or allocated, and torch is imported only to trace.

    Args:
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        precision: of the computation.

    Raises:
        ConfigError: the model does not exist, cannot be traced, or too little is known about it.
    """
    if source.model is None:
        sizes = decoder_sizes(**source.numbers)  # type: ignore[arg-type]  # `tied` is not among them
        return _by_formula(sizes, source.numbers, sequence_length or DEFAULT_LENGTH, precision)
    config, shapes = find_source(source)
    if config is None:
        return _from_weights(source.model, shapes, source, sequence_length or DEFAULT_LENGTH, precision)
    if _FUNCTION.fullmatch(source.model):
        return _traced(*_built(source.model, config, sequence_length), precision, source.model)
    if source.trace and installed_version("transformers"):
        return _traced(*_built(source.model, config, sequence_length), precision, str(config))
    return _from_config(config, sequence_length, precision)


def changed_activations(
    source: ModelSource, sequence_length: int | None = None, precision: Precision = "bf16"
) -> Mapping[str, Activations]:
    """Return the result of `trace_changes`; empty if `open_model` uses a formula for activations. Same arguments."""
    if source.model is None:
        return {}
    config, _ = find_model(source.model)
    if not (_FUNCTION.fullmatch(source.model) or (config and source.trace and installed_version("transformers"))):
        return {}
    from zero_plugin.plan.activations import trace_activations, trace_changes  # imports torch

    model, example = _built(source.model, config, sequence_length)
    return trace_changes(model, lambda: trace_activations(model, example, precision))


def _built(name: str, config: Path | None, sequence_length: int | None) -> tuple[Any, Any]:
    """Return the model that a function returns or a configuration describes, and its inputs."""
    with working(f"building the model of {name}, without its weights"):
        if config is None or _FUNCTION.fullmatch(name):
            return call_function(name, sequence_length)
        model = build_model(config)
    return model, example_inputs(model, sequence_length or usual_length(model.config))


def find_source(source: ModelSource) -> tuple[Path | None, Mapping[str, tuple[int, ...]]]:
    """Return the result of `find_model`, but refuse numbers that the model already states.

    Raises:
        ConfigError: the model does not exist, or a number is given in addition to it.
    """
    assert source.model is not None, "numbers alone have no location"
    own = f"in addition to {source.model}, which has its own sizes", "Leave one of them out."
    if source.parameters is not None:
        raise _error(f"--params is given {own[0]}", own[1])
    config, shapes = find_model(source.model)
    if config is not None and source.numbers:
        raise _error(f"--{next(iter(source.numbers))} is given {own[0]}", own[1])
    return config, shapes


def find_model(name: str) -> tuple[Path | None, Mapping[str, tuple[int, ...]]]:
    """Return the `config.json` of a model in a folder or on the Hugging Face hub; without one, its weights' shapes.

    A function is not called: its name is returned unchanged.

    Raises:
        ConfigError: the model does not exist, or has neither.
    """
    path = Path(name)
    if _FUNCTION.fullmatch(name) or path.is_file():
        return path, {}
    if not path.is_dir():
        return look_up(name)
    if (config := path / "config.json").is_file():
        return config, {}
    if not (shapes := weight_shapes(path, "plan")):
        raise _error(f"{name} holds neither config.json nor *.safetensors", "Name the folder of a model.")
    return None, shapes


def look_up(name: str) -> tuple[Path | None, Mapping[str, tuple[int, ...]]]:
    """Return the `config.json` of a model on the Hugging Face hub, or the shapes in its weights' headers.

    `config.json` comes from the hub's cache or is downloaded into it. The shapes are read only if the model has no
    `config.json`; no weight is downloaded for them.

    Args:
        name: its name on the hub, e.g. `meta-llama/Llama-3.1-8B`.

    Raises:
        ConfigError: the name is not valid on the hub, the model does not exist or is private, or the network is down.
    """
    fix = "Name a transformers model's folder or config.json, a folder of *.safetensors, or module:function"
    nothing = f"{name} is neither a file, nor a folder, nor module:function"
    if not _HUB_NAME.fullmatch(name):
        raise _error(nothing, f"{fix}.")
    if installed_version("huggingface_hub") is None:
        raise _error(f"{nothing}, and huggingface_hub, which finds models on the hub, is not installed", f"{fix}.")
    from huggingface_hub import errors, get_safetensors_metadata, hf_hub_download, model_info, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached), {}
    offline = f"{fix}; or its sizes: --params, --hidden_size and --layers."
    try:
        with working(f"looking {name} up on the Hugging Face hub"):
            model_info(name, timeout=_HUB_SECONDS)  # asks once; a download retries for 30 s if the hub is down
            try:
                return Path(hf_hub_download(name, "config.json")), {}
            except errors.LocalEntryNotFoundError:
                raise
            except errors.EntryNotFoundError:
                files = get_safetensors_metadata(name).files_metadata.values()
                return None, {key: tuple(found.shape) for file in files for key, found in file.tensors.items()}
    except errors.LocalEntryNotFoundError:
        raise _error(
            f"{nothing}; the Hugging Face hub's cache lacks it, and the hub does not answer", offline
        ) from None
    except errors.GatedRepoError:
        raise _error(f"{name} needs access that you do not have", "Type `hf auth login` first.") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise _error(f"{nothing}, and the Hugging Face hub has no such model, or it is private", fix) from None
    except errors.NotASafetensorsRepoError:
        raise _error(f"{name} on the Hugging Face hub holds neither config.json nor *.safetensors", offline) from None
    except Exception as error:  # huggingface_hub's network library may raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise _error(f"{nothing}; the hub does not answer: {reason}", offline) from error


def _traced(model: Any, example: Any, precision: Precision, name: str) -> tuple[ModelSizes, Activations]:
    from zero_plugin.plan.activations import trace_activations  # imports torch

    return replace(model_sizes(model), source=name), trace_activations(model, example, precision)


def _by_formula(
    model: ModelSizes, numbers: Mapping[str, int], sequence_length: int, precision: Precision
) -> tuple[ModelSizes, Activations]:
    widths = {name: numbers.get(name) for name in ("heads", "kv_heads", "intermediate", "head_size")}
    return model, decoder_activations(model, sequence_length, precision, **widths)


def _from_config(file: Path, sequence_length: int | None, precision: Precision) -> tuple[ModelSizes, Activations]:
    """Return the sizes by the decoder formula, from a config.json and the weight files next to it."""
    config = _read_config(file, "plan", "Give a transformers model's config.json.")
    text = config.get("text_config") or config
    numbers = {name: number for name, keys in KEYS.items() if (number := stated_number(config, keys))}
    other = [f"its {key}" for key in _NO_DECODER if config.get(key)]
    other += [f"being a {name}" for name in config.get("architectures") or () if "MaskedLM" in name]
    other += [f"having no {part}" for part in _DECODERS_OWN if part not in numbers]
    if other:
        what = f"{file} does not describe a plain decoder, because of {other[0]}"
        raise _error(what, "Have it traced: leave out --no_trace and install transformers (pip install transformers).")
    hidden, _ = stated_width(config, "config.json")
    if hidden is None or "layers" not in numbers:
        raise _error(
            f"{file} does not state the hidden size or the number of layers",
            "Give --params, --hidden_size and --layers instead.",
        )
    if text.get("hidden_act", text.get("activation_function", "silu")) not in _GATED:
        # two matrices of 4h have as many elements as three of 8/3·h
        numbers["intermediate"] = 2 * numbers.get("intermediate", 4 * hidden) // 3
    tied = bool(text.get("tie_word_embeddings", True))  # transformers' own default
    sizes = decoder_sizes(hidden_size=hidden, tied=tied, **numbers)
    names = config.get("architectures") or [config.get("model_type", "model")]
    sizes = replace(sizes, name=str(names[0]), source=str(file))
    return _by_formula(sizes, numbers, sequence_length or usual_length(config), precision)


def _from_weights(
    name: str, shapes: Mapping[str, tuple[int, ...]], source: ModelSource, sequence_length: int, precision: Precision
) -> tuple[ModelSizes, Activations]:
    """Return the sizes from the shapes in a model's safetensors; a tensor's name contains its layer."""
    sizes = Counter((math.prod(shape), is_expert(key)) for key, shape in shapes.items())
    hidden = source.hidden_size or common_width(shapes.values())[0]
    depth = max((int(found[1]) + 1 for found in map(_LAYER.search, shapes) if found), default=None)
    tall = [shape[0] for key, shape in shapes.items() if len(shape) == 2 and _EMBEDDING.search(key)]
    model = ModelSizes(
        name=Path(name).name,
        parameters=tuple(ParameterSize(size, count, expert=expert) for (size, expert), count in sizes.items()),
        largest_module=max((size for size, _ in sizes), default=0),
        hidden_size=hidden,
        layers=source.layers or depth,
        vocabulary=source.vocabulary or max(tall, default=None),
        source=f"the headers of {name}/*.safetensors",
    )
    return _by_formula(model, source.numbers, sequence_length, precision)


# The names of the hidden size in configurations. `dim` comes before `hidden_dim`, because DistilBERT has both and its
# `hidden_dim` is the feed-forward size.
_WIDTHS: Final = (
    *("hidden_size", "hidden_sizes", "d_model", "n_embd", "n_embed", "emb_dim", "embed_dim", "model_dim"),
    *("dim", "d_latents", "hidden_dim"),
)
# The parts that hold the language model, if a configuration nests several. The first part that states a hidden size
# counts.
_LANGUAGE: Final = (
    *("text_config", "llm_config", "language_config", "thinker_config", "llm_cfg", "lm_config", "language_model"),
    *("decoder", "decoder_config", "generator", "text_encoder"),
)
_DEEPEST: Final = 4  # levels of nested configurations to search


def stated_width(config: Any, path: str, depth: int = 0) -> tuple[int | None, str]:
    """Return the hidden size that a configuration states, directly or in a nested one, and where.

    The language part comes first, as in transformers' `get_text_config`; of the other parts, the largest size counts.

    Args:
        config: an object or a mapping; None states nothing.
        path: name of the configuration in the reason, e.g. `model.config`.
        depth: number of configurations that contain this one.
    """
    if config is None or depth > _DEEPEST:
        return None, ""
    for name in _WIDTHS:
        value = _member(config, name)
        if isinstance(value, list | tuple) and value and all(map(is_count, value)):
            return max(value), f"the largest of {path}.{name}"
        if is_count(value):
            return value, f"{path}.{name}"
    for name in _LANGUAGE:
        found = stated_width(_member(config, name), f"{path}.{name}", depth + 1)
        if found[0] is not None:
            return found
    # Nested configurations are members that are mappings or objects of a configuration class.
    members = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    others = [
        stated_width(part, f"{path}.{name}", depth + 1)
        for name, part in list(members.items())
        if isinstance(part, Mapping) or type(part).__name__.lower().endswith("config")
    ]
    return max(others, key=lambda found: found[0] or 0, default=(None, ""))


def common_width(shapes: Iterable[tuple[int, ...]]) -> tuple[int | None, str]:
    """Return the most common dimension of the matrices among `shapes`, the larger if tied; None without a matrix."""
    counts = Counter(length for shape in shapes if len(shape) == 2 for length in set(shape))
    if not counts:
        return None, ""
    width = max(counts, key=lambda length: (counts[length], length))
    return width, f"the most common dimension of the model's matrices ({counts[width]} of them)"


def _member(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


_EXPERT: Final = re.compile(r"(^|[._])experts([._]|$)")


def is_expert(name: str) -> bool:
    """Return whether a parameter of this name belongs to a routed expert, e.g. `layers.0.mlp.experts.3.weight`."""
    return _EXPERT.search(name) is not None


def probe_model_folder(folder: str | Path, where: str) -> ModelFacts:
    """Return the sizes of the model in a transformers folder, without reading tensors or importing torch.

    Without weight files the sizes of the parameters stay unknown (0).

    Args:
        folder: holds `config.json`, weights as safetensors, or both.
        where: origin of the folder's name, for errors, e.g. `--model`.

    Raises:
        ConfigError: the folder does not exist, it holds no model, or a file in it is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _error(f"{folder} is not a folder", "Name the folder of a transformers model.", where)
    shapes = weight_shapes(folder, where).values()
    file = folder / "config.json"
    if not file.is_file() and not shapes:
        raise _error(f"{folder} holds neither {file.name} nor *.safetensors", "Name the folder of a model.", where)
    return model_facts(shapes, _read_config(file, where) if file.is_file() else None, file.name)


def model_facts(shapes: Iterable[tuple[int, ...]], config: Any, path: str) -> ModelFacts:
    """Return the facts about a model that resolution needs.

    Args:
        shapes: of all its parameters.
        config: its configuration, which may state the hidden size; otherwise the most common dimension of the matrices
            is used.
        path: name of the configuration in the reason.
    """
    shapes = list(shapes)
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(config, path)
    if hidden is None:
        hidden, reason = common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))


def weight_shapes(folder: Path, where: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model's safetensors headers, by name; empty without such files.

    Args:
        folder: of the model.
        where: origin of the folder's name, for errors.

    Raises:
        ConfigError: a file is missing or broken.
    """
    file = folder
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in weight_files(folder)[0]:
            file = folder / name
            shapes |= {tensor: stored.shape for tensor, stored in read_header(file)[0].items()}
    except (OSError, ValueError) as error:
        what = str(error) if file == folder else f"{file} is not a readable safetensors file: {error}"
        raise _error(what, _AGAIN, where) from None
    return shapes


def _read_config(file: Path, where: str, fix: str = _AGAIN) -> dict[str, Any]:
    try:
        return read_keys(file)
    except (OSError, ValueError) as error:
        raise _error(f"{file} cannot be read: {error}", fix, where) from None


DEFAULT_LENGTH: Final = 2048
# Names in configurations of a model's number of positions.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "block_size")


def usual_length(config: Any = None) -> int:
    """Return 2048 tokens, or all of a model's positions if it has fewer.

    Args:
        config: of the model, an object or a mapping; the language part of a nested one counts.
    """
    return min(DEFAULT_LENGTH, stated_number(config, _POSITIONS) or DEFAULT_LENGTH)


def stated_number(config: Any, names: Iterable[str]) -> int | None:
    """Return the first number above 0 that a configuration states under one of `names`.

    Args:
        config: an object or a mapping; the language part of a nested one counts.
        names: possible names of the number.
    """
    if isinstance(config, Mapping):
        config = config.get("text_config") or config
    elif hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return next(filter(is_count, (_member(config, name) for name in names)), None)


Example: TypeAlias = "Mapping[str, Any] | Sequence[Any] | Tensor"

_ONE_LABEL: Final = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_LABEL_PER_TOKEN: Final = (
    *("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
)


def model_sizes(module: nn.Module) -> ModelSizes:
    """Return the sizes of `module`, which may be on any device, on `meta`, or partitioned (`ds_shape`).

    A parameter that several modules share counts once. Tensors with the same size, dtype width, `requires_grad` and
    expert flag are one entry.
    """
    from zero_plugin.plan.blocks import repeated_blocks  # imports torch

    shapes: dict[str, tuple[int, ...]] = {}
    kinds: Counter[tuple[int, bool, bool, int]] = Counter()
    for name, parameter in module.named_parameters():
        shapes[name] = full_shape(parameter)
        elements, width = math.prod(shapes[name]), parameter.element_size()
        kinds[elements, parameter.requires_grad, is_expert(name), width] += 1
    config: Any = getattr(module, "config", None)
    hidden, _ = stated_width(config, "model.config")
    return ModelSizes(
        name=type(module).__name__,
        parameters=tuple(
            ParameterSize(size, count, trained, expert, width)
            for (size, trained, expert, width), count in kinds.items()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        largest_module=max(
            sum(math.prod(full_shape(parameter)) for parameter in part.parameters(recurse=False))
            for part in module.modules()
        ),
        hidden_size=hidden or common_width(shapes.values())[0],
        layers=len(repeated_blocks(module)) or stated_number(config, KEYS["layers"]),
        vocabulary=stated_number(config, KEYS["vocabulary"]),
        heads=stated_number(config, KEYS["heads"]),
        source="the model",
    )


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the unpartitioned shape of a tensor."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def probe_model(model: nn.Module) -> ModelFacts:
    """Return the sizes of `model` without touching its data.

    Partitioned parameters (`ds_shape`) count as unpartitioned. A parameter shared by several modules counts once.
    """
    return model_facts(map(full_shape, model.parameters()), getattr(model, "config", None), "model.config")


def build_model(config: Path) -> nn.Module:
    """Build the model of a `config.json` on the meta device: of the class that it names, otherwise a causal one.

    Raises:
        ConfigError: transformers does not know it.
    """
    import torch
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(config)
        named = (settings.architectures or [""])[0]
        if settings.problem_type is None and settings.num_labels > 1:
            # transformers would choose this for integer labels too, but it would read their values.
            settings.problem_type = "single_label_classification"
        with torch.device("meta"):
            if hasattr(transformers, named):
                return getattr(transformers, named)(settings)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(settings)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        message = f"transformers builds no model from {config}: {reason}"
        fix = "Give a function that builds it, as module:function, or --params, --hidden_size and --layers."
        raise _error(message, fix) from error


def example_inputs(model: Any, sequence_length: int) -> Callable[[int], dict[str, Tensor]]:
    """Return a function from a number of samples to a training batch for a transformers model.

    The batch has labels. Its tensors have shapes only.

    Args:
        model: any transformers model for text or images.
        sequence_length: tokens of one sample, of an encoder's and of a decoder's.

    Raises:
        ConfigError: the model is not from transformers, or takes other inputs.
    """
    import torch

    name, config = type(model).__name__, getattr(model, "config", None)
    main = getattr(model, "main_input_name", "unknown inputs")
    if config is None or main not in ("input_ids", "pixel_values"):
        fix = "Give a function that returns the model and example inputs, as module:function."
        raise _error(f"{name} takes {main}, and no example of these is known", fix)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def make(samples: int) -> dict[str, Tensor]:
        tokens = integers(samples, sequence_length)
        batch = {main: tokens}
        if main == "pixel_values":
            size = getattr(config, "image_size", None) or 224  # ImageNet's size, used to train most of these models
            height, width = size if isinstance(size, list | tuple) else (size, size)
            batch[main] = torch.empty(samples, getattr(config, "num_channels", 3), height, width, device="meta")
        elif getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = tokens
        if name.endswith(_LABEL_PER_TOKEN):
            batch["labels"] = tokens
        elif name.endswith(_ONE_LABEL):
            batch["labels"] = integers(samples)
        elif name.endswith("ForQuestionAnswering"):
            batch |= {"start_positions": integers(samples), "end_positions": integers(samples)}
        return batch

    return make


def call_function(name: str, sequence_length: int | None) -> tuple[nn.Module, Any]:
    """Return the module that a function returns, and its example inputs, or a transformers model's default ones.

    The function runs under the meta device, which allocates no weights. If it needs values, it runs again on the CPU.

    Args:
        name: `module:function`; the module is also searched in the current folder.
        sequence_length: tokens of one sample, for a transformers model; None: `usual_length`.

    Raises:
        ConfigError: the function does not exist, it fails, or it returns another type.
    """
    import torch
    from torch import nn

    module_name, function_name = name.split(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        try:
            with torch.device("meta"):
                found = function()
        except (RuntimeError, NotImplementedError):  # it reads a tensor's values
            found = function()
    except Exception as error:  # a user's function may raise anything
        fix = "Name a function without arguments that can be imported here, e.g. train:build_model."
        raise _error(f"{name}: {type(error).__name__}: {error}", fix) from error
    finally:
        sys.path.remove(here)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return found[0], found[1]
    if isinstance(found, nn.Module) and hasattr(found, "main_input_name"):
        return found, example_inputs(found, sequence_length or usual_length(found.config))
    fix = "Return (module, example inputs): a dict of keyword arguments, a tuple of positional ones, or one tensor."
    raise _error(f"{name}: it returned {type(found).__name__}, so the inputs of the forward are not known", fix)


def forward_arguments(model: nn.Module, batch: Any) -> Iterator[Example]:
    """Yield possible arguments of a forward, the likeliest first.

    For a mapping: the entries that the forward knows, then its first entry. For a sequence: all items, then all but the
    last, then the first.

    Args:
        model: the model whose forward takes them.
        batch: as a loader returns it; None yields nothing.
    """
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        yield {name: value for name, value in batch.items() if takes_any or name in known}
        yield from ((value,) for value in list(batch.values())[:1])
    elif isinstance(batch, list | tuple):
        yield list(batch)
        if len(batch) > 1:
            yield list(batch[:-1])  # the last one is probably the target
            yield [batch[0]]
    elif batch is not None:
        yield [batch]


def _error(message: str, fix: str, where: str = "plan") -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])
