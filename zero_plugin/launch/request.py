"""What is asked of a launch, and what every way to launch makes of it in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_deepspeed
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.spec import LaunchSpec, Program, Rendezvous, Setting
from zero_plugin.resolve.preflight import resolve_before_run
from zero_plugin.resolve.resolved import Resolved

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as it was asked for.

    Attributes:
        document: checked.
        settings: its launch part.
        program: what every worker runs.
        environ: this process's environment; a variable that the user set there is kept.
        endpoint: `host:port` where machines meet, in place of the main process's address; None where it was not given.
    """

    document: Document
    settings: LaunchSettings
    program: Program
    environ: Mapping[str, str]
    endpoint: str | None

    @property
    def on_deepspeed(self) -> bool:
        """Whether ZeRO is asked for."""
        return asks_for_deepspeed(self.document, self.settings)

    def resolve(
        self,
        problems: Iterable[Problem],
        *,
        accelerator: Literal["cpu", "cuda", "xla"],
        processes: int,
        bf16: bool = True,
    ) -> Resolved:
        """What the document resolves to before a run, unless something stands against the launch.

        Args:
            problems: what was found already.
            accelerator: what the workers will run on.
            processes: workers on all machines.
            bf16: whether the device computes in bf16.

        Raises:
            ConfigError: `problems`, and those of the configuration on these workers, at once.
        """
        found = list(problems)
        try:
            resolved = resolve_before_run(
                self.document,
                accelerator=accelerator,
                processes=processes,
                strategy="xla" if accelerator == "xla" else "deepspeed" if self.on_deepspeed else "ddp",
                bf16=bf16,
            )
        except ConfigError as error:
            raise ConfigError([*found, *error.problems]) from None
        if found:
            raise ConfigError(found)
        return resolved

    def spec(
        self, local_processes: int, machines: int, rendezvous: Rendezvous, environment: Mapping[str, Setting]
    ) -> LaunchSpec:
        """A spec with what the settings say of supervision, logs and restarts; `dataclasses.replace` adds the rest."""
        settings = self.settings
        return LaunchSpec(
            program=self.program,
            document=self.document,
            local_processes=local_processes,
            machines=machines,
            rendezvous=rendezvous,
            environment=environment,
            max_restarts=settings.max_restarts,
            grace_period=settings.grace_period,
            monitor_interval=settings.monitor_interval,
            log_dir=settings.log_dir,
            tee=settings.tee,
            role=settings.role,
            debug=settings.debug,
        )
