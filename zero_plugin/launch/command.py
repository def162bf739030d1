"""The command lines of a worker and of a launch, and the variables that scripts of other layers read.

By these variables scripts built on Accelerate or transformers' Trainer learn what the configuration says.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config import keys
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import asked_compiler
from zero_plugin.config.parallelism import sequence_parallel_size
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import printable
from zero_plugin.launch import worker
from zero_plugin.launch.spec import LOOPBACK, Hosts, LaunchSpec, Program, Request, Setting
from zero_plugin.machine.hardware import number_ranges

# What the environment may hold of an earlier launch, and what turns it off: how a run is split is never left open.
_OFF: Final[Mapping[str, str]] = {
    **{
        f"ACCELERATE_USE_{what}": "false"
        for what in ("CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
    },
    "ACCELERATE_CONFIG_DS_FIELDS": "",
}


def foreign_variables(request: Request, resolved: Resolved, *, on_cpu: bool) -> dict[str, Setting]:
    """What Accelerate 1.15 and transformers 5.23 read, as far as the configuration says it; what it leaves open stays.

    Args:
        request: what was requested.
        resolved: the same, resolved as far as it can be before a run.
        on_cpu: whether the run is on the CPU.
    """
    found = dict(_of_any_run(request, resolved))
    if request.on_deepspeed:
        found.update(_of_zero(request, resolved))
    elif on_cpu:  # beside ZeRO, Accelerate would take it for a run without
        found[keys.LAUNCH["use_cpu"].variable] = Setting("true", "the run is on the CPU")
    for name, off in _OFF.items():
        if name not in found and request.environ.get(name, off).lower() not in ("", "0", off):
            found[name] = Setting(off, "not what the configuration requests")
    return found


def overridden(added: Mapping[str, Setting], environ: Mapping[str, str]) -> list[str]:
    """A sentence for each of Accelerate's variables that the environment holds otherwise than the configuration."""
    return [
        f"{name}={environ[name]}, from your environment, gives way to {setting.value or 'nothing'}: {setting.reason}"
        for name, setting in added.items()
        if name.startswith("ACCELERATE_") and environ.get(name, setting.value) != setting.value
    ]


def _of_any_run(request: Request, resolved: Resolved) -> Iterator[tuple[str, Setting]]:
    document = request.document
    if resolved.precision != "no" or document.launch.value("mixed_precision") is not None:
        entry = resolved.launch.entries[("mixed_precision",)]
        yield keys.LAUNCH["mixed_precision"].variable, Setting(resolved.precision, str(entry.origin))
    yield from _typed(document, keys.ACCUMULATION)
    shared = document.deepspeed.get(*keys.SEQUENCE.path)
    if shared is not None and sequence_parallel_size(document) > 1:  # by its own way, which needs a loop of its own
        yield "ACCELERATE_USE_PARALLELISM_CONFIG", Setting("true", str(shared.origin))
        yield keys.SEQUENCE.variable, Setting(_text(shared.value), str(shared.origin))
    for name, entry in asked_compiler(document.launch).items():
        yield f"ACCELERATE_DYNAMO_{name.upper()}", Setting(_text(entry.value), str(entry.origin))
    if request.settings.debug:
        yield "ACCELERATE_DEBUG_MODE", Setting("true", _launch_origin(document, "debug"))


def _of_zero(request: Request, resolved: Resolved) -> Iterator[tuple[str, Setting]]:
    document, settings = request.document, request.settings
    yield "ACCELERATE_USE_DEEPSPEED", Setting("true", "the configuration requests ZeRO")
    stage = resolved.tree.entries[keys.STAGE.path]
    if any(path in resolved.missing for path in keys.PLACEMENT):  # such a script stops at that value, and must
        why = "the plan waits for the model: a script that is built on Accelerate needs --model at the launch"
        yield keys.STAGE.variable, Setting("auto", why)
        return
    yield keys.STAGE.variable, Setting(str(stage.value), str(stage.origin))
    yield from _typed(document, keys.CLIPPING)
    for device, folder in ((keys.OFFLOAD_OPTIMIZER, keys.OPTIMIZER_FOLDER), (keys.OFFLOAD_PARAM, keys.PARAM_FOLDER)):
        yield from _typed(document, device)
        if document.deepspeed.value(*device.path) == "nvme":  # Accelerate's own launcher loses the folder
            yield from _typed(document, folder)
    if resolved.zero_stage == 3:
        partitioned = settings.zero3_init_flag is not False
        partitions = keys.LAUNCH["zero3_init_flag"]
        yield partitions.variable, Setting(str(partitioned).lower(), _launch_origin(document, partitions.name))
        yield from _typed(document, keys.SAVE_16BIT)
    if settings.deepspeed_moe_layer_cls_names:
        names = ",".join(settings.deepspeed_moe_layer_cls_names)
        layers = keys.LAUNCH["deepspeed_moe_layer_cls_names"]
        yield layers.variable, Setting(names, _launch_origin(document, layers.name))


def _typed(document: Document, key: keys.Key) -> Iterator[tuple[str, Setting]]:
    """A training key that holds a value; what is open is the script's."""
    entry = document.deepspeed.get(*key.path)
    if entry is not None and entry.value is not None and entry.value is not AUTO:
        yield key.variable, Setting(_text(entry.value), str(entry.origin))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _launch_origin(document: Document, key: str) -> str:
    entry = document.launch.get(key)
    return "its default" if entry is None else str(entry.origin)


