"""Reads a checkpoint into sessions of any layout. Each process reads and verifies only the ranges that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from zero_plugin.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredModel,
    checksum,
    checksum_of_file,
    read_manifest,
)
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.checkpoint.tensor_files import CHECKSUMS, Pieces, RangeReader, session_fragments, tensor_at
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import all_or_none
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import OptimizedPiece, Scalars, create_states
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT, Fragment
from zero_plugin.tensors.safetensors_files import Place

_SHOWN: Final = 10  # the most tensors that an error names


@dataclass(slots=True)
class LoadReport:
    """The result of `load_state`.

    Attributes:
        folder: the checkpoint.
        steps: optimizer steps that the first model had taken.
        restored: a phrase for each restored part.
        not_restored: a phrase for each part that was not restored, with the reason.
        batches: for each prepared loader, the number of batches before the save in its interrupted epoch; 0 between
            epochs.
        epochs: for each prepared loader, the number of the epoch that its next loop resumes or begins.
    """

    folder: Path
    steps: int = 0
    restored: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.folder}: restored {', '.join(self.restored)}; {self.steps} steps were taken"]
        lines += [f"not restored: {entry}" for entry in self.not_restored]
        return "\n".join(lines)


def load_tensors(
    folder: Path,
    session: Session,
    stored: StoredModel,
    scalars: Scalars,
    *,
    pieces: Mapping[str, Pieces] | None,
    weights: bool,
    optimizer: bool,
    strict: bool,
) -> list[str]:
    """Read a model's weights, fp32 master weights and optimizer states. Collective.

    Args:
        folder: the checkpoint.
        session: the model's session.
        stored: the model's tensors in the checkpoint.
        scalars: the optimizer's states that are numbers.
        pieces: the checksums of the tensor files, to verify the bytes that are read; None to skip verification.
        weights: whether to read the weights. If False, the module keeps its weights, and the optimizer's copies are
            updated from them.
        optimizer: whether to read the optimizer's states.
        strict: whether names that only the model or only the checkpoint has are an error.

    Returns:
        A phrase for each part that was not restored.

    Raises:
        CheckpointError: on every process: names or shapes do not match, or a file cannot be read.
        DamagedError: on every process: the bytes read differ from their checksums. The model is partly overwritten.
    """
    missing = all_or_none(lambda: _compare(session, stored, strict=strict) if weights else [])

    def read(progress: Callable[[int], None]) -> None:
        states = _stored_states(stored)

        def prepare(pieces: list[OptimizedPiece]) -> None:
            if optimizer:
                missing.extend(create_states(pieces, states, scalars))

        with RangeReader(folder, progress, pieces) as reader:
            for fragment in session_fragments(session, changing=True, prepare=prepare):
                is_state = fragment.kind not in (WEIGHT, MASTER_WEIGHT)
                if (is_state and not optimizer) or (not is_state and not weights):
                    continue
                place = _source(fragment, stored)
                if place is not None:
                    reader.read(place, fragment)
                elif is_state:
                    fragment.values.zero_()
                    missing.append(f"{fragment.kind} of {fragment.name}, which had none: it is zero")

    with working(f"loading {folder.name}") as work, session.loading(), torch.no_grad():
        all_or_none(lambda: read(work.advance))
        if not weights:
            session.update_master_weights()
    return missing


def read_pieces(folder: Path, manifest: Manifest) -> dict[str, Pieces] | None:
    """Return the checksums of the tensor files' pieces; None if the checkpoint has none that this version reads.

    Raises:
        DamagedError: the checksums are damaged themselves, or do not belong to these files.
    """
    if not manifest.is_verifiable:
        return None
    tables = read_nested(folder / CHECKSUMS, lambda file: manifest.read(folder, file.name))
    found = {}
    for file, (size, own) in manifest.files.items():
        if own is None:
            try:
                found[file] = Pieces.decode(tables[file].numpy(), size)
            except (LookupError, TypeError, AttributeError, DamagedError) as error:
                raise DamagedError(f"{folder / file} has no checksums in {CHECKSUMS}.safetensors ({error}).") from error
    return found


def verify_headers(folder: Path, manifest: Manifest, pieces: Mapping[str, Pieces]) -> None:
    """Verify the tensor files' headers. Loading does not need them, but other readers do.

    Raises:
        DamagedError: a header is damaged.
    """
    ends: dict[str, int] = {file: manifest.files[file][0] for file in pieces}
    for model in manifest.models:
        for place in model.places.values():
            ends[place.file] = min(ends[place.file], place.start)
    with RangeReader(folder) as reader:
        for file, end in ends.items():
            if any(True for _ in reader.damaged_pieces(file, pieces[file], end)):
                raise DamagedError(f"{folder / file} is damaged: its header differs from its checksum.")


def find_differences(
    folder: Path,
    manifest: Manifest,
    progress: Callable[[int], None],
    *,
    skipped: Collection[str] = (),
    share: tuple[int, int] = (0, 1),
    tensors: bool = True,
) -> Iterator[str]:
    """Yield each file that differs from its checksums, with the differing tensors. Not collective.

    No more than one piece of a file is in memory.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        progress: called with the bytes that were read since the last call.
        skipped: files that are not read, because their sizes are wrong.
        share: rank and world size; each rank reads its own share of the files.
        tensors: whether tensor files are read too.

    Raises:
        CheckpointError: an earlier version has written the checkpoint, with other checksums.
    """
    if not manifest.is_verifiable:
        raise CheckpointError(
            f"{folder} was written by an earlier version, with checksums that this version does not read.\nLoad it, "
            "and save it again."
        )
    rank, world_size = share
    files = [(file, size, own) for file, (size, own) in manifest.files.items() if file not in skipped]
    pieces: Mapping[str, Pieces] = {}
    if tensors and any(own is None for _, _, own in files):
        try:
            pieces = read_pieces(folder, manifest) or {}
        except DamagedError as error:
            yield str(error).removeprefix(f"{folder}/").removesuffix(".")
    places = {(kind, name): place for model in manifest.models for (kind, name), place in model.places.items()}
    with RangeReader(folder, progress) as reader:
        for file, size, own in files[rank::world_size]:
            if own is not None:
                try:
                    if checksum_of_file(folder / file) != own:
                        yield f"{file} differs from its checksum"
                except PermissionError as error:
                    yield f"{file} cannot be read ({error.strerror})"
                progress(size)
            elif file in pieces:
                damaged = [tensor_at(places, file, byte) for byte in reader.damaged_pieces(file, pieces[file], size)]
                yield from (f"{file}: {of} differs from its checksum" for of in dict.fromkeys(damaged))


def _compare(session: Session, stored: StoredModel, *, strict: bool) -> list[str]:
    wanted = {fragment.name: fragment for fragment in session.weight_fragments()}
    problems: list[str] = []
    mismatched: list[str] = []
    for name, fragment in wanted.items():
        place = _source(fragment, stored)
        if place is None:
            problems.append(f"{name} is in the model, not in the checkpoint")
        elif place.shape != fragment.shape:
            mismatched.append(f"{name} has shape {list(fragment.shape)} here, {list(place.shape)} in the checkpoint")
    known = set(wanted) | {stored.tied.get(name, name) for name in wanted}
    problems += [
        f"{name} is in the checkpoint, not in the model"
        for kind, name in stored.places
        if kind == WEIGHT and name not in known
    ]
    if mismatched or (problems and strict):
        fix = "" if mismatched else "\nload_state(strict=False) ignores missing and unexpected tensors."
        lines = [*mismatched, *(problems if strict else ())]
        more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = [*(f"  {line}" for line in lines[:_SHOWN]), *more]
        raise CheckpointError("\n".join([f"The checkpoint does not match the model ({stored.kind}):", *shown]) + fix)
    return problems


def _source(fragment: Fragment, stored: StoredModel) -> Place | None:
    """Return the place to read a fragment from.

    For a weight, this is the stored weight if its dtype is the same. Otherwise, and for a master weight, it is the more
    precise stored master weight, if any.
    """
    if fragment.kind not in (WEIGHT, MASTER_WEIGHT):
        return stored.places.get((fragment.kind, fragment.name))
    names = [fragment.name, stored.tied.get(fragment.name, fragment.name)]
    weight, master_weight = (
        next((place for name in names if (place := stored.places.get((kind, name)))), None)
        for kind in (WEIGHT, MASTER_WEIGHT)
    )
    if fragment.kind == WEIGHT and weight is not None and weight.dtype == fragment.values.dtype:
        return weight
    return master_weight or weight


def _stored_states(stored: StoredModel) -> Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]:
    states: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for (kind, name), place in stored.places.items():
        if kind not in (WEIGHT, MASTER_WEIGHT):
            states.setdefault(name, {})[kind] = (place.shape, place.dtype)
    return states


def read_common_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint that the main process has found. Collective.

    Raises:
        CheckpointError: on every process: some processes see no checkpoint, or another one, in this folder.
    """
    sums = collectives.gather_values(manifest_sum(folder))
    for what, ranks in (
        ("no checkpoint", [rank for rank, found in enumerate(sums) if found is None]),
        ("another checkpoint", [rank for rank, found in enumerate(sums) if found not in (None, sums[0])]),
    ):
        if ranks and sums[0] is not None:
            raise CheckpointError(
                f"processes {ranks} see {what} in {folder}, where process 0 has found one. All processes must read the "
                "same checkpoint.\nPut it on a file system that all machines share, or a copy on each."
            )
    return all_or_none(lambda: read_manifest(folder))


def manifest_sum(folder: Path) -> int | None:
    """Return a checksum that identifies a checkpoint's contents; None without a checkpoint."""
    try:
        return checksum((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return None
