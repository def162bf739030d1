"""Decide a launch on the devices of a TPU, which torch_xla starts within one worker of each machine."""

from __future__ import annotations

import ast
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from zero_plugin.config.document import Document
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, to_environment
from zero_plugin.config.launch_settings import (
    ON_EVERY_MACHINE,
    LaunchSettings,
    asked_compiler,
    asks_for_cpu,
    asks_for_deepspeed,
)
from zero_plugin.config.tree import AUTO, Entry, Origin
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.command import foreign_variables
from zero_plugin.launch.report import find_log_problems, find_program_problems, where
from zero_plugin.launch.spec import LOOPBACK, LaunchSpec, Program, Rendezvous, Replicas, Request, Setting
from zero_plugin.machine.hardware import Machine
from zero_plugin.machine.network import OWN_ADDRESS
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_version_problem

_CPU_DEVICES: Final = "CPU_NUM_DEVICES"  # how many devices PJRT makes of the CPU
_WITHOUT_EFFECT: Final = {
    "gpu_ids": "Leave it out; TPU_VISIBLE_CHIPS=0,1 in the environment chooses chips.",
    "enable_cpu_affinity": "Leave it out.",
    "min_machines": "Leave it out: the TPU's runtime needs all its machines.",
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "rdzv_conf"),
        "Leave it out: the TPU's runtime finds the other machines, and num_processes is what it has to find.",
    ),
    "deepspeed_hostfile": f"Leave it out, and {ON_EVERY_MACHINE}.",
}


def choose_tpu(document: Document, settings: LaunchSettings, machine: Machine) -> Document:
    """The document with the TPU of this machine as its device, where it leaves the device open and there is no GPU.

    Raises:
        ConfigError: it asks for ZeRO, which a TPU does not run, and does not say whether to drop it.
    """
    if not machine.tpu or machine.gpus or asks_for_cpu(settings):
        return document
    if asks_for_deepspeed(document, settings):
        message = f"ZeRO runs on GPUs and CPUs, and this machine has a TPU ({machine.tpu})"
        fix = "Give --tpu to train on it without ZeRO, or write use_cpu: true for ZeRO on the CPU."
        raise ConfigError([Problem(where(document, "distributed_type"), "distributed_type", message, fix)])
    if settings.distributed_type is not None:
        return document
    found = Entry("XLA", Origin("rule", "this machine", machine.tpu))
    return replace(document, launch=document.launch.replace({("distributed_type",): found}))


def build_tpu_spec(request: Request, machine: Machine) -> LaunchSpec:
    """Decide everything about a launch on a TPU, or on the CPU by the same path where `PJRT_DEVICE` is `CPU`.

    Args:
        request: its program holds the function that runs on every device.
        machine: what was found here.

    Raises:
        ConfigError: everything about the launch that cannot run here, at once.
    """
    document, settings, program, environ = request.document, request.settings, request.program, request.environ
    problems = [
        *find_program_problems(program),
        *_function_problems(document, settings, program),
        *_runtime_problems(document, machine, environ),
        *_count_problems(settings, environ),
        *_keys_without_effect(document, settings, request.endpoint),
        *find_log_problems(document, settings),
    ]
    resolved = request.resolve(problems, accelerator="xla", processes=settings.num_processes or 1)
    spec = request.spec(
        local_processes=1,
        machines=1,  # one torchrun on each, which do not know each other: the TPU's runtime connects the devices
        rendezvous=Rendezvous(LOOPBACK, f"{OWN_ADDRESS}:0", uuid.uuid4().hex),
        environment={
            **_environment(document, settings, machine, environ),
            **foreign_variables(document, settings, resolved, environ, on_cpu=False),
        },
    )
    function = "" if program.kind == "function" else settings.main_training_function
    return replace(
        spec,
        local_processes_reason="torch_xla starts what runs on the devices",
        replicas=Replicas(function, _replicas(settings, environ)),
    )


def _replicas(settings: LaunchSettings, environ: Mapping[str, str]) -> int | None:
    """Devices that take part on all machines together; None leaves it to the runtime, which takes all."""
    if settings.num_processes is None and _is_cpu(environ):
        return int(environ.get(_CPU_DEVICES) or "1")
    return settings.num_processes


