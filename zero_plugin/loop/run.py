"""One run: the configuration that it follows, its processes, its strategy, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.profiler import profile

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.config.deepspeed_plugin import Configurations, DeepSpeedPlugin
from zero_plugin.config.document import Document
from zero_plugin.config.find import find_document
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_tpu, launch_settings
from zero_plugin.config.messages import show_messages
from zero_plugin.config.plugins import InitProcessGroupKwargs, ProfileKwargs
from zero_plugin.config.resolve.training import expected_precision
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import call_before_end, collective
from zero_plugin.distributed.process_calls import ProcessCalls
from zero_plugin.distributed.processes import Processes, call_at_exit, start_processes
from zero_plugin.distributed.stop_request import StopRequest
from zero_plugin.loop.arguments import Options
from zero_plugin.loop.fewer_processes import find_intended_processes
from zero_plugin.loop.out_of_memory import accumulate_more, agree_on_cut, explain_out_of_memory
from zero_plugin.loop.pretrained import checking_pretrained
from zero_plugin.loop.same_everywhere import check_same_run
from zero_plugin.machine.device_memory import Meter
from zero_plugin.machine.memory import available_cpu_memory
from zero_plugin.plan.run_facts import accelerator_kind, probe_machine
from zero_plugin.plan.run_plan import local_processes
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.select import select_strategy
from zero_plugin.trackers.running import Trackers

if TYPE_CHECKING:
    from zero_plugin.loop.prepared import Prepared

_log = logging.getLogger(__name__)


def open_configurations(
    config: Any,
    plugins: Mapping[str, DeepSpeedPlugin],
    newest: Run | None,
    overlay: Callable[[Document], Document],
) -> Configurations:
    """The documents that a run may follow, with the arguments of code laid over them.

    Args:
        config: path, dict or None, as `Accelerator` takes it.
        plugins: DeepSpeed configurations in code, by name.
        newest: the run of the newest `Accelerator`, which a script that trains several models makes for each of them;
            those pass the plugins to the first one only.
        overlay: lays the other arguments over a document.

    Raises:
        ConfigError: everything that is wrong with the documents.
    """
    if config is None and not plugins and newest is not None and newest.is_open and newest.configurations.in_code:
        newest.configurations.overlay(overlay)
        return newest.configurations
    return Configurations(find_document(config, os.environ), plugins, overlay)


class Run(ProcessCalls):
    """What one `Accelerator` trains with, and what has to be ended where the script has dropped that one.

    A run keeps no model: garbage is collected at other times on each process, so that what is freed with an
    `Accelerator` communicates nothing, and what the end communicates is the same whether it is still there or not.

    Args:
        configurations: the documents that it may follow.
        options: what else `Accelerator` was told.

    Attributes:
        document: what was asked for, of the configuration that is followed.
        processes: this process and its peers.
        strategy: the one in use.
        intended: processes that the run is meant to have.
        cut: into how many micro-batches each of the loaders' batches comes, since memory ran out before.
        must_resume: whether a checkpoint has to be loaded before it trains.
        trackers: those that are started.
        background: writes checkpoints behind the training.
        stop: whether the process is asked to stop.
        leaving_files: sessions that have files to remove, which is collective.
        is_open: whether the run has begun and not ended.

    Raises:
        LaunchError: the environment does not describe a whole process group, or the processes differ.
        StrategyError: what is configured cannot run here.
    """

    def __init__(self, configurations: Configurations, options: Options) -> None:
        self.configurations, self.options = configurations, options
        self.processes = self._processes = self._join_processes()
        by_thread = self.processes.device.type == "xla"  # there the processes of a machine are threads
        show_messages(
            quiet=self.processes.rank != 0 and not by_thread,
            is_main=(lambda: collectives.process_index() == 0) if by_thread else None,
        )
        self.device = self.processes.device
        self.background = BackgroundWriter()
        self.trackers = Trackers(options.project, self.processes.rank)
        self.stop = StopRequest()
        self.leaving_files: list[Session] = []
        self.is_open = False
        self.meter = Meter(self.processes.world_size, self.device)
        self._loading = ExitStack()  # how transformers builds models meanwhile
        self._prepared: Callable[[], Prepared | None] = lambda: None
        self._logged: set[str] = set()
        self._cpu_bytes = available_cpu_memory()
        check_same_run(configurations.document, self.processes)
        self._keep_global_batch()
        self._use(configurations.document)
        if self.intended != self.processes.world_size:
            _log.info(
                "%d of %d processes have met; the global batch stays as it is",
                self.processes.world_size,
                self.intended,
            )
        self.must_resume = launch_settings(self.document).auto_resume

    def _join_processes(self) -> Processes:
        given = self.options.handlers.process_group
        if given is not None and dist.is_initialized():
            warnings.warn("InitProcessGroupKwargs has no effect: the process group is there already", stacklevel=4)
        settings, given = launch_settings(self.configurations.document), given or InitProcessGroupKwargs()
        return start_processes(
            cpu=asks_for_cpu(settings),
            xla=asks_for_tpu(settings),
            backend=given.backend,
            timeout=given.timeout,
            init_method=given.init_method,
        )

    def _keep_global_batch(self) -> None:
        """Accumulate more where processes are missing, or where micro-batches have become smaller."""
        world = self.processes.world_size
        self.intended = find_intended_processes(world, os.environ)
        self.cut = agree_on_cut(world, os.environ)
        self.accumulated_by = world if self.options.loading.split_batches else self.intended
        if self.cut > 1 or self.accumulated_by != world:
            self.configurations.overlay(lambda d: accumulate_more(d, self.cut, self.accumulated_by, world))

    # ---- the configuration -------------------------------------------------------------------------------------------

    def follow_configuration(self) -> None:
        """Take another plugin that was selected, and what the script wrote into it."""
        document = self.configurations.follow_edits()
        if document is not self.document:
            self._use(document)

    def overlay(self, lay: Callable[[Document], Document]) -> None:
        """Lay an argument of code over the configuration."""
        self.configurations.overlay(lay)
        self.document = self.configurations.document

    def expected_precision(self) -> str:
        """`no`, `fp16` or `bf16`: what a model that is prepared now would get."""
        machine = probe_machine(accelerator_kind(self.device), self.processes.world_size)
        return expected_precision(self.document, machine)

    def _use(self, document: Document) -> None:
        """Set up what follows from a document: the strategy, and how transformers builds models."""
        self.document = document
        selection = select_strategy(document, launch_settings(document), self.processes)
        self.strategy = selection.strategy
        self.distributed_type = selection.strategy.distributed_type
        notes = (str(note) if note.severity == "warning" else note.headline for note in document.notes)
        for line in (selection.reason, *notes, *self.strategy.accept(self.options.handlers)):
            if line not in self._logged:
                self._logged.add(line)
                _log.info(line)
        self._loading.close()
        self._loading.enter_context(self.strategy.load_pretrained())
        if not self.strategy.partitions_parameters or launch_settings(document).zero3_init_flag is False:
            self._loading.enter_context(checking_pretrained(local_processes(self.processes), self._cpu_bytes))
        if self.configurations.plugin is not None:
            self.configurations.plugin.build_pretrained_by(self.strategy.load_pretrained)

    @contextmanager
    def profile(self, handler: ProfileKwargs) -> Iterator[profile]:
        """torch's profiler, running inside; see `Accelerator.profile`."""
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.processes.rank}.json"))
            self.processes.barrier()

    @collective("stop_requested")
    def stop_requested(self) -> bool:
        """Whether some process was asked to stop; collective. See `Accelerator.stop_requested`."""
        self.stop.listen()
        return collectives.start_sum([int(self.stop.received)])()[0] > 0

    # ---- its end -----------------------------------------------------------------------------------------------------

    def begin(self, prepared: Prepared) -> None:
        """The `Accelerator` is complete; from now on its run has to end.

        Args:
            prepared: what it prepares; it is not kept.
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
            CheckpointError: a save in the background has failed; all is closed nevertheless.
        """
        if not self.is_open:
            return
        self.is_open = False
        atexit.unregister(self._at_exit)
        self._undo_explaining()
        if (prepared := self._prepared()) is not None:
            prepared.first_steps.warn_if_never_stepped()
        self._close()

    @collective("end_training", meets=True)
    def _close(self) -> None:
        with ExitStack() as ends:  # the last one first
            ends.callback(self.processes.stop, self.end, self.strategy.destroy_process_group)
            for session in self._sessions():
                ends.callback(session.close)
            ends.callback(self._describe_end)
            ends.callback(self._loading.close)
            ends.callback(self.trackers.finish)
            ends.callback(self.stop.forget)
            ends.callback(self.background.close)
        self.leaving_files.clear()

    def _forget_dropped(self) -> None:
        """The `Accelerator` is gone; as garbage, whenever it is collected, so that nothing here communicates."""
        self.background.forget()
        self.strategy.forget_dropped()

    def _sessions(self) -> list[Session]:
        """Those to close, the last one first; of an `Accelerator` that was dropped, what has to be removed by all."""
        prepared = self._prepared()
        trainings = [] if prepared is None else prepared.trainings
        sessions = {id(session): session for session in [*(t.session for t in trainings), *self.leaving_files]}
        return list(reversed(sessions.values()))

    def _describe_end(self) -> None:
        if (prepared := self._prepared()) is not None:
            for training in prepared.trained:
                for line in training.describe_end():
                    _log.info(line)
