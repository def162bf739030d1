"""The folders of checkpoints: written aside, published by a rename, found, rotated."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zero_plugin.checkpoint.durable import sync_folder
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, find_damage, read_manifest
from zero_plugin.errors import CheckpointError

__all__ = [
    "automatic_folder",
    "choose_checkpoint",
    "numbered_checkpoints",
    "open_draft",
    "publish_draft",
    "rotate_checkpoints",
]

_NUMBERED: Final = re.compile(r"(.*?)(\d+)")  # checkpoint_7, step_100, …
_AUTOMATIC: Final = "checkpoint_"


def automatic_folder(project_dir: str | os.PathLike[str] | None) -> Path:
    """Where checkpoints are that are named automatically.

    Raises:
        CheckpointError: the run has no folder.
    """
    if project_dir is None:
        raise CheckpointError("automatic_checkpoint_naming needs Accelerator(project_dir=…).")
    return Path(project_dir).expanduser().absolute() / "checkpoints"


def open_draft(target: Path, needed_bytes: int) -> Path:
    """An empty folder beside `target` to write into; what an earlier run, killed here, left is removed.

    Raises:
        CheckpointError: the disk has less room, or cannot be written.
    """
    draft = _beside(target, "writing")
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
    except OSError as error:
        raise CheckpointError(f"{draft} cannot be made ({error.strerror}); nothing was written.") from error
    if free < needed_bytes:
        draft.rmdir()
        raise CheckpointError(
            f"a checkpoint of {needed_bytes:,} bytes does not fit: {target.parent} has {free:,} bytes free. Nothing "
            "was written, and older checkpoints are as they were.\nRemove some, or save elsewhere."
        )
    return draft


def publish_draft(draft: Path, target: Path) -> None:
    """Give a complete draft its name. A reader sees the old checkpoint or the new one, never a mixture.

    Files in `target` that were no part of the checkpoint there stay.
    """
    for folder, _, _ in os.walk(draft):
        sync_folder(Path(folder))
    try:
        if target.exists() and any(target.iterdir()):
            replaced = _beside(target, "replaced")
            if replaced.exists():
                shutil.rmtree(replaced)
            target.rename(replaced)
            draft.rename(target)
            sync_folder(target.parent)
            _keep_other_files(replaced, target)
            shutil.rmtree(replaced)
        else:
            draft.rename(target)
            sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be replaced ({error.strerror}); the new checkpoint is complete in {draft}.\n"
            "Save into a folder below it instead."
        ) from error


def numbered_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[tuple[int, Path]]:
    """The folders `<prefix><number>` in `folder`, oldest first, complete or not."""
    return sorted(
        (int(match[2]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NUMBERED.fullmatch(path.name)) and match[1] == prefix and path.is_dir()
    )


def rotate_checkpoints(newest: Path, keep: int) -> list[Path]:
    """Of the checkpoints named as `newest` but for the number, remove the oldest beyond `keep`; those removed.

    What killed runs left of such is removed too. A folder without a manifest is not ours, and stays.
    """
    match = _NUMBERED.fullmatch(newest.name)
    if match is None:
        return []
    for state in ("writing", "removing"):
        for left in newest.parent.glob(f".{match[1]}*.{state}"):
            shutil.rmtree(left)
    older = [path for _, path in numbered_checkpoints(newest.parent, match[1]) if (path / MANIFEST_NAME).exists()]
    older.remove(newest)
    removed = older[: max(len(older) - max(keep - 1, 0), 0)]
    for path in removed:
        doomed = _beside(path, "removing")
        path.rename(doomed)  # so that a run killed here leaves nothing that looks like a checkpoint
        shutil.rmtree(doomed)
    return removed


def choose_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """The checkpoint to load: `folder` itself, or the newest complete `checkpoint_<number>` in it.

    Returns:
        The folder, and the damage of newer ones that were passed over.

    Raises:
        CheckpointError: `folder` is damaged, with the previous good one named; or nothing complete is there.
    """
    if not folder.is_dir() and not _beside(folder, "replaced").is_dir():
        raise CheckpointError(f"{folder} does not exist.")
    numbered = [path for _, path in reversed(numbered_checkpoints(folder))]
    if numbered and not (folder / MANIFEST_NAME).exists():
        damages: list[str] = []
        for path in numbered:
            damage = find_damage(path)
            if damage is None:
                return path, damages
            damages.append(damage)
        raise CheckpointError(
            "\n".join([f"no checkpoint in {folder} is complete:", *(f"  {line}" for line in damages)])
        )
    damage = find_damage(folder)
    if damage is None:
        return folder, []
    replaced = _beside(folder, "replaced")  # killed between two renames
    if find_damage(replaced) is None:
        return replaced, [damage]
    previous = next(_complete_before(folder), None)
    offer = f"The newest complete one before it is {previous}." if previous else _no_other(folder)
    raise CheckpointError(f"{damage}\n{offer}")


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


def _keep_other_files(old: Path, new: Path) -> None:
    try:
        known = {MANIFEST_NAME, *read_manifest(old).files}
    except CheckpointError:
        known = set()
    for path in sorted(old.rglob("*")):
        place = new / path.relative_to(old)
        if path.is_file() and str(path.relative_to(old)) not in known and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)


def _beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")