def _environment(
    document: Document, settings: LaunchSettings, machine: Machine, environ: Mapping[str, str]
) -> dict[str, Setting]:
    replicas = _replicas(settings, environ)
    added = {ENVIRONMENT_VARIABLE: Setting(to_environment(document), "the configuration, for the workers")}
    if not environ.get(PJRT_DEVICE):
        added[PJRT_DEVICE] = Setting("TPU", machine.tpu)
    elif _is_cpu(environ) and environ.get(_CPU_DEVICES) != str(replicas):
        added[_CPU_DEVICES] = Setting(str(replicas), f"{PJRT_DEVICE}=CPU; {where(document, 'num_processes')}")
    if settings.num_cpu_threads_per_process is not None:
        threads = str(settings.num_cpu_threads_per_process)
        added["OMP_NUM_THREADS"] = Setting(threads, where(document, "num_cpu_threads_per_process"))
    return added


def _is_cpu(environ: Mapping[str, str]) -> bool:
    return environ.get(PJRT_DEVICE) == "CPU"


def _runtime_problems(document: Document, machine: Machine, environ: Mapping[str, str]) -> Iterator[Problem]:
    place = where(document, "distributed_type")
    chosen = environ.get(PJRT_DEVICE, "")
    if chosen.partition("_")[0] not in ("", "TPU", "CPU"):
        fix = f"Unset {PJRT_DEVICE}, or set it to TPU, or to CPU to try this path without a TPU."
        yield Problem(PJRT_DEVICE, "", f"{chosen} is no TPU, which {place} asks for", fix)
    elif not chosen and not machine.tpu:
        fix = f"Start it on a machine with a TPU; or set {PJRT_DEVICE}=CPU, to try the same path on the CPU."
        yield Problem(place, "distributed_type", "there is no TPU here", fix)
    if problem := find_version_problem():
        message, _, fix = problem.partition(": ")
        yield Problem(place, "distributed_type", message, f"{fix}. Or add --cpu, to train without the TPU.")
    if document.launch.value("use_cpu") is True:
        fix = f"Delete one of the two; {PJRT_DEVICE}=CPU in the environment tries this path on the CPU."
        yield Problem(where(document, "use_cpu"), "use_cpu", f"contradicts the TPU that {place} asks for", fix)


def _count_problems(settings: LaunchSettings, environ: Mapping[str, str]) -> Iterator[Problem]:
    count = environ.get(_CPU_DEVICES) or "1"
    if settings.num_processes is None and _is_cpu(environ) and not (count.isdecimal() and int(count)):
        fix = f"Unset {_CPU_DEVICES}, or set it to how many devices to make of the CPU: 1 or more."
        yield Problem(_CPU_DEVICES, "", f"{count} is no number of devices", fix)


def _keys_without_effect(document: Document, settings: LaunchSettings, endpoint: str | None) -> Iterator[Problem]:
    for key, fix in _WITHOUT_EFFECT.items():
        typed = document.launch.value(key)
        if typed not in (None, AUTO, "", 0, False, "none") and (key != "gpu_ids" or settings.gpu_ids != "all"):
            yield Problem(where(document, key), key, "has no effect on a TPU", fix)
    compiler = asked_compiler(document.launch).get("backend")
    if compiler is not None and compiler.value != "no":
        message = f"{compiler.value} does not compile for a TPU; torch_xla does so with every model by itself"
        yield Problem(compiler.origin.where, "dynamo_backend", message, "Leave it out.")
    if endpoint:
        yield Problem("--rdzv_endpoint", "", "has no effect on a TPU", "Leave it out.")


def _function_problems(document: Document, settings: LaunchSettings, program: Program) -> Iterator[Problem]:
    """A program without a function that torch_xla could call for each device."""
    name = settings.main_training_function
    if program.kind == "executable":
        message = "a TPU launch calls a function of a Python script, and an executable has none"
        yield Problem("--no_python", "", message, "Name the script itself.")
    if program.kind != "script" or not Path(program.name).is_file():
        return
    try:
        tree = ast.parse(Path(program.name).read_bytes())
    except (SyntaxError, ValueError):  # the latter for a null byte, before Python 3.12
        return  # the worker shows it, with the line
    if not {name, "*"} & _bound_names(tree):
        message = f"{program.name} has no function {name}, which a TPU launch calls for each device"
        fix = "Put the training into it, or name another with --main_training_function."
        yield Problem(where(document, "main_training_function"), "main_training_function", message, fix)


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that running the module may bind; `*` stands for those that nobody can tell."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names
