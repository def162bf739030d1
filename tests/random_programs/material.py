"""Models, samples, losses, optimizers and schedulers of random programs, in plain torch, for both interpreters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from grammar import Program
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset

FEATURES, OUT, WORDS, LENGTH = 8, 4, 20, 6


class Samples(Dataset[Any]):
    """A dataset of `count` samples in the program's form."""

    def __init__(self, program: Program, count: int) -> None:
        generator = torch.Generator().manual_seed(program.seed)
        self.vectors = torch.randn(count, FEATURES, generator=generator)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
        self.targets = torch.randn(count, OUT, generator=generator)
        self.inputs: Tensor = self.words if program.model in WORD_MODELS else self.vectors
        self._form = program.batch

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.form(self.inputs[index], self.targets[index])

    def form(self, x: Tensor, y: Tensor) -> Any:
        """Arrange a sample, or a batch, in the program's form."""
        if self._form == "dict":
            return {"x": x, "y": y}
        return {"in": [x], "out": ({"y": y},)} if self._form == "nested" else (x, y)


class Stream(IterableDataset[Any]):
    """A stream of the samples, without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


def open_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Return a batch's inputs and targets, whatever its form."""
    if isinstance(batch, dict):
        return (batch["x"], batch["y"]) if "x" in batch else (batch["in"][0], batch["out"][0]["y"])
    x, y = batch
    return x, y


# ---- models ----------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """A stem, a body and a head, the structure of most models."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(FEATURES, width), body, nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.tanh(self.stem(x))))


class Recomputed(Body):
    """A model that recomputes its body in the backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, torch.tanh(self.stem(x)), use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Recomputed):
    reentrant = True


class Thrice(Body):
    """A model that calls its body three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(3):
            x = torch.tanh(self.body(x))
        return self.head(x)


class Scaled(Body):
    """A model with a scalar parameter, a list of vectors, and a buffer that is not saved."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__(body, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shifts = nn.ParameterList([torch.randn(width) for _ in range(2)])
        self.register_buffer("sign", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x)) * self.scale + self.shifts[0]
        return self.head(self.body(x * self.sign) + self.shifts[1])


class Heads(Body):
    """A model with two heads in a dict."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__(body, width)
        self.other = nn.Linear(width, OUT, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.body(torch.tanh(self.stem(x)))
        return {"first": self.head(x), "second": self.other(x)}


@dataclass
class Outputs:
    """An output type that no library knows."""

    first: Tensor
    second: Tensor


class Recorded(Heads):
    def forward(self, x: Tensor) -> Any:
        return Outputs(**super().forward(x))


class Convolved(nn.Module):
    """A model of grouped convolutions with a group norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(2, 4), nn.GELU(), nn.Conv1d(4, 6, 3, groups=2))
        self.head = nn.Linear(6 * (FEATURES - 2), OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x.unsqueeze(1))).flatten(1))


class Remembering(nn.Module):
    """A model of an LSTM over the two halves of an input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(4, 5), nn.LSTM(5, width, batch_first=True)
        self.head = nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x.reshape(len(x), 2, 4)))[0][:, -1])


class LowRank(nn.Module):
    """A parametrization that adds low-rank matrices to a frozen weight: LoRA by hand."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(rows, 2) * 0.3), nn.Parameter(torch.randn(2, columns) * 0.3)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Embedded(nn.Module):
    """A model that embeds words and takes the mean of the body's outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.body = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.head = nn.Linear(width, OUT)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.stem(words))).mean(1))


class Tied(Embedded):
    """A model whose decoder shares the embedding's weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.decoder = nn.Linear(width, WORDS, bias=False)
        self.decoder.weight = self.stem.weight

    def forward(self, words: Tensor) -> Tensor:
        return (
            self.head(torch.tanh(self.body(self.stem(words))).mean(1)) + self.decoder(self.stem(words)).mean(1)[:, :OUT]
        )


class Borrowing(Embedded):
    """A model whose parent also uses the embedding's weight."""

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.stem(words))).mean(1)
        return self.head(x) + functional.linear(x, self.stem.weight)[:, :OUT]


