"""`PartialState` and `AcceleratorState`: the processes and the newest `Accelerator`, as global state objects."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from zero_plugin.config.choices import DistributedType, is_switched_on
from zero_plugin.config.handlers import TorchDynamoPlugin
from zero_plugin.data.active import GradientState
from zero_plugin.distributed.processes import ProcessCalls, Processes, start_processes
from zero_plugin.errors import LoopError
from zero_plugin.loop.run import Run


class AcceleratorView(Protocol):
    """The attributes of an `Accelerator` that the states show."""

    _run: Run

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations of the run by name; None without DeepSpeed."""


class _SharedState(ProcessCalls):
    """The common part of both states: all instances of a class share one state.

    Attributes:
        debug: whether `ACCELERATE_DEBUG_MODE` is set.
        fork_launched: whether the notebook launcher started this process.
    """

    debug: bool
    fork_launched: bool
    _shared_state: ClassVar[dict[str, Any]]

    @property
    def initialized(self) -> bool:
        """Whether the state has been initialized."""
        return "_processes" in self._shared_state

    @property
    def backend(self) -> str | None:
        """The backend of collectives for this process's device, e.g. `nccl`; None with one process."""
        return self._processes.backend

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy `group`, or by default close all runs and destroy the default process group; collective."""
        if group is not None:
            dist.destroy_process_group(group)
        else:
            self._processes.end_group()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if self.initialized or name not in (*dir(type(self)), "device", "distributed_type", "debug", "fork_launched"):
            raise AttributeError(f"'{kind}' object has no attribute '{name}'")
        raise AttributeError(
            f"`{kind}` object has no attribute `{name}`, because `{kind}._reset_state()` was called. "
            "Create a new `Accelerator()` or `PartialState()`."
        )


class PartialState(_SharedState):
    """The ranks and the device of this process, for scripts without an `Accelerator`; all instances share one state.

    The first instance initializes the process group, unless an `Accelerator` has done so. The state then shows the
    processes of the newest `Accelerator`.

    Args:
        cpu: compute on the CPU even if a GPU is available.
        backend: `nccl` or `gloo`; by default NCCL with gloo for CPU tensors, or gloo without GPUs.
        timeout: the timeout of collective operations; 30 minutes by default.
        init_method: as for `torch.distributed.init_process_group`; by default from the environment variables.

    Raises:
        LaunchError: the environment variables do not describe a complete process group.
    """

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
    def default_device(self) -> torch.device:
        """The kind of device that a run uses by default."""
        if self.device.type == "xla":
            return torch.device("xla")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def set_device(self) -> None:
        """Make this process's GPU torch's current device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @staticmethod
    def _reset_state() -> None:
        """Clear the state; the process group remains."""
        PartialState._shared_state.clear()

    @classmethod
    def _show(cls, processes: Processes, device: torch.device, distributed_type: DistributedType, *, cpu: bool) -> None:
        cls._shared_state.update(
            _processes=processes,
            _cpu=cpu,
            device=device,
            distributed_type=distributed_type,
            debug=is_switched_on("ACCELERATE_DEBUG_MODE"),
            fork_launched=is_switched_on("FORK_LAUNCHED"),
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


class AcceleratorState(_SharedState):
    """The state of the newest `Accelerator`; all instances share it.

    Args:
        mixed_precision, cpu: accepted for compatibility; they must agree with the `Accelerator`.
        **settings: other arguments of Accelerate's class; they must be None or False.

    Raises:
        LoopError: no `Accelerator` exists, or its configuration differs.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **settings: Any) -> None:
        self.__dict__ = self._shared_state
        given = {"mixed_precision": mixed_precision, "cpu": cpu, **settings}
        typed = ", ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, False))
        if not self.initialized:
            raise LoopError(
                f"AcceleratorState({typed}) shows the newest Accelerator, but none exists.\n"
                f"Write accelerator = Accelerator({typed}) before, or use PartialState(), which needs none."
            )
        is_so = mixed_precision in (None, self.mixed_precision) and not (cpu and self.device.type != "cpu")
        if not is_so or any(value not in (None, False) for value in settings.values()):
            raise LoopError(
                f"AcceleratorState({typed}) shows the newest Accelerator, but that was configured differently.\n"
                f"Write Accelerator({typed}), and AcceleratorState()."
            )

    @property
    def _accelerator(self) -> AcceleratorView:
        """The newest `Accelerator`."""
        if "_run" not in self._shared_state:  # `_reset_state()` was called: see `__getattr__`
            raise AttributeError("_accelerator")
        accelerator: AcceleratorView | None = self._shared_state["_run"]()
        if accelerator is None:
            raise LoopError("AcceleratorState shows the newest Accelerator, but that no longer exists.")
        return accelerator

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator` exists."""
        return is_initialized()

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""
        return self._accelerator.mixed_precision

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations of the run by name; None without DeepSpeed."""
        return self._accelerator.deepspeed_plugins

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed configuration; None without DeepSpeed."""
        return next((plugin for plugin in (self.deepspeed_plugins or {}).values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed configuration of that name."""
        return self._named_plugins(name)[name]

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """The settings of the compiler."""
        return self._accelerator._run.options.handlers.compiler

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use the DeepSpeed configuration of that name in the next `prepare`, and in `from_pretrained` from now on."""
        for key, plugin in self._named_plugins(name).items():
            if key == name:
                plugin.select(_from_accelerator_state=True)
            else:
                plugin._unselect()
        self._accelerator._run.follow_configuration()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the state; the run and its process group remain."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def _named_plugins(self, name: str) -> Mapping[str, Any]:
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise LoopError(f"no DeepSpeed plugin {name!r} exists. Existing plugins: {', '.join(plugins) or 'none'}.")
        return plugins

    def __repr__(self) -> str:
        plugin = self.deepspeed_plugin
        config = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n{config}"


def is_initialized() -> bool:
    """Return whether an `Accelerator` exists that the states show."""
    shown = AcceleratorState._shared_state.get("_run")
    return shown is not None and shown() is not None


def show_run(accelerator: AcceleratorView, plugin_kwargs: Mapping[str, Any]) -> tuple[AcceleratorState, GradientState]:
    """Make all state objects show the newest `Accelerator`.

    Args:
        accelerator: the complete `Accelerator`; only a weak reference is kept.
        plugin_kwargs: its arguments for gradient accumulation.
    """
    run = accelerator._run
    processes, device, distributed_type = run.processes, run.device, run.distributed_type
    # PartialState first: AcceleratorState gets a copy of its state.
    PartialState._show(processes, device, distributed_type, cpu=device.type == "cpu" and torch.cuda.is_available())
    shown = weakref.ref(accelerator)
    AcceleratorState._shared_state.update(PartialState._shared_state, _run=shown, _newest_run=run)
    GradientState._shared_state.update(_run=shown, plugin_kwargs=dict(plugin_kwargs))
    return AcceleratorState(), GradientState()


def newest_run() -> Run | None:
    """Return the run of the newest `Accelerator`, even if that no longer exists; None before the first one."""
    run: Run | None = AcceleratorState._shared_state.get("_newest_run")
    return run


def newest_accelerator() -> Any:
    """Return the newest `Accelerator` in this process; unpickling an `Accelerator` calls this function.

    Raises:
        LoopError: no `Accelerator` exists.
    """
    return AcceleratorState()._accelerator


def forget_run() -> None:
    """Clear all states in a forked process: they are copies of its parent's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
