"""The weights of models: unwrapping, collecting, saving and loading."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.big_models.module_hooks import stored_values
from zero_plugin.checkpoint import save_model
from zero_plugin.checkpoint.load_weights import WeightsReport, find_weights, initialize_tensors, match_weights
from zero_plugin.checkpoint.objects import write_object
from zero_plugin.checkpoint.save import write_configuration
from zero_plugin.checkpoint.save_model import SavedWeights
from zero_plugin.checkpoint.tensor_files import RangeReader, session_fragments
from zero_plugin.config.amounts import require_bytes
from zero_plugin.config.installed import replaced
from zero_plugin.config.run_files import write_record
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.collectives import all_or_none, on_main
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.loop.memory_check import check_memory_to_load
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run
from zero_plugin.machine.hardware import available_cpu_memory
from zero_plugin.plan.run_plan import local_processes
from zero_plugin.strategies.copied_weights import check_weights_to_save
from zero_plugin.tensors.empty import init_empty_weights, outermost_modules
from zero_plugin.tensors.modules import (
    MASTER_WEIGHT,
    WEIGHT,
    Fragment,
    persistent_tensors,
    shared_names,
    tensor_slots,
)
from zero_plugin.tensors.nested import list_leaves
from zero_plugin.tensors.wrappers import bare_copy, extract_model

_log = logging.getLogger(__name__)


class Weights:
    """The weights of the models of one run, prepared or not.

    Args:
        run: the run.
        prepared: the prepared objects.
    """

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self._run = run
        self._prepared = prepared

    # ---- saving ------------------------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's own module inside a prepared model; see `Accelerator.unwrap_model`."""
        session = self._prepared.session_of(model)
        if session is None:
            return extract_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
        module = extract_model(session.module, keep_torch_compile=keep_torch_compile)
        return module if keep_fp32_wrapper else bare_copy(module)

    @collective("get_state_dict", waits_for_all=True, after_group="alone")
    def collect(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Collect unpartitioned weights and buffers in CPU memory; see `Accelerator.get_state_dict`."""
        state: dict[str, Tensor] = {}
        with working(f"gathering the weights of the {type(self.unwrap(model)).__name__}") as work:
            for name, tensor in self._named_tensors(model):
                work.advance(tensor.numel() * tensor.element_size())
                if self._run.processes.rank == 0:
                    state[name] = tensor.to("cpu", copy=True)
        if self._run.processes.rank != 0:
            return None
        return state | {alias: state[name] for alias, name in shared_names(self.unwrap(model)).items() if name in state}

    @collective("save_model", waits_for_all=True, after_group="alone")
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        trainable_only: bool = False,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        """Write the weights as a folder of safetensors; see `Accelerator.save_model`."""
        if not safe_serialization:
            raise LoopError(
                "save_model(safe_serialization=False): weights are always written as safetensors, without pickle.\n"
                "Remove it, or write accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin')."
            )
        limit, stored_as = require_bytes("save_model(max_shard_size=…)", max_shard_size), save_model.parse_dtype(dtype)
        target = Path(save_directory).expanduser().absolute()
        module = self.unwrap(model)
        check_weights_to_save(self._prepared.session_of(model))
        adapters = self._saved_names(module)
        names = save_model.names_to_save(module, trainable_only=trainable_only) if adapters is None else adapters
        weights = self._saved_weights(model, names, stored_as)
        if adapters is not None:
            self._write_adapters(model, save_model.unpartitioned_tensors(weights), target)
            return

        def write_other_files(folder: Path) -> None:
            self._write_record(model, folder)
            if not trainable_only:
                write_configuration(module, folder, stored_as)

        save_model.write_model(
            weights,
            target,
            max_shard_bytes=limit,
            tied=shared_names(self.unwrap(model)),
            notes={"contains": "the parameters that were trained"} if trainable_only else {},
            write_more=write_other_files,
        )

    def _saved_weights(self, model: nn.Module, names: Collection[str], dtype: torch.dtype | None) -> SavedWeights:
        session = self._prepared.session_of(model)
        if session is not None:
            return save_model.weights_of_session(session, names, dtype)

        def tensors() -> Iterable[tuple[str, Tensor]]:
            own = self._own_tensors(model, names)
            return own if self._run.processes.rank == 0 else ()

        return all_or_none(lambda: save_model.weights_of_module(self.unwrap(model), tensors, dtype))

    def _write_adapters(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        def write() -> None:
            module: Any = self.unwrap(model)
            module.save_pretrained(folder, state_dict=state)
            self._write_record(model, folder)

        on_main(write)

    def _write_record(self, model: nn.Module, folder: Path) -> None:
        for training in self._prepared.trainings:
            if training.is_of_model(model):
                write_record(training.resolved.record, folder)

    def save_object(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on the main process only; see `Accelerator.save`."""
        if any(hasattr(leaf, "ds_id") and leaf.numel() != leaf.ds_numel for leaf in list_leaves(obj)):
            raise LoopError(
                "save() got parameters that ZeRO stage 3 has partitioned: no process has all of them.\n"
                "Write accelerator.save(accelerator.get_state_dict(model), …), or use save_model()."
            )
        if self._run.processes.rank == 0:
            write_object(obj, f, safe_serialization=safe_serialization)

    def _named_tensors(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        session = self._prepared.session_of(model)
        if session is not None:
            return session.named_tensors(self._saved_names(session.module))
        return self._own_tensors(model, self._saved_names(self.unwrap(model)))

    def _own_tensors(self, model: nn.Module, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Return the named tensors of a model that is not prepared."""
        module = self.unwrap(model)
        if any(hasattr(p, "ds_id") for p in module.parameters()):
            raise LoopError(
                f"the {type(module).__name__} is partitioned but not prepared; pass the model that prepare() returned."
            )
        return stored_values(module, persistent_tensors(module, names))

    def _saved_names(self, module: nn.Module) -> Collection[str] | None:
        """Return the names of the tensors to save, the same on all processes; None for all tensors."""
        if not save_model.has_adapters(module):
            return None
        names = sorted(save_model.adapter_names(module)) if self._run.processes.rank == 0 else None
        return frozenset(collectives.broadcast_value(names))

    # ---- weights that the script reads and writes --------------------------------------------------------------------

    @contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Make weights readable and writable as in plain PyTorch; see `Accelerator.whole_weights`."""
        with ExitStack() as stack:
            self._enter_whole_weights(stack, models)
            yield

    @collective("whole_weights", waits_for_all=True, after_group="alone")
    def _enter_whole_weights(self, stack: ExitStack, models: tuple[nn.Module, ...]) -> None:
        for model in models:
            session = self._prepared.session_of(model)
            module = self.unwrap(model)
            with working(f"gathering the weights of the {type(module).__name__}"):
                stack.enter_context(
                    self._run.strategy.whole_weights(module) if session is None else session.whole_weights()
                )

    # ---- loading -----------------------------------------------------------------------------------------------------

    def init_model(
        self, weights: str | os.PathLike[str] | None = None, *, strict: bool = True
    ) -> AbstractContextManager[list[WeightsReport]]:
        """Return a context in which models are constructed partitioned at stage 3; see `Accelerator.init_model`."""
        self._run.follow_configuration()
        if self._run.document.deepspeed.value("zero_optimization", "stage") is AUTO:
            _log.info(
                "zero_optimization.stage is open until prepare(), so init_model() builds the unpartitioned model in "
                "every process. With `zero-plugin launch --model …` the plan chooses the stage earlier."
            )
        return self._building(None if weights is None else Path(weights), strict)

    @contextmanager
    def _building(self, weights: Path | None, strict: bool) -> Iterator[list[WeightsReport]]:
        if weights is None:
            with self._run.strategy.init_model():
                yield []
            return
        all_or_none(lambda: find_weights(weights))
        reports: list[WeightsReport] = []
        with (
            self._run.strategy.load_pretrained(False),
            _without_initializing(),
            outermost_modules() as made,
            init_empty_weights(include_buffers=False),
        ):
            yield reports
        models = [module for module in made if next(persistent_tensors(module), None) is not None]
        if not models:
            raise LoopError("init_model(weights=…): no model was constructed inside.")
        reports.extend(self.load(model, weights, strict=strict) for model in models)

    @collective("load_weights", waits_for_all=True, after_group="alone")
    def load(self, model: nn.Module, weights: Path, *, strict: bool) -> WeightsReport:
        """Read weights into a model; see `Accelerator.load_weights`."""
        with working(f"loading {weights.name}") as work:
            return self._load(model, weights, strict=strict, progress=work.advance)

    def _load(self, model: nn.Module, weights: Path, *, strict: bool, progress: Callable[[int], None]) -> WeightsReport:
        self._run.follow_configuration()
        session = self._prepared.session_of(model)
        module = extract_model(model, keep_torch_compile=False) if session is None else session.module
        stored = all_or_none(lambda: find_weights(weights))
        places, report = all_or_none(lambda: match_weights(module, stored, strict=strict))

        def read(fragments: Iterable[Fragment]) -> None:
            with RangeReader(stored.folder, progress) as reader:
                for fragment in fragments:
                    if fragment.kind in (WEIGHT, MASTER_WEIGHT) and fragment.name in places:
                        reader.read(places[fragment.name], fragment)

        with torch.no_grad():
            if session is not None:
                if session.before_change is not None:
                    session.before_change()
                with session.loading():
                    all_or_none(lambda: read(session_fragments(session, changing=True)))
            else:
                all_or_none(lambda: report.initialized.extend(_without_values(module, places)))
                target = self._run.device if self._run.options.device_placement else torch.device("cpu")
                if target.type == "cpu":
                    all_or_none(lambda: self._check_memory(module))
                self._run.strategy.allocate(module, target)
                all_or_none(lambda: read(self._run.strategy.fragments_to_fill(module, places)))
                self._initialize(module, report.initialized)
        if not report.is_complete:
            _log.info(str(report))
        return report

    def _check_memory(self, module: nn.Module) -> None:
        """Raise if CPU memory does not hold the tensors that this machine's processes are about to allocate."""
        empty = {id(slot.tensor): slot.tensor for slot in tensor_slots(module, recurse=True) if slot.tensor.is_meta}
        size = sum(tensor.numel() * tensor.element_size() for tensor in empty.values())
        parts = self._run.processes.world_size if self._run.strategy.partitions_parameters else 1
        check_memory_to_load(
            size // parts,
            local_processes(self._run.processes),
            available_cpu_memory(),
            f"the {type(module).__name__}",
            "Start fewer processes on this machine, or use ZeRO stage 3: each process then holds a partition.",
        )

    def _initialize(self, module: nn.Module, names: Collection[str]) -> None:
        if names:
            for fragment in self._run.strategy.fragments_to_fill(module, names):
                fragment.values.fill_(torch.nan)  # `initialize_tensors` finds tensors that no initializer has written
            initialize_tensors(module, names, self._run.strategy.gathered_tensors)


def _without_values(module: nn.Module, places: Collection[str]) -> list[str]:
    """Return the names of parameters on the meta device that are not in the files, and must be initialized.

    Raises:
        CheckpointError: buffers are on the meta device too, and their values are unknown.
    """
    empty = [(name, t) for name, t in persistent_tensors(module) if t.is_meta and name not in places]
    lost = [name for name, t in empty if not (isinstance(t, nn.Parameter) and t.is_floating_point())]
    lost += [slot.name for slot in tensor_slots(module, recurse=True) if slot.tensor.is_meta and not slot.is_persistent]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)} are on the meta device, and the files do not contain them.\n"
            "Construct the model inside `with accelerator.init_model(weights=…):`, which computes buffers."
        )
    return [name for name, _ in empty]


def _without_initializing() -> AbstractContextManager[None]:
    """Return a context in which transformers models do not initialize weights, but still tie them.

    The values are read from files afterwards.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return nullcontext()
    return replaced(modeling.PreTrainedModel, "initialize_weights", lambda _: None)
