"""What runs, seen from anywhere: the processes, the newest `Accelerator`, and where it stands in its accumulation."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from zero_plugin.config.choices import DistributedType
from zero_plugin.config.plugins import TorchDynamoPlugin
from zero_plugin.data.active import GradientState
from zero_plugin.distributed.process_calls import ProcessCalls
from zero_plugin.distributed.processes import Processes, start_processes
from zero_plugin.errors import LoopError
from zero_plugin.loop.run import Run


class Shown(Protocol):
    """What the states show of an `Accelerator`."""

    _run: Run

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations that the run may choose from, by name; None without DeepSpeed."""


class PartialState(ProcessCalls):
    """This process among its peers, for scripts that need no `Accelerator`; every instance is the same one.

    The first one starts the processes, unless an `Accelerator` has; the newest `Accelerator` decides what it shows.

    Args:
        cpu: compute on the CPU even where there is a GPU.
        backend: `nccl` or `gloo`; by default NCCL with gloo beside it for CPU tensors, or gloo on CPUs.
        timeout: how long a collective may wait; 30 minutes by default.
        init_method: where the processes meet, as torch takes it; by default what the launcher set.

    Attributes:
        debug: whether `ACCELERATE_DEBUG_MODE` is set.
        fork_launched: whether a notebook's launcher started this process.

    Raises:
        LaunchError: the environment describes a part of a process group only.
    """

    debug: bool
    fork_launched: bool
    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            processes = start_processes(cpu=cpu, backend=backend, timeout=timeout, init_method=init_method)
            self._show(processes, processes.device, processes.distributed_type, cpu=cpu)

    @property
    def initialized(self) -> bool:
        """Whether the processes have been started."""
        return "_processes" in self._shared_state

    @property
    def backend(self) -> str | None:
        """What carries the tensors of this process's device, e.g. `nccl`; None with one process."""
        return self._processes.backend

    @property
    def default_device(self) -> torch.device:
        """The kind of device that a run computes on where nothing else is said."""
        if self.device.type == "xla":
            return torch.device("xla")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def set_device(self) -> None:
        """Make this process's GPU torch's current one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """End `group`, or the default one with all that trains on it; collective."""
        if group is not None:
            dist.destroy_process_group(group)
        else:
            self._processes.end_group()

    @staticmethod
    def _reset_state() -> None:
        """Forget what is shown; the processes go on."""
        PartialState._shared_state.clear()

    @classmethod
    def _show(cls, processes: Processes, device: torch.device, distributed_type: DistributedType, *, cpu: bool) -> None:
        cls._shared_state.update(
            _processes=processes,
            _cpu=cpu,
            device=device,
            distributed_type=distributed_type,
            debug=_is_set("ACCELERATE_DEBUG_MODE"),
            fork_launched=_is_set("FORK_LAUNCHED"),
        )

    def __repr__(self) -> str:
        lines = {
            "Distributed environment": f"{self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}",
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }
        return "".join(f"{name}: {value}\n" for name, value in lines.items())

    def __getattr__(self, name: str) -> Any:
        raise _no_attribute(self, name)


class AcceleratorState(ProcessCalls):
    """The newest `Accelerator`, seen from anywhere; every instance is the same one.

    Args:
        mixed_precision, cpu: for scripts that give them; they must be what the `Accelerator` has.
        **settings: other arguments of Accelerate's, None or False.

    Raises:
        LoopError: there is no `Accelerator`, or it was told otherwise.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **settings: Any) -> None:
        self.__dict__ = self._shared_state
        given = {"mixed_precision": mixed_precision, "cpu": cpu, **settings}
        typed = ", ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, False))
        if not self.initialized:
            raise LoopError(
                f"AcceleratorState({typed}) shows the newest Accelerator, and there is none.\n"
                f"Write accelerator = Accelerator({typed}) before, or take PartialState(), which needs none."
            )
        is_so = mixed_precision in (None, self.mixed_precision) and not (cpu and self.device.type != "cpu")
        if not is_so or any(value not in (None, False) for value in settings.values()):
            raise LoopError(
                f"AcceleratorState({typed}): the newest Accelerator was told otherwise, and this only shows it.\n"
                f"Write Accelerator({typed}), and AcceleratorState()."
            )

    @property
    def _shown(self) -> Shown:
        if "_run" not in self._shared_state:  # `_reset_state()` was called: see `_no_attribute`
            raise AttributeError("_shown")
        accelerator: Shown | None = self._shared_state["_run"]()
        if accelerator is None:
            raise LoopError("AcceleratorState shows the newest Accelerator, and the script has dropped that.")
        return accelerator

    @property
    def initialized(self) -> bool:
        """Whether there is an `Accelerator`."""
        return is_initialized()

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""
        return self._shown.mixed_precision

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations that the run may choose from, by name; None without DeepSpeed."""
        return self._shown.deepspeed_plugins

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed configuration that runs; None without DeepSpeed."""
        return next((plugin for plugin in (self.deepspeed_plugins or {}).values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed configuration of that name."""
        return self._named_plugins(name)[name]

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How models are compiled."""
        return self._shown._run.options.handlers.compiler

    def select_deepspeed_plugin(self, name: str) -> None:
        """Let the next `prepare`, and `from_pretrained` at once, follow the DeepSpeed configuration of that name."""
        for key, plugin in self._named_plugins(name).items():
            if key == name:
                plugin.select(_from_accelerator_state=True)
            else:
                plugin._unselect()
        self._shown._run.follow_configuration()

    @property
    def backend(self) -> str | None:
        """What carries the tensors of this process's device, e.g. `nccl`; None with one process."""
        return self._processes.backend

    @property
    def debug(self) -> bool:
        """Whether `ACCELERATE_DEBUG_MODE` is set."""
        return PartialState().debug

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook's launcher started this process."""
        return PartialState().fork_launched

    def destroy_process_group(self, group: Any = None) -> None:
        """End `group`, or the default one with all that trains on it; collective."""
        PartialState().destroy_process_group(group)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget what is shown; the run and its processes go on."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def _named_plugins(self, name: str) -> Mapping[str, Any]:
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise LoopError(f"there is no DeepSpeed plugin {name!r}; there is {', '.join(plugins) or 'none'}.")
        return plugins

    def __repr__(self) -> str:
        plugin = self.deepspeed_plugin
        config = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n{config}"

    def __getattr__(self, name: str) -> Any:
        raise _no_attribute(self, name)


def is_initialized() -> bool:
    """Whether there is an `Accelerator` that the states show."""
    shown = AcceleratorState._shared_state.get("_run")
    return shown is not None and shown() is not None


def show_run(accelerator: Shown, plugin_kwargs: Mapping[str, Any]) -> tuple[AcceleratorState, GradientState]:
    """Let all states show the newest `Accelerator`.

    Args:
        accelerator: a complete one; the states do not keep it.
        plugin_kwargs: what it was told of accumulation.
    """
    run = accelerator._run
    processes, device, distributed_type = run.processes, run.device, run.distributed_type
    PartialState._show(processes, device, distributed_type, cpu=device.type == "cpu" and torch.cuda.is_available())
    shown = weakref.ref(accelerator)
    AcceleratorState._shared_state.update(
        _run=shown, _newest_run=run, _processes=processes, device=device, distributed_type=distributed_type
    )
    GradientState._shared_state.update(_run=shown, plugin_kwargs=dict(plugin_kwargs))
    return AcceleratorState(), GradientState()


def newest_run() -> Run | None:
    """The run of the newest `Accelerator`, which the script may have dropped; None before the first one."""
    run: Run | None = AcceleratorState._shared_state.get("_newest_run")
    return run


def newest_accelerator() -> Any:
    """The newest `Accelerator` in this process, which is what a pickled one comes back as.

    Raises:
        LoopError: there is none.
    """
    return AcceleratorState()._shown


def forget_run() -> None:
    """Forget everything: in a process that was forked from one with states of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y", "t", "on")


def _no_attribute(state: PartialState | AcceleratorState, name: str) -> AttributeError:
    kind = type(state).__name__
    if state.initialized or name not in (*dir(type(state)), "device", "distributed_type", "debug", "fork_launched"):
        return AttributeError(f"'{kind}' object has no attribute '{name}'")
    return AttributeError(
        f"`{kind}` object has no attribute `{name}`, since `{kind}._reset_state()` was called. "
        "Make a new `Accelerator()` or `PartialState()`."
    )
