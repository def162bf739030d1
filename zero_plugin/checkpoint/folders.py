"""The folders of checkpoints and their manifests: written aside, published by a rename, found, and rotated.

The manifest of a checkpoint says what it holds, where, and how to tell that it is complete; it is its last file to be
written. Also here: files and folders that the disk has when the call returns, and what the C library adds to Python's
calls for them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import xxhash

from zero_plugin.checkpoint.locks import hold, is_held, let_go
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.safetensors_files import (
    TYPES,
    Place,
    parse_json,
    read_shape,
    refuse_outside,
    shorten,
    whole_number,
)

MANIFEST_NAME: Final = "manifest.json"
NUMBERED: Final = re.compile(r"(.*?)(\d+)")  # checkpoint_7, step_100, …
_FORMAT: Final = 2
_RANGES: Final = {"format": (1, _FORMAT), "processes": (1, 2**24), "order": (0, 2**53)}
_MOST_MODELS: Final = 1000
_LEAST_HEADER: Final = 8 + len("{}")  # bytes of a safetensors file
_MANIFEST_SUM: Final = re.compile(rb'\{"xxh3": "([0-9a-f]{16})", ')
_AUTOMATIC: Final = "checkpoint_"

# Beside a checkpoint `name`, hidden, while it is written, replaced or removed, and after a run that was killed then:
#   .name.<random>.writing   not complete yet. Never the same name twice: a client of NFS may remember for a minute
#                            which folder had that name before
#   .name.replaced           complete: the older one, or the newer one just before it takes the name
#   .name.removing           going
_ASIDE: Final = re.compile(r"\.(.+?)\.([0-9a-f]{8}\.writing|replaced|removing)")

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_SYNC_FILE_RANGE_WRITE: Final = 2
_MOST_LOOKS: Final = 20  # at a checkpoint that is replaced while it is looked at
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class StoredModel:
    """One model's tensors in a checkpoint.

    Attributes:
        kind: name of its class.
        folder: below the checkpoint's, empty for the first model.
        tied: name → the weight whose tensor it shares.
        places: (kind, name) → where the tensor is.
    """

    kind: str
    folder: str
    tied: Mapping[str, str]
    places: dict[tuple[str, str], Place]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        about: versions, time, and what wrote it.
        models: in the order of `prepare`.
        files: path below the folder → (bytes, checksum; None of a tensor file, whose pieces have theirs).
        is_verifiable: whether it has checksums that this version reads; earlier ones wrote others.
    """

    about: Mapping[str, Any]
    models: Sequence[StoredModel]
    files: Mapping[str, tuple[int, int | None]]
    is_verifiable: bool = True

    def write(self, folder: Path) -> None:
        """Write it into `folder`, after all other files; first comes the checksum of what follows."""
        encoded = {
            "format": _FORMAT,
            **self.about,
            "files": {path: {"size": size, "xxh3": found} for path, (size, found) in self.files.items()},
            "models": [_encode_model(model) for model in self.models],
        }
        rest = json.dumps(encoded)[1:].encode() + b"\n"  # ASCII: a file's name may be any bytes
        (folder / MANIFEST_NAME).write_bytes(b'{"xxh3": "%016x", ' % checksum(rest) + rest)

    def read(self, folder: Path, file: str) -> bytes:
        """A small file of the checkpoint in `folder`, compared with its checksum.

        Raises:
            DamagedError: it differs, or is no file of the checkpoint.
        """
        try:
            content = (folder / file).read_bytes()
        except OSError as error:
            raise DamagedError(f"{folder / file} cannot be read ({error.strerror}).") from error
        if self.is_verifiable and self.files.get(file, (0, None))[1] != checksum(content):
            raise DamagedError(f"{folder / file} is damaged: it differs from its checksum.")
        return content


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read, or is damaged.
    """
    file = folder / MANIFEST_NAME
    try:
        content = file.read_bytes()
        encoded = parse_json(content)
        version = encoded.pop("format")
        if whole_number(version) > _FORMAT:
            raise CheckpointError(f"{file} is of format {version}; this version reads up to {_FORMAT}.")
        found = _MANIFEST_SUM.match(content)
        own = found and checksum(memoryview(content)[found.end() :])
        # Format 1 has no such sum, and there is no other without.
        if (version != 1 or "xxh3" in encoded) and (found is None or int(found[1], 16) != own):
            raise DamagedError(f"{file} is damaged: it differs from its checksum.")
        encoded.pop("xxh3", None)
        _refuse_impossible({"format": version, **encoded})
        files = {path: (whole_number(entry["size"]), entry.get("xxh3")) for path, entry in encoded.pop("files").items()}
        for path in files:
            refuse_outside(path)
        models = [_decode_model(model, files) for model in encoded.pop("models")]
        _refuse_other_bytes(models, files)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}, so it is no complete checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    return Manifest(encoded, models, files, version > 1)


def _refuse_impossible(encoded: Mapping[str, Any]) -> None:
    """Raise a ValueError for numbers of a manifest that no run can have written."""
    sums = {f"the checksum of {path}": entry.get("xxh3") for path, entry in encoded["files"].items()}
    for name, value in {**{name: encoded.get(name) for name in _RANGES}, **sums}.items():
        least, most = _RANGES.get(name, (0, 2**64 - 1))
        if value is not None and not least <= whole_number(value, 2**64) <= most:
            raise ValueError(f"{name} is {value}")
    if len(encoded["models"]) > _MOST_MODELS:
        raise ValueError(f"{len(encoded['models'])} models")


def _refuse_other_bytes(models: Sequence[StoredModel], files: Mapping[str, tuple[int, int | None]]) -> None:
    """Raise a ValueError for tensors that share bytes or leave bytes out, so that one may begin in a file's header.

    Tensors fill their file from its header to its end. Tied weights have one place.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    for model in models:
        for place in model.places.values():
            if place.size:
                used.setdefault(place.file, []).append((place.start, place.start + place.size))
    for file, ranges in used.items():
        ranges.sort()
        neighbours = [*ranges, (files[file][0], 0)]
        for (_, end), (start, _) in itertools.pairwise(neighbours):
            if start != end:
                raise ValueError(f"tensors of {file} {'share' if start < end else 'leave out'} bytes")
        if ranges[0][0] < _LEAST_HEADER:
            raise ValueError(f"a tensor of {file} begins in its header")


