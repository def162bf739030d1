"""`Run`: the configuration, processes and strategy of one `Accelerator`, and how they are closed."""

from __future__ import annotations

import atexit
import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.profiler import profile

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.locks import ClaimedPlace
from zero_plugin.config.document import Document, from_environment
from zero_plugin.config.find import find_document
from zero_plugin.config.handlers import InitProcessGroupKwargs, ProfileKwargs
from zero_plugin.config.keys import ACCUMULATION, GLOBAL_BATCH
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_tpu, launch_settings
from zero_plugin.config.parallelism import SEQUENCE_KEY, sequence_parallel_size
from zero_plugin.config.plugins import Configurations, DeepSpeedPlugin
from zero_plugin.config.resolve.facts import MachineFacts
from zero_plugin.config.resolve.resolve import expected_precision
from zero_plugin.config.rules.sections import keys_of_the_engine, unequal_sequence_groups
from zero_plugin.config.rules.training import Asked
from zero_plugin.config.run_files import micro_batch_cut
from zero_plugin.config.tree import AUTO, Entry, Origin
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.messages import once, show_messages
from zero_plugin.distributed.process_end import StopRequest, call_at_exit, call_before_end
from zero_plugin.distributed.processes import ProcessCalls, Processes, start_processes
from zero_plugin.errors import ConfigError, LaunchError, Problem
from zero_plugin.long_context.group import CURRENT, SequenceGroup
from zero_plugin.loop.arguments import Options
from zero_plugin.loop.memory_check import checking_pretrained
from zero_plugin.loop.out_of_memory import explain_out_of_memory
from zero_plugin.loop.same_everywhere import check_same_run
from zero_plugin.machine.hardware import Meter, available_cpu_memory
from zero_plugin.plan.run_plan import accelerator_kind, local_processes, probe_machine
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.select import select_strategy
from zero_plugin.trackers.trackers import Trackers

if TYPE_CHECKING:
    from zero_plugin.loop.prepared import Prepared

_log = logging.getLogger(__name__)


def open_configurations(
    config: Any, plugins: Mapping[str, DeepSpeedPlugin], newest: Run | None, overlay: Callable[[Document], Document]
) -> Configurations:
    """Return the configurations that a run may use, overlaid with the arguments of code.

    Args:
        config: a path, a dict or None, as for `Accelerator`.
        plugins: DeepSpeed configurations in code, by name.
        newest: the run of the newest `Accelerator`. Scripts that create an `Accelerator` for each of several models
            pass the plugins to the first one only.
        overlay: overlays the other arguments on a document.

    Raises:
        ConfigError: a document is invalid; the error lists all problems.
    """
    if config is None and not plugins and newest is not None and newest.is_open and newest.configurations.in_code:
        newest.configurations.overlay(overlay)
        return newest.configurations
    return Configurations(find_document(config, os.environ), plugins, overlay)


