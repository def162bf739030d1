"""A launch on the devices of a TPU: the decision, and what one worker of each machine runs by torch_xla."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from zero_plugin.config.document import Document, from_environment
from zero_plugin.config.launch_settings import (
    ON_EVERY_MACHINE,
    asked_compiler,
    asks_for_cpu,
    asks_for_deepspeed,
    launch_settings,
)
from zero_plugin.config.tree import AUTO, Entry, Origin
from zero_plugin.distributed.process_end import flush_output, install_stop_handler
from zero_plugin.errors import ConfigError, LaunchError, Problem
from zero_plugin.launch.command import foreign_variables
from zero_plugin.launch.spec import (
    LOOPBACK,
    LaunchSpec,
    Rendezvous,
    Replicas,
    Request,
    Setting,
    find_log_problems,
    find_program_problems,
)
from zero_plugin.launch.worker import ERROR_FILE, die_with_launcher, read_first_failure, report_end
from zero_plugin.machine.hardware import Machine
from zero_plugin.machine.network import OWN_ADDRESS
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, explain_start, find_version_problem, import_torch_xla

_CPU_DEVICES: Final = "CPU_NUM_DEVICES"  # how many devices PJRT makes of the CPU
_WITHOUT_EFFECT: Final = {
    "gpu_ids": "Leave it out; TPU_VISIBLE_CHIPS=0,1 in the environment chooses chips.",
    "enable_cpu_affinity": "Leave it out.",
    "min_machines": "Leave it out: the TPU's runtime needs all its machines.",
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "machine_rank", "rdzv_backend", "rdzv_conf"),
        "Leave it out: the TPU's runtime finds the other machines, and num_processes is what it has to find.",
    ),
    "deepspeed_hostfile": f"Leave it out, and {ON_EVERY_MACHINE}.",
}
# What torchrun tells its worker of the group that this is alone in.
_OF_TORCHRUN: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    "TORCHELASTIC_RUN_ID",  # seeing it, torch_xla.launch would start nothing
)
_AGENT_STORE: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
ENDED_SILENTLY: Final = (
    "the process of a replica ended without a message of Python: the kernel may have killed it for want of CPU memory "
    "(`dmesg` tells), or XLA ended it, whose own message is above."
)
_importing = threading.Lock()
_begun: list[int] = []  # replicas of this process


# ---- the decision ----------------------------------------------------------------------------------------------------


def choose_tpu(document: Document, machine: Machine) -> Document:
    """The document with the TPU of this machine as its device, where it leaves the device open and there is no GPU.

    Raises:
        ConfigError: it requests ZeRO, which a TPU does not run, and does not say whether to drop it.
    """
    settings = launch_settings(document)
    if not machine.tpu or machine.gpus or asks_for_cpu(settings):
        return document
    if asks_for_deepspeed(document, settings):
        message = f"ZeRO runs on GPUs and CPUs, and this machine has a TPU ({machine.tpu})"
        fix = "Give --tpu to train on it without ZeRO, or write use_cpu: true for ZeRO on the CPU."
        entry = document.launch.get("distributed_type")
        raise ConfigError([Problem(str(entry.origin) if entry else "launch", "distributed_type", message, fix)])
    if settings.distributed_type is not None:
        return document
    found = Entry("XLA", Origin("rule", "this machine", machine.tpu))
    return document.lay({("distributed_type",): found})


def build_tpu_spec(request: Request, machine: Machine) -> LaunchSpec:
    """Decide everything about a launch on a TPU, or on the CPU by the same path where `PJRT_DEVICE` is `CPU`.

    Args:
        request: what is to be launched.
        machine: this one, with its TPU.

    Raises:
        ConfigError: everything about the launch that cannot run here, at once.
    """
    settings = request.settings
    problems = [
        *find_program_problems(request.program),
        *_function_problems(request),
        *_runtime_problems(request, machine),
        *_keys_without_effect(request),
        *find_log_problems(request),
    ]
    resolved = request.resolve(problems, accelerator="xla", processes=settings.num_processes or 1)
    function = "" if request.program.kind == "function" else settings.main_training_function
    return LaunchSpec(
        request.program,
        request.document,
        settings,
        local_processes=1,
        local_processes_reason="torch_xla starts what runs on the devices",
        machines=1,  # one torchrun on each, which do not know each other: the TPU's runtime connects the devices
        rendezvous=Rendezvous(LOOPBACK, f"{OWN_ADDRESS}:0", uuid.uuid4().hex),
        environment={
            **_environment(request, machine),
            **foreign_variables(request, resolved, on_cpu=False),
        },
        replicas=Replicas(function, _count(request)),
    )


def _count(request: Request) -> int | None:
    """Devices that take part on all machines together; None leaves it to the runtime, which takes all."""
    if request.settings.num_processes is None and _is_cpu(request.environ):
        return int(request.environ.get(_CPU_DEVICES) or "1")
    return request.settings.num_processes


def _environment(request: Request, machine: Machine) -> dict[str, Setting]:
    count, added = str(_count(request)), request.common_environment()
    if not request.environ.get(PJRT_DEVICE):
        added[PJRT_DEVICE] = Setting("TPU", machine.tpu)
    elif _is_cpu(request.environ) and request.environ.get(_CPU_DEVICES) != count:
        added[_CPU_DEVICES] = Setting(count, f"{PJRT_DEVICE}=CPU; {request.where('num_processes')}")
    return added


def _is_cpu(environ: Mapping[str, str]) -> bool:
    return environ.get(PJRT_DEVICE) == "CPU"


def _runtime_problems(request: Request, machine: Machine) -> Iterator[Problem]:
    environ, place = request.environ, request.where("distributed_type")
    chosen, count = environ.get(PJRT_DEVICE, ""), environ.get(_CPU_DEVICES) or "1"
    if chosen.partition("_")[0] not in ("", "TPU", "CPU"):
        fix = f"Unset {PJRT_DEVICE}, or set it to TPU, or to CPU to try this path without a TPU."
        yield Problem(PJRT_DEVICE, "", f"{chosen} is no TPU, which {place} requests", fix)
    elif not chosen and not machine.tpu:
        fix = f"Start it on a machine with a TPU; or set {PJRT_DEVICE}=CPU, to try the same path on the CPU."
        yield request.problem("distributed_type", "there is no TPU here", fix)
    if problem := find_version_problem():
        message, _, fix = problem.partition(": ")
        yield request.problem("distributed_type", message, f"{fix}. Or add --cpu, to train without the TPU.")
    if request.document.launch.value("use_cpu") is True:
        fix = f"Delete one of the two; {PJRT_DEVICE}=CPU in the environment tries this path on the CPU."
        yield request.problem("use_cpu", f"contradicts the TPU that {place} requests", fix)
    if request.settings.num_processes is None and chosen == "CPU" and not (count.isdecimal() and int(count)):
        fix = f"Unset {_CPU_DEVICES}, or set it to how many devices to make of the CPU: 1 or more."
        yield Problem(_CPU_DEVICES, "", f"{count} is no number of devices", fix)


def _keys_without_effect(request: Request) -> Iterator[Problem]:
    launch = request.document.launch
    for key, fix in _WITHOUT_EFFECT.items():
        if launch.value(key) not in (None, AUTO, "", 0, False, "none", "static") and (
            key != "gpu_ids" or request.settings.gpu_ids != "all"
        ):
            yield request.problem(key, "has no effect on a TPU", fix)
    compiler = asked_compiler(launch).get("backend")
    if compiler is not None and compiler.value != "no":
        message = f"{compiler.value} does not compile for a TPU; torch_xla does so with every model by itself"
        yield Problem(compiler.origin.where, "dynamo_backend", message, "Leave it out.")
    if request.endpoint:
        yield Problem("--rdzv_endpoint", "", "has no effect on a TPU", "Leave it out.")


def _function_problems(request: Request) -> Iterator[Problem]:
    """A program without a function that torch_xla could call for each device."""
    program, name = request.program, request.settings.main_training_function
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
        yield request.problem("main_training_function", message, fix)


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that running the module may bind; `*` for those that cannot be known."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


# ---- in the worker ---------------------------------------------------------------------------------------------------


def run_replicas(function: str, count: str, program: list[str]) -> None:
    """Call `function` of the program on every device, and return when all calls have.

    Args:
        function: a name in the program's module, called without arguments.
        count: how many devices there must be, or `all`.
        program: the script and its arguments, or `-m`, the module and its arguments.

    Raises:
        MachineError: torch_xla does not work here.
        SystemExit: a replica has failed, and reported why.
    """
    is_module = program[0] == "-m"
    name, *arguments = program[is_module:]
    sys.argv[:] = [name, *arguments]
    leave_torchrun(count)
    os.environ["PYTHONUNBUFFERED"] = "1"  # as this process; the replicas' inherit no flag
    torch_xla = import_torch_xla()
    with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault(ERROR_FILE, str(Path(folder) / "0" / "error.json"))  # torchrun has not started this
        replica = functools.partial(_run_replica, note=_NotesStops())
        passed_on: list[int] = [] if count == "1" else _pass_stops_on()
        try:
            torch_xla.launch(replica, args=(function, name, is_module), debug_single_process=count == "1")
        except BrokenProcessPool:
            if passed_on:
                raise SystemExit(128 + passed_on[0]) from None
            if (code := read_first_failure()) is not None:
                raise SystemExit(code) from None
            raise LaunchError(ENDED_SILENTLY) from None
        except (RuntimeError, OSError) as error:
            if _begun:
                raise  # the script's own, on the one device
            raise explain_start(error) from error


def leave_torchrun(count: str) -> None:
    """Take out of the environment what torchrun says of its worker; replicas learn their places from the XLA runtime.

    On one machine they may still meet at the launcher's store. With several, each machine's launcher has its own.

    Args:
        count: replicas that there must be, which `WORLD_SIZE` then says; or `all`.
    """
    document = from_environment(os.environ)
    alone = document is None or launch_settings(document).num_machines == 1
    for name in (*_OF_TORCHRUN, *(() if alone else _AGENT_STORE)):
        os.environ.pop(name, None)
    if count != "all":
        os.environ["WORLD_SIZE"] = count


def _end_training() -> None:
    """End every `Accelerator` and the process group of this replica, together with the others; a thread has no exit."""
    state = sys.modules.get("zero_plugin.loop.state")
    if state is not None and state.PartialState._shared_state:
        state.PartialState().destroy_process_group()


class _NotesStops:
    """Unpickled by the main thread of a replica's process, which alone can say what a signal does."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install_stop_handler, ()


