"""The model that is planned for: its sizes, its width, and inputs for its forward; no weight is read or allocated.

It is a live module, or named by its configuration, its weights' headers, a function, or a few numbers. torch is
imported only where a model is built.
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
_HUB_SECONDS: Final = 10.0  # for its answer
_EMBEDDING: Final = re.compile(r"embed|wte|lm_head")
_LAYER: Final = re.compile(r"\.(\d+)\.")
_GATED: Final = ("silu", "swish", "gelu_pytorch_tanh")  # Llama's, Gemma's; others have no gate
KEYS: Final = {  # how configurations call what the formula needs
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
    "type_vocab_size",  # BERT's and its kin's
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model is, or how large.

    Attributes:
        model: a transformers model's folder or its `config.json`, a folder of `*.safetensors`, a model's name on the
            Hugging Face hub, or `module:function`, which returns a module, or a module and example inputs (see
            `trace_activations`).
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
        """The sizes that are given, by name."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("model", "trace") and value is not None
        }


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
    """See `trace_changes`; empty where `open_model` computes activations by a formula. Arguments as there."""
    if source.model is None:
        return {}
    config, _ = find_model(source.model)
    if not (_FUNCTION.fullmatch(source.model) or (config and source.trace and installed_version("transformers"))):
        return {}
    from zero_plugin.plan.activations import trace_activations, trace_changes  # imports torch

    model, example = _built(source.model, config, sequence_length)
    return trace_changes(model, lambda: trace_activations(model, example, precision))


def _built(name: str, config: Path | None, sequence_length: int | None) -> tuple[Any, Any]:
    """The model that a function returns, or of a configuration, and its inputs."""
    with working(f"building the model of {name}, without its weights"):
        if config is None or _FUNCTION.fullmatch(name):
            return call_function(name, sequence_length)
        model = build_model(config)
    return model, example_inputs(model, sequence_length or usual_length(model.config))


def find_source(source: ModelSource) -> tuple[Path | None, Mapping[str, tuple[int, ...]]]:
    """As `find_model`; no number may be given of a model that has it.

    Raises:
        ConfigError: there is no such model, or a number is given beside it.
    """
    assert source.model is not None, "numbers alone are no model that is somewhere"
    own = f"beside {source.model}, which has sizes of its own", "Leave one of them out."
    if source.parameters is not None:
        raise _error(f"--params is given {own[0]}", own[1])
    config, shapes = find_model(source.model)
    if config is not None and source.numbers:
        raise _error(f"--{next(iter(source.numbers))} is given {own[0]}", own[1])
    return config, shapes


def find_model(name: str) -> tuple[Path | None, Mapping[str, tuple[int, ...]]]:
    """The `config.json` of the model of that name, here or on the Hugging Face hub; else its weights' shapes.

    A function is not called: its name is returned as it stands.

    Raises:
        ConfigError: there is no such model, or it has neither.
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
    """A model of the Hugging Face hub: its `config.json`, from the hub's cache or downloaded into it; of a model that
    has none, the shapes in its weights' headers, for which no weight is downloaded.

    Args:
        name: as the hub has it, e.g. `meta-llama/Llama-3.1-8B`.

    Raises:
        ConfigError: it is no name of the hub's, there is no such model, it may not be seen, or there is no network.
    """
    fix = "Name a transformers model's folder or config.json, a folder of *.safetensors, or module:function"
    nothing = f"{name} is neither a file, nor a folder, nor module:function"
    if not _HUB_NAME.fullmatch(name):
        raise _error(nothing, f"{fix}.")
    if installed_version("huggingface_hub") is None:
        raise _error(f"{nothing}, and huggingface_hub, which looks models up, is not installed", f"{fix}.")
    from huggingface_hub import errors, get_safetensors_metadata, hf_hub_download, model_info, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached), {}
    offline = f"{fix}; or its sizes: --params, --hidden_size and --layers."
    try:
        with working(f"looking {name} up on the Hugging Face hub"):
            model_info(name, timeout=_HUB_SECONDS)  # asks once; downloads try a hub that is not there for half a minute
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
        raise _error(f"{name} is shown to those only who were given access", "Type `hf auth login` first.") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise _error(
            f"{nothing}, and the Hugging Face hub has no such model, or shows it to others only", fix
        ) from None
    except errors.NotASafetensorsRepoError:
        raise _error(f"{name} on the Hugging Face hub holds neither config.json nor *.safetensors", offline) from None
    except Exception as error:  # of whatever library it asks the network by
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
    """The sizes by the formula for decoders, from a config.json and the weight files beside it."""
    config = _read_config(file, "plan", "Give a transformers model's config.json.")
    text = config.get("text_config") or config
    numbers = {name: number for name, keys in KEYS.items() if (number := stated_number(config, keys))}
    other = [f"its {key}" for key in _NO_DECODER if config.get(key)]
    other += [f"being a {name}" for name in config.get("architectures") or () if "MaskedLM" in name]
    other += [f"having no {part}" for part in _DECODERS_OWN if part not in numbers]
    if other:
        what = f"by {other[0]}, {file} is no plain decoder's"
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
    name: str, shapes: Mapping[str, tuple[int, ...]], source: ModelSource, sequence_length: int, precision: Precision
) -> tuple[ModelSizes, Activations]:
    """From the shape of every tensor in a model's safetensors, and by its name which layer it is of."""
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


