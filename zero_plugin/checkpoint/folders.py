"""Checkpoint folders: their names, and which one to load."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zero_plugin.checkpoint.manifest import MANIFEST_NAME, read_manifest
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError

NUMBERED: Final = re.compile(r"(.*?)(\d+)")  # checkpoint_7, step_100, …
_AUTOMATIC: Final = "checkpoint_"

# Hidden folders next to a checkpoint `name`. They exist while the checkpoint is written, replaced or removed, and stay
# if the run is killed meanwhile:
#   .name.<random>.writing   a draft, not complete. The name is never reused, because an NFS client may cache for a
#                            minute which folder had the name before
#   .name.replaced           complete: the older checkpoint, or the newer one just before it takes the name
#   .name.removing           being removed
ASIDE: Final = re.compile(r"\.(.+?)\.([0-9a-f]{8}\.writing|replaced|removing)")


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A numbered checkpoint, complete or not.

    Attributes:
        order: its place among checkpoints with the same prefix, from its manifest, or its number if the manifest has
            none. Clocks, and step numbers that start again, therefore do not decide which checkpoint is newest.
        path: its folder.
        run: id of the run that saved it; None if the manifest is unreadable or from before manifests had this field.
        is_readable: whether it has a readable manifest.
    """

    order: int
    path: Path
    run: str | None
    is_readable: bool


def automatic_folder(project_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of automatically named checkpoints.

    Raises:
        CheckpointError: the run has no project folder.
    """
    if project_dir is None:
        raise CheckpointError("automatic_checkpoint_naming needs Accelerator(project_dir=…).")
    return Path(project_dir).expanduser().absolute() / "checkpoints"


def numbered_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[tuple[int, Path]]:
    """Return the folders `<prefix><number>` in `folder`, lowest number first, complete or not, even while replaced."""
    names = {path.name for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()}
    names |= {match[1] for name in names if (match := ASIDE.fullmatch(name)) and match[2] == "replaced"}
    return sorted(
        (int(match[2]), folder / name) for name in names if (match := NUMBERED.fullmatch(name)) and match[1] == prefix
    )


def split_number(name: str) -> tuple[str, int] | None:
    """Return a checkpoint name's prefix and number, also of hidden folders. None if the name ends without a number."""
    aside = ASIDE.fullmatch(name)
    match = NUMBERED.fullmatch(aside[1] if aside else name)
    return None if match is None else (match[1], int(match[2]))


def next_number(folder: Path) -> int:
    """Return a number above those of all checkpoints in `folder`, including those that are being written."""
    numbers = [split_number(path.name) for path in (folder.iterdir() if folder.is_dir() else ())]
    return max((one[1] for one in numbers if one is not None and one[0] == _AUTOMATIC), default=-1) + 1


def known_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[KnownCheckpoint]:
    """Return the `numbered_checkpoints` with facts from their manifests, oldest first."""
    known = []
    for number, path in numbered_checkpoints(folder, prefix):
        found = map(manifest_facts, (path, beside(path, "replaced")))
        about = next((about for about in found if about is not None), None)
        run, order = (None, None) if about is None else (about.get("run"), about.get("order"))
        known.append(KnownCheckpoint(number if order is None else order, path, run, about is not None))
    return sorted(known, key=lambda one: one.order)


def has_checkpoints(place: Path, run: str | None = None) -> bool:
    """Return whether a checkpoint exists, complete or not. Drafts of interrupted saves do not count.

    Args:
        place: a checkpoint, or a folder that may hold some.
        run: count only this run's checkpoints in the folder; None counts the checkpoints of all runs.
    """
    if run is None:
        return (place / MANIFEST_NAME).exists() or bool(numbered_checkpoints(place))
    return any(one.run == run or not one.is_readable for one in known_checkpoints(place))


def choose_checkpoint(
    folder: Path, run: str | None = None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> tuple[Path, list[str]]:
    """Choose the checkpoint to load: `folder` itself, or the newest complete `checkpoint_<number>` in it.

    Nothing is changed, since another run may be writing there.

    Args:
        folder: a checkpoint, or a folder of checkpoints.
        run: choose only among this run's checkpoints; None for all runs.
        damaged: checkpoints whose contents were found to be damaged, each with a description.

    Returns:
        The folder, and the damage of newer checkpoints that were skipped.

    Raises:
        CheckpointError: no complete checkpoint is there. If `folder` is damaged itself, the message names the previous
            complete one.
    """
    if not folder.is_dir() and not beside(folder, "replaced").is_dir():
        raise CheckpointError(f"{folder} does not exist.")
    known = [] if (folder / MANIFEST_NAME).exists() else list(reversed(known_checkpoints(folder)))
    numbered = [one.path for one in known if run is None or one.run == run or not one.is_readable]
    damages: list[str] = []
    for path in numbered or [folder]:
        for one in (path, beside(path, "replaced")):
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
    """Return a sentence that says which checkpoint to load instead of a damaged one."""
    match = NUMBERED.fullmatch(folder.name)
    for number, path in reversed(numbered_checkpoints(folder.parent, match[1]) if match else []):
        if match and number < int(match[2]) and find_damage(path) is None:
            return f"The newest complete one before it is {path}."
    theirs = ("pytorch_model", "latest", "optimizer.bin", "random_states_0.pkl", "trainer_state.json")
    if any((folder / name).exists() for name in theirs):
        return (
            "It looks like a checkpoint of the Trainer, Accelerate or DeepSpeed. These use pickle and cannot be loaded "
            "directly.\nConvert a DeepSpeed checkpoint with `zero-plugin checkpoint import`. For the others, "
            "accelerator.load_weights(model, folder) reads weights in safetensors."
        )
    if not (folder / MANIFEST_NAME).exists() and any(folder.glob("*.safetensors")):
        return "accelerator.load_weights(model, folder) reads only the weights in its safetensors."
    return "There is no other complete checkpoint next to it."


def manifest_facts(folder: Path) -> Mapping[str, Any] | None:
    """Return the facts about the checkpoint from the manifest in `folder`; None without a readable manifest."""
    try:
        return read_manifest(folder).about
    except CheckpointError:
        return None


def beside(target: Path, state: str) -> Path:
    """Return the path of a hidden folder next to `target`, for one of the states in `ASIDE`."""
    return target.with_name(f".{target.name}.{state}")
