"""Operations of loops on gradients: accumulate, clip, change and skip them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from loops import EVERYWHERE, SIZE, STAGE_3, ZERO, Plain
from torch import Tensor
from training import STEPS, Kind, Samples, Weights, net, sgd, squared, train, with_sgd


def gradient_penalty(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - y).square().mean() + 0.1 * slope.square().sum(1).mean()

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def gradient_hooks(loop: Plain) -> Weights:
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    return train(loop, model, sgd(model.parameters()))


def accumulated_by_hand(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(6):
        loop.backward(squared(model, loop.batch(step)) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


def clipped(loop: Plain) -> Weights:
    model = net()

    def after(model: Any, step: int) -> None:
        loop.clip(model.parameters(), 0.05)

    return train(loop, model, sgd(model.parameters()), after=after)


def early_stop(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(10):
        loss = squared(model, loop.batch(step % 2))
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if float(loop.mean(loss)) < 1.0 or step == 6:
            break
    return loop.weights(model)


def skipped_batch(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS + 1):
        loss = squared(model, loop.batch(step)) * (math.nan if step == 2 else 1.0)
        if not torch.isfinite(loop.mean(loss)):
            continue
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def cleared_first(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
    return loop.weights(model)


def evaluated_between(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        model.train()
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            squared(model, loop.batch(step + 90))
    return loop.weights(model)


def clipped_by_value(loop: Plain) -> Weights:
    model = net()

    def after(model: Any, step: int) -> None:
        loop.clip_values(model.parameters(), 0.02)

    return train(loop, model, sgd(model.parameters()), after=after)


def clipped_by_group(loop: Plain) -> Weights:
    model = net()
    groups = [list(model[0].parameters()), list(model[2:].parameters())]

    def after(model: Any, step: int) -> None:
        for group, norm in zip(groups, (0.02, 0.05), strict=True):
            loop.clip(group, norm)

    return train(loop, model, sgd([{"params": group} for group in groups]), after=after)


def accumulated_by_context(loop: Plain) -> Weights:
    """Train two windows of three batches, and a last one of two."""
    loop.accumulate_over(3)
    model, optimizer = loop.prepare(*with_sgd())
    loader = loop.loader(Samples(8 * SIZE))
    for index, batch in enumerate(loader):
        with loop.accumulate(model, index, 8):
            loop.backward(squared(model, batch))
            loop.step(optimizer)
    return loop.weights(model)


def accumulated_and_clipped(loop: Plain) -> Weights:
    """Clip by the norm of the complete window."""
    loop.accumulate_over(2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4)
    model, optimizer = loop.prepare(model, optimizer)
    for index, batch in enumerate(loop.loader(Samples(6 * SIZE))):
        with loop.accumulate(model, index, 6):
            loop.backward(squared(model, batch))
            if loop.ends_window:
                loop.clip(model.parameters(), 0.05)
            loop.step(optimizer)
    return loop.weights(model)


def unsynchronized_by_hand(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(6):
        with nullcontext() if step % 3 == 2 else loop.no_sync(model):
            loop.backward(squared(model, loop.batch(step)) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


def _noise(parameter: Tensor, index: int) -> Tensor:
    return 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))


def noise_by_hooks(loop: Plain) -> Weights:
    """Add the same noise on every process."""
    model = net()
    for index, parameter in enumerate(model.parameters()):
        noise = _noise(parameter, index)
        parameter.register_hook(lambda grad, noise=noise: grad + noise)
    return train(loop, model, sgd(model.parameters()))


def noise_on_gradients(loop: Plain) -> Weights:
    model = net()
    noises = [_noise(parameter, index) for index, parameter in enumerate(model.parameters())]

    def after(model: Any, step: int) -> None:
        for parameter, noise in zip(model.parameters(), noises, strict=True):
            parameter.grad = noise.clone() if parameter.grad is None else parameter.grad + noise

    return train(loop, model, sgd(model.parameters()), after=after)


def hooks_after_gradients(loop: Plain) -> Weights:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model = net()
    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return train(loop, model, sgd(model.parameters()))


def hooks_on_modules(loop: Plain) -> Weights:
    model = net()
    model[1].register_forward_hook(lambda module, inputs, output: output * 0.5)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return train(loop, model, sgd(model.parameters()))


def two_backwards_of_one_graph(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        x, y = loop.batch(step)
        out = model(x)
        loop.backward((out - y).square().mean(), retain_graph=True)
        loop.backward(0.3 * out.abs().mean())
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def two_losses_of_two_forwards(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        loop.backward(0.3 * squared(model, loop.batch(step + 40)))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def adversarial_inputs(loop: Plain) -> Weights:
    """Move inputs along the sign of their gradients, without a graph of these."""

    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(squared(model, (x, y)), x)
        return squared(model, (x.detach() + 0.1 * slope.sign(), y))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def kept_by_zero_grad(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loop.weights(model)


def dropped_gradients(loop: Plain) -> Weights:
    """Drop the gradients of a batch whose loss is too high, after its backward."""
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def by_closure(make: Callable[[Any], torch.optim.Optimizer], loop: Plain) -> Weights:
    model = net()
    model, optimizer = loop.prepare(model, make(model.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squared(model, loop.batch(0))
        loop.backward(loss)
        return loss

    optimizer.step(closure)
    return loop.weights(model)


def penalized(power: int, loop: Plain) -> Weights:
    """Add a penalty on the weights to the loss by hand."""

    def loss(model: Any, step: int) -> Tensor:
        return squared(model, loop.batch(step)) + 0.01 * sum(p.abs().pow(power).sum() for p in model.parameters())

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def backwards_in_other_order(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        first, second = squared(model, loop.batch(step)), squared(model, loop.batch(step + 40))
        loop.backward(second)
        loop.backward(0.3 * first)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def hooks_after_sums(loop: Plain) -> Weights:
    """Register a hook that finds the sum so far."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model, optimizer = with_sgd()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    model, optimizer = loop.prepare(model, optimizer)
    for step in range(6):
        loop.backward(squared(model, loop.batch(step)) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


KINDS: dict[str, Kind] = {
    "gradient penalty": gradient_penalty,
    "hooks on gradients": gradient_hooks,
    "accumulated by hand": accumulated_by_hand,
    "clipped by norm": clipped,
    "early stopping": early_stop,
    "a batch skipped for its NaN": skipped_batch,
    "zero_grad first": cleared_first,
    "zero_grad without None": kept_by_zero_grad,
    "gradients dropped": dropped_gradients,
    "clipped by value": clipped_by_value,
    "clipped by group": clipped_by_group,
    "accumulated by context, a shorter last window": accumulated_by_context,
    "accumulated by context, clipped": accumulated_and_clipped,
    "no_sync by hand": unsynchronized_by_hand,
    "noise on gradients, by hooks": noise_by_hooks,
    "noise on gradients, in p.grad": noise_on_gradients,
    "hooks after gradients": hooks_after_gradients,
    "hooks on modules": hooks_on_modules,
    "two backwards, retain_graph": two_backwards_of_one_graph,
    "two losses of two forwards": two_losses_of_two_forwards,
    "adversarial inputs": adversarial_inputs,
    "L2 penalty by hand": partial(penalized, 2),
    "L1 penalty by hand": partial(penalized, 1),
    "two backwards in other order": backwards_in_other_order,
    "hooks after sums of gradients": hooks_after_sums,
    "step(closure)": partial(by_closure, sgd),
    "LBFGS": partial(by_closure, partial(torch.optim.LBFGS, lr=0.1)),
    "evaluation between steps": evaluated_between,
}
REFUSED: dict[str, dict[str, str]] = {
    "gradient penalty": dict.fromkeys(STAGE_3, "Use stage 2"),
    "clipped by value": dict.fromkeys(ZERO, "Use accelerator.clip_grad_norm_"),
    "clipped by group": dict.fromkeys(ZERO, "Pass model.parameters() of the prepared"),
    "noise on gradients, in p.grad": dict.fromkeys(("zero2", "zero2-cpu"), "p.register_hook"),
    "two backwards, retain_graph": dict.fromkeys(STAGE_3, "Add the losses"),
    "L2 penalty by hand": dict.fromkeys(STAGE_3, "weight_decay"),
    "L1 penalty by hand": dict.fromkeys(STAGE_3, "weight_decay"),
    "hooks after sums of gradients": dict.fromkeys(("zero2", "zero2-cpu", *STAGE_3), "p.register_hook"),
    "step(closure)": dict.fromkeys(EVERYWHERE, "accelerator.backward(loss)"),
    "LBFGS": dict.fromkeys(EVERYWHERE, "without a closure"),
}
# The script's own lines fail there, in torch, before any line of the package runs.
FAILS = {"noise on gradients, in p.grad": dict.fromkeys(STAGE_3, "assign a gradient of size")}
