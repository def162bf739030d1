"""What a script hands to `Accelerator` beside plain values: one record for each subject, and DeepSpeed's configuration.

`HfDeepSpeedConfig` answers questions by dotted key, as scripts and transformers ask them. `DeepSpeedPlugin` is a
configuration given in code, and the live view of the one that runs. `Configurations` holds one document, or one for
each plugin, of which one is followed at a time.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.choices import TRUE_WORDS, DDPCommunicationHookType, DynamoBackend
from zero_plugin.config.document import SHORT_FIELDS, Document
from zero_plugin.config.find import lay_document, overlay_code
from zero_plugin.config.launch_settings import asks_for_deepspeed, launch_settings
from zero_plugin.config.read import document_from_mapping, parse_file
from zero_plugin.config.tree import AUTO, KeyPath, Origin, Tree, dotted, same_value, show
from zero_plugin.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


class KwargsHandler:
    """A dataclass of arguments for one torch object, which is given those that differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """All arguments."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments that differ from the defaults."""
        defaults = self._defaults()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        known = {}
        for f in fields(cls):  # type: ignore[arg-type]  # subclasses are dataclasses
            known[f.name] = f.default if f.default_factory is MISSING else f.default_factory()
        return known


@dataclass
class AutocastKwargs(KwargsHandler):
    """For `torch.autocast`, in prepared models and in `Accelerator.autocast`.

    Attributes:
        enabled: whether operations compute in the run's 16-bit type.
        cache_enabled: whether a weight's 16-bit copy is kept within the context; None leaves it to torch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """For `torch.nn.parallel.DistributedDataParallel`; the names and the defaults are its own.

    Attributes:
        gradient_as_bucket_view: gradients are views of the buckets that are summed, which saves a copy of them. Those
            that a script keeps over `zero_grad` are overwritten then.
        comm_hook: how gradients are compressed between processes.
        comm_wrapper: the type (`FP16`, `BF16`) that a `comm_hook` works in.
        comm_state_option: for `PowerSGDState` under `POWER_SGD` and `BATCHED_POWER_SGD`.
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
        """The arguments of DDP itself, without those of the hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Have `model` reduce its gradients by the hook that is configured, if one is.

        Raises:
            ValueError: a hook or wrapper is not known; names those that are.
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
    """How the loss scale of fp16 moves; the names are those of `torch.amp.GradScaler`.

    Attributes:
        init_scale: the first scale.
        growth_factor: by what it grows after `growth_interval` applied steps.
        backoff_factor: by what it changes at a step whose gradients are not finite.
        growth_interval: applied steps from one growth to the next.
        enabled: False trains without a scale.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """For `torch.distributed.init_process_group`.

    Attributes:
        backend: `nccl` or `gloo`; None takes NCCL on GPUs, with gloo beside it for CPU tensors, and gloo on CPUs.
        init_method: where the processes meet, as a URL; None takes the launcher's environment.
        timeout: how long a collective may wait; None takes 30 minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """For `torch.profiler.profile`, which `Accelerator.profile` runs.

    Attributes:
        activities: of `cpu`, `cuda`, `xpu`, `mtia`; None takes all that there are.
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
        """The profiler, not started.

        Raises:
            ValueError: an activity is not known to torch; names those that are.
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
    """How `prepare` shares loaders out.

    Attributes:
        split_batches: a loader's batch size is that of all processes together.
        dispatch_batches: process 0 reads every batch and sends the others their parts.
        even_batches: complete an epoch's last step with its first samples, so that every process has a full batch.
        use_seedable_sampler: shuffle by a generator that is seeded anew for each epoch.
        data_seed: seed of that sampler; None takes torch's current one.
        non_blocking: do not wait for batches to be copied to the device; the loader needs `pin_memory=True`.
        use_stateful_dataloader: after `load_state`, the coming loop resumes inside the epoch by itself.
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
    """How gradients add up.

    Attributes:
        num_steps: micro-batches per optimizer step; None takes the configuration's, else 1.
        adjust_scheduler: no effect: a schedule moves where the optimizer steps.
        sync_with_dataloader: a loader's end closes the window.
        sync_each_batch: reduce gradients at each micro-batch, which saves memory and costs communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Where a run keeps what it writes.

    Attributes:
        project_dir: folder of the run.
        logging_dir: folder of local trackers; None takes `project_dir`.
        automatic_checkpoint_naming: `save_state` numbers its folders by itself.
        total_limit: how many of those are kept.
        iteration: number of the next one, unless a run has used it in that folder: numbers grow over all runs.
        save_on_each_node: no effect: a checkpoint is one folder, which all processes see.
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
        """Make `project_dir` the folder of the run, and of its trackers where they have none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """For `torch.compile`; what is None is read from `ACCELERATE_DYNAMO_*`, which Accelerate's launcher sets.

    Attributes:
        backend: the compiler; absent everywhere: none.
        mode: `default`, `reduce-overhead` or `max-autotune`.
        fullgraph: refuse a model that breaks into several graphs.
        dynamic: compile for changing shapes; None lets torch find out.
        options: for the backend.
        disable: call `torch.compile`, but have it do nothing.
        use_regional_compilation: compile one of the repeated blocks of a model for all of them, instead of the model.
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
        if self.fullgraph is None:
            self.fullgraph = _is_set("FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = _is_set("REGIONAL_COMPILATION")
        if self.dynamic is None and "ACCELERATE_DYNAMO_USE_DYNAMIC" in os.environ:
            self.dynamic = _is_set("DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """All arguments, the backend in small letters, as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {**super()._defaults(), **cls._WHERE_NOT_SET}