# The names under which configurations keep the width of the residual stream. `dim` before `hidden_dim`, which is the
# feed-forward width where both are there (DistilBERT).
_WIDTHS: Final = (
    *("hidden_size", "hidden_sizes", "d_model", "n_embd", "n_embed", "emb_dim", "embed_dim", "model_dim"),
    *("dim", "d_latents", "hidden_dim"),
)
# The parts that hold the language model, where a configuration nests several: the first that states a width counts.
_LANGUAGE: Final = (
    *("text_config", "llm_config", "language_config", "thinker_config", "llm_cfg", "lm_config", "language_model"),
    *("decoder", "decoder_config", "generator", "text_encoder"),
)
_DEEPEST: Final = 4


def stated_width(config: Any, path: str, depth: int = 0) -> tuple[int | None, str]:
    """The hidden size that a configuration states, itself or in a nested one, and where.

    The language part of several comes first, as in transformers' `get_text_config`; of the other parts the widest.

    Args:
        config: an object or a mapping; None states nothing.
        path: what to call it in the reason, e.g. `model.config`.
        depth: how many configurations hold this one.
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
    # Nested configurations: members that are mappings, or objects of some configuration class.
    members = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    others = [
        stated_width(part, f"{path}.{name}", depth + 1)
        for name, part in list(members.items())
        if isinstance(part, Mapping) or type(part).__name__.lower().endswith("config")
    ]
    return max(others, key=lambda found: found[0] or 0, default=(None, ""))


def common_width(shapes: Iterable[tuple[int, ...]]) -> tuple[int | None, str]:
    """The most common dimension of the matrices among `shapes`, the larger one of equals; None without a matrix."""
    counts = Counter(length for shape in shapes if len(shape) == 2 for length in set(shape))
    if not counts:
        return None, ""
    width = max(counts, key=lambda length: (counts[length], length))
    return width, f"the most common dimension of the model's matrices ({counts[width]} of them)"


def _member(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


_EXPERT: Final = re.compile(r"(^|[._])experts([._]|$)")


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to a routed expert, e.g. `layers.0.mlp.experts.3.weight`."""
    return _EXPERT.search(name) is not None


