"""Matches stored tensors with a model's tensors, reports those without a counterpart, and initialises the rest.

A tensor without any values is initialised by its module's own class. All other tensors are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.modules import Slot, as_pretrained, tensor_names, tensor_slots
from zero_plugin.tensors.safetensors_files import Place, StoredWeights, read_complete_file, read_model_folder

_LISTED = 20  # names of one kind in an error


@dataclass(slots=True)
class WeightsReport:
    """The result of `load_weights`.

    Attributes:
        source: the folder or file.
        kind: the model's class.
        loaded: the model's tensors that got values from the source.
        missing: the model's tensors that the source does not have.
        unexpected: the source's tensors that the model does not have.
        mismatched: tensor → how its shape or dtype differs between model and source.
        initialized: the missing tensors that had no values before either, and were initialised.
    """

    source: Path
    kind: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    initialized: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether model and source have the same tensors, and all of them were loaded."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"{self.kind}: {len(self.loaded)} tensors from {self.source}"]
        lines += _listed("not in the file", self.missing)
        lines += _listed("not in the model", self.unexpected)
        lines += _listed("of another shape or type", [f"{name} ({why})" for name, why in self.mismatched.items()])
        lines += _listed("initialised, since they had no values", self.initialized)
        return "\n".join(lines)


def find_weights(source: Path) -> StoredWeights:
    """Read the headers of a model's files; no tensor is read.

    Args:
        source: a model folder or one safetensors file. Every checkpoint is a model folder too.

    Raises:
        CheckpointError: there are no weights, or a file is missing, damaged or a pickle.
    """
    if source.is_dir():
        return read_model_folder(source)
    places, tied = read_complete_file(source, source.name)
    return StoredWeights(source, source.parent, places, tied)


def match_weights(module: nn.Module, stored: StoredWeights, *, strict: bool) -> tuple[dict[str, Place], WeightsReport]:
    """Find the stored tensor for each parameter and persistent buffer.

    A tied tensor may be stored under any of its names. For transformers models, the checkpoint of a model with a head
    fits the base model, and vice versa, except for the head. Tensors that the model's class allows to be missing or
    unexpected are not reported.

    Args:
        module: any module, also partitioned or on the meta device.
        stored: the tensors in the files.
        strict: whether tensors without a counterpart, or with another shape or dtype, are an error.

    Returns:
        Name of the model's tensor → place of its values; and the report of the coming load.

    Raises:
        CheckpointError: `strict`, and tensors have no counterpart or do not match. The message lists them.
    """
    tensors = tensor_names(module)
    rename = _renaming(module, (names[0] for names, _ in tensors), stored.places)
    report = WeightsReport(stored.source, type(module).__name__)
    places: dict[str, Place] = {}
    used: set[str] = set()
    for names, tensor in tensors:
        name, asked = names[0], [rename(each) for each in names]
        found = next((hit for each in asked if (hit := stored.find(each)) is not None), None)
        used.update(asked)
        if found is None:
            report.missing.append(name)
            continue
        used.add(found)
        place = stored.places[found]
        if (why := _misfit(tensor, place)) is None:
            places[name] = place
        else:
            report.mismatched[name] = why
    report.loaded = list(places)
    report.unexpected = sorted(stored.places.keys() - used)
    _leave_out_known(module, report)
    if strict and not report.is_complete:
        raise CheckpointError(_explain(module, report))
    return places, report


def unpartitioned_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the unpartitioned shape of a tensor, which may be partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _renaming(module: nn.Module, names: Iterable[str], stored: Iterable[str]) -> Callable[[str], str]:
    """Return a function from a model's tensor name to the name in the file.

    The names differ by transformers' `base_model_prefix` if only model or file has a head, and by the `_orig_mod.` that
    torch.compile adds.
    """

    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "")

    pretrained = as_pretrained(module)
    base = "" if pretrained is None else f"{pretrained.base_model_prefix}."
    model_has, file_has = (any(name.startswith(base) for name in where) for where in (map(plain, names), stored))
    if len(base) > 1 and model_has and not file_has:
        return lambda name: plain(name).removeprefix(base)
    if len(base) > 1 and file_has and not model_has:
        return lambda name: base + plain(name)
    return plain


def _misfit(tensor: Tensor, place: Place) -> str | None:
    shape = unpartitioned_shape(tensor)
    if shape != place.shape:
        return f"{list(shape)} here, {list(place.shape)} in the file"
    if _sort(tensor.dtype) != _sort(place.dtype):
        return f"{tensor.dtype} here, {place.dtype} in the file"
    return None


def _sort(dtype: torch.dtype) -> str:
    """Return the sort of a dtype. Dtypes of one sort can be converted into each other.

    Each 8-bit float is a sort of its own: its values need the scale that a quantized model stores separately.
    """
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else str(dtype)
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


def _leave_out_known(module: nn.Module, report: WeightsReport) -> None:
    """Remove tensors from the report that the transformers model's class allows to be missing or unexpected."""
    pretrained = as_pretrained(module)
    if pretrained is None:
        return
    absent = list(pretrained._keys_to_ignore_on_load_missing or ())
    absent += [f"^{re.escape(name)}$" for name in pretrained._keys_to_ignore_on_save or ()]
    left = list(pretrained._keys_to_ignore_on_load_unexpected or ())
    # Earlier transformers versions stored these buffers. Today they are computed.
    left += [rf"(^|\.){name}$" for name in ("position_ids", r"rotary_emb\.inv_freq")]
    report.missing = [name for name in report.missing if not _matches(absent, name)]
    report.unexpected = [name for name in report.unexpected if not _matches(left, name)]


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _explain(module: nn.Module, report: WeightsReport) -> str:
    lines = [f"{report.source} has the weights of another model than this {report.kind}; nothing was loaded."]
    lines += str(report).splitlines()[1:]
    lines.append("strict=False loads the matching tensors, and leaves or initialises the rest.")
    if as_pretrained(module) is not None and report.missing and report.unexpected:
        lines.append(
            f"If the file has older names or other layouts (fused experts, say), {report.kind}.from_pretrained("
            f"{str(report.source)!r}) converts them; it works after Accelerator(), partitioned at ZeRO stage 3."
        )
    return "\n".join(lines)


