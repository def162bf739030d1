"""Reads checkpoints again, and prints what differs from their checksums."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.checkpoint.manifest import find_damage, find_wrong_files, read_manifest
from zero_plugin.checkpoint.recognise import KINDS, recognise, several_checkpoints
from zero_plugin.cli.amounts import progress_bar, show_bytes
from zero_plugin.errors import CheckpointError

__all__ = ["verify_all"]


def verify_all(folder: Path) -> bool:
    """Read a checkpoint, or each of several, and say what differs; whether all are whole.

    Raises:
        CheckpointError: there is no checkpoint of this package.
    """
    kind = recognise(folder)
    if kind not in ("checkpoint", "several"):
        what = "holds no checkpoint" if kind is None else f"is {KINDS[kind]}, which has no checksums"
        raise CheckpointError(f"{folder} {what}.\nName a checkpoint of save_state, or a folder of several.")
    found = {path: _verify(path) for path in ([folder] if kind == "checkpoint" else several_checkpoints(folder))}
    if all(found.values()):
        return True
    if kind == "several":
        good = [path for path, is_whole in found.items() if is_whole]
    else:
        good = [path for path in several_checkpoints(folder.parent) if path != folder and find_damage(path) is None]
    print(f"the newest whole one: {good[-1]}" if good else f"no other in {folder.parent} is whole")
    return False


def _verify(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return _tell(folder, [str(error)])
    wrong = find_wrong_files(folder, manifest)
    total = sum(size for path, (size, _) in manifest.files.items() if path not in wrong)

    from zero_plugin.checkpoint.verify import find_differences

    with progress_bar(f"reading {folder.name}", total) as bar:
        differing = [f"{folder}/{line}" for line in find_differences(folder, manifest, bar, skipped=wrong)]
    if wrong or differing:
        return _tell(folder, [*wrong.values(), *differing])
    print(f"{folder}: whole ({len(manifest.files)} files, {show_bytes(total)})")
    return True


def _tell(folder: Path, damages: list[str]) -> bool:
    print("\n".join([f"{folder}: damaged", *(f"  {line}" for line in damages)]))
    return False
