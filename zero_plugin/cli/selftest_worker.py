"""One process of `zero-plugin test`: runs every check, and one of each machine writes down what came of them.

Each collective's values are compared, and its bandwidth measured; a loader gives every sample once; copies go between
CPU and device and to the NVMe folders; one step of a small model is compared with the same step in one process.
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
    """The small model as it was prepared, with the batch of this process."""

    model: Any
    optimizer: Any
    batch: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Run:
    """One self-test on one process.

    Attributes:
        accelerator: as the configuration says.
        folder: for the checkpoint; None where no folder of all machines is known.
        trained: what `optimizer step` leaves for `checkpoint`; None before, and on every process once a check has
            failed on any.
    """

    accelerator: Accelerator
    folder: Path | None = None
    trained: Trained | None = None

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def carried(self) -> torch.device:
        """Where the process group takes tensors from: the device, or the CPU beside XLA's own all-reduce."""
        return torch.device("cpu") if self.device.type == "xla" else self.device

    @property
    def groups(self) -> int:
        """How many processes have samples of their own; those that share them count once."""
        return self.processes // sequence_parallel_size(self.accelerator.document)

    @property
    def processes(self) -> int:
        """How many there are."""
        return int(self.accelerator.num_processes)


@dataclass(slots=True)
class Stopwatch:
    """Seconds, once the block is left."""

    seconds: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Stopwatch]:
    """Measure a block with all that it started on the device."""
    watch = Stopwatch()
    _synchronize(device)
    began = time.perf_counter()
    yield watch
    _synchronize(device)
    watch.seconds = max(time.perf_counter() - began, 1e-9)


def speed(size: float, seconds: float) -> str:
    """Bytes in seconds as GB/s."""
    return f"{size / seconds / 1e9:.3g} GB/s"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_BARRIERS = 20
_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # of the whole result
_REPEATED = 3


def check_barrier(run: Run) -> str:
    """All processes meet, and how long that takes."""
    _need_several(run)
    dist.barrier()
    with stopwatch(run.device) as watch:
        for _ in range(_BARRIERS):
            dist.barrier()
    return f"{run.processes} processes, {watch.seconds / _BARRIERS * 1e3:.2g} ms each by {dist.get_backend()}"


def check_all_reduce(run: Run) -> str:
    """Sums of known values; bandwidth as NCCL's tests define it: what each process must send, 2 (n-1)/n of the size."""
    _need_several(run)
    ramp, count = _ramp(run), run.processes
    own, wanted = ramp * (run.accelerator.process_index + 1), ramp * (count * (count + 1) // 2)
    return _measure(run, dist.all_reduce, own, wanted, 2 * (count - 1) / count)


def check_all_gather(run: Run) -> str:
    """Each process's values at its place; bandwidth of what each must receive, (n-1)/n of the result."""
    _need_several(run)
    count = run.processes
    part = _ramp(run).chunk(count)[0].contiguous()
    own, wanted = part + run.accelerator.process_index, torch.cat([part + rank for rank in range(count)])

    def collect(result: Tensor) -> None:
        dist.all_gather(list(result.chunk(count)), own)

    return _measure(run, collect, torch.zeros_like(wanted), wanted, (count - 1) / count)


def check_broadcast(run: Run) -> str:
    """The last process's values on all; bandwidth of what each receives."""
    _need_several(run)
    ramp, last = _ramp(run), run.processes - 1
    own = ramp if run.accelerator.process_index == last else torch.zeros_like(ramp)
    return _measure(run, partial(dist.broadcast, src=last), own, ramp, 1.0)


def _need_several(run: Run) -> None:
    if run.processes == 1:
        raise LeftOut("there is one process")


def _ramp(run: Run) -> Tensor:
    """Whole numbers small enough for fp32 to add up exactly."""
    count = _BYTES[run.carried.type] // 4
    return torch.arange(count, device=run.carried).remainder_(997).float()


def _measure(run: Run, collective: Callable[[Tensor], Any], own: Tensor, wanted: Tensor, share: float) -> str:
    """Make `wanted` of `own` in place, some times; bandwidth of a share of the result, in the shortest of them."""
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
                f"{buffer[first].item():g} where {wanted[first].item():g} should be"
            )
    size = buffer.numel() * buffer.element_size()
    return f"values right; {speed(size * share, min(seconds))} per process ({show_bytes(size)})"


_HEADS, _TOKENS, _HEAD_WIDTH = 4, 64, 8  # of each process


def check_shared_samples(run: Run) -> str:
    """Attention over sequences of which each process has a part, compared with that of complete ones."""
    size = run.processes // run.groups
    if size == 1:
        raise LeftOut("each process has samples of its own: sequence_parallel_size is 1")
    generator = torch.Generator().manual_seed(0)
    shape = (1, _HEADS * size, _TOKENS * size, _HEAD_WIDTH)
    query, key, value = (torch.randn(shape, generator=generator).to(run.device) for _ in range(3))
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with stopwatch(run.device) as watch:
        found = gather(attention(cut(query, 2), cut(key, 2), cut(value, 2)), 2)
    apart = float((found - wanted).abs().max())
    if not apart <= _TOLERANCE["no"]:
        raise CheckError(f"attention over parts of sequences differs by {apart:.2g} from that over complete ones")
    return f"attention over parts as over complete sequences ({size} processes, {watch.seconds * 1e3:.0f} ms)"