def _pass_stops_on() -> list[int]:
    """Let SIGTERM go to the replicas, who may save before they end; the signals that have come."""
    passed_on: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        for child in multiprocessing.active_children():
            child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    return passed_on


def _run_replica(rank: int, function: str, name: str, is_module: bool, *, note: Any) -> None:  # noqa: ARG001
    """One device's part."""
    _begun.append(rank)
    apart = parent_process() is not None
    if apart:
        die_with_launcher()
    run_to_end(
        lambda: _find_function(function, name, is_module)(), lambda error: report_end(error, str(rank)), at_once=apart
    )


def run_to_end(call: Callable[[], object], report: Callable[[BaseException], int], *, at_once: bool = True) -> None:
    """Call a function, then end the training of this replica together with the others.

    Args:
        call: the function.
        report: called with the error where either fails; returns the exit code of this process.
        at_once: whether it ends so: others wait for it in a collective, and torch_xla for them in their order. False
            raises the error.
    """
    try:
        try:
            call()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        _end_training()
    except BaseException as error:
        if not at_once:
            raise
        code = report(error)
        flush_output()
        os._exit(code)


def _find_function(function: str, name: str, is_module: bool) -> Callable[[], Any]:
    with _importing:
        module = importlib.import_module(name) if is_module else _import_script(Path(name))
    found = getattr(module, function, None)
    if not callable(found):
        raise LaunchError(
            f"{name} has no function {function}, which a TPU launch calls for each device.\n"
            "Put the training into it, or name another with --main_training_function."
        )
    return found  # type: ignore[no-any-return]


def _import_script(script: Path) -> ModuleType:
    """The script as the module of its name, so that what it defines can be found there by pickles."""
    file, name = script.resolve(), script.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    if known is not None:
        raise LaunchError(f"a TPU launch imports {script} as {name}, and that is another module already. Rename it.")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the launcher has seen that it is a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
