"""Random programs by hand in plain torch: one process, on the global batch. No line of the package is used."""

from __future__ import annotations

import copy
from typing import Any

import material
import torch
from grammar import GLOBAL_BATCH, Program
from material import Samples, compare, seed_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

Micro = list[list[int]]  # each process's samples


def orders(program: Program) -> list[list[int]]:
    """Return the samples of each epoch in order."""
    count = program.count
    if program.data == "batch sampler":
        return [material.permuted(count)] * program.epochs
    if program.data not in ("shuffled", "weighted"):
        return [list(range(count))] * program.epochs
    generator = torch.Generator().manual_seed(3)
    options: dict[str, Any] = {"shuffle": True, "generator": generator}
    if program.data == "weighted":
        weights = torch.linspace(0.1, 1, count).tolist()
        options = {"sampler": WeightedRandomSampler(weights, count, generator=generator)}
    loader: Any = DataLoader(list(range(count)), batch_size=GLOBAL_BATCH, collate_fn=list, **options)
    return [_until_left(loader, program) for _ in range(program.epochs)]


def _until_left(loader: Any, program: Program) -> list[int]:
    """Yield an epoch's samples, and draw none after the loop is left, since torch's sampler draws at its end."""
    order: list[int] = []
    for number, batch in enumerate(loader, start=1):
        order += batch
        if number == program.broken_at:
            break
    return order + [0] * (program.count - len(order))


def micro_batches(program: Program, world: int, order: list[int]) -> list[Micro]:
    """Yield what all processes read, one micro-batch after the other."""
    drops, size = program.data == "drop_last", GLOBAL_BATCH // world
    if world > 1 and program.length == "uneven" and not drops:
        order = order + order[: -len(order) % GLOBAL_BATCH]
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if drops:
        batches = [batch for batch in batches if len(batch) == size]
    steps = [batches[start : start + world] for start in range(0, len(batches), world)]
    return [step for step in steps if len(step) == world]


