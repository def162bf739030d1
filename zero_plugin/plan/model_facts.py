"""A model's hidden size, experts and weights, from its configuration and files.

What a model's configuration, or else the shapes of its parameters, say of its hidden size; imports no torch.

Tells a mixture's expert parameters by their names; imports no torch.

Reads from a model's folder, its config.json and the headers of its weight files, what resolution needs to know.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.resolve.facts import ModelFacts
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.tensors.model_folder import read_header, read_keys, weight_files

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


def stated_width(config: Any, path: str) -> tuple[int | None, str]:
    """The hidden size that a configuration states, itself or in a nested one, and where.

    The language part of several comes first, as in transformers' `get_text_config`; of the other parts the widest.

    Args:
        config: an object or a mapping; None states nothing.
        path: what to call it in the reason, e.g. `model.config`.
    """
    return _search(config, path, 0)


def common_width(shapes: Iterable[tuple[int, ...]]) -> tuple[int | None, str]:
    """The most common dimension of the matrices among `shapes`, the larger one of equals; None without a matrix."""
    counts = Counter(length for shape in shapes if len(shape) == 2 for length in set(shape))
    if not counts:
        return None, ""
    width = max(counts, key=lambda length: (counts[length], length))
    return width, f"the most common dimension of the model's matrices ({counts[width]} of them)"


def _search(config: Any, path: str, depth: int) -> tuple[int | None, str]:
    if config is None or depth > _DEEPEST:
        return None, ""
    for name in _WIDTHS:
        value = _member(config, name)
        if isinstance(value, list | tuple) and value and all(map(_counts, value)):
            return max(value), f"the largest of {path}.{name}"
        if _counts(value):
            return value, f"{path}.{name}"
    for name in _LANGUAGE:
        found = _search(_member(config, name), f"{path}.{name}", depth + 1)
        if found[0] is not None:
            return found
    others = [_search(part, f"{path}.{name}", depth + 1) for name, part in _parts(config)]
    return max(others, key=lambda found: found[0] or 0, default=(None, ""))


def _member(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The nested configurations: members that are mappings, or objects of some configuration class."""
    members = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, part in list(members.items()):
        if isinstance(part, Mapping) or type(part).__name__.lower().endswith("config"):
            yield str(name), part


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_EXPERT: Final = re.compile(r"(^|[._])experts([._]|$)")


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to a routed expert, e.g. `layers.0.mlp.experts.3.weight`."""
    return _EXPERT.search(name) is not None


_CONFIG: Final = "config.json"


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
        raise _error(where, f"{folder} is no folder", "Name the folder of a transformers model.")
    shapes = weight_shapes(folder, where).values()
    config = folder / _CONFIG
    if not config.is_file() and not shapes:
        raise _error(where, f"{folder} holds neither {_CONFIG} nor *.safetensors", "Name the folder of a model.")
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(_read_config(config, where) if config.is_file() else None, _CONFIG)
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
        what = str(error) if file == folder else f"{file} is no safetensors file: {error}"
        raise _error(where, what, "Download the file again.") from None
    return shapes


def _read_config(file: Path, where: str) -> dict[str, Any]:
    try:
        return read_keys(file)
    except (OSError, ValueError) as error:
        raise _error(where, f"{file} cannot be read: {error}", "Download the file again.") from None


def _error(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])
