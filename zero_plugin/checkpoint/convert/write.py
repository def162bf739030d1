"""Writes the result of a conversion: into a draft first, which gets the final name when it is complete.

The result is a Hugging Face model folder, one safetensors file, a checkpoint of this package, from which `load_state`
resumes, or DeepSpeed's universal checkpoint, which its engine loads with `checkpoint: {load_universal: true}`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.checkpoint.convert.source import Source, Stored
from zero_plugin.checkpoint.disk import sync
from zero_plugin.checkpoint.objects import encode_nested
from zero_plugin.checkpoint.publish import discard_draft, open_draft, publish_draft
from zero_plugin.checkpoint.save import complete_draft
from zero_plugin.checkpoint.summary import recognise
from zero_plugin.checkpoint.tensor_files import Description, Layout, create_files, plan_layout, write_fragments
from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT, Fragment
from zero_plugin.tensors.safetensors_files import SINGLE_NAME

Progress = Callable[[int], None]  # called with the number of bytes written since its last call

_SMALL_BYTES: Final = 2**24  # disk space for everything except tensors
_ENDLESS: Final = 2**63
_ORIGIN_KEYS: Final = ("versions", "processes")  # keys of a source's origin that the manifest also has at its top level
_MODEL_FILE: Final = "mp_rank_00_model_states.pt"  # the name that DeepSpeed's stages 0 to 2 look for
_MODEL_FILE_STAGE_3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"
# Files that are copied along with a model's weights: configuration and tokenizer.
_CONFIGURATION: Final = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


@contextmanager
def new_folder(target: Path, tensor_bytes: int, *, overwrite: bool) -> Iterator[Path]:
    """Make a draft folder next to `target`. It becomes `target` at the end, or is removed on failure.

    Args:
        target: the folder to make.
        tensor_bytes: how many bytes of tensors the caller is going to write.
        overwrite: replace an existing checkpoint or model. Folders with other contents are never replaced.

    Raises:
        CheckpointError: `target` exists, its disk has too little space, or it cannot be written.
    """
    refuse_existing(target, overwrite=overwrite)
    draft = open_draft(target, tensor_bytes + _SMALL_BYTES)
    older = target.with_name(f".{target.name}.older")
    try:
        yield draft
        if target.is_dir():
            target.rename(older)
        publish_draft(draft, target)
    except BaseException:
        discard_draft(draft)
        if older.is_dir() and not target.is_dir():
            older.rename(target)
        raise
    shutil.rmtree(older, ignore_errors=True)


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise the error of `new_folder` for an existing target. With `overwrite`, any file may be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already.\nName another place, or replace it with --overwrite.")
    if target.is_dir() and recognise(target) is None:
        raise CheckpointError(
            f"{target} is neither a checkpoint nor a model, so --overwrite does not remove it.\nName another folder."
        )


def _plan(source: Source, tensors: Mapping[tuple[str, str], Stored], max_shard_bytes: int) -> Layout:
    described = [Description(kind, name, stored.dtype, stored.shape) for (kind, name), stored in tensors.items()]
    tied, kind = source.tied, source.model_class
    return plan_layout(described, max_shard_bytes=max_shard_bytes, tied=tied, model_class=kind)


def _write_tensors(draft: Path, layout: Layout, tensors: Mapping[tuple[str, str], Stored], progress: Progress) -> str:
    """Write the tensor files, with no more than a staging buffer in memory. Return the text of `write_fragments`."""

    def fragments() -> Iterator[Fragment]:
        for key, place in layout.places.items():
            start = 0
            for part in tensors[key].parts:
                yield Fragment(*key, place.shape, start, part, (0, part.numel()))
                start += part.numel()

    create_files(draft, [layout])
    return write_fragments(draft, [(fragments(), layout)], progress)


def copy_configuration(source: Path, draft: Path) -> None:
    """Copy the configuration files of a model and its tokenizer, if any."""
    found = sorted({path for pattern in _CONFIGURATION for path in source.glob(pattern) if path.is_file()})
    for path in found:
        shutil.copyfile(path, draft / path.name)


def write_model(
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    overwrite: bool,
    progress: Progress,
) -> None:
    """Write a folder for `from_pretrained`: the weights and the source's configuration files.

    Args:
        source: the source.
        target: the folder.
        dtype: dtype for floating weights; fp32 takes the fp32 master weights. None keeps the stored dtypes.
        max_shard_bytes: the largest size of a weight file.
        overwrite: see `new_folder`.
        progress: called with the number of bytes written since its last call.

    Raises:
        CheckpointError: see `new_folder`.
    """
    tensors = {(WEIGHT, name): stored for name, stored in source.weights(dtype).items()}
    layout = _plan(source, tensors, max_shard_bytes)
    with new_folder(target, sum(layout.sizes.values()), overwrite=overwrite) as draft:
        _write_tensors(draft, layout, tensors, progress)
        copy_configuration(source.folder, draft)
        if dtype is not None and (draft / "config.json").is_file():
            _name_dtype(draft / "config.json", str(dtype).removeprefix("torch."))


def write_single_file(
    source: Source, target: Path, *, dtype: torch.dtype | None, overwrite: bool, progress: Progress
) -> None:
    """Write all weights into one safetensors file. See `write_model` for arguments and errors."""
    if target.suffix != ".safetensors" or target.is_dir():
        raise CheckpointError(f"{target} is to be one file.\nGive it a name that ends with .safetensors.")
    refuse_existing(target, overwrite=overwrite)
    folder = target.with_name(f".{target.name}.folder")
    write_model(source, folder, dtype=dtype, max_shard_bytes=_ENDLESS, overwrite=True, progress=progress)
    (folder / SINGLE_NAME).replace(target)
    sync(target.parent)
    shutil.rmtree(folder)


def _name_dtype(config: Path, name: str) -> None:
    content = json.loads(config.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"}.intersection(content) or {"dtype"}:  # the latter before transformers 4.56
        content[key] = name
    config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(
    source: Source, target: Path, *, max_shard_bytes: int, overwrite: bool, progress: Progress
) -> None:
    """Write a checkpoint of one model. On failure, nothing is left.

    The checkpoint contains no random states, DataLoader states or registered objects, since the other formats have
    none. `load_state` logs that.

    Args:
        source: the model and its states.
        target: the folder of the checkpoint.
        max_shard_bytes: the largest size of a weight file in bytes.
        overwrite: replace an existing checkpoint; see `new_folder`.
        progress: called with the number of bytes written since its last call.

    Raises:
        CheckpointError: see `new_folder`.
    """
    layout = _plan(source, source.tensors, max_shard_bytes)
    model = {"class": source.model_class, "extra_states": source.extra_states, "optimizer": source.optimizer}
    training = {
        "models": [model],
        "waiting_optimizers": [],
        "schedules": list(source.scheduler_states),
        "loaders": [],
        "iteration": 0,
    }
    with new_folder(target, sum(layout.sizes.values()), overwrite=overwrite) as draft:
        written = _write_tensors(draft, layout, source.tensors, progress)
        copy_configuration(source.folder, draft)
        about = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **{key: source.origin.get(key) for key in _ORIGIN_KEYS},
            "imported": dict(source.origin),
        }
        trees: dict[str, Any] = {"training": training, "random": [], "objects": None}
        encoded = {stem: encode_nested(tree, what=stem) for stem, tree in trees.items()}
        complete_draft(draft, about, [layout], [written], encoded)


def write_universal(source: Source, target: Path, *, overwrite: bool, progress: Progress) -> None:
    """Write `latest_universal` and the folder that it names, for every ZeRO stage and number of processes.

    Each trained parameter has a folder with its fp32 value and states (DeepSpeed,
    `checkpoint/universal_checkpoint.py` and `runtime/zero/stage3.py`, `load_hp_checkpoint_state`). DeepSpeed reads
    no other tensors. Frozen weights and buffers are in the file with the counters, under `module`.

    Args:
        source: the source; it must have an optimizer.
        target: the folder for `engine.load_checkpoint`.
        overwrite: see `new_folder`.
        progress: called with the number of bytes written since its last call.

    Raises:
        CheckpointError: the source has no optimizer; also see `new_folder`.
    """
    record = source.optimizer
    if record is None or not record["groups"]:
        raise CheckpointError(
            f"{source.folder} holds no optimizer, and DeepSpeed's universal checkpoints need one.\n"
            "Export the weights with --to hf."
        )
    trained = _by_parameter(source, record)
    others = {name: stored for name, stored in source.weights(None).items() if name not in trained}
    total = sum(stored.size for states in trained.values() for stored in states.values())
    total += sum(stored.size for stored in others.values())
    steps = {name: numbers["step"] for name, numbers in record["scalars"].items() if "step" in numbers}
    with new_folder(target, total, overwrite=overwrite) as draft:
        name = f"global_step{record['applied_steps']}"
        zero = draft / name / "zero"
        for parameter, states in trained.items():
            folder = zero / parameter
            folder.mkdir(parents=True)
            for key, stored in states.items():
                torch.save({"param": stored.unpartitioned(), "cat_dim": 0}, folder / f"{key}.pt")
                progress(stored.size)
            if parameter in steps:
                torch.save(torch.tensor(float(steps[parameter])), folder / "step.pt")
        torch.save(_optimizer_state(record, steps), zero / "optimizer_state.pt")
        counters = _counters(source, record)
        module = {key: stored.unpartitioned() for key, stored in others.items()}
        torch.save({**counters, "module": module}, draft / name / _MODEL_FILE)
        torch.save({**counters, "module": {}}, draft / name / _MODEL_FILE_STAGE_3)
        (draft / "latest_universal").write_text(name, encoding="utf-8")
    _note_losses(source, record, others)


def _by_parameter(source: Source, record: Mapping[str, Any]) -> dict[str, dict[str, Stored]]:
    trained: dict[str, dict[str, Stored]] = {}
    for name in (name for group in record["groups"] for name in group["params"]):
        master_weight = source.tensors.get((MASTER_WEIGHT, name)) or source.tensors[WEIGHT, name]
        trained[name] = {"fp32": master_weight.cast(torch.float32)}
    for (kind, name), stored in source.tensors.items():
        if kind not in (WEIGHT, MASTER_WEIGHT) and name in trained:
            trained[name][kind] = stored
    return trained


def _optimizer_state(record: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of `optimizer_state.pt` in a universal checkpoint."""
    groups = [{**group["settings"], "params": [index]} for index, group in enumerate(record["groups"])]
    step = torch.tensor(float(max(steps.values(), default=record["applied_steps"])))
    return {
        "ds_version": version("deepspeed"),
        "param_groups": groups,  # stages 1 and 2 read these
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},  # stage 3 reads these
    }


