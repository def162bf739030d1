"""A dropped `Accelerator` is freed with its models. The end of its run is still due."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from on_paths import LOOP, on_paths
from paths import loss_of, make_net, net_and_sgd, own_batch, raised, running, start, take_steps
from torch.optim.lr_scheduler import LambdaLR

from zero_plugin import Accelerator
from zero_plugin.accelerator import newest_accelerator
from zero_plugin.errors import LoopError


def _train(accelerator: Accelerator, steps: int) -> dict[str, Any]:
    net, sgd = net_and_sgd(momentum=0.9)
    model, optimizer, schedule = accelerator.prepare(net, sgd, LambdaLR(sgd, lambda _: 1.0))
    for step in range(steps):
        accelerator.backward(loss_of(model, own_batch(step)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    session = accelerator._prepared.trainings[0].session
    objects = {"accelerator": accelerator, "model": model, "net": net, "weight": net[0].weight, "session": session}
    return {name: weakref.ref(o) for name, o in {**objects, "optimizer": optimizer, "given": sgd}.items()}


def _collect() -> None:
    gc.collect()  # only the Accelerator's own end releases these
    gc.collect()


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_dropped_accelerator_is_freed(path: str) -> None:
    """This holds also while another one trains. Its model still trains, and the states show the other one.

    A second one dropped with it is freed too, as in a search that keeps its best model.
    """
    with running(path) as second:
        net = make_net()
        model, optimizer = second.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        runs = []
        for _ in range(2):
            accelerator = start(path)
            runs.append(accelerator._run)
            found = _train(accelerator, 2)
            del accelerator
            _collect()
            assert {name: o() for name, o in found.items() if o() is not None} == {}
            raised(LoopError, "none exists", by=newest_accelerator)
        take_steps(second, model, optimizer, range(2))
        for run in runs:
            run.end()  # as when the process ends


@on_paths("zero2")
def test_a_save_in_the_background_is_completed(folder: Path) -> None:
    """If the run's `Accelerator` is gone, its memory is freed, and the end of the run waits for the files."""
    with running("zero2") as last:  # the group is still there
        accelerator = start("zero2")
        run = accelerator._run
        found = _train(accelerator, 1)
        accelerator.save_state(folder / "state", asynchronous=True)
        del accelerator
        run.end()
        last.wait_for_everyone()
        assert (folder / "state").is_dir()
        _collect()
        assert {name: o() for name, o in found.items() if o() is not None} == {}
        assert not any(run.background.memory._chunks.values())
