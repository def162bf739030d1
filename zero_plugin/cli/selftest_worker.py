"""One process of `zero-plugin test`. It runs every check; one process of each machine writes the outcomes to a file.

The checks compare each collective's values and measure its bandwidth, and count the samples of a data loader. They copy
between CPU and device and to the NVMe folders. They compare one step of a small model with a step in one process.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin.accelerator import Accelerator
from zero_plugin.cli.selftest import STEPS, CheckError, LeftOut, Outcome, begun, note
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.choices import DistributedType
from zero_plugin.config.document import nvme_folders, offload_devices
from zero_plugin.config.handlers import InitProcessGroupKwargs
from zero_plugin.config.parallelism import sequence_parallel_size
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.distributed.collectives import gather_values
from zero_plugin.distributed.seeding import set_seed
from zero_plugin.errors import LaunchError, MachineError
from zero_plugin.long_context import attention, cut, gather
from zero_plugin.strategies.torch_optimizers import build_optimizer


@dataclass(frozen=True, slots=True)
class Trained:
    """The prepared small model, with the batch of this process."""

    model: Any
    optimizer: Any
    batch: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Run:
    """One self-test on one process.

    Attributes:
        accelerator: built from the configuration.
        folder: folder for the checkpoint; None if no folder shared by all machines is known.
        trained: the result of `optimizer step`, for `checkpoint`. None before, and on every process after a failed
            check on any process.
    """

    accelerator: Accelerator
    folder: Path | None = None
    trained: Trained | None = None

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.accelerator.device

    @property
    def carried(self) -> torch.device:
        """The device of tensors for the process group: the CPU on XLA, which has its own all-reduce."""
        return torch.device("cpu") if self.device.type == "xla" else self.device

    @property
    def groups(self) -> int:
        """The number of processes with different samples. Processes that share samples count once."""
        return self.processes // sequence_parallel_size(self.accelerator.document)

    @property
    def processes(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)


@dataclass(slots=True)
class Stopwatch:
    """The seconds that a block took, valid after the block."""

    seconds: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Stopwatch]:
    """Measure a block, including the work that it started on the device."""
    watch = Stopwatch()
    _synchronize(device)
    began = time.perf_counter()
    yield watch
    _synchronize(device)
    watch.seconds = max(time.perf_counter() - began, 1e-9)


def speed(size: float, seconds: float) -> str:
    """Format bytes per seconds as GB/s."""
    return f"{size / seconds / 1e9:.3g} GB/s"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_BARRIERS = 20
_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # of a collective's complete result
_REPEATED = 3


def check_barrier(run: Run) -> str:
    """Run barriers on all processes, and measure their duration."""
    _need_several(run)
    dist.barrier()
    with stopwatch(run.device) as watch:
        for _ in range(_BARRIERS):
            dist.barrier()
    return f"{run.processes} processes, {watch.seconds / _BARRIERS * 1e3:.2g} ms each by {dist.get_backend()}"


def check_all_reduce(run: Run) -> str:
    """Compare sums of known values. Measure bandwidth as NCCL's tests do: each process sends 2 (n-1)/n of the size."""
    _need_several(run)
    ramp, count = _ramp(run), run.processes
    own, wanted = ramp * (run.accelerator.process_index + 1), ramp * (count * (count + 1) // 2)
    return _measure(run, dist.all_reduce, own, wanted, 2 * (count - 1) / count)


def check_all_gather(run: Run) -> str:
    """Compare gathered values. Measure bandwidth: each process receives (n-1)/n of the result."""
    _need_several(run)
    count = run.processes
    part = _ramp(run).chunk(count)[0].contiguous()
    own, wanted = part + run.accelerator.process_index, torch.cat([part + rank for rank in range(count)])

    def collect(result: Tensor) -> None:
        dist.all_gather(list(result.chunk(count)), own)

    return _measure(run, collect, torch.zeros_like(wanted), wanted, (count - 1) / count)


def check_broadcast(run: Run) -> str:
    """Compare the last process's values on all processes. Measure bandwidth: each process receives all values."""
    _need_several(run)
    ramp, last = _ramp(run), run.processes - 1
    own = ramp if run.accelerator.process_index == last else torch.zeros_like(ramp)
    return _measure(run, partial(dist.broadcast, src=last), own, ramp, 1.0)


def _need_several(run: Run) -> None:
    if run.processes == 1:
        raise LeftOut("there is one process")


def _ramp(run: Run) -> Tensor:
    """Return integers that are small enough for exact sums in fp32."""
    count = _BYTES[run.carried.type] // 4
    return torch.arange(count, device=run.carried).remainder_(997).float()


def _measure(run: Run, collective: Callable[[Tensor], Any], own: Tensor, wanted: Tensor, share: float) -> str:
    """Run a collective on copies of `own` several times, and compare each result with `wanted`.

    Returns:
        The bandwidth of the fastest run, in which each process transfers `share` of the result.
    """
    buffer, seconds = torch.empty_like(own), []
    for _ in range(_REPEATED):
        buffer.copy_(own)
        with stopwatch(run.device) as watch:
            collective(buffer)
        seconds.append(watch.seconds)
        if wrong := int((buffer != wanted).sum()):
            first = int((buffer != wanted).nonzero()[0])
            raise CheckError(
                f"{wrong:,} of {buffer.numel():,} values are wrong, the first at {first:,}: "
                f"{buffer[first].item():g} instead of {wanted[first].item():g}"
            )
    size = buffer.numel() * buffer.element_size()
    return f"values correct; {speed(size * share, min(seconds))} per process ({show_bytes(size)})"


_HEADS, _TOKENS, _HEAD_WIDTH = 4, 64, 8  # of each process


def check_shared_samples(run: Run) -> str:
    """Compare attention over sequences that processes share with attention over complete sequences."""
    size = run.processes // run.groups
    if size == 1:
        raise LeftOut("processes do not share samples: sequence_parallel_size is 1")
    generator = torch.Generator().manual_seed(0)
    shape = (1, _HEADS * size, _TOKENS * size, _HEAD_WIDTH)
    query, key, value = (torch.randn(shape, generator=generator).to(run.device) for _ in range(3))
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with stopwatch(run.device) as watch:
        found = gather(attention(cut(query, 2), cut(key, 2), cut(value, 2)), 2)
    apart = float((found - wanted).abs().max())
    if not apart <= _TOLERANCE["no"]:
        raise CheckError(f"attention over parts of sequences differs by {apart:.2g} from complete sequences")
    return f"attention equal over parts and complete sequences ({size} processes, {watch.seconds * 1e3:.0f} ms)"


_SAMPLES = 1003  # not a multiple of any usual number of processes
_BATCH = 4


def check_data_loader(run: Run) -> str:
    """Iterate over a shuffled epoch, gather the samples as for a metric, and count them."""
    samples: Any = range(_SAMPLES)
    loader = run.accelerator.prepare(DataLoader(samples, batch_size=_BATCH, shuffle=True))
    seen, batches = [], 0
    for batch in loader:
        seen.append(run.accelerator.gather_for_metrics(batch))
        batches += 1
    counted = Counter(torch.cat(seen).tolist())
    missing = [sample for sample in range(_SAMPLES) if not counted[sample]]
    twice = [sample for sample, count in counted.items() if count > 1]
    if missing or twice:
        raise CheckError(f"of {_SAMPLES} samples, {len(missing)} are missing and {len(twice)} come more than once")
    return f"{_SAMPLES} samples, each once; {batches} batches on every process"


_COPIED = {"cuda": 256 * 2**20, "xla": 32 * 2**20}  # bytes
_SWAPPED = 64 * 2**20


def check_host_and_device(run: Run) -> str:
    """Copy from CPU memory to the device and back. For a GPU, use pinned memory."""
    if run.device.type == "cpu":
        raise LeftOut("the run is on the CPU: there is no other device to copy to")
    size = _COPIED[run.device.type]
    host = torch.arange(size // 4, dtype=torch.int32)
    if run.device.type == "xla":  # XLA records a copy, and runs it when the result is read: only both can be measured
        with stopwatch(run.device) as both:
            back = host.to(run.device).cpu()
        rates = f"to the device and back {speed(2 * size, both.seconds)}"
    else:
        host, back = host.pin_memory(), torch.empty_like(host).pin_memory()
        there = host.to(run.device)
        with stopwatch(run.device) as going:
            there.copy_(host, non_blocking=True)
        with stopwatch(run.device) as coming:
            back.copy_(there, non_blocking=True)
        rates = f"to the GPU {speed(size, going.seconds)}, back {speed(size, coming.seconds)}"
    if not torch.equal(host, back):
        raise CheckError("values differ after a copy to the device and back")
    return f"{rates}, all processes at the same time"


def check_nvme(run: Run) -> str:
    """Write and read a file with DeepSpeed's asynchronous I/O, like its offload."""
    training = run.accelerator.document.deepspeed
    folders = nvme_folders(training)
    if not folders:
        raise LeftOut("nothing is offloaded to NVMe")

    from zero_plugin.strategies.deepspeed.nvme import measure_nvme

    said = []
    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="zero_plugin-test-", dir=folder) as own:
            file = Path(own) / f"rank-{run.accelerator.process_index}"
            aio = training.section("aio").nested()
            trip = measure_nvme(file, _SWAPPED, {key: value for key, value in aio.items() if value != "auto"})
        if not trip.equal:
            raise CheckError(f"{folder}: the data read differs from the data written")
        wrote, read = speed(_SWAPPED, trip.write_seconds), speed(_SWAPPED, trip.read_seconds)
        said.append(f"{folder}: writes {wrote}, reads {read}, per process and all at the same time")
    return "; ".join(said)


_WIDTH = 512  # a weight of 0.26 million elements: ZeRO-3 does not partition smaller ones
_OUTPUTS = 8
_ROWS = 8  # per process
# Adam's first step is lr * g / (|g| + eps). With an eps as large as the gradients, the step shows a gradient that is
# wrong by a factor, and rounding flips no sign.
_ARGUMENTS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 0.05, "weight_decay": 0.0}
_TOLERANCE = {"no": 1e-3, "bf16": 0.1, "fp16": 0.1}  # relative to the step's length
_MOST_ATTEMPTS = 25  # the initial loss scale of fp16 may have to be halved several times