class Run:
    """One model with its optimizer, and the records of its training.

    Args:
        program: the program.
        world: number of processes of the compared run.
        zero: whether that run uses ZeRO. Then a 16-bit model has fp32 masters, otherwise it runs under autocast.
    """

    def __init__(self, program: Program, world: int, *, zero: bool) -> None:
        self.program, self.world, self.zero = program, world, zero
        self.samples = Samples(program, program.count)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[list[float]] = []
        self.metrics: list[float] = []
        self.half = program.precision == "bf16"
        self.done = self.size = 0  # micro-batches of the open window, so far and in total

    def prepare(self, model: nn.Module) -> None:
        """Create the masters, which the optimizer holds, and the model that computes."""
        self.masters = self.model = model
        if self.half and self.zero:
            self.model = copy.deepcopy(model).to(torch.bfloat16)
            with torch.no_grad():
                for master, weight in self.pairs():
                    master.copy_(weight)

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Yield masters with the tensors that the forward uses."""
        return list(zip(self.masters.parameters(), self.model.parameters(), strict=True))

    def publish(self) -> None:
        """Copy the masters' values to the model."""
        if self.masters is not self.model:
            with torch.no_grad():
                for master, weight in self.pairs():
                    weight.copy_(master)

    def forward(self, x: Tensor) -> Any:
        """Run the forward in the run's precision."""
        if self.half and not self.zero:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x)
        return self.model(x.to(torch.bfloat16) if self.half and x.is_floating_point() else x)

    def of_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.samples.inputs[indices], self.samples.targets[indices]

    def parts(self, micro: Micro, epoch: int, index: int) -> list[tuple[Tensor, Tensor, int | None]]:
        """Return the global batch, or each process's part and seed if the parts matter."""
        sizes = {len(part) for part in micro}
        if self.program.model in material.OF_EACH_RANK or len(sizes) > 1:
            return [(*self.of_batch(part), seed_of(epoch, index, rank)) for rank, part in enumerate(micro)]
        return [(*self.of_batch([index for part in micro for index in part]), None)]

    def losses_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Yield the losses for backward, one after the other."""
        program = self.program
        out = self.forward(x)
        first = compare(program, out, y)
        if program.backwards == "one":
            return [first]
        if program.backwards == "one graph":
            return [first, 0.3 * compare(program, out, -y).abs()]
        second = 0.3 * compare(program, self.forward(material.other_inputs(x)), -y)
        return [first + second] if program.backwards == "summed" else [first, second]

    def backward(self, micro: Micro, epoch: int, index: int, divisor: int) -> float:
        """Add the gradients of the mean over the processes. Return the loss."""
        found = 0.0
        parts = self.parts(micro, epoch, index)
        for x, y, seed in parts:
            if seed is not None:
                torch.manual_seed(seed)
            losses = self.losses_of(x, y)
            for number, loss in enumerate(losses, start=1):
                (loss / (divisor * len(parts))).backward(retain_graph=number < len(losses))
                found += loss.item() / len(parts)
        self.collect()
        return found

    def collect(self) -> None:
        """Move gradients to the masters."""
        if self.masters is self.model:
            return
        for master, weight in self.pairs():
            if weight.grad is not None:
                grad = weight.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                weight.grad = None

    def build(self, optimizer_name: str | None = None) -> None:
        """Create the optimizer and its scheduler."""
        program = self.program.with_optimizer(optimizer_name)
        self.optimizer = material.make_optimizer(self.masters, program)
        if optimizer_name is None:
            material.give_state(self.masters, self.optimizer, program)
        make = material.SCHEDULES.get(program.schedule)
        self.schedule = make(self.optimizer, program.total) if make else None

    def step(self) -> None:
        """Clip, apply, schedule, clear. Skip a step with non-finite gradients."""
        program = self.program
        grads = [p.grad for p in self.masters.parameters() if p.grad is not None]
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        if finite and program.clip != "no":
            limit = {"norm": 0.1, "measured": float("inf"), "config": 0.1}[program.clip]
            norm = nn.utils.clip_grad_norm_(self.masters.parameters(), limit)
            if program.clip != "config":
                self.norms.append(float(norm))
        if finite:
            if program.schedule == "by hand":
                material.rate_by_hand(self.optimizer, program, len(self.rates))
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            if self.schedule is not None and program.schedule not in material.EACH_EPOCH:
                self.schedule.step()
        self.optimizer.zero_grad()
        for parameter in self.masters.parameters():
            parameter.grad = None
        self.publish()
        self.after_step()

    def after_step(self) -> None:
        """Change weights between steps, if the script does."""
        writes, number = self.program.writes, len(self.rates)
        with torch.no_grad():
            if writes == "average":
                for slow, master in zip(self.average, self.masters.parameters(), strict=True):
                    slow.lerp_(master, 0.3)
            elif writes == "clamp":
                for master in self.masters.parameters():
                    master.clamp_(-0.3, 0.3)
            elif writes == "restored" and number in (1, 3):
                if number == 1:
                    self.kept = [master.clone() for master in self.masters.parameters()]
                else:
                    for master, kept in zip(self.masters.parameters(), self.kept, strict=True):
                        master.copy_(kept)
        self.publish()

    def epoch(self, number: int, order: list[int]) -> None:
        """Run one pass over the samples."""
        program, n = self.program, self.program.accumulation
        micros = micro_batches(program, self.world, order)
        for index, micro in enumerate(micros):
            if index >= program.broken_at:
                break
            if program.dropped == "skipped batch" and index == 2:
                continue
            if self.done == self.size:
                self.done, self.size = 0, min(n, len(micros) - index) if program.true_sizes else n
            loss = self.backward(micro, number, index, self.size)
            self.done += 1
            self.losses.append(loss)
            if program.dropped == "not finite" and index == 2:
                for p in self.masters.parameters():
                    p.grad = None if p.grad is None else p.grad * float("nan")
            if program.dropped == "zero_grad" and index == 2:
                for p in self.masters.parameters():
                    p.grad = None
            elif self.done == self.size or index + 1 == len(micros):
                self.done = self.size
                self.step()
        if self.schedule is not None and program.schedule in material.EACH_EPOCH:
            self.schedule.step(*[float(number)] * (program.schedule == "plateau"))
        self.evaluate(micros)

    def loss(self, out: Any, y: Tensor) -> Tensor:
        return compare(self.program, out, y)

    @property
    def evaluated(self) -> int:
        """Return the samples of an evaluation by a prepared loader.

        With `even_batches=False` all processes stop at the shortest one. So the last step is left out if its samples
        fill no more than the batch of the first process.
        """
        size, splits = GLOBAL_BATCH // self.world, self.program.data == "split"
        left = self.program.count % (size if splits else size * self.world)
        stops = self.world > 1 and self.program.length == "uneven, dropped"
        is_short = left <= (size // self.world if splits else size)
        return self.program.count - left if stops and is_short else self.program.count

    def evaluate(self, micros: list[Micro]) -> None:
        """Record a number for each sample, in order."""
        if self.program.evaluation == "no":
            return
        self.model.eval()
        with torch.no_grad():
            per_sample = self.program.evaluation == "metrics"
            x, y = self.of_batch(list(range(self.evaluated if per_sample else self.program.count)))
            out = self.forward(x)
            if per_sample:
                self.metrics.append(float(material.each_sample(out, y).sum()) / self.program.count)
            else:
                self.metrics.append(float(self.loss(out, y)))
        self.model.train()


def run(program: Program, world: int, *, zero: bool) -> dict[str, Any]:
    """Return a program's records and final weights."""
    if program.models != "one":
        return run_several(program, world, zero=zero)
    model = material.make_model(program)
    material.freeze(model, program)
    state = Run(program, world, zero=zero)
    state.prepare(model)
    material.add_hooks(state.model, program)
    state.build()
    state.publish()
    if program.writes == "average":
        state.average = [p.detach().clone() for p in state.masters.parameters()]
    begun = [p.detach().clone() for p in state.masters.parameters()]
    for number, order in enumerate(orders(program)):
        if number == 1:
            refit(state)
        state.epoch(number, order)
    weights = {name: p.detach().clone() for name, p in state.masters.named_parameters()}
    moved = {name: p - old for (name, p), old in zip(weights.items(), begun, strict=True)}
    if program.writes == "average":
        weights = dict(zip(weights, state.average, strict=True))
    noted = {"losses": state.losses, "norms": state.norms, "rates": state.rates, "metrics": state.metrics}
    return {**noted, "weights": weights, "moved": moved}