def _counters(source: Source, record: Mapping[str, Any]) -> dict[str, Any]:
    scheduler = dict(source.scheduler_states[0]) if source.scheduler_states else None
    if scheduler is not None and "last_epoch" in scheduler:
        scheduler.setdefault("last_batch_iteration", scheduler["last_epoch"] - 1)  # DeepSpeed counts from -1
    return {
        "global_steps": record["applied_steps"],
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "lr_scheduler": scheduler,
        "ds_version": version("deepspeed"),
    }


def _note_losses(source: Source, record: Mapping[str, Any], others: Mapping[str, Stored]) -> None:
    if others:
        source.notes.append(
            f"{len(others)} frozen weights and buffers: DeepSpeed reads none from a universal checkpoint. Load them "
            f"with model.load_state_dict(torch.load('{_MODEL_FILE}')['module'], strict=False)"
        )
    if len(source.scheduler_states) > 1:
        source.notes.append(f"{len(source.scheduler_states) - 1} more schedules: an engine has one")
    if any((record.get("further_states") or {}).values()):
        source.notes.append("entries of the optimizer's state that are not tensors or numbers of parameters")
    if record["loss_scale"]:
        source.notes.append("the loss scale: an engine begins with its configuration's")
    if len(record["groups"]) > 1:
        source.notes.append(
            "several parameter groups at stage 3: DeepSpeed gives all groups the first group's settings and one step "
            "count, which trains differently; stages 1 and 2 keep the groups separate"
        )