def find_damage(folder: Path) -> str | None:
    """What makes a checkpoint incomplete, by names and sizes alone; None if nothing does."""
    damage = None
    for _ in range(_MOST_LOOKS):
        before = _which(folder)
        try:
            damage = _damage(folder)
        except OSError as error:
            damage = f"{error.filename or folder} cannot be read ({error.strerror})."
        if damage is None or _which(folder) == before:
            break  # else another job has put a new checkpoint there since, and the manifest is the old one's
    return damage


def _which(folder: Path) -> tuple[int, int] | None:
    """By which a folder differs from one that has its name later; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _damage(folder: Path) -> str | None:
    """As `find_damage`, but that a file cannot be read now is no damage.

    Raises:
        OSError: it cannot.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return str(error)
    for path in manifest.files:
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / path).stat()
    return next(iter(find_wrong_files(folder, manifest).values()), None)


def find_wrong_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """The files that are missing, or of another size, each with a sentence; nothing of them is read."""
    found = {path: _wrong_size(folder / path, size) for path, (size, _) in manifest.files.items()}
    return {path: problem for path, problem in found.items() if problem is not None}


def checksum(data: Any) -> int:
    """xxh3 of bytes, or of anything with a buffer; from 0 to 2⁶⁴ - 1.

    It finds what a disk, a network or a program has damaged, not what somebody has changed on purpose: anyone can
    compute it.
    """
    return int(xxhash.xxh3_64_intdigest(data))


def checksum_of_file(path: Path) -> int:
    """Of a file of any size, which is read in pieces."""
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            found.update(chunk)
    return int(found.intdigest())


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        status = path.stat()
        found = status.st_size
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is no regular file."
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None if found == size else f"{path} has {found:,} bytes instead of {size:,}."


def _encode_model(model: StoredModel) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {}
    for (kind, name), place in model.places.items():
        tensors.setdefault(kind, {})[name] = {
            "file": place.file,
            "dtype": place.type_name,
            "shape": list(place.shape),
            "start": place.start,
        }
    return {"class": model.kind, "folder": model.folder, "tied": dict(model.tied), "tensors": tensors}


