"""Records of settings that a script passes to `Accelerator`, other than values and DeepSpeed's configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from zero_plugin.config.choices import DDPCommunicationHookType, DynamoBackend, is_switched_on
from zero_plugin.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


class KwargsHandler:
    """Base of dataclasses that hold arguments for one torch object; torch gets those that differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults."""
        defaults = self._defaults()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        own = fields(cls)  # type: ignore[arg-type]  # subclasses are dataclasses
        return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in own}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`, for prepared models and for `Accelerator.autocast`.

    Attributes:
        enabled: whether operations compute in the run's 16-bit dtype.
        cache_enabled: whether a weight's 16-bit copy is kept within the context; None uses torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, with its names and defaults.

    Attributes:
        gradient_as_bucket_view: whether gradients are views of the reduction buckets, which saves a copy. Gradients
            that a script keeps beyond `zero_grad` are then overwritten.
        comm_hook: how gradients are compressed between processes.
        comm_wrapper: the dtype (`FP16`, `BF16`) that a `comm_hook` works in.
        comm_state_option: arguments of `PowerSGDState` under `POWER_SGD` and `BATCHED_POWER_SGD`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    _OF_HOOK: ClassVar = ("comm_hook", "comm_wrapper", "comm_state_option")

    def to_dict(self, ignore_keys: tuple[str, ...] = _OF_HOOK) -> dict[str, Any]:
        """Return DDP's own arguments, without those of the hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register the configured hook, if any, to reduce the gradients of `model`.

        Raises:
            ValueError: a hook or wrapper is unknown; lists the known ones.
        """
        hook, wrapper = (_hook_type(name, getattr(self, name)) for name in ("comm_hook", "comm_wrapper"))
        if hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        calls = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        call: Any = calls[hook]
        if wrapper is DDPCommunicationHookType.FP16:
            call = default_hooks.fp16_compress_wrapper(call)
        elif wrapper is DDPCommunicationHookType.BF16:
            call = default_hooks.bf16_compress_wrapper(call)
        has_state = hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if has_state else None
        model.register_comm_hook(state, call)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the fp16 loss scale, with the names of `torch.amp.GradScaler`.

    Attributes:
        init_scale: the first scale.
        growth_factor: factor of the scale after `growth_interval` applied steps.
        backoff_factor: factor of the scale at a step whose gradients are not finite.
        growth_interval: number of applied steps between two growths.
        enabled: False trains without a loss scale.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Attributes:
        backend: `nccl` or `gloo`. None uses gloo on CPUs, and NCCL on GPUs with gloo for CPU tensors.
        init_method: URL of the rendezvous; None uses the launcher's environment.
        timeout: how long a collective may wait; None means 30 minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, which `Accelerator.profile` runs.

    Attributes:
        activities: any of `cpu`, `cuda`, `xpu`, `mtia`; None uses all available ones.
        schedule_option: arguments of `torch.profiler.schedule`: `wait`, `warmup`, `active`, `repeat`, `skip_first`.
        on_trace_ready: called with the profiler whenever a recorded cycle ends.
        output_trace_dir: folder for one Chrome trace of each process.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Return the profiler, not started.

        Raises:
            ValueError: an activity is unknown to torch; lists the known ones.
        """
        from torch import profiler

        known = {name.lower(): a for name, a in profiler.ProfilerActivity.__members__.items()}
        for name in self.activities or ():
            if name not in known:
                raise ValueError(f"ProfileKwargs(activities=[{name!r}]): write one of {', '.join(known)}.")
        recorded = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        return profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            **{name: getattr(self, name) for name in recorded},
        )


