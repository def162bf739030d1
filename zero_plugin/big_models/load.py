"""Loads a checkpoint into a model that is too large for one device, each tensor directly to its final place.

The files are safetensors or from `torch.save`, and are memory-mapped.
"""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.big_models.dispatch import dispatch_model
from zero_plugin.big_models.placement import (
    check_device_map,
    check_places,
    find_place,
    get_balanced_memory,
    infer_auto_device_map,
    lookup,
)
from zero_plugin.big_models.stored import offload_weight, open_safetensors, save_offload_index
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.modules import SharedTensors, Slot, as_dtype, as_pretrained, find_tied_parameters, tensor_slots
from zero_plugin.tensors.safetensors_files import SINGLE_NAME

_logger = logging.getLogger(__name__)

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
_WHOLE = (SINGLE_NAME, "pytorch_model.bin")
_INDICES = ("*.safetensors.index.json", "*.index.json")


class WeightsFile:
    """One open file of weights.

    Args:
        path: `….safetensors`, or a file from `torch.save`, whose code is not run. A file from before torch 1.6 is read
            completely. Other files are read only as far as tensors are used.

    Attributes:
        names: the names of its tensors.
        read: returns the tensor of a name, on the CPU. Its values are read when they are used.

    Raises:
        CheckpointError: the file is missing or damaged.
        ValueError: the weights are from another framework.
    """

    names: list[str]
    read: Callable[[str], Tensor]

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.is_safetensors = path.suffix == ".safetensors"
        if self.is_safetensors:
            file = open_safetensors(path)
            framework = (file.metadata() or {}).get("format", "pt")
            if framework != "pt":
                raise ValueError(f"{path} has weights of the format {framework!r}; PyTorch's ('pt') are needed.")
            self.names, self.read = list(file.keys()), file.get_tensor
        else:
            tensors = _load_mapped(path)
            self.names, self.read = list(tensors), tensors.__getitem__


