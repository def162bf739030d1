"""Command lines of a worker and of a launch, and the environment variables that other layers read.

Scripts built on Accelerate or transformers' Trainer read the configuration from these variables.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config import keys
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document
from zero_plugin.config.launch_settings import asked_compiler
from zero_plugin.config.parallelism import sequence_parallel_size
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import printable
from zero_plugin.launch import worker
from zero_plugin.launch.spec import LOOPBACK, Hosts, LaunchSpec, Program, Request, Setting
from zero_plugin.machine.hardware import number_ranges

# Variables that an earlier launch may have left in the environment, and the value that turns each one off. The
# configuration alone decides how a run is partitioned, so an inherited value must not stay.
_OFF: Final[Mapping[str, str]] = {
    **{
        f"ACCELERATE_USE_{what}": "false"
        for what in ("CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
    },
    "ACCELERATE_CONFIG_DS_FIELDS": "",
}


def foreign_variables(request: Request, resolved: Resolved, *, on_cpu: bool) -> dict[str, Setting]:
    """Build the variables that Accelerate 1.15 and transformers 5.23 read, for all keys that the configuration sets.

    Args:
        request: what was requested.
        resolved: the request, resolved as far as possible before a run.
        on_cpu: whether the run is on the CPU.
    """
    found = dict(_of_any_run(request, resolved))
    if request.on_deepspeed:
        found.update(_of_zero(request, resolved))
    elif on_cpu:  # not with ZeRO: Accelerate would then run without ZeRO
        found[keys.LAUNCH["use_cpu"].variable] = Setting("true", "the run is on the CPU")
    for name, off in _OFF.items():
        if name not in found and request.environ.get(name, off).lower() not in ("", "0", off):
            found[name] = Setting(off, "not what the configuration requests")
    return found


def overridden(added: Mapping[str, Setting], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of Accelerate's variables that differs between environment and configuration."""
    return [
        f"Overriding {name}={environ[name]} from your environment with {setting.value or 'nothing'}: {setting.reason}"
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
    if shared is not None and sequence_parallel_size(document) > 1:  # Accelerate's own way, with a loop of its own
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
    if any(path in resolved.missing for path in keys.PLACEMENT):
        # A script built on Accelerate stops at the value `auto`. It must: the plan is still missing.
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
    """Yield a training key's variable if the key has a value. The script decides open keys."""
    entry = document.deepspeed.get(*key.path)
    if entry is not None and entry.value is not None and entry.value is not AUTO:
        yield key.variable, Setting(_text(entry.value), str(entry.origin))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _launch_origin(document: Document, key: str) -> str:
    entry = document.launch.get(key)
    return "its default" if entry is None else str(entry.origin)


# After an elastic restart, torch lets the new workers reuse the previous workers' store. They would read addresses of
# ended processes there. This variable makes torch create a new store.
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_PREFIX = {"script": [], "module": ["-m"], "executable": ["--no_python"]}


def program_arguments(program: Program) -> list[str]:
    """Return the program and its arguments in the worker file's format."""
    return [*_PREFIX[program.kind], program.name, *program.arguments]


def worker_command(spec: LaunchSpec, python: str = sys.executable) -> list[str]:
    """Return the command of each worker process. Output is unbuffered, as with torchrun."""
    return [python, "-u", *_worker_arguments(spec)]


def _worker_arguments(spec: LaunchSpec) -> list[str]:
    cores = ["--cores", "/".join(map(number_ranges, spec.cores))] if spec.cores else []
    replicas: list[str] = []
    if spec.replicas is not None:
        count = "all" if spec.replicas.count is None else str(spec.replicas.count)
        replicas = ["--replicas", count, spec.replicas.function]
    return [str(Path(worker.__file__)), *cores, *replicas, *program_arguments(spec.program)]


def torchrun_command(spec: LaunchSpec) -> list[str]:
    """Return a torchrun command that starts the same workers, given the same environment."""
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


def shell_script(spec: LaunchSpec, *, with_document: bool = True) -> str:
    """Return the launch as a runnable shell script: every added variable with its reason, then the command.

    Args:
        spec: the launch.
        with_document: False for people, who know the configuration: its encoded text is left out, so the script does
            not run.
    """
    lines = [_comment(f"configuration: {', '.join(spec.document.sources) or 'flags and defaults only'}")]
    if spec.hosts is not None:
        return "\n".join([*lines, *_hosts_script(spec, spec.hosts)])
    if spec.local_processes_reason:
        lines.append(f"# processes on this machine: {spec.local_processes} ({spec.local_processes_reason})")
    if spec.cores_reason:
        lines.append(f"# {describe_cores(spec)}")
    for name, setting in spec.environment.items():
        is_shown = with_document or name != ENVIRONMENT_VARIABLE
        value = _quoted(setting.value) if is_shown else "…  # --verbose, or a pipe, shows it"
        lines += [_comment(setting.reason), f"export {name}={value}"]
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
            "# without this, restarted workers would meet in the store of the previous workers",
            f"export {NEW_STORE}=1",
        ]
    if spec.replicas is None and spec.machines == 1:
        lines.append("# torchrun, with a rendezvous that no other machine reaches")
    # a TPU's worker starts without torchrun, so there are no restarts
    command = torchrun_command(spec) if spec.replicas is None else worker_command(spec, "python")
    return "\n".join([*lines, " ".join(map(_quoted, command))])


def _comment(text: str) -> str:
    return printable(f"# {text}").replace("\n", "\n# ")


def _quoted(word: str) -> str:
    """Quote a word for a shell. A word with terminal control characters becomes bash's `$'…'`."""
    quoted = shlex.quote(word)
    if printable(quoted) == quoted:
        return quoted
    word = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{printable(word)}'"


def describe_cores(spec: LaunchSpec) -> str:
    """Describe the cores that each process is bound to, and why."""
    return f"cores of each process: {' / '.join(map(number_ranges, spec.cores)) or 'all'} ({spec.cores_reason})"


def _hosts_script(spec: LaunchSpec, hosts: Hosts) -> list[str]:
    """Return the lines of the `--dry_run` script after its first: comments, then the command of DeepSpeed's launcher.

    The last argument of that command is encoded, so the comments list the program and the environment variables.
    """
    slots = ", ".join(f"{host.name} ({len(host.slots)})" for host in hosts.hosts)
    return [
        f"# started by {hosts.launcher} through DeepSpeed's launcher, on {slots}",
        _comment(f"every process runs: {' '.join(map(_quoted, program_arguments(spec.program)))}"),
        *(_comment(f"with {name}: {setting.reason}") for name, setting in spec.environment.items()),
        f"# environment variables copied from this shell: {', '.join(hosts.sent) or 'none'}",
        f"(cd / && {' '.join(map(_quoted, hosts.command))})",
    ]
