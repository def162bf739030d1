"""Which modules of a spread model get a hook, where each runs, and where its tensors are between forwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.placement import lookup
from zero_plugin.bigmodel.stored import PrefixedDataset
from zero_plugin.bigmodel.tensors import Slot, tensor_slots

__all__ = ["Layout", "Stop", "find_stops", "join_names", "plan_stops", "reads_inside", "under"]

# Their forward reads weights of modules inside without calling these.
_READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Stop(NamedTuple):
    """A module that gets a hook, and the tensors which that brings in: of all modules inside if it `is_whole`."""

    name: str
    module: nn.Module
    is_whole: bool
    slots: list[Slot]


def find_stops(
    module: nn.Module,
    is_whole: Callable[[str, nn.Module], bool],
    name: str = "",
    seen: set[nn.Module] | None = None,
) -> Iterator[Stop]:
    """The module and all inside, each once; of one that `is_whole`, by name and module, nothing inside.

    Args:
        module: where to begin.
        is_whole: whether one hook brings in all tensors inside.
        name: the module's.
        seen: modules that have had their turn.
    """
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    whole = is_whole(name, module)
    yield Stop(name, module, whole, list(tensor_slots(module, recurse=whole)))
    for child_name, child in () if whole else module.named_children():
        yield from find_stops(child, is_whole, join_names(name, child_name), seen)


def reads_inside(module: nn.Module, preloaded: Collection[str]) -> bool:
    """Whether a module's forward reads weights of modules inside without calling these, as far as is known.

    Args:
        module: any.
        preloaded: names of classes of which the user says so.
    """
    return isinstance(module, _READS_INSIDE) or type(module).__name__ in preloaded


class Layout:
    """Where tensors are between forwards, and where modules run.

    Args:
        places: device or `disk` by name, without those that are not named.
        main: where runs what is on the CPU or disk.
        offload_buffers: buffers are where the map says, not where their module runs.
    """

    def __init__(self, places: Mapping[str, torch.device | str], main: torch.device, offload_buffers: bool) -> None:
        self._places = places
        self._main = main
        self._offload_buffers = offload_buffers

    def home(self, name: str) -> torch.device | str:
        """Of a tensor."""
        place: torch.device | str | None = lookup(self._places, name)
        return self._main if place is None else place

    def runs_on(self, name: str, slots: list[Slot]) -> torch.device | None:
        """Of a module; None if the map names only what is inside, and it holds no tensor itself."""
        place = lookup(self._places, name)
        if place is not None:
            return self._running(place)
        if slots:
            return self._running(self.home(join_names(name, slots[0].name)))
        return None if name else self._main

    def leaves(self, name: str, slot: Slot, device: torch.device) -> bool:
        """Whether a tensor is elsewhere between forwards."""
        stays = slot.is_buffer and not (self._offload_buffers and slot.is_persistent)
        return not stays and self.home(name) != device

    def _running(self, place: torch.device | str) -> torch.device:
        return self._main if isinstance(place, str) or place.type == "cpu" else place


def plan_stops(model: nn.Module, layout: Layout, preload: Collection[str]) -> Iterator[tuple[Stop, torch.device]]:
    """The modules that get a hook, with where they run: all that hold tensors, and the model itself."""

    def is_whole(name: str, module: nn.Module) -> bool:
        device = layout.runs_on(name, [])
        if device is None or not reads_inside(module, preload):
            return False
        return any(
            layout.leaves(join_names(name, slot.name), slot, device) for slot in tensor_slots(module, recurse=True)
        )

    for stop in find_stops(model, is_whole):
        device = layout.runs_on(stop.name, stop.slots)
        holds = stop.slots or next(tensor_slots(stop.module, recurse=True), None) is not None
        if device is not None and (holds or not stop.name):
            yield stop, device


def under(weights: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Of weights by name, those in a module, by their names there."""
    return PrefixedDataset(weights, f"{name}.") if name else weights


def join_names(*names: str) -> str:
    """Dotted; empty ones are left out."""
    return ".".join(filter(None, names))
