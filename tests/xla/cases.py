"""The cases on XLA devices: CASE FOLDER. Each case is a separate process, and fails by an exception."""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PJRT_DEVICE"] = "CPU"

import pytest
import torch
from loop import ACCUMULATION, SAMPLES, Run, by_hand, largest_difference, make_parts, part_of, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    DummyOptim,
    DummyScheduler,
    set_seed,
)
from zero_plugin.errors import LaunchError, LoopError, StrategyError

XLA = {"distributed_type": "TPU", "scheduler_counts": "steps"}


def refuse_differences(ours: Run, theirs: Run, *, bf16: bool = False) -> None:
    """Compare: fp32 within 1e-5 (weights 1e-4), bf16 within 1e-2, learning rates exactly."""
    found = {what: largest_difference(ours, theirs, what) for what in ("losses", "norms", "rates", "weights")}
    print(found, flush=True)
    assert found["losses"] < (1e-2 if bf16 else 1e-5), found
    assert found["norms"] < (5e-2 if bf16 else 1e-4), found
    assert found["weights"] < (5e-2 if bf16 else 1e-4), found
    assert found["rates"] == 0.0, found


def count_programs() -> int:
    """Return how many programs XLA has compiled in this process."""
    import torch_xla.debug.metrics as metrics

    compiled = metrics.metric_data("CompileTime")
    return compiled[0] if compiled else 0


def one_device(folder: Path) -> None:
    """Run the complete loop in fp32 without a new program after the first epoch."""
    accelerator = Accelerator(config=XLA, gradient_accumulation_steps=ACCUMULATION)
    assert accelerator.device.type == "xla"
    assert accelerator.distributed_type is DistributedType.XLA
    made: list[int] = []

    class Counting(DataLoader[Any]):
        def __iter__(self) -> Any:
            made.append(count_programs())
            return super().__iter__()

    model, optimizer, schedule, loader = make_parts()
    ours = train(accelerator, (model, optimizer, schedule, Counting(loader.dataset, batch_size=loader.batch_size)))
    made.append(count_programs())
    print("programs before each epoch, and in the end:", made, flush=True)
    assert made[0] < made[1] == made[2] == made[3], made
    assert model.inner.weight is model.again.weight
    (theirs,) = by_hand(1)
    refuse_differences(ours, theirs)
    accelerator.end_training()


def other_lengths(folder: Path) -> None:
    """Check that new lengths of windows and evaluations, and the first clipped norm, compile nothing."""
    accelerator = Accelerator(config=XLA, gradient_accumulation_steps=ACCUMULATION)
    model, optimizer, _, loader = accelerator.prepare(*make_parts())
    counts = []
    for steps, max_norm in ((ACCUMULATION, 1e3), (ACCUMULATION - 1, 1e-3)):  # either number leaves one batch over
        accelerator.gradient_accumulation_steps = steps
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        counts.append(count_programs())
    assert counts[0] == counts[1], counts

    counts = []
    model.eval()
    for batches in (2, 3):
        total = torch.zeros((), device=accelerator.device)
        with torch.no_grad():
            for inputs, _ in itertools.islice(loader, batches):
                total += model(inputs).sum()
        assert math.isfinite(total.item())
        counts.append(count_programs())
    assert counts[0] == counts[1], counts
    accelerator.end_training()


def one_device_in_bf16(folder: Path) -> None:
    """Run forwards under torch's autocast for XLA, with fp32 weights."""
    accelerator = Accelerator(config=XLA, gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16")
    parts = make_parts()
    types = set()
    parts[0].inner.register_forward_hook(lambda _module, _inputs, output: types.add(output.dtype))
    ours = train(accelerator, parts)
    assert types == {torch.bfloat16}
    assert {p.dtype for p in parts[0].parameters()} == {torch.float32}
    refuse_differences(ours, by_hand(1, bf16=True)[0], bf16=True)
    accelerator.end_training()


def placeholders(folder: Path) -> None:
    """Check that placeholders fill the configuration's open fields, and give torch's AdamW and a ramp."""
    arguments = {"lr": 2e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    steps, warmup = 3 * math.ceil(SAMPLES / 4 / ACCUMULATION), 3
    ramp = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    sections = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(arguments, "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": {**ramp, "warmup_type": "linear"}},
    }
    accelerator = Accelerator(config={**XLA, "deepspeed_config": sections}, gradient_accumulation_steps=ACCUMULATION)
    model, _, _, loader = make_parts()
    optimizer: Any = DummyOptim(model.parameters(), **arguments)
    schedule = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=warmup)
    ours = train(accelerator, (model, optimizer, schedule, loader))

    model, _, _, loader = make_parts()
    plain = torch.optim.AdamW(model.parameters(), **arguments)
    # DeepSpeed's scheduler keeps its initial rate for two steps.
    rates = [min(step / warmup, (steps - step) / (steps - warmup)) for step in (0, *range(steps))]
    parts = model, plain, torch.optim.lr_scheduler.LambdaLR(plain, rates.__getitem__), loader
    (theirs,) = by_hand(1, parts=parts)
    assert ours.rates == pytest.approx(theirs.rates, abs=1e-12)
    refuse_differences(ours._replace(rates=theirs.rates), theirs)
    accelerator.end_training()


