"""Makes transformers' `from_pretrained` check first that CPU memory holds a copy of the model for each process."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.errors import CheckpointError
from zero_plugin.loop.memory_check import check_memory_to_load
from zero_plugin.tensors.safetensors_files import read_model_folder

# With these arguments the model is not loaded into CPU memory as it is in the files.
_OTHERWISE: Final = ("device_map", "quantization_config", "gguf_file", "load_in_8bit", "load_in_4bit")
_FIX: Final = (
    "Start fewer processes on this machine; or build it inside `with accelerator.init_model(weights=folder):`, which "
    "reads it straight to each device; or use ZeRO stage 3, where each process holds a partition."
)


_checking: Final[list[tuple[int, int]]] = []  # the contexts that are entered; the last one is used


@contextmanager
def checking_pretrained(copies: int, available: int) -> Iterator[None]:
    """Inside, `from_pretrained` raises if CPU memory does not hold the unpartitioned model in every process.

    Nothing is checked if transformers is not imported yet, or if the files of the model are not on this machine. These
    contexts may be exited in any order.

    Args:
        copies: the number of processes of this machine, each of which loads a copy.
        available: bytes of CPU memory that were available when the processes started.
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
    """Bytes of a model in the requested dtype; None if there are no safetensors files of it on this machine."""
    folder = _folder_of(source, kwargs)
    if folder is None:
        return None
    try:
        places = read_model_folder(folder).places.values()
    except CheckpointError:
        return None
    requested: Any = kwargs.get("dtype", kwargs.get("torch_dtype"))
    requested = getattr(torch, requested, None) if isinstance(requested, str) else requested
    if not isinstance(requested, torch.dtype):
        return sum(place.size for place in places)
    return sum(requested.itemsize * math.prod(place.shape) for place in places)


def _folder_of(source: Any, kwargs: Mapping[str, Any]) -> Path | None:
    folder = Path(str(source), kwargs.get("subfolder") or "")
    if source is None or folder.is_dir():
        return None if source is None else folder
    hub = sys.modules.get("huggingface_hub")
    cached = hub and hub.try_to_load_from_cache(
        str(source), "config.json", cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
    )
    return Path(cached).parent if isinstance(cached, str) else None
