"""Has transformers' `from_pretrained` look first whether this machine's memory holds a copy for each process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.errors import CheckpointError
from zero_plugin.loop.memory_check import check_memory_to_load
from zero_plugin.tensors.model_folder import ITEM_BYTES, read_model_folder

# With these it is not loaded into host memory as it lies in the files.
_OTHERWISE: Final = ("device_map", "quantization_config", "gguf_file", "load_in_8bit", "load_in_4bit")
_FIX: Final = (
    "Start fewer processes on this machine; or build it inside `with accelerator.init_model(weights=folder):`, which "
    "reads it straight to each device; or use ZeRO stage 3, where no process holds all of it."
)


_checking: Final[list[tuple[int, int]]] = []  # of those entered, the last one counts


@contextmanager
def checking_pretrained(copies: int, available: int) -> Iterator[None]:
    """Inside, `from_pretrained` of whole models is refused where host memory does not hold them.

    Nothing is looked at where transformers is not imported yet, or of a model whose files are not on this machine. Such
    contexts may be left in any order.

    Args:
        copies: processes of this machine, each of which loads one.
        available: bytes of host memory that could be had when they began.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    entered = (copies, available)
    if not _checking:
        _replace_from_pretrained(modeling.PreTrainedModel)
    _checking.append(entered)
    try:
        yield
    finally:
        _checking.remove(entered)
        if not _checking:
            modeling.PreTrainedModel.from_pretrained = modeling.PreTrainedModel.from_pretrained.__func__.replaced


def _replace_from_pretrained(model_class: Any) -> None:
    before = model_class.__dict__["from_pretrained"]

    @functools.wraps(before.__func__)
    def from_pretrained(cls: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = None if any(kwargs.get(name) is not None for name in _OTHERWISE) else _bytes_of(source, kwargs)
        if size is not None:
            check_memory_to_load(size, *_checking[-1], f"{cls.__name__}.from_pretrained({str(source)!r})", _FIX)
        return before.__func__(cls, source, *args, **kwargs)

    from_pretrained.replaced = before  # type: ignore[attr-defined]  # a function takes any
    model_class.from_pretrained = classmethod(from_pretrained)


def _bytes_of(source: Any, kwargs: Mapping[str, Any]) -> int | None:
    """Bytes of a model in the type that is asked for; None where that cannot be told from safetensors on this disk."""
    folder = _folder_of(source, kwargs)
    if folder is None:
        return None
    try:
        places = read_model_folder(folder).places.values()
    except CheckpointError:
        return None
    asked: Any = kwargs.get("dtype", kwargs.get("torch_dtype"))
    asked = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(asked, torch.dtype):
        return sum(place.size for place in places)
    return sum(asked.itemsize * place.size // ITEM_BYTES[place.type_name] for place in places)


def _folder_of(source: Any, kwargs: Mapping[str, Any]) -> Path | None:
    folder = Path(str(source), kwargs.get("subfolder") or "")
    if source is None or folder.is_dir():
        return None if source is None else folder
    hub = sys.modules.get("huggingface_hub")
    cached = hub and hub.try_to_load_from_cache(
        str(source), "config.json", cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
    )
    return Path(cached).parent if isinstance(cached, str) else None
