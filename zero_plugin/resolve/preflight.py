"""Resolves before any worker exists, and finds what no loop, model or schedule can mend."""

from __future__ import annotations

from typing import Literal

from zero_plugin.config.document import Document
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.facts import Facts, MachineFacts, StrategyName
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import Resolved

__all__ = ["find_hopeless", "resolve_before_run"]


def find_hopeless(
    document: Document, *, accelerator: Literal["cpu", "cuda", "xla"], processes: int, strategy: StrategyName
) -> tuple[Problem, ...]:
    """Problems that resolution will have whatever the script does: fp16 under DeepSpeed on a CPU, …

    Args:
        document: checked.
        accelerator: what the workers will run on; a GPU is taken to compute in bf16 and fp16 until a worker looks.
        processes: workers on all machines.
        strategy: what the document asks for.
    """
    try:
        resolve_before_run(document, accelerator=accelerator, processes=processes, strategy=strategy)
    except ConfigError as error:
        return error.problems
    return ()


def resolve_before_run(
    document: Document,
    *,
    accelerator: Literal["cpu", "cuda", "xla"],
    processes: int,
    strategy: StrategyName,
    bf16: bool = True,
) -> Resolved:
    """Resolve what can be without a loop and a model; what those tell stays open, in the result's `missing`.

    Args:
        document: checked.
        accelerator: what the workers will run on.
        processes: workers on all machines.
        strategy: what the document asks for.
        bf16: whether the device computes in bf16.

    Raises:
        ConfigError: what `find_hopeless` lists.
    """
    machine = MachineFacts(accelerator=accelerator, processes=processes, bf16=bf16, fp16=accelerator == "cuda")
    return resolve(document, Facts(machine=machine, strategy=strategy, complete=False))
