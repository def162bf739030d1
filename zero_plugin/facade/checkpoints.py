"""What a script calls to save the whole state of its training."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.folders import Lineages, automatic_folder, next_number, rotate_checkpoints
from zero_plugin.checkpoint.layout import session_fragments
from zero_plugin.checkpoint.save import Draft, open_checkpoint, random_state
from zero_plugin.checkpoint.save_model import write_configuration
from zero_plugin.config.amounts import require_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.plugins import ProjectConfiguration
from zero_plugin.config.resolve.run_record import describe_run, write_record
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.processes import Processes
from zero_plugin.distributed.together import SCRIPT, Peers, all_or_none, on_main, taken_out
from zero_plugin.errors import CheckpointError
from zero_plugin.facade.restoring import LoadHook, refuse_options
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import Training, describe_training, is_inside_window, schedules_of

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]


class CheckpointCalls:
    """The calls of the facade that write checkpoints, and say what goes into them."""

    document: Document
    project_configuration: ProjectConfiguration
    _background: BackgroundWriter
    _dataloaders: list[DataLoaderAdapter]
    _lineages: Lineages
    _processes: Processes
    _say: Callable[[str], None]
    _trainings: list[Training]
    _waiting: list[AcceleratedOptimizer]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, SaveHook]
    _load_model_state_pre_hook: OrderedDict[int, LoadHook]
    get_state_dict: Callable[[nn.Module], dict[str, Tensor] | None]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too: each has `state_dict()`, of what `encode_nested` lists, and `load_state_dict()`.

        The main process' are saved, and loaded by every process.

        Raises:
            ValueError: an object has not both.
        """
        invalid = [
            f"  Item at index {index}: {type(o).__qualname__}"
            for index, o in enumerate(objects)
            if not (callable(getattr(o, "state_dict", None)) and callable(getattr(o, "load_state_dict", None)))
        ]
        if invalid:
            raise ValueError(
                "\n".join(["register_for_checkpointing: no state_dict() and load_state_dict():", *invalid])
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before `save_state` writes.

        Args:
            hook: gets the prepared models; their whole weights (on the main process; elsewhere empty dicts), which are
                collected for it; and the folder that is being written, where it may write files. What it removes from
                the list of weights on the main process is not written again.
        """
        return _register(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before `load_state` reads.

        Args:
            hook: gets the prepared models and the checkpoint's folder. The weights of a model that it removes from the
                list are taken to be loaded by it.
        """
        return _register(self._load_model_state_pre_hook, hook)

    @collective("save_state", meets=True)
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: ARG002 - nothing here is ever written with pickle
        *,
        total_limit: int | None = None,
        max_shard_size: int | str = "10GB",
        asynchronous: bool = False,
        **options: Any,
    ) -> Path:
        """Write all that the training goes on from, on any number of processes and any strategy; collective.

        Models, optimizers, schedules, loss scale, counters, random states of all processes, places of the loaders, and
        registered objects: see the README, "Checkpoints". The folder is complete, or it is not there.

        With `asynchronous`, it returns as soon as what a script may change is copied into host memory. What only a step
        changes (the optimizers' states and, under ZeRO, their own copy of the weights) is copied behind the next
        forward and backward, and a step waits for that; then a thread writes the copy while the training goes on. The
        next `save_state` or `load_state`, `wait_for_save`, `end_training` and the end of the process wait until it is
        complete. Each process keeps the memory of its copy for the next one, until `free_memory` or `end_training`.

        Args:
            output_dir: with `ProjectConfiguration(automatic_checkpoint_naming=True)` it is
                `project_dir/checkpoints/checkpoint_<iteration>`, whatever is given here; where a run has used that
                number, the first one above all that runs have used there.
            safe_serialization: no difference: safetensors and JSON always.
            total_limit: after success, remove the oldest of this run's checkpoints with the same name but for the
                number; absent, `ProjectConfiguration(total_limit=…)` holds for automatic names. A launch, its restarts,
                and launches that resume from its newest checkpoint are one run.
            max_shard_size: largest size of a weight file, e.g. `5GB`.
            asynchronous: write it behind the training; where the copy does not fit the memory of some machine, a line
                says so, and it is complete at the return all the same.
            **options: refused; Accelerate hands them to DeepSpeed.

        Returns:
            The folder; with `asynchronous`, where it will be.

        Raises:
            CheckpointError: it cannot be written, and nothing else has changed; or the one before, which was written
                behind the training, could not be, and this one is not begun. On every process.
            TypeError: `options` are given.
        """
        refuse_options("save_state", options, "total_limit and max_shard_size, and saves frozen weights too")
        project = self.project_configuration
        self._background.wait()
        target = self._name_checkpoint(output_dir)
        keep = project.total_limit if total_limit is None and project.automatic_checkpoint_naming else total_limit
        if any(is_inside_window(training) for training in self._trainings):
            self._say(
                "save_state inside an accumulation window: its gradients so far are not in the checkpoint. Save where "
                "accelerator.sync_gradients is True, after optimizer.step()."
            )
        run = self._lineages.own(target.parent)
        states = collectives.gather_object([random_state()])
        sessions = [training.session for training in self._trainings]
        opened = open_checkpoint(
            target,
            sessions,
            lambda: self._make_draft(states, {"run": run, "order": self._lineages.next_order(target)}),
            max_shard_bytes=require_bytes("save_state(max_shard_size=…)", max_shard_size),
            run_hooks=self._run_save_hooks,
            replaces=not project.automatic_checkpoint_naming,
        )
        copies = self._background.copy(opened, sessions) if asynchronous else None
        if copies is None:
            opened.write(map(session_fragments, sessions), SCRIPT)
        else:

            def write(peers: Peers) -> None:
                opened.write(copies, peers)
                self._rotate(target, keep, peers)

            self._background.start(opened, write)
        if project.automatic_checkpoint_naming:
            project.iteration += 1
        if copies is None:
            self._rotate(target, keep, SCRIPT)
        return target

    @collective("wait_for_save", meets=True)
    def wait_for_save(self) -> Path | None:
        """Wait until what `save_state(asynchronous=True)` has begun is complete; collective.

        Returns:
            The checkpoint; None if none was being written.

        Raises:
            CheckpointError: on every process: it could not be written; older ones are as they were.
        """
        return self._background.wait()

    def _rotate(self, newest: Path, keep: int | None, peers: Peers) -> None:
        def rotate() -> None:
            if keep is not None and peers.is_main:
                for removed in rotate_checkpoints(newest, keep):
                    self._say(f"{removed} was removed (total_limit={keep})")

        all_or_none(rotate, peers)

    def _name_checkpoint(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise CheckpointError(
                    "save_state() needs a folder: save_state(output_dir=…), or "
                    "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
                )
            return Path(output_dir).expanduser().resolve()  # what a link points to is replaced, not the link
        folder = automatic_folder(project.project_dir)
        if (free := on_main(lambda: next_number(folder))) > project.iteration:
            self._say(f"save_state: {folder} has checkpoints up to number {free - 1}; this run's go on from {free}")
            project.iteration = free
        target = folder / f"checkpoint_{project.iteration}"
        if output_dir is not None and Path(output_dir).expanduser().absolute() != target:
            self._say(f"save_state({str(output_dir)!r}): naming is automatic, so it is {target}")
        return target

    def _run_save_hooks(self, draft: Path) -> Sequence[int]:
        if not self._save_model_state_pre_hook:
            return ()
        models = [training.session.model for training in self._trainings]
        weights = [self.get_state_dict(model) or {} for model in models]
        left = list(weights)
        for hook in tuple(self._save_model_state_pre_hook.values()):
            hook(list(models), left, str(draft))
        return taken_out(weights, left)

    def _make_draft(self, states: list[Any], lineage: dict[str, Any]) -> Draft:
        runs = [describe_run(self.document, training.resolved, training.facts) for training in self._trainings]
        training = {
            "models": [describe_training(training) for training in self._trainings],
            "waiting_optimizers": [optimizer.state_dict() for optimizer in self._waiting],
            "schedules": [schedule.state_dict() for schedule in schedules_of(self._trainings, self._waiting)],
            "loaders": [loader.state_dict() for loader in self._dataloaders],
            "iteration": self.project_configuration.iteration,
        }
        objects = [{"class": type(o).__qualname__, "state": o.state_dict()} for o in self._custom_objects]

        def write_more(folder: Path) -> None:
            for index, (run, trained) in enumerate(zip(runs, self._trainings, strict=True)):
                part = folder / f"model_{index}" if index else folder
                write_record(run, part)
                write_configuration(trained.session.module, part)

        return Draft(
            about={
                **lineage,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "strategy": runs[0]["strategy"] if runs else None,
                "processes": self._processes.world_size,
                "versions": runs[0]["versions"] if runs else {},
            },
            trees={"training": training, "random": states, "objects": objects},
            write_more=write_more,
        )


def _register(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