class _Perceptron(nn.Sequential):
    """A model that computes each sample independently, so processes may share samples."""

    supports_sequence_parallel = True

    def __init__(self) -> None:
        hidden = [layer for _ in range(2) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        super().__init__(*hidden, nn.Linear(_WIDTH, _OUTPUTS))


def check_optimizer_step(run: Run) -> str:
    """Train one step on the global batch. On the main process, repeat it in fp32 with plain torch and compare."""
    accelerator = run.accelerator
    set_seed(0)
    model = _Perceptron()
    reference = copy.deepcopy(model)
    rows = _ROWS * run.groups
    inputs, targets = torch.randn(rows, _WIDTH), torch.randn(rows, _OUTPUTS)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_ROWS)
    described = accelerator.document.deepspeed.has_section("optimizer")
    make: Any = DummyOptim if described else torch.optim.AdamW
    optimizer = make(model.parameters(), **_ARGUMENTS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = accelerator.get_state_dict(model)
    trained = Trained(model, optimizer, next(iter(loader)))
    with stopwatch(run.device) as watch:
        _step(run, trained)
    after = accelerator.get_state_dict(model)
    run.trained = trained
    if before is None or after is None:  # not the main process
        return ""
    reference.load_state_dict({name: tensor.float() for name, tensor in before.items()})
    section = _resolved(run).optimizer if described else None
    torch_optimizer = (
        torch.optim.AdamW(reference.parameters(), **_ARGUMENTS)
        if section is None
        else build_optimizer(section, reference.parameters())
    )
    torch.autograd.backward(_loss(reference, (inputs, targets)))
    torch_optimizer.step()
    apart = _distance(after, reference.state_dict(), before)
    allowed = _TOLERANCE[_resolved(run).precision]
    if not apart <= allowed:
        raise CheckError(
            f"the step differs by {apart:.2g} of its length from the step of one process with plain torch "
            f"(allowed: {allowed:g})"
        )
    return f"as in one process, except for {apart:.1g} of its length ({watch.seconds * 1e3:.0f} ms)"


def check_checkpoint(run: Run) -> str:
    """Save, step, load and step again. The loaded weights equal the saved ones, and both steps have the same result."""
    if run.trained is None:
        raise LeftOut("needs the model of the optimizer step, which failed")
    if run.folder is None:
        raise LeftOut("the machines need a shared folder: --folder FOLDER")
    accelerator, trained = run.accelerator, run.trained
    saved = accelerator.get_state_dict(trained.model)
    with stopwatch(run.device) as saving:
        accelerator.save_state(run.folder)
    _step(run, trained)
    after = accelerator.get_state_dict(trained.model)
    with stopwatch(run.device) as loading:
        accelerator.load_state(run.folder)
    loaded = accelerator.get_state_dict(trained.model)
    _step(run, trained)
    again = accelerator.get_state_dict(trained.model)
    if saved is None or after is None or loaded is None or again is None:
        return ""
    if wrong := [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]:
        raise CheckError(f"weights differ after load_state: {', '.join(wrong)}")
    apart = _distance(again, after, saved)
    if not apart <= _TOLERANCE[_resolved(run).precision]:
        raise CheckError(
            f"the step after load_state differs by {apart:.2g} of its length from the step before: the optimizer "
            "states were not restored"
        )
    size = sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file())
    rates = f"written at {speed(size, saving.seconds)}, read at {speed(size, loading.seconds)}"
    return f"values equal; {show_bytes(size)} {rates}"


