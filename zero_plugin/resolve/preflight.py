"""Finds, before any worker exists, what no loop, model or schedule can mend."""

from __future__ import annotations

from typing import Literal

from zero_plugin.config.document import Document
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.facts import Facts, MachineFacts, StrategyName
from zero_plugin.resolve.resolve import resolve

__all__ = ["find_hopeless"]


def find_hopeless(
    document: Document, *, accelerator: Literal["cpu", "cuda"], processes: int, strategy: StrategyName
) -> tuple[Problem, ...]:
    """Problems that resolution will have whatever the script does: a stage of `auto`, fp16 under DeepSpeed on a CPU, …

    Args:
        document: checked.
        accelerator: what the workers will run on; a GPU is taken to compute in bf16 and fp16 until a worker looks.
        processes: workers on all machines.
        strategy: what the document asks for.
    """
    machine = MachineFacts(accelerator=accelerator, processes=processes, fp16=accelerator == "cuda")
    try:
        resolve(document, Facts(machine=machine, strategy=strategy, complete=False))
    except ConfigError as error:
        return error.problems
    return ()