@dataclass
class DataLoaderConfiguration:
    """The settings for `prepare` to shard data loaders.

    Attributes:
        split_batches: whether a loader's batch size is that of all processes together.
        dispatch_batches: whether process 0 reads every batch and sends the others their parts.
        even_batches: whether an epoch's last step is filled with its first samples, to give each process a full batch.
        use_seedable_sampler: whether to shuffle with a generator that is seeded again for each epoch.
        data_seed: seed of that sampler; None uses torch's current seed.
        non_blocking: whether to copy batches to the device without waiting; the loader needs `pin_memory=True`.
        use_stateful_dataloader: whether the loop after `load_state` resumes inside the epoch automatically.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """The settings of gradient accumulation.

    Attributes:
        num_steps: micro-batches per optimizer step; None uses the configuration's number, or 1.
        adjust_scheduler: has no effect: a learning-rate scheduler moves when the optimizer steps.
        sync_with_dataloader: whether a loader's end closes the accumulation window.
        sync_each_batch: whether to reduce gradients at each micro-batch, which saves memory and costs communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Folders of a run's output.

    Attributes:
        project_dir: folder of the run.
        logging_dir: folder of local trackers; None uses `project_dir`.
        automatic_checkpoint_naming: whether `save_state` numbers its folders.
        total_limit: the number of numbered checkpoints to keep.
        iteration: number of the next checkpoint, unless a run has used it in that folder: numbers grow over all runs.
        save_on_each_node: has no effect: a checkpoint is one folder, which all processes see.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the run, and of its trackers unless they have one."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`.

    Arguments that are None are read from `ACCELERATE_DYNAMO_*`, which Accelerate's launcher sets.

    Attributes:
        backend: the compiler; `NO` if neither the script nor the environment names one.
        mode: `default`, `reduce-overhead` or `max-autotune`.
        fullgraph: whether to refuse a model that breaks into several graphs.
        dynamic: whether to compile for changing shapes; None lets torch detect them.
        options: options of the backend.
        disable: whether `torch.compile` is called but does nothing.
        use_regional_compilation: whether to compile one of a model's repeated blocks for all of them, not the model.
    """

    backend: DynamoBackend = None  # type: ignore[assignment]  # None until __post_init__
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    _WHERE_NOT_SET: ClassVar = {
        "backend": "no",
        "mode": "default",
        "fullgraph": False,
        "use_regional_compilation": False,
    }

    def __post_init__(self) -> None:
        given = self.backend if self.backend is not None else os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        if str(given).upper() not in DynamoBackend:
            legal = ", ".join(name.lower() for name in DynamoBackend.list())
            raise ValueError(f"TorchDynamoPlugin(backend={str(given)!r}): write one of {legal}.")
        self.backend = DynamoBackend(str(given).upper())
        if self.mode is None:
            self.mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
        for name in ("fullgraph", "dynamic", "use_regional_compilation"):
            variable = f"ACCELERATE_DYNAMO_USE_{name.removeprefix('use_').upper()}"
            if getattr(self, name) is None and (name != "dynamic" or variable in os.environ):
                setattr(self, name, is_switched_on(variable))

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, with the backend in lower case, as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {**super()._defaults(), **cls._WHERE_NOT_SET}


def _hook_type(argument: str, value: Any) -> DDPCommunicationHookType:
    if str(value) not in DDPCommunicationHookType:
        legal = ", ".join(DDPCommunicationHookType.list())
        raise ValueError(f"DistributedDataParallelKwargs({argument}={str(value)!r}): write one of {legal}.")
    return DDPCommunicationHookType(str(value))


@dataclass(frozen=True, slots=True)
class Handlers:
    """A script's settings for torch's own objects; None if not set.

    Attributes:
        ddp: for DistributedDataParallel.
        scaler: for the loss scale under fp16.
        process_group: for the process group.
        autocast: for the context that 16-bit operations run in.
        profile: for the profiler.
        compiler: for `torch.compile`.
    """

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    compiler: TorchDynamoPlugin = field(default_factory=lambda: TorchDynamoPlugin(backend=DynamoBackend.NO))

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        return self.compiler.backend is not DynamoBackend.NO


_SUBJECTS: Final = {
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "scaler",
    InitProcessGroupKwargs: "process_group",
    AutocastKwargs: "autocast",
    ProfileKwargs: "profile",
}


def sort_handlers(kwargs_handlers: Iterable[Any] | None) -> Handlers:
    """Return the records of `Accelerator(kwargs_handlers=…)` by subject.

    Raises:
        ConfigError: a record's class is not supported, or two records have the same class.
    """
    found: dict[str, Any] = {}
    problems = []
    for handler in kwargs_handlers or ():
        subject = next((name for kind, name in _SUBJECTS.items() if isinstance(handler, kind)), None)
        name = type(handler).__name__
        where = f"Accelerator(kwargs_handlers=[{name}(…)])"
        if subject is None:
            legal = ", ".join(kind.__name__ for kind in _SUBJECTS)
            problems.append(Problem(where, "", f"a {name} is not supported", f"Pass {legal}, or leave it out."))
        elif subject in found:
            problems.append(Problem(where, "", f"there are two {name}", "Pass one of each."))
        else:
            found[subject] = handler
    if problems:
        raise ConfigError(problems)
    return Handlers(**found)
