"""Decide a launch on the machines of a hostfile, through DeepSpeed's launcher, to its exact command."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from zero_plugin.config.document import Document
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, to_environment
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_cpu, launch_settings
from zero_plugin.config.resolve.resolve import config_for_scripts
from zero_plugin.config.tree import AUTO
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem
from zero_plugin.launch import remote_worker
from zero_plugin.launch.command import foreign_variables, program_arguments
from zero_plugin.launch.remote_worker import Parcel, choose_variables, pack
from zero_plugin.launch.report import find_program_problems, where
from zero_plugin.launch.spec import Host, Hosts, LaunchSpec, Rendezvous, Request, Setting, filter_hosts, read_hostfile
from zero_plugin.machine.hardware import port_is_free

_CHOOSE_HOSTS: Final = ("pdsh", "slurm", "nossh")  # the others start on all of the hostfile
_PORT: Final = 29500
_ONLY_TORCHRUN: Final = (
    "max_restarts",
    "min_machines",
    "grace_period",
    "log_dir",
    "tee",
    "role",
    "monitor_interval",
    "rdzv_backend",
    "rdzv_conf",
)
_NONE: Final = (None, "", "none")
_BREAKS_PDSH: Final = frozenset(" \t\n\"'\\$`&|;<>()*?[]{}~#!")


def asked_launcher(settings: LaunchSettings) -> str:
    """`standard` for torchrun on every machine, else the name that DeepSpeed's launcher takes."""
    hostfile = settings.deepspeed_hostfile not in _NONE
    launcher = settings.deepspeed_multinode_launcher or ("pdsh" if hostfile else "standard")
    return launcher if hostfile or settings.num_machines > 1 else "standard"


def build_hosts_spec(request: Request) -> LaunchSpec:
    """Decide everything about a launch on the machines of a hostfile.

    Args:
        request: whose hostfile it is.

    Raises:
        ConfigError: everything about the hostfile, the filters and the launch that cannot run, at once.
    """
    document, settings, program = request.document, request.settings, request.program
    launcher = asked_launcher(settings)
    hosts, problems = _chosen_hosts(document, settings, launcher)
    problems += [*find_program_problems(program), *_problems(document, settings, launcher, request.endpoint)]
    if program.kind == "function":
        fix = "Launch a script; or delete the hostfile, and call this on every machine with its own node_rank."
        problems.append(Problem("launch", "", f"{launcher} cannot send a function to other machines", fix))
    if hosts:
        problems += _counts(document, settings, launcher, hosts)
    on_cpu = asks_for_cpu(settings)
    resolved = request.resolve(
        problems,
        accelerator="cpu" if on_cpu else "cuda",
        processes=settings.num_processes or sum(len(host.slots) for host in hosts) or 1,
    )
    each = _fewer_slots(settings, launcher, hosts)
    if each is not None:
        hosts = [replace(host, slots=host.slots[:each]) for host in hosts]
    environment = {
        ENVIRONMENT_VARIABLE: Setting(
            to_environment(document, sum(len(host.slots) for host in hosts)), "the configuration"
        ),
        **foreign_variables(document, settings, resolved, {}, on_cpu=on_cpu),
    }
    if settings.num_cpu_threads_per_process is not None:
        threads, why = str(settings.num_cpu_threads_per_process), where(document, "num_cpu_threads_per_process")
        environment["OMP_NUM_THREADS"] = Setting(threads, why)
    if on_cpu:
        environment["DS_ACCELERATOR"] = Setting("cpu", "for DeepSpeed: the run is on the CPU")
    sent, kept = choose_variables(request.environ)
    address, port = _meeting(settings, hosts)
    config = config_for_scripts(document, resolved) if request.on_deepspeed else None
    parcel = Parcel(
        folder=str(Path.cwd()),
        arguments=program_arguments(program),
        environment={**sent, **{name: setting.value for name, setting in environment.items()}},
        deepspeed_config=config,
        main_address=address,
        main_port=port,
        bind=settings.enable_cpu_affinity,
    )
    run = f"zero_plugin_{uuid.uuid4().hex}"
    runner = _runner(settings, launcher, hosts, each)
    command = (*runner, str(Path(remote_worker.__file__)), run, pack(parcel))
    rendezvous = Rendezvous("static", f"{address}:{port}", run)
    return replace(
        request.spec(len(hosts[0].slots), len(hosts), rendezvous, environment),
        deepspeed_config=config,
        hosts=Hosts(launcher, tuple(hosts), command, run, tuple(sent), kept),
    )


