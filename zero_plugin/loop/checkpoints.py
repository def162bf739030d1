"""The checkpoints of one run: collect their contents, write them, and resume from them."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn
from torch.utils.data import RandomSampler
from torch.utils.hooks import RemovableHandle

from zero_plugin.checkpoint import folders, load, save
from zero_plugin.checkpoint.load import LoadReport
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from zero_plugin.checkpoint.objects import gather_nested, random_state, read_nested, restore_random_state
from zero_plugin.checkpoint.save import Contents
from zero_plugin.checkpoint.tensor_files import Layout, Pieces, session_fragments
from zero_plugin.config.amounts import require_bytes
from zero_plugin.config.run_files import RECORD_NAME
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.collectives import SCRIPT, all_or_none, on_main, taken_out
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.loop.lineages import Lineages
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run
from zero_plugin.loop.scheduler import load_schedulers
from zero_plugin.loop.step import drop
from zero_plugin.strategies.copied_weights import check_weights_to_save

_log = logging.getLogger(__name__)

_MOST_REPLACED = 20  # attempts: another job may replace or remove the checkpoint while it is loaded

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: the run.
        prepared: the models, optimizers, loaders and schedulers to save.
        collect_weights: collects the weights of a model, for hooks.

    Attributes:
        objects: the registered objects, which are saved too.
        save_hooks: called before a checkpoint is written.
        load_hooks: called before a checkpoint is read.
    """

    def __init__(
        self, run: Run, prepared: Prepared, collect_weights: Callable[[nn.Module], dict[str, Tensor] | None]
    ) -> None:
        self._run = run
        self._prepared = prepared
        self._project = run.options.project
        self._collect_weights = collect_weights
        self._lineages = Lineages()
        self.objects: list[Any] = []
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def register(self, objects: Sequence[Any]) -> None:
        """Add objects to checkpoints; see `Accelerator.register_for_checkpointing`."""
        invalid = [
            f"  Item at index {index}: {type(o).__qualname__}"
            for index, o in enumerate(objects)
            if not (callable(getattr(o, "state_dict", None)) and callable(getattr(o, "load_state_dict", None)))
        ]
        if invalid:
            raise ValueError(
                "\n".join(["register_for_checkpointing: no state_dict() and load_state_dict():", *invalid])
            )
        self.objects.extend(objects)

    # ---- saving ------------------------------------------------------------------------------------------------------

    @collective("save_state", waits_for_all=True)
    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        *,
        total_limit: int | None,
        max_shard_size: int | str,
        asynchronous: bool,
        options: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint; see `Accelerator.save_state`."""
        _refuse_options("save_state", options, "total_limit and max_shard_size, and saves frozen weights too")
        project = self._project
        self._run.background.wait()  # the previous save must be complete, or its error raised, before this one starts
        target = self._name_checkpoint(output_dir)
        keep = project.total_limit if total_limit is None and project.automatic_checkpoint_naming else total_limit
        self._warn_of_losses()
        run = self._lineages.own(target.parent)
        states = gather_nested(random_state(self._own_generators), what="random state")
        sessions = [training.session for training in self._prepared.trainings]
        for session in sessions:
            check_weights_to_save(session)
        shard_bytes = require_bytes("save_state(max_shard_size=…)", max_shard_size)
        layouts = save.plan_layouts(sessions, shard_bytes)
        save.agree_on(layouts)  # each process writes at offsets that it computes itself
        draft = Path(on_main(lambda: self._open_draft(target, layouts)))
        opened = save.OpenCheckpoint(target, draft, layouts, not project.automatic_checkpoint_naming, keep)
        with opened.removed_on_failure(SCRIPT):
            save.refuse_separate_folders(draft)
            if stored := self._run_save_hooks(draft):
                opened.layouts = save.plan_layouts(sessions, shard_bytes, stored_by_hooks=stored)
            all_or_none(lambda: opened.add(self._contents(target, run, states), sessions) if SCRIPT.is_main else None)
        in_background = asynchronous and self._run.background.start(opened, sessions)
        if not in_background:
            opened.write(map(session_fragments, sessions), SCRIPT)
        if project.automatic_checkpoint_naming:
            project.iteration += 1
        if not in_background:  # the background thread rotates when its checkpoint is complete
            opened.rotate(SCRIPT)
        return target

    @collective("wait_for_save", waits_for_all=True, after_group="alone")
    def wait(self) -> Path | None:
        """Wait for the checkpoint that is written in the background; see `Accelerator.wait_for_save`."""
        return self._run.background.wait()

    def _claim(self, target: Path) -> None:
        """Keep other jobs from saving there, until this job saves to another place."""
        self._run.place.move(target, automatic=self._project.automatic_checkpoint_naming)

    def _open_draft(self, target: Path, layouts: Sequence[Layout]) -> str:
        """Create a folder to write into, and return its path. On the main process."""
        self._claim(target)
        return str(save.open_folder(target, layouts))

    def _name_checkpoint(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self._project
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise CheckpointError(
                    "save_state() needs a folder: save_state(output_dir=…), or "
                    "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
                )
            return _resolved(output_dir)  # replace the target of a symbolic link, not the link
        folder = folders.automatic_folder(project.project_dir)

        def find_free() -> int:
            # Before the number is chosen: a job that ends now may still save its last checkpoint.
            self._claim(folder / "checkpoint")
            return folders.next_number(folder)

        if (free := on_main(find_free)) > project.iteration:
            _log.info(f"save_state: {folder} has checkpoints up to number {free - 1}; this run continues with {free}")
            project.iteration = free
        target = folder / f"checkpoint_{project.iteration}"
        if output_dir is not None and Path(output_dir).expanduser().absolute() != target:
            _log.info(f"save_state({str(output_dir)!r}): naming is automatic, so the folder is {target}")
        return target

    def _run_save_hooks(self, draft: Path) -> Sequence[int]:
        if not self.save_hooks:
            return ()
        sessions = [training.session for training in self._prepared.trainings]
        weights = [self._collect_weights(session.module) or {} for session in sessions]
        left = list(weights)
        with ExitStack() as stack:
            for session, collected in zip(sessions, weights, strict=True):
                stack.enter_context(session.showing_weights(collected))
            for hook in tuple(self.save_hooks.values()):
                hook([session.module for session in sessions], left, str(draft))
        return taken_out(weights, left)

    def _contents(self, target: Path, run: str, states: list[Any]) -> Contents:
        """Return everything except the models' tensors, as plain data. On the main process."""
        order = self._lineages.next_order(target)
        records = [training.resolved.record for training in self._prepared.trainings]
        schedulers = self._prepared.schedulers
        training = {
            "models": [training.record() for training in self._prepared.trainings],
            "waiting_optimizers": [optimizer.state_dict() for optimizer in self._prepared.waiting],
            "schedules": [scheduler.state_dict() for scheduler in schedulers],
            "schedule_classes": [scheduler.class_name for scheduler in schedulers],
            # How often each scheduler advances per applied step, and how many samples that step has.
            "schedules_advance": [scheduler.times for scheduler in schedulers],
            "samples_per_step": self._samples_per_step(),
            "loaders": [one.state_dict(is_over=one.was_given_up) for one in self._prepared.dataloaders],
            "iteration": self._project.iteration,
        }
        objects = [{"class": type(o).__qualname__, "state": o.state_dict()} for o in self.objects]
        about = {
            "run": run,
            "order": order,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "strategy": records[0]["strategy"] if records else None,
            "processes": self._run.processes.world_size,
            "versions": records[0]["versions"] if records else {},
        }
        return Contents(about, {"training": training, "random": states, "objects": objects}, records)

    # ---- loading -----------------------------------------------------------------------------------------------------

    @collective("load_state", waits_for_all=True)
    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        *,
        strict: bool,
        weights_only: bool,
        verify: bool,
        map_location: str | None,
        options: Mapping[str, Any],
    ) -> LoadReport:
        """Resume from a checkpoint; see `Accelerator.load_state`."""
        _refuse_options("load_state", options, "strict=False instead of load_module_strict=False")
        if map_location not in (None, "cpu", "on_device"):
            raise TypeError(
                f"Unsupported optimizer map location passed to load_state: {map_location!r}; write 'cpu', 'on_device' "
                "or None. Tensors are always read to the device that uses them."
            )
        self._run.background.wait()
        place = Path(on_main(lambda: str(self._find_checkpoint(input_dir))))
        own = self._lineages.known(place)
        run = own if on_main(lambda: own is not None and folders.has_checkpoints(place, own)) else None
        loaders_resume = self._run.options.loading.use_stateful_dataloader
        return self._resume_from_newest(
            lambda damaged: folders.choose_checkpoint(place, run, damaged),
            strict=strict,
            weights_only=weights_only,
            verify=verify,
            loaders_resume=loaders_resume,
        )

    @collective("resume", waits_for_all=True)
    def resume(self, folder: str | os.PathLike[str] | None, *, verify: bool) -> LoadReport | None:
        """Load the newest complete checkpoint if this run resumes; see `Accelerator.resume`."""
        self._run.background.wait()
        place = Path(on_main(lambda: str(self._find_own(folder))))
        is_one = on_main(lambda: (place / MANIFEST_NAME).exists())
        run = self._lineages.known(place.parent if is_one else place)
        only = None if is_one else run
        found = on_main(
            lambda: str(folders.choose_checkpoint(place, only)[0]) if folders.has_checkpoints(place, only) else None
        )
        self._run.must_resume = False
        if found is None:
            whose = "" if run is None else " of this run"
            _log.info(f"resume(): no checkpoint{whose} in {place} yet; training starts from the beginning")
            self._lineages.own(place)
            return None
        saved_by = on_main(lambda: read_manifest(Path(found)).about.get("run"))
        is_own = run is not None and saved_by == run
        named = saved_by or "not recorded"
        if not is_own and self._run.document.launch.value("auto_resume") is False:
            _log.info(
                f"resume(): {found} is not loaded and training starts from the beginning: an earlier launch saved the "
                f"checkpoint (run {named}), and auto_resume is false"
            )
            self._lineages.own(Path(found).parent)
            return None
        if not is_own:
            _log.info(
                f"resume(): this run resumes from {found}, which an earlier launch saved (run {named}). To start from "
                "the beginning, write auto_resume: false into the configuration, or save into another project_dir."
            )
        return self._resume_from_newest(
            lambda damaged: folders.choose_checkpoint(place, only, damaged), verify=verify, loaders_resume=True
        )

    def _resume_from_newest(
        self, choose: Callable[[Mapping[Path, str]], tuple[Path, list[str]]], **how: bool
    ) -> LoadReport:
        """Load the checkpoint that `choose` returns; if it is damaged, try again.

        Args:
            choose: called on the main process with the damaged checkpoints so far.
            **how: arguments of `_resume_from`.
        """
        damaged: dict[Path, str] = {}
        replaced = 0

        def find() -> tuple[str, list[str], int | None]:
            folder, passed_over = choose(damaged)
            return str(folder), passed_over, load.manifest_sum(folder)

        def is_replaced(folder: Path, found: int | None) -> bool:
            return load.manifest_sum(folder) != found

        while True:
            try:
                place, passed_over, found = on_main(find)
            except CheckpointError as error:
                if not damaged:
                    raise
                consequence = "The model may hold parts of it: load another checkpoint before training continues."
                raise DamagedError(f"{error}\n{consequence}") from None
            folder = Path(place)
            try:
                return self._resume_from(folder, passed_over, damaged, **how)
            except CheckpointError as error:
                if replaced < _MOST_REPLACED and on_main(partial(is_replaced, folder, found)):
                    replaced += 1  # another job saves to this folder
                elif isinstance(error, DamagedError):
                    damaged[folder] = str(error)
                else:
                    raise

    def _resume_from(
        self,
        folder: Path,
        passed_over: Sequence[str],
        damaged: Collection[Path],
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool,
        loaders_resume: bool,
    ) -> LoadReport:
        """Load one checkpoint; see `Accelerator.load_state`.

        Args:
            folder: the checkpoint.
            passed_over: newer checkpoints that were skipped, with the reasons.
            damaged: the damaged checkpoints so far.
            strict, weights_only, verify: see `Accelerator.load_state`.
            loaders_resume: the loaders continue inside the interrupted epoch.
        """
        manifest = load.read_common_manifest(folder)
        if verify and not manifest.is_verifiable:
            _log.warning(f"{folder} is not verified: an earlier version wrote it, with other checksums.")
        saved, random_states, pieces = self._read_small_files(
            folder, manifest, verify=verify and manifest.is_verifiable
        )
        report = LoadReport(folder, not_restored=[f"a newer checkpoint: {damage}" for damage in passed_over])
        all_or_none(lambda: self._refuse_unfitting(manifest, saved, weights_only=weights_only))
        if any(training.is_inside_window for training in self._prepared.trainings):
            _log.info(
                "load_state before the optimizer.step() of an accumulation window: its gradients so far are dropped, "
                "and the step has no effect. Load before its first backward(), or after its optimizer.step()."
            )
        loaded_by_hooks = self._run_load_hooks(folder)
        for index, (training, stored, record) in enumerate(
            zip(self._prepared.trainings, manifest.models, saved["models"], strict=True)
        ):
            if training.optimizer is not None:
                drop(training.window, training.session)
                training.window.begin()
            optimizer = {} if record["optimizer"] is None else record["optimizer"]
            report.not_restored += load.load_tensors(
                folder,
                training.session,
                stored,
                optimizer.get("scalars", {}),
                pieces=pieces,
                weights=index not in loaded_by_hooks,
                optimizer=not weights_only and bool(optimizer),
                strict=strict,
            )
            report.steps = report.steps or optimizer.get("applied_steps", 0)
        report.restored.append("weights")
        if not weights_only:
            all_or_none(lambda: self._restore(saved, random_states, report, loaders_resume=loaders_resume))
            # Sum gradients in the same buckets as the saving run. This is collective, so it follows all_or_none: no
            # process may have failed before.
            for training, record in zip(self._prepared.trainings, saved["models"], strict=True):
                if training.optimizer is not None and record["optimizer"] is not None:
                    training.session.restore_reduction(record["optimizer"].get("reduction", []))
            if on_main(lambda: self._lineages.is_newest(folder, manifest, damaged)):
                self._lineages.join(folder.parent, manifest.about["run"])
        self._run.must_resume = False
        if passed_over and SCRIPT.is_main:
            _log.warning(str(report))
        else:
            _log.info(str(report))
        return report

    def _read_small_files(
        self, folder: Path, manifest: Manifest, *, verify: bool
    ) -> tuple[dict[str, Any], Any, Mapping[str, Pieces] | None]:
        """Read all files except the tensor files, and verify the headers of these.

        Returns:
            The training's record, the random states, and the pieces of the tensor files (None without `verify`).
        """

        def read(file: Path) -> bytes:
            return manifest.read(folder, file.name) if verify else file.read_bytes()

        saved, random_states, pieces = all_or_none(
            lambda: (
                {**read_nested(folder / "training", read), "objects": read_nested(folder / "objects", read)},
                read_nested(folder / "random", read),
                load.read_pieces(folder, manifest) if verify else None,
            )
        )
        if pieces is not None:
            on_main(lambda: load.verify_headers(folder, manifest, pieces))
            if self.load_hooks:
                all_or_none(lambda: self._verify_files(folder, manifest))
        return saved, random_states, pieces

    def _verify_files(self, folder: Path, manifest: Manifest) -> None:
        """Verify this process's part of the files that hooks may read."""
        share = self._run.processes.rank, self._run.processes.world_size
        # Other users may not read the run record, so a job that resumes their checkpoint cannot verify it.
        own = {file for file in manifest.files if Path(file).name == RECORD_NAME}
        found = load.find_differences(folder, manifest, lambda _: None, skipped=own, share=share, tensors=False)
        for difference in found:
            raise DamagedError(f"{folder}/{difference}.")

    def _find_checkpoint(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return _resolved(input_dir)
        if self._project.automatic_checkpoint_naming:
            return folders.automatic_folder(self._project.project_dir)
        raise CheckpointError("load_state() needs a folder, because automatic_checkpoint_naming is off.")

    def _find_own(self, folder: str | os.PathLike[str] | None) -> Path:
        """Return the folder of checkpoints that this run resumes from, and keep other jobs from saving there."""
        place = self._find_checkpoint(folder)
        if self._project.automatic_checkpoint_naming and place.is_dir():
            own = folders.automatic_folder(self._project.project_dir)
            if place == own.resolve():
                self._claim(own / "checkpoint")
        return place

    def _run_load_hooks(self, folder: Path) -> Sequence[int]:
        if not self.load_hooks:
            return ()
        sessions = [training.session for training in self._prepared.trainings]
        models = [session.module for session in sessions]
        left = list(models)
        with ExitStack() as stack:
            for session in sessions:
                stack.enter_context(session.loading_state_dicts())
            for hook in tuple(self.load_hooks.values()):
                hook(left, str(folder))
        return taken_out(models, left)

    def _refuse_unfitting(self, manifest: Manifest, saved: dict[str, Any], *, weights_only: bool) -> None:
        found = len(self._prepared.trainings)
        if len(manifest.models) != found:
            stored = ", ".join(model.kind for model in manifest.models) or "none"
            raise CheckpointError(
                f"the checkpoint has {len(manifest.models)} models ({stored}), and {found} were prepared here; prepare "
                "the same models in the same order before load_state()."
            )
        if not weights_only:
            for training, record in zip(self._prepared.trainings, saved["models"], strict=True):
                training.refuse_other_optimizer(record)
            stored_objects = saved["objects"]
            if stored_objects is not None and len(stored_objects) != len(self.objects):
                names = ", ".join(entry["class"] for entry in stored_objects) or "none"
                raise CheckpointError(
                    f"the checkpoint has {len(stored_objects)} registered objects ({names}), and {len(self.objects)} "
                    "are registered here. Register the same objects in the same order before load_state()."
                )

    def _restore(self, saved: dict[str, Any], random_states: Any, report: LoadReport, *, loaders_resume: bool) -> None:
        """Restore all except the models' tensors; random states last, because restoring may draw random numbers."""
        for training, record in zip(self._prepared.trainings, saved["models"], strict=True):
            report.not_restored += training.restore(record)
        report.restored.extend(["optimizers"] if any(record["optimizer"] for record in saved["models"]) else [])
        waiting, schedulers = self._prepared.waiting, self._prepared.schedulers
        if _has_as_many(report, "optimizers without a prepared model", waiting, saved["waiting_optimizers"]):
            for held, state in zip(waiting, saved["waiting_optimizers"], strict=True):
                held.load_state_dict(state)
            report.restored.extend(["optimizers without a prepared model"] if waiting else [])
        if _has_as_many(report, "schedules", schedulers, saved["schedules"]):
            report.not_restored += load_schedulers(schedulers, saved, self._samples_per_step())
            report.restored.extend(["schedules"] if schedulers else [])
        self._restore_loaders(saved["loaders"], report, resumes=loaders_resume)
        if (objects := saved["objects"]) is not None:
            for o, entry in zip(self.objects, objects, strict=True):
                o.load_state_dict(entry["state"])
            report.restored.extend([f"{len(objects)} registered objects"] if objects else [])
        elif self.objects:
            report.not_restored.append("registered objects: an imported checkpoint has none")
        if self._project.automatic_checkpoint_naming and self._project.iteration <= saved["iteration"]:
            self._project.iteration = saved["iteration"] + 1
        problem = restore_random_state(random_states, self._run.processes.rank, self._own_generators)
        report.restored.extend(["random states"] if random_states else [])
        report.not_restored.extend([] if problem is None else [problem])

    def _samples_per_step(self) -> int | None:
        """Return the samples per optimizer step of the first model; None if the loaders do not know their size."""
        loaders = self._prepared.dataloaders
        if not loaders or not self._prepared.trainings:
            return None
        trains = next((one for one in loaders if isinstance(getattr(one, "sampler", None), RandomSampler)), loaders[0])
        size = trains.total_batch_size
        return None if size is None else size * self._prepared.trainings[0].window.steps

    def _warn_of_losses(self) -> None:
        """Warn if a run that resumes from the checkpoint will differ from this run."""
        trained = self._prepared.trained
        if any(training.window.is_begun for training in trained):
            collectives.announce(
                "save_state before the optimizer.step() of an accumulation window: its gradients so far are not in the "
                "checkpoint. Save after optimizer.step(), if accelerator.sync_gradients is True."
            )
        if any(training.stepped_apart for training in trained):
            collectives.announce(
                "save_state in a run with LocalSGD: each process has its own optimizer state, and inside the context "
                "its own weights. The checkpoint has only those of process 0."
            )
        for loader in self._prepared.dataloaders:
            if loader.was_left_inside:
                collectives.announce(
                    f"save_state after a break out of the loop over {type(loader.dataset).__name__}: a run that "
                    "resumes continues with the remaining batches of that epoch. To resume with the next epoch, call "
                    "the loader's set_epoch() with its number before save_state."
                )

    @property
    def _own_generators(self) -> list[Generator | None]:
        # In addition to the loaders' states, which are process 0's: a script may seed them differently on each process.
        return [own for loader in self._prepared.dataloaders for own in loader.generators]

    def _restore_loaders(self, states: list[dict[str, Any]], report: LoadReport, *, resumes: bool) -> None:
        loaders = self._prepared.dataloaders
        if not _has_as_many(report, "positions of the loaders", loaders, states):
            return
        for loader, state in zip(loaders, states, strict=True):
            # Scripts skip the batches of the interrupted epoch themselves, unless loaders are configured to.
            loader.load_state_dict(state, skip=resumes)
            report.batches.append(loader.batches_had(state))
            report.epochs.append(max(0, state["epoch"] + bool(state["_iterator_finished"])))
        report.restored.extend(["orders of the loaders"] if states else [])


def _has_as_many(report: LoadReport, what: str, running: Sequence[Any], states: Sequence[Any]) -> bool:
    """Check whether the run has as many as the checkpoint; otherwise report them as not restored."""
    if len(running) != len(states):
        report.not_restored.append(f"{what}: {len(states)} in the checkpoint, {len(running)} here")
    return len(running) == len(states)


def _resolved(named: str | os.PathLike[str]) -> Path:
    try:
        return Path(named).expanduser().resolve()
    except (ValueError, RuntimeError) as error:  # a NUL character; ~ without a home folder
        raise CheckpointError(f"{os.fspath(named)!r} is no path: {error}.") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"{os.fspath(named)!r} is in the current folder, which has been removed. Give an absolute path."
        ) from None


def add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    """Add `hook` to `hooks`; the returned handle removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_options(call: str, options: Mapping[str, Any], legal: str) -> None:
    """Refuse arguments that are meant for DeepSpeed's own checkpoints.

    Raises:
        TypeError: `options` is not empty; the error names them.
    """
    if options:
        raise TypeError(
            f"{call}({', '.join(f'{name}=…' for name in options)}): DeepSpeed does not write the checkpoints, and its "
            f"arguments have no meaning here.\nRemove them; {call} takes {legal}."
        )
