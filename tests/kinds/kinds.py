"""Kinds of training code, as users write them, each a function of a loop that returns its final weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loops import FEATURES, OUT, SIZE, Plain
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

Weights = dict[str, Tensor]
Kind = Callable[[Plain], Weights]
STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, OUT))


def squared(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, **options})


def train(
    loop: Plain,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, int], Tensor] | None = None,
    schedule: Any = None,
    after: Callable[[Any, int], None] | None = None,
) -> Weights:
    """The common loop: backward, step, schedule, zero_grad."""
    objects = loop.prepare(model, optimizer, *([schedule] if schedule else []))
    model, optimizer = objects[:2]
    for step in range(STEPS):
        value = loss(model, step) if loss else squared(model, loop.batch(step))
        loop.backward(value)
        if after:
            after(model, step)
        optimizer.step()
        if schedule:
            objects[2].step()
        optimizer.zero_grad()
    return loop.weights(model)


def optimizing(make: Callable[[Any], torch.optim.Optimizer], loop: Plain) -> Weights:
    model = net()
    return train(loop, model, make(model.parameters()))


def scheduling(make: Callable[[Any], Any], loop: Plain) -> Weights:
    model = net()
    optimizer = sgd(model.parameters())
    return train(loop, model, optimizer, schedule=make(optimizer))


def modelled(make: Callable[[], nn.Module], loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = make()
    return train(loop, model, sgd(model.parameters()))


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
    model, optimizer, schedule = loop.prepare(*_with(net(), lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)))
    for step in range(6):
        loss = squared(model, loop.batch(step))
        loop.backward(loss)
        optimizer.step()
        schedule.step(float(loop.mean(loss)) + step)  # it gets worse and worse
        optimizer.zero_grad()
    return loop.weights(model)


def _with(model: nn.Module, make: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    optimizer = sgd(model.parameters())
    return model, optimizer, make(optimizer)


def moving_average(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    average = loop.weights(model)
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        now = loop.weights(model)
        average = {name: 0.7 * average[name] + 0.3 * now[name] for name in average}
    return average


def stochastic_averaging(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    bare = net()
    averaged = AveragedModel(bare)
    for step in range(STEPS):
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        bare.load_state_dict(loop.weights(model))
        averaged.update_parameters(bare)
    return {name: tensor.clone() for name, tensor in averaged.module.state_dict().items()}


class Recomputed(nn.Module):
    """Blocks that are computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(FEATURES, 16), reentrant
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


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


class Recurrent(nn.Module):
    """An LSTM whose head has a weight norm, with a layer of spectral norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8))
        self.cells = nn.LSTM(4, 8, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, OUT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.cells(x.reshape(len(x), 2, 4))[0][:, -1])


class Tied(nn.Module):
    """A language model whose head is its embedding, with a padding index."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, padding_idx=0)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(words))))


def language(tied: bool, loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = Tied(tied)

    def loss(model: Any, step: int) -> Tensor:
        words = loop.words(step)
        return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), label_smoothing=0.1)

    return train(loop, model, torch.optim.Adam(model.parameters(), lr=0.01), loss)


def loss_per_token(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = Tied()

    def loss(model: Any, step: int) -> Tensor:
        words = loop.words(step)
        wanted = words[:, 1:].masked_fill(words[:, 1:] < 5, -100)
        total = functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), wanted.flatten(), reduction="sum")
        tokens = loop.total((wanted != -100).sum())
        return total / tokens * (loop.world if type(loop) is not Plain else 1)

    return train(loop, model, sgd(model.parameters()), loss)


class TwoHeads(nn.Module):
    """A body with two heads, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(FEATURES, 16), nn.ModuleDict({n: nn.Linear(16, OUT) for n in "ab"})

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x)) * scale
        return {name: head(x) for name, head in self.heads.items()}


def several_losses(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = TwoHeads()

    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        out = model(x, scale=0.5)
        return (out["a"] - y).square().mean() + 0.3 * (out["b"] - y).abs().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def accumulated_by_hand(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    for step in range(6):
        loop.backward(squared(model, loop.batch(step)) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


def clipped(loop: Plain) -> Weights:
    model = net()

    def after(model: Any, step: int) -> None:
        loop.clip(model, 0.05)

    return train(loop, model, sgd(model.parameters()), after=after)


def mixed_up(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        other_x, other_y = loop.batch(step + 50)
        return squared(model, (0.7 * x + 0.3 * other_x, 0.7 * y + 0.3 * other_y))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def adversaries(loop: Plain) -> Weights:
    torch.manual_seed(5)
    maker, judge = nn.Linear(FEATURES, FEATURES), nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    make, criticise = sgd(maker.parameters(), momentum=0), sgd(judge.parameters(), momentum=0)
    maker, make = loop.prepare(maker, make)
    judge, criticise = loop.prepare(judge, criticise)
    score = functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        noise, real = loop.batch(step)[0], loop.batch(step + 70)[0]
        fake = maker(noise)
        right, wrong = judge(real), judge(fake.detach())
        loop.backward(score(right, torch.ones_like(right)) + score(wrong, torch.zeros_like(wrong)))
        criticise.step()
        criticise.zero_grad()
        fooled = judge(fake)
        loop.backward(score(fooled, torch.ones_like(fooled)))
        make.step()
        make.zero_grad()
        criticise.zero_grad()
    return {f"{n}.{k}": v for n, m in (("maker", maker), ("judge", judge)) for k, v in loop.weights(m).items()}


def distilled(loop: Plain) -> Weights:
    teacher = copy.deepcopy(net()).eval().requires_grad_(False)
    torch.manual_seed(6)
    student = nn.Linear(FEATURES, OUT)

    def loss(model: Any, step: int) -> Tensor:
        x, _ = loop.batch(step)
        return functional.kl_div(model(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")

    return train(loop, student, sgd(student.parameters()), loss)


def frozen_body(loop: Plain) -> Weights:
    model = net()
    model[0].requires_grad_(False)
    return train(loop, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))


def early_stop(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    for step in range(10):
        loss = squared(model, loop.batch(step % 2))
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if float(loop.mean(loss)) < 1.0 or step == 6:
            break
    return loop.weights(model)


def skipped_batch(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    for step in range(STEPS + 1):
        loss = squared(model, loop.batch(step)) * (math.nan if step == 2 else 1.0)
        if not torch.isfinite(loop.mean(loss)):
            continue
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def noise_on_inputs(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        generator = torch.Generator().manual_seed(step)
        return squared(model, (x + 0.1 * loop.part(torch.randn(SIZE, FEATURES, generator=generator)), y))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


class Masked(nn.Module):
    """Dropout with masks of the batch's own, and a batch norm that is kept in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, OUT)
        self.register_buffer("rotation", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.norm.eval()

    def train(self, mode: bool = True) -> Masked:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        turned = (torch.view_as_complex(torch.stack([x, x.flip(1)], -1).contiguous()) * self.rotation).real
        return self.last(turned * (x > 0))


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Doubled.apply(torch.tanh(self.first(x))))


