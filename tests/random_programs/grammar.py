"""The grammar of random programs: its dimensions, and the program of a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

GLOBAL_BATCH: Final = 8
WORLD: Final = {"one": 1}  # for one path; 2 for all others
PATHS: Final = ("one", "ddp", "0", "1", "2", "3", "3p", "2off", "3off")


@dataclass(frozen=True)
class Program:
    """One training script. Every attribute is a dimension of the grammar; `CHOICES` has its values.

    Attributes:
        seed: seed of weights and samples.
    """

    seed: int
    model: str = "mlp"
    width: int = 16
    optimizer: str = "momentum"
    weight_decay: float = 0.0
    groups: str = "one"
    schedule: str = "none"
    accumulation: int = 1
    style: str = "accumulate"
    zero_grad: str = "after"
    clip: str = "no"
    loss: str = "squared"
    backwards: str = "one"
    models: str = "one"
    frozen: str = "nothing"
    refit: str = "no"
    added: str = "no"
    resume: str = "no"
    resume_at: str = "epoch"
    data: str = "in order"
    length: str = "exact"
    batch: str = "tuple"
    precision: str = "no"
    compiled: str = "no"
    evaluation: str = "no"
    writes: str = "no"
    epochs: int = 2
    left: str = "no"
    dropped: str = "no"
    hooks: str = "no"
    built: str = "plain"
    prepared: str = "together"
    config: str = "dict"
    given_state: str = "no"
    read: str = "get_state_dict"
    ending: str = "end_training"

    @property
    def count(self) -> int:
        """The number of samples in an epoch."""
        return 6 * GLOBAL_BATCH + (0 if self.length == "exact" else 3 + 2 * (self.seed % 2))

    @property
    def total(self) -> int:
        """The approximate number of the loop's steps, for a scheduler."""
        return self.epochs * -(-7 // self.accumulation) + 1

    @property
    def true_sizes(self) -> bool:
        """Whether the package counts the windows and divides a shorter last one by its true size."""
        return self.style in ("accumulate", "every", "flag")

    @property
    def stop(self) -> tuple[int, int]:
        """The place where the run stops to be resumed: epoch and micro-batches, which end a window."""
        return 0, 6 if self.resume_at == "epoch" else self.accumulation * (1 if self.accumulation > 2 else 2)

    @property
    def broken_at(self) -> int:
        """The number of micro-batches in an epoch that the loop leaves early."""
        at = self.accumulation * (1 if self.accumulation > 2 else 2)
        return {"no": 1000, "at a step": at, "in a window": at + 1}[self.left]

    def with_optimizer(self, name: str | None) -> Program:
        """Return the same program with another optimizer, and with groups that any optimizer takes."""
        return self if name is None else replace(self, optimizer=name, groups="one")

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


# Dimension -> values with their weights: the first value is the plain one.
CHOICES: Final[dict[str, dict[Any, float]]] = {
    "model": {
        "mlp": 3,
        "layer norm": 2,
        "checkpointed": 1,
        "checkpointed, reentrant": 1,
        "body thrice": 1,
        "scalar and list": 2,
        "heads in a dict": 1,
        "heads in a record": 1,
        "convolutions": 1,
        "LSTM": 1,
        "weight norm": 1,
        "spectral norm": 1,
        "low rank": 1,
        "batch norm": 1,
        "dropout": 1,
        "dropout, checkpointed": 1,
        "embedding": 1,
        "tied": 1,
        "borrowed weight": 1,
        "attention": 1,
        "packed GRU": 1,
        "GPT-2": 1,
        "Llama": 1,
    },
    "width": {16: 1, 7: 1, 33: 1},
    "optimizer": {
        "momentum": 3,
        "SGD": 2,
        "Nesterov": 1,
        "Adam": 2,
        "AdamW": 4,
        "AMSGrad": 1,
        "RMSprop": 1,
        "Adagrad": 1,
        "NAdam": 1,
        "RAdam": 1,
        "Adamax": 1,
        "Adadelta": 1,
        "ASGD": 1,
        "Adafactor": 0.3,
    },
    "weight_decay": {0.0: 2, 0.05: 1},
    "groups": {"one": 3, "stem and rest": 2, "no decay of vectors": 2, "each its own": 1, "named": 1},
    "schedule": {
        "none": 3,
        "lambda": 2,
        "cosine": 1,
        "one cycle": 1,
        "warm restarts": 1,
        "sequential": 1,
        "each epoch": 1,
        "plateau": 1,
        "chained": 1,
        "by hand": 1,
    },
    "accumulation": {1: 4, 2: 2, 3: 2, 4: 1},
    "style": {"accumulate": 4, "every": 2, "window": 2, "no_sync": 1, "flag": 2},
    "zero_grad": {"after": 4, "first": 2, "kept": 1, "model": 1},
    "clip": {"no": 4, "norm": 3, "measured": 1, "config": 2},
    "loss": {"squared": 3, "cross-entropy": 1, "smooth": 1},
    "backwards": {"one": 6, "summed": 1, "two forwards": 1, "one graph": 1},
    "models": {"one": 12, "chain": 1, "adversaries": 1, "teacher": 1, "teacher of its own": 1, "mean teacher": 1},
    "frozen": {"nothing": 6, "left out": 1, "in the optimizer": 1},
    "refit": {"no": 8, "same": 1, "turned": 1, "other optimizer": 1},
    "added": {"no": 12, "before": 1, "after": 1},
    "resume": {"no": 4, "same": 1, "other": 2},
    "resume_at": {"epoch": 1, "batch": 1},
    "data": {
        "in order": 3,
        "shuffled": 2,
        "stream": 1,
        "weighted": 1,
        "batch sampler": 1,
        "worker": 0.5,
        "dispatched": 1,
        "split": 1,
        "drop_last": 1,
        "tensors": 1,
    },
    "length": {"exact": 2, "uneven": 1, "uneven, dropped": 1},
    "batch": {"tuple": 2, "dict": 1, "nested": 1},
    "precision": {"no": 3, "bf16": 1},
    "compiled": {"no": 12, "part": 1, "model": 1, "wrapper": 1, "configured": 1},
    "evaluation": {"no": 3, "loss": 1, "metrics": 1},
    "writes": {"no": 6, "average": 1, "clamp": 1, "restored": 1},
    "epochs": {2: 3, 1: 1, 3: 1},
    "left": {"no": 6, "at a step": 1, "in a window": 2},
    "dropped": {"no": 4, "zero_grad": 1, "not finite": 1, "skipped batch": 1},
    "hooks": {"no": 6, "gradients": 1, "modules": 1},
    "built": {"plain": 3, "init_model": 1},
    "prepared": {"together": 2, "reversed": 1, "loader apart": 1},
    "config": {"dict": 1, "file": 1, "arguments": 1},
    "given_state": {"no": 3, "yes": 1},
    "read": {"get_state_dict": 2, "save_model": 1, "whole_weights": 1},
    "ending": {"end_training": 1, "nothing": 2, "exit": 1, "deleted": 1},
}
DIMENSIONS: Final = tuple(field.name for field in fields(Program) if field.name != "seed")
assert set(DIMENSIONS) == set(CHOICES)


def draw(seed: int) -> Program:
    """Draw the program of a seed: about half of the dimensions are plain, and incompatible values are removed."""
    chance = random.Random(seed)
    values: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        drawn = chance.choices(list(choices), list(choices.values()))[0]
        values[name] = drawn
    return settle(Program(seed, **values))


def settle(program: Program) -> Program:
    """Return the program without values that plain torch lacks or treats differently. Each rule says why."""
    changes: dict[str, Any] = {}

    def plain(*names: str) -> None:
        for name in names:
            changes[name] = next(iter(CHOICES[name]))

    p = program
    if p.models != "one":  # loops of their own, which have only some of the dimensions
        keep = {
            "seed",
            "models",
            "width",
            "optimizer",
            "weight_decay",
            "accumulation",
            "clip",
            "data",
            "length",
            "batch",
        }
        keep |= {"precision", "epochs", "prepared", "config", "ending", "read", "groups", "schedule", "resume"}
        plain(*(name for name in DIMENSIONS if name not in keep))
        p = replace(p, **changes)
        if p.data in ("tensors", "stream", "weighted"):
            plain("data")
        if p.schedule in ("plateau", "by hand", "each epoch"):
            plain("schedule")
    p = replace(p, **changes)
    for rule in _RULES:
        changed = rule(p)
        p = replace(p, **{n: next(iter(CHOICES[n])) for n in changed if isinstance(n, str)})
    return p


def _loops(p: Program) -> list[str]:
    """Settle the dimensions of loops."""
    undone: list[str] = []
    if p.accumulation == 1 and p.style in ("no_sync", "flag"):
        undone.append("style")
    if p.style not in ("accumulate", "window") and p.backwards in ("two forwards", "one graph") and p.accumulation > 1:
        undone.append("backwards")  # an error that says so: the package cannot tell this from two micro-batches
    if p.zero_grad == "first" and (p.accumulation > 1 or p.models != "one"):
        undone.append("zero_grad")  # plain torch drops the window's gradients
    if p.zero_grad == "model" and p.style != "window" and p.accumulation > 1:
        undone.append("zero_grad")
    if p.dropped != "no" and (p.accumulation > 1 or p.backwards != "one"):
        undone.append("dropped")
    if p.left == "in a window" and (p.accumulation in (1, 4) or p.style != "accumulate"):
        undone.append("left")  # with windows of 4, the interrupted one would be the shorter last one
    if p.data == "tensors" and p.style in ("every", "flag"):
        undone.append("style")  # the end of an epoch is unknown
    return undone


def _data(p: Program) -> list[str]:
    """Settle the dimensions of loaders."""
    undone: list[str] = []
    if p.length != "exact" and p.data in ("stream", "weighted", "tensors", "batch sampler", "dispatched"):
        undone.append("length")
    if p.data == "tensors":
        undone += ["resume_at", "evaluation"]
        if p.left != "no":
            undone.append("left")
    if p.model == "batch norm" and p.evaluation != "no":
        undone.append("evaluation")  # running statistics differ between processes
    return undone


def _life(p: Program) -> list[str]:
    """Settle refits, resumes and written files."""
    undone: list[str] = []
    if p.resume != "no":
        others = ["refit", "added", "writes", "left", "dropped", "given_state"]
        used = [name for name in others if getattr(p, name) != "no"]
        if used and p.seed % 3:
            return ["resume"]
        undone += others
        if p.style in ("window", "no_sync"):
            undone.append("resume_at")  # the script's own count of a window
        if p.model in ("batch norm",):
            undone.append("evaluation")
    if p.refit != "no":
        undone += ["added", "given_state", "schedule", "writes"]
    if p.epochs == 1:
        undone += ["refit", "resume", "left"]
    if p.given_state == "yes" and p.optimizer in ("ASGD",):
        undone.append("given_state")
    if p.added != "no":
        undone += ["groups", "schedule", "frozen", "given_state", "clip"]
    if p.schedule == "by hand" and p.groups == "each its own":
        undone.append("groups")
    return undone


def _models(p: Program) -> list[str]:
    """Settle the dimensions of models."""
    undone: list[str] = []
    causal = p.model in ("GPT-2", "Llama")
    if causal and p.hooks == "modules":
        undone.append("hooks")
    if causal and p.evaluation == "metrics":
        undone.append("evaluation")  # it gives one number for all samples
    if p.frozen != "nothing" and p.hooks == "gradients":
        undone.append("hooks")
    if p.model == "checkpointed, reentrant" and p.frozen != "nothing":
        undone.append("frozen")  # torch itself: inputs without gradients
    if p.model in ("attention", "GPT-2", "Llama") and p.width != 16:
        undone.append("width")
    if p.compiled != "no" and p.model in ("packed GRU", "LSTM", "GPT-2", "Llama", "heads in a record"):
        undone.append("compiled")  # minutes of tracing
    if p.compiled != "no" and p.model in ("scalar and list", "borrowed weight", "attention"):
        undone.append("compiled")  # at stage 3 torch's compiler sees another module's weight as empty
    if p.compiled != "no" and p.model == "dropout, checkpointed":
        undone.append("compiled")  # compiled, torch itself recomputes the dropout with other random numbers
    if p.model == "weight norm" and p.built == "init_model":
        undone.append("built")  # at stage 3 torch's parametrization gets an empty weight
    if p.built == "init_model" and (p.groups == "no decay of vectors" or p.given_state == "yes"):
        undone.append("built")  # shapes at stage 3 belong to another test
    if p.precision == "bf16" and p.model in ("spectral norm", "low rank"):
        undone.append("precision")
    if p.given_state == "yes" and p.precision == "bf16":
        undone.append("given_state")
    return undone


_RULES: Final = (_loops, _data, _models, _life, _life, _loops)
