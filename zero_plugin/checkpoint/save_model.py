"""Writes a model's weights as a Hugging Face model folder: every process its own ranges, no process all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zero_plugin import collectives
from zero_plugin.checkpoint.durable import sync_file, sync_folder, write_text
from zero_plugin.checkpoint.folders import discard_draft, open_draft
from zero_plugin.checkpoint.layout import INDEX_NAME, Layout, is_weight_file, plan_layout
from zero_plugin.checkpoint.ranges import open_writer
from zero_plugin.checkpoint.save import agree_on, create_files, refuse_gaps
from zero_plugin.checkpoint.saved_weights import SavedWeights
from zero_plugin.checkpoint.shared_folder import is_one_folder
from zero_plugin.checkpoint.together import all_or_none, on_main
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.strategies.fragments import WEIGHT, Fragment

__all__ = ["parse_size", "whole_tensors", "write_model"]

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_size(size: int | str) -> int:
    """Bytes in `size`: a number, or a text such as "200MB" (decimal) or "5GiB" (binary).

    Raises:
        ConfigError: not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (parsed := int(float(match[1]) * unit)) < 1:
        raise ConfigError(
            [
                Problem(
                    where=f"save_model(max_shard_size={size!r})",
                    key="max_shard_size",
                    message="not a size",
                    fix='write a number of bytes, or a text such as "200MB", "10GB" or "5GiB"',
                )
            ]
        )
    return parsed


def write_model(
    weights: SavedWeights,
    target: Path,
    *,
    max_shard_bytes: int,
    tied: Mapping[str, str],
    notes: Mapping[str, str],
    write_more: Callable[[Path], None],
    say: Callable[[str], None],
) -> None:
    """Write `weights` into `target`, to be read by `from_pretrained` or any reader of safetensors. Collective.

    Files are written into a folder inside, and take their places when all are complete: an error on any process leaves
    a model that was in `target` as it was. Its files that the new one does not have are removed, other files stay. On
    processes that do not see the main process' folder, which is on another machine's disk then, the main process
    writes: the others send it one tensor after another.

    Args:
        weights: what is written.
        target: made if it is missing.
        max_shard_bytes: of one file; a larger tensor has a file to itself.
        tied: name → the name whose tensor it shares. Only the latter is stored; the file's metadata keep the pair, as
            the safetensors library does.
        notes: further metadata of the files.
        write_more: called on the main process with the folder that takes further files.
        say: prints a line, on the main process only.

    Raises:
        CheckpointError: on every process, where one cannot write.
        LoopError: a tensor has no elements.
    """
    layout = all_or_none(lambda: _plan(weights, max_shard_bytes, tied, notes))
    if weights.in_ranges:
        agree_on([layout])
    draft = on_main(lambda: open_draft(target / "weights", sum(layout.sizes.values())))
    try:
        on_main(lambda: create_files(draft, [layout]))
        is_shared = not weights.in_ranges or is_one_folder(draft)
        if not is_shared:
            say(f"save_model: {target} is on no file system that all processes share, so the main process writes alone")
        fragments = weights.fragments() if is_shared else weights.whole()
        counts = all_or_none(lambda: _write(draft, fragments, layout))
        written: Tensor = collectives.reduce(counts, "sum") if weights.in_ranges else counts
        on_main(lambda: _complete(draft, target, layout, written, write_more))
    finally:
        if collectives.process_index() == 0:
            discard_draft(draft)


def whole_tensors(weights: SavedWeights) -> dict[str, Tensor]:
    """Copies in host memory, in the types that are stored, on the main process; for what is small. Collective."""
    types = {description.name: description.dtype for description in weights.descriptions}
    is_main = collectives.process_index() == 0
    return {
        fragment.name: fragment.values.reshape(fragment.shape).to("cpu", types[fragment.name], copy=True)
        for fragment in weights.whole()
        if is_main
    }


def _plan(weights: SavedWeights, max_shard_bytes: int, tied: Mapping[str, str], notes: Mapping[str, str]) -> Layout:
    empty = [description for description in weights.descriptions if 0 in description.shape]
    if empty:
        raise LoopError(
            f"save_model: {empty[0].name!r} has no elements (shape {empty[0].shape}), and a saved model without its "
            "values looks like a whole one.\nIf it is meant to be empty, make it a buffer with persistent=False."
        )
    return plan_layout(weights.descriptions, "", max_shard_bytes=max_shard_bytes, tied=tied, notes=notes)


def _write(draft: Path, fragments: Iterable[Fragment], layout: Layout) -> Tensor:
    """For each place, the elements that this process wrote."""
    rows = {key: row for row, key in enumerate(layout.places)}
    counts = torch.zeros(len(rows), dtype=torch.int64)
    error: Exception | None = None
    with open_writer(draft) as writer:
        for fragment in fragments:  # to the last, after an error too: others may be sending theirs
            begin, end = fragment.written
            if error is None and begin < end:
                try:
                    writer.write(fragment, layout.places[WEIGHT, fragment.name], summed=False)
                    counts[rows[WEIGHT, fragment.name]] += end - begin
                except Exception as caught:  # noqa: BLE001 - raised below
                    error = caught
        if error is not None:
            raise error
        writer.sync()
    return counts


def _complete(draft: Path, target: Path, layout: Layout, written: Tensor, write_more: Callable[[Path], None]) -> None:
    refuse_gaps(layout, written)
    if layout.index is not None:
        write_text(draft / INDEX_NAME, layout.index)
    write_more(draft)
    names = [path.name for path in sorted(draft.iterdir()) if not path.name.startswith(".")]
    for name in names:
        sync_file(draft / name)  # what `write_more` wrote too
    _publish(draft, target, names)


def _publish(draft: Path, target: Path, names: list[str]) -> None:
    """Give complete files their places. A reader sees the old model's weights or the new one's, never a mixture."""
    names.sort(key=lambda name: name == INDEX_NAME)  # after its shards
    old = {path.name for path in target.iterdir() if is_weight_file(path.name)}
    if INDEX_NAME in old and len(old.intersection(names)) > 1:
        # As many shards as before, under the same names: without its index, a half-renamed set is no model.
        (target / INDEX_NAME).unlink()
    for name in names:
        (draft / name).replace(target / name)
    for name in sorted(old.difference(names), key=lambda name: name != INDEX_NAME):  # the index before its shards
        (target / name).unlink(missing_ok=True)
    sync_folder(target)