def find_checkpoint_files(checkpoint: Path) -> list[Path]:
    """Find the files with a checkpoint's weights.

    Args:
        checkpoint: a file of weights, an index (`….json`), or a folder with `model.safetensors`, `pytorch_model.bin` or
            one index. Safetensors take precedence.

    Raises:
        ValueError: no checkpoint is there, or several are.
        CheckpointError: a file in the index is missing.
    """
    if checkpoint.is_dir():
        for name in _WHOLE:
            if (checkpoint / name).is_file():
                return [checkpoint / name]
        found = next((files for pattern in _INDICES if (files := sorted(checkpoint.glob(pattern)))), [])
        if len(found) > 1:
            raise ValueError(f"{checkpoint} has several indices: {', '.join(f.name for f in found)}; pass one of them.")
        if not found:
            raise ValueError(f"{checkpoint} has no {' and no '.join(_WHOLE)}, and no index of several (….index.json).")
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise ValueError(
            f"there is no checkpoint {checkpoint}; pass a file of weights, an index, or a folder with them."
        )
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = json.loads(checkpoint.read_text(encoding="utf-8"))
    files = [checkpoint.parent / name for name in sorted(set(index.get("weight_map", index).values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{checkpoint} names {', '.join(missing)}, which are not there.")
    return files


def _load_mapped(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return tensors


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a transformers model's configuration ties some weights; False for any other model."""
    pretrained = as_pretrained(model)
    if pretrained is None:
        return False
    config = pretrained.config
    text = config.get_text_config(decoder=True)
    embeddings = getattr(text, "tie_word_embeddings", False) and pretrained.get_output_embeddings() is not None
    both = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(embeddings or both)


def check_tied_parameters_on_same_device(tied_params: list[list[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about each group of `find_tied_parameters` whose weight has several places in a map."""
    for group in tied_params:
        places = {name: lookup(device_map, name) for name in group}
        if len(set(places.values())) > 1:
            _logger.warning(
                f"Tied parameters are on different devices: {places}. Each device gets a copy of the weight."
            )


def warn_of_ties(model: nn.Module, device_map: Mapping[str, Any] | None) -> None:
    """Warn about weights that should be tied but are not, and about tied weights with several places in a map."""
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        _logger.warning(f"The weights of {type(model).__name__} are not tied; call its tie_weights() first.")
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,  # noqa: ARG001 - a checkpoint is never completely in memory
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,  # noqa: ARG001 - every process maps the files, which reads no more than one
) -> nn.Module:
    """Load a checkpoint into a model that has no values yet, and spread it over devices, CPU memory and disk.

    Args:
        model: a model built under `init_empty_weights`, or any other.
        checkpoint: see `load_checkpoint_in_model`.
        device_map: see `dispatch_model`. Or `auto` and `balanced` (an equal part on each GPU), `balanced_low_0` (little
            on the first), `sequential` (fill one GPU after the other). None loads the model without spreading it.
        max_memory: limits for the named maps, see `get_max_memory`.
        no_split_module_classes: see `infer_auto_device_map`.
        offload_folder: see `load_checkpoint_in_model`; needed if weights must be written.
        offload_buffers: see `dispatch_model`; also for `skip_keys`, `preload_module_classes` and `force_hooks`.
        dtype: see `load_checkpoint_in_model`; also for `offload_state_dict`, `strict` and the rest.
        offload_state_dict: no effect.
        skip_keys: inputs and outputs that are not moved.
        preload_module_classes: classes that read weights of submodules.
        force_hooks: use hooks even on one device.
        strict: whether names must match.
        full_state_dict: True.
        broadcast_from_rank0: no effect.

    Returns:
        The model.

    Raises:
        ValueError: see `load_checkpoint_in_model` and `dispatch_model`; or no map has this name.
        CheckpointError: a file is missing or damaged.
    """
    if isinstance(device_map, str):
        if device_map not in _POLICIES:
            raise ValueError(f"device_map={device_map!r}; legal are {', '.join(map(repr, _POLICIES))}, or a dict.")
        limits: Mapping[int | str, int | str] | None = max_memory
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            limits = dict(get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero))
        device_map = infer_auto_device_map(
            model, limits, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    _refuse_parts(full_state_dict)
    index = _load(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, strict)
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, int | str | torch.device] | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001 - a checkpoint is never completely in memory
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,  # noqa: ARG001 - every process maps the files, which reads no more than one
) -> None:
    """Load the values of a checkpoint into a model, each tensor directly to its place in a map.

    Tensors with the place `disk` stay in their safetensors files, which must not change. These parts of the model are
    on the meta device. To run the model, call `dispatch_model` with the same `offload_folder`. Checkpoints of another
    format, and weights that `dtype` makes smaller, are written to `offload_folder`. Memory never holds more than one
    tensor in addition to the model.

    Args:
        model: the model, on the meta device or with values.
        checkpoint: a file of weights, an index of several (`….index.json`), or a folder with either. Safetensors take
            precedence.
        device_map: see `dispatch_model`. By default each tensor stays on its device; meta tensors go to the CPU.
        offload_folder: needed for parts on disk, at least for their index.
        dtype: the dtype for floating tensors; by default the model's own.
        offload_state_dict: no effect.
        offload_buffers: keep buffers of parts on disk there. Otherwise they go to the CPU.
        keep_in_fp32_modules: parts of names whose tensors stay fp32 under a 16-bit `dtype`.
        offload_8bit_bnb: not supported.
        strict: whether names in checkpoint and model must be equal. Otherwise differences cause warnings.
        full_state_dict: True; every tensor is unpartitioned.
        broadcast_from_rank0: no effect.

    Raises:
        ValueError: shapes differ, names differ with `strict`, this machine lacks a device, the checkpoint does not
            exist, or a folder to write to is missing.
        CheckpointError: a file is missing or damaged.
    """
    if offload_8bit_bnb:
        raise ValueError("offload_8bit_bnb: load quantized models by transformers' from_pretrained(device_map=…).")
    if offload_folder is None and device_map is not None and "disk" in device_map.values():
        raise ValueError("device_map has parts on disk; pass an offload_folder, where dispatch_model finds them again.")
    _refuse_parts(full_state_dict)
    kept = keep_in_fp32_modules or ()
    index = _load(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, strict, kept)
    if offload_folder is not None:
        save_offload_index(index, offload_folder)


def load_state_dict(
    checkpoint_file: str | Path, device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Load the tensors of one file of weights, by name.

    Args:
        checkpoint_file: a file of safetensors, or from `torch.save` (its code is not run).
        device_map: the tensors' places. Tensors without a place or with `disk` are on the CPU, memory-mapped.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    weights = WeightsFile(Path(checkpoint_file))
    places = {name: lookup(device_map or {}, name) for name in weights.names}
    return {
        name: weights.read(name) if place in (None, "disk") else weights.read(name).to(find_place(place))
        for name, place in places.items()
    }


def _load(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, int | str | torch.device] | None,
    offload_folder: str | Path | None,
    dtype: torch.dtype | str | None,
    offload_buffers: bool,
    strict: bool,
    keep_in_fp32: Collection[str] = (),
) -> dict[str, Any]:
    """Load the values. Return the index of the parts on disk, see `OffloadedWeightsLoader`."""
    if device_map is not None:
        check_device_map(model, device_map)
        check_places(device_map)
    warn_of_ties(model, device_map)
    tied = {name: group for group in find_tied_parameters(model) for name in group}
    slots = {slot.name: slot for slot in tensor_slots(model, recurse=True) if slot.is_persistent}
    files = [WeightsFile(path) for path in find_checkpoint_files(Path(checkpoint))]
    _check_names(model, checkpoint, files, slots, tied, strict)
    disk = _DiskPart(offload_folder)
    shared = SharedTensors()
    wanted: dict[str, tuple[WeightsFile, str]] = {}
    for file in files:
        for stored in file.names:
            for name in tied.get(stored, [stored]):
                if name in slots:
                    wanted.setdefault(name, (file, stored))
    with working(f"loading {Path(checkpoint).name}", len(wanted), unit="tensors") as work:
        for name, (file, stored) in wanted.items():
            slot = slots[name]
            final = _final_dtype(slot, dtype, keep_in_fp32)
            place = None if device_map is None else lookup(device_map, name)
            if place == "disk" and (offload_buffers or not slot.is_buffer):
                disk.add(name, file, stored, final)
                slot.tensor = shared.move(slot.tensor, torch.device("meta"), dtype=final)
            else:
                _fill(slot, file.read(stored), place, final, shared)
            work.advance()
    return disk.index


class _DiskPart:
    """The tensors that stay on disk: in the checkpoint's own file if it can be used directly, otherwise written."""

    def __init__(self, folder: str | Path | None) -> None:
        self.index: dict[str, Any] = {}
        self._folder = folder
        self._written: dict[str, Any] = {}

    def add(self, name: str, file: WeightsFile, stored: str, dtype: torch.dtype) -> None:
        """Add one tensor, with the name `stored` in the file and `name` in the model."""
        tensor = file.read(stored)
        shrinks = dtype.itemsize < tensor.dtype.itemsize and self._folder is not None  # less to read at each forward
        if file.is_safetensors and not shrinks:
            where = {"safetensors_file": str(file.path), "dtype": str(dtype).removeprefix("torch.")}
        elif self._folder is None:
            raise ValueError(
                f"{file.path.name} is not safetensors, so parts on disk are written: pass an offload_folder."
            )
        else:
            if stored not in self._written:
                offload_weight(tensor.to(dtype), stored, self._folder, self._written)
            where = self._written[stored]
        self.index[name] = {"weight_name": stored, **where}


def _fill(slot: Slot, value: Tensor, place: Any, dtype: torch.dtype, shared: SharedTensors) -> None:
    old = slot.tensor
    if place is None:
        device = torch.device("cpu") if old.is_meta else old.device
    else:
        device = find_place("cpu" if place == "disk" else place)  # a buffer; `dispatch_model` moves it to its module
    if old.device == device and old.dtype == dtype:
        with torch.no_grad():
            old.copy_(value)
    else:
        slot.tensor = shared.move(old, device, value, dtype=dtype, copy=True)


def _final_dtype(slot: Slot, dtype: torch.dtype | str | None, keep_in_fp32: Collection[str]) -> torch.dtype:
    if dtype is None or not slot.tensor.dtype.is_floating_point:
        return slot.tensor.dtype
    return torch.float32 if any(f".{part}." in f".{slot.name}." for part in keep_in_fp32) else as_dtype(dtype)


def _check_names(
    model: nn.Module,
    checkpoint: str | Path,
    files: list[WeightsFile],
    slots: Mapping[str, Slot],
    tied: Mapping[str, list[str]],
    strict: bool,
) -> None:
    stored = {name: file for file in files for name in file.names}
    given = {name for each in stored for name in tied.get(each, [each])}
    missing = sorted(slots.keys() - given)
    unexpected = sorted(stored.keys() - model.state_dict().keys())
    shapes = {name: (stored[name].read(name).shape, slots[name].tensor.shape) for name in stored.keys() & slots.keys()}
    differing = [f"{name} {tuple(a)} instead of {tuple(b)}" for name, (a, b) in sorted(shapes.items()) if a != b]
    kind = type(model).__name__
    if differing:
        raise ValueError(f"The checkpoint at {checkpoint} has other shapes than {kind}: {', '.join(differing)}.")
    if strict and (missing or unexpected):
        raise ValueError(
            f"The checkpoint at {checkpoint} and {kind} have different names.\nMissing in the checkpoint: {missing}\n"
            f"Unexpected in the checkpoint: {unexpected}\nPass strict=False to load the others."
        )
    if unexpected:
        _logger.warning(
            f"Some weights of the checkpoint at {checkpoint} were not used when loading {kind}: {unexpected}."
        )
    if missing:
        empty = [name for name in missing if slots[name].tensor.is_meta]
        state = f", and {empty} have no values at all" if empty else ""
        _logger.warning(f"Some weights of {kind} are not in the checkpoint at {checkpoint}: {missing}{state}.")


def _refuse_parts(full_state_dict: bool) -> None:
    if not full_state_dict:
        raise ValueError("full_state_dict=False: every tensor is loaded unpartitioned; leave it out.")
