"""Models, their inputs and their losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loops import FEATURES, OUT, SIZE, STAGE_3, ZERO, Plain
from modules import (
    Attending,
    Borrowing,
    Coding,
    Dropping,
    LowRank,
    Masked,
    Packed,
    Recomputed,
    Recording,
    Recurrent,
    Recurring,
    Shared,
    Skipping,
    Tied,
    TwoHeads,
    TwoInputs,
    WithFunction,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from training import STEPS, Kind, Weights, net, sgd, squared, train


def modelled(make: Callable[[], nn.Module], loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = make()
    return train(loop, model, sgd(model.parameters()))


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


def several_losses(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = TwoHeads()

    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        out = model(x, scale=0.5)
        return (out["a"] - y).square().mean() + 0.3 * (out["b"] - y).abs().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def mixed_up(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        other_x, other_y = loop.batch(step + 50)
        return squared(model, (0.7 * x + 0.3 * other_x, 0.7 * y + 0.3 * other_y))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def noise_on_inputs(loop: Plain) -> Weights:
    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        generator = torch.Generator().manual_seed(step)
        return squared(model, (x + 0.1 * loop.part(torch.randn(SIZE, FEATURES, generator=generator)), y))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


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


def dropping(checkpointed: bool, loop: Plain) -> Weights:
    """Drop with an own seed on each process."""
    torch.manual_seed(5)
    model = Dropping(checkpointed)

    def loss(model: Any, step: int) -> Tensor:
        x, y = _whole_batch(step)

        def of_rank(rank: int) -> Tensor:
            torch.manual_seed(1000 * step + rank)
            return squared(model, (loop.share(x, rank), loop.share(y, rank)))

        return loop.mean_over_ranks(of_rank)

    return train(loop, model, sgd(model.parameters()), loss)


def _whole_batch(step: int) -> tuple[Tensor, Tensor]:
    return Plain(1).batch(step)


def normalized_by_batches(loop: Plain) -> Weights:
    """Normalize on each process by its own part, as without SyncBatchNorm. Running statistics are no weights."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, OUT))

    def loss(model: Any, step: int) -> Tensor:
        x, y = _whole_batch(step)
        return loop.mean_over_ranks(lambda rank: squared(model, (loop.share(x, rank), loop.share(y, rank))))

    found = train(loop, model, sgd(model.parameters()), loss)
    return {name: tensor for name, tensor in found.items() if "running" not in name and "num_batches" not in name}


def truncated_in_time(loop: Plain) -> Weights:
    """Step after each piece of the sequences. The next piece begins with its state."""
    torch.manual_seed(5)
    model = Recurring()
    model, optimizer = loop.prepare(model, sgd(model.parameters()))
    state = None
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(SIZE, 3, FEATURES, generator=generator), torch.randn(SIZE, 3, OUT, generator=generator)
        out, state = model(loop.part(x), state)
        loop.backward((out - loop.part(y)).square().mean())
        state = tuple(tensor.detach() for tensor in state)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


