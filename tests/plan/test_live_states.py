"""The plan's arithmetic compared with the live tensors of real training, on every stage and offload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.plan.costs import ProcessMemory, footprint, sub_groups
from zero_plugin.plan.situation import (
    Activations,
    Affine,
    Cluster,
    ModelSizes,
    OptimizerSizes,
    ParameterSize,
    Setup,
    Workload,
)

pytestmark = pytest.mark.processes

WORKER = Path(__file__).parent / "states_worker.py"
TERMS = ("parameters", "master weights", "optimizer states", "gradients", "other")
STATES = {"adamw": 2, "adam": 2, "adagrad": 1, "momentum": 1, "sgd": 0}
BUFFER_BYTES = 33 * 4


@dataclass(frozen=True)
class Case:
    """One strategy and its model: square weights between an embedding and a head that share theirs."""

    setup: Setup
    width: int = 129
    layers: int = 4
    frozen: bool = False
    optimizer: str = "adamw"
    peaks: bool = False


def setup(stage: Any, precision: Any = "bf16", **given: Any) -> Setup:
    """Build the setup with small buckets, and gradients that accumulate in this package's dtype."""
    sizes = {"reduce_bucket": 30_000, "prefetch_bucket": 20_000, "param_buffer": 2_000_000}
    in_16_bits = precision == "bf16" and stage == 0
    common = {"persistence_threshold": 200, "pin_memory": False, "gradient_bytes": 2 if in_16_bits else 4}
    return Setup(stage=stage, precision=precision, **{**sizes, **common, **given})


def nvme(world: int, **given: Any) -> Case:
    """Build weights of more than 1 MiB for each process. Smaller ones stay in memory."""
    ways = {"offload_optimizer": "nvme", "sub_group_size": 1_500_000, **given}
    return Case(setup(3, **ways), width=1031 * (2 if world > 2 else 1), layers=3)


def deep(case: Case) -> Case:
    """Build many small layers. Buckets and single gradients are small in comparison, so peaks consist of states."""
    sizes = {"reduce_bucket": 12_000, "prefetch_bucket": 9_000}
    return replace(case, setup=replace(case.setup, **sizes), width=65, layers=40, peaks=True)


CPU = {"offload_optimizer": "cpu"}
SHORT = {
    "ddp": deep(Case(setup(None, accumulation=2))),
    "ddp views": deep(Case(setup(None, gradient_views=True))),
    "0": Case(setup(0)),
    "1": deep(Case(setup(1))),
    "2 fp32 accumulating": deep(Case(setup(2, "no", accumulation=2))),
    "2 frozen": Case(setup(2), frozen=True),
    "2 cpu": Case(setup(2, **CPU)),
    "3 sub-groups": Case(setup(3, sub_group_size=8_000, max_live_parameters=40_000, max_reuse_distance=80_000)),
    "3 ratio": Case(setup(3, ratio=0.4, sub_group_size=8_000, **CPU), optimizer="adamw"),
    "3 cpu cpu frozen": Case(setup(3, offload_param="cpu", **CPU), frozen=True),
    "3 nvme": nvme(2, offload_param="nvme"),
}


def grid(world: int) -> dict[str, Case]:
    """Yield every stage, offload, precision, accumulation, with and without frozen parts, and other optimizers."""
    ways = [(s, "none", "none") for s in (None, 0, 1, 2, 3)] + [(s, "cpu", "none") for s in (1, 2, 3)]
    ways += [(3, "none", "cpu"), (3, "cpu", "cpu")]
    cases = {}
    for (stage, states, weights), precision, accumulation, frozen in product(
        ways, ("no", "bf16"), (1, 2), (False, True)
    ):
        chosen = setup(stage, precision, offload_optimizer=states, offload_param=weights, accumulation=accumulation)
        case = Case(chosen, frozen=frozen)
        plain = states == weights == "none" and not frozen
        cases[f"{stage} {precision} {states} {weights} {accumulation} {frozen}"] = deep(case) if plain else case
        if stage and precision == "bf16" and accumulation == 2 and not frozen:
            halved = replace(chosen, gradient_bytes=2)
            cases[f"{stage} bf16 {states} {weights} 16-bit gradients"] = Case(halved)
    for stage, optimizer in product((None, 0, 1, 2, 3), ("adam", "sgd", "momentum")):
        cases[f"{stage} {optimizer}"] = Case(setup(stage, "no"), optimizer=optimizer)
    if world > 1:  # otherwise there are no buckets
        cases["ddp views"] = deep(Case(setup(None, accumulation=2, gradient_views=True)))
    cases["ddp adagrad"] = Case(setup(None), optimizer="adagrad")
    for ratio in (0.0, 0.25, 0.9):
        cases[f"3 ratio {ratio}"] = Case(setup(3, ratio=ratio, sub_group_size=8_000, **CPU))
    for precision, weights in product(("no", "bf16"), ("none", "cpu", "nvme")):
        cases[f"nvme {precision} {weights}"] = nvme(world, precision=precision, offload_param=weights)
    cases["weights on nvme"] = nvme(world, offload_param="nvme", offload_optimizer="none")
    return cases


def merged(*parts: Mapping[str, int]) -> dict[str, int]:
    """Merge terms that a process cannot distinguish if device and host share one memory."""
    found = dict.fromkeys(TERMS, 0)
    for name, size in (item for part in parts for item in part.items()):
        known = name.removeprefix("persistent ")
        found[known if known in found else "other"] += size
    return found


