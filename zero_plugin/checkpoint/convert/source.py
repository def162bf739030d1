"""The source of a conversion, in one form for all formats: unpartitioned tensors by name, and recorded states.

This module also opens this package's own checkpoints and model folders as sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.checkpoint.folders import choose_checkpoint, offer_previous
from zero_plugin.checkpoint.load import find_differences
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT
from zero_plugin.tensors.safetensors_files import Place, read_model_folder


@dataclass(frozen=True, slots=True)
class Stored:
    """One unpartitioned tensor in files.

    Attributes:
        shape: the shape of the unpartitioned tensor.
        dtype: the dtype to read it as. The stored dtype may differ.
        parts: 1-D tensors that form the flattened tensor when joined. They are mapped files and take no memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        assert sum(part.numel() for part in self.parts) == math.prod(self.shape), "the parts are the tensor"

    @staticmethod
    def of(tensor: Tensor) -> Stored:
        """Return a tensor of a mapped file as `Stored`."""
        return Stored(tuple(tensor.shape), tensor.dtype, (tensor.detach().reshape(-1),))

    @property
    def size(self) -> int:
        """Bytes in the dtype that it is read as."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> Stored:
        """Return the same tensor, read as another floating-point dtype. Integers and booleans keep their dtype."""
        return replace(self, dtype=dtype) if self.dtype.is_floating_point else self

    def unpartitioned(self) -> Tensor:
        """Return the tensor in a storage of exactly its size. It is mapped from the file if that is possible."""
        flat = (self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)).to(self.dtype)
        is_alone = flat.untyped_storage().nbytes() == flat.numel() * flat.element_size()
        return (flat if is_alone else flat.clone()).view(self.shape)


@dataclass(slots=True)
class Source:
    """A checkpoint or a model to convert.

    Attributes:
        folder: its folder. The model's configuration files are copied from here.
        model_class: name of the model's class.
        tensors: (kind, name) → tensor; kinds as in `Fragment`.
        tied: name → the weight whose tensor it shares.
        optimizer: the record of `describe_training`; None for weights alone.
        extra_states: the extra states of modules.
        scheduler_states: the state of each learning-rate scheduler.
        origin: facts about the source, for the manifest of the converted checkpoint.
        notes: a sentence for each part that cannot be converted.
    """

    folder: Path
    model_class: str
    tensors: Mapping[tuple[str, str], Stored]
    tied: Mapping[str, str]
    origin: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    scheduler_states: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    def weights(self, dtype: torch.dtype | None) -> dict[str, Stored]:
        """Return the model's weights and buffers by name.

        Args:
            dtype: dtype for floating tensors. Weights of another dtype are converted from their fp32 master weights.
                None keeps the stored dtypes.
        """
        found = {name: stored for (kind, name), stored in self.tensors.items() if kind == WEIGHT}
        if dtype is None:
            return found
        master_weights = {name: stored for (kind, name), stored in self.tensors.items() if kind == MASTER_WEIGHT}
        return {
            name: weight if weight.dtype == dtype else master_weights.get(name, weight).cast(dtype)
            for name, weight in found.items()
        }

    def bytes_to_write(self, dtype: torch.dtype | None, *, weights_only: bool) -> int:
        """Return the size of all tensors, or of the weights in `dtype`, for a progress bar."""
        stored = self.weights(dtype).values() if weights_only else self.tensors.values()
        return sum(tensor.size for tensor in stored)


def map_tensor(folder: Path, place: Place, files: dict[str, Any]) -> Stored:
    """Map a tensor of a safetensors file.

    Args:
        folder: the folder that `place.file` is relative to.
        place: the tensor's place.
        files: the files mapped so far; a new one is added.
    """
    if place.file not in files:
        # Copy-on-write ("c"), because torch warns about read-only memory.
        files[place.file] = np.memmap(folder / place.file, np.uint8, "c")
    raw = torch.from_numpy(files[place.file][place.start : place.start + place.size])
    if place.start % place.dtype.itemsize:
        raw = raw.clone()  # another library wrote the file without alignment
    return Stored(place.shape, place.dtype, (raw.view(place.dtype),))


def open_checkpoint(folder: Path, model: int | None = None) -> Source:
    """Open one model of a checkpoint. If a folder has several checkpoints, open the newest complete one.

    Args:
        folder: the folder of one checkpoint or of several.
        model: its index in the order of `prepare`, from 0; None if the checkpoint has only one model.

    Raises:
        CheckpointError: no complete checkpoint is there, or it has several models and none was named.
    """
    folder, damages = choose_checkpoint(folder)
    manifest = read_manifest(folder)
    if manifest.is_verifiable:
        with working(f"verifying {folder.name}", sum(size for size, _ in manifest.files.values())) as work:
            for difference in find_differences(folder, manifest, work.advance):
                raise DamagedError(f"{folder}/{difference}.\n{offer_previous(folder)}")
    count = len(manifest.models)
    if (model is None and count != 1) or (model is not None and not 0 <= model < count):
        kinds = ", ".join(f"{index}: {stored.kind}" for index, stored in enumerate(manifest.models)) or "none"
        raise CheckpointError(f"{folder} has {count} models ({kinds}).\nName one with --model.")
    index = model or 0
    stored = manifest.models[index]
    training = read_nested(folder / "training")
    record = training["models"][index]
    files: dict[str, Any] = {}
    return Source(
        folder=folder / stored.folder,
        model_class=stored.kind,
        tensors={key: map_tensor(folder, place, files) for key, place in stored.places.items()},
        tied=stored.tied,
        origin={"format": "zero_plugin", "created": manifest.about.get("created")},
        optimizer=record["optimizer"],
        extra_states=record["extra_states"],
        scheduler_states=training["schedules"],
        notes=[f"a newer checkpoint was passed over: {damage}" for damage in damages],
    )


def open_model(folder: Path) -> Source:
    """Open the weights of a model folder.

    Raises:
        CheckpointError: the folder has no weights, or a file is missing or damaged.
    """
    model = read_model_folder(folder)
    files: dict[str, Any] = {}
    return Source(
        folder=folder,
        model_class=model.model_class,
        tensors={(WEIGHT, name): map_tensor(folder, place, files) for name, place in model.places.items()},
        tied=model.tied,
        origin={"format": "Hugging Face"},
    )
