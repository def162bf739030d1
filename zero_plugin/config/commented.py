"""Launch configs as people keep them: a comment beside each key, and older ones rewritten.

A launch config as a person keeps it: beside each key one sentence on what it does and what is legal.

Rewrites an existing configuration in today's keys; what it says of a run stays.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import find_problems
from zero_plugin.config.document import Document, accelerate_values, yaml_text
from zero_plugin.config.launch_settings import COMPILER_KEYS, REFUSED_KEYS, SAYS_NOTHING, WITHOUT_MEANING
from zero_plugin.config.parse_json import looks_like_json
from zero_plugin.config.read import parse_file, read_document
from zero_plugin.config.tree import KeyPath, Tree
from zero_plugin.errors import ConfigError, MachineError

_HEAD: Final = "# Check it: zero-plugin check FILE.  Run it: zero-plugin launch --config_file FILE train.py\n"
_FOLDER: Final = "folder on a local NVMe disk; not NFS, not a RAM disk"
_HOSTS: Final = "in DeepSpeed's notation, e.g. host-1@host-2:0,2"

_LAUNCH: Final[Mapping[str, str]] = {
    "distributed_type": "DEEPSPEED (ZeRO), MULTI_GPU or MULTI_CPU (DDP), NO (one process), TPU or XLA",
    "mixed_precision": "no (fp32), bf16, fp16, or auto: the best of these that the device has",
    "num_processes": "on all machines together, 1 or more; on GPUs one for each",
    "num_machines": "1 or more",
    "min_machines": "how few of them go on when others are lost, with more accumulation; needs c10d and max_restarts",
    "machine_rank": "this machine's number, from 0; another on each machine",
    "main_process_ip": "address of machine 0, as the others reach it",
    "main_process_port": "port on machine 0, up to 65535; with one machine, 0 takes a free one",
    "rdzv_backend": "how the machines meet: static (each knows its number), c10d, etcd or etcd-v2",
    "rdzv_conf": "torchrun's options for that: key=value,key=value",
    "same_network": "true or false: whether all machines are in one local network; for Accelerate, it changes nothing",
    "gpu_ids": 'all, or numbers such as "0,1" among the GPUs that the launcher sees',
    "use_cpu": "true or false: train on the CPU, also beside GPUs",
    "enable_cpu_affinity": "true or false: bind each process to the cores of the memory near its GPU",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS, 1 or more; without it, cores over processes",
    "max_restarts": "how often all workers start again after a crash, 0 or more",
    "auto_resume": "true or false: accelerator.resume() loads the newest checkpoint at the first start too",
    "grace_period": "seconds that the processes have to save and end after SIGTERM, 0 or more",
    "monitor_interval": "seconds between two looks at the workers, above 0",
    "log_dir": "folder for a log of each worker; without it, none",
    "tee": "streams of the workers to show and log: 0 none, 1 output, 2 errors, 3 both, or by worker: 0:3,1:2",
    "role": "torchrun's name for the workers, default where none is given",
    "debug": "true or false: show the launcher's own log",
    "gpu_memory": "of one device, that the plan of stage auto may count on, e.g. 24GiB; without it, what is free",
    "host_memory": "of one machine, that the plan of stage auto may count on; without it, what is free",
    "main_training_function": "function that TPU and notebook launches call",
    "scheduler_counts": "steps: a schedule advances once per optimizer step; processes, as if absent: once for each",
    "compute_environment": "LOCAL_MACHINE, for Accelerate",
}
_TRAINING: Final[Mapping[str, str]] = {
    "deepspeed_config_file": "a DeepSpeed JSON; a relative path starts at this file's folder",
    "deepspeed_hostfile": "file with a line `host slots=GPUS` for each machine",
    "deepspeed_multinode_launcher": "standard (torchrun on each), pdsh, openmpi, slurm, nossh, mvapich, mpich, impi",
    "deepspeed_exclusion_filter": f"hosts and slots to leave out, {_HOSTS}",
    "deepspeed_inclusion_filter": f"hosts and slots to use, {_HOSTS}",
    "deepspeed_moe_layer_cls_names": "classes of mixture-of-experts layers, beside those found by their structure",
    "zero3_init_flag": "true or false: from_pretrained builds models partitioned at stage 3",
    "zero_stage": "split over the processes: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too; or auto",
    "offload_optimizer_device": "where optimizer states live: none (the GPU), cpu, nvme (at stage 3), or auto",
    "offload_optimizer_nvme_path": _FOLDER,
    "offload_param_device": "where weights live: none (the GPU), at stage 3 also cpu or nvme, or auto",
    "offload_param_nvme_path": _FOLDER,
    "zero3_save_16bit_model": "true, false or auto: gather whole 16-bit weights when a model is saved at stage 3",
    "gradient_accumulation_steps": "micro-batches per optimizer step, 1 or more; auto: what the script says, else 1",
    "gradient_clipping": "largest gradient norm, 0 for none; auto: what the script says, else none",
}
_COMPILING: Final[Mapping[str, str]] = {
    "dynamo_backend": "no, or torch.compile's compiler: INDUCTOR, CUDAGRAPHS, AOT_EAGER, …",
    "dynamo_mode": "default, reduce-overhead or max-autotune",
    "dynamo_use_fullgraph": "true or false: refuse a model that breaks into several graphs",
    "dynamo_use_dynamic": "true or false: compile for changing shapes; without it, torch finds out",
    "dynamo_use_regional_compilation": "true or false: compile repeated blocks once for all",
}
COMMENTS: Final[Mapping[KeyPath, str]] = {
    **{(key,): comment for key, comment in _LAUNCH.items()},
    ("dynamo_config",): "how models are compiled",
    **{("dynamo_config", key): comment for key, comment in _COMPILING.items()},
    ("deepspeed_config",): "how it trains: the fields below, and any key of a DeepSpeed JSON",
    **{("deepspeed_config", key): comment for key, comment in _TRAINING.items()},
}


def config_text(values: Mapping[str, Any], file: Path) -> str:
    """A launch config in Accelerate's layout as text: JSON where the file's name says so, else commented YAML."""
    if file.suffix == ".json":
        return json.dumps(values, indent=2) + "\n"
    return _HEAD + yaml_text(values, COMMENTS)


def write_config(values: Mapping[str, Any], file: Path) -> None:
    """Check a launch config in Accelerate's layout and write it, whole or not at all.

    Raises:
        ConfigError: the values have problems; nothing is written.
        MachineError: the file cannot be written.
    """
    text = config_text(values, file)
    document = read_document(file, content=text.encode())
    errors = [problem for problem in find_problems(document) if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    replace_file(file, text)


def replace_file(file: Path, text: str) -> None:
    """Write a text file so that whoever reads it, also after a crash, finds the old text or the new, whole.

    Raises:
        MachineError: the file cannot be written.
    """
    target = Path(os.path.realpath(file))  # a link stays a link
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(f"{file} cannot be written: {reason}. Name another with --config_file.") from None


_FILE: Final = "deepspeed_config_file"


def update_config(file: Path) -> list[str]:
    """Rewrite a launch config or a DeepSpeed JSON under the keys of today, each value where it belongs.

    A launch config gets a sentence beside each key; other comments are lost, so the old file is kept beside it. Keys
    that ask for nothing here (`fsdp_config: {}`) go. A DeepSpeed JSON that is named stays named.

    Returns:
        What to tell the user.

    Raises:
        ConfigError: the file cannot be read or has problems; nothing is written.
        MachineError: a file cannot be written.
    """
    document = read_document(file)
    found = find_problems(document)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    old = file.read_text(encoding="utf-8-sig")
    text = _updated_text(document, file, old)
    if text == old:
        return [f"{file}: nothing to change"]
    backup = _free_name(file)
    try:
        shutil.copy2(file, backup)
    except OSError as error:
        raise MachineError(f"{backup} cannot be written: {error.strerror}. Copy {file} to where it can.") from None
    replace_file(file, text)
    return [*(problem.headline for problem in found), f"written: {file}", f"as it was, with its comments: {backup}"]


def _updated_text(document: Document, file: Path, old: str) -> str:
    root = parse_file(file, []).plain()
    if not len(document.launch) and "deepspeed_config" not in root:
        values = document.to_deepspeed()
        return json.dumps(values, indent=2) + "\n" if looks_like_json(old) else yaml_text(values)
    return config_text(_launch_values(document, root), file)


def _launch_values(document: Document, root: Mapping[str, Any]) -> dict[str, Any]:
    """The document in Accelerate's layout; what comes from the DeepSpeed JSON that `root` names stays there."""
    launch = document.launch.where(lambda path, _: not _asks_for_nothing(document.launch, path[0]))
    named = (root.get("deepspeed_config") or {}).get(_FILE) or root.get(_FILE)
    if named in (None, "none", "None"):
        return accelerate_values(launch, document.deepspeed)
    typed_here = document.deepspeed.where(lambda _, entry: entry.origin.where.startswith(f"{document.sources[0]}:"))
    values = accelerate_values(launch, typed_here)
    training = {_FILE: named, **values.pop("deepspeed_config", {})}
    if not typed_here.has_section("zero_optimization", "stage"):
        training.pop("zero_stage", None)  # the JSON says it
    return {**values, "deepspeed_config": training}


def _asks_for_nothing(launch: Tree, name: str) -> bool:
    if name in REFUSED_KEYS:
        return name != "compute_environment"  # the check would have refused it, had it an effect
    leaves = [entry.value for path, entry in launch.entries.items() if path[0] == name]
    return name in {*WITHOUT_MEANING, *COMPILER_KEYS} and all(value in SAYS_NOTHING for value in leaves)


def _free_name(file: Path) -> Path:
    """`FILE.bak`, or with a number where that is an older one."""
    names = (file.with_name(f"{file.name}.bak{number}") for number in ("", *range(2, 1000)))
    return next(name for name in names if not name.exists())
