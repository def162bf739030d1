"""Random programs as users of the package write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import material
import torch
from grammar import GLOBAL_BATCH, Program
from material import Samples, Stream, compare, open_batch, seed_of
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from zero_plugin import Accelerator
from zero_plugin.utils import DataLoaderConfiguration

STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3p": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "2off": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3off": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def make_accelerator(program: Program, path: str, folder: Path) -> Accelerator:
    """Create an Accelerator from a dict, a file, or arguments in code."""
    section: dict[str, Any] = {"zero_optimization": STAGES[path]} if path in STAGES else {}
    if program.clip == "config":
        section["gradient_clipping"] = 0.1
    kind = "DEEPSPEED" if path in STAGES else "NO" if path == "one" else "MULTI_CPU"
    config: dict[str, Any] = {"distributed_type": kind, "use_cpu": True, "scheduler_counts": "steps"}
    arguments: dict[str, Any] = {}
    in_code = program.config == "arguments"
    (arguments if in_code else config)["mixed_precision"] = program.precision
    if program.true_sizes:
        (arguments if in_code else section)["gradient_accumulation_steps"] = program.accumulation
    config["deepspeed_config"] = section
    loading = {"dispatch_batches": True if program.data == "dispatched" else None}
    arguments["dataloader_config"] = DataLoaderConfiguration(
        split_batches=program.data == "split", even_batches=program.length != "uneven, dropped", **loading
    )
    if program.compiled == "configured":
        arguments["dynamo_backend"] = "eager"
    if program.config == "file":
        file = folder / f"config-{program.seed}-{path}-{torch.distributed.get_rank() if _in_group() else 0}.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        return Accelerator(config=file, **arguments)
    return Accelerator(config=config, **arguments)


def _in_group() -> bool:
    return torch.distributed.is_initialized()


class Permuted:
    """A batch sampler of the script's own."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.batch_size, self.drop_last = count, size, False

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = material.permuted(self.count)
        return (order[start : start + self.batch_size] for start in range(0, self.count, self.batch_size))


def make_loader(program: Program, samples: Samples, world: int) -> DataLoader[Any]:
    """Build the script's loader."""
    size = GLOBAL_BATCH if program.data == "split" else GLOBAL_BATCH // world
    if program.data == "batch sampler":
        sampler: Any = Permuted(len(samples), size)
        return DataLoader(samples, batch_sampler=sampler)
    generator = torch.Generator().manual_seed(3)
    if program.data == "weighted":
        weights = torch.linspace(0.1, 1, len(samples)).tolist()
        return DataLoader(samples, size, sampler=WeightedRandomSampler(weights, len(samples), generator=generator))
    if program.data == "shuffled":
        return DataLoader(samples, size, shuffle=True, generator=generator)
    if program.data == "stream":
        return DataLoader(Stream(samples), size)
    workers = int(program.data == "worker")
    return DataLoader(samples, size, drop_last=program.data == "drop_last", num_workers=workers)