def _chosen_hosts(document: Document, settings: LaunchSettings, launcher: str) -> tuple[list[Host], list[Problem]]:
    file = settings.deepspeed_hostfile
    if file is None or file in _NONE:
        key = "deepspeed_hostfile"
        fix = (
            "Name a file with a line `host slots=GPUS` for each machine; or write deepspeed_multinode_launcher: "
            "standard, and start the same command on every machine with its own machine_rank."
        )
        return [], [Problem(where(document, "deepspeed_multinode_launcher"), key, f"missing for {launcher}", fix)]
    hosts, problems = read_hostfile(file)
    for way in ("inclusion", "exclusion"):
        key = f"deepspeed_{way}_filter"
        text = getattr(settings, key)
        if text in _NONE or problems:
            continue
        if launcher not in _CHOOSE_HOSTS:
            fix = "Delete it, and name in the hostfile what is to be used."
            problems.append(Problem(where(document, key), key, f"{launcher} uses all of the hostfile", fix, show(text)))
        else:
            hosts, problems = filter_hosts(hosts, text, exclude=way == "exclusion", where=where(document, key), key=key)
            problems += _slurm_slots(hosts, launcher, where(document, key), key)
    return hosts, problems


def _slurm_slots(hosts: list[Host], launcher: str, place: str, key: str) -> Iterator[Problem]:
    """srun counts tasks: it cannot take slot 1 without slot 0, nor fewer tasks on one host than on another."""
    if launcher == "slurm" and len({host.slots for host in hosts} | {tuple(range(len(hosts[0].slots)))}) > 1:
        yield Problem(place, key, "slurm takes the first slots, and as many on each host", "Filter whole hosts.")


def _problems(document: Document, settings: LaunchSettings, launcher: str, endpoint: str | None) -> Iterator[Problem]:
    defaults = launch_settings(Document())
    for key in _ONLY_TORCHRUN:
        if getattr(settings, key) != getattr(defaults, key):
            fix = "Delete it, or write deepspeed_multinode_launcher: standard."
            message = f"has no effect with {launcher}: it is torchrun's"
            yield Problem(where(document, key), key, message, fix, show(getattr(settings, key)))
    if endpoint:
        fix = "Give --main_process_ip and --main_process_port in its place."
        yield Problem("--rdzv_endpoint", "", f"has no effect with {launcher}: it is torchrun's", fix)
    if settings.gpu_ids != "all":
        fix = "Delete it; deepspeed_inclusion_filter chooses slots, as in host-1@host-2:0,2."
        yield Problem(where(document, "gpu_ids"), "gpu_ids", "says nothing of other machines", fix, settings.gpu_ids)
    if launcher == "pdsh":
        broken = next((p for p in (sys.executable, remote_worker.__file__) if _BREAKS_PDSH.intersection(p)), None)
        if broken is not None:
            fix = "Install Python and this package at a path without spaces, or use another launcher."
            yield Problem("deepspeed_multinode_launcher", "", f"pdsh cannot start {broken}: its path breaks apart", fix)
    typed = document.launch.get("machine_rank")
    rank = None if typed is None or typed.value is AUTO else typed.value
    if launcher != "nossh" and rank:
        message = f"{rank}, but {launcher} starts all machines from one, and would start the run again from here"
        yield Problem(where(document, "machine_rank"), "machine_rank", message, "Start the command on machine 0 alone.")
    elif launcher == "nossh" and rank is None:
        fix = "Give --machine_rank, this machine's line in the hostfile, from 0."
        yield Problem("launch", "machine_rank", "missing: nossh starts this machine only", fix)
    port = settings.main_process_port or _PORT
    if launcher == "nossh" and rank == 0 and not port_is_free(port):
        message = f"port {port} is taken on this machine"
        yield Problem(
            where(document, "main_process_port"), "main_process_port", message, "Give another to all machines."
        )