def _hook_type(argument: str, value: Any) -> DDPCommunicationHookType:
    if str(value) not in DDPCommunicationHookType:
        legal = ", ".join(DDPCommunicationHookType.list())
        raise ValueError(f"DistributedDataParallelKwargs({argument}={str(value)!r}): write one of {legal}.")
    return DDPCommunicationHookType(str(value))


def _is_set(name: str) -> bool:
    value = os.environ.get(f"ACCELERATE_DYNAMO_USE_{name}", "false").strip().lower()
    return value in TRUE_WORDS


@dataclass(frozen=True, slots=True)
class Handlers:
    """What a script set of torch's own objects; None where it said nothing.

    Attributes:
        ddp: of DistributedDataParallel.
        scaler: of the loss scale under fp16.
        process_group: of the process group.
        autocast: of the context that 16-bit operations run in.
        profile: of the profiler.
        compiler: of `torch.compile`.
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
    """The records of `Accelerator(kwargs_handlers=…)` by subject.

    Raises:
        ConfigError: a record is of no known kind, or two are of one kind.
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


_WHERE: Final = "DeepSpeedPlugin(…)"
# What scripts look up whether or not it was written.
_ALWAYS_SHOWN: Final = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
_WHERE_ABSENT: Final = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 0,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": False,
}


