"""Writes DeepSpeed's universal checkpoint, which its engine loads with `checkpoint: {load_universal: true}`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.checkpoint.convert.output import Progress, new_folder
from zero_plugin.checkpoint.convert.source import Source, Stored
from zero_plugin.checkpoint.durable import sync_file, write_text
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.fragments import MASTER, WEIGHT

__all__ = ["write_universal"]

_MODEL_FILE: Final = "mp_rank_00_model_states.pt"  # which stages 0 to 2 look for
_MODEL_FILE_STAGE_3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def write_universal(source: Source, target: Path, *, overwrite: bool, progress: Progress) -> None:
    """Write `latest_universal` and the folder that it names, for every ZeRO stage and number of processes.

    Of each trained parameter there is a folder with its 32-bit value and states (DeepSpeed,
    `checkpoint/universal_checkpoint.py` and `runtime/zero/stage3.py`, `load_hp_checkpoint_state`). DeepSpeed reads
    nothing else of the model: the frozen weights and buffers lie, under `module`, in the file of the counters.

    Args:
        source: what to write; with an optimizer.
        target: what `engine.load_checkpoint` is given.
        overwrite: see `new_folder`.
        progress: told the bytes that were written.

    Raises:
        CheckpointError: there is no optimizer in it; also see `new_folder`.
    """
    record = source.optimizer
    if record is None or not record["groups"]:
        raise CheckpointError(
            f"{source.folder} holds no optimizer, and DeepSpeed's universal checkpoints are for going on with one.\n"
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
                _save({"param": stored.whole(), "cat_dim": 0}, folder / f"{key}.pt")
                progress(stored.size)
            if parameter in steps:
                _save(torch.tensor(float(steps[parameter])), folder / "step.pt")
        _save(_optimizer_state(record, steps), zero / "optimizer_state.pt")
        counters = _counters(source, record)
        module = {key: stored.whole() for key, stored in others.items()}
        _save({**counters, "module": module}, draft / name / _MODEL_FILE)
        _save({**counters, "module": {}}, draft / name / _MODEL_FILE_STAGE_3)
        write_text(draft / "latest_universal", name)
    _note_losses(source, record, others)


def _by_parameter(source: Source, record: Mapping[str, Any]) -> dict[str, dict[str, Stored]]:
    trained: dict[str, dict[str, Stored]] = {}
    for name in (name for group in record["groups"] for name in group["params"]):
        master = source.tensors.get((MASTER, name)) or source.tensors[WEIGHT, name]
        trained[name] = {"fp32": master.cast(torch.float32)}
    for (kind, name), stored in source.tensors.items():
        if kind not in (WEIGHT, MASTER) and name in trained:
            trained[name][kind] = stored
    return trained


def _optimizer_state(record: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, Any]:
    groups = [{**group["settings"], "params": [index]} for index, group in enumerate(record["groups"])]
    step = torch.tensor(float(max(steps.values(), default=record["applied_steps"])))
    return {
        "ds_version": version("deepspeed"),
        "param_groups": groups,  # stages 1 and 2 take these
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},  # and stage 3 these
    }


def _counters(source: Source, record: Mapping[str, Any]) -> dict[str, Any]:
    schedule = dict(source.schedules[0]) if source.schedules else None
    if schedule is not None and "last_epoch" in schedule:
        schedule.setdefault("last_batch_iteration", schedule["last_epoch"] - 1)  # DeepSpeed's own count from -1
    return {
        "global_steps": record["applied_steps"],
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "lr_scheduler": schedule,
        "ds_version": version("deepspeed"),
    }


def _note_losses(source: Source, record: Mapping[str, Any], others: Mapping[str, Stored]) -> None:
    if others:
        source.notes.append(
            f"{len(others)} frozen weights and buffers: DeepSpeed reads none from such a checkpoint. Load them with "
            f"model.load_state_dict(torch.load('{_MODEL_FILE}')['module'], strict=False)"
        )
    if len(source.schedules) > 1:
        source.notes.append(f"{len(source.schedules) - 1} more schedules: an engine has one")
    if record["loss_scale"]:
        source.notes.append("the loss scale: an engine begins with its configuration's")
    if len(record["groups"]) > 1:
        source.notes.append(
            "several parameter groups at stage 3: DeepSpeed gives all the first one's settings and one step count, "
            "which trains differently; stages 1 and 2 keep them apart"
        )


def _save(content: Any, path: Path) -> None:
    torch.save(content, path)
    sync_file(path)
