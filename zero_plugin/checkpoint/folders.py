"""The folders of checkpoints: written aside, published by a rename, found, rotated."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.checkpoint.durable import exchange, make_folder, sync_folder
from zero_plugin.checkpoint.holding import hold, is_held, let_go
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, find_damage, read_manifest
from zero_plugin.errors import CheckpointError

__all__ = [
    "KnownCheckpoint",
    "automatic_folder",
    "choose_checkpoint",
    "discard_draft",
    "has_checkpoints",
    "known_checkpoints",
    "next_number",
    "numbered_checkpoints",
    "offer_previous",
    "open_draft",
    "publish_draft",
    "rotate_checkpoints",
    "split_number",
]

_NUMBERED: Final = re.compile(r"(.*?)(\d+)")  # checkpoint_7, step_100, …
_AUTOMATIC: Final = "checkpoint_"

# Beside a checkpoint `name`, hidden, while it is written, replaced or removed, and after a run that was killed then:
#   .name.<random>.writing   not complete yet. Never the same name twice: a client of NFS may remember for a minute
#                            which folder had that name before
#   .name.replaced           whole: the older one, or the newer one just before it takes the name
#   .name.removing           going
_ASIDE: Final = re.compile(r"\.(.+?)\.([0-9a-f]{8}\.writing|replaced|removing)")


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
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        make_folder(target.parent)
        _settle(target)
        free = shutil.disk_usage(target.parent).free
        if free >= needed_bytes:
            draft.mkdir()
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

    Files in `target` that were no part of the checkpoint there stay.

    Args:
        draft: what `open_draft` has given.
        target: its name.
        replaces: whether a checkpoint that has the name by now is replaced.

    Raises:
        CheckpointError: `target` cannot be replaced; what is there is complete.
    """
    try:
        for folder, _, _ in os.walk(draft):
            sync_folder(Path(folder))
        if replaces and target.exists():
            _replace(target, draft)
        else:
            draft.rename(target)
        sync_folder(target.parent)
        _settle(target)
    except OSError as error:
        with suppress(OSError):
            _settle(target)
        raise CheckpointError(
            f"{target} cannot be replaced ({error.strerror}). A checkpoint that was there is still complete.\n"
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
        (int(match[2]), folder / name) for name in names if (match := _NUMBERED.fullmatch(name)) and match[1] == prefix
    )


def split_number(name: str) -> tuple[str, int] | None:
    """What a checkpoint's name is made of, also while it is aside; None without a number at its end."""
    aside = _ASIDE.fullmatch(name)
    match = _NUMBERED.fullmatch(aside[1] if aside else name)
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
    """Of the checkpoints of one run that are named as `newest` but for the number, remove the oldest beyond `keep`.

    What killed runs left of such is settled too, but not what another job is writing. Checkpoints of other runs, of
    nobody knows which run, and folders without a manifest are not ours, and stay.

    Returns:
        Those removed.

    Raises:
        CheckpointError: one cannot be removed.
    """
    match = _NUMBERED.fullmatch(newest.name)
    if match is None:
        return []
    try:
        asides: dict[str, list[Path]] = {}
        for path in newest.parent.iterdir():
            if aside := _ASIDE.fullmatch(path.name):
                asides.setdefault(aside[1], []).append(path)
        for name, paths in asides.items():
            if (numbered := _NUMBERED.fullmatch(name)) and numbered[1] == match[1] and not any(map(is_held, paths)):
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


def choose_checkpoint(folder: Path, run: str | None = None) -> tuple[Path, list[str]]:
    """The checkpoint to load: `folder` itself, or the newest complete `checkpoint_<number>` in it.

    It only looks, since another run may be writing there.

    Args:
        folder: see above.
        run: of those in it, only this run's; None for every run's.

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
        damage = find_damage(path)
        if damage is None:
            return path, damages
        damages.append(damage)
        if find_damage(_beside(path, "replaced")) is None:
            return _beside(path, "replaced"), damages
    if numbered:
        lines = [f"no checkpoint in {folder} is complete:", *(f"  {line}" for line in damages)]
        raise CheckpointError("\n".join(lines))
    raise CheckpointError(f"{damages[0]}\n{offer_previous(folder)}")


def offer_previous(folder: Path) -> str:
    """A sentence: which checkpoint to load in the place of a damaged one."""
    previous = next(_complete_before(folder), None)
    return f"The newest complete one before it is {previous}." if previous else _no_other(folder)


def _replace(target: Path, draft: Path) -> None:
    """Give `draft` the name that `target` has; the older one is aside then."""
    replaced = _beside(target, "replaced")
    draft.rename(replaced)
    if not exchange(replaced, target):
        replaced.rename(draft)
        target.rename(replaced)  # a reader finds it there, until the next line
        draft.rename(target)


def _settle(target: Path) -> None:
    """End what was begun beside `target`, by this run or by one that was killed: nothing is aside then.

    Of two, the one that stays is the one that has the name, unless only the other is a complete checkpoint.
    """
    replaced = _beside(target, "replaced")
    if replaced.exists():
        if target.exists() and find_damage(target) is None:
            _keep_other_files(replaced, target)
            _remove(replaced, target)
        else:
            if target.exists():
                _keep_other_files(target, replaced)
                _remove(target, target)
            replaced.rename(target)
            sync_folder(target.parent)
    for path in target.parent.iterdir():
        if (match := _ASIDE.fullmatch(path.name)) and match[1] == target.name:
            shutil.rmtree(path)


def _remove(path: Path, target: Path) -> None:
    """Remove a whole folder; a run killed here leaves nothing that looks like a checkpoint."""
    doomed = _beside(target, "removing")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    sync_folder(doomed.parent)
    shutil.rmtree(doomed)


def _complete_before(folder: Path) -> Iterator[Path]:
    match = _NUMBERED.fullmatch(folder.name)
    if match is not None:
        for number, path in reversed(numbered_checkpoints(folder.parent, match[1])):
            if number < int(match[2]) and find_damage(path) is None:
                yield path


def _no_other(folder: Path) -> str:
    if any((folder / name).exists() for name in ("pytorch_model", "latest", "optimizer.bin", "random_states_0.pkl")):
        return "It looks like one that Accelerate or DeepSpeed wrote, with pickle; those cannot be loaded as they are."
    return "There is no other complete checkpoint beside it."


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
