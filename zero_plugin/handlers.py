"""The records of `kwargs_handlers` and the compiler's, by subject, as strategies and sessions read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from zero_plugin.choices import DynamoBackend
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plugins import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)

__all__ = ["Handlers", "sort_handlers"]


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