def _decode_model(encoded: Mapping[str, Any], files: Mapping[str, tuple[int, int | None]]) -> StoredModel:
    entries = {(kind, name): entry for kind, named in encoded["tensors"].items() for name, entry in named.items()}
    places = {
        key: Place(entry["file"], entry["dtype"], read_shape(entry["shape"]), whole_number(entry["start"]))
        for key, entry in entries.items()
    }
    for (kind, name), place in places.items():
        if place.type_name not in TYPES:
            raise ValueError(f"a tensor of type {shorten(place.type_name)}")
        size, own = files.get(place.file, (0, 0))
        if own is not None or place.start + place.size > size:  # a tensor file has no sum but those of its pieces
            raise ValueError(f"{name} ({kind}) is not inside {place.file}")
    refuse_outside(encoded["folder"])
    return StoredModel(str(encoded["class"]), encoded["folder"], dict(encoded["tied"]), places)


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A numbered checkpoint, complete or not.

    Attributes:
        order: its place among those that are named alike, as its manifest has it, so that neither clocks nor numbers
            of steps that have begun again decide what is newest; its number where there is none.
        path: its folder.
        run: whose it is; None of one from before manifests had it, or that cannot be read.
        is_readable: whether it has a manifest.
    """

    order: int
    path: Path
    run: str | None
    is_readable: bool


def automatic_folder(project_dir: str | os.PathLike[str] | None) -> Path:
    """Where checkpoints are that are named automatically.

    Raises:
        CheckpointError: the run has no folder.
    """
    if project_dir is None:
        raise CheckpointError("automatic_checkpoint_naming needs Accelerator(project_dir=…).")
    return Path(project_dir).expanduser().absolute() / "checkpoints"


def open_draft(target: Path, needed_bytes: int) -> Path:
    """An empty folder beside `target` to write into; what an earlier run, killed here, left is settled.

    Raises:
        CheckpointError: the disk has less room, or cannot be written, or `target` cannot be replaced later.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Save into a folder.")
    if target.is_mount():
        raise CheckpointError(
            f"{target} is where a disk is mounted, and cannot be replaced. Save into a folder below it."
        )
    with suppress(FileNotFoundError):  # of the current folder, which may have been removed: no target holds it then
        if Path.cwd().is_relative_to(target.resolve()):
            raise CheckpointError(f"{target} is or holds the current folder. Save into a folder below it.")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        make_folder(target.parent)
        _settle(target)
        free = shutil.disk_usage(target.parent).free
        while free >= needed_bytes:
            draft.mkdir()
            # Another process that saves there may take the folder, as long as it is not held, for a killed run's.
            with suppress(FileNotFoundError):
                hold(draft)
                return draft
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written ({error.filename}: {error.strerror}); nothing was. Save where there is room, "
            "and where this process may write."
        ) from error
    raise CheckpointError(
        f"a checkpoint of {needed_bytes:,} bytes does not fit: {target.parent} has {free:,} bytes free. Nothing was "
        "written, and older checkpoints are as they were.\nRemove some, or save elsewhere."
    )


def publish_draft(draft: Path, target: Path, *, replaces: bool = True) -> None:
    """Give a complete draft its name. A reader sees the old checkpoint or the new one, never a mixture.

    All files of the draft are on the disk before it gets the name, those that other processes of this machine wrote
    included. Files in `target` that do not belong to the checkpoint there are kept.

    Args:
        draft: what `open_draft` has given.
        target: its name.
        replaces: whether to replace a checkpoint that has the name by now.

    Raises:
        CheckpointError: `target` cannot be made or replaced; what was there is complete.
        OSError: a file of the draft cannot be brought to the disk.
    """
    for path in (*draft.rglob("*"), draft):
        if path.is_dir() or path.is_file():  # a hook may have made a link to nothing
            sync(path)
    is_new = not target.exists()
    try:
        if replaces and not is_new:
            _replace(target, draft)
        else:
            draft.rename(target)
        sync(target.parent)
        _settle(target, is_complete=True)
    except OSError as error:
        let_go(draft)
        with suppress(OSError):
            _settle(target)
        if not replaces and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise CheckpointError(
                f"{target} was saved by another run meanwhile. Call save_state() again: it takes the next number."
            ) from error
        raise CheckpointError(
            f"{target} is not saved ({error.strerror}): look at the disk. Older checkpoints are as they were."
            if is_new
            else f"{target} cannot be replaced ({error.strerror}). A checkpoint that was there is still complete.\n"
            "Save into a folder below it instead."
        ) from error
    finally:
        let_go(draft)


def discard_draft(draft: Path) -> None:
    """Remove what there is of a draft, which may be nothing."""
    shutil.rmtree(draft, ignore_errors=True)
    let_go(draft)


def numbered_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[tuple[int, Path]]:
    """The folders `<prefix><number>` in `folder`, oldest first, complete or not, also where one is being replaced."""
    names = {path.name for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()}
    names |= {match[1] for name in names if (match := _ASIDE.fullmatch(name)) and match[2] == "replaced"}
    return sorted(
        (int(match[2]), folder / name) for name in names if (match := NUMBERED.fullmatch(name)) and match[1] == prefix
    )


