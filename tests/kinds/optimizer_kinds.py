"""Optimizers, parameter groups and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loops import ZERO, Plain
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from training import STEPS, Kind, Weights, net, sgd, squared, train, with_sgd


def optimizing(make: Callable[[Any], torch.optim.Optimizer], loop: Plain) -> Weights:
    model = net()
    return train(loop, model, make(model.parameters()))


def scheduling(make: Callable[[Any], Any], loop: Plain) -> Weights:
    model = net()
    optimizer = sgd(model.parameters())
    return train(loop, model, optimizer, schedule=make(optimizer))


def two_groups(loop: Plain) -> Weights:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2:].parameters(), "weight_decay": 0.1}]
    return train(loop, model, torch.optim.AdamW(groups, lr=0.003, weight_decay=0.0))


def no_decay_of_biases(loop: Plain) -> Weights:
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return train(loop, model, torch.optim.AdamW(groups, lr=0.003))


def layerwise_rates(loop: Plain) -> Weights:
    model = net()
    layers = [layer for layer in model if list(layer.parameters())]
    return train(loop, model, sgd([{"params": m.parameters(), "lr": 0.05 * 0.5**n} for n, m in enumerate(layers)]))


def plateau(loop: Plain) -> Weights:
    model, optimizer = with_sgd()
    model, optimizer, schedule = loop.prepare(model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    for step in range(6):
        loss = squared(model, loop.batch(step))
        loop.backward(loss)
        optimizer.step()
        schedule.step(float(loop.mean(loss)) + step)  # the loss gets worse and worse
        optimizer.zero_grad()
    return loop.weights(model)


def chained(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])


def rate_by_hand(loop: Plain) -> Weights:
    """Write the rate and the momentum into the groups, as old tutorials do."""
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.05 * 0.5**step, 0.9 - 0.1 * step
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def once_an_epoch(loop: Plain) -> Weights:
    """Step the schedule once an epoch, of two steps."""
    model, optimizer = with_sgd()
    model, optimizer, schedule = loop.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        for step in range(2):
            loop.backward(squared(model, loop.batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return loop.weights(model)


def cycled_betas(loop: Plain) -> Weights:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4)
    return train(loop, model, optimizer, schedule=lr_scheduler.OneCycleLR(optimizer, 0.01, STEPS + 1))


def rate_of_a_group(loop: Plain) -> Weights:
    """Keep one group at rest until the second epoch."""
    model = net()
    optimizer = sgd([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], momentum=0)
    rates = [lambda step: float(step >= 2), lambda step: 1.0]
    return train(loop, model, optimizer, schedule=lr_scheduler.LambdaLR(optimizer, rates))


def group_added(loop: Plain) -> Weights:
    model = net()
    model, optimizer = loop.prepare(model, sgd(list(model[2:].parameters())))
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(loop.unwrap(model)[0].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
    return loop.weights(model)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with Nesterov's momentum": partial(sgd, nesterov=True),
    "SGD with weight decay": partial(sgd, weight_decay=0.1),
    "Adam with L2": partial(torch.optim.Adam, lr=0.003, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.003),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.003, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.001),
    "NAdam": partial(torch.optim.NAdam, lr=0.003),
    "RAdam": partial(torch.optim.RAdam, lr=0.003),
    "Adamax": partial(torch.optim.Adamax, lr=0.003),
    "Adadelta": torch.optim.Adadelta,
    "Rprop": partial(torch.optim.Rprop, lr=0.003),
    "ASGD": partial(torch.optim.ASGD, lr=0.03),
    "Adam that maximizes": partial(torch.optim.Adam, lr=0.003, maximize=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.003),
}


_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycle with momentum": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequential": chained,
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "multiplied": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.7),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
}


KINDS: dict[str, Kind] = {
    **{name: partial(optimizing, make) for name, make in _OPTIMIZERS.items()},
    **{name: partial(scheduling, make) for name, make in _SCHEDULES.items()},
    "two groups": two_groups,
    "no decay of biases": no_decay_of_biases,
    "rates by layer": layerwise_rates,
    "on a plateau": plateau,
    "rate and momentum by hand": rate_by_hand,
    "schedule once an epoch": once_an_epoch,
    "OneCycle with betas": cycled_betas,
    "a group that rests": rate_of_a_group,
    "a group added later": group_added,
}
REFUSED: dict[str, dict[str, str]] = {
    "Adafactor": dict.fromkeys(ZERO, "Use stage 0 or DDP"),
    "a group added later": dict.fromkeys(ZERO, "before prepare()"),
}
FAILS: dict[str, dict[str, str]] = {}
