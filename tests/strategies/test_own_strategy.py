"""The strategy of docs/own-strategy.md trains as plain torch, and refuses configurations that it cannot run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from on_paths import on_paths
from paths import assert_near, global_batch, listening, loss_of, make_net, own_batch, raised, running, weights
from torch import nn

from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import document_from_mapping
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError, StrategyError
from zero_plugin.strategies.select import select_strategy
from zero_plugin.strategies.torch_strategies import TorchStrategy

_PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"
STEPS = 6


def strategy_of_the_page() -> type[TorchStrategy]:
    """Return the class that the page's first block defines."""
    (block, *_) = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(_PAGE), "exec"), names)
    strategy: type[TorchStrategy] = names["OneTensorStrategy"]
    return strategy


def plain_weights() -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in plain torch, on the batches of all processes together."""
    net = make_net()
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(net, global_batch(step)).backward()
        if step % 2:
            for p in net.parameters():
                p.grad.div_(2)  # the mean of two micro-batches
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            adamw.step()
            adamw.zero_grad()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


@on_paths("single", "ddp")
def test_the_strategy_of_the_page_trains_as_plain_torch(path: str, rank: int) -> None:
    """This holds with accumulation and clipping. All processes begin with rank 0's weights, and the guards run."""
    with listening() as messages, running(path, strategy=strategy_of_the_page(), gradient_accumulation_steps=2) as run:
        assert run.distributed_type == ("NO" if path == "single" else "MULTI_CPU")
        net = make_net()
        if rank:
            nn.init.zeros_(net[0].weight)
        model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        for step in range(STEPS):
            with run.accumulate(model):
                run.backward(loss_of(model, own_batch(step) if path == "ddp" else global_batch(step)))
                run.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        assert_near(weights(run, model) if path == "ddp" else dict(model.state_dict()), plain_weights(), 1e-5)
        raised(LoopError, "computed by loss.backward()", by=loss_of(model, global_batch(0)).backward)
    assert rank or any("OneTensorStrategy on" in message for message in messages)


def test_a_configuration_that_requests_deepspeed_is_refused() -> None:
    """Only one of the two can own the step."""
    document = document_from_mapping({"deepspeed_config": {"zero_optimization": {"stage": 2}}}, "config.yaml")
    processes, settings = Processes(0, 0, 2, torch.device("cpu")), launch_settings(document)
    with pytest.raises(StrategyError, match=r"strategy=OneTensorStrategy\), but the configuration requests DeepSpeed"):
        select_strategy(document, settings, processes, strategy_of_the_page())
