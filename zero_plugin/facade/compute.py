"""What a script calls around its own computations: 16-bit arithmetic, the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from zero_plugin.config.document import Document
from zero_plugin.config.plugins import AutocastKwargs, Handlers, ProfileKwargs
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.training import expected_precision
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError
from zero_plugin.loop.training import Training
from zero_plugin.plan.run_facts import accelerator_kind, probe_machine
from zero_plugin.strategies.base import Session, Strategy


class LossScaler:
    """The loss scale of fp16 under the names of torch's `GradScaler`; `backward` and `step` do what that one's do.

    Args:
        trained: what is prepared with its optimizer, as it stands at each call.
        unscale: takes the scale out of an optimizer's gradients.
    """

    def __init__(self, trained: list[Training], unscale: Callable[[Any], None]) -> None:
        self._trained = trained
        self.unscale_ = unscale

    def is_enabled(self) -> bool:
        """True: without fp16 there is no scaler."""
        return True

    def get_scale(self) -> float:
        """The factor on the loss.

        Raises:
            LoopError: nothing is prepared that has one.
        """
        return self._first().loss_scale

    def state_dict(self) -> dict[str, float]:
        """Where the scale stands; `save_state` keeps it too.

        Raises:
            LoopError: nothing is prepared that has one.
        """
        return self._first().scale_state()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Go on from a `state_dict`, with every prepared model."""
        for training in self._trained:
            training.session.restore_scale(state_dict)

    def _first(self) -> Session:
        if not self._trained:
            raise LoopError("accelerator.scaler: a loss scale comes with the model; call prepare(model, optimizer).")
        return self._trained[0].session


class ComputeCalls:
    """The calls of the facade that set up computations outside of prepared models."""

    device: torch.device
    document: Document
    resolved: Resolved | None
    _handlers: Handlers
    _processes: Processes
    _strategy: Strategy
    _trained: list[Training]
    unscale_gradients: Callable[[Any], None]

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`; before `prepare`, what a model that is prepared now would get."""
        if self.resolved is not None:
            return self.resolved.precision
        machine = probe_machine(accelerator_kind(self.device), self._processes.world_size)
        return expected_precision(self.document, machine)

    @property
    def native_amp(self) -> bool:
        """Whether the run computes in a 16-bit type."""
        return self.mixed_precision != "no"

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale; None without fp16."""
        return LossScaler(self._trained, self.unscale_gradients) if self.mixed_precision == "fp16" else None

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