class Attending(Embedded):
    """A model with a layer of torch's Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__(16)
        self.body = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)


class Packed(nn.Module):
    """A model with a GRU over sequences of several lengths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Embedding(WORDS, 8)
        self.body, self.head = nn.GRU(8, width, bidirectional=True, batch_first=True), nn.Linear(2 * width, OUT)

    def forward(self, words: Tensor) -> Tensor:
        lengths = 1 + words[:, 0] % words.shape[1]
        packed = rnn.pack_padded_sequence(self.stem(words), lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.head(out.sum(1))


class Causal(nn.Module):
    """A small transformers model that computes its own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        if kind == "gpt2":
            config: Any = transformers.GPT2Config(
                n_layer=1,
                n_head=2,
                n_embd=16,
                vocab_size=WORDS,
                n_positions=8,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
            self.language = transformers.GPT2LMHeadModel(config)
            self.stem = self.language.transformer.wte
        else:
            config = transformers.LlamaConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=WORDS,
                max_position_embeddings=8,
            )
            self.language = transformers.LlamaForCausalLM(config)
            self.stem = self.language.model.embed_tokens

    def forward(self, words: Tensor) -> Any:
        return self.language(input_ids=words, labels=words).loss


def _inner(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def _normed(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.GELU())


def _weight_normed(width: int) -> nn.Module:
    return Body(nn.utils.parametrizations.weight_norm(nn.Linear(width, width)), width)


def _spectral(width: int) -> nn.Module:
    return Body(nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)), width)


def _low_rank(width: int) -> nn.Module:
    model = Body(nn.Linear(width, width), width)
    model.body.requires_grad_(False)
    nn.utils.parametrize.register_parametrization(model.body, "weight", LowRank(width, width))
    return model


def _dropping(width: int, kind: type[Body] = Body) -> nn.Module:
    return kind(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh()), width)


MODELS: dict[str, Any] = {
    "mlp": lambda width: Body(_inner(width), width),
    "layer norm": lambda width: Body(_normed(width), width),
    "checkpointed": lambda width: Recomputed(_inner(width), width),
    "checkpointed, reentrant": lambda width: Reentrant(_inner(width), width),
    "body thrice": lambda width: Thrice(_inner(width), width),
    "scalar and list": lambda width: Scaled(_inner(width), width),
    "heads in a dict": lambda width: Heads(_normed(width), width),
    "heads in a record": lambda width: Recorded(_inner(width), width),
    "convolutions": Convolved,
    "LSTM": Remembering,
    "weight norm": _weight_normed,
    "spectral norm": _spectral,
    "low rank": _low_rank,
    "batch norm": lambda width: Body(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)), width),
    "dropout": _dropping,
    "dropout, checkpointed": lambda width: _dropping(width, Recomputed),
    "embedding": Embedded,
    "tied": Tied,
    "borrowed weight": Borrowing,
    "attention": Attending,
    "packed GRU": Packed,
    "GPT-2": lambda width: Causal("gpt2"),
    "Llama": lambda width: Causal("llama"),
}
WORD_MODELS = ("embedding", "tied", "borrowed weight", "attention", "packed GRU", "GPT-2", "Llama")
# Models whose results depend on a process's own part of a batch, or on its own random numbers.
OF_EACH_RANK = ("batch norm", "dropout", "dropout, checkpointed")


def make_model(program: Program, *, other: int = 0) -> nn.Module:
    """Create the program's model. With `other`, use other values, like a script before it resumes."""
    torch.manual_seed(program.seed + other)
    model: nn.Module = MODELS[program.model](program.width)
    return model


# ---- losses ----------------------------------------------------------------------------------------------------------


def compare(program: Program, out: Any, y: Tensor) -> Tensor:
    """Return the loss of a model's output."""
    if isinstance(out, Tensor) and out.ndim == 0:
        return out
    if isinstance(out, Outputs):
        out = {"first": out.first, "second": out.second}
    if isinstance(out, dict):
        return compare(program, out["first"], y) + 0.3 * (out["second"].float() + y).square().mean()
    out = out.float()
    if program.loss == "cross-entropy":
        return functional.cross_entropy(out, y.argmax(-1), label_smoothing=0.1)
    return functional.smooth_l1_loss(out, y) if program.loss == "smooth" else (out - y).square().mean()


# ---- optimizers ------------------------------------------------------------------------------------------------------

# A large eps, because Adam and similar optimizers turn the rounding of a tiny gradient into a complete step.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "Nesterov": ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.01, "eps": 1e-3}),
    "AdamW": ("AdamW", {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.95)}),
    "AMSGrad": ("AdamW", {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "eps": 1e-2}),
    "Adagrad": ("Adagrad", {"lr": 0.02, "eps": 1e-2}),
    "NAdam": ("NAdam", {"lr": 0.01, "eps": 1e-3}),
    "RAdam": ("RAdam", {"lr": 0.01, "eps": 1e-3}),
    "Adamax": ("Adamax", {"lr": 0.01, "eps": 1e-2}),
    "Adadelta": ("Adadelta", {"lr": 0.5, "eps": 1e-2}),
    "ASGD": ("ASGD", {"lr": 0.05}),
    "Adafactor": ("Adafactor", {"lr": 0.01}),
}


def trained(model: Any, program: Program) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters for an optimizer."""
    named = [(name.removeprefix("_orig_mod."), parameter) for name, parameter in model.named_parameters()]
    if program.frozen == "in the optimizer":
        return named
    if program.added != "no":
        stem = set(map(id, model.stem.parameters()))  # transformers models use other names too
        named = [(name, parameter) for name, parameter in named if id(parameter) not in stem]
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def make_groups(model: nn.Module, program: Program) -> Any:
    """Return the arguments of the optimizer's constructor."""
    named = trained(model, program)
    if program.groups == "named":
        return named
    if program.groups == "one" or len(named) < 3 or not any(name.startswith("stem") for name, _ in named):
        return [parameter for _, parameter in named]
    lr = OPTIMIZERS[program.optimizer][1]["lr"]
    if program.groups == "stem and rest":
        stem = [parameter for name, parameter in named if name.startswith("stem")]
        rest = [parameter for name, parameter in named if not name.startswith("stem")]
        return [{"params": part, "lr": rate} for part, rate in ((stem, lr / 3), (rest, lr)) if part]
    if program.groups == "no decay of vectors":
        vectors = [parameter for _, parameter in named if parameter.ndim < 2]
        matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
        return [{"params": part, "weight_decay": d} for part, d in ((matrices, 0.1), (vectors, 0.0)) if part]
    return [{"params": [parameter], "lr": lr * 0.8**index} for index, (_, parameter) in enumerate(named)]