_SAMPLES = 1003  # no multiple of any usual number of processes
_BATCH = 4


def check_data_loader(run: Run) -> str:
    """Go through a shuffled epoch, and collect as for a metric."""
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
        raise CheckError(f"of {_SAMPLES} samples {len(missing)} are missing and {len(twice)} come more than once")
    return f"{_SAMPLES} samples, each once; {batches} batches on every process"


_COPIED = {"cuda": 256 * 2**20, "xla": 32 * 2**20}  # bytes
_SWAPPED = 64 * 2**20


def check_host_and_device(run: Run) -> str:
    """Copy from CPU memory to the device and back; for a GPU, from pinned memory."""
    if run.device.type == "cpu":
        raise LeftOut("the run is on the CPU, where all is in CPU memory")
    size = _COPIED[run.device.type]
    host = torch.arange(size // 4, dtype=torch.int32)
    if run.device.type == "xla":  # which notes a copy down, and makes it when somebody looks
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
        raise CheckError("what comes back from the device is not what was sent")
    return f"{rates}, all processes at once"


def check_nvme(run: Run) -> str:
    """Write and read a file by DeepSpeed's own asynchronous I/O, as its offload does."""
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
            raise CheckError(f"what is read from {folder} is not what was written")
        wrote, read = speed(_SWAPPED, trip.write_seconds), speed(_SWAPPED, trip.read_seconds)
        said.append(f"{folder}: writes {wrote}, reads {read}, per process and all at once")
    return "; ".join(said)


_WIDTH = 512  # a weight of 0.26 million elements: ZeRO-3 does not partition smaller ones
_OUTPUTS = 8
_ROWS = 8  # per process
# Adam's first step is lr * g / (|g| + eps): with an eps as large as the gradients, it shows a gradient that is wrong by
# a factor, and no sign flips by a rounding.
_ARGUMENTS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 0.05, "weight_decay": 0.0}
_TOLERANCE = {"no": 1e-3, "bf16": 0.1, "fp16": 0.1}  # of the step's length
_MOST_ATTEMPTS = 25  # fp16 begins with a loss scale that may have to be halved


class _Perceptron(nn.Sequential):
    """It computes each sample by itself, and so does every process of those that share samples."""

    supports_sequence_parallel = True

    def __init__(self) -> None:
        hidden = [layer for _ in range(2) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        super().__init__(*hidden, nn.Linear(_WIDTH, _OUTPUTS))


def check_optimizer_step(run: Run) -> str:
    """Train one step on the global batch; on the main process, take it again in fp32 with plain torch, and compare."""
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
            f"the step differs by {apart:.2g} of its length from that of one process with plain torch "
            f"(allowed: {allowed:g})"
        )
    return f"as in one process, but for {apart:.1g} of its length ({watch.seconds * 1e3:.0f} ms)"


def check_checkpoint(run: Run) -> str:
    """Save; step; load: the weights are those saved, and the same step leads to where it led before."""
    if run.trained is None:
        raise LeftOut("it takes the model of the optimizer step, which failed")
    if run.folder is None:
        raise LeftOut("the machines need a folder that all of them see: --folder FOLDER")
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
            f"the step after load_state differs by {apart:.2g} of its length from the one before: the optimizer's "
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
    """How far two steps from one start end from each other, in lengths of the wanted one."""

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
_PATIENCE = timedelta(seconds=60)  # of one collective; building an op first is in none


def main() -> None:
    """`worker.py OUTCOMES FOLDER`: the file to write, and a folder that all processes see, or "" for none."""
    outcomes, folder = sys.argv[1:]
    os.dup2(2, 1)  # what libraries print is no part of the command's own output
    began = time.perf_counter()
    writes = os.environ.get("LOCAL_RANK", "0") == "0"  # to the command, which runs on each machine
    if writes:
        note(begun("processes"), Path(outcomes))
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])
    writes = accelerator.is_local_main_process  # on a TPU no variable says so
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
    """A check on all processes: it is ok if it is on each, and wrong if it is on any."""
    began = time.perf_counter()
    try:
        own = Outcome(name, "ok", check(run))
    except LeftOut as reason:
        own = Outcome(name, "left out", str(reason))
    except CheckError as failure:
        own = replace(begun(name), found=str(failure))
    except (MachineError, LaunchError) as error:  # they say themselves what to do
        what, _, advice = str(error).partition("\n")
        own = Outcome(name, "wrong", what, advice or STEPS[name])
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what the check has found
        traceback.print_exc()
        own = replace(begun(name), found=f"{type(error).__name__}: {error}")
    everyones = [Outcome(**outcome) for outcome in gather_values(asdict(own))]
    outcome = next((o for level in ("wrong", "left out") for o in everyones if o.level == level), everyones[0])
    found = outcome.found
    if outcome.level == "wrong":
        run.trained = None  # on every process, so that all leave out what needs it
        wrong = [rank for rank, other in enumerate(everyones) if other.level == "wrong"]
        alike = [rank for rank in wrong if everyones[rank].found == found]
        if run.processes > 1:
            found = f"on rank {', '.join(map(str, alike))}: {found}"
        if others := [str(rank) for rank in wrong if rank not in alike]:
            found += f"; rank {', '.join(others)} failed with other messages"
    return replace(outcome, found=found, seconds=time.perf_counter() - began)


def _describe(run: Run) -> str:
    """How many processes of what kind, and how they train."""
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