def predict(case: Case, model: ModelSizes, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Predict bytes between two steps, and at the end of a window."""
    memory = ProcessMemory(model, OptimizerSizes(case.optimizer, STATES[case.optimizer]), case.setup, world)
    kept = [
        memory.device_states(),
        {name: sum(sizes) for name, sizes in memory.host_tensors().items()},
        {"buffers": BUFFER_BYTES, "swapping": memory.swap_buffers()},
    ]
    if world == 1:
        kept[0].pop("persistent parameters", None)  # if device and host are one, these copies are the originals
    # Stage 1 fills its bucket in the step.
    waiting = memory.reduction_buffers()[0] if case.setup.stage == 1 else 0
    return merged(*kept), merged(*kept, {"gradients": memory.window_gradients(), "bucket": waiting})


def differences(name: str, case: Case, world: int, live: list[Any]) -> Iterator[str]:
    """Return lines of wrong predictions. Of several processes the one with the most counts."""
    way = case.setup
    model = ModelSizes(name, tuple(ParameterSize(e, trainable=trained) for e, trained in live[0]["sizes"]))
    memory = ProcessMemory(model, OptimizerSizes(), way, world)
    between, window = predict(case, model, world)
    for moment, predicted in (("between", between), ("window", window)):
        for term, wanted in predicted.items():
            found = max(merged(process[moment])[term] for process in live)
            slack = 1024 + 0.005 * wanted
            if abs(found - wanted) > slack:
                yield f"{name}: {term} ({moment}): predicted {wanted:,}, live {found:,}"
    if way.stage == 3:
        groups = sub_groups(model.parameters, world, way.sub_group_size)
        if list(groups) != live[0]["sub_groups"]:
            yield f"{name}: sub-groups: predicted {groups}, live {live[0]['sub_groups']}"
        gathered = max(process["gathered"] for process in live) * way.weight_bytes
        if world > 1 and gathered > memory.gathered_parameters():
            yield f"{name}: gathered: predicted {memory.gathered_parameters():,}, live {gathered:,}"
    files = max(sum(process["files"].values()) for process in live)
    on_drive = sum(memory.nvme_states().values())
    if abs(files - on_drive) > 0.01 * files:
        yield f"{name}: files: predicted {on_drive:,}, live {files:,}"
    if case.peaks:
        yield from peak_differences(name, case, world, model, live)


def peak_differences(name: str, case: Case, world: int, model: ModelSizes, live: list[Any]) -> Iterator[str]:
    """Return lines of wrong predictions of peak allocations in the last backward and step.

    Stage 0's step in 16 bits is left out: it differs without a fused kernel.
    """
    way, width = case.setup, case.setup.weight_bytes
    largest = max(p.elements for p in model.parameters)
    # On a CPU torch's Adam works in two tensors of a parameter's size, for one parameter at a time: ZeRO's are flat.
    optimizer = OptimizerSizes(case.optimizer, STATES[case.optimizer], step_copies=2 if way.stage else 0)
    # A shared weight gets one gradient as a backward begins and another as it ends, which are then added.
    one, all_three = (Affine(fixed=count * largest * width) for count in (1, 3))
    made = Activations(Affine(), one, checkpointed_transient=all_three)
    phases = footprint(Workload(model, made, optimizer), way, Cluster(10**12, 10**12, devices=world)).phases
    sums = {
        phase: sum(size for term, size in terms.items() if term not in ("context", "fragmentation"))
        for phase, terms in phases.items()
    }
    wanted = {"backward": max(sums["forward"], sums["backward"]), "step": sums["step"]}
    if way.stage == 0 and width == 2:
        del wanted["step"]
    for phase, predicted in wanted.items():
        found = max(process["peaks"][phase] for process in live)
        # Stage 3's prefetched weights and the two gradients of a shared weight are seldom alive together.
        below = 0.1 if way.stage == 3 and phase == "backward" else 0.05
        if not -below * predicted <= found - predicted <= 0.05 * predicted:
            yield f"{name}: peak of {phase}: predicted {predicted:,}, live {found:,}"


def check(cases: Mapping[str, Case], world: int, run_processes: Callable[..., list[str]], folder: Path) -> None:
    """Train all cases in one group of processes, and compare."""
    wanted = {name: {**asdict(case.setup), **asdict(case)} for name, case in cases.items()}
    outputs = run_processes(WORKER, world, json.dumps(wanted), folder, seconds=90 + 30 * len(cases))
    live = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    found: list[str] = []
    for name, case in cases.items():
        processes = [outcomes.get(name, {"error": "not reached"}) for outcomes in live]
        failed = [process["error"] for process in processes if "error" in process]
        found += [f"{name}: {failed[0]}"] if failed else differences(name, case, world, processes)
    assert not found, "\n".join([*found, *(output[-2000:] for output in outputs if "Traceback" in output)])


def test_predicted_bytes_are_the_live_ones(
    run_processes: Callable[..., list[str]], tmp_path: Path, built_ops: None
) -> None:
    """Every stage, on two processes: each term before a step and between two, the NVMe files, and peaks."""
    check(SHORT, 2, run_processes, tmp_path)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_predicted_bytes_everywhere(
    run_processes: Callable[..., list[str]], tmp_path: Path, built_ops: None, world: int
) -> None:
    """The complete grid agrees on one to four processes."""
    check(grid(world), world, run_processes, tmp_path)
