"""Several models, and losses over the samples of all processes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from loops import EVERYWHERE, FEATURES, OUT, SIZE, Plain
from modules import TwoHeads
from torch import Tensor, nn
from torch.nn import functional
from training import STEPS, Kind, Weights, net, sgd, squared, train, with_sgd


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
    return loop.weights_of(maker=maker, judge=judge)


def distilled(loop: Plain) -> Weights:
    teacher = copy.deepcopy(net()).eval().requires_grad_(False)
    torch.manual_seed(6)
    student = nn.Linear(FEATURES, OUT)

    def loss(model: Any, step: int) -> Tensor:
        x, _ = loop.batch(step)
        return functional.kl_div(model(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")

    return train(loop, student, sgd(student.parameters()), loss)


def contrasted(loop: Plain) -> Weights:
    """Contrast every sample with those of all processes. Only its own have gradients, as in many scripts."""
    model = net()

    def loss(model: Any, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SIZE, FEATURES, generator=generator)
        own = functional.normalize(model(loop.part(x)), dim=-1)
        fixed = functional.normalize(torch.randn(SIZE, OUT, generator=generator), dim=-1)
        wanted = loop.part(torch.arange(SIZE))
        return functional.cross_entropy(own @ fixed.T / 0.2, wanted)

    return train(loop, model, sgd(model.parameters()), loss)


def _views(step: int) -> tuple[Tensor, Tensor]:
    return Plain(1).batch(step)[0], Plain(1).batch(step + 80)[0]


def contrast_of_all(with_gradients: bool, loop: Plain) -> Weights:
    """Contrast every sample with the other view of all processes' samples, which `gather` collects."""

    def loss(model: Any, step: int) -> Tensor:
        left, right = ({r: loop.share(view, r) for r in loop.ranks} for view in _views(step))
        own = {r: functional.normalize(model(torch.cat([left[r], right[r]])), dim=-1) for r in loop.ranks}
        gathered = loop.gathered(own, with_gradients=with_gradients)
        losses = []
        for rank, embedded in own.items():
            ones, others = embedded.chunk(2)
            theirs = [others if r == rank else gathered[r].chunk(2)[1] for r in range(loop.world)]
            wanted = loop.share(torch.arange(SIZE), rank)
            losses.append(functional.cross_entropy(ones @ torch.cat(theirs).T / 0.2, wanted))
        return torch.stack(losses).mean()

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


class Siamese(nn.Module):
    """A projection, and a prediction of the other view's projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.predict = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.project(x)
        return projected, self.predict(projected)


def siamese(loop: Plain) -> Weights:
    """Train SimSiam: each view predicts the other one, which is detached."""
    torch.manual_seed(5)
    model = Siamese()

    def loss(model: Any, step: int) -> Tensor:
        (left, from_left), (right, from_right) = (model(loop.part(view)) for view in _views(step))
        ahead = functional.cosine_similarity(from_left, right.detach()).mean()
        return -ahead - functional.cosine_similarity(from_right, left.detach()).mean()

    return train(loop, model, sgd(model.parameters()), loss)


def prepared_teacher(loop: Plain) -> Weights:
    """Prepare the frozen teacher too. At stage 3 it is partitioned."""
    teacher = net().eval().requires_grad_(False)
    torch.manual_seed(6)
    student = nn.Linear(FEATURES, OUT)
    student, optimizer, teacher = loop.prepare(student, sgd(student.parameters()), teacher)
    for step in range(STEPS):
        x, _ = loop.batch(step)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loop.backward(functional.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean"))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(student)


def mean_teacher(loop: Plain) -> Weights:
    """Train with a target that follows the model, as in BYOL or Q-learning, and that the loss uses."""
    teacher = net().requires_grad_(False)
    student, optimizer, teacher = loop.prepare(*with_sgd(), teacher)
    for step in range(STEPS):
        x, y = loop.batch(step)
        loop.backward((student(x) - 0.5 * teacher(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with loop.whole_weights(student, teacher), torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
    return loop.weights_of(student=student, teacher=teacher)


def two_models_one_loss(loop: Plain) -> Weights:
    """Train an encoder and a decoder, each with its own optimizer."""
    torch.manual_seed(5)
    encoder, decoder = nn.Linear(FEATURES, 3), nn.Linear(3, FEATURES)
    left, right = sgd(encoder.parameters()), torch.optim.AdamW(decoder.parameters(), lr=0.01, eps=1e-4)
    encoder, decoder, left, right = loop.prepare(encoder, decoder, left, right)
    for step in range(STEPS):
        x, _ = loop.batch(step)
        loop.backward((decoder(encoder(x).tanh()) - x).square().mean())
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights_of(encoder=encoder, decoder=decoder)


class Uncertainty(nn.Module):
    """A loss with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * (-self.logs).exp() + self.logs).sum()