class Run:
    """One script on a path."""

    def __init__(self, program: Program, path: str, folder: Path) -> None:
        self.program, self.path, self.folder = program, path, folder
        self.accelerator = make_accelerator(program, path, folder)
        self.samples = Samples(program, program.count)
        self.losses: list[Any] = []
        self.norms: list[float] = []
        self.rates: list[list[float]] = []
        self.metrics: list[float] = []
        self.steps = 0

    # ---- before the loop ---------------------------------------------------------------------------------------------

    def make(self, other: int = 0) -> None:
        """Create and prepare the script's objects."""
        program = self.program
        with self.accelerator.init_model() if program.built == "init_model" else nullcontext():
            model: Any = material.make_model(program, other=other)
        material.freeze(model, program)
        material.add_hooks(model, program)
        self.raw = None
        if program.data != "tensors":
            self.raw = make_loader(program, self.samples, self.accelerator.num_processes)
        if program.compiled == "part" and hasattr(model, "body"):
            model.body.compile(backend="eager")
        elif program.compiled == "model":
            model.compile(backend="eager")
        elif program.compiled == "wrapper":
            model = torch.compile(model, backend="aot_eager")
        self.prepare(model, program)

    def prepare(self, model: Any, program: Program) -> None:
        """Create optimizer and scheduler, and prepare all objects in some order."""
        self.loader: Any = self.raw
        optimizer = material.make_optimizer(model, program)
        material.give_state(model, optimizer, program)
        make = material.SCHEDULES.get(program.schedule)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if make:
            objects["schedule"] = make(optimizer, program.total)
        if self.loader is not None and program.prepared != "loader apart":
            objects["loader"] = self.loader
        elif self.loader is not None:
            self.loader = self.accelerator.prepare(self.loader)
        names = list(reversed(objects)) if program.prepared == "reversed" else list(objects)
        prepared = self.accelerator.prepare(*(objects[name] for name in names))
        self.schedule = None
        for name, value in zip(names, prepared, strict=True):
            setattr(self, name, value)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def losses_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Yield the losses for backward, one after the other."""
        program = self.program
        out = self.model(x)
        first = compare(program, out, y)
        if program.backwards == "one":
            return [first]
        if program.backwards == "one graph":
            return [first, 0.3 * compare(program, out, -y).abs()]
        second = 0.3 * compare(program, self.model(material.other_inputs(x)), -y)
        return [first + second] if program.backwards == "summed" else [first, second]

    def backward(self, batch: Any, epoch: int, index: int) -> None:
        """Run the micro-batch's backward and record its loss."""
        program, accelerator = self.program, self.accelerator
        torch.manual_seed(seed_of(epoch, index, accelerator.process_index))
        losses = self.losses_of(*open_batch(batch))
        scale = 1.0 if program.true_sizes else 1 / program.accumulation
        if program.dropped == "not finite" and index == 2:
            scale = float("nan")
        for number, loss in enumerate(losses, start=1):
            retains = {"retain_graph": True} if number < len(losses) and program.backwards == "one graph" else {}
            accelerator.backward(loss * scale, **retains)
        self.losses.append(sum(losses).detach())

    def batches(self, epoch: int, skip: int = 0) -> Iterator[tuple[int, Any, bool]]:
        """Yield batches, each with its number, and whether it is the last."""
        if self.loader is None:
            world, rank = self.accelerator.num_processes, self.accelerator.process_index
            for start in range(0, self.program.count, GLOBAL_BATCH):
                rows = slice(start, start + GLOBAL_BATCH)
                x, y = (tensor[rows].chunk(world)[rank] for tensor in (self.samples.inputs, self.samples.targets))
                yield start // GLOBAL_BATCH, self.samples.form(x, y), start + GLOBAL_BATCH >= self.program.count
            return
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        length = len(self.loader) if hasattr(loader, "__len__") and self.program.data != "stream" else 6
        for index, batch in enumerate(loader, start=skip):
            yield index, batch, index + 1 == length

    def epoch(self, number: int, *, skip: int = 0, stop: int = 1000) -> None:
        """Run one pass over the loader."""
        program = self.program
        for index, batch, is_last in self.batches(number, skip):
            if program.dropped == "skipped batch" and index == 2:
                continue
            ends = (index + 1) % program.accumulation == 0 or is_last
            self.micro_batch(batch, number, index, ends=ends)
            if program.writes == "restored" and self.steps in (1, 3) and ends:
                self.restore()
            if index + 1 == min(program.broken_at, stop):
                break
        if stop == 1000:
            if self.schedule is not None and program.schedule in material.EACH_EPOCH:
                self.schedule.step(*[float(number)] * (program.schedule == "plateau"))
            self.evaluate()

    def micro_batch(self, batch: Any, epoch: int, index: int, *, ends: bool) -> None:
        """Run a micro-batch in the style of the script."""
        program, accelerator = self.program, self.accelerator
        if program.style == "accumulate":
            with accelerator.accumulate(self.model):
                self.update(batch, epoch, index, ends=True)
        elif program.style == "flag":
            accelerator.sync_gradients = ends
            self.update(batch, epoch, index, ends=True)
        elif program.style == "no_sync" and not ends:
            with accelerator.no_sync(self.model):
                self.backward(batch, epoch, index)
        else:
            self.update(batch, epoch, index, ends=ends or program.style == "every")

    def update(self, batch: Any, epoch: int, index: int, *, ends: bool) -> None:
        """Run backward, and a step where the script has one."""
        program, accelerator, optimizer = self.program, self.accelerator, self.optimizer
        if program.zero_grad == "first":
            optimizer.zero_grad()
        self.backward(batch, epoch, index)
        if not ends:
            return
        if program.dropped == "zero_grad" and index == 2:
            optimizer.zero_grad()
            return
        is_step = accelerator.sync_gradients if program.true_sizes else True
        if program.clip in ("norm", "measured") and is_step:
            limit = 0.1 if program.clip == "norm" else float("inf")
            norm = float(accelerator.clip_grad_norm_(self.model.parameters(), limit))
            if math.isfinite(norm):
                self.norms.append(norm)
        if program.schedule == "by hand" and is_step:
            material.rate_by_hand(optimizer, program, self.steps)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        if is_step and not accelerator.optimizer_step_was_skipped:
            self.rates.append(rates)
            self.steps += 1
        if self.schedule is not None and program.schedule not in material.EACH_EPOCH:
            self.schedule.step()
        if program.zero_grad == "model" and is_step:
            self.model.zero_grad()
        elif program.zero_grad != "first":
            optimizer.zero_grad(**({"set_to_none": False} if program.zero_grad == "kept" else {}))
        if is_step:
            self.write()

    def write(self) -> None:
        """Change weights between steps, if the script does."""
        writes = self.program.writes
        if writes in ("average", "clamp"):
            with self.accelerator.whole_weights(self.model), torch.no_grad():
                if writes == "average":
                    for slow, parameter in zip(self.average, self.model.parameters(), strict=True):
                        slow.lerp_(parameter, 0.3)
                else:
                    for parameter in self.model.parameters():
                        parameter.clamp_(-0.3, 0.3)

    def restore(self) -> None:
        """Restore the best weights."""
        with self.accelerator.whole_weights(self.model):
            model = self.accelerator.unwrap_model(self.model)
            if self.steps == 1:
                self.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            else:
                model.load_state_dict(self.kept)

    def evaluate(self) -> None:
        """Record a number for each sample, once."""
        if self.program.evaluation == "no":
            return
        accelerator, program = self.accelerator, self.program
        loader: Any = DataLoader(self.samples, GLOBAL_BATCH // accelerator.num_processes)
        if program.evaluation == "metrics":
            loader = accelerator.prepare(loader)
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch in loader:
                x, y = open_batch(batch)
                out = self.model(x)
                if program.evaluation == "metrics":
                    total += float(accelerator.gather_for_metrics(material.each_sample(out, y)).sum())
                else:
                    total += float(compare(program, out, y)) * len(y)
        self.metrics.append(total / program.count)
        self.model.train()

    def refit(self) -> None:
        """Create a new optimizer in the second epoch, or add a group."""
        program, accelerator = self.program, self.accelerator
        if program.added == "after":
            stem = accelerator.unwrap_model(self.model).stem
            self.optimizer.add_param_group({"params": list(stem.parameters()), "lr": 0.01})
        if program.refit == "no":
            return
        model = accelerator.unwrap_model(self.model)
        self.model, self.optimizer, self.schedule = *accelerator.free_memory(self.model, self.optimizer), None
        if program.refit == "turned":
            material.turn(model)
        self.prepare(model, program.with_optimizer("SGD" if program.refit == "other optimizer" else None))

    # ---- after it ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return the complete model's weights on the main process."""
        accelerator, model = self.accelerator, self.model
        names = [name.replace("_orig_mod.", "") for name, _ in accelerator.unwrap_model(model).named_parameters()]
        if self.program.writes == "average":
            return dict(zip(names, self.average, strict=True))
        if self.program.read == "whole_weights":
            with accelerator.whole_weights(model):
                parameters = accelerator.unwrap_model(model).parameters()
                return {n: p.detach().float().clone() for n, p in zip(names, parameters, strict=True)}
        if self.program.read == "save_model":
            return self.saved(names)
        found = accelerator.get_state_dict(model) or {}
        return {
            n.replace("_orig_mod.", ""): p.float() for n, p in found.items() if n.replace("_orig_mod.", "") in names
        }

    def saved(self, names: list[str]) -> dict[str, Tensor]:
        """Return the weights that `save_model` writes."""
        from safetensors.torch import load_file

        folder = self.folder / f"model-{self.program.seed}-{self.path}"
        self.accelerator.save_model(self.model, folder)
        self.accelerator.wait_for_everyone()
        found = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        return {
            n.replace("_orig_mod.", ""): t.float() for n, t in found.items() if n.replace("_orig_mod.", "") in names
        }

    def noted(self) -> dict[str, Any]:
        """Return the values to compare. Losses are the mean over the processes."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        losses = self.accelerator.reduce(losses, "mean").tolist()
        found = {"losses": losses, "norms": self.norms, "rates": self.rates, "metrics": self.metrics}
        return {**found, "weights": self.weights()}


class Several(Run):
    """Two models, each with its optimizer, or one with a teacher."""

    def make(self, other: int = 0) -> None:
        """Create and prepare the script's objects."""
        program, accelerator = self.program, self.accelerator
        of_its_own = program.models == "teacher of its own"  # which no checkpoint holds
        models: list[Any] = material.make_several(program, other=0 if of_its_own else other)
        optimizers = [material.make_optimizer(model, program) for model in models if material.trains(model)]
        make = material.SCHEDULES.get(program.schedule)
        schedules = [make(optimizer, program.total) for optimizer in optimizers if make]
        self.loader = make_loader(program, self.samples, accelerator.num_processes)
        left = models.pop() if program.models == "teacher of its own" else None
        if program.prepared == "together":
            found = list(accelerator.prepare(*models, *optimizers, *schedules, self.loader))
        else:
            self.loader = accelerator.prepare(self.loader)
            found = []
            for number, model in enumerate(models):
                of_it = [some[number] for some in (optimizers, schedules) if number < len(some)]
                if of_it:
                    model, *of_it = accelerator.prepare(model, *of_it)
                else:
                    model = accelerator.prepare(model)
                models[number] = model
                for some, one in zip((optimizers, schedules), of_it, strict=False):
                    some[number] = one
            found = [*models, *optimizers, *schedules, self.loader]
        count = len(models)
        self.models = found[:count] + ([left] if left is not None else [])
        self.model = self.models[0]
        self.optimizers = found[count : count + len(optimizers)]
        self.schedules = found[count + len(optimizers) : count + len(optimizers) + len(schedules)]
        self.loader = found[-1]
        self.schedule = None
        self.noted_rates: list[list[list[float]]] = [[] for _ in optimizers]
        self.noted_norms: list[list[float]] = [[] for _ in optimizers]

    def micro_batch(self, batch: Any, epoch: int, index: int, *, ends: bool) -> None:
        """Run all losses of a batch in one window."""
        by_hand = self.program.accumulation == 1 and self.program.seed % 3 == 0
        trained = self.models[: len(self.optimizers)]
        with nullcontext() if by_hand else self.accelerator.accumulate(*trained):
            self.train_on(*open_batch(batch), is_step=by_hand or self.accelerator.sync_gradients)

    def train_on(self, x: Tensor, y: Tensor, *, is_step: bool) -> None:
        """Run losses, backwards and steps."""
        program, accelerator = self.program, self.accelerator
        found: Any = 0.0
        if program.models == "adversaries":
            for number in range(2):
                which = 1 - number
                if program.accumulation == 1:
                    self.optimizers[which].zero_grad()
                loss = material.loss_of_several(program, self.models, self.models, x, y, number)
                accelerator.backward(loss)
                found = found + loss.detach()
                self.finish(which, is_step=is_step)
                self.models[1].requires_grad_(True)
        else:
            loss = material.loss_of_several(program, self.models, self.models, x, y, 0)
            accelerator.backward(loss)
            found = loss.detach()
            for which in range(len(self.optimizers)):
                self.finish(which, is_step=is_step)
        self.losses.append(found)
        if is_step and program.models == "mean teacher":
            with accelerator.whole_weights(*self.models), torch.no_grad():
                for slow, fast in zip(self.models[1].parameters(), self.models[0].parameters(), strict=True):
                    slow.lerp_(fast, 0.3)

    def finish(self, which: int, *, is_step: bool) -> None:
        """Clip, step, schedule and clear."""
        program, optimizer = self.program, self.optimizers[which]
        if program.clip in ("norm", "measured") and is_step:
            limit = 0.1 if program.clip == "norm" else float("inf")
            parameters = self.models[which].parameters()
            self.noted_norms[which].append(float(self.accelerator.clip_grad_norm_(parameters, limit)))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        if is_step:
            self.noted_rates[which].append(rates)
        if self.schedules:
            self.schedules[which].step()
        optimizer.zero_grad()

    def noted(self) -> dict[str, Any]:
        """Return the values to compare."""
        self.norms = [norm for step in zip(*self.noted_norms, strict=True) for norm in step]
        self.rates = [rates for step in zip(*self.noted_rates, strict=True) for rates in step]
        return super().noted()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of both models."""
        found = [self.accelerator.get_state_dict(model) or {} for model in self.models]
        return {f"{n}.{name}": tensor.float() for n, one in enumerate(found) for name, tensor in one.items()}


def run(program: Program, path: str, part: str, folder: Path) -> tuple[Run, dict[str, Any]]:
    """Run a program on a path: `whole`, or the `first` or `second` part of a resumed one."""
    state = (Run if program.models == "one" else Several)(program, path, folder)
    state.make(other=7 if part == "second" else 0)
    if program.writes == "average":
        with state.accelerator.whole_weights(state.model):
            state.average = [p.detach().clone() for p in state.model.parameters()]
    checkpoint = folder / f"checkpoint-{program.seed}"
    first, skip = 0, 0
    stop = program.stop if part == "first" else (program.epochs, 0)
    if part == "second":
        report = state.accelerator.load_state(checkpoint)
        first, skip = program.stop
        if program.resume_at == "batch" and state.loader is not None:
            assert report.batches[0] == skip, (report.batches, skip)
        elif program.resume_at == "epoch":
            first, skip = 1, 0
    for number in range(first, program.epochs):
        if number == 1:
            state.refit()
        ends_here = part == "first" and number == stop[0]
        within = ends_here and program.resume_at == "batch"
        state.epoch(number, skip=skip if number == first else 0, stop=stop[1] if within else 1000)
        if ends_here:
            state.accelerator.save_state(checkpoint)
            break
    found = state.noted()
    return state, found
