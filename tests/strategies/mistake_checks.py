"""Mistakes of a loop that are named, the same on every path, and what to do instead."""

from __future__ import annotations

import torch
from paths import (
    PAIR,
    SINGLE,
    assert_near,
    checks_on,
    global_batch,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    weights,
)

from zero_plugin.errors import LoopError


def check_a_layer_is_unfrozen(path: str) -> None:
    """In step 3: refused in the first backward that reaches it; prepared anew, it is trained as in plain torch."""
    plain = make_net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(4):
        plain[0].requires_grad_(i > 1)
        loss_of(plain, global_batch(i)).backward()
        sgd.step()
        sgd.zero_grad()
    with running(path) as accelerator:
        net = make_net()
        net[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(2):
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            optimizer.zero_grad()
        net[0].requires_grad_(True)
        raised(LoopError, "frozen", "free_memory()", by=lambda: accelerator.backward(loss_of(model, own_batch(2))))
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(2, 4):
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            optimizer.zero_grad()
        assert_near(weights(accelerator, model), plain.state_dict())


def check_clipping_comes_too_late(path: str) -> None:
    """After the step: named; what the configuration says of clipping, and the window's size, hold on."""
    with running(path, deepspeed={"gradient_clipping": 0.01}) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(2):
            before = weights(accelerator, model)
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            raised(LoopError, "before optimizer.step()", by=lambda: accelerator.clip_grad_norm_(net.parameters(), 0.01))
            optimizer.zero_grad()
            after = weights(accelerator, model)
            moved = torch.stack([(after[name] - before[name]).norm() for name in before]).norm()
            assert abs(float(moved) - 0.1 * 0.01) < 1e-5


_ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]
CHECKS = checks_on(dict.fromkeys((*SINGLE, *PAIR)), _ALL)