def evaluating_and_saving(folder: Path) -> None:
    """Run a script's other parts: evaluation, files of weights, seeded dropout, and skipped steps."""
    from safetensors.torch import load_file

    set_seed(3)  # before an XLA runtime exists that could receive it
    accelerator = Accelerator(config=XLA)
    drawn = [_drop(accelerator.device)]
    model, optimizer, _, loader = accelerator.prepare(*make_parts())
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, folder / "model")
    accelerator.save({"first": model.first.weight}, folder / "first.pt")
    state = accelerator.get_state_dict(model)
    written = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    assert torch.load(folder / "first.pt", weights_only=True)["first"].device.type == "cpu"

    plain = type(model)()
    plain.load_state_dict(state)
    numbers = torch.arange(19)
    held_out = TensorDataset(torch.randn(19, 8), numbers)
    evaluated = accelerator.prepare(DataLoader(held_out, batch_size=4))
    counts = []
    for _ in range(3):
        found = []
        with torch.no_grad():
            for inputs, own in evaluated:
                found.append(accelerator.gather_for_metrics((model.eval()(inputs), own)))
        counts.append(count_programs())
    assert torch.cat([own for _, own in found]).tolist() == numbers.tolist()
    outputs = torch.cat([output for output, _ in found]).cpu()
    assert torch.allclose(outputs, plain.eval()(held_out.tensors[0]), atol=1e-5)
    assert counts[1] == counts[2], counts

    for seed in (3, 4):
        set_seed(seed)
        drawn.append(_drop(accelerator.device))
    assert drawn[0] == drawn[1] != drawn[2]

    inputs, targets = next(iter(loader))
    accelerator.backward(nn.functional.cross_entropy(model.train()(inputs * float("nan")), targets))
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    infinities = torch.tensor([math.inf, -math.inf, 0.0, 0.0], device=accelerator.device)
    hook = model.last.bias.register_hook(lambda gradient: gradient + infinities)
    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    hook.remove()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.first.weight.cpu(), state["first.weight"])
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    assert not optimizer.step_was_skipped
    accelerator.end_training()


def _drop(device: torch.device) -> list[float]:
    dropped: list[float] = nn.functional.dropout(torch.ones(64, device=device)).tolist()
    return dropped


def copying(folder: Path) -> None:
    """Copy the model deeply as an average of weights (EMA) with separate weights, and pickle a complete model."""
    for precision in ("no", "bf16"):
        accelerator = Accelerator(config=XLA, mixed_precision=precision)
        plain, optimizer, _, loader = make_parts()
        forward = plain.forward
        model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
        average = copy.deepcopy(accelerator.unwrap_model(model)).eval()
        before = copy.deepcopy(average.state_dict())
        for inputs, targets in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        torch.save(accelerator.unwrap_model(model), folder / "whole.pt")
        back = torch.load(folder / "whole.pt", weights_only=False).to(accelerator.device).eval()
        with torch.no_grad():
            assert torch.allclose(back(inputs), model.eval()(inputs), atol=0.05), precision
            assert not torch.allclose(average(inputs), model(inputs), atol=0.05), precision
        assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())
        accelerator.end_training()
        assert plain.forward == forward


def two_replicas(folder: Path, *, bf16: bool = False) -> None:
    """Run the complete loop with a real all-reduce. Then gather exactly the samples of an uneven dataset."""
    from replicas import WORLD, run_replicas

    parts = [make_parts() for _ in range(WORLD)]
    runs: dict[int, Run] = {}

    def replica(rank: int) -> None:
        accelerator = Accelerator(
            config=XLA, gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16" if bf16 else "no"
        )
        assert (accelerator.process_index, accelerator.num_processes) == (rank, WORLD)
        if rank:  # initial differences are removed
            with torch.no_grad():
                parts[rank][0].last.weight.add_(1.0)
        runs[rank] = train(accelerator, parts[rank])
        model = accelerator.unwrap_model(parts[rank][0])
        numbers = torch.arange(SAMPLES - 1.0)
        evaluated = accelerator.prepare(DataLoader(TensorDataset(numbers[:, None].expand(-1, 8)), batch_size=4))
        gathered = []
        with torch.no_grad():
            for (inputs,) in evaluated:
                model(inputs)
                gathered.append(accelerator.gather_for_metrics(inputs[:, 0]))
        assert torch.cat(gathered).cpu().tolist() == numbers.tolist()
        ranks = accelerator.reduce(torch.tensor(rank + 1.0, device=accelerator.device), "sum")
        assert ranks.device.type == "xla"
        assert float(ranks) == 3.0
        accelerator.end_training()

    run_replicas(replica)
    for rank, theirs in enumerate(by_hand(WORLD, bf16=bf16)):
        refuse_differences(runs[rank], theirs, bf16=bf16)
    assert all(torch.equal(runs[0].weights[name], tensor) for name, tensor in runs[1].weights.items())