def _resolved(run: Run) -> Resolved:
    resolved = run.accelerator.resolved
    assert resolved is not None, "a model is prepared"
    return resolved


def _step(run: Run, trained: Trained) -> None:
    for _ in range(_MOST_ATTEMPTS):
        run.accelerator.backward(_loss(trained.model, trained.batch))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        if not run.accelerator.optimizer_step_was_skipped:
            return
    raise CheckError(f"fp16 overflowed {_MOST_ATTEMPTS} times in a row, at every loss scale")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype)
    predicted: Tensor = model(inputs.to(kind))
    return (predicted.float() - targets).square().sum(1).mean()


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Return the distance between the ends of two steps from one start, relative to the wanted step's length."""

    def length(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in start))

    return length(found, wanted) / max(length(wanted, start), 1e-30)


_CHECKS: dict[str, Callable[[Run], str]] = {
    "barrier": check_barrier,
    "all_reduce": check_all_reduce,
    "all_gather": check_all_gather,
    "broadcast": check_broadcast,
    "shared samples": check_shared_samples,
    "data loader": check_data_loader,
    "optimizer step": check_optimizer_step,
    "checkpoint": check_checkpoint,
    "host and device": check_host_and_device,
    "NVMe": check_nvme,
}
assert ["processes", *_CHECKS] == list(STEPS)
_PATIENCE = timedelta(seconds=60)  # limit of one collective; ops are built outside of collectives


