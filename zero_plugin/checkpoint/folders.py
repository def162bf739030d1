"""The folders of checkpoints: their names, and the one to load."""

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

# Beside a checkpoint `name`, hidden, while it is written, replaced or removed, and after a run that was killed then:
#   .name.<random>.writing   not complete yet. Never the same name twice: a client of NFS may remember for a minute
#                            which folder had that name before
#   .name.replaced           complete: the older one, or the newer one just before it takes the name
#   .name.removing           going
ASIDE: Final = re.compile(r"\.(.+?)\.([0-9a-f]{8}\.writing|replaced|removing)")


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


def numbered_checkpoints(folder: Path, prefix: str = _AUTOMATIC) -> list[tuple[int, Path]]:
    """The folders `<prefix><number>` in `folder`, oldest first, complete or not, also where one is being replaced."""
    names = {path.name for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()}
    names |= {match[1] for name in names if (match := ASIDE.fullmatch(name)) and match[2] == "replaced"}
    return sorted(
        (int(match[2]), folder / name) for name in names if (match := NUMBERED.fullmatch(name)) and match[1] == prefix
    )


def split_number(name: str) -> tuple[str, int] | None:
    """What a checkpoint's name is made of, also while it is aside; None without a number at its end."""
    aside = ASIDE.fullmatch(name)
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
        found = map(manifest_facts, (path, beside(path, "replaced")))
        about = next((about for about in found if about is not None), None)
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


def manifest_facts(folder: Path) -> Mapping[str, Any] | None:
    """Return what the manifest in `folder` says of the checkpoint; None without a readable manifest."""
    try:
        return read_manifest(folder).about
    except CheckpointError:
        return None


def beside(target: Path, state: str) -> Path:
    """Return the hidden folder next to `target` for one of its states, see `ASIDE`."""
    return target.with_name(f".{target.name}.{state}")