# torch has the workers of an elastic restart meet in the store of those before them, where they read the addresses of
# processes that are gone. This has it make another one.
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_PREFIX = {"script": [], "module": ["-m"], "executable": ["--no_python"]}


def program_arguments(program: Program) -> list[str]:
    """The program and its arguments, as the worker file takes them."""
    return [*_PREFIX[program.kind], program.name, *program.arguments]


def worker_command(spec: LaunchSpec, python: str = sys.executable) -> list[str]:
    """What each worker process executes; output is unbuffered, as torchrun's workers have it."""
    return [python, "-u", *_worker_arguments(spec)]


def _worker_arguments(spec: LaunchSpec) -> list[str]:
    cores = ["--cores", "/".join(map(number_ranges, spec.cores))] if spec.cores else []
    replicas: list[str] = []
    if spec.replicas is not None:
        count = "all" if spec.replicas.count is None else str(spec.replicas.count)
        replicas = ["--replicas", count, spec.replicas.function]
    return [str(Path(worker.__file__)), *cores, *replicas, *program_arguments(spec.program)]


def torchrun_command(spec: LaunchSpec) -> list[str]:
    """A torchrun command that starts the same workers, given the same environment."""
    rendezvous, settings = spec.rendezvous, spec.settings
    least = f"{settings.min_machines}:" if settings.min_machines is not None else ""
    conf = ",".join(f"{key}={value}" for key, value in rendezvous.options.items() if key != "rank")
    options = {
        "nnodes": f"{least}{spec.machines}",
        "nproc-per-node": spec.local_processes,
        "max-restarts": settings.max_restarts,
        "rdzv-backend": rendezvous.backend,
        "rdzv-endpoint": rendezvous.endpoint,
        "rdzv-id": rendezvous.run_id,
        "rdzv-conf": conf or None,
        "node-rank": rendezvous.options.get("rank"),
        "local-addr": rendezvous.local_address,
        "role": settings.role if settings.role != "default" else None,
        "monitor-interval": settings.monitor_interval if settings.monitor_interval != 0.1 else None,
        "log-dir": settings.log_dir,
        "tee": spec.streams if spec.streams != "0" else None,
    }
    on_one_machine = rendezvous.backend == LOOPBACK
    return [
        *(["python", "-m", "zero_plugin.launch.rendezvous"] if on_one_machine else ["torchrun"]),
        *(f"--{name}={value}" for name, value in options.items() if value is not None),
        *_worker_arguments(spec),
    ]


def shell_script(spec: LaunchSpec) -> str:
    """The launch as shell lines: every added variable with its reason, then the command. Running it runs the job."""
    lines = [_comment(f"configuration: {', '.join(spec.document.sources) or 'flags and defaults only'}")]
    if spec.hosts is not None:
        return "\n".join([*lines, *_hosts_script(spec, spec.hosts)])
    if spec.local_processes_reason:
        lines.append(f"# processes on this machine: {spec.local_processes} ({spec.local_processes_reason})")
    if spec.cores_reason:
        lines.append(f"# {describe_cores(spec)}")
    for name, setting in spec.environment.items():
        lines += [_comment(setting.reason), f"export {name}={_quoted(setting.value)}"]
    if spec.deepspeed_config is not None:
        lines += [
            "# the DeepSpeed JSON for scripts built on Accelerate or transformers; a launch removes it at its end",
            f"export {keys.CONFIG_FILE.variable}=$(mktemp)",
            f'cat > "${keys.CONFIG_FILE.variable}" <<"END"',
            json.dumps(spec.deepspeed_config, indent=2),
            "END",
        ]
    if spec.settings.max_restarts and spec.machines > 1:
        lines += [
            "# else the workers of a restart would meet in the store of those before them",
            f"export {NEW_STORE}=1",
        ]
    if spec.replicas is None and spec.machines == 1:
        lines.append("# torchrun, with a rendezvous that no other machine reaches")
    # the worker of a TPU starts by itself, without restarts
    command = torchrun_command(spec) if spec.replicas is None else worker_command(spec, "python")
    return "\n".join([*lines, " ".join(map(_quoted, command))])


def _comment(text: str) -> str:
    return printable(f"# {text}").replace("\n", "\n# ")


def _quoted(word: str) -> str:
    """The word as a shell reads it; one that would steer a terminal is spelled as bash's `$'…'`."""
    quoted = shlex.quote(word)
    if printable(quoted) == quoted:
        return quoted
    word = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{printable(word)}'"


def describe_cores(spec: LaunchSpec) -> str:
    """What each process is bound to, and why."""
    return f"cores of each process: {' / '.join(map(number_ranges, spec.cores)) or 'all'} ({spec.cores_reason})"


def _hosts_script(spec: LaunchSpec, hosts: Hosts) -> list[str]:
    """The shell script that `--dry_run` prints: the command of DeepSpeed's launcher.

    The last argument of that command is encoded, so comments before it list the program and the environment variables.
    """
    slots = ", ".join(f"{host.name} ({len(host.slots)})" for host in hosts.hosts)
    return [
        f"# started by {hosts.launcher} through DeepSpeed's launcher, on {slots}",
        _comment(f"every process runs: {' '.join(map(_quoted, program_arguments(spec.program)))}"),
        *(_comment(f"with {name}: {setting.reason}") for name, setting in spec.environment.items()),
        f"# environment variables copied from this shell: {', '.join(hosts.sent) or 'none'}",
        f"(cd / && {' '.join(map(_quoted, hosts.command))})",
    ]