def main() -> None:
    """Run all checks. Arguments: the file for outcomes, and a folder shared by all processes, or "" for none."""
    outcomes, folder = sys.argv[1:]
    os.dup2(2, 1)  # keep the output of libraries out of the command's own output
    began = time.perf_counter()
    writes = os.environ.get("LOCAL_RANK", "0") == "0"  # one process per machine: the command runs on each machine
    if writes:
        note(begun("processes"), Path(outcomes))
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])
    writes = accelerator.is_local_main_process  # again, because a TPU has no LOCAL_RANK before
    run = Run(accelerator, Path(folder) if folder else None)
    if writes:
        seconds = time.perf_counter() - began
        note(Outcome("processes", "ok", _describe(run), seconds=seconds), Path(outcomes))
    for name, check in _CHECKS.items():
        if writes:
            note(begun(name), Path(outcomes))
        outcome = _run(name, check, run)
        if writes:
            note(outcome, Path(outcomes))
    if accelerator.is_main_process and run.folder is not None:
        shutil.rmtree(run.folder, ignore_errors=True)
    accelerator.end_training()


def _run(name: str, check: Callable[[Run], str], run: Run) -> Outcome:
    """Run a check on all processes. The outcome is ok if all are ok, and wrong if any is wrong."""
    began = time.perf_counter()
    try:
        own = Outcome(name, "ok", check(run))
    except LeftOut as reason:
        own = Outcome(name, "left out", str(reason))
    except CheckError as failure:
        own = replace(begun(name), found=str(failure))
    except (MachineError, LaunchError) as error:  # their messages include the fix
        what, _, advice = str(error).partition("\n")
        own = Outcome(name, "wrong", what, advice or STEPS[name])
    except Exception as error:  # noqa: BLE001 - any error of a library is the check's finding
        traceback.print_exc()
        own = replace(begun(name), found=f"{type(error).__name__}: {error}")
    everyones = [Outcome(**outcome) for outcome in gather_values(asdict(own))]
    outcome = next((o for level in ("wrong", "left out") for o in everyones if o.level == level), everyones[0])
    found = outcome.found
    if outcome.level == "wrong":
        run.trained = None  # on every process: all of them must skip the checks that need the model
        wrong = [rank for rank, other in enumerate(everyones) if other.level == "wrong"]
        alike = [rank for rank in wrong if everyones[rank].found == found]
        if run.processes > 1:
            found = f"on rank {', '.join(map(str, alike))}: {found}"
        if others := [str(rank) for rank in wrong if rank not in alike]:
            found += f"; rank {', '.join(others)} failed with other messages"
    return replace(outcome, found=found, seconds=time.perf_counter() - began)


def _describe(run: Run) -> str:
    """Describe the number and kind of processes, and how they train."""
    accelerator = run.accelerator
    settings = [str(accelerator.mixed_precision).replace("no", "fp32")]
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        training = accelerator.document.deepspeed
        settings.insert(0, f"ZeRO-{training.value('zero_optimization', 'stage', default=0)}")
        devices = offload_devices(training)
        settings += [f"{what} offload to {device}" for what, device in devices.items() if device != "none"]
    elif run.processes > 1:
        settings.insert(0, "DDP" if run.device.type != "xla" else "data parallel")
    else:
        settings.insert(0, "one process")
    return f"{run.processes} × {run.device.type}, {', '.join(settings)}"


if __name__ == "__main__":
    main()
