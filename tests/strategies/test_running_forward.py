"""DeepSpeed's session inspects the stacks of all threads."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zero_plugin.strategies.deepspeed.explanations import runs_forward


class Engine:
    """An engine whose forward inspects from a thread, like autograd's thread for a GPU."""

    def forward(self) -> bool:
        with ThreadPoolExecutor(1) as thread:
            return runs_forward(self) and thread.submit(runs_forward, self).result()


@pytest.mark.parametrize("inside", [False, True])
def test_asking_keeps_nothing_of_the_functions_that_run(inside: bool) -> None:
    """A batch is freed when its function ends, not at the next collection of cycles, as a GPU needs it."""

    def train() -> weakref.ref[torch.Tensor]:
        batch, engine = torch.ones(3), Engine()
        assert (engine.forward() if inside else runs_forward(engine)) is inside
        return weakref.ref(batch)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()