def refit(state: Run) -> None:
    """Create a new optimizer in the second epoch, or add a group."""
    program = state.program
    if program.added == "after":
        state.optimizer.add_param_group({"params": list(state.masters.stem.parameters()), "lr": 0.01})
    if program.refit == "no":
        return
    state.done = state.size = 0  # free_memory() drops the gradients of an open window
    for parameter in state.masters.parameters():
        parameter.grad = None
    if program.refit == "turned":
        for model in {state.masters, state.model}:
            material.turn(model)
    state.build("SGD" if program.refit == "other optimizer" else None)


# ---- several models --------------------------------------------------------------------------------------------------


def run_several(program: Program, world: int, *, zero: bool) -> dict[str, Any]:
    """Run a program of two models."""
    models = material.make_several(program)
    runs = [Run(program, world, zero=zero) for _ in models]
    for state, model in zip(runs, models, strict=True):
        state.half = state.half and not (program.models == "teacher of its own" and state is runs[1])
        state.prepare(model)
    trained = [state for state, model in zip(runs, models, strict=True) if material.trains(model)]
    for state in trained:
        state.build()
        state.publish()
    losses: list[float] = []
    begun = [p.detach().clone() for state in runs for p in state.masters.parameters()]
    for order in orders(program):
        micros = micro_batches(program, world, order)
        for index, micro in enumerate(micros):
            size = min(program.accumulation, len(micros) - (index - index % program.accumulation))
            ends = (index + 1) % program.accumulation == 0 or index + 1 == len(micros)
            found = 0.0
            parts = runs[0].parts(micro, 0, index)
            for number in range(material.PHASES[program.models]):
                for x, y, _ in parts:
                    loss = phase_of_loss(program, runs, x, y, number)
                    loss = loss / len(parts)
                    found += loss.item()
                    (loss / size).backward()
                    for state in trained:
                        state.collect()
                if program.models == "adversaries":
                    finish(trained[1 - number], ends=ends)
                    runs[1].model.requires_grad_(True)
                    runs[1].masters.requires_grad_(True)
                    for p in runs[1].masters.parameters():
                        if number == 1 and program.accumulation == 1:
                            p.grad = None
            losses.append(found)
            if program.models != "adversaries":
                for state in trained:
                    finish(state, ends=ends)
            if ends and program.models == "mean teacher":
                with torch.no_grad():
                    for slow, fast in zip(runs[1].masters.parameters(), runs[0].masters.parameters(), strict=True):
                        slow.lerp_(fast, 0.3)
                runs[1].publish()
    names = [f"{n}.{name}" for n, state in enumerate(runs) for name, _ in state.masters.named_parameters()]
    weights = [p.detach().clone() for state in runs for p in state.masters.parameters()]
    return {
        "losses": losses,
        "norms": [norm for step in zip(*(state.norms for state in trained), strict=True) for norm in step],
        "rates": [rates for step in zip(*(state.rates for state in trained), strict=True) for rates in step],
        "metrics": [],
        "weights": dict(zip(names, weights, strict=True)),
        "moved": {name: new - old for name, new, old in zip(names, weights, begun, strict=True)},
    }


def phase_of_loss(program: Program, runs: list[Run], x: Tensor, y: Tensor, number: int) -> Tensor:
    """Return a loss's phase for the kind of program."""
    forwards: list[Any] = [state.forward for state in runs]
    if program.models == "teacher of its own":  # it is not prepared
        forwards[1] = runs[1].masters
    return material.loss_of_several(program, forwards, [r.model for r in runs], x, y, number)


def finish(state: Run, *, ends: bool) -> None:
    """Take a step at the window's end."""
    if ends:
        state.step()
