"""Predict the tables of Accelerate's ZeRO announcement with the plan, next to the published numbers.

https://huggingface.co/blog/accelerate-deepspeed measured three models on one or two 24 GB Titan RTX: the largest
micro-batch with DDP and with ZeRO, and seconds per epoch. This script builds the same models from the same
configurations without memory and traces them. It then searches the largest micro-batch whose predicted peak fits,
without a free margin.

The column `fused` has the attention of today's fused kernels. The column `2022` follows the software of that time.
Attention kept every head's probabilities. DDP's gradients were separate from its buckets and stayed from step to step:
Accelerate left DDP's `gradient_as_bucket_view` off, and torch's `zero_grad` filled gradients with zeros.

The script needs no GPU and loads no weights.

    python benchmarks/blog_predicted.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers
from blog_models import blenderbot, conversations, deberta, gpt2_xl, sentences, text
from pairs import WIDTH, describe_run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from zero_plugin.plan.activations import trace_activations
from zero_plugin.plan.costs import Footprint, footprint, step_time
from zero_plugin.plan.machines import ATTAINABLE, state_cluster
from zero_plugin.plan.model_source import model_sizes
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, OptimizerSizes, Setup, Workload

MIB = 2**20
OPTIMIZER = OptimizerSizes()
# PCIe 3; the announcement mentions no NVLink bridge; tensor cores take fp16.
TITAN = replace(
    state_cluster(gpu_memory=24220 * MIB, host_memory=60 * 1024 * MIB),
    flops={"no": ATTAINABLE * 16.3e12, "fp16": ATTAINABLE * 130e12},
    memory_bandwidth=672e9,
    pcie_bandwidth=12e9,
    link_bandwidth=6e9,
)
DDP = Setup(stage=None, precision="fp16", gradient_views=True)
ZERO2 = Setup(stage=2, precision="fp16", gradient_bytes=2, reduce_bucket=500_000_000)
ZERO3 = Setup(
    stage=3, precision="fp16", gradient_bytes=2, offload_optimizer="cpu", offload_param="cpu", overlap_comm=True
)


@dataclass(frozen=True)
class Task:
    """One of the three models: how to build and feed it, and the published results of DDP and of ZeRO."""

    name: str
    build: Callable[[str], torch.nn.Module]
    example: Callable[[int], dict[str, torch.Tensor]]
    devices: int
    samples: int  # of an epoch
    zero: Setup
    published: tuple[int, int]  # largest micro-batches
    seconds: tuple[float, float] | None  # per epoch
    explained: str


def main() -> None:
    transformers.logging.set_verbosity_error()
    batches = Table(box=MARKDOWN)
    for column in (
        "model",
        "path",
        "published",
        "predicted, 2022",
        "predicted, fused",
        "largest terms on the device, GB",
    ):
        batches.add_column(column, justify="right" if column.startswith("p") and column != "path" else "left")
    times = Table(box=MARKDOWN)
    for column in ("model", "published: DDP → ZeRO, s", "speed-up", "predicted: DDP → ZeRO, s", "speed-up"):
        times.add_column(column)
    for task in TASKS:
        measured = {attention: measure(task, attention) for attention in ("eager", "sdpa")}
        sizes, kept = measured["eager"]
        cluster = replace(TITAN, devices=task.devices)
        for path, setup, published in zip(("DDP", "ZeRO"), (DDP, task.zero), task.published, strict=True):
            apart = 4 * sizes.trainable if path == "DDP" else 0
            old = largest(sizes, kept, setup, replace(cluster, device_bytes=cluster.device_bytes - apart))
            new = largest(*measured["sdpa"], setup, cluster)
            taken = footprint(Workload(sizes, kept, OPTIMIZER), replace(setup, micro_batch=max(old, 1)), cluster)
            name = "DDP" if path == "DDP" else f"stage {setup.stage}{' + CPU' if setup.offload_param == 'cpu' else ''}"
            batches.add_row(task.name, name, told(published), told(old), told(new), fill(taken))
        if task.seconds is not None:
            predicted = [
                epoch(sizes, kept, replace(setup, micro_batch=micro), cluster, task.samples)
                for setup, micro in zip((DDP, task.zero), task.published, strict=True)
            ]
            times.add_row(task.name, *(cell for pair in (task.seconds, predicted) for cell in compare(*pair)))
    console = Console(width=WIDTH + 50)
    console.print(batches)
    console.print(times)
    for task in TASKS:
        console.print(f"* {task.name}: {task.explained}", highlight=False)
    console.print(describe_run("zero-plugin", "torch", "transformers"), highlight=False)


def measure(task: Task, attention: str) -> tuple[ModelSizes, Activations]:
    """Return the sizes and activations of the task's model with one implementation of attention."""
    with torch.device("meta"):
        try:
            model = task.build(attention)
        except (ValueError, ImportError):
            model = task.build("eager")  # this model has only eager attention
    return model_sizes(model), trace_activations(model, task.example, "fp16")


def largest(model: ModelSizes, activations: Activations, setup: Setup, cluster: Cluster) -> int:
    """Return the largest micro-batch whose peak fits in the memory; 0 if one sample is too much."""

    def fits(micro: int) -> bool:
        needed = footprint(Workload(model, activations, OPTIMIZER), replace(setup, micro_batch=micro), cluster)
        return needed.device_bytes <= cluster.device_bytes and needed.host_bytes <= cluster.host_bytes

    low, high = 0, 4096
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def epoch(model: ModelSizes, activations: Activations, setup: Setup, cluster: Cluster, samples: int) -> float:
    """Return the seconds of training over all samples."""
    steps = -(-samples // (setup.micro_batch * cluster.processes))
    return steps * step_time(Workload(model, activations, OPTIMIZER), setup, cluster).seconds


def compare(ddp: float, zero: float) -> tuple[str, str]:
    return f"{ddp:.1f} → {zero:.1f}", f"{ddp / zero:.2f}×"


def told(micro: int) -> str:
    return str(micro) if micro else "fails at 1"


def fill(taken: Footprint) -> str:
    terms = sorted(taken.device.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in terms[:5])


TASKS = (
    Task(
        "DeBERTa-v2-xlarge, 900M",
        deberta,
        sentences,
        2,
        3668,
        ZERO2,
        (8, 40),
        (103.57, 28.98),
        "the published script pads each batch to its longest pair and to a multiple of 8; 8 is the power of two below "
        "the prediction for DDP.",
    ),
    Task(
        "the same, 96 tokens",
        deberta,
        lambda samples: {name: ids[:, :96] for name, ids in sentences(samples).items()},
        2,
        0,
        ZERO2,
        (8, 40),
        None,
        "the longest padding with which stage 2 has room for 40.",
    ),
    Task(
        "BlenderBot, 400M",
        blenderbot,
        conversations,
        2,
        10_000,
        replace(ZERO2, reduce_bucket=200_000_000, overlap_comm=True),
        (100, 200),
        (27.36, 19.06),
        "every batch is padded, to 128 and 64 tokens; the published sizes are round numbers below the prediction. "
        "The roofline has no time between kernels, which matters more for small batches.",
    ),
    Task(
        "GPT-2 XL, 1.5B",
        gpt2_xl,
        text,
        1,
        0,
        ZERO3,
        (0, 16),
        None,
        "blocks of 128 tokens; 16 is the power of two below the prediction.",
    ),
)

if __name__ == "__main__":
    main()
