"""More accumulation with smaller micro-batches keeps the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.run_files import CUT_VARIABLE
from zero_plugin.errors import LoopError
from zero_plugin.loop.run import accumulate_more, agree_on_cut


@pytest.mark.parametrize(
    ("section", "accumulation"),
    [
        ({}, 2),
        ({"gradient_accumulation_steps": 3}, 6),
        ({"gradient_accumulation_steps": "auto"}, 2),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": 48}, 6),
        ({"train_batch_size": 48}, 6),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 48}, 6),
    ],
    ids=str,
)
def test_the_global_batch_stays(section: dict[str, Any], accumulation: int) -> None:
    """With micro-batch 4 instead of 8 on two processes, a step has twice as many, however the number is given."""
    asked = document_from_mapping({**section, "train_micro_batch_size_per_gpu": "auto"}, "code")
    before, now = (
        resolve(document, Facts(LoopFacts(micro, "the loader"), MachineFacts(processes=2), strategy="ddp")).tree
        for document, micro in ((asked, 8), (accumulate_more(asked, 2), 4))
    )
    assert now.value("gradient_accumulation_steps") == accumulation
    assert now.value("train_batch_size") == before.value("train_batch_size")


def test_it_is_done_once() -> None:
    """The change is made once: a second Accelerator of the run shares the first one's document."""
    document = accumulate_more(document_from_mapping({"gradient_accumulation_steps": 3}, "code"), 2)
    assert accumulate_more(document, 2) is document
    assert "3 × 2" in document.deepspeed.entries[("gradient_accumulation_steps",)].origin.reason


def test_the_launcher_tells_the_cut() -> None:
    """The launcher passes the cut to all machines. On one machine each process can derive it."""
    assert agree_on_cut(2, {"LOCAL_WORLD_SIZE": "2", CUT_VARIABLE: "4"}) == 4
    assert agree_on_cut(1, {}) == 1


def test_batches_that_could_not_be_cut_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordered loader may be for evaluation, so it keeps its batches of 3, and a backward in its loop is refused."""
    monkeypatch.setenv(CUT_VARIABLE, "2")
    accelerator = Accelerator(config={"use_cpu": True}, gradient_accumulation_steps=3)
    assert accelerator.gradient_accumulation_steps == 6
    model = torch.nn.Linear(1, 1)
    loaders = [DataLoader(TensorDataset(torch.ones(12, 1)), size, shuffle=size == 4) for size in (4, 3)]
    model, optimizer, cut, whole = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
    assert [len(batch) for (batch,) in cut] == [2] * 6
    for (batch,) in cut:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    loop = iter(whole)
    (batch,) = next(loop)
    with pytest.raises(LoopError, match=r"batch_size=3.*cannot be split"):
        accelerator.backward(model(batch).sum())
    accelerator.end_training()
