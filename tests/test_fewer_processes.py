"""The global batch of a run that has lost machines: distributed over the remaining processes, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, to_environment
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, SchedulerFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.errors import ConfigError, LaunchError
from zero_plugin.loop.run import accumulate_more, find_intended_processes, redistribute_steps


def launched(**keys: Any) -> dict[str, str]:
    """Set the environment of a worker of this launch."""
    return {ENVIRONMENT_VARIABLE: to_environment(document_from_mapping(keys, "code"))}


def test_how_many_are_meant() -> None:
    """The number is that of the processes that met, or with min_machines the launcher's. A mismatch is an error."""
    assert find_intended_processes(3, {}) == 3
    assert find_intended_processes(8, launched(num_processes=8, num_machines=4)) == 8
    fewer = launched(num_processes=8, num_machines=4, min_machines=2)
    assert [find_intended_processes(found, fewer) for found in (4, 6, 8)] == [8, 8, 8]
    for found, environ in ((2, fewer), (10, fewer), (4, launched(num_processes=8, num_machines=4))):
        with pytest.raises(LaunchError, match=rf"configured for 8 processes, but the process group has {found}"):
            find_intended_processes(found, environ)


def test_steps_are_shared_out_or_refused() -> None:
    """All processes together keep the micro-batches of a step. If impossible, the error names possible numbers."""
    assert [redistribute_steps(*given) for given in ((1, 4, 2), (3, 8, 6), (2, 4, 4), (1, 4, 1))] == [2, 4, 2, 4]
    with pytest.raises(LaunchError, match=r"6 of 8 .* the 8 micro-batches .* by 6.\nWrite a multiple of 3 as grad"):
        redistribute_steps(1, 8, 6)


@pytest.mark.parametrize(
    ("section", "accumulation"),
    [({}, 2), ({"gradient_accumulation_steps": 3}, 6), ({"train_batch_size": 48}, 3), ({"train_batch_size": 16}, 1)],
    ids=str,
)
def test_the_global_batch_stays(section: dict[str, Any], accumulation: int) -> None:
    """In any form of the batch, two of four processes make steps of equally many samples. Schedules count as before."""
    document = document_from_mapping({**section, "scheduler": {"type": "WarmupLR"}}, "code")
    more = accumulate_more(document, 1, 4, 2)
    machine = MachineFacts(processes=2, intended=4)
    placeholder = SchedulerFacts(placeholder=True, warmup_num_steps=40)
    tree = resolve(more, Facts(LoopFacts(8, "the loader"), machine, scheduler=placeholder, strategy="ddp")).tree
    assert tree.value("gradient_accumulation_steps") == accumulation
    assert tree.value("train_batch_size") == 2 * 8 * accumulation
    assert tree.value("scheduler", "params", "warmup_num_steps") == 10


def test_a_global_batch_that_cannot_be_kept_is_refused() -> None:
    """48 samples are no steps of 5 processes with 8 samples each."""
    document = accumulate_more(document_from_mapping({"train_batch_size": 48}, "code"), 1, 6, 5)
    with pytest.raises(ConfigError, match=r"48 is not 8 .* × 1 .* × 5"):
        resolve(document, Facts(LoopFacts(8, "the loader"), MachineFacts(processes=5, intended=6), strategy="ddp"))
