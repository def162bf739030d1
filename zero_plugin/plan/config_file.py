"""A plan as a ready configuration, and the plan of one before any worker runs.

A chosen way of training as a ready configuration: a launch YAML, or a DeepSpeed JSON.

Makes the plan of a configuration before any worker runs, from the model's sizes and stated or measured machines.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.document import Document, yaml_text
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.resolve.facts import Facts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import Entry, Origin
from zero_plugin.errors import ConfigError, MachineError, Problem
from zero_plugin.plan.fields import BY_FORMULA, TRACED, Planned, fill_fields, open_fields
from zero_plugin.plan.model_source import ModelSource, open_model
from zero_plugin.plan.search import Candidate
from zero_plugin.plan.situation import Cluster, Setup, name_setup

_OPTIMIZERS: Final = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
_SUFFIXES: Final = (".yaml", ".yml", ".json")


def write_plan(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> None:
    """Write `config_text` as a new file.

    Raises:
        ConfigError: see `config_text`; or the file exists.
        MachineError: it cannot be written.
    """
    text = config_text(file, candidate, cluster, optimizer, nvme_path)
    if file.exists():
        raise ConfigError([Problem("--output", "", f"{file} exists", "Name a new file, or remove that one.")])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.\nName another file.") from None


def config_text(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> str:
    """The configuration in the language that the file's suffix says.

    Args:
        file: `.yaml`, `.yml` or `.json`.
        candidate: what to train like.
        cluster: on what.
        optimizer: DeepSpeed's name in lower case; one that it does not know is left to the script.
        nvme_path: folder for NVMe offload.

    Raises:
        ConfigError: another suffix; training without ZeRO, which a DeepSpeed JSON cannot say; NVMe without a folder.
    """
    setup = candidate.setup
    if file.suffix not in _SUFFIXES:
        raise _problem(f"{file} is neither YAML nor JSON", f"Name it {file.stem}.yaml or {file.stem}.json.")
    if "nvme" in (setup.offload_optimizer, setup.offload_param) and not nvme_path:
        raise ConfigError([Problem("--nvme_path", "", "is missing for a plan with NVMe", "Name the drive's folder.")])
    if file.suffix != ".json":
        head = f"# {name_setup(setup)}, as planned by `zero-plugin plan`.\n"
        head += f"#   zero-plugin launch --config_file {file.name} train.py\n"
        if setup.activation_checkpointing:
            head += "# The script switches activation checkpointing on: model.gradient_checkpointing_enable().\n"
        return head + yaml_text(launch_values(setup, cluster, optimizer, nvme_path))
    if setup.stage is None:
        raise _problem("a DeepSpeed JSON cannot say training without ZeRO", "Name a .yaml, or give --zero_stage auto.")
    return json.dumps(training_values(setup, cluster, optimizer, nvme_path), indent=2) + "\n"


def launch_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None = None) -> dict[str, Any]:
    """The keys of a launch config in Accelerate's layout, the training part under `deepspeed_config`."""
    kind = "DEEPSPEED" if setup.stage is not None else "MULTI_GPU" if cluster.processes > 1 else "NO"
    values: dict[str, Any] = {
        "distributed_type": kind,
        "num_processes": cluster.processes,
        **({"num_machines": cluster.nodes} if cluster.nodes > 1 else {}),
        "mixed_precision": setup.precision,
    }
    if setup.stage is None:
        return {**values, "deepspeed_config": {"gradient_accumulation_steps": setup.accumulation}}
    return {**values, "deepspeed_config": training_values(setup, cluster, optimizer, nvme_path)}


def training_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None = None) -> dict[str, Any]:
    """The same as a DeepSpeed configuration; what depends on the loop says `auto`."""
    values: dict[str, Any] = {
        "train_batch_size": setup.micro_batch * setup.accumulation * cluster.processes,
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "gradient_clipping": "auto",
    }
    if setup.precision != "no":
        values[setup.precision] = {"enabled": True}
    if optimizer in _OPTIMIZERS:
        values["optimizer"] = {"type": _OPTIMIZERS[optimizer], "params": {"lr": "auto", "weight_decay": "auto"}}
    return {**values, "zero_optimization": _zero(setup, nvme_path)}


def _zero(setup: Setup, nvme_path: str | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.stage}
    if setup.stage:  # what stage 0 does not read, the check warns about
        zero["reduce_bucket_size"] = setup.reduce_bucket
    if setup.stage in (1, 2):
        zero["allgather_bucket_size"] = (
            setup.allgather_bucket + setup.allgather_bucket % 2
        )  # DeepSpeed takes no odd one
    if setup.stage in (2, 3):
        zero["overlap_comm"] = setup.overlap_comm
    if setup.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": setup.prefetch_bucket,
            "stage3_param_persistence_threshold": setup.persistence_threshold,
            "sub_group_size": setup.sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    for what, device in (("optimizer", setup.offload_optimizer), ("param", setup.offload_param)):
        if device != "none":
            path = {"nvme_path": nvme_path} if device == "nvme" else {}
            share = {"ratio": setup.ratio} if what == "optimizer" and setup.ratio != 1.0 else {}
            zero[f"offload_{what}"] = {"device": device, **path, "pin_memory": setup.pin_memory, **share}
    return zero


def _problem(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("--output", "", message, fix)])


def waits_for_plan(document: Document, facts: Facts) -> bool:
    """Whether a field is open that only a plan can fill."""
    asked = open_fields(document.deepspeed, facts)
    if not asked:
        return False
    missing = resolve(document, replace(facts, complete=False)).missing
    return any(path in missing for path in asked)


def plan_before_run(
    document: Document, facts: Facts, source: ModelSource, sequence_length: int | None, cluster: Cluster
) -> Planned:
    """What a plan chooses for the fields that wait for it, the micro-batch among them where it is open.

    Args:
        document: what was asked for, with ZeRO.
        facts: of the machine, and whatever else is known of the run, not complete; where a GPU's memory is stated, the
            workers have GPUs.
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        cluster: the machines.

    Raises:
        ConfigError: there is no such model, nothing fits, or what is fixed excludes itself.
    """
    if launch_settings(document).gpu_memory is not None:
        facts = replace(facts, machine=replace(facts.machine, accelerator="cuda", fp16=True))
    resolved = resolve(document, replace(facts, complete=False))
    model, activations = open_model(source, sequence_length, resolved.precision)
    margin = TRACED if activations.source.startswith("traced") else BY_FORMULA
    return fill_fields(document, resolved, facts, model, activations, cluster, margin=margin)


def lay_plan(document: Document, planned: Planned) -> Document:
    """The document with what the plan has chosen in the place of what was open, each value with its reason."""
    chosen = {path: Entry(value, Origin("rule", "the plan", reason)) for path, (value, reason) in planned.items()}
    return replace(document, deepspeed=document.deepspeed.replace(chosen))