def over_words(make: Callable[[], nn.Module], loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = make()

    def loss(model: Any, step: int) -> Tensor:
        return model(loop.words(step)).square().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def weighted_samples(loop: Plain) -> Weights:
    """Weigh samples by class. The mean's divisor is the global batch's."""

    def loss(model: Any, step: int) -> Tensor:
        labels = loop.words(step, 1, OUT)[:, 0]
        weight = torch.tensor([1.0, 2.0, 0.5, 4.0])
        total = functional.cross_entropy(model(loop.batch(step)[0]), labels, weight, reduction="sum")
        return total / loop.total(weight[labels].sum()) * (loop.world if type(loop) is not Plain else 1)

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def variational(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = Coding()

    def loss(model: Any, step: int) -> Tensor:
        x, noise = loop.batch(step)
        out, mean, spread = model(x, noise[:, :3])
        return (out - x).square().mean() + 0.1 * (mean.square() + spread.exp() - 1 - spread).mean()

    return train(loop, model, sgd(model.parameters()), loss)


def method_of_the_model(loop: Plain) -> Weights:
    """Call a part of the model by its own method, in addition to the forward."""
    torch.manual_seed(5)
    model = Coding()

    def loss(model: Any, step: int) -> Tensor:
        x, noise = loop.batch(step)
        out, _, _ = model(x, noise[:, :3])
        mean, _ = model.encode(loop.batch(step + 60)[0])
        return (out - x).square().mean() + mean.square().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def called_functionally(loop: Plain) -> Weights:
    """Run first-order meta-learning: a forward of weights after an inner step, each process on its own part."""

    def of_rank(model: Any, step: int, rank: int) -> Tensor:
        inner = loop.unwrap(model)
        names, parameters = zip(*inner.named_parameters(), strict=True)
        batches = [[loop.share(tensor, rank) for tensor in _whole_batch(at)] for at in (step, step + 20)]
        slopes = torch.autograd.grad((model(batches[0][0]) - batches[0][1]).square().mean(), parameters)
        moved = {n: p - 0.1 * s for n, p, s in zip(names, parameters, slopes, strict=True)}
        return (torch.func.functional_call(inner, moved, (batches[1][0],)) - batches[1][1]).square().mean()

    def loss(model: Any, step: int) -> Tensor:
        return loop.mean_over_ranks(lambda rank: of_rank(model, step, rank))

    model = net()
    return train(loop, model, sgd(model.parameters()), loss)


def pruned(loop: Plain) -> Weights:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return train(loop, model, sgd(model.parameters()))


def low_rank(loop: Plain) -> Weights:
    model = net().requires_grad_(False)
    nn.utils.parametrize.register_parametrization(model[2], "weight", LowRank(16, 16))
    return train(loop, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4))


def recorded(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = Recording()

    def loss(model: Any, step: int) -> Tensor:
        x, y = loop.batch(step)
        out = model(x)
        return (out.first - y).square().mean() + 0.3 * (out.second + y).square().mean()

    return train(loop, model, sgd(model.parameters()), loss)


def sparse_embedding(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, OUT))

    def loss(model: Any, step: int) -> Tensor:
        return model(loop.words(step)).square().mean()

    return train(loop, model, sgd(model.parameters(), momentum=0), loss)


def layer_left_out(loop: Plain) -> Weights:
    torch.manual_seed(5)
    model = Skipping()
    return train(loop, model, sgd(model.parameters(), momentum=0))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": partial(Recomputed, reentrant=False),
    "checkpointed, reentrant": partial(Recomputed, reentrant=True),
    "LSTM, weight and spectral norm": Recurrent,
    "batch norm in evaluation, complex buffer": Masked,
    "a function of one's own": WithFunction,
    "a layer called three times": Shared,
}


KINDS: dict[str, Kind] = {
    **{name: partial(modelled, make) for name, make in _MODELS.items()},
    "tied weights, padding, smoothed labels": partial(language, True),
    "embedding with padding": partial(language, False),
    "loss by tokens": loss_per_token,
    "several losses, outputs in a dict": several_losses,
    "mixup": mixed_up,
    "dropout by seeds": partial(dropping, False),
    "dropout by seeds, checkpointed": partial(dropping, True),
    "batch norm": normalized_by_batches,
    "truncated backpropagation in time": truncated_in_time,
    "GRU of packed sequences": partial(over_words, Packed),
    "torch's Transformer": partial(over_words, Attending),
    "a weight that another module uses": partial(over_words, Borrowing),
    "outputs in a dataclass": recorded,
    "weights of classes": weighted_samples,
    "variational autoencoder": variational,
    "a method beside forward": method_of_the_model,
    "functional_call": called_functionally,
    "pruned": pruned,
    "LoRA by parametrization": low_rank,
    "sparse embedding": sparse_embedding,
    "a layer left out": layer_left_out,
    "noise on inputs": noise_on_inputs,
    "two inputs, one by keyword": two_inputs,
    "batches of other sizes": other_sizes,
    "a compiled block": compiled_block,
    "a tiny GPT-2": tiny_gpt,
}
REFUSED: dict[str, dict[str, str]] = {
    "sparse embedding": dict.fromkeys(ZERO, "with sparse=False"),
    "a layer left out": {"ddp": "find_unused_parameters"},
}
# The script's own lines fail there, in torch, before any line of the package runs.
FAILS = {"functional_call": dict.fromkeys(STAGE_3, "must match the size")}