class Run(ProcessCalls):
    """The configuration, processes and strategy of one `Accelerator`.

    The run ends at process exit, even if the script has deleted its `Accelerator`. A run does not keep models alive.
    Each process collects garbage at a different time. So releasing an `Accelerator` must not communicate, and closing a
    run must communicate in the same way whether the `Accelerator` was released or not.

    Args:
        configurations: the configurations that the run may use.
        options: the other arguments of `Accelerator`.

    Attributes:
        document: the configuration in use, as the user wrote it.
        processes: this process and its peers.
        strategy: the strategy in use.
        sequence: the group of processes that share this process's samples; None if samples are not shared.
        intended_world_size: the number of processes that the configuration is meant for.
        micro_batches_per_loader_batch: the number of micro-batches that each batch of a loader is split into; more than
            1 if memory ran out before.
        must_resume: whether a checkpoint must be loaded before training.
        trackers: the experiment trackers.
        place: the claim on the folder that this run saves to; it keeps other jobs out.
        background: writes asynchronous checkpoints.
        stop: whether the process was requested to stop.
        leaving_files: sessions that must remove files at the end; removing is collective.
        is_open: whether the run has begun and not ended.

    Raises:
        LaunchError: the environment variables do not describe a complete process group, or the processes differ.
        StrategyError: the configured strategy cannot run on this machine.
    """

    def __init__(self, configurations: Configurations, options: Options) -> None:
        self.configurations, self.options = configurations, options
        self.processes = self._processes = self._join_processes()
        by_thread = self.processes.device.type == "xla"  # on XLA, the replicas of a machine are threads
        show_messages(
            quiet=self.processes.rank != 0 and not by_thread,
            is_main=(lambda: collectives.process_index() == 0) if by_thread else None,
        )
        self.device = self.processes.device
        self.place = ClaimedPlace()
        self.background = BackgroundWriter(self.place)
        self.trackers = Trackers(options.project, self.processes.rank)
        self.stop = StopRequest()
        self.leaving_files: list[Session] = []
        self.is_open = False
        self.sequence: SequenceGroup | None = None
        self._loading = ExitStack()  # how transformers constructs models during the run
        self._prepared: Callable[[], Prepared | None] = lambda: None
        self._cpu_bytes = available_cpu_memory()  # before the script loads a model
        # First of the collective calls: the others depend on the configuration, which may differ between processes.
        check_same_run(configurations.document, self.processes)
        self._share_samples()  # before its effect on `data_parallel_size` is read below
        self.meter = Meter(self.processes.data_parallel_size, self.device)
        self._keep_global_batch()
        self._use(configurations.document)
        if self.intended_world_size != self.processes.world_size:
            _log.info(
                "%d of %d processes run; the global batch size does not change",
                self.processes.world_size,
                self.intended_world_size,
            )
        self.must_resume = launch_settings(self.document).auto_resume

    def _join_processes(self) -> Processes:
        given = self.options.handlers.process_group
        if given is not None and dist.is_initialized():
            warnings.warn(
                "InitProcessGroupKwargs has no effect: the process group is already initialized", stacklevel=4
            )
        settings, given = launch_settings(self.configurations.document), given or InitProcessGroupKwargs()
        return start_processes(
            cpu=asks_for_cpu(settings),
            xla=asks_for_tpu(settings),
            backend=given.backend,
            timeout=given.timeout,
            init_method=given.init_method,
        )

    def _share_samples(self) -> None:
        """Create the group of processes that share this process's samples, if configured; collective then.

        Raises:
            ConfigError: the processes cannot be divided into groups of this size.
        """
        document = self.configurations.document
        size = sequence_parallel_size(document)
        CURRENT.find = lambda: None
        if size == 1:
            return
        problem = unequal_sequence_groups(size, self.processes.world_size)
        if self.device.type == "xla":
            problem = (f"{size}, but torch_xla's processes do not exchange sequences", "Write 1, or train on GPUs.")
        elif self.options.handlers.compiles:
            problem = (f"{size}, but models are compiled: the exchange would break the graph", "Do not compile.")
        if problem is not None:
            raise _refused_sequences(document, *problem)
        self.processes = self._processes = replace(self.processes, shared_by=size)
        self.sequence = SequenceGroup(size)
        run = weakref.ref(self)
        CURRENT.find = lambda: None if (found := run()) is None else found.sequence
        _log.info("%d groups of %d processes share samples", self.processes.data_parallel_size, size)

    def _keep_global_batch(self) -> None:
        """Accumulate more micro-batches if fewer processes run than configured, or if micro-batches became smaller."""
        world = self.processes.world_size
        self.intended_world_size = find_intended_processes(world, os.environ)
        self.micro_batches_per_loader_batch = agree_on_cut(world, os.environ)
        self.accumulated_by = world if self.options.loading.split_batches else self.intended_world_size
        if self.micro_batches_per_loader_batch > 1 or self.accumulated_by != world:
            self.configurations.overlay(
                lambda d: accumulate_more(d, self.micro_batches_per_loader_batch, self.accumulated_by, world)
            )

    # ---- the configuration -------------------------------------------------------------------------------------------

    def follow_configuration(self) -> None:
        """Switch to the selected plugin, with the script's changes to it."""
        document = self.configurations.follow_edits()
        if document is not self.document:
            self._use(document)

    def overlay(self, lay: Callable[[Document], Document]) -> None:
        """Overlay an argument of code on the configuration."""
        self.configurations.overlay(lay)
        self.document = self.configurations.document

    def expected_precision(self) -> str:
        """Return `no`, `fp16` or `bf16`: the precision that `prepare` would choose now."""
        return expected_precision(self.document, self.machine_facts())

    def machine_facts(self) -> MachineFacts:
        """Return facts about the machines and processes, for resolving a configuration."""
        shared_by = self.processes.shared_by
        machine = probe_machine(accelerator_kind(self.device), self.processes.data_parallel_size)
        return replace(machine, intended=self.intended_world_size // shared_by, shared_by=shared_by)

    def _use(self, document: Document) -> None:
        """Set up the strategy, and the way transformers constructs models: both depend on the document."""
        if (size := sequence_parallel_size(document)) != self.processes.shared_by:
            message = f"{size}, but the run has begun with {self.processes.shared_by}"
            raise _refused_sequences(document, message, "Write the same number in all plugins.")
        self.document = document
        selection = select_strategy(document, launch_settings(document), self.processes, self.options.strategy)
        self.strategy = selection.strategy
        self.distributed_type = selection.strategy.distributed_type
        notes = (note.remark for note in (*document.notes, *self._lost_without_engine()))
        for line in (selection.reason, *notes, *self.strategy.accept(self.options.handlers)):
            if once(self, line):
                _log.info(line)
        if self.strategy.checks == "off" and once(self, _WITHOUT_CHECKS):
            _log.warning(_WITHOUT_CHECKS)
        self._loading.close()
        self._loading.enter_context(self.strategy.load_pretrained())
        if not self.strategy.partitions_parameters or launch_settings(document).zero3_init_flag is False:
            self._loading.enter_context(checking_pretrained(local_processes(self.processes), self._cpu_bytes))
        if self.configurations.plugin is not None:
            self.configurations.plugin.build_pretrained_by(self.strategy.load_pretrained)

    def _lost_without_engine(self) -> list[Problem]:
        """Return warnings about keys that only DeepSpeed's engine reads, if the configuration requests no engine.

        Raises:
            ConfigError: without the engine, training would differ from the configuration.
        """
        if self.strategy.reads_engine_keys or launch_settings(self.document).distributed_type is not None:
            return []  # with a requested type, the check of the configuration has already found these keys
        where = f"nothing requests it: the run is {self.strategy.name}"
        found = list(keys_of_the_engine(Asked(self.document), where, alone=self.processes.world_size == 1))
        if errors := [problem for problem in found if problem.severity == "error"]:
            raise ConfigError(errors)
        return found

    @contextmanager
    def profile(self, handler: ProfileKwargs) -> Iterator[profile]:
        """Run torch's profiler inside; see `Accelerator.profile`."""
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.processes.rank}.json"))
            self.processes.barrier()

    @collective("stop_requested")
    def stop_requested(self) -> bool:
        """Check whether any process was requested to stop; collective. See `Accelerator.stop_requested`."""
        self.stop.listen()
        return collectives.start_sum([int(self.stop.received)])()[0] > 0

    # ---- closing -----------------------------------------------------------------------------------------------------

    def begin(self, prepared: Prepared) -> None:
        """Register the callbacks for the end of the process; `end` must be called from now on.

        Args:
            prepared: the prepared objects; only a weak reference is kept.
        """
        self._prepared = weakref.ref(prepared)
        self._undo_explaining = explain_out_of_memory(prepared.describe_out_of_memory)
        self.is_open = True
        self.processes.hold(self.end)
        self._at_exit = call_at_exit(self.end)
        call_before_end(self.trackers.finish)
        call_before_end(self.background.wait_for_writing)
        weakref.finalize(prepared, self._forget_dropped).atexit = False

    def end(self) -> None:
        """Close every session and the process group; collective. A second call does nothing.

        Raises:
            CheckpointError: a save in the background failed; everything was closed nevertheless.
        """
        if not self.is_open:
            return
        self.is_open, self.sequence = False, None
        atexit.unregister(self._at_exit)
        self._undo_explaining()
        if (prepared := self._prepared()) is not None:
            prepared.first_steps.warn_if_never_stepped()
        self._close()

    @collective("end_training", waits_for_all=True, after_group="meet")
    def _close(self) -> None:
        # Callbacks run in reverse order: the writer of checkpoints first, the process group last.
        with ExitStack() as ends:
            ends.callback(self.processes.stop, self.end, self.strategy.destroy_process_group)
            for session in self._sessions():
                ends.callback(session.close)
            ends.callback(self._describe_end)
            ends.callback(self._loading.close)
            ends.callback(self.trackers.finish)
            ends.callback(self.stop.forget)
            ends.callback(self.place.give_up)
            ends.callback(self.background.close)
        self.leaving_files.clear()

    def _forget_dropped(self) -> None:
        """Forget a garbage-collected `Accelerator`. Must not communicate: each process collects at another time."""
        self.background.forget()
        self.strategy.forget_dropped()

    def _sessions(self) -> list[Session]:
        """Return the sessions to close, last first; for a released `Accelerator` only those with files to remove."""
        prepared = self._prepared()
        trainings = [] if prepared is None else prepared.trainings
        sessions = {id(session): session for session in [*(t.session for t in trainings), *self.leaving_files]}
        return list(reversed(sessions.values()))

    def _describe_end(self) -> None:
        if (prepared := self._prepared()) is not None:
            prepared.settle()
            for training in prepared.trained:
                for line in training.describe_end():
                    _log.info(line)