class HfDeepSpeedConfig:
    """A DeepSpeed configuration as a plain dict.

    Args:
        config_file_or_dict: path of a DeepSpeed JSON, a dict, which is copied, or the JSON's text, also as URL-safe
            base64.

    Attributes:
        config: the dict, which answers follow when it changes.

    Raises:
        ConfigError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        parsed = parse_configuration(config_file_or_dict)
        self.config: dict[str, Any]
        if isinstance(parsed, dict):
            self.config = parsed
        else:
            problems: list[Problem] = []
            self.config = parse_file(Path(parsed), problems).plain()
            if problems:
                raise ConfigError(problems)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dict that holds, or would hold, a dotted key, with the key's last part; None for a missing dict."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, e.g. `zero_optimization.stage`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key with all below it.

        Raises:
            ValueError: it is not there, and `must_exist`.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"there is no {ds_key_long} in the DeepSpeed configuration.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the key is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the key is there and not true."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether the ZeRO stage is 2."""
        return bool(self.get_value("zero_optimization.stage", -1) == 2)

    def is_zero3(self) -> bool:
        """Whether the ZeRO stage is 3."""
        return bool(self.get_value("zero_optimization.stage", -1) == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters leave the device."""
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)


def parse_configuration(given: Any) -> dict[str, Any] | str:
    """A DeepSpeed configuration as scripts name one: a copy of its keys, or the path of its file.

    Args:
        given: see `HfDeepSpeedConfig`, whose objects, and transformers', are taken too.

    Raises:
        ConfigError: it is neither keys nor a path nor a configuration's text.
    """
    config = getattr(given, "config", given)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, os.PathLike):
        return str(os.fspath(config))
    if not isinstance(config, str):
        fix = "Pass the path of a DeepSpeed JSON, or a dict."
        raise ConfigError([Problem("hf_ds_config", "", f"a {type(config).__name__} is no configuration", fix)])
    for text in (config, _decoded(config)):
        if text.lstrip().startswith("{"):
            try:
                parsed: dict[str, Any] = json.loads(text)
            except ValueError as error:
                fix = "Pass complete JSON, or the path of a file."
                raise ConfigError([Problem("hf_ds_config", "", f"broken JSON: {error}", fix)]) from None
            return parsed
    return config


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


@dataclass
class DeepSpeedPlugin:
    """A DeepSpeed configuration: a complete one, short fields, or both where they agree.

    What is None or `auto` is filled from the launch configuration and the loop. Once `Accelerator` has it, it shows
    what runs; what a script writes into `deepspeed_config` until the next `prepare` is followed there.

    Attributes:
        hf_ds_config: path of a DeepSpeed JSON, a dict, or an `HfDeepSpeedConfig`; afterwards always the last.
        gradient_accumulation_steps: micro-batches per optimizer step.
        gradient_clipping: largest gradient norm.
        zero_stage: 0 to 3; where nothing says it, 2, or 0 beside an `hf_ds_config`, as DeepSpeed has it.
        is_train_batch_min: only True: the training loader's batch size counts, whatever the others' are.
        offload_optimizer_device, offload_param_device: `none`, `cpu` or `nvme`.
        offload_optimizer_nvme_path, offload_param_nvme_path: folders for `nvme`.
        zero3_init_flag: at stage 3, have transformers' `from_pretrained` build models partitioned.
        zero3_save_16bit_model: at stage 3, whether DeepSpeed's own saving gathers the weights.
        transformer_moe_cls_names: classes of mixture-of-experts layers, comma-separated, beside those found by
            their structure.
        enable_msamp, msamp_opt_level: refused; there is no fp8.
        deepspeed_config: the configuration as a dict with `auto` for open fields.

    Raises:
        ConfigError: everything that is wrong with it.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | str | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        self._refuse_without_meaning()
        given = {name: getattr(self, name) for name in (*SHORT_FIELDS, "zero3_init_flag")}
        given["deepspeed_moe_layer_cls_names"] = self.transformer_moe_cls_names
        training = {name: value for name, value in given.items() if value is not None}
        if self.hf_ds_config not in (None, "none"):
            training["deepspeed_config_file"] = parse_configuration(self.hf_ds_config)
        ignored = self._ignored_offload()
        if ignored:
            training = {name: value for name, value in training.items() if not name.startswith("offload_param_")}
        asked = {"distributed_type": "DEEPSPEED", "deepspeed_config": training}
        document = document_from_mapping(asked, _WHERE)
        self._document = replace(document, notes=(*document.notes, *ignored))
        self.deepspeed_config: dict[str, Any] = {}
        self.hf_ds_config = HfDeepSpeedConfig({})
        self.hf_ds_config.config = self.deepspeed_config
        self._selected = False
        self._pretrained: Callable[[bool], AbstractContextManager[None]] = lambda _: nullcontext()
        self.show(self._document)

    @property
    def document(self) -> Document:
        """What code asks for, with what was written into `deepspeed_config` since."""
        return self.follow(self._document)

    @property
    def selected(self) -> bool:
        """Whether it is the plugin that `prepare` takes."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Have the next `prepare` take this plugin; `accelerator.state.select_deepspeed_plugin(name)` does it.

        Raises:
            ValueError: a direct call, which would leave two plugins selected.
        """
        if not _from_accelerator_state:
            raise ValueError("call accelerator.state.select_deepspeed_plugin(name) to choose among several plugins.")
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration, e.g. `zero_optimization.stage`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key is open."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_zero3_init_enabled(self) -> bool:
        """Whether `from_pretrained` builds models partitioned."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Inside, transformers' `from_pretrained` partitions models at stage 3 if `enable`, and never otherwise."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            with self._pretrained(enable):
                yield
        finally:
            self.zero3_init_flag = before

    def show(self, document: Document, filled: Mapping[str, Any] | None = None) -> None:
        """Become the view of `document`, in the same dict as before.

        Args:
            document: what is configured.
            filled: its training configuration with open fields filled; None shows them as `auto`.
        """
        config = {**_ALWAYS_SHOWN, **(document.to_deepspeed() if filled is None else filled)}
        self.deepspeed_config.clear()
        self.deepspeed_config.update(config)
        for name, path in SHORT_FIELDS.items():
            setattr(self, name, self.get_value(dotted(path), _WHERE_ABSENT.get(name)))
        flag = document.launch.value("zero3_init_flag")
        self.zero3_init_flag = self.zero_stage == 3 if flag in (None, AUTO) else flag
        self._shown = copy.deepcopy(config)

    def build_pretrained_by(self, context: Callable[[bool], AbstractContextManager[None]]) -> None:
        """Have `zero3_init_context_manager` enter `context(enable)`."""
        self._pretrained = context

    def follow(self, document: Document) -> Document:
        """`document` with what was written into `deepspeed_config` since it was last shown.

        Raises:
            ConfigError: what was written differs from an explicit value of file or flag; lists every such pair.
        """
        before, now = _as_tree(self._shown), _as_tree(self.deepspeed_config)
        changed = {
            path: entry.value
            for path, entry in now.entries.items()
            if path not in before or not same_value(before.entries[path].value, entry.value)
        }
        gone = [p for p in before if p not in now and not any(p == q[: len(p)] or q == p[: len(q)] for q in changed)]
        if not changed and not gone:
            return document
        training = document.deepspeed
        problems = []
        for path in (*changed, *gone):
            entry = training.get(*path)
            if entry is None:
                continue
            if path in changed and entry.origin.kind not in ("file", "flag"):
                training = training.without(*path)  # code that corrects what code wrote
            elif path in gone and entry.value is not AUTO and entry.origin.kind in ("file", "flag"):
                message = f"deleted in code, but {show(entry.value)} at {entry.origin.where}"
                fix = "Delete it there, or write auto there."
                problems.append(Problem(_written(path), dotted(path), message, fix))
            elif path in gone:
                training = training.without(*path)
        if problems:
            raise ConfigError(problems)
        said = {("deepspeed", *path): (_written(path), value) for path, value in changed.items()}
        return overlay_code(replace(document, deepspeed=training), said)

    def _ignored_offload(self) -> list[Problem]:
        """Offload of parameters beside a stage of the same call that has none: Accelerate takes it without effect."""
        if self.zero_stage not in (0, 1, 2) or self.offload_param_device in (None, "none", AUTO):
            return []
        message = f"{self.offload_param_device} has no effect: stage {self.zero_stage} does not partition parameters"
        fix = "Leave it out, or write zero_stage=3."
        return [Problem(_WHERE, "offload_param_device", message, fix, severity="warning")]

    def _refuse_without_meaning(self) -> None:
        problems = []
        if self.enable_msamp:
            fix = "Leave it out, and write mixed_precision='bf16'."
            problems.append(Problem("DeepSpeedPlugin(enable_msamp=True)", "", "MS-AMP is not supported", fix))
        if not self.is_train_batch_min:
            where, message = "DeepSpeedPlugin(is_train_batch_min=False)", "the training loader's batch size counts"
            problems.append(Problem(where, "", message, "Leave it out; prepare the training loader first of several."))
        if problems:
            raise ConfigError(problems)


def _as_tree(config: dict[str, Any]) -> Tree:
    return Tree.from_nested(config, lambda path: Origin("code", _written(path)))


def _written(path: KeyPath) -> str:
    return "deepspeed_config" + "".join(f"[{part!r}]" for part in path)


ONLY: Final = "default"  # the name of a plugin that came without one


class Configurations:
    """The documents of a run by the names of their plugins; that of the selected plugin is followed.

    Args:
        found: what launcher and file say.
        plugins: what code says by plugins; none where it has none.
        overlay: lays the other arguments of code over a document.

    Attributes:
        plugins: a view of each document, the first one selected; none of a run without DeepSpeed.
        in_code: whether code brought the plugins.

    Raises:
        ConfigError: everything that is wrong with the documents.
    """

    def __init__(
        self,
        found: Document,
        plugins: Mapping[str, DeepSpeedPlugin],
        overlay: Callable[[Document], Document],
    ) -> None:
        documents = {name: lay_document(found, plugin.document) for name, plugin in plugins.items()} or {ONLY: found}
        self._documents = {name: _checked(overlay(document)) for name, document in documents.items()}
        self.in_code = bool(plugins)
        self.plugins = dict(plugins)
        only = self._documents.get(ONLY)
        if not plugins and only is not None and asks_for_deepspeed(only, launch_settings(only)):
            self.plugins = {ONLY: DeepSpeedPlugin()}
        for number, (name, plugin) in enumerate(self.plugins.items()):
            plugin.show(self._documents[name])
            plugin.select(_from_accelerator_state=True) if number == 0 else plugin._unselect()

    @property
    def document(self) -> Document:
        """What the next `prepare` follows."""
        return self._documents[self._selected]

    @property
    def plugin(self) -> DeepSpeedPlugin | None:
        """The view of that document; None of a run without DeepSpeed."""
        return self.plugins.get(self._selected)

    @property
    def _selected(self) -> str:
        return next((name for name, plugin in self.plugins.items() if plugin.selected), ONLY)

    def overlay(self, lay: Callable[[Document], Document]) -> None:
        """Lay further arguments of code over every document.

        Raises:
            ConfigError: they differ from what is there.
        """
        self._documents = {name: _checked(lay(document)) for name, document in self._documents.items()}

    def follow_edits(self) -> Document:
        """The selected document with what the script wrote into its plugin since it was last shown.

        Raises:
            ConfigError: that differs from an explicit value of file or flag, or cannot run.
        """
        if self.plugin is not None:
            followed = self.plugin.follow(self.document)
            if followed is not self.document:
                self._documents[self._selected] = _checked(followed)
                self.plugin.show(self.document)
        return self.document

    def show(self, filled: Mapping[str, Any]) -> None:
        """Let the selected plugin show a configuration whose open fields are filled."""
        if self.plugin is not None:
            self.plugin.show(self.document, filled)


def _checked(document: Document) -> Document:
    return replace(document, notes=check_document(document))