def two_replicas_in_bf16(folder: Path) -> None:
    """Run two replicas under autocast."""
    two_replicas(folder, bf16=True)


def two_replicas_without_all_reduce(folder: Path) -> None:
    """Run without the all-reduce, which must fail."""
    import torch_xla.core.xla_model as operations

    operations.all_reduce = lambda *_, **__: None
    two_replicas(folder)


def saving(folder: Path) -> None:
    """Train two replicas for the first epoch, and save."""
    from replicas import WORLD, run_replicas

    parts = [make_parts() for _ in range(WORLD)]

    def replica(rank: int) -> None:
        accelerator = Accelerator(config=XLA, gradient_accumulation_steps=ACCUMULATION)
        train(accelerator, parts[rank], range(1), save=str(folder / "xla"))
        accelerator.end_training()

    run_replicas(replica)


def resuming(folder: Path) -> None:
    """Resume two replicas for the third epoch from the checkpoint of ZeRO-3 and DDP after the second."""
    from replicas import WORLD, run_replicas

    parts = {kind: [make_parts() for _ in range(WORLD)] for kind in ("zero3", "ddp")}
    runs: dict[tuple[int, str], Run] = {}

    def replica(rank: int) -> None:
        for kind, own in parts.items():
            accelerator = Accelerator(config=XLA, gradient_accumulation_steps=ACCUMULATION)
            runs[rank, kind] = train(accelerator, own[rank], range(2, 3), load=str(folder / kind))
            accelerator.free_memory()
        accelerator.end_training()

    run_replicas(replica)
    theirs = [part_of(run, range(2, 3)) for run in by_hand(WORLD)]  # no backward before the XLA runtime has started
    for (rank, _), ours in runs.items():
        refuse_differences(ours, theirs[rank])


def sitting_out(folder: Path) -> None:
    """Train with parameters that a loss misses on one replica or on all, and prepare models without an optimizer."""
    from replicas import WORLD, run_replicas

    models = [[Branches() for _ in range(WORLD)] for _ in range(2)]
    alone = [nn.Linear(1, 1) for _ in range(WORLD)]

    def replica(rank: int) -> None:
        config = {**XLA, "deepspeed_config": {"zero_optimization": {"stage": 3}}}
        accelerator = Accelerator(config=config)
        model = models[0][rank]
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(LoopError, match=r"do not depend on never\.weight of the Branches"):
            accelerator.backward(model(torch.ones(1, 1, device=accelerator.device), both=True).sum())
        unowned = accelerator.prepare(alone[rank])
        with pytest.raises(LoopError, match="gradients of a Linear that was prepared without an optimizer"):
            unowned(torch.ones(1, 1, device=accelerator.device)).sum().backward()
        accelerator.free_memory()
        unowned, optimizer = accelerator.prepare(alone[rank], torch.optim.SGD(alone[rank].parameters(), lr=0.1))
        optimizer.zero_grad()
        accelerator.backward(unowned(torch.ones(1, 1, device=accelerator.device)).sum())
        optimizer.step()
        accelerator.free_memory()

        given = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(config=XLA, kwargs_handlers=[given])
        model = models[1][rank]
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 1, device=accelerator.device), both=rank == 0).sum())
        accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        gradients = {name: None if p.grad is None else p.grad.item() for name, p in model.named_parameters()}
        assert gradients == {"always.weight": 1.0, "first.weight": 1.5, "never.weight": None}
        accelerator.end_training()

    run_replicas(replica)


class Branches(nn.Module):
    """A model with one layer that every loss reaches, one that some do, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.never = (nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
        return self.always(inputs) + (self.first(3.0 * inputs) if both else 0.0)


def starting_late(folder: Path) -> None:
    """Check that a backward before the start of the XLA runtime is refused."""
    torch.ones((), requires_grad=True).backward()
    with pytest.raises(LaunchError, match="a backward\\(\\) ran before the XLA runtime was started"):
        Accelerator(config=XLA)


def without_room(folder: Path) -> None:
    """Check that a ZeRO stage is not dropped if the model does not fit without ZeRO."""
    config = {**XLA, "gpu_memory": "4MiB", "deepspeed_config": {"zero_optimization": {"stage": 3}}}
    accelerator = Accelerator(config=config)
    model = nn.Linear(1024, 1024)
    with pytest.raises(StrategyError, match=r"(?s)ZeRO stage 3 dropped.*does not fit.*which has 4 MiB"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


CASES: tuple[Callable[[Path], None], ...] = (
    one_device,
    other_lengths,
    one_device_in_bf16,
    placeholders,
    evaluating_and_saving,
    copying,
    two_replicas,
    two_replicas_in_bf16,
    two_replicas_without_all_reduce,
    saving,
    resuming,
    sitting_out,
    starting_late,
    without_room,
)

if __name__ == "__main__":
    {case.__name__: case for case in CASES}[sys.argv[1]](Path(sys.argv[2]))
