"""What a script calls to go on from a checkpoint."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.folders import Lineages, automatic_folder, choose_checkpoint, has_checkpoints
from zero_plugin.checkpoint.load import LoadReport, load_tensors, verify_checksums
from zero_plugin.checkpoint.manifest import Manifest
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.checkpoint.save import restore_random_state
from zero_plugin.checkpoint.shared_folder import read_common_manifest
from zero_plugin.config.plugins import DataLoaderConfiguration, ProjectConfiguration
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.processes import Processes
from zero_plugin.distributed.together import all_or_none, on_main, taken_out
from zero_plugin.errors import CheckpointError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import (
    Training,
    refuse_other_optimizer,
    restore_reductions,
    restore_training,
    schedules_of,
)

LoadHook = Callable[[list[nn.Module], str], None]


def refuse_options(call: str, options: Mapping[str, Any], legal: str) -> None:
    """Name what a script gives for DeepSpeed's own checkpoints.

    Raises:
        TypeError: there is something.
    """
    if options:
        raise TypeError(
            f"{call}({', '.join(f'{name}=…' for name in options)}): checkpoints are not DeepSpeed's here, and take "
            f"none of its arguments.\nLeave them out; {call} takes {legal}."
        )


class RestoringCalls:
    """The calls of the facade that read checkpoints."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _background: BackgroundWriter
    _custom_objects: list[Any]
    _dataloaders: list[DataLoaderAdapter]
    _lineages: Lineages
    _load_model_state_pre_hook: OrderedDict[int, LoadHook]
    _must_resume: bool
    _processes: Processes
    _say: Callable[[str], None]
    _trainings: list[Training]
    _waiting: list[AcceleratedOptimizer]

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
        **options: Any,
    ) -> LoadReport:
        """Go on from a checkpoint that `save_state` wrote, by whatever strategy and processes; collective.

        The loaders draw the interrupted epoch's order again, from its first batch:
        `skip_first_batches(loader, report.batches[i])` begins where it stopped. With
        `DataLoaderConfiguration(use_stateful_dataloader=True)` they begin there by themselves.

        Args:
            input_dir: a checkpoint, or a folder of `checkpoint_<number>`s, of which the newest complete one is loaded,
                this run's own where it has any; absent: that of `project_dir/checkpoints`, where naming is automatic.
            load_kwargs: accepted for scripts that give it.
            strict: tensors that only the model or only the checkpoint has are an error.
            weights_only: load the models' weights, and nothing else.
            verify: read everything once more, and compare it with the checksums.
            map_location: `cpu` or `on_device`, accepted for scripts that give it: tensors are read to where they live.
            **options: refused; Accelerate hands them to DeepSpeed.

        Returns:
            What was restored, and what was not.

        Raises:
            CheckpointError: it is damaged, and which is the newest good one before it; or it does not fit; or a save in
                the background has failed, and nothing is loaded yet.
        """
        refuse_options("load_state", options, "strict=False where load_module_strict=False stood")
        if map_location not in (None, "cpu", "on_device"):
            raise TypeError(
                f"Unsupported optimizer map location passed to load_state: {map_location!r}; write 'cpu', 'on_device' "
                "or None. Tensors are read to where they live in any case."
            )
        self._background.wait()
        place = on_main(lambda: self._find_checkpoint(input_dir))
        own = self._lineages.known(place)
        run = own if on_main(lambda: own is not None and has_checkpoints(place, own)) else None
        folder, passed_over = on_main(lambda: choose_checkpoint(place, run))
        loaders_go_on = self.dataloader_config.use_stateful_dataloader
        return self._go_on_from(
            folder, passed_over, strict=strict, weights_only=weights_only, verify=verify, loaders_go_on=loaders_go_on
        )

    def _go_on_from(
        self,
        folder: Path,
        passed_over: Sequence[str],
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool = False,
        loaders_go_on: bool,
    ) -> LoadReport:
        """As `load_state`; `loaders_go_on`: the interrupted epoch goes on where it stopped, by itself."""
        manifest = read_common_manifest(folder)
        if verify:
            verify_checksums(folder, manifest)
        saved = all_or_none(lambda: {**read_nested(folder / "training"), "objects": read_nested(folder / "objects")})
        report = LoadReport(folder, not_restored=[f"a newer checkpoint: {damage}" for damage in passed_over])
        all_or_none(lambda: self._refuse_unfitting(manifest, saved, weights_only=weights_only))
        loaded_by_hooks = self._run_load_hooks(folder)
        for index, (training, stored, record) in enumerate(
            zip(self._trainings, manifest.models, saved["models"], strict=True)
        ):
            if training.optimizer is not None:
                training.session.drop_gradients()
                training.window.begin()
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
            all_or_none(lambda: self._restore(folder, saved, report, loaders_go_on=loaders_go_on))
            restore_reductions(self._trainings, saved["models"])
            if on_main(lambda: self._lineages.is_newest(folder, manifest)):
                self._lineages.join(folder.parent, manifest.about["run"])
        self._must_resume = False
        self._say(str(report))
        return report

    def _find_checkpoint(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser().resolve()
        if self.project_configuration.automatic_checkpoint_naming:
            return automatic_folder(self.project_configuration.project_dir)
        raise CheckpointError("load_state() needs a folder, since automatic_checkpoint_naming is off.")

    def _run_load_hooks(self, folder: Path) -> Sequence[int]:
        models = [training.session.model for training in self._trainings]
        left = list(models)
        for hook in tuple(self._load_model_state_pre_hook.values()):
            hook(left, str(folder))
        return taken_out(models, left)

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
            self._refuse_other_objects(saved["objects"])

    def _restore(self, folder: Path, saved: dict[str, Any], report: LoadReport, *, loaders_go_on: bool) -> None:
        """All but the models' tensors; random states last, since what comes before may draw."""
        project = self.project_configuration
        for training, record in zip(self._trainings, saved["models"], strict=True):
            report.not_restored += restore_training(training, record)
        report.restored.extend(["optimizers"] if any(record["optimizer"] for record in saved["models"]) else [])
        parts: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
            ("optimizers without a model", self._waiting, saved["waiting_optimizers"]),
            ("schedules", schedules_of(self._trainings, self._waiting), saved["schedules"]),
        )
        for what, running, states in parts:
            if len(running) != len(states):
                report.not_restored.append(f"{what}: {len(states)} in the checkpoint, {len(running)} here")
                continue
            for one, state in zip(running, states, strict=True):
                one.load_state_dict(state)
            report.restored.extend([what] if states else [])
        self._restore_loaders(saved["loaders"], report, go_on=loaders_go_on)
        self._restore_objects(saved["objects"], report)
        if project.automatic_checkpoint_naming and project.iteration <= saved["iteration"]:
            project.iteration = saved["iteration"] + 1
        states = read_nested(folder / "random")
        problem = restore_random_state(states, self._processes.rank)
        report.restored.extend(["random states"] if states else [])
        report.not_restored.extend([] if problem is None else [problem])

    def _restore_loaders(self, states: list[dict[str, Any]], report: LoadReport, *, go_on: bool) -> None:
        if len(states) != len(self._dataloaders):
            report.not_restored.append(
                f"places of the loaders: {len(states)} in the checkpoint, {len(self._dataloaders)} here"
            )
            return
        for loader, state in zip(self._dataloaders, states, strict=True):
            # Scripts skip by themselves what the interrupted epoch has had, unless loaders are asked to.
            loader.load_state_dict(state if go_on else {**state, "batches": 0})
            report.batches.append(_batches_had(loader, state))
            report.epochs.append(max(0, state["epoch"] + bool(state["_iterator_finished"])))
        report.restored.extend(["orders of the loaders"] if states else [])

    def _refuse_other_objects(self, stored: list[dict[str, Any]] | None) -> None:
        if stored is not None and len(stored) != len(self._custom_objects):
            names = ", ".join(entry["class"] for entry in stored) or "none"
            raise CheckpointError(
                f"the checkpoint has {len(stored)} registered objects ({names}), here {len(self._custom_objects)} are "
                "registered; register the same ones in the same order before load_state()."
            )

    def _restore_objects(self, stored: list[dict[str, Any]] | None, report: LoadReport) -> None:
        if stored is None:
            if self._custom_objects:
                report.not_restored.append("registered objects: an imported checkpoint has none")
            return
        for o, entry in zip(self._custom_objects, stored, strict=True):
            o.load_state_dict(entry["state"])
        report.restored.extend([f"{len(stored)} registered objects"] if stored else [])


def _batches_had(loader: DataLoaderAdapter, state: dict[str, Any]) -> int:
    """Batches of this loader that the interrupted epoch has had, whose batches may have been of another size."""
    if state["_iterator_finished"]:
        return 0
    then, now = state["total_batch_size"], loader.total_batch_size
    return int(state["batches"] if then is None or now is None else state["batches"] * then // now)
