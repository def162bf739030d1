"""The places that a device map may name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

__all__ = ["check_places", "find_place"]


def find_place(device: int | str | torch.device) -> torch.device:
    """The device of a GPU index or a name, with its index, as tensors that are there tell it.

    Raises:
        ValueError: there is no such device here.
    """
    return _find(device if isinstance(device, int) else str(device))


def check_places(device_map: Mapping[str, int | str | torch.device]) -> None:
    """Check that every device that a map names is here.

    Raises:
        ValueError: one is not; the message names the map's key.
    """
    for name, device in device_map.items():
        if device != "disk":
            try:
                find_place(device)
            except ValueError as error:
                raise ValueError(f"device_map sends {name or 'the model'!r} to {device!r}, but {error}") from error


@lru_cache  # asked at every forward of every module
def _find(device: int | str) -> torch.device:
    try:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return torch.empty(0, device=named).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each reason
        here = torch.cuda.device_count()
        gpus = f"its GPUs are {list(range(here))}" if here else "it has no GPU"
        raise ValueError(f"this machine has no {_describe(device)}: {gpus}; 'cpu' and 'disk' are there.") from error


def _describe(device: int | str) -> str:
    return f"GPU {device}" if isinstance(device, int) else f"device {device!r}"