def make_optimizer(model: Any, program: Program) -> torch.optim.Optimizer:
    """Create the program's optimizer from torch."""
    name, arguments = OPTIMIZERS[program.optimizer]
    decay = {"weight_decay": program.weight_decay}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(make_groups(model, program), **arguments, **decay)
    if program.added == "before":
        optimizer.add_param_group({"params": list(model.stem.parameters()), "lr": 0.01})
    return optimizer


SCHEDULES: dict[str, Any] = {
    "lambda": lambda o, total: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + 0.3 * n)),
    "cosine": lambda o, total: lr_scheduler.CosineAnnealingLR(o, total),
    "one cycle": lambda o, total: lr_scheduler.OneCycleLR(o, 0.05, total + 1, cycle_momentum=False),
    "warm restarts": lambda o, total: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o, total: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "each epoch": lambda o, total: lr_scheduler.StepLR(o, 1, 0.5),
    "plateau": lambda o, total: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "chained": lambda o, total: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.MultiStepLR(o, [1, 4], 0.7)]
    ),
}
EACH_EPOCH = ("each epoch", "plateau")


def rate_by_hand(optimizer: Any, program: Program, step: int) -> None:
    """Write the learning rate into the groups, like old tutorials."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = OPTIMIZERS[program.optimizer][1]["lr"] * 0.9 ** (step + index)


# ---- parts of loops --------------------------------------------------------------------------------------------------


def freeze(model: Any, program: Program) -> None:
    """Freeze the parameters that do not train from the start."""
    if program.frozen != "nothing":
        model.stem.requires_grad_(False)


def add_hooks(model: Any, program: Program) -> None:
    """Add the script's hooks."""
    if program.hooks == "gradients":
        model.stem.weight.register_hook(lambda grad: grad * 0.5)
    elif program.hooks == "modules":
        model.stem.register_forward_hook(lambda module, inputs, output: output * 0.5)
        model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))


def seed_of(epoch: int, index: int, rank: int) -> int:
    """Return a seed, so each process drops other values in each forward."""
    return 10_000 * (epoch + 1) + 10 * index + rank


def other_inputs(x: Tensor) -> Tensor:
    """Return the inputs of a second forward."""
    return x.flip(1)


def permuted(count: int) -> list[int]:
    """Return the order of the batch sampler."""
    return [(7 * index + 3) % count for index in range(count)]


def turn(model: Any) -> None:
    """Freeze the stem, or unfreeze it."""
    frozen = not next(iter(model.stem.parameters())).requires_grad
    model.stem.requires_grad_(frozen)


def give_state(model: nn.Module, optimizer: torch.optim.Optimizer, program: Program) -> None:
    """Take two optimizer steps before the training itself."""
    if program.given_state == "no":
        return
    for number in range(2):
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(100 * number + index)
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def each_sample(out: Any, y: Tensor) -> Tensor:
    """Return a number for each sample, like a metric."""
    if not isinstance(out, Tensor):
        out = out["first"] if isinstance(out, dict) else out.first
    return (out.float() - y).square().mean(-1)


# ---- several models --------------------------------------------------------------------------------------------------

PHASES = {"chain": 1, "adversaries": 2, "teacher": 1, "teacher of its own": 1, "mean teacher": 1}  # losses of a batch


def make_several(program: Program, *, other: int = 0) -> list[nn.Module]:
    """Create two models; a teacher does not train."""
    torch.manual_seed(program.seed + other)
    width = program.width
    if program.models == "chain":
        return [
            nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh()),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, OUT)),
        ]
    if program.models == "adversaries":
        critic = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))
        return [nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, FEATURES)), critic]
    teacher = Body(_inner(width), width).requires_grad_(False)
    return [Body(_inner(width), width), teacher]


def trains(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def loss_of_several(
    program: Program, forwards: list[Any], models: list[Any], x: Tensor, y: Tensor, number: int
) -> Tensor:
    """Return the loss of a batch, or the `number`-th loss."""
    first, second = forwards
    if program.models == "chain":
        return compare(program, second(first(x)), y)
    if program.models == "adversaries":
        if number == 0:
            with torch.no_grad():
                made = first(x.flip(0))
            return functional.softplus(-second(x).float()).mean() + functional.softplus(second(made).float()).mean()
        if program.accumulation > 1 or program.seed % 2:  # otherwise its gradients are dropped before its next loss
            models[1].requires_grad_(False)
        return functional.softplus(-second(first(x.flip(0))).float()).mean()
    out = first(x)
    with torch.no_grad():
        wanted = second(x).float()
    return compare(program, out, y) + 0.5 * (out.float() - wanted).square().mean()
