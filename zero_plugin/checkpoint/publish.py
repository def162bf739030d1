"""Drafts of checkpoints and model folders, which a rename publishes; and the removal of old checkpoints."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from zero_plugin.checkpoint.disk import exchange, make_folder, sync
from zero_plugin.checkpoint.folders import ASIDE, NUMBERED, beside, known_checkpoints, manifest_facts
from zero_plugin.checkpoint.locks import hold, is_held, let_go
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, read_manifest
from zero_plugin.checkpoint.verify import damage_of
from zero_plugin.errors import CheckpointError


def open_draft(target: Path, needed_bytes: int) -> Path:
    """Make an empty draft folder next to `target`. Clean up after an earlier run that was killed here.

    Raises:
        CheckpointError: the disk has too little space or cannot be written, or `target` could not be replaced later.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Save into a folder.")
    if target.is_mount():
        raise CheckpointError(
            f"{target} is where a disk is mounted, and cannot be replaced. Save into a folder below it."
        )
    with suppress(FileNotFoundError):  # the current folder may have been removed; then `target` cannot contain it
        if Path.cwd().is_relative_to(target.resolve()):
            raise CheckpointError(f"{target} is or holds the current folder. Save into a folder below it.")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        make_folder(target.parent)
        _settle(target)
        free = shutil.disk_usage(target.parent).free
        while free >= needed_bytes:
            draft.mkdir()
            # Until the folder is held, another saving process may remove it as the draft of a killed run. Then retry.
            with suppress(FileNotFoundError):
                hold(draft)
                return draft
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written ({error.filename}: {error.strerror}). Nothing was written. Save to a disk "
            "that has room and that this process may write to."
        ) from error
    raise CheckpointError(
        f"a checkpoint of {needed_bytes:,} bytes does not fit: {target.parent} has {free:,} bytes free. Nothing was "
        "written, and older checkpoints are unchanged.\nRemove some, or save elsewhere."
    )


def publish_draft(draft: Path, target: Path, *, replaces: bool = True) -> None:
    """Give a complete draft its final name. A reader sees the old checkpoint or the new one, never a mixture.

    All files of the draft are on the disk before the rename, including files that other processes of this machine
    wrote. Files in `target` that do not belong to the old checkpoint are kept.

    Args:
        draft: the folder of `open_draft`.
        target: its final name.
        replaces: whether to replace a checkpoint that has the name by now.

    Raises:
        CheckpointError: `target` cannot be created or replaced. The old checkpoint is still complete.
        OSError: a file of the draft cannot be flushed to the disk.
    """
    for path in (*draft.rglob("*"), draft):
        if path.is_dir() or path.is_file():  # a hook of the script may have made a dangling link
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
            f"{target} is not saved ({error.strerror}). Check the disk. Older checkpoints are unchanged."
            if is_new
            else f"{target} cannot be replaced ({error.strerror}). A checkpoint that was there is still complete.\n"
            "Save into a folder below it instead."
        ) from error
    finally:
        let_go(draft)


def discard_draft(draft: Path) -> None:
    """Remove a draft, if it exists, and release its lock."""
    shutil.rmtree(draft, ignore_errors=True)
    let_go(draft)


def rotate_checkpoints(newest: Path, keep: int) -> list[Path]:
    """Remove the oldest checkpoints of the run beyond `keep`, if their names differ from `newest` only in the number.

    Hidden folders of killed runs are cleaned up too, but not those that another job is writing. Checkpoints of other or
    unknown runs, and folders without a manifest, stay.

    Returns:
        The removed folders.

    Raises:
        CheckpointError: a folder cannot be removed.
    """
    match = NUMBERED.fullmatch(newest.name)
    if match is None:
        return []
    try:
        asides: dict[str, list[Path]] = {}
        for path in newest.parent.iterdir():
            if aside := ASIDE.fullmatch(path.name):
                asides.setdefault(aside[1], []).append(path)
        for name, paths in asides.items():
            if (numbered := NUMBERED.fullmatch(name)) and numbered[1] == match[1] and not any(map(is_held, paths)):
                _settle(newest.with_name(name))
        run = (manifest_facts(newest) or {}).get("run")
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


def _replace(target: Path, draft: Path) -> None:
    """Give `draft` the name of `target`, and move the older folder aside."""
    replaced = beside(target, "replaced")
    draft.rename(replaced)
    if not exchange(replaced, target):
        replaced.rename(draft)
        target.rename(replaced)  # until the next line, readers find the old checkpoint under its hidden name
        draft.rename(target)


def _settle(target: Path, *, is_complete: bool = False) -> None:
    """Finish a replacement of `target` that this run or a killed run began, and remove leftover hidden folders.

    If both `target` and its replaced folder exist, `target` stays, unless only the replaced folder is a complete
    checkpoint. If neither is complete, both stay where they are.

    Args:
        target: the final name.
        is_complete: whether the folder with this name is known to be complete.

    Raises:
        OSError: a checkpoint cannot be read now, so nothing is known about its damage. Nothing was removed.
    """
    replaced = beside(target, "replaced")
    if replaced.exists():
        if is_complete or (target.exists() and damage_of(target) is None):
            _keep_other_files(replaced, target)
            _remove(replaced, target)
        elif target.exists() and damage_of(replaced) is not None:
            return
        else:
            if target.exists():
                _keep_other_files(target, replaced)
                _remove(target, target)
            replaced.rename(target)
            sync(target.parent)
    for path in target.parent.iterdir():
        if (match := ASIDE.fullmatch(path.name)) and match[1] == target.name and not is_held(path):
            shutil.rmtree(path)


def _remove(path: Path, target: Path) -> None:
    """Remove a complete folder. It is renamed first, so a kill leaves nothing that looks like a checkpoint."""
    doomed = beside(target, "removing")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    sync(doomed.parent)
    shutil.rmtree(doomed)


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