def split_number(name: str) -> tuple[str, int] | None:
    """What a checkpoint's name is made of, also while it is aside; None without a number at its end."""
    aside = _ASIDE.fullmatch(name)
    match = NUMBERED.fullmatch(aside[1] if aside else name)
    return None if match is None else (match[1], int(match[2]))


def next_number(folder: Path) -> int:
    """The first number that no run has used for a checkpoint in `folder`, nor uses for one that is being written."""
    numbers = [split_number(path.name) for path in (folder.iterdir() if folder.is_dir() else ())]
    return max((one[1] for one in numbers if one is not None and one[0] == _AUTOMATIC), default=-1) + 1


def known_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[KnownCheckpoint]:
    """The `numbered_checkpoints` with what their manifests say, oldest first."""
    known = []
    for number, path in numbered_checkpoints(folder, prefix):
        about = next((about for p in (path, _beside(path, "replaced")) if (about := _about(p)) is not None), None)
        run, order = (None, None) if about is None else (about.get("run"), about.get("order"))
        known.append(KnownCheckpoint(number if order is None else order, path, run, about is not None))
    return sorted(known, key=lambda one: one.order)


def has_checkpoints(place: Path, run: str | None = None) -> bool:
    """Whether there is one, complete or not; a save that never ended left none.

    Args:
        place: a checkpoint, or a folder that may hold some.
        run: look for this run's in the folder; None for every run's.
    """
    if run is None:
        return (place / MANIFEST_NAME).exists() or bool(numbered_checkpoints(place))
    return any(one.run == run or not one.is_readable for one in known_checkpoints(place))


def rotate_checkpoints(newest: Path, keep: int) -> list[Path]:
    """Remove the oldest checkpoints of one run whose names differ from `newest` only in the number, beyond `keep`.

    Incomplete ones of killed runs are settled too, but not those that another job is writing. Checkpoints of other
    runs or of an unknown run, and folders without a manifest, stay.

    Returns:
        Those removed.

    Raises:
        CheckpointError: one cannot be removed.
    """
    match = NUMBERED.fullmatch(newest.name)
    if match is None:
        return []
    try:
        asides: dict[str, list[Path]] = {}
        for path in newest.parent.iterdir():
            if aside := _ASIDE.fullmatch(path.name):
                asides.setdefault(aside[1], []).append(path)
        for name, paths in asides.items():
            if (numbered := NUMBERED.fullmatch(name)) and numbered[1] == match[1] and not any(map(is_held, paths)):
                _settle(newest.with_name(name))
        run = (_about(newest) or {}).get("run")
        known = known_checkpoints(newest.parent, match[1]) if run is not None else []
        older = [one.path for one in known if one.run == run and one.path != newest]
        removed = older[: max(len(older) - max(keep - 1, 0), 0)]
        for path in removed:
            _remove(path, path)
    except OSError as error:
        raise CheckpointError(
            f"{newest} is saved, but an older one cannot be removed ({error.filename}: {error.strerror})."
        ) from error
    return removed


