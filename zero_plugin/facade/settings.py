"""What a script reads back of the arguments of `Accelerator`, some of which it may change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zero_plugin.config.deepspeed_plugin import Configurations, DeepSpeedPlugin
from zero_plugin.config.plugins import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)


class SettingCalls:
    """The attributes of the facade that show how it was made.

    Attributes:
        project_configuration: where the run keeps what it writes.
        parallelism_config, torch_device_mesh, fp8_backend: None, for libraries that ask: data are divided, models only
            by ZeRO, and there is no fp8.
        is_fsdp2, is_composable_parallelism_enabled, has_lomo_optimizer: False likewise.
        should_save_model: True: no process group holds a copy that is not to be saved.
    """

    parallelism_config: None = None
    torch_device_mesh: None = None
    fp8_backend: None = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    has_lomo_optimizer = False
    should_save_model = True
    project_configuration: ProjectConfiguration
    _configurations: Configurations
    _handlers: Handlers

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of local trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that `save_state` names by itself."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed configuration that the next `prepare` follows; None of a run without DeepSpeed.

        What a script writes into its `deepspeed_config` before that is followed.
        """
        return self._configurations.plugin

    @property
    def deepspeed_plugins(self) -> Mapping[str, DeepSpeedPlugin] | None:
        """All DeepSpeed configurations by name; None of a run without DeepSpeed."""
        return self._configurations.plugins or None

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The `deepspeed_config` of `deepspeed_plugin`; None of a run without DeepSpeed."""
        return None if self.deepspeed_plugin is None else self.deepspeed_plugin.deepspeed_config

    @contextmanager
    def maybe_context_parallel(self, *_: Any, **__: Any) -> Iterator[None]:
        """Nothing: sequences are not divided over processes."""
        yield

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The arguments of DistributedDataParallel; None where none were given."""
        return self._handlers.ddp

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The arguments of the loss scale; None where none were given."""
        return self._handlers.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The arguments of the process group; None where none were given."""
        return self._handlers.process_group

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The arguments of autocast; None where none were given."""
        return self._handlers.autocast

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The arguments of the profiler; None where none were given."""
        return self._handlers.profile
