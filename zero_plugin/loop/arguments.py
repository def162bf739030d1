"""The arguments of `Accelerator`: refuse unsupported ones, reconcile duplicates, and overlay the configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from zero_plugin.config.choices import RNGType
from zero_plugin.config.document import Document
from zero_plugin.config.find import overlay_code
from zero_plugin.config.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Handlers,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from zero_plugin.config.keys import ACCUMULATION
from zero_plugin.config.launch_settings import asked_compiler
from zero_plugin.config.parallelism import SEQUENCE_KEY, sequence_size_in_code
from zero_plugin.config.plugins import ONLY, DeepSpeedPlugin
from zero_plugin.config.tree import KeyPath
from zero_plugin.data.stream import ShardIterable
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.strategies.torch_strategies import TorchStrategy

_SHARD: Final = "Pass deepspeed_plugin=DeepSpeedPlugin(zero_stage=3): it shards the same states as FSDP's FULL_SHARD."
_DATA_PARALLEL: Final = (
    "Remove the argument. Models are not split: ZeRO partitions their states, parallelism_config(sp_size) sequences."
)
_NOT_HERE: Final = {"fsdp_plugin": _SHARD, "torch_tp_plugin": _DATA_PARALLEL, "megatron_lm_plugin": _DATA_PARALLEL}


def refuse_arguments(**arguments: Any) -> None:
    """Refuse arguments of Accelerate that this package does not support.

    Raises:
        ConfigError: an argument is not None; the error lists all of them, each with its replacement.
    """
    problems = [
        Problem(f"Accelerator({name}=…)", "", f"a {type(value).__name__} is not supported", _NOT_HERE[name])
        for name, value in arguments.items()
        if value is not None
    ]
    if problems:
        raise ConfigError(problems)


@dataclass
class Options:
    """The arguments of `Accelerator` that are not part of the configuration; scripts may change some of them later.

    Attributes:
        device_placement: whether models and batches are moved to this process's device.
        loading: the settings by which DataLoaders are sharded over the processes.
        accumulation: the settings of gradient accumulation.
        step_scheduler_with_optimizer: whether prepared schedulers advance with applied optimizer steps only.
        rng_types: the random number generators that are synchronized with rank 0 at the start of each epoch.
        project: the folders for checkpoints and logs.
        handlers: arguments of torch's own objects.
        shard_iterable: which iterable datasets are sharded.
        strategy: the class of the script's own strategy, or None.
    """

    device_placement: bool
    loading: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    step_scheduler_with_optimizer: bool
    rng_types: list[str]
    project: ProjectConfiguration
    handlers: Handlers
    shard_iterable: ShardIterable
    strategy: type[TorchStrategy] | None = None


def choose_plugins(deepspeed_plugin: Any, deepspeed_plugins: Any) -> dict[str, DeepSpeedPlugin]:
    """Return the DeepSpeed plugins by name; the first one is selected initially.

    Raises:
        ConfigError: both arguments are given, or a value is not a plugin.
    """
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise _refusal("deepspeed_plugins=…", "deepspeed_plugin is given too", "Pass one of the two.")
    given = deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins
    if given is None:
        return {}
    plugins = dict(given) if isinstance(given, Mapping) else {ONLY: given}
    for plugin in plugins.values():
        if not isinstance(plugin, DeepSpeedPlugin):
            fix = "Pass a DeepSpeedPlugin, or a dict of them by name."
            raise _refusal("deepspeed_plugin=…", f"a {type(plugin).__name__} is not a DeepSpeedPlugin", fix)
    return plugins


def choose_loading(
    given: DataLoaderConfiguration | None, *, split_batches: bool, even_batches: bool | None
) -> DataLoaderConfiguration:
    """Return the settings of loaders: the given record, with the separate arguments applied.

    Raises:
        ConfigError: the record and `even_batches` differ.
    """
    loading = given or DataLoaderConfiguration()
    if given is not None and even_batches and not given.even_batches:
        message = "DataLoaderConfiguration(even_batches=False) is given too"
        raise _refusal("even_batches=True", message, "Write the same value in both, or remove one.")
    return replace(
        loading,
        split_batches=split_batches or loading.split_batches,
        even_batches=loading.even_batches if even_batches is None else even_batches,
    )


def choose_project(
    given: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the given record itself, because it counts the run's checkpoints, or a new one for `project_dir`.

    Raises:
        ConfigError: the record and `project_dir` name different folders.
    """
    if given is None:
        return ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and given.project_dir is None:
        given.set_directories(project_dir)
    elif project_dir is not None and os.fspath(project_dir) != os.fspath(given.project_dir or ""):
        message = f"ProjectConfiguration(project_dir={str(given.project_dir)!r}) is given too"
        raise _refusal(f"project_dir={str(project_dir)!r}", message, "Write one of the two.")
    return given


