"""The command line of one worker, and the torchrun command line that equals a whole launch."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from zero_plugin.launch import worker
from zero_plugin.launch.foreign import CONFIG_FILE_VARIABLE
from zero_plugin.launch.spec import LaunchSpec, Program

__all__ = ["shell_script", "torchrun_command", "worker_command"]

_PREFIX = {"script": [], "module": ["-m"], "executable": ["--no_python"]}


def worker_command(program: Program) -> list[str]:
    """What each worker process executes; output is unbuffered, as torchrun's workers have it."""
    return [sys.executable, "-u", *_worker_arguments(program)]


def torchrun_command(spec: LaunchSpec) -> list[str]:
    """A torchrun command that starts the same workers, given the same environment."""
    meeting = spec.rendezvous
    options = {key: value for key, value in meeting.options.items() if key != "rank"}
    return [
        "torchrun",
        f"--nnodes={spec.machines}",
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
        *_worker_arguments(spec.program),
    ]


def shell_script(spec: LaunchSpec) -> str:
    """The launch as shell lines: every added variable with its reason, then the command. Running it runs the job."""
    lines = [f"# configuration: {', '.join(spec.document.sources) or 'flags and defaults only'}"]
    if spec.local_processes_reason:
        lines.append(f"# processes on this machine: {spec.local_processes} ({spec.local_processes_reason})")
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
    return "\n".join([*lines, shlex.join(torchrun_command(spec))])


def _worker_arguments(program: Program) -> list[str]:
    return [str(Path(worker.__file__)), *_PREFIX[program.kind], program.name, *program.arguments]