def learned_loss(loop: Plain) -> Weights:
    criterion = Uncertainty()
    second = sgd(criterion.parameters(), lr=0.1)
    model, optimizer, criterion, second = loop.prepare(*with_sgd(), criterion, second)
    for step in range(STEPS):
        x, y = loop.batch(step)
        out = model(x)
        loop.backward(criterion(torch.stack([(out - y).square().mean(), out.square().mean()])))
        for one in (optimizer, second):
            one.step()
            one.zero_grad()
    return loop.weights_of(model=model, criterion=criterion)


def one_optimizer_of_two(loop: Plain) -> Weights:
    torch.manual_seed(5)
    encoder, decoder = nn.Linear(FEATURES, 3), nn.Linear(3, FEATURES)
    optimizer = sgd([*encoder.parameters(), *decoder.parameters()])
    encoder, decoder, optimizer = loop.prepare(encoder, decoder, optimizer)
    loop.backward(decoder(encoder(loop.batch(0)[0])).square().mean())
    optimizer.step()
    return loop.weights_of(encoder=encoder, decoder=decoder)


def two_optimizers_of_one(loop: Plain) -> Weights:
    model = net()
    left, right = sgd(model[0].parameters()), torch.optim.AdamW(model[2:].parameters())
    model, left, right = loop.prepare(model, left, right)
    loop.backward(squared(model, loop.batch(0)))
    left.step()
    right.step()
    return loop.weights(model)


def policy_gradient(loop: Plain) -> Weights:
    """Take several steps on each rollout, by a clipped ratio to the old policy, with a critic in the same module."""
    torch.manual_seed(5)
    model = TwoHeads()
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4))
    for rollout in range(2):
        x, _ = loop.batch(rollout)
        chosen, gain = loop.words(rollout, 1, OUT), loop.batch(rollout + 10)[1][:, :1]
        with torch.no_grad():
            old = model(x)["a"].log_softmax(-1).gather(1, chosen)
        for _ in range(3):
            out = model(x)
            ratio = (out["a"].log_softmax(-1).gather(1, chosen) - old).exp()
            policy = -torch.min(ratio * gain, ratio.clamp(0.99, 1.01) * gain).mean()
            loop.backward(policy + 0.5 * (out["b"][:, :1] - gain).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


KINDS: dict[str, Kind] = {
    "GAN": adversaries,
    "distillation": distilled,
    "distillation, the teacher prepared": prepared_teacher,
    "mean teacher": mean_teacher,
    "SimSiam": siamese,
    "contrast": contrasted,
    "contrast with gathered embeddings": partial(contrast_of_all, False),
    "contrast with gathered gradients": partial(contrast_of_all, True),
    "two models, one loss": two_models_one_loss,
    "a loss with weights": learned_loss,
    "one optimizer of two models": one_optimizer_of_two,
    "two optimizers of one model": two_optimizers_of_one,
    "policy gradient": policy_gradient,
}
REFUSED: dict[str, dict[str, str]] = {
    "one optimizer of two models": dict.fromkeys(EVERYWHERE, "Build an optimizer for each"),
    "two optimizers of one model": dict.fromkeys(EVERYWHERE, "with two parameter groups"),
}
FAILS: dict[str, dict[str, str]] = {}