def choose_accumulation(given: GradientAccumulationPlugin | None, steps: int | None) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation; `num_steps` is None if the arguments do not set it.

    Raises:
        ConfigError: the record and `gradient_accumulation_steps` differ.
    """
    if given is None:
        return GradientAccumulationPlugin(num_steps=steps)
    if steps not in (None, 1, given.num_steps):
        message = f"GradientAccumulationPlugin(num_steps={given.num_steps}) is given too"
        raise _refusal(f"gradient_accumulation_steps={steps}", message, "Write the number into one of the two.")
    return replace(given)


def choose_compiler(backend: Any, plugin: TorchDynamoPlugin | None, document: Document) -> TorchDynamoPlugin:
    """Return the compiler's settings: from the arguments, from `dynamo_config`, or from `ACCELERATE_DYNAMO_*`.

    Raises:
        ConfigError: both arguments are given, or code and configuration name different compilers.
        ValueError: the compiler is unknown.
    """
    if backend is not None and plugin is not None:
        raise _refusal(f"dynamo_backend={str(backend)!r}", "dynamo_plugin is given too", "Pass one of the two.")
    in_code = TorchDynamoPlugin(backend=backend) if plugin is None else plugin
    asked = asked_compiler(document.launch)
    if "backend" not in asked:
        return in_code
    names = {"use_fullgraph": "fullgraph", "use_dynamic": "dynamic"}
    configured = TorchDynamoPlugin(**{names.get(name, name): entry.value for name, entry in asked.items()})
    if backend is None and plugin is None:
        return configured
    if in_code.backend is not configured.backend:
        message = f"dynamo_backend is {configured.backend.value.lower()} at {asked['backend'].origin.where}"
        raise _refusal(f"dynamo_backend={in_code.backend.value.lower()!r}", message, "Write the same in both.")
    return in_code


def choose_rng_types(given: Iterable[str | RNGType] | None) -> list[str]:
    """Return the generators to synchronize at the start of each epoch; by default the generator of the sampler.

    Raises:
        ConfigError: a name is unknown.
    """
    names = ["generator"] if given is None else [str(name) for name in given]
    for name in names:
        if name not in RNGType:
            raise _refusal(f"rng_types=[{name!r}]", "is not a generator", f"Write some of {', '.join(RNGType.list())}.")
    return names


def overlay_arguments(
    document: Document, *, mixed_precision: Any, cpu: bool | None, parallelism_config: Any, options: Options
) -> Document:
    """Return the document with the arguments of `Accelerator` overlaid.

    Args:
        document: the configuration before the overlay.
        mixed_precision, cpu, parallelism_config: arguments of `Accelerator`.
        options: the other arguments of `Accelerator`.

    Raises:
        ConfigError: an argument contradicts an explicit value of a file or a flag; the error lists all of them.
    """
    steps, scaler = options.accumulation.num_steps, options.handlers.scaler
    given: dict[KeyPath, tuple[str, Any]] = {}
    if mixed_precision is not None:
        given[("mixed_precision",)] = (f"Accelerator(mixed_precision={str(mixed_precision)!r})", str(mixed_precision))
    if steps is not None:
        call = f"Accelerator(gradient_accumulation_steps={steps!r})"
        given[("deepspeed", ACCUMULATION.name)] = (call, steps)
    if (size := sequence_size_in_code(parallelism_config)) is not None and size > 1:
        given[("deepspeed", SEQUENCE_KEY)] = (f"ParallelismConfig(sp_size={size})", size)
    if cpu:
        given[("use_cpu",)] = ("Accelerator(cpu=True)", True)
    for key, value in ({} if scaler is None else _fp16_keys(scaler)).items():
        given[("deepspeed", "fp16", key)] = (f"GradScalerKwargs(…), which means fp16.{key} {value}", value)
    return overlay_code(document, given)


def _fp16_keys(scaler: GradScalerKwargs) -> dict[str, Any]:
    """Return the keys of the `fp16` section that correspond to the arguments of the loss scale."""
    given = scaler.to_kwargs()
    if not scaler.enabled:
        return {"loss_scale": 1.0}
    for name, is_legal, wanted in (
        ("growth_factor", scaler.growth_factor > 1, "above 1"),
        ("backoff_factor", 0 < scaler.backoff_factor < 1, "between 0 and 1"),
    ):
        if not is_legal:
            given_value = f"{name}={getattr(scaler, name)}"
            raise _refusal(given_value, "is not legal", f"Write a number {wanted}.", of="GradScalerKwargs")
    keys: dict[str, Any] = {}
    if "init_scale" in given:
        power = math.log2(scaler.init_scale) if scaler.init_scale > 0 else math.nan
        if not power.is_integer():
            message, fix = "is not a power of two", "Write a power of two, e.g. 65536."
            raise _refusal(f"init_scale={scaler.init_scale}", message, fix, of="GradScalerKwargs")
        keys["initial_scale_power"] = int(power)
    if "growth_interval" in given:
        keys["loss_scale_window"] = scaler.growth_interval
    return keys


def _refusal(argument: str, message: str, fix: str, of: str = "Accelerator") -> ConfigError:
    return ConfigError([Problem(f"{of}({argument})", "", message, fix)])