class Shared(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8), nn.Linear(16, OUT)

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(left), self.right(right)], -1).relu())


def two_inputs(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = TwoInputs()

    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        return (model(x, right=loop.batch(step + 30)[0]) - y).square().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def other_sizes(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        size = 6 * (step + 1)
        x, y = torch.randn(size, FEATURES, generator=generator), torch.randn(size, OUT, generator=generator)
        return squared(model, (loop.part(x), loop.part(y)))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def cleared_first(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
    return loop.weights(model)


def evaluated_between(loop: Plain) -> Weights:
    model, optimizer = loop.prepare(*_with(net(), lambda _: None)[:2])
    for step in range(STEPS):
        model.train()
        loop.backward(squared(model, loop.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            squared(model, loop.batch(step + 90))
    return loop.weights(model)


def contrasted(loop: Plain) -> Weights:
    """Every sample against those of all processes, of which only the own have gradients, as in many scripts."""
    model = net()

    def loss(model: Any, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SIZE, FEATURES, generator=generator)
        own = functional.normalize(model(loop.part(x)), dim=-1)
        fixed = functional.normalize(torch.randn(SIZE, OUT, generator=generator), dim=-1)
        wanted = loop.part(torch.arange(SIZE))
        return functional.cross_entropy(own @ fixed.T / 0.2, wanted)

    return train(loop, model, sgd(model.parameters()), loss)


def compiled_block(loop: Plain) -> Weights:
    model = net()
    model[2].compile(backend="eager")
    return train(loop, model, sgd(model.parameters()))


def tiny_gpt(loop: Plain) -> Weights:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config)

    def loss(model: Any, step: int) -> Tensor:
        words = loop.words(step)
        return model(input_ids=words, labels=words).loss

    return train(loop, model, torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4), loss)


def chained(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])


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
}
_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycle with momentum": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequential": chained,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
}
_MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": partial(Recomputed, reentrant=False),
    "checkpointed, reentrant": partial(Recomputed, reentrant=True),
    "LSTM, weight and spectral norm": Recurrent,
    "batch norm in evaluation, complex buffer": Masked,
    "a function of one's own": WithFunction,
    "a layer called three times": Shared,
}
KINDS: dict[str, Kind] = {
    **{name: partial(optimizing, make) for name, make in _OPTIMIZERS.items()},
    **{name: partial(scheduling, make) for name, make in _SCHEDULES.items()},
    **{name: partial(modelled, make) for name, make in _MODELS.items()},
    "two groups": two_groups,
    "no decay of biases": no_decay_of_biases,
    "rates by layer": layerwise_rates,
    "on a plateau": plateau,
    "moving average": moving_average,
    "stochastic weight averaging": stochastic_averaging,
    "gradient penalty": gradient_penalty,
    "hooks on gradients": gradient_hooks,
    "tied weights, padding, smoothed labels": partial(language, True),
    "embedding with padding": partial(language, False),
    "loss by tokens": loss_per_token,
    "several losses, outputs in a dict": several_losses,
    "accumulated by hand": accumulated_by_hand,
    "clipped by norm": clipped,
    "mixup": mixed_up,
    "GAN": adversaries,
    "distillation": distilled,
    "frozen body": frozen_body,
    "early stopping": early_stop,
    "a batch skipped for its NaN": skipped_batch,
    "noise on inputs": noise_on_inputs,
    "two inputs, one by keyword": two_inputs,
    "batches of other sizes": other_sizes,
    "zero_grad first": cleared_first,
    "evaluation between steps": evaluated_between,
    "contrast": contrasted,
    "a compiled block": compiled_block,
    "a tiny GPT-2": tiny_gpt,
}
