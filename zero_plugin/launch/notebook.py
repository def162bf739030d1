"""Launches a function of a notebook, or of any running program, in forked copies of this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import overlay_code
from zero_plugin.config.read import document_from_code
from zero_plugin.distributed.messages import show_messages
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.fork import launch_variables, run_forked, run_on_devices
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.machine.hardware import look_at_machine

_logger = logging.getLogger(__name__)

_ANY_PORT: Final = "29500"  # Accelerate's default: nobody requested it, and on one machine nobody has to know it


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _ANY_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> None:
    """Run `function(*args)` in several processes, each a copy of this one, and return when all have ended.

    What the function finds here, it has there: names of the notebook, modules, data. What it changes stays there. One
    process is no copy: the function then runs here. `Accelerator()` belongs inside the function. On a TPU, each of its
    devices has a copy.

    Args:
        function: the training; also one that is defined in a cell.
        args: its positional arguments, any iterable.
        num_processes: on this machine; by default what `config` says, else one for each GPU or TPU device, else one.
        mixed_precision: `fp16` or `bf16`; `no` leaves it to `config` and to the function.
        use_port: where several machines meet, on `master_addr`; on one machine a free port is taken.
        master_addr: address of machine 0.
        node_rank: this machine's number.
        num_nodes: machines; the same call runs on each, with its own `node_rank`.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: the rendezvous of several machines, in torchrun's terms.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: torchrun's prefix of lines that it copies.
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content, for every `Accelerator()`.

    Raises:
        ConfigError: everything about the configuration or the launch that cannot run here.
        LaunchError: this process cannot be copied any more, or a process has failed; then with its traceback.
    """
    values: dict[str, tuple[str, Any]] = {}
    if num_processes is not None:
        values["num_processes"] = (f"num_processes={num_processes}", num_processes * num_nodes)
    if str(mixed_precision).lower() != "no":
        values["mixed_precision"] = (f"mixed_precision={mixed_precision!r}", str(mixed_precision))
    if max_restarts:
        values["max_restarts"] = (f"max_restarts={max_restarts}", max_restarts)
    if monitor_interval != 0.1:
        values["monitor_interval"] = (f"monitor_interval={monitor_interval}", monitor_interval)
    if num_nodes > 1:
        options = ",".join(f"{name}={value}" for name, value in (rdzv_conf or {}).items())
        values |= {
            "num_machines": (f"num_nodes={num_nodes}", num_nodes),
            "machine_rank": (f"node_rank={node_rank}", node_rank),
            "main_process_ip": (f"master_addr={master_addr!r}", master_addr),
            "rdzv_backend": (f"rdzv_backend={rdzv_backend!r}", rdzv_backend),
            "rdzv_conf": ("rdzv_conf=…", options),
        }
    if num_nodes > 1 or str(use_port) != _ANY_PORT:
        values["main_process_port"] = (f"use_port={use_port!r}", int(use_port))
    spec = _build(function, _document(config, values, "notebook_launcher"), rdzv_endpoint or None)
    if rdzv_id != "none":
        spec = replace(spec, rendezvous=replace(spec.rendezvous, run_id=rdzv_id))
    with launch_variables(spec):
        if spec.replicas is not None:
            run_on_devices(function, tuple(args), spec.replicas.count)
        elif spec.local_processes * spec.machines == 1:
            function(*args)
        else:
            run_forked(spec, function, tuple(args), line_prefix=log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in several processes on the CPU, each a copy of this one.

    Args:
        function: what to run.
        args: its positional arguments, any iterable.
        num_processes: how many.

    Raises:
        LaunchError: this process cannot be copied any more, or a process has failed; then with its traceback.
    """
    values = {
        "num_processes": (f"num_processes={num_processes}", num_processes),
        "use_cpu": ("on the CPU", True),
    }
    spec = _build(function, _document(None, values, "debug_launcher"), None)
    with launch_variables(spec):
        run_forked(spec, function, tuple(args))


def _document(config: Any, values: Mapping[str, tuple[str, Any]], call: str) -> Document:
    """The configuration, and over it what was passed to the launcher: by key, the argument as text and its value."""
    document = document_from_code(config, f"{call}(config=…)")
    document = overlay_code(document, {(key,): (f"{call}({text})", value) for key, (text, value) in values.items()})
    return replace(document, notes=check_document(document))


def _build(function: Callable[..., Any], document: Document, endpoint: str | None) -> LaunchSpec:
    program = Program(getattr(function, "__qualname__", repr(function)), kind="function")
    spec = build_spec(document, program, look_at_machine(), os.environ, rendezvous_endpoint=endpoint)
    show_messages()
    if spec.replicas is not None:
        devices = "every XLA device" if spec.replicas.count is None else f"{spec.replicas.count} × XLA"
        _logger.info("%s runs on %s", program.name, devices)
        return spec
    added = spec.environment.get("DS_ACCELERATOR")
    where = "the CPU" if (added.value if added else os.environ.get("DS_ACCELERATOR")) == "cpu" else "GPUs"
    reason = f" ({spec.local_processes_reason})" if spec.local_processes_reason else ""
    count = "1 process" if spec.local_processes == 1 else f"{spec.local_processes} processes"
    _logger.info("%s runs in %s on %s%s", program.name, count, where, reason)
    return spec
