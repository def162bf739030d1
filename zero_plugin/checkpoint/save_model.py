"""Write a model's tensors as a Hugging Face model folder: safetensors, in shards where they are large."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from zero_plugin.checkpoint.durable import sync_folder, write_text
from zero_plugin.checkpoint.safetensors_file import DTYPE_NAMES, write_file
from zero_plugin.errors import ConfigError, LoopError, Problem

__all__ = ["INDEX_NAME", "SINGLE_NAME", "parse_size", "write_model_folder"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
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


def write_model_folder(
    tensors: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    max_shard_size: int | str = "10GB",
    tied: Mapping[str, str] | None = None,
    may_be_empty: Collection[str] = (),
) -> list[Path]:
    """Write `tensors` into `folder`, to be read by `from_pretrained` or any reader of safetensors.

    One process calls it. At most one shard of tensors is held in memory. All files are written under other names, and
    take theirs when all are complete: an error on the way leaves a model that was in the folder as it was. Files of an
    earlier model that the new one does not have are removed, other files are left alone.

    Args:
        tensors: name and tensor, whole, on any device; a name occurs once.
        folder: made if it is missing.
        max_shard_size: bytes of one file (`parse_size`); a larger tensor has a file to itself.
        tied: name → the name whose tensor it shares. Only the latter is stored; the file's metadata keep the pair, as
            the safetensors library does.
        may_be_empty: names whose tensors rightly have no elements.

    Returns:
        The weight files in order, then the index if there is one.

    Raises:
        LoopError: a tensor has no elements, a dtype has no place in the format, a name occurs twice, or a tied name's
            tensor never came.
        ConfigError: `max_shard_size` is not a size.
    """
    limit, tied, folder = parse_size(max_shard_size), tied or {}, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names: list[list[str]] = []  # of each shard
    drafts: list[Path] = []
    total = 0
    try:
        for shard in _cut_into_shards(tensors, limit, tied, may_be_empty):
            draft = folder / f".writing-{len(drafts) + 1:05d}.safetensors"
            drafts.append(draft)
            pairs = {alias: kept for alias, kept in tied.items() if kept in shard and alias != kept}
            write_file(draft, shard, {**pairs, "format": "pt"})
            names.append(list(shard))
            total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
            del shard  # else it lives on while the next one is collected
        if len(drafts) == 1:
            final = [SINGLE_NAME]
        else:
            final = [f"model-{number:05d}-of-{len(drafts):05d}.safetensors" for number in range(1, len(drafts) + 1)]
            weight_map = {name: file for file, shard_names in zip(final, names, strict=True) for name in shard_names}
            drafts.append(folder / ".writing-index.json")
            final.append(INDEX_NAME)
            write_text(drafts[-1], json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
        return _publish(folder, drafts, final)
    finally:
        for draft in folder.glob(".writing-*"):  # also what an earlier run, killed here, left
            draft.unlink()


def _cut_into_shards(
    tensors: Iterable[tuple[str, Tensor]], limit: int, tied: Mapping[str, str], may_be_empty: Collection[str]
) -> Iterable[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    stored: set[str] = set()
    for name, tensor in tensors:
        if tied.get(name, name) != name:
            continue
        if tensor.numel() == 0 and name not in may_be_empty:
            raise LoopError(
                f"save_model: {name!r} has no elements (shape {tuple(tensor.shape)}): at ZeRO stage 3 its data lie "
                "with all processes. Save through accelerator.save_model or accelerator.get_state_dict"
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise LoopError(f"save_model: {name!r} is {tensor.dtype}, which safetensors files cannot hold; convert it")
        if name in stored:
            raise LoopError(f"save_model: {name!r} occurs twice among the model's tensors")
        stored.add(name)
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + tensor_bytes > limit:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor.detach().cpu()
        shard_bytes += tensor_bytes
    lost = sorted(f"{alias!r} → {kept!r}" for alias, kept in tied.items() if kept not in stored)
    if lost:
        raise LoopError(f"save_model: tied to a tensor that is not among the model's: {', '.join(lost)}")
    yield shard


def _publish(folder: Path, drafts: list[Path], final: list[str]) -> list[Path]:
    """Give the drafts their names. A reader sees the old model or the new one, never a mixture."""
    old = {p.name for p in folder.iterdir() if p.name in (SINGLE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(p.name)}
    if INDEX_NAME in old and len(old.intersection(final)) > 1:
        # As many shards as before, under the same names: without its index, a half-renamed set is no model.
        (folder / INDEX_NAME).unlink()
    for draft, name in zip(drafts, final, strict=True):
        draft.replace(folder / name)
    for name in sorted(old.difference(final), key=lambda name: name != INDEX_NAME):  # the index before its shards
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    return [folder / name for name in final]
