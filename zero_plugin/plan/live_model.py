"""A model as a torch module: built without memory, its sizes, and inputs for its forward; no data is touched."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from zero_plugin.config.resolve.facts import ModelFacts
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.decoder import stated_number, usual_length
from zero_plugin.plan.model_source import KEYS, common_width, is_expert, model_facts, stated_width
from zero_plugin.plan.situation import ModelSizes, ParameterSize

Example = Mapping[str, Any] | Sequence[Any] | Tensor

_ONE_LABEL: Final = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_LABEL_PER_TOKEN: Final = (
    *("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
)


def model_sizes(module: nn.Module) -> ModelSizes:
    """Sizes of `module`, on whatever device it is, `meta` and partitioned (`ds_shape`) included.

    A parameter that several modules share counts once; tensors of one size, all trainable or all frozen, are one entry.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: Counter[tuple[int, bool, bool, int]] = Counter()
    for name, parameter in module.named_parameters():
        shapes[name] = _shape(parameter)
        elements, width = math.prod(shapes[name]), parameter.element_size()
        kinds[elements, parameter.requires_grad, is_expert(name), width] += 1
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, _ = stated_width(config, "model.config")
    return ModelSizes(
        name=type(module).__name__,
        parameters=tuple(
            ParameterSize(size, count, trained, expert, width)
            for (size, trained, expert, width), count in kinds.items()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        largest_module=max((_own_elements(part.parameters(recurse=False)) for part in module.modules()), default=0),
        hidden_size=hidden or common_width(shapes.values())[0],
        layers=len(repeated_blocks(module)) or stated_number(text, KEYS["layers"]),
        vocabulary=stated_number(text, KEYS["vocabulary"]),
        source="the model",
    )


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The modules that activation checkpointing recomputes one by one: the outermost that stand in a row of their kind.

    A row is a ModuleList or a Sequential that holds at least two modules of one class, which have modules of their own:
    transformer layers, residual blocks.
    """
    found: list[nn.Module] = []
    for child in module.children():
        kinds = Counter(type(block) for block in child.children() if any(True for _ in block.children()))
        is_row = isinstance(child, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
        found += child.children() if is_row else repeated_blocks(child)
    return found


def _own_elements(parameters: Iterable[Tensor]) -> int:
    return sum(math.prod(_shape(parameter)) for parameter in parameters)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def probe_model(model: nn.Module) -> ModelFacts:
    """Sizes of `model`, without touching its data; partitioned parameters (`ds_shape`) count with their whole shape.

    A parameter shared by several modules counts once.
    """
    return model_facts(map(_shape, model.parameters()), getattr(model, "config", None), "model.config")


def build_model(config: Path) -> nn.Module:
    """The model of a `config.json`, of the class that it names, else a causal one, on the meta device.

    Raises:
        ConfigError: transformers does not know it.
    """
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


def example_inputs(model: Any, sequence_length: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """A function from a number of samples to a training batch for a transformers model, with labels; shapes only.

    Args:
        model: any transformers model for text or images.
        sequence_length: tokens of one sample, of an encoder's and of a decoder's.

    Raises:
        ConfigError: it is none, or takes other inputs.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    main = getattr(model, "main_input_name", "what its code says")
    if config is None or main not in ("input_ids", "pixel_values"):
        fix = "Give a function that returns the model and example inputs, as module:function."
        raise _error(f"{name} takes {main}, for which there is no example", fix)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def make(samples: int) -> dict[str, torch.Tensor]:
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
    raise _error(f"{name}: it returned {type(found).__name__}, which does not tell what the forward takes", fix)


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


def _error(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("plan", "", message, fix)])
