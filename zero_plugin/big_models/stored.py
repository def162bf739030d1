"""Weights in memory-mapped files: reads them when they are used, and writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.modules import as_dtype, set_module_tensor_to_device

_INDEX = "index.json"


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name: some in memory, the others memory-mapped from the files in an index.

    The files must keep their content while the model is used. Replacing a file by renaming is safe.

    Args:
        state_dict: the weights in memory; they take precedence.
        save_folder: a folder with files of `offload_state_dict` and their index.
        index: name → `{"safetensors_file": …}`, or `dtype` and `shape` of a file in `save_folder`. Also `weight_name`
            if the stored name differs, and for safetensors the `dtype` to convert to. By default the folder's index.
        device: the device for weights from files; by default the CPU, without a copy.

    Raises:
        ValueError: none of the first three arguments is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.device = device
        self._open: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        stored = entry.get("weight_name", key)
        file = entry.get("safetensors_file")
        if file is None:
            tensor = load_offloaded_weight(Path(self.save_folder or "") / f"{stored}.dat", entry)
        else:
            if file not in self._open:
                self._open[file] = open_safetensors(file)
            tensor = self._open[file].get_tensor(stored)
            tensor = tensor.to(as_dtype(entry["dtype"])) if "dtype" in entry else tensor
        return tensor if self.device is None else tensor.to(self.device)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index  # without reading the value

    def __iter__(self) -> Iterator[str]:
        return iter({**self.state_dict, **self.index})

    def __len__(self) -> int:
        return len({**self.state_dict, **self.index})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a copy maps the files again


class PrefixedDataset(Mapping[str, Tensor]):
    """The entries of a map whose names have a prefix, by the rest of their names.

    Args:
        dataset: the complete map.
        prefix: the prefix, with its dot.
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset  # without reading the value

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_safetensors(file: str | Path) -> Any:
    """Open a safetensors file, memory-mapped.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors for `OffloadedWeightsLoader`, each into its own file, and their index.

    Args:
        save_dir: the folder; created if it is missing. Tensors with other names stay in it.
        state_dict: tensors by name, on any device.
    """
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | Path, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Write a tensor's bytes to `<weight_name>.dat`. Add its `dtype` and `shape` to `index`, and return `index`."""
    file = Path(offload_folder) / f"{weight_name}.dat"
    file.parent.mkdir(parents=True, exist_ok=True)
    flat = weight.detach().cpu().contiguous().view(-1)
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    new.replace(file)  # a model that has mapped the old file keeps its content
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, Any]) -> Tensor:
    """Map a tensor of `offload_weight` into memory. Writes to the tensor do not change the file.

    Raises:
        CheckpointError: the file is missing, or shorter than its tensor.
    """
    shape, dtype = weight_info["shape"], as_dtype(weight_info["dtype"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.from_file(str(weight_file), shared=False, size=math.prod(shape), dtype=dtype).view(shape)
    except RuntimeError as error:
        raise CheckpointError(f"{weight_file}: {error}") from error


def read_offload_index(offload_folder: str | Path) -> dict[str, Any]:
    """Read the index of a folder; empty if the folder has none."""
    file = Path(offload_folder) / _INDEX
    index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return index


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | Path) -> None:
    """Add entries to the index of a folder."""
    if index:
        folder = Path(offload_folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**read_offload_index(folder), **index}, indent=2)
        (folder / _INDEX).write_text(text, encoding="utf-8")


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | Path) -> None:
    """Put the tensors of an index into a model, on the CPU.

    Args:
        model: a model with these tensors, with any values or none.
        index: an index of `offload_weight`.
        offload_folder: the folder with the files.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index or {})
    for name, tensor in weights.items():
        set_module_tensor_to_device(model, name, "cpu", value=tensor)


def extract_submodules_state_dict(state_dict: Mapping[str, Tensor], submodule_names: list[str]) -> dict[str, Tensor]:
    """Return the entries of a state dict that are in the named modules, or are named themselves."""
    under = tuple(f"{name}." for name in submodule_names)
    return {name: tensor for name, tensor in state_dict.items() if name in submodule_names or name.startswith(under)}
