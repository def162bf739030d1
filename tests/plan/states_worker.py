"""Measure the live tensors of real training: STORE RANK WORLD CASES FOLDER; CASES is JSON, name -> case.

Each process writes `rank-R.json`. For each name it has the parameters' facts, the bytes alive between two steps and at
the end of a window by kind, the bytes of its NVMe files, and each phase's peak allocation.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from still_group import is_staging
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from zero_plugin import Accelerator
from zero_plugin.config.handlers import DistributedDataParallelKwargs

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


class Net(nn.Module):
    """Odd sizes everywhere, one weight that two modules share, one buffer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, width)
        self.inner = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(33))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.inner:
            x = layer(x).tanh()
        return self.head(self.norm(x))


def accelerator_of(case: dict[str, Any], folder: Path) -> Accelerator:
    """Create the accelerator for the case's setup."""
    world = dist.get_world_size()
    common = {"use_cpu": True, "mixed_precision": case["precision"]}
    if case["stage"] is None:
        return Accelerator(
            config={"distributed_type": "MULTI_CPU" if world > 1 else "NO", **common},
            gradient_accumulation_steps=case["accumulation"],
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=case["gradient_views"])],
        )
    zero: dict[str, Any] = {
        "stage": case["stage"],
        "reduce_bucket_size": case["reduce_bucket"],
        "overlap_comm": case["overlap_comm"],
        "sub_group_size": case["sub_group_size"],
        "stage3_param_persistence_threshold": case["persistence_threshold"],
        "stage3_prefetch_bucket_size": case["prefetch_bucket"],
        "stage3_max_live_parameters": case["max_live_parameters"],
        "stage3_max_reuse_distance": case["max_reuse_distance"],
    }
    for what in ("optimizer", "param"):
        if (device := case[f"offload_{what}"]) != "none":
            zero[f"offload_{what}"] = section = {"device": device}
            if device == "nvme":
                section["nvme_path"] = str(folder)
    if case["offload_optimizer"] != "none":
        zero["offload_optimizer"]["ratio"] = case["ratio"]
    if case["offload_param"] == "nvme":
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": case["param_buffer"]}
    section = {"zero_optimization": zero}
    if case["precision"] == "bf16" and case["stage"]:
        section["data_types"] = {"grad_accum_dtype": "fp32" if case["gradient_bytes"] == 4 else "bf16"}
    return Accelerator(
        config={"distributed_type": "DEEPSPEED", **common, "deepspeed_config": section},
        gradient_accumulation_steps=case["accumulation"],
    )


def alive(model: Any, optimizer: Any) -> dict[str, int]:
    """Return bytes by kind. Tensors of no known kind are `other`."""
    gc.collect()
    session = optimizer.session
    engine = getattr(session, "engine", None)
    wrapper = None if engine is None else engine.optimizer
    terms: dict[str, Iterable[Any]] = {
        "parameters": [t for p in session.module.parameters() for t in (p.data, getattr(p, "ds_tensor", None))],
        "buffers": session.module.buffers(),
    }
    masters: list[Any] = []
    states = [value for state in session.optimizer.state.values() for value in state.values()]
    gradients: list[Any] = [g for p in session.module.parameters() for g in (p.grad, getattr(p, "grad_accum", None))]
    if wrapper is not None:
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
            masters += getattr(wrapper, name, [])
        masters += [t for group in getattr(wrapper, "fp32_groups", []) for t in group]
        masters += getattr(wrapper, "fp32_groups_flat", [])
        gradients += [m.grad for m in masters]
        for name in ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu"):
            gradients += flattened(getattr(wrapper, name, {}))
        gradients.append(getattr(wrapper, "grad_partitions_flat_buffer", None))
        gradients.append(getattr(wrapper, "grads_in_partition", None))
        gradients += getattr(wrapper, "fp32_groups_gradients_flat", [])
        if (backup := getattr(wrapper, "backup_optimizer", None)) is not None:
            states += [value for state in backup.state.values() for value in state.values()]
    terms |= {"master weights": masters, "optimizer states": states, "gradients": gradients, "other": all_tensors()}
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, tensors in terms.items():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage().data_ptr()) not in seen:
                seen.add(at)
                found[name] = found.get(name, 0) + tensor.untyped_storage().nbytes()
    return found


