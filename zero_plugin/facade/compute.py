"""What a script calls around its own computations: 16-bit arithmetic, the profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch.profiler import profile

from zero_plugin.config.document import Document
from zero_plugin.handlers import Handlers
from zero_plugin.plugins import AutocastKwargs, ProfileKwargs
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.processes import Processes

__all__ = ["ComputeCalls"]


class ComputeCalls:
    """The calls of the facade that set up computations outside of prepared models."""

    document: Document
    resolved: Resolved | None
    _handlers: Handlers
    _processes: Processes
    _strategy: Strategy

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`; before `prepare`, what the configuration says."""
        if self.resolved is not None:
            return self.resolved.precision
        return str(self.document.launch.value("mixed_precision", default="no"))

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute in the run's 16-bit type inside, as a prepared model does by itself.

        Under ZeRO it changes nothing: weights are in that type, what a model returns is fp32, and what the script
        computes of that stays fp32.

        Args:
            autocast_handler: for this context; None takes the one from `kwargs_handlers`.
        """
        return self._strategy.autocast(self.mixed_precision, autocast_handler or self._handlers.autocast)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """torch's profiler, running inside; with a schedule, call its `step()` after each step of the loop.

        Args:
            profile_handler: for this context; None takes the one from `kwargs_handlers`. Its `output_trace_dir` gets
                one Chrome trace of each process, `profile_<process>.json`.
        """
        handler = profile_handler or self._handlers.profile or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{self._processes.rank}.json"))
        self._processes.barrier()