def probe_model_folder(folder: str | Path, where: str) -> ModelFacts:
    """Sizes of the model in a transformers folder; no tensor is read, and neither torch nor transformers imported.

    Without weight files the sizes of the parameters stay unknown (0).

    Args:
        folder: holds `config.json`, weights as safetensors, or both.
        where: who named it, for errors, e.g. `--model`.

    Raises:
        ConfigError: there is no such folder, it holds no model, or a file in it is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _error(f"{folder} is no folder", "Name the folder of a transformers model.", where)
    shapes = weight_shapes(folder, where).values()
    file = folder / "config.json"
    if not file.is_file() and not shapes:
        raise _error(f"{folder} holds neither {file.name} nor *.safetensors", "Name the folder of a model.", where)
    return model_facts(shapes, _read_config(file, where) if file.is_file() else None, file.name)


def model_facts(shapes: Iterable[tuple[int, ...]], config: Any, path: str) -> ModelFacts:
    """What resolution needs to know of a model.

    Args:
        shapes: of all its parameters.
        config: its configuration; the hidden size is the one that it states, else the commonest dimension of a matrix.
        path: what to call that in the reason.
    """
    shapes = list(shapes)
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(config, path)
    if hidden is None:
        hidden, reason = common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))


def weight_shapes(folder: Path, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a model's folder, by name, from the headers of its safetensors; empty without any.

    Args:
        folder: of the model.
        where: who named it, for errors.

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
# How configurations call the number of positions that a model has.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "block_size")


def usual_length(config: Any = None) -> int:
    """2048 tokens, or all of a model's positions where it has fewer.

    Args:
        config: of the model, an object or a mapping; the language part of a nested one counts.
    """
    return min(DEFAULT_LENGTH, stated_number(config, _POSITIONS) or DEFAULT_LENGTH)


def stated_number(config: Any, names: Iterable[str]) -> int | None:
    """The first number above 0 that a configuration, or the language part of a nested one, has under one of `names`.

    Args:
        config: an object or a mapping.
        names: of the number.
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
    """Sizes of `module`, on whatever device it is, `meta` and partitioned (`ds_shape`) included.

    A parameter that several modules share counts once; tensors of one size, all trainable or all frozen, are one entry.
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
    """The shape of a tensor, which may be partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def probe_model(model: nn.Module) -> ModelFacts:
    """Sizes of `model`, without touching its data; partitioned parameters (`ds_shape`) count as unpartitioned ones.

    A parameter shared by several modules counts once.
    """
    return model_facts(map(full_shape, model.parameters()), getattr(model, "config", None), "model.config")


def build_model(config: Path) -> nn.Module:
    """The model of a `config.json`, of the class that it names, else a causal one, on the meta device.

    Raises:
        ConfigError: transformers does not know it.
    """
    import torch
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(config)
        named = (settings.architectures or [""])[0]
        if settings.problem_type is None and settings.num_labels > 1:
            settings.problem_type = "single_label_classification"  # what it takes integer labels for, by their values
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
    """A function from a number of samples to a training batch for a transformers model, with labels; shapes only.

    Args:
        model: any transformers model for text or images.
        sequence_length: tokens of one sample, of an encoder's and of a decoder's.

    Raises:
        ConfigError: it is none, or takes other inputs.
    """
    import torch

    name, config = type(model).__name__, getattr(model, "config", None)
    main = getattr(model, "main_input_name", "what its code says")
    if config is None or main not in ("input_ids", "pixel_values"):
        fix = "Give a function that returns the model and example inputs, as module:function."
        raise _error(f"{name} takes {main}, for which there is no example", fix)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def make(samples: int) -> dict[str, Tensor]:
        tokens = integers(samples, sequence_length)
        batch = {main: tokens}
        if main == "pixel_values":
            size = getattr(config, "image_size", None) or 224  # ImageNet's, as most of these models were trained on
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
    """The module that a function returns, and example inputs: those returned with it, else a transformers model's.

    The function runs under the meta device, so that no weight is allocated, and where it needs values on the CPU.

    Args:
        name: `module:function`; the module is looked for in the current folder too.
        sequence_length: tokens of one sample, for a transformers model; None: `usual_length`.

    Raises:
        ConfigError: there is no such function, it fails, or it returns something else.
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
        except (RuntimeError, NotImplementedError):  # it looks at a tensor's values
            found = function()
    except Exception as error:  # whatever a user's function raises
        fix = "Name a function without arguments that can be imported here, e.g. train:build_model."
        raise _error(f"{name}: {type(error).__name__}: {error}", fix) from error
    finally:
        sys.path.remove(here)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return found[0], found[1]
    if isinstance(found, nn.Module) and hasattr(found, "main_input_name"):
        return found, example_inputs(found, sequence_length or usual_length(found.config))
    fix = "Return (module, example inputs): a dict of keyword arguments, a tuple of positional ones, or one tensor."
    raise _error(f"{name}: it returned {type(found).__name__}, from which it is not known what the forward takes", fix)


def forward_arguments(model: nn.Module, batch: Any) -> Iterator[Example]:
    """The likeliest first: those of the batch's keys that the forward knows; or its items, without the last, the first.

    Args:
        model: whose forward.
        batch: as a loader gives it; None gives nothing.
    """
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        yield {name: value for name, value in batch.items() if takes_any or name in known}
        yield from ((value,) for value in list(batch.values())[:1])
    elif isinstance(batch, list | tuple):
        yield list(batch)
        if len(batch) > 1:
            yield list(batch[:-1])  # the last one is what the loss compares with
            yield [batch[0]]
    elif batch is not None:
        yield [batch]


def _error(message: str, fix: str, where: str = "plan") -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])
