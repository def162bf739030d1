"""Measure what each ZeRO stage and offload costs on the GPUs of one machine: device memory, CPU memory, time of a step.

Every row is a separate run of `zero-plugin launch`, with the demo's GPT at a size that fills a GPU (1.2 billion
parameters by default), AdamW and random bytes. Peak memory is `torch.cuda.max_memory_allocated` of the process with the
highest value. CPU memory is the resident set at the end, summed over the processes. The step's time is the median of
those after the second. If a run does not fit, its row shows that.

    python benchmarks/gpu/stages.py
    python benchmarks/gpu/stages.py --precision fp16 --paths zero2 zero3_offload --micro_batch 16
    python benchmarks/gpu/stages.py --width 64 --layers 2 --block 64 --cpu        # tries the script without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATHS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3},
    "zero3_optimizer": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "zero3_nvme": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


def main() -> None:
    args = read_arguments()
    if args.worker is not None:
        train(args)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "path", "precision", "peak on the device, GiB", "CPU memory, GiB", "step, s", "tokens/s", "loss, first → last"
    )
    for path in args.paths:
        row = (path, args.precision, *measure(path, args))
        print(" | ".join(row), file=sys.stderr, flush=True)  # before the table is complete: a session on a GPU may end
        table.add_row(*row)
    Console(width=130).print(table)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="bf16")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nvme_path", default=tempfile.gettempdir(), help="folder on a local NVMe disk")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to try the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(path: str, args: argparse.Namespace) -> list[str]:
    """Return one row: the run's numbers, or the reason why it has none."""
    zero = json.loads(json.dumps(PATHS[path]))
    for section in zero.values():
        if isinstance(section, dict) and section["device"] == "nvme":
            section["nvme_path"] = args.nvme_path
    config: dict[str, Any] = {
        "distributed_type": "DEEPSPEED" if zero else "MULTI_CPU" if args.cpu else "MULTI_GPU",
        "num_processes": args.processes,
        "use_cpu": args.cpu,
        "mixed_precision": args.precision,
        "scheduler_counts": "steps",
        "deepspeed_config": {"zero_optimization": zero} if zero else {},
    }
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder, "config.json"), Path(folder, "report.json")
        file.write_text(json.dumps(config))
        launch = [sys.executable, "-m", "zero_plugin", "launch", "--config_file", str(file), __file__]
        done = subprocess.run([*launch, *sys.argv[1:], "--worker", str(report)], capture_output=True, text=True)
        if not report.exists():
            print(done.stderr[-3000:], file=sys.stderr)
            return ["out of memory" if "OutOfMemoryError" in done.stderr else "failed", "", "", "", ""]
        found = json.loads(report.read_text())
    return [
        f"{found['device_bytes'] / 2**30:.2f}",
        f"{found['host_bytes'] / 2**30:.2f}",
        f"{found['seconds']:.3f}",
        f"{found['tokens'] / found['seconds']:,.0f}",
        f"{found['losses'][0]:.3f} → {found['losses'][-1]:.3f}",
    ]


def train(args: argparse.Namespace) -> None:
    """Take a few steps on one batch, as a worker; the main process writes a report."""
    import psutil
    import torch

    from zero_plugin import Accelerator, set_seed
    from zero_plugin.demo.train import GPT, GPTConfig, next_byte_loss

    accelerator = Accelerator()
    set_seed(0)
    model = GPT(GPTConfig(hidden_size=args.width, layers=args.layers, heads=args.width // 64 or 1, block=args.block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(256, (args.micro_batch, args.block + 1), device=accelerator.device)
    losses, seconds = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = next_byte_loss(model(ids[:, :-1]), ids[:, 1:]).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # also waits for the device
        seconds.append(time.perf_counter() - start)
    device_bytes = torch.cuda.max_memory_allocated() if accelerator.device.type == "cuda" else 0
    host_bytes = torch.tensor([psutil.Process(os.getpid()).memory_info().rss])
    figures = {
        "device_bytes": max(accelerator.gather(torch.tensor([device_bytes])).tolist()),
        "host_bytes": sum(accelerator.gather(host_bytes).tolist()),
        "seconds": statistics.median(seconds[2:]),
        "tokens": args.micro_batch * args.block * accelerator.num_processes,
        "losses": losses,
    }
    if accelerator.is_main_process:
        Path(args.worker).write_text(json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    main()
