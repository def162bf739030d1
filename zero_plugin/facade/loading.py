"""What a script calls to build a model with pretrained weights, and to read weights into one that is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import nn

from zero_plugin.checkpoint.layout import session_fragments
from zero_plugin.checkpoint.load_weights import WeightsReport, find_weights, initialize_tensors, match_weights
from zero_plugin.checkpoint.ranges import open_reader
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.processes import Processes
from zero_plugin.distributed.together import all_or_none
from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.loop.memory_check import expect_room_to_load
from zero_plugin.machine.memory import available_cpu_memory
from zero_plugin.plan.run_plan import local_processes
from zero_plugin.strategies.base import Session, Strategy
from zero_plugin.tensors.empty import init_empty_weights, outermost_modules
from zero_plugin.tensors.fragments import MASTER, WEIGHT, Fragment
from zero_plugin.tensors.modules import persistent_tensors, tensor_slots
from zero_plugin.tensors.wrappers import extract_model


class LoadingCalls:
    """The calls of the facade that bring weights into models, straight from files to where each process keeps them."""

    device: torch.device
    device_placement: bool
    document: Document
    _follow_configuration: Callable[[], None]
    _processes: Processes
    _say: Callable[[str], None]
    _session_of: Callable[[nn.Module], Session | None]
    _strategy: Strategy

    def init_model(
        self, weights: str | os.PathLike[str] | None = None, *, strict: bool = True
    ) -> AbstractContextManager[list[WeightsReport]]:
        """A model made inside is never whole in any process, where the strategy partitions parameters (ZeRO stage 3).

        Without `weights` its values are those that it would have outside. With them, its parameters have no values and
        take no memory (they are on the meta device) until it is complete; then each process reads its part of each.
        Where nothing is partitioned, each reads the whole model once, straight to its device. Buffers are computed as
        always.

        transformers' `from_pretrained` and `from_config` need no such context after `Accelerator()`, unless the
        configuration says `zero3_init_flag: false`; there `from_config` draws other random values than outside.

        Args:
            weights: a folder of safetensors (of transformers, `save_model` or `save_state`), or one file. All models
                made inside, which no other one holds, get their weights there.
            strict: see `load_weights`. With False, parameters that are not in the files get what a new model draws.

        Yields:
            A list that holds one report for each model, once the context has ended.

        Raises:
            CheckpointError: as `load_weights`; of a bad folder before anything is built.
            LoopError: no model was made inside.
        """
        self._follow_configuration()
        if self.document.deepspeed.value("zero_optimization", "stage") is AUTO:
            self._say(
                "zero_optimization.stage is open until prepare(): what init_model() builds is whole in every process; "
                "`zero-plugin launch --model …` has the plan choose the stage before"
            )
        if weights is None:
            return self._building_with_values()
        return self._building_empty(Path(weights), strict)

    def load_weights(self, model: nn.Module, weights: str | os.PathLike[str], *, strict: bool = True) -> WeightsReport:
        """Read weights into a model, each process just the bytes that it keeps; collective.

        They are converted to the type that the model has. Of a prepared model the optimizer's 32-bit copies come from
        the file too, not out of 16-bit weights; its states stay as they are.

        Args:
            model: plain, made inside `init_model`, on the meta device, or prepared.
            weights: a folder of safetensors (of transformers, `save_model` or `save_state`), or one file. Names are the
                model's own; transformers' older names and other layouts are for `from_pretrained`.
            strict: every tensor has to have its counterpart. False leaves the others as they are, or initialises what
                has no values yet, and says so.

        Returns:
            Which tensors were loaded, which are missing, unexpected or of another shape.

        Raises:
            CheckpointError: on every process: names or shapes do not fit, all of them told, and nothing was written; or
                a file is missing or damaged.
            MachineError: host memory does not hold the model for each process of a machine.
        """
        return self._load(model, Path(weights), strict)

    @contextmanager
    def _building_with_values(self) -> Iterator[list[WeightsReport]]:
        with self._strategy.init_model():
            yield []

    @contextmanager
    def _building_empty(self, weights: Path, strict: bool) -> Iterator[list[WeightsReport]]:
        all_or_none(lambda: find_weights(weights))
        reports: list[WeightsReport] = []
        with (
            self._strategy.load_pretrained(False),
            _without_initializing(),
            outermost_modules() as made,
            init_empty_weights(include_buffers=False),
        ):
            yield reports
        models = [module for module in made if next(persistent_tensors(module), None) is not None]
        if not models:
            raise LoopError("init_model(weights=…): no model was made inside.")
        reports.extend(self._load(model, weights, strict) for model in models)

    @collective("load_weights", meets=True)
    def _load(self, model: nn.Module, weights: Path, strict: bool) -> WeightsReport:
        self._follow_configuration()
        session = self._session_of(model)
        module = extract_model(model, keep_torch_compile=False) if session is None else session.module
        stored = all_or_none(lambda: find_weights(weights))
        places, report = all_or_none(lambda: match_weights(module, stored, strict=strict))

        def read(fragments: Iterable[Fragment]) -> None:
            with open_reader(stored.folder) as reader:
                for fragment in fragments:
                    if fragment.kind in (WEIGHT, MASTER) and fragment.name in places:
                        reader.read(places[fragment.name], fragment)

        with torch.no_grad():
            if session is not None:
                if session.before_change is not None:
                    session.before_change()
                with session.reading():
                    all_or_none(lambda: read(session_fragments(session, changing=True)))
            else:
                all_or_none(lambda: report.initialized.extend(_without_values(module, places)))
                target = self.device if self.device_placement else torch.device("cpu")
                if target.type == "cpu":
                    all_or_none(lambda: self._expect_room(module))
                self._strategy.allot(module, target)
                all_or_none(lambda: read(self._strategy.fragments_to_fill(module, places)))
                self._initialize(module, report.initialized)
        if not report.is_complete:
            self._say(str(report))
        return report

    def _expect_room(self, module: nn.Module) -> None:
        """Raise where host memory does not hold what every process of this machine is about to allot."""
        empty = {id(slot.tensor): slot.tensor for slot in tensor_slots(module, recurse=True) if slot.tensor.is_meta}
        size = sum(tensor.numel() * tensor.element_size() for tensor in empty.values())
        parts = self._processes.world_size if self._strategy.partitions_parameters else 1
        expect_room_to_load(
            size // parts,
            local_processes(self._processes),
            available_cpu_memory(),
            f"the {type(module).__name__}",
            "Start fewer processes on this machine, or use ZeRO stage 3, where no process holds all of it.",
        )

    def _initialize(self, module: nn.Module, names: Collection[str]) -> None:
        if names:
            for fragment in self._strategy.fragments_to_fill(module, names):
                fragment.values.fill_(torch.nan)
            initialize_tensors(module, names, self._strategy.whole_tensors)


def _without_values(module: nn.Module, places: Collection[str]) -> list[str]:
    """The parameters that have no values, and get none out of a file.

    Raises:
        CheckpointError: buffers are so too: nobody can tell what a constructor would have computed.
    """
    empty = [(name, t) for name, t in persistent_tensors(module) if t.is_meta and name not in places]
    lost = [name for name, t in empty if not (isinstance(t, nn.Parameter) and t.is_floating_point())]
    lost += [slot.name for slot in tensor_slots(module, recurse=True) if slot.tensor.is_meta and not slot.is_persistent]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)}: on the meta device, and not in the file, so that nobody knows their values.\n"
            "Build the model inside `with accelerator.init_model(weights=…):`, where buffers are computed."
        )
    return [name for name, _ in empty]


@contextmanager
def _without_initializing() -> Iterator[None]:
    """Models of transformers do not initialise weights that are to be read; they still tie them."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    initialize = modeling.PreTrainedModel.initialize_weights
    modeling.PreTrainedModel.initialize_weights = lambda _: None
    try:
        yield
    finally:
        modeling.PreTrainedModel.initialize_weights = initialize
