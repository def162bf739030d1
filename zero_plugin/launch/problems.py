"""What cannot be launched here, although the configuration is right: the program, the machine, the meeting point."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zero_plugin.config.document import Document
from zero_plugin.config.files import nearest_file
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_cpu, asks_for_deepspeed
from zero_plugin.config.tree import AUTO, dotted
from zero_plugin.errors import Problem
from zero_plugin.launch.machine import Machine, port_is_free
from zero_plugin.launch.spec import Program

__all__ = ["STATIC_PORT", "find_log_problems", "find_problems", "find_program_problems", "obstacle", "where"]

STATIC_PORT: Final = 29500  # torch.distributed's own default: all machines must know it before they can talk
_MOST_PROCESSES: Final = 1024  # a slip of the keyboard must not exhaust the machine


def find_problems(
    document: Document,
    settings: LaunchSettings,
    program: Program,
    machine: Machine,
    *,
    gpus: int,
    endpoint: str | None,
) -> list[Problem]:
    """Everything that stands against this launch on this machine.

    Args:
        document: for where each setting was written.
        settings: the document's launch part.
        program: what the workers shall run.
        machine: what they will see.
        gpus: GPUs of this machine that the run may use; 0 for a run on the CPU.
        endpoint: `--rdzv_endpoint`, where it was given.
    """
    meeting = _meeting(settings, endpoint, document) if settings.num_machines > 1 else _port(settings)
    found = [
        *_gpus(settings, machine, document),
        *_processes(settings, gpus),
        *_of_a_notebook(settings, program),
        *meeting,
    ]
    problems = [Problem(where(document, key), key, message, fix) for key, message, fix in found]
    return [
        *find_program_problems(program),
        *_endpoint(settings, endpoint),
        *problems,
        *find_log_problems(document, settings),
        *_nvme_folders(document, settings),
    ]


def where(document: Document, key: str) -> str:
    """Where a launch key was written, as a person would say it."""
    entry = document.launch.get(key)
    return str(entry.origin) if entry else "launch"


_Found = Iterator[tuple[str, str, str]]  # key, what is wrong, what to write


def find_program_problems(program: Program) -> Iterator[Problem]:
    """A script that is no file, or a program that is not found."""
    if program.kind == "script" and not Path(program.name).is_file():
        yield Problem("command line", "", f"{program.name} is not a file", nearest_file(Path(program.name)))
    if program.kind == "executable" and shutil.which(program.name) is None:
        yield Problem("command line", "", f"{program.name} is not an executable here", "Name one that is on the PATH.")


def _endpoint(settings: LaunchSettings, endpoint: str | None) -> Iterator[Problem]:
    if endpoint and settings.num_machines == 1:
        fix = "Leave it out, or add --num_machines."
        yield Problem("--rdzv_endpoint", "", "has no effect: there is one machine", fix)


def _gpus(settings: LaunchSettings, machine: Machine, document: Document) -> _Found:
    kind = document.launch.get("distributed_type")
    if not machine.gpus and kind is not None and kind.value == "MULTI_GPU" and kind.origin.kind == "flag":
        yield "distributed_type", "there is no GPU here that torch can use", "Give --cpu in its place: DDP on the CPU."
    if settings.gpu_ids == "all" or asks_for_cpu(settings):
        return
    ids = settings.gpu_ids.split(",")
    known = [str(number) for number in range(machine.gpus)]
    unknown = [name for name in ids if name not in known]
    if unknown and not known:
        yield "gpu_ids", "there is no GPU here that torch can use", "Delete it, or add --cpu."
    elif unknown:
        fix = f"Write all, or some of {','.join(known)}: they count the GPUs that this process sees."
        yield "gpu_ids", f"{','.join(unknown)}: no GPU here has that number", fix
    elif len(set(ids)) < len(ids):
        yield "gpu_ids", f"{settings.gpu_ids} names a GPU twice", "Write each number once."


def _processes(settings: LaunchSettings, gpus: int) -> _Found:
    wanted, machines = settings.num_processes, settings.num_machines
    if wanted is None:
        return
    if gpus and wanted // machines > gpus:
        fix = f"Write at most {gpus * machines}, since each process has a GPU of its own; or add --cpu."
        yield "num_processes", f"{wanted // machines} processes on this machine, which has {gpus} usable GPUs", fix
    elif wanted // machines > _MOST_PROCESSES:
        fix = f"Write at most {_MOST_PROCESSES * machines}."
        yield "num_processes", f"{wanted // machines} processes are more than one machine can run", fix


def find_log_problems(document: Document, settings: LaunchSettings) -> Iterator[Problem]:
    """A folder for logs that cannot be made or written."""
    if settings.log_dir is not None and (blocked := obstacle(settings.log_dir)) is not None:
        message = f"{blocked} is no folder that can be written"
        yield Problem(where(document, "log_dir"), "log_dir", message, "Name a folder that can be made or written.")


def _of_a_notebook(settings: LaunchSettings, program: Program) -> _Found:
    if program.kind == "function" and settings.min_machines not in (None, settings.num_machines):
        fix = "Delete it, or start a script with `zero-plugin launch`."
        yield "min_machines", "processes that are copies of a notebook do not go on without a machine", fix


def _nvme_folders(document: Document, settings: LaunchSettings) -> Iterator[Problem]:
    if not asks_for_deepspeed(document, settings):
        return
    for offload in ("offload_optimizer", "offload_param"):
        section = ("zero_optimization", offload)
        entry = document.deepspeed.get(*section, "nvme_path")
        if document.deepspeed.value(*section, "device") != "nvme" or entry is None or not isinstance(entry.value, str):
            continue
        if (blocked := obstacle(entry.value)) is not None:
            message = f"{blocked} is no folder that can be written"
            fix = "Name a folder on a local NVMe disk that can be made or written."
            yield Problem(entry.origin.where, dotted((*section, "nvme_path")), message, fix)


def obstacle(folder: str | Path) -> Path | None:
    """What there is of `folder` already, if nothing can be made below that."""
    path = Path(folder)
    there = next((parent for parent in (path, *path.parents) if os.access(parent, os.F_OK)), Path())
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def _port(settings: LaunchSettings) -> _Found:
    port = settings.main_process_port
    if port and not port_is_free(port):
        yield "main_process_port", f"port {port} is taken on this machine", "Leave it out: a free one is then taken."


def _meeting(settings: LaunchSettings, endpoint: str | None, document: Document) -> _Found:
    if not endpoint and not settings.main_process_ip:
        fix = "Give --main_process_ip, machine 0's address, the same on each machine."
        yield "main_process_ip", "missing for several machines", fix
    if not endpoint and settings.main_process_port == 0:
        fix = "Give one port to all machines; 29500 is taken where none is given."
        yield "main_process_port", "0, but all machines must know it", fix
    if settings.rdzv_backend == "static" and document.launch.value("machine_rank") in (None, AUTO):
        fix = f"Give --machine_rank, this machine's number, 0 to {settings.num_machines - 1}."
        yield "machine_rank", "missing for several machines", fix
    port = settings.main_process_port or STATIC_PORT
    if settings.rdzv_backend == "static" and not endpoint and not settings.machine_rank and not port_is_free(port):
        fix = "Give another --main_process_port to all machines."
        yield "main_process_port", f"port {port} is taken on this machine, which is machine 0", fix