def flattened(value: Any) -> list[Any]:
    """Return the leaves of dictionaries and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        flat = getattr(value, "flat_partition", None)
        return [flat, *(leaf for item in value for leaf in flattened(item))]
    return [value]


def all_tensors() -> Iterator[Tensor]:
    """Return all tensors that Python knows, without those of the exchange between processes."""
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor) or type(found).__name__ == "FakeTensor" or found.is_meta:
            continue
        if not is_staging(found):
            yield found


def peaks_of(profiled: Any, phases: Iterable[str]) -> dict[str, int]:
    """Return each name's peak of simultaneously allocated bytes in its last stretch, of all allocations inside."""
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    stretches = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in phases}
    peaks, now = dict.fromkeys(stretches, 0), 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            for name, (start, end) in stretches.items():
                if start <= event.start_ns() <= end:
                    peaks[name] = max(peaks[name], now)
    return peaks


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train two windows of the case."""
    gc.collect()
    gc.freeze()  # earlier objects are not counted, and not walked again
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if case["peaks"] else nullcontext()
    accelerator = accelerator_of(case, folder)
    try:
        with profiling as profiled:
            found = train(accelerator, case)
        found["files"] = {f.name: f.stat().st_size for f in folder.rglob(f"rank{dist.get_rank()}/*")}
        if profiled is not None:
            found["peaks"] = peaks_of(profiled, ("initialisation", "backward", "step"))
        return found
    finally:
        accelerator.end_training()


def train(accelerator: Accelerator, case: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the bytes alive at the end of the second window and after its step."""
    torch.manual_seed(0)
    net = Net(case["width"], case["layers"])
    if case["frozen"]:
        for p in (*net.embedding.parameters(), *net.inner[1].parameters()):
            p.requires_grad_(False)
    sizes = [(p.numel(), p.requires_grad) for p in net.parameters()]
    made = OPTIMIZERS[case["optimizer"]]([p for p in net.parameters() if p.requires_grad])
    with record_function("initialisation"):
        model, optimizer = accelerator.prepare(net, made)
    gathered = watch_gathering(optimizer)
    tokens = torch.tensor([[1, 2]])
    at_end: dict[str, int] = {}
    for window in range(2):
        for _ in range(case["accumulation"]):
            with accelerator.accumulate(model), record_function("backward"):
                accelerator.backward(model(tokens).float().sum() / 8)
        if window:
            at_end = alive(model, optimizer)
        with record_function("step"):
            optimizer.step()
        if not window or not case["gradient_views"]:  # the buckets are visible through the gradients in them
            optimizer.zero_grad()
    between = alive(model, optimizer)
    wrapper = getattr(getattr(optimizer.session, "engine", None), "optimizer", None)
    groups = list(getattr(wrapper, "fp16_partitioned_groups_flat_numel", []))
    return {"sizes": sizes, "window": at_end, "between": between, "sub_groups": groups, "gathered": max(gathered)}


def watch_gathering(optimizer: Any) -> list[int]:
    """Record from now on, at each module, the elements that stage 3 has gathered."""
    counts = [0]
    wrapper = getattr(getattr(optimizer.session, "engine", None), "optimizer", None)
    if hasattr(wrapper, "parameter_offload"):
        coordinator = wrapper.parameter_offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module

        def watched(*args: Any, **kwargs: Any) -> None:
            fetch(*args, **kwargs)
            counts.append(coordinator._PartitionedParameterCoordinator__n_available_params)

        coordinator.fetch_sub_module = watched
    return counts


def main() -> None:
    """Measure all cases."""
    store, rank, world, cases, output = sys.argv[1:6]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "still", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60)
    )
    outcomes = {}
    for name, case in json.loads(cases).items():
        folder = Path(output) / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        print(f"=== {name}", flush=True)
        try:
            outcomes[name] = measure(case, folder)
        except Exception:  # noqa: BLE001 - the cases before it are shown as well
            outcomes[name] = {"error": traceback.format_exc()}
            break
    (Path(output) / f"rank-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
