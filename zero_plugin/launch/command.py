"""The command line of one worker, and the torchrun command line that equals a whole launch."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from zero_plugin.launch import worker
from zero_plugin.launch.affinity import core_ranges
from zero_plugin.launch.foreign import CONFIG_FILE_VARIABLE
from zero_plugin.launch.spec import LOOPBACK, Hosts, LaunchSpec, Program

__all__ = [
    "NEW_STORE",
    "program_arguments",
    "python_command",
    "shell_script",
    "tell_cores",
    "torchrun_command",
    "worker_command",
]

# torch has the workers of an elastic restart meet in the store of those before them, where they read the addresses of
# processes that are gone. This has it make another one.
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_PREFIX = {"script": [], "module": ["-m"], "executable": ["--no_python"]}


def worker_command(spec: LaunchSpec) -> list[str]:
    """What each worker process executes; output is unbuffered, as torchrun's workers have it."""
    return [sys.executable, "-u", *_worker_arguments(spec)]


def program_arguments(program: Program) -> list[str]:
    """The program and its arguments, as the worker file takes them."""
    return [*_PREFIX[program.kind], program.name, *program.arguments]


def python_command(spec: LaunchSpec) -> list[str]:
    """A command that starts the worker of a TPU by itself, without restarts, given the same environment."""
    return ["python", "-u", *_worker_arguments(spec)]


def torchrun_command(spec: LaunchSpec) -> list[str]:
    """A torchrun command that starts the same workers, given the same environment."""
    meeting = spec.rendezvous
    on_one_machine = meeting.backend == LOOPBACK
    options = {key: value for key, value in meeting.options.items() if key != "rank"}
    return [
        *(["python", "-m", "zero_plugin.launch.rendezvous"] if on_one_machine else ["torchrun"]),
        f"--nnodes={spec.machines if spec.min_machines is None else f'{spec.min_machines}:{spec.machines}'}",
        f"--nproc-per-node={spec.local_processes}",
        f"--max-restarts={spec.max_restarts}",
        f"--rdzv-backend={meeting.backend}",
        f"--rdzv-endpoint={meeting.endpoint}",
        f"--rdzv-id={meeting.run_id}",
        *([f"--rdzv-conf={','.join(f'{key}={value}' for key, value in options.items())}"] if options else []),
        *([f"--node-rank={meeting.options['rank']}"] if "rank" in meeting.options else []),
        *([f"--local-addr={meeting.local_address}"] if meeting.local_address else []),
        *([f"--role={spec.role}"] if spec.role != "default" else []),
        *([f"--log-dir={spec.log_dir}"] if spec.log_dir else []),
        *([f"--tee={spec.streams}"] if spec.streams != "0" else []),
        *_worker_arguments(spec),
    ]


def shell_script(spec: LaunchSpec) -> str:
    """The launch as shell lines: every added variable with its reason, then the command. Running it runs the job."""
    lines = [f"# configuration: {', '.join(spec.document.sources) or 'flags and defaults only'}"]
    if spec.hosts is not None:
        return "\n".join([*lines, *_hosts_script(spec, spec.hosts)])
    if spec.local_processes_reason:
        lines.append(f"# processes on this machine: {spec.local_processes} ({spec.local_processes_reason})")
    if spec.cores_reason:
        lines.append(f"# {tell_cores(spec)}")
    for name, setting in spec.environment.items():
        lines += [f"# {setting.reason}", f"export {name}={shlex.quote(setting.value)}"]
    if spec.deepspeed_config is not None:
        lines += [
            "# the DeepSpeed JSON for scripts built on Accelerate or transformers; a launch removes it at its end",
            f"export {CONFIG_FILE_VARIABLE}=$(mktemp)",
            f'cat > "${CONFIG_FILE_VARIABLE}" <<"END"',
            json.dumps(spec.deepspeed_config, indent=2),
            "END",
        ]
    if spec.max_restarts and spec.machines > 1:
        lines += [
            "# else the workers of a restart would meet in the store of those before them",
            f"export {NEW_STORE}=1",
        ]
    if spec.replicas is None and spec.machines == 1:
        lines.append("# torchrun, with a rendezvous that no other machine reaches")
    command = torchrun_command(spec) if spec.replicas is None else python_command(spec)
    return "\n".join([*lines, shlex.join(command)])


def tell_cores(spec: LaunchSpec) -> str:
    """What each process is bound to, and why."""
    return f"cores of each process: {' / '.join(map(core_ranges, spec.cores)) or 'all'} ({spec.cores_reason})"


def _hosts_script(spec: LaunchSpec, hosts: Hosts) -> list[str]:
    """DeepSpeed's launcher; what its last word holds is told before it."""
    slots = ", ".join(f"{host.name} ({len(host.slots)})" for host in hosts.hosts)
    return [
        f"# by {hosts.launcher}, from DeepSpeed's launcher, on {slots}",
        f"# every process runs: {shlex.join(program_arguments(spec.program))}",
        *(f"# with {name}: {setting.reason}" for name, setting in spec.environment.items()),
        f"# and, of this environment: {', '.join(hosts.sent) or 'nothing'}",
        f"(cd / && {shlex.join(hosts.command)})",
    ]


def _worker_arguments(spec: LaunchSpec) -> list[str]:
    cores = ["--cores", "/".join(map(core_ranges, spec.cores))] if spec.cores else []
    return [str(Path(worker.__file__)), *cores, *_replica_arguments(spec), *program_arguments(spec.program)]


def _replica_arguments(spec: LaunchSpec) -> list[str]:
    if spec.replicas is None:
        return []
    count = "all" if spec.replicas.count is None else str(spec.replicas.count)
    return ["--replicas", count, spec.replicas.function]
