"""A launch on the devices of a TPU: building its spec, and running torch_xla in each machine's single worker."""

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

_CPU_DEVICES: Final = "CPU_NUM_DEVICES"  # number of devices that PJRT simulates on the CPU
_WITHOUT_EFFECT: Final = {
    "gpu_ids": "Leave it out; TPU_VISIBLE_CHIPS=0,1 in the environment chooses chips.",
    "enable_cpu_affinity": "Leave it out.",
    "min_machines": "Leave it out: the TPU's runtime needs all its machines.",
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "machine_rank", "rdzv_backend", "rdzv_conf"),
        "Leave it out: the TPU's runtime finds the other machines. num_processes is the number of devices to find.",
    ),
    "deepspeed_hostfile": f"Leave it out, and {ON_EVERY_MACHINE}.",
}
# Variables in which torchrun describes the worker's group. The worker is alone in that group.
_OF_TORCHRUN: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    "TORCHELASTIC_RUN_ID",  # if this is set, torch_xla.launch starts nothing
)
_AGENT_STORE: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
ENDED_SILENTLY: Final = (
    "the process of a replica ended without a Python message. The kernel may have killed it because CPU memory ran out "
    "(check with `dmesg`), or XLA ended it and printed its message above."
)
_importing = threading.Lock()
_begun: list[int] = []  # ranks of the replicas that have begun in this process


# ---- the decision ----------------------------------------------------------------------------------------------------


def choose_tpu(document: Document, machine: Machine) -> Document:
    """Make this machine's TPU the document's device if the device is open and the machine has no GPU.

    Raises:
        ConfigError: the document requests ZeRO, which does not run on a TPU, without choosing a device.
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
    """Decide everything about a launch on a TPU, or on the CPU by the same path if `PJRT_DEVICE` is `CPU`.

    Args:
        request: the launch.
        machine: this machine, with its TPU.

    Raises:
        ConfigError: all problems that keep the launch from running here, in one error.
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
        local_processes_reason="torch_xla starts the processes of the devices",
        machines=1,  # each machine has its own torchrun, unaware of the others: the TPU's runtime connects the devices
        rendezvous=Rendezvous(LOOPBACK, f"{OWN_ADDRESS}:0", uuid.uuid4().hex),
        environment={
            **_environment(request, machine),
            **foreign_variables(request, resolved, on_cpu=False),
        },
        replicas=Replicas(function, _count(request)),
    )


def _count(request: Request) -> int | None:
    """Return the number of participating devices on all machines; None: the runtime takes all devices."""
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
        message = f"{compiler.value} does not compile for a TPU; torch_xla compiles every model automatically"
        yield Problem(compiler.origin.where, "dynamo_backend", message, "Leave it out.")
    if request.endpoint:
        yield Problem("--rdzv_endpoint", "", "has no effect on a TPU", "Leave it out.")


def _function_problems(request: Request) -> Iterator[Problem]:
    """Yield a problem if the program has no function that torch_xla can call for each device."""
    program, name = request.program, request.settings.main_training_function
    if program.kind == "executable":
        message = "a TPU launch calls a function of a Python script, and an executable has none"
        yield Problem("--no_python", "", message, "Name the script itself.")
    if program.kind != "script" or not Path(program.name).is_file():
        return
    try:
        tree = ast.parse(Path(program.name).read_bytes())
    except (SyntaxError, ValueError):  # ValueError for a null byte, before Python 3.12
        return  # the worker shows the error, with its line
    if not {name, "*"} & _bound_names(tree):
        message = f"{program.name} has no function {name}, which a TPU launch calls for each device"
        fix = "Put the training into it, or name another with --main_training_function."
        yield request.problem("main_training_function", message, fix)


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that the module may bind when it runs; `*` if it may bind unknown names."""
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
    """Call `function` of the program on every device, and return when all calls have returned.

    Args:
        function: a name in the program's module, called without arguments.
        count: required number of devices, or `all`.
        program: the script and its arguments, or `-m`, the module and its arguments.

    Raises:
        MachineError: torch_xla does not work here.
        SystemExit: a replica has failed, and reported why.
    """
    is_module = program[0] == "-m"
    name, *arguments = program[is_module:]
    sys.argv[:] = [name, *arguments]
    leave_torchrun(count)
    os.environ["PYTHONUNBUFFERED"] = "1"  # like this process: the replicas' processes do not inherit its `-u` flag
    torch_xla = import_torch_xla()
    with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault(ERROR_FILE, str(Path(folder) / "0" / "error.json"))  # torchrun did not start this process
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
                raise  # the script's own error, on the single device
            raise explain_start(error) from error


def leave_torchrun(count: str) -> None:
    """Remove torchrun's variables from the environment. Replicas get their ranks from the XLA runtime.

    On one machine the replicas may still use the launcher's store. On several, each launcher has a store of its own.

    Args:
        count: required number of replicas, which becomes `WORLD_SIZE`; or `all`.
    """
    document = from_environment(os.environ)
    alone = document is None or launch_settings(document).num_machines == 1
    for name in (*_OF_TORCHRUN, *(() if alone else _AGENT_STORE)):
        os.environ.pop(name, None)
    if count != "all":
        os.environ["WORLD_SIZE"] = count


def _end_training() -> None:
    """End every `Accelerator` and this replica's process group, together with the others. Threads run no exit hooks."""
    state = sys.modules.get("zero_plugin.loop.state")
    if state is not None and state.PartialState._shared_state:
        state.PartialState().destroy_process_group()


class _NotesStops:
    """An object whose unpickling installs the stop handler.

    The main thread of a replica's process unpickles it, and only a main thread can install signal handlers.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install_stop_handler, ()


def _pass_stops_on() -> list[int]:
    """Forward SIGTERM to the replicas, which may save before they end. Return a list that collects the signals."""
    passed_on: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        for child in multiprocessing.active_children():
            child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    return passed_on


def _run_replica(rank: int, function: str, name: str, is_module: bool, *, note: Any) -> None:  # noqa: ARG001
    """Run one device's part."""
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
        report: called with the error if the function or the end fails; returns the exit code of this process.
        at_once: whether an error ends this process immediately. This is necessary with other replicas: they wait for
            this one in a collective, and torch_xla waits for the replicas in order. False raises the error.
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
    """Import the script as the module of its name, where pickles can find the script's definitions."""
    file, name = script.resolve(), script.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    if known is not None:
        raise LaunchError(f"a TPU launch imports {script} as {name}, but another module has that name. Rename it.")
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
