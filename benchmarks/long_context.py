"""Measure the longest sample that fits under a memory limit per process, and the time of a step.

    python benchmarks/long_context.py
    python benchmarks/long_context.py --only time --rounds 7

An ordinary loop trains a Llama-like model on 1, 2 and 4 processes that share each sample. It runs plain, with a loss in
chunks, with checkpointed blocks, and with checkpoints that leave the process, as torch's `save_on_cpu` moves them from
a GPU.

Memory: the largest growth of a process during a step (`VmHWM`, reset before), for samples of growing length. The
longest sample under `--limit` is interpolated between two of them. The process's thread pools and allocator count, as
they do in a run.

Time: a step is compared with a loop by hand over the same exchange, alternating in the same processes. A second copy of
the loop by hand shows the measurement's noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

WORDS, SIZE, LAYERS, HEADS = 8192, 128, 4, 8
# A loss in chunks, checkpointed blocks, checkpoints outside of the process.
WAYS = {
    "plain": (False, False, False),
    "loss in chunks": (True, False, False),
    "loss in chunks, checkpointed blocks": (True, True, False),
    "loss in chunks, checkpointed blocks, checkpoints elsewhere": (True, True, True),
}


def make_model(length: int, *, checkpointed: bool = False) -> Any:
    """Build a Llama of 2.7 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=SIZE,
        intermediate_size=3 * SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model.train()


def start(size: int, stage: int = 3) -> Any:
    """Return an Accelerator whose groups have `size` processes."""
    from zero_plugin import Accelerator

    training = {"zero_optimization": {"stage": stage}, "sequence_parallel_size": size}
    return Accelerator(config={"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": training})


def read_peak(*, reset: bool = False) -> int:
    """Return the most bytes that this process has held since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


@contextmanager
def saving_elsewhere() -> Iterator[None]:
    """Save tensors like torch's `save_on_cpu`, but in files: on a CPU, CPU memory is the device's memory."""
    with tempfile.TemporaryDirectory() as folder:
        names = count()

        def pack(tensor: Tensor) -> tuple[str, torch.dtype, torch.Size]:
            file = f"{folder}/{next(names)}"
            tensor.detach().reshape(-1).view(torch.uint8).numpy().tofile(file)
            return file, tensor.dtype, tensor.shape

        def unpack(packed: tuple[str, torch.dtype, torch.Size]) -> Tensor:
            file, dtype, shape = packed
            return torch.from_numpy(np.fromfile(file, np.uint8)).view(dtype).reshape(shape)

        with saved_tensors_hooks(pack, unpack):
            yield


def measure_memory(length: int, way: str) -> int:
    """Return the most bytes that a step adds to this process."""
    from zero_plugin.long_context import chunk_loss

    chunked, checkpointed, elsewhere = WAYS[way]
    accelerator = start(dist_size())
    model = make_model(length, checkpointed=checkpointed)
    if chunked:
        chunk_loss(model, 16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(0))
    short = ids[:, : 8 * dist_size()]
    for batch in (short, ids):  # the first step allocates the optimizer's states and the engine's buffers
        gc.collect()
        before = read_peak(reset=True)
        with saving_elsewhere() if elsewhere else nullcontext():
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        taken = read_peak() - before
    accelerator.end_training()
    return taken


def dist_size() -> int:
    """Return the number of processes of this launch."""
    return int(os.environ["WORLD_SIZE"])


# ---- the loop by hand ------------------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """All-to-all that autograd can differentiate."""

    @staticmethod
    def forward(_: Any, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous())
        return received

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Tensor:
        received = torch.empty_like(gradients[0])
        dist.all_to_all_single(received, gradients[0].contiguous())
        return received


def attend_by_hand(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Exchange parts of the sequence for heads, run attention, and exchange back."""
    size, batch, heads, part, width = dist.get_world_size(), *query.shape
    joined = torch.cat([x.reshape(batch, size, -1, part, width) for x in (query, key, value)], 2)
    complete = Exchange.apply(joined.transpose(0, 1)).permute(1, 2, 0, 3, 4).reshape(batch, -1, size * part, width)
    query, key, value = complete.chunk(3, 1)
    attended = scaled_dot_product_attention(query, key, value, is_causal=True)
    back = attended.reshape(batch, heads // size, size, part, width).permute(2, 0, 1, 3, 4)
    return Exchange.apply(back).transpose(0, 1).reshape(batch, heads, part, width).transpose(1, 2).contiguous(), None


def by_hand(length: int) -> Callable[[], None]:
    """Return a step of DeepSpeed's engine in which samples are cut and losses are added by hand."""
    import deepspeed
    from transformers import AttentionInterface

    AttentionInterface.register("by_hand", attend_by_hand)
    model = make_model(length)
    model.set_attn_implementation("by_hand")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    ids = torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(0))
    size, rank = dist.get_world_size(), dist.get_rank()
    following = pad(ids[:, 1:], (0, 1), value=-100)
    own, labels, positions = (x.chunk(size, 1)[rank] for x in (ids, following, torch.arange(length)[None]))

    def step() -> None:
        logits = engine(input_ids=own, position_ids=positions).logits.float()
        part = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        engine.backward(part * size / (length - 1))
        engine.step()
        shown = part.detach().clone()
        dist.all_reduce(shown)

    return step