def _refused_sequences(document: Document, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(document.place(("deepspeed", SEQUENCE_KEY)), SEQUENCE_KEY, message, fix)])


_WITHOUT_CHECKS: Final = (
    "`checks` is off, so silent mistakes of a script are not found. Examples: gradients, weights or learning rates "
    "that differ between the processes; branches of the model that only some processes take; gradients and weights "
    "that the script writes and no step applies; loss.backward() instead of accelerator.backward(loss). Write checks: "
    "all."
)

# ---- the global batch size -------------------------------------------------------------------------------------------


def find_intended_processes(available: int, environ: Mapping[str, str]) -> int:
    """Return the number of processes that the configuration is meant for: the world size, or more with `min_machines`.

    Args:
        available: the world size.
        environ: the environment variables of this process; the launcher passes the configured number there.

    Raises:
        LaunchError: the number of processes is not the configured one, and the configuration does not allow this.
    """
    launched = from_environment(environ)
    if launched is None:
        return available
    settings = launch_settings(launched)
    configured = settings.num_processes
    if configured is None or configured == available:
        return available
    least = (settings.min_machines or settings.num_machines) * (configured // settings.num_machines)
    if least <= available < configured:
        return configured
    raise LaunchError(
        f"the launcher was configured for {configured} processes, but the process group has {available}.\n"
        "Does the script, or a program that starts it, set or unset RANK, WORLD_SIZE or MASTER_ADDR? Only the launcher "
        "must set them."
    )


def redistribute_steps(steps: int, intended: int, available: int) -> int:
    """Return the micro-batches per optimizer step on each available process that keep the global batch size.

    Args:
        steps: micro-batches per optimizer step on each of the intended processes.
        intended: the number of processes that the global batch size is meant for.
        available: the number of processes that run.

    Raises:
        LaunchError: the micro-batches cannot be divided evenly.
    """
    own_steps, rest = divmod(steps * intended, available)
    if rest:
        multiple = available // math.gcd(available, intended)
        raise LaunchError(
            f"{available} of {intended} processes are left and cannot keep the global batch size: the "
            f"{steps * intended} micro-batches of an optimizer step ({steps} on each of {intended}) cannot be divided "
            f"by {available}.\n"
            f"Write a multiple of {multiple} as gradient_accumulation_steps, with correspondingly smaller "
            "micro-batches; or raise --min_machines, to wait for more machines."
        )
    return own_steps


def agree_on_cut(processes: int, environ: Mapping[str, str]) -> int:
    """Return the number of micro-batches per batch of a loader, the same on every process; collective.

    Args:
        processes: the world size. With several machines only one launcher may know that memory ran out.
        environ: the environment variables of this process.
    """
    own = micro_batch_cut(environ)
    here = environ.get("LOCAL_WORLD_SIZE", str(processes))
    return own if here == str(processes) else max(collectives.gather_values(own))


def accumulate_more(document: Document, cut: int, intended: int = 1, available: int = 1) -> Document:
    """Return the document with more gradient accumulation, to keep the global batch size.

    Nothing changes if `train_batch_size` is written and the accumulation is open: `resolve` then derives it.

    Args:
        document: the configuration as the user wrote it.
        cut: the number of micro-batches that each batch of a loader is split into.
        intended: the number of processes that the global batch size is meant for.
        available: the number of processes that run.

    Raises:
        LaunchError: the micro-batches cannot be divided evenly among the processes.
    """
    entry = document.deepspeed.get(*ACCUMULATION.path)
    is_open = entry is None or entry.value in (AUTO, None)
    if (cut == 1 and intended == available) or (entry is not None and not is_open and not entry.origin.typed_by_user):
        return document
    if is_open and document.deepspeed.value(*GLOBAL_BATCH.path) not in (AUTO, None):
        return document
    configured = 1 if entry is None or is_open else entry.value
    where = "to keep the global batch size" if entry is None else entry.origin.where
    reasons = [f"{configured}"]
    if cut > 1:
        reasons.append(f"× {cut}: memory ran out before, so each batch of the loader is split into {cut} micro-batches")
    if intended != available:
        reasons.append(f"× {intended} ÷ {available}: {available} of {intended} processes are left")
    more = Entry(redistribute_steps(configured * cut, intended, available), Origin("rule", where, " ".join(reasons)))
    return replace(document, deepspeed=document.deepspeed.replace({ACCUMULATION.path: more}))