def _counts(document: Document, settings: LaunchSettings, launcher: str, hosts: list[Host]) -> Iterator[Problem]:
    """Numbers that are written twice, here and in the hostfile."""
    count, slots = len(hosts), sum(len(host.slots) for host in hosts)
    typed = document.launch.value("num_machines")
    if typed not in (None, AUTO, count):
        message = f"{typed}, but the hostfile and its filters leave {count}"
        yield Problem(where(document, "num_machines"), "num_machines", message, f"Write {count}, or delete it.")
    rank = settings.machine_rank
    if launcher == "nossh" and rank >= count:
        message = f"{rank}, but there are {count} hosts, and ranks count from 0"
        yield Problem(where(document, "machine_rank"), "machine_rank", message, f"Write at most {count - 1}.")
    wanted = settings.num_processes
    if wanted not in (None, slots) and _fewer_slots(settings, launcher, hosts) is None:
        message = f"{wanted}, but the hostfile and its filters leave {slots} slots on {count} hosts"
        fix = f"Write {slots}, or delete it; fewer can be had by fewer slots in the hostfile."
        yield Problem(where(document, "num_processes"), "num_processes", message, fix)


def _fewer_slots(settings: LaunchSettings, launcher: str, hosts: list[Host]) -> int | None:
    """How many slots of each host are used, where num_processes asks for fewer than all; None for all, and for none."""
    wanted = settings.num_processes
    if wanted in (None, sum(len(host.slots) for host in hosts)) or launcher not in _CHOOSE_HOSTS:
        return None
    if settings.deepspeed_inclusion_filter not in _NONE or settings.deepspeed_exclusion_filter not in _NONE:
        return None
    each, rest = divmod(wanted or 0, len(hosts))
    return each if not rest and 0 < each <= min(len(host.slots) for host in hosts) else None


def _meeting(settings: LaunchSettings, hosts: list[Host]) -> tuple[str, int]:
    return settings.main_process_ip or hosts[0].name, settings.main_process_port or _PORT


def _runner(settings: LaunchSettings, launcher: str, hosts: list[Host], each: int | None) -> list[str]:
    """DeepSpeed's launcher and its options."""
    hostfile = str(Path(settings.deepspeed_hostfile or "").absolute())
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile]
    if launcher == "nossh":
        command += ["--no_ssh", "--node_rank", str(settings.machine_rank)]
    else:
        # One host left by a filter would else be taken for this machine; each host has been tried by ssh before.
        command += ["--launcher", launcher, "--force_multi", "--no_ssh_check"]
    command += ["--no_local_rank"]
    if settings.deepspeed_inclusion_filter not in _NONE:
        command += ["--include", str(settings.deepspeed_inclusion_filter).replace(" ", "")]
    elif settings.deepspeed_exclusion_filter not in _NONE:
        command += ["--exclude", str(settings.deepspeed_exclusion_filter).replace(" ", "")]
    elif each is not None:
        command += ["--num_gpus", str(each)]
    address, port = _meeting(settings, hosts)
    if settings.main_process_ip or launcher != "pdsh":  # else DeepSpeed asks the first host for its address
        command += ["--master_addr", address]
    return [*command, "--master_port", str(port), *([] if settings.debug else ["--log_level", "error"])]
