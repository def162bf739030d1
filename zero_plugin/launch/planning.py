"""Makes the plan of a launch where the model is named: what only a plan can fill is settled before a worker starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zero_plugin.config.amounts import read_count
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_cpu, asks_for_deepspeed, launch_settings
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.machine import has_gpu_driver, host_memory_bytes
from zero_plugin.plan.before_run import lay_plan, plan_before_run, waits_for_plan
from zero_plugin.plan.cluster import state_cluster
from zero_plugin.plan.fields import nvme_folder
from zero_plugin.plan.model_source import ModelSource
from zero_plugin.plan.situation import Cluster
from zero_plugin.resolve.facts import Facts, MachineFacts
from zero_plugin.resolve.resolve import resolve

__all__ = ["SizedModel", "plan_launch", "sequence_length", "with_plan"]


class SizedModel(NamedTuple):
    """A model to plan for (see `ModelSource.model`), and the tokens of one of its samples (None: `usual_length`)."""

    model: str
    sequence_length: int | None = None


def with_plan(document: Document, facts: Facts, sized: SizedModel | None) -> Facts:
    """The facts with a plan, where one is waited for, a model is named, and there is a GPU here or memory is stated.

    Raises:
        ConfigError: there is no such model, or nothing fits.
    """
    settings = launch_settings(document)
    known = settings.gpu_memory is not None or (facts.machine.accelerator == "cuda" and has_gpu_driver())
    on_zero = asks_for_deepspeed(document, settings)
    if sized is None or not known or not on_zero or not waits_for_plan(document, facts):
        return facts
    cluster = _find_cluster(document, settings, facts.machine.processes)
    return replace(
        facts, planned=plan_before_run(document, facts, ModelSource(sized.model), sized.sequence_length, cluster)
    )


def plan_launch(
    document: Document, model: str, sequence_length: int | None, gpus: int
) -> tuple[Document, Sequence[str]]:
    """The document with the plan's choices in the place of open fields, and a sentence on each.

    Args:
        document: checked.
        model: see `ModelSource`.
        sequence_length: tokens of one sample; None: `usual_length`.
        gpus: of this machine, that the workers would see.

    Raises:
        ConfigError: there is no such model, or nothing fits.
    """
    settings = launch_settings(document)
    on_gpu = bool(gpus) and not asks_for_cpu(settings)
    processes = settings.num_processes or (gpus if on_gpu else 1) * settings.num_machines
    machine = MachineFacts("cuda" if on_gpu else "cpu", processes, fp16=on_gpu)
    facts = Facts(machine=machine, complete=False)
    if not asks_for_deepspeed(document, settings) or not waits_for_plan(document, facts):
        return document, [f"--model {model}: nothing is open that a plan would fill"]
    cluster = _find_cluster(document, settings, processes)
    planned = plan_before_run(document, facts, ModelSource(model), sequence_length, cluster)
    said = resolve(document, replace(facts, planned=planned)).said_aloud
    return lay_plan(document, planned), [line for line in said if "by the plan" in line]


def sequence_length(flags: Mapping[str, str | bool]) -> int | None:
    """`--sequence_length` as typed; None where it is not.

    Raises:
        ConfigError: it is no count.
    """
    typed = flags.get("sequence_length")
    found = read_count(typed)
    if typed is not None and found is None:
        raise ConfigError([Problem("--sequence_length", "", f"{typed!r} is no count", "Write e.g. 2048.")])
    return found


def _find_cluster(document: Document, settings: LaunchSettings, processes: int) -> Cluster:
    """The machines of a launch: with the memory that is stated, else all like this one, which is measured.

    Args:
        document: for the folder of NVMe offload.
        settings: its launch part.
        processes: on all machines.
    """
    nodes = settings.num_machines
    each = max(1, processes // nodes)
    folder = nvme_folder(document.deepspeed)
    if settings.gpu_memory is not None and folder is None:
        host = settings.host_memory or host_memory_bytes()
        return state_cluster(gpu_memory=settings.gpu_memory, host_memory=host, gpus=each, nodes=nodes)
    from zero_plugin.probe.constants import measure_cluster  # imports torch

    here = measure_cluster(each, nodes, folder)
    return state_cluster(gpu_memory=settings.gpu_memory, host_memory=settings.host_memory, here=here)
