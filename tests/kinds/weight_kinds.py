"""Operations of loops on weights between steps: average, freeze, restore and change them."""

from __future__ import annotations

import torch
from loops import EVERYWHERE, ZERO, Plain
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import STEPS, Kind, Weights, net, sgd, squared, train, with_sgd


def moving_average(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    average = loop.weights(model)
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        now = loop.weights(model)
        average = {name: 0.7 * average[name] + 0.3 * now[name] for name in average}
    return average


def stochastic_averaging(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*with_sgd())
    bare = net()
    averaged = AveragedModel(bare)
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        bare.load_state_dict(loop.weights(model))
        averaged.update_parameters(bare)
    return {name: tensor.clone() for name, tensor in averaged.module.state_dict().items()}


def frozen_body(loop: Plain) -> Weights:
    model = net()
    model[0].requires_grad_(False)
    return train(loop, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))


def averaged_parameters(loop: Plain) -> Weights:
    """Average the parameters by hand."""
    model, optimizer = loop.prepare(*with_sgd())
    with loop.whole_weights(model):
        average = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        with loop.whole_weights(model):
            for slow, fast in zip(average, model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.3)
    return {str(index): tensor for index, tensor in enumerate(average)}


def averaged_model(loop: Plain) -> Weights:
    """Average the prepared model with torch's AveragedModel."""
    model, optimizer = loop.prepare(*with_sgd())
    with loop.whole_weights(model):
        averaged = AveragedModel(loop.unwrap(model), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        with loop.whole_weights(model):
            averaged.update_parameters(loop.unwrap(model))
    return {name: tensor.clone() for name, tensor in averaged.module.state_dict().items()}


def unfrozen(loop: Plain) -> Weights:
    """Unfreeze a backbone after the first epoch, with all parameters in one optimizer."""
    model = net()
    body = model[0].requires_grad_(False)
    model, optimizer = loop.prepare(model, sgd(model.parameters()))
    for step in range(STEPS):
        if step == 2:
            body.requires_grad_(True)
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def unfrozen_and_prepared(loop: Plain) -> Weights:
    """Unfreeze a backbone after the first epoch. The second epoch has its own optimizer."""
    model = net()
    model[0].requires_grad_(False)
    for epoch in range(2):
        prepared, optimizer = loop.prepare(model, sgd([p for p in model.parameters() if p.requires_grad]))
        for step in range(2 * epoch, 2 * epoch + 2):
            loop.backward(squared(prepared, loop.batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            loop.free(prepared, optimizer)
            model[0].requires_grad_(True)
    return loop.weights(prepared)


def frozen_later(loop: Plain) -> Weights:
    model = net()
    body = model[0]
    model, optimizer = loop.prepare(model, sgd(model.parameters()))
    for step in range(STEPS):
        body.requires_grad_(step < 2)
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def clamped(loop: Plain) -> Weights:
    """Clamp the weights as in a Wasserstein GAN."""
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        with loop.whole_weights(model):
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
    return loop.weights(model)


def perturbed(loop: Plain) -> Weights:
    """Move weights for the forward and the backward, and back before the step."""
    model, optimizer = loop.prepare(*with_sgd())
    for step in range(STEPS):
        with loop.whole_weights(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25)
        loop.backward(squared(model, loop.batch(step)))
        with loop.whole_weights(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.25)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def looked_ahead(loop: Plain) -> Weights:
    """Train with Lookahead: at every second step the fast weights return to the slow ones."""
    model, optimizer = loop.prepare(*with_sgd())
    slow = loop.weights(model)
    for step in range(STEPS + 1):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            now = loop.weights(model)
            slow = {name: slow[name] + 0.5 * (now[name] - slow[name]) for name in slow}
            with loop.whole_weights(model):
                loop.unwrap(model).load_state_dict(slow)
    return loop.weights(model)


def best_restored(loop: Plain) -> Weights:
    """Restore the weights of the lowest loss, and train on with the same optimizer."""
    model, optimizer = loop.prepare(*with_sgd())
    best = None
    for step in range(STEPS + 1):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            best = loop.weights(model)
        if step == 3 and best is not None:
            with loop.whole_weights(model):
                loop.unwrap(model).load_state_dict(best)
    return loop.weights(model)


KINDS: dict[str, Kind] = {
    "moving average": moving_average,
    "stochastic weight averaging": stochastic_averaging,
    "moving average over parameters": averaged_parameters,
    "AveragedModel of the prepared one": averaged_model,
    "frozen body": frozen_body,
    "frozen body, unfrozen in epoch 2": unfrozen,
    "frozen body, unfrozen and prepared in epoch 2": unfrozen_and_prepared,
    "a layer frozen later": frozen_later,
    "weights clamped": clamped,
    "weights perturbed": perturbed,
    "Lookahead": looked_ahead,
    "best weights restored": best_restored,
}
REFUSED: dict[str, dict[str, str]] = {
    "frozen body, unfrozen in epoch 2": dict.fromkeys(EVERYWHERE, "free_memory()"),
    "a layer frozen later": {"ddp": "find_unused_parameters", **dict.fromkeys(ZERO, "free_memory()")},
}
FAILS: dict[str, dict[str, str]] = {}
