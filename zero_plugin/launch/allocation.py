"""Fill in what SLURM or MPI knows of the machines, where `zero-plugin launch` runs inside a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Entry, Origin, Path
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.probe.scheduler import Allocation, find_allocation

__all__ = ["fill_from_job"]

_JOB: Final = "the job"


def fill_from_job(
    document: Document, environ: Mapping[str, str], rendezvous_endpoint: str | None = None
) -> tuple[Document, list[str]]:
    """Take number of machines, this one's rank and the meeting point from the job around this launcher.

    A flag wins over the job; so does a file, but for its `machine_rank`, which all machines read alike.

    Args:
        document: checked.
        environ: this process's environment.
        rendezvous_endpoint: `--rdzv_endpoint`, where it was given: the machines then meet there.

    Returns:
        The document, and what there is to say of it.

    Raises:
        ConfigError: the job would start several runs of one, or waits for machines on which nothing was started.
    """
    job = find_allocation(environ)
    typed = document.launch.get("num_machines")
    if job is None or (typed is not None and typed.origin.kind in ("flag", "code") and typed.value == 1):
        return document, []
    if problems := list(_problems(document, job)):
        raise ConfigError(problems)
    if job.machines == 1:
        return document, []
    known: dict[str, tuple[Any, str]] = {"num_machines": (job.machines, job.sources["machines"])}
    if document.launch.value("rdzv_backend") in (None, AUTO, "static"):
        known["machine_rank"] = (job.machine_rank, job.sources["rank"])
    if job.main_address and not rendezvous_endpoint:
        known["main_process_ip"] = (job.main_address, f"the first of {job.sources['address']}")
        known["main_process_port"] = (job.port, "derived from the job's number")
    filled: dict[Path, Entry] = {}
    said = []
    for key, (value, source) in known.items():
        entry = document.launch.get(key)
        gives_way = key == "machine_rank" and entry is not None and entry.origin.kind == "file"
        if entry is None or entry.value in (None, AUTO) or gives_way:
            filled[key,] = Entry(value, Origin("rule", source, f"of {_JOB}"))
        if gives_way and entry is not None and entry.value not in (None, AUTO, value):
            said.append(f"machine_rank: {entry.value} at {entry.origin.where} gives way to {value}, from {source}")
    document = replace(document, launch=document.launch.replace(filled))
    return replace(document, notes=check_document(document)), said


def _problems(document: Document, job: Allocation) -> Iterator[Problem]:
    typed = document.launch.get("num_machines")
    where, machines = job.sources["machines"], f"{job.machines} machine{'s' if job.machines > 1 else ''}"
    if job.machine_rank is None:
        fix = (
            "Write `srun --ntasks-per-node=1 zero-plugin launch …`; or add --num_machines 1, to use this machine alone."
        )
        yield Problem(where, "", f"this job has {machines}, and the launcher was started on one of them only", fix)
    elif job.launchers_here > 1:
        fix = (
            "Start one on each machine (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), which then starts the "
            "processes; or start the script itself that often, without zero-plugin launch. For separate runs add "
            "--num_machines 1."
        )
        yield Problem(where, "", f"{_JOB} started {job.launchers_here} launchers on this machine", fix)
    elif typed is not None and typed.value not in (None, AUTO, job.machines):
        message = f"{typed.value}, but {_JOB} started this on {machines} ({where})"
        fix = "Delete it; or add --num_machines 1, for a separate run on each machine."
        yield Problem(typed.origin.where, "num_machines", message, fix)
