"""What a script calls to save the whole state of its training, and to go on from it."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_plugin import collectives
from zero_plugin.agreement import collective
from zero_plugin.checkpoint.folders import choose_checkpoint, rotate_checkpoints
from zero_plugin.checkpoint.load import LoadReport, load_tensors, verify_checksums
from zero_plugin.checkpoint.manifest import Manifest, find_damage, read_manifest
from zero_plugin.checkpoint.nested_file import read_nested
from zero_plugin.checkpoint.pretrained import write_configuration
from zero_plugin.checkpoint.random_state import random_state, restore_random_state
from zero_plugin.checkpoint.save import Draft, save_checkpoint
from zero_plugin.checkpoint.save_model import parse_size
from zero_plugin.checkpoint.together import all_or_none, on_main
from zero_plugin.config.document import Document
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.errors import CheckpointError
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.plugins import DataLoaderConfiguration, ProjectConfiguration
from zero_plugin.run_record import describe_run, write_record
from zero_plugin.scheduler import AcceleratedScheduler
from zero_plugin.strategies.processes import Processes
from zero_plugin.training import Training
from zero_plugin.training_state import (
    describe_training,
    is_inside_window,
    refuse_other_optimizer,
    restore_training,
)

__all__ = ["CheckpointCalls"]

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class CheckpointCalls:
    """The calls of the facade that concern checkpoints."""

    dataloader_config: DataLoaderConfiguration
    document: Document
    project_configuration: ProjectConfiguration
    _dataloaders: list[DataLoaderAdapter]
    _processes: Processes
    _say: Callable[[str], None]
    _trainings: list[Training]
    _waiting: list[AcceleratedOptimizer]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, SaveHook]
    _load_model_state_pre_hook: OrderedDict[int, LoadHook]
    get_state_dict: Callable[[nn.Module], dict[str, Tensor] | None]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too: each has `state_dict()`, of what `write_nested` lists, and `load_state_dict()`.

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
    ) -> Path:
        """Write all that the training goes on from, on any number of processes and any strategy; collective.

        Models, optimizers, schedules, loss scale, counters, random states of all processes, places of the loaders, and
        registered objects: see the README, "Checkpoints". The folder is complete, or it is not there.

        Args:
            output_dir: with `ProjectConfiguration(automatic_checkpoint_naming=True)` it is
                `project_dir/checkpoints/checkpoint_<iteration>`, whatever is given here.
            safe_serialization: no difference: safetensors and JSON always.
            total_limit: after success, remove the oldest of the checkpoints with the same name but for the number;
                absent, `ProjectConfiguration(total_limit=…)` holds for automatic names.
            max_shard_size: largest size of a weight file, e.g. `5GB`.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written; nothing else has changed.
        """
        project = self.project_configuration
        target = self._name_checkpoint(output_dir)
        if any(is_inside_window(training) for training in self._trainings):
            self._say(
                "save_state inside an accumulation window: its gradients so far are not in the checkpoint. Save where "
                "accelerator.sync_gradients is True, after optimizer.step()."
            )
        states = collectives.gather_object([random_state()])
        save_checkpoint(
            target,
            [training.session for training in self._trainings],
            lambda: self._make_draft(states),
            max_shard_bytes=parse_size(max_shard_size),
            run_hooks=self._run_save_hooks,
        )
        if project.automatic_checkpoint_naming:
            total_limit = project.total_limit if total_limit is None else total_limit
            project.iteration += 1
        if total_limit is not None:
            keep = total_limit
            for removed in on_main(lambda: rotate_checkpoints(target, keep)):
                self._say(f"{removed} was removed (total_limit={keep})")
        return target

    @collective("load_state", meets=True)
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - torch.load is not used
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool = False,
        map_location: str | None = None,
    ) -> LoadReport:
        """Go on from a checkpoint that `save_state` wrote, by whatever strategy and processes; collective.

        The loaders draw the interrupted epoch's order again, from its first batch:
        `skip_first_batches(loader, report.batches[i])` begins where it stopped. With
        `DataLoaderConfiguration(use_stateful_dataloader=True)` they begin there by themselves.

        Args:
            input_dir: a checkpoint, or a folder of `checkpoint_<number>`s, of which the newest complete one is loaded;
                absent: that of `project_dir/checkpoints`, where naming is automatic.
            load_kwargs: accepted for scripts that give it.
            strict: tensors that only the model or only the checkpoint has are an error.
            weights_only: load the models' weights, and nothing else.
            verify: read everything once more, and compare it with the checksums.
            map_location: `cpu` or `on_device`, accepted for scripts that give it: tensors are read to where they live.

        Returns:
            What was restored, and what was not.

        Raises:
            CheckpointError: it is damaged, and which is the newest good one before it; or it does not fit.
        """
        if map_location not in (None, "cpu", "on_device"):
            raise TypeError(
                f"Unsupported optimizer map location passed to load_state: {map_location!r}; write 'cpu', 'on_device' "
                "or None. Tensors are read to where they live in any case."
            )
        folder, passed_over = on_main(lambda: choose_checkpoint(self._find_checkpoint(input_dir)))
        manifest = all_or_none(lambda: read_manifest(folder))
        if verify:
            verify_checksums(folder, manifest)
        saved = all_or_none(lambda: read_nested(folder / "training"))
        report = LoadReport(folder, not_restored=[f"a newer checkpoint: {damage}" for damage in passed_over])
        all_or_none(lambda: self._refuse_unfitting(manifest, saved, weights_only=weights_only))
        loaded_by_hooks = self._run_load_hooks(folder)
        for index, (training, stored, record) in enumerate(
            zip(self._trainings, manifest.models, saved["models"], strict=True)
        ):
            if training.optimizer is not None:
                training.session.drop_gradients()
                training.window.restart()
            optimizer = {} if record["optimizer"] is None else record["optimizer"]
            report.not_restored += load_tensors(
                folder,
                training.session,
                stored,
                optimizer.get("scalars", {}),
                weights=index not in loaded_by_hooks,
                optimizer=not weights_only and bool(optimizer),
                strict=strict,
            )
            report.steps = report.steps or optimizer.get("applied_steps", 0)
        report.restored.append("weights")
        if not weights_only:
            all_or_none(lambda: self._restore(folder, saved, report))
        self._say(str(report))
        return report

    def _name_checkpoint(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise CheckpointError(
                    "save_state() needs a folder: save_state(output_dir=…), or "
                    "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
                )
            return Path(output_dir).expanduser().absolute()
        target = self._numbered_folder() / f"checkpoint_{project.iteration}"
        if output_dir is not None and Path(output_dir).expanduser().absolute() != target:
            self._say(f"save_state({str(output_dir)!r}): naming is automatic, so it is {target}")
        if on_main(lambda: find_damage(target) is None):
            raise CheckpointError(
                f"{target} exists already.\nSet accelerator.project_configuration.iteration to the first number to use."
            )
        return target

    def _numbered_folder(self) -> Path:
        if self.project_configuration.project_dir is None:
            raise CheckpointError("automatic_checkpoint_naming needs Accelerator(project_dir=…).")
        return Path(self.project_configuration.project_dir).expanduser().absolute() / "checkpoints"

    def _find_checkpoint(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser().absolute()
        if self.project_configuration.automatic_checkpoint_naming:
            return self._numbered_folder()
        raise CheckpointError("load_state() needs a folder, since automatic_checkpoint_naming is off.")

    def _run_save_hooks(self, draft: Path) -> Sequence[int]:
        if not self._save_model_state_pre_hook:
            return ()
        models = [training.session.model for training in self._trainings]
        weights = [self.get_state_dict(model) or {} for model in models]
        left = list(weights)
        for hook in tuple(self._save_model_state_pre_hook.values()):
            hook(list(models), left, str(draft))
        return _removed(weights, left)

    def _run_load_hooks(self, folder: Path) -> Sequence[int]:
        models = [training.session.model for training in self._trainings]
        left = list(models)
        for hook in tuple(self._load_model_state_pre_hook.values()):
            hook(left, str(folder))
        return _removed(models, left)

    def _make_draft(self, states: list[Any]) -> Draft:
        runs = [describe_run(self.document, training.resolved, training.facts) for training in self._trainings]
        training = {
            "models": [describe_training(training) for training in self._trainings],
            "waiting_optimizers": [optimizer.state_dict() for optimizer in self._waiting],
            "schedules": [schedule.state_dict() for schedule in self._running_schedules()],
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
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "strategy": runs[0]["strategy"] if runs else None,
                "processes": self._processes.world_size,
                "versions": runs[0]["versions"] if runs else {},
            },
            trees={"training": training, "random": states, "objects": objects},
            write_more=write_more,
        )

    def _refuse_unfitting(self, manifest: Manifest, saved: dict[str, Any], *, weights_only: bool) -> None:
        if len(manifest.models) != len(self._trainings):
            stored = ", ".join(model.kind for model in manifest.models) or "none"
            raise CheckpointError(
                f"the checkpoint has {len(manifest.models)} models ({stored}), here {len(self._trainings)} are "
                "prepared; prepare the same models in the same order before load_state()."
            )
        if not weights_only:
            for training, record in zip(self._trainings, saved["models"], strict=True):
                refuse_other_optimizer(training, record)

    def _restore(self, folder: Path, saved: dict[str, Any], report: LoadReport) -> None:
        """All but the models' tensors; random states last, since what comes before may draw."""
        project = self.project_configuration
        for training, record in zip(self._trainings, saved["models"], strict=True):
            report.not_restored += restore_training(training, record)
        report.restored.append("optimizers")
        parts: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
            ("optimizers without a model", self._waiting, saved["waiting_optimizers"]),
            ("schedules", self._running_schedules(), saved["schedules"]),
        )
        for what, running, states in parts:
            if len(running) != len(states):
                report.not_restored.append(f"{what}: {len(states)} in the checkpoint, {len(running)} here")
                continue
            for one, state in zip(running, states, strict=True):
                one.load_state_dict(state)
            report.restored.extend([what] if states else [])
        self._restore_loaders(saved["loaders"], report)
        self._restore_objects(read_nested(folder / "objects"), report)
        if project.automatic_checkpoint_naming and project.iteration <= saved["iteration"]:
            project.iteration = saved["iteration"] + 1
        problem = restore_random_state(read_nested(folder / "random"), self._processes.rank)
        report.restored.append("random states")
        report.not_restored.extend([] if problem is None else [problem])

    def _running_schedules(self) -> list[AcceleratedScheduler]:
        optimizers = [*(training.optimizer for training in self._trainings if training.optimizer), *self._waiting]
        return [schedule for optimizer in optimizers for schedule in optimizer.schedules]

    def _restore_loaders(self, states: list[dict[str, Any]], report: LoadReport) -> None:
        if len(states) != len(self._dataloaders):
            report.not_restored.append(
                f"places of the loaders: {len(states)} in the checkpoint, {len(self._dataloaders)} here"
            )
            return
        for loader, state in zip(self._dataloaders, states, strict=True):
            # Scripts skip by themselves what the interrupted epoch has had, unless loaders are asked to.
            goes_on = self.dataloader_config.use_stateful_dataloader
            loader.load_state_dict(state if goes_on else {**state, "batches": 0})
            report.batches.append(_batches_had(loader, state))
        report.restored.extend(["orders of the loaders"] if states else [])

    def _restore_objects(self, stored: list[dict[str, Any]], report: LoadReport) -> None:
        if len(stored) != len(self._custom_objects):
            names = ", ".join(entry["class"] for entry in stored) or "none"
            raise CheckpointError(
                f"the checkpoint has {len(stored)} registered objects ({names}), here {len(self._custom_objects)} are "
                "registered; register the same ones in the same order before load_state()."
            )
        for o, entry in zip(self._custom_objects, stored, strict=True):
            o.load_state_dict(entry["state"])
        report.restored.extend([f"{len(stored)} registered objects"] if stored else [])


def _register(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _batches_had(loader: DataLoaderAdapter, state: dict[str, Any]) -> int:
    """Batches of this loader that the interrupted epoch has had, whose batches may have been of another size."""
    if state["_iterator_finished"]:
        return 0
    then, now = state["total_batch_size"], loader.total_batch_size
    return int(state["batches"] if then is None or now is None else state["batches"] * then // now)


def _removed(all_of: Sequence[Any], left: Sequence[Any]) -> list[int]:
    """Places of what the main process' hooks took out of a list."""
    gone = [index for index, item in enumerate(all_of) if not any(item is other for other in left)]
    removed: list[int] = collectives.broadcast_object_list([gone])[0]
    return removed