def by_zero_plugin(length: int) -> Callable[[], None]:
    """Return the same step in an ordinary loop."""
    accelerator = start(dist_size(), stage=1)
    model = make_model(length)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_time(length: int, rounds: int) -> list[list[float]]:
    """Return the seconds of processor time of each contender's step, in each round."""
    ours = by_zero_plugin(length)  # creates the process group
    contenders = [by_hand(length), ours, by_hand(length)]
    for step in contenders:
        step()
    found = []
    for number in range(rounds):
        order = list(range(len(contenders)))
        taken = [0.0] * len(contenders)
        for index in order[number % 3 :] + order[: number % 3]:
            dist.barrier()
            begin = time.process_time()
            contenders[index]()
            taken[index] = time.process_time() - begin
        found.append(taken)
    return found


# ---- starting, and the tables ----------------------------------------------------------------------------------------


def run(processes: int, *arguments: str) -> Any:
    """Run this script in a group of processes and return the result of process 0."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--worker", file.name, *arguments]
        # Freed memory returns to the system, so the peak does not include memory that the allocator keeps.
        allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
        environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return json.loads(Path(file.name).read_text())


def longest(processes: int, way: str, limit: int, lengths: list[int]) -> tuple[float, list[str]]:
    """Return the longest sample under the limit, interpolated between two measured lengths, and the measurements."""
    before, shown = (0, 0), []
    for length in lengths:
        taken = run(processes, "memory", str(length), way)
        shown.append(f"{length}: {taken / 2**20:.0f}")
        if taken > limit:
            share = (limit - before[1]) / (taken - before[1])
            return before[0] + share * (length - before[0]), shown
        before = (length, taken)
    return float(before[0]), [*shown, "all fit"]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--limit", type=float, default=400, help="MiB of a step (default 400)")
    parser.add_argument("--rounds", type=int, default=9, help="of the times (default 9)")
    parser.add_argument("--length", type=int, default=4096, help="of the samples whose step is timed (default 4096)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--shortest", type=int, default=1024, help="length of a process's first sample (default 1024)")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if options.only != "time":
        print("| way | processes | longest sample | of one process | MiB of a step by length |\n|---|---|---|---|---|")
        for way in options.ways:
            alone = 0.0
            for processes in options.processes:
                lengths = [processes * options.shortest * 2**power for power in range(7)]
                found, shown = longest(processes, way, int(options.limit * 2**20), lengths)
                alone = alone or found / processes
                print(f"| {way} | {processes} | {found:.0f} | {found / alone:.2f} | {', '.join(shown)} |", flush=True)
    if options.only != "memory":
        rows = run(2, "time", str(options.length), str(options.rounds))
        pairs = {"zero_plugin": [b / a for a, b, _ in rows], "by hand again": [c / a for a, _, c in rows]}
        hand = statistics.median(a for a, _, _ in rows)
        print(f"\nA step of {options.length} tokens on 2 processes, processor time: by hand {hand:.3f} s")
        for name, ratios in pairs.items():
            print(f"{name}: {statistics.median(ratios):.3f} ± {statistics.stdev(ratios):.3f}")


def work(arguments: list[str]) -> None:
    """Run one process of a group."""
    file, kind, length, last = arguments
    if kind == "memory":
        found: Any = measure_memory(int(length), last)
    else:
        found = measure_time(int(length), int(last))
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