def choose_checkpoint(
    folder: Path, run: str | None = None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> tuple[Path, list[str]]:
    """The checkpoint to load: `folder` itself, or the newest complete `checkpoint_<number>` in it.

    It only looks, since another run may be writing there.

    Args:
        folder: see above.
        run: of those in it, only this run's; None for every run's.
        damaged: those that were found to be damaged when they were read, each with what was found.

    Returns:
        The folder, and the damage of newer ones that were passed over.

    Raises:
        CheckpointError: `folder` is damaged, with the previous good one named; or nothing complete is there.
    """
    if not folder.is_dir() and not _beside(folder, "replaced").is_dir():
        raise CheckpointError(f"{folder} does not exist.")
    known = [] if (folder / MANIFEST_NAME).exists() else list(reversed(known_checkpoints(folder)))
    numbered = [one.path for one in known if run is None or one.run == run or not one.is_readable]
    damages: list[str] = []
    for path in numbered or [folder]:
        for one in (path, _beside(path, "replaced")):
            damage = damaged.get(one) or find_damage(one)
            if damage is None:
                return one, damages
            if one == path or one in damaged:
                damages.append(damage)
    if numbered:
        lines = [f"no checkpoint in {folder} is complete:", *(f"  {line}" for line in damages)]
        raise CheckpointError("\n".join(lines))
    raise CheckpointError(f"{damages[0]}\n{offer_previous(folder)}")


def offer_previous(folder: Path) -> str:
    """A sentence: which checkpoint to load in the place of a damaged one."""
    match = NUMBERED.fullmatch(folder.name)
    for number, path in reversed(numbered_checkpoints(folder.parent, match[1]) if match else []):
        if match and number < int(match[2]) and find_damage(path) is None:
            return f"The newest complete one before it is {path}."
    theirs = ("pytorch_model", "latest", "optimizer.bin", "random_states_0.pkl", "trainer_state.json")
    if any((folder / name).exists() for name in theirs):
        return (
            "It looks like one that the Trainer, Accelerate or DeepSpeed wrote, with pickle; those cannot be loaded as "
            "they are.\nConvert DeepSpeed's by `zero-plugin checkpoint import`. Of the others, "
            "accelerator.load_weights(model, folder) reads the weights that are safetensors."
        )
    if not (folder / MANIFEST_NAME).exists() and any(folder.glob("*.safetensors")):
        return "accelerator.load_weights(model, folder) reads the weights in its safetensors, and nothing else."
    return "There is no other complete checkpoint beside it."


def _replace(target: Path, draft: Path) -> None:
    """Give `draft` the name that `target` has; the older one is aside then."""
    replaced = _beside(target, "replaced")
    draft.rename(replaced)
    if not exchange(replaced, target):
        replaced.rename(draft)
        target.rename(replaced)  # a reader finds it there, until the next line
        draft.rename(target)


def _settle(target: Path, *, is_complete: bool = False) -> None:
    """End what was begun beside `target`, by this run or by one that was killed: nothing is aside then.

    Of two, the one that stays is the one that has the name, unless only the other is a complete checkpoint. If neither
    is, both stay where they are.

    Args:
        target: the name.
        is_complete: whether it is known that the one with the name is complete.

    Raises:
        OSError: one of them cannot be read now, which says nothing of it; nothing was removed.
    """
    replaced = _beside(target, "replaced")
    if replaced.exists():
        if is_complete or (target.exists() and _damage(target) is None):
            _keep_other_files(replaced, target)
            _remove(replaced, target)
        elif target.exists() and _damage(replaced) is not None:
            return
        else:
            if target.exists():
                _keep_other_files(target, replaced)
                _remove(target, target)
            replaced.rename(target)
            sync(target.parent)
    for path in target.parent.iterdir():
        if (match := _ASIDE.fullmatch(path.name)) and match[1] == target.name and not is_held(path):
            shutil.rmtree(path)


def _remove(path: Path, target: Path) -> None:
    """Remove a complete folder; a run killed here leaves nothing that looks like a checkpoint."""
    doomed = _beside(target, "removing")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    sync(doomed.parent)
    shutil.rmtree(doomed)


def _about(folder: Path) -> Mapping[str, Any] | None:
    try:
        return read_manifest(folder).about
    except CheckpointError:
        return None


def _keep_other_files(old: Path, new: Path) -> None:
    try:
        known = {MANIFEST_NAME, *read_manifest(old).files}
    except CheckpointError:
        known = set()
    for path in sorted(old.rglob("*")):
        place = new / path.relative_to(old)
        is_kept = path.is_symlink() or not path.is_dir()
        if is_kept and str(path.relative_to(old)) not in known and not os.path.lexists(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)


def _beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, also if another process wrote it, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, if it is missing, and those above it; wait until the disk has their names."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def reserve(file: BinaryIO, size: int) -> None:
    """Make a file that is opened for writing `size` bytes long, and reserve the disk space where the file system can.

    `os.posix_fallocate` is no substitute: where the file system cannot, it writes a byte into every block.

    Raises:
        OSError: there is no space.
    """
    file.truncate(size)
    fallocate = getattr(_LIBC, "fallocate", None)  # Linux; fallocate(2)
    if fallocate is None or size == 0:
        return
    if fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        error = ctypes.get_errno()
        if error in _NO_ROOM:
            raise OSError(error, os.strerror(error))


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Have the disk begin with a part of a file that was written just now, so that a later fsync finds less to do."""
    sync_file_range = getattr(_LIBC, "sync_file_range", None)  # Linux; sync_file_range(2)
    if sync_file_range is not None:
        sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False where the system or the file system cannot (NFS, macOS).

    Raises:
        OSError: it can, and refuses these two.
    """
    renameat2 = getattr(_LIBC, "renameat2", None)  # Linux; rename(2)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))