def _listed(what: str, names: Iterable[str]) -> list[str]:
    found = list(names)
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return [f"  {len(found)} {what}: {', '.join(found[:_LISTED])}{more}"] if found else []


def initialize_tensors(
    module: nn.Module, names: Collection[str], gathered: Callable[[Iterable[Tensor]], AbstractContextManager[Any]]
) -> None:
    """Initialise tensors like those of a new model, by transformers' `_init_weights` or a layer's `reset_parameters`.

    Args:
        module: the model.
        names: the names of floating tensors in the model. Their values are NaN so far.
        gathered: a context in which tensors are unpartitioned on every process, and process 0's changes are kept.

    Raises:
        CheckpointError: a module has neither method, or its method leaves a tensor unchanged.
    """
    slots = list(tensor_slots(module, recurse=True))
    by_owner: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.name in names:
            by_owner.setdefault(slot.name.rpartition(".")[0], []).append(slot)
    left: list[str] = []
    for owner, own in by_owner.items():
        ids = {id(slot.tensor) for slot in own}
        others = [slot for slot in slots if id(slot.tensor) not in ids]
        with gathered([slot.tensor for slot in own]), _set_aside(others), torch.no_grad():
            _draw(module, owner)
            left += [slot.name for slot in own if bool(torch.isnan(slot.tensor).any())]
    if left:
        raise CheckpointError(
            f"{', '.join(left)}: not in the file, and their modules do not initialise them in reset_parameters().\n"
            "Write that method. Or build the model inside `with accelerator.init_model():`, which initialises all of "
            "it, then call accelerator.load_weights(model, …, strict=False)."
        )


@contextmanager
def _set_aside(slots: Iterable[Slot]) -> Iterator[None]:
    """Put meta tensors in the place of these tensors inside the context, to protect the tensors from writes."""
    held: list[tuple[dict[str, Any], str]] = [
        (slot.owner._buffers if slot.is_buffer else slot.owner._parameters, slot.key) for slot in slots
    ]
    tensors = [where[key] for where, key in held]
    for (where, key), tensor in zip(held, tensors, strict=True):
        stand_in = torch.empty(unpartitioned_shape(tensor), dtype=tensor.dtype, device="meta")
        where[key] = nn.Parameter(stand_in, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stand_in
    try:
        yield
    finally:
        for (where, key), tensor in zip(held, tensors, strict=True):
            where[key] = tensor


def _draw(root: nn.Module, owner: str) -> None:
    """Initialise a module in `root` by its own method or by a module around it.

    The modules are called from the innermost outwards. The first `reset_parameters` ends the walk.
    """
    path = owner.split(".") if owner else []
    around = [root]
    for name in path:
        around.append(around[-1].get_submodule(name))
    for depth in range(len(path), -1, -1):
        module: Any = around[depth]
        model = next((held for part in reversed(around[: depth + 1]) if (held := as_pretrained(part))), None)
        if model is not None:
            model._init_weights(module)
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
            return
