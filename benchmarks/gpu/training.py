"""Trains a model for a few steps in a separate launch, and reports its memory next to the plan's prediction."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `blog_models`

__all__ = ["OUT_OF_MEMORY", "Figures", "Run", "file_of", "measure"]

OUT_OF_MEMORY = "out of memory"
_LIMIT_S = 300  # timeout of one launch
_MOST_SKIPPED = 30  # steps that fp16 may skip until it has found its loss scale


@dataclass(frozen=True)
class Run:
    """The training of one launch.

    Attributes:
        model: a function of `blog_models`, or `gpt2:WIDTHxLAYERS`.
        zero: the `zero_optimization` section; None for DDP, or one device alone.
        cap_gib: usable part of the device's memory.
        steps: steps that change parameters. Steps that fp16 skips come on top, and are not timed.
        evaluate: whether a forward without gradients is timed too.
        cpu: whether to run without a GPU, to try the script.
    """

    model: str
    precision: str = "bf16"
    zero: dict[str, Any] | None = None
    micro_batch: int = 1
    length: int = 128
    accumulation: int = 1
    checkpointing: bool = False
    cap_gib: float | None = None
    processes: int = 1
    steps: int = 4
    evaluate: bool = False
    cpu: bool = False


@dataclass(frozen=True)
class Figures:
    """The numbers of the process that took the most.

    Attributes:
        peak: `torch.cuda.max_memory_allocated`; 0 on a CPU.
        predicted: the plan's prediction of `peak`.
        terms: the plan's terms of the device's memory at its peak.
        seconds, eval_seconds: of one optimizer step, and of evaluating as many samples as one step trains.
        samples: of one optimizer step, on all processes.
        chosen: the resolved choices of the run's configuration.
        losses: after each step.
    """

    peak: int
    predicted: int
    terms: dict[str, int]
    seconds: float
    eval_seconds: float
    samples: int
    chosen: str
    losses: list[float] = field(default_factory=list)


def measure(run: Run, kept: Path | None = None) -> Figures | str:
    """Return the run's numbers, or in words the reason why it has none.

    Args:
        run: the training.
        kept: a folder of numbers; a run found there is not measured again.
    """
    if kept is None:
        return _measure(run)
    kept.mkdir(parents=True, exist_ok=True)
    file = file_of(run, kept)
    if file.exists():
        return Figures(**json.loads(file.read_text()))
    found = _measure(run)
    if isinstance(found, Figures):
        file.write_text(json.dumps(asdict(found)))
    return found


def file_of(run: Run, kept: Path) -> Path:
    """Return the file of the run's numbers."""
    return kept / f"{hashlib.sha256(json.dumps(asdict(run)).encode()).hexdigest()[:16]}.json"


def _measure(run: Run) -> Figures | str:
    zero = None if run.zero is None else json.loads(json.dumps(run.zero))
    config: dict[str, Any] = {
        "distributed_type": "DEEPSPEED" if zero is not None else "MULTI_CPU" if run.cpu else "MULTI_GPU",
        "num_processes": run.processes,
        "use_cpu": run.cpu,
        "mixed_precision": run.precision,
        "scheduler_counts": "steps",
    }
    if zero is not None:
        config["deepspeed_config"] = {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": run.micro_batch,
            "gradient_accumulation_steps": run.accumulation,
        }
        if run.cap_gib is not None:
            config["gpu_memory"] = f"{run.cap_gib}GiB"
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder, "config.json"), Path(folder, "report.json")
        file.write_text(json.dumps(config))
        launch = [sys.executable, "-m", "zero_plugin", "launch", "--config_file", str(file), __file__]
        command = [*launch, json.dumps(asdict(run)), str(report)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        why = "failed"
        try:
            said, _ = worker.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            worker.terminate()  # the launcher then ends its workers, which would hold the device
            said, _ = worker.communicate()
            why = f"not done in {_LIMIT_S} s"
        if report.exists():
            return Figures(**json.loads(report.read_text()))
    if any(sign in said for sign in ("OutOfMemoryError", OUT_OF_MEMORY)):
        return OUT_OF_MEMORY
    print(said[-3000:], file=sys.stderr)
    return why


def build(run: Run) -> tuple[Any, Any]:
    """Return the model of a run, and a function from a number of samples to a batch."""
    import blog_models
    import transformers

    if run.model.startswith("gpt2:"):
        width, layers = map(int, run.model.removeprefix("gpt2:").split("x"))
        config = transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=max(1, width // 64), n_positions=max(run.length, 8)
        )
        with drawing_little():
            model = transformers.GPT2LMHeadModel(config)
    else:
        with drawing_little():
            model = getattr(blog_models, run.model)()
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def blocks(samples: int) -> dict[str, Any]:
        # Use many different tokens: a gradient that belongs to one token overflows fp16.
        ids = (7919 * torch.arange(samples * run.length) % model.config.vocab_size).view(samples, run.length)
        return {"input_ids": ids, "labels": ids}

    examples = {"deberta": blog_models.sentences, "blenderbot": blog_models.conversations}
    return model.train(), examples.get(run.model, blocks)


@contextmanager
def drawing_little() -> Iterator[None]:
    """Initialise models with the same million of random numbers again and again: drawing billions takes minutes."""
    numbers = torch.randn(1_000_003).clamp_(-1.7, 1.7)  # a prime: no two rows of a weight are equal
    drawn = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}

    def fill(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        flat = tensor.view(-1)
        for begin in range(0, flat.numel(), len(numbers)):
            part = flat[begin : begin + len(numbers)]
            part.copy_(numbers[: part.numel()]).mul_(scale)
        return tensor

    torch.Tensor.normal_ = lambda self, _=0.0, std=1.0, **__: fill(self, std)  # type: ignore[method-assign]
    torch.Tensor.uniform_ = lambda self, a=0.0, b=1.0, **_: fill(self, (b - a) / 3.4)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, method in drawn.items():
            setattr(torch.Tensor, name, method)


def train(run: Run, report: Path) -> None:
    """Train as a worker and write the report."""
    from zero_plugin import Accelerator, set_seed
    from zero_plugin.plan.activations import trace_activations
    from zero_plugin.plan.costs import footprint
    from zero_plugin.plan.model_source import model_sizes
    from zero_plugin.plan.run_plan import running_setup
    from zero_plugin.plan.situation import Cluster, Workload, optimizer_sizes

    on_gpu = not run.cpu
    accelerator = Accelerator(gradient_accumulation_steps=run.accumulation)
    memory = torch.cuda.get_device_properties(accelerator.device).total_memory if on_gpu else 2**60
    if on_gpu and run.cap_gib is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, run.cap_gib * 2**30 / memory), accelerator.device)
    set_seed(0)
    model, example = build(run)
    # The plan traces the model's own forward, which contains its recomputation.
    sizes, activations = model_sizes(model), trace_activations(model, example, run.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sample = {name: tensor[0] for name, tensor in example(1).items()}
    loader = torch.utils.data.DataLoader([sample] * (run.micro_batch * run.processes), run.micro_batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batch = next(iter(loader))
    labels = torch.zeros(run.micro_batch, dtype=torch.long, device=accelerator.device)

    def loss_of(outputs: Any) -> torch.Tensor:
        if "labels" in batch:
            return outputs.loss
        return torch.nn.functional.cross_entropy(outputs.logits.float(), labels)

    def run_micro_batch() -> torch.Tensor:
        outputs = model(**batch)  # alive until the backward ends, as in most loops
        loss = loss_of(outputs)
        accelerator.backward(loss)
        return loss.detach()

    losses: list[float] = []
    seconds: list[float] = []
    skipped = 0
    while len(losses) < run.steps:
        start = time.perf_counter()
        for _ in range(run.accumulation):
            with accelerator.accumulate(model):
                loss = run_micro_batch()
                optimizer.step()
                optimizer.zero_grad()
        value = loss.item()  # also waits for the device
        if optimizer.step_was_skipped:
            skipped += 1
            if skipped > _MOST_SKIPPED:
                sys.exit(f"{skipped} steps were skipped: fp16 finds no loss scale.")
            continue
        losses.append(value)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    eval_seconds = 0.0
    if run.evaluate:
        model.eval()
        with torch.no_grad():
            loss_of(model(**batch)).item()
            start = time.perf_counter()
            loss_of(model(**batch)).item()
            eval_seconds = run.accumulation * (time.perf_counter() - start)
    resolved = accelerator.resolved
    setup = running_setup(resolved, None if run.zero is None else resolved.zero_stage)
    here = Cluster(memory, 2**60, devices=run.processes)
    found = footprint(Workload(sizes, activations, optimizer_sizes("adamw")), setup, here)
    figures = Figures(
        peak=max(accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()),
        predicted=found.allocated_bytes,
        terms=dict(found.device),
        seconds=statistics.median(seconds[1:] or seconds),
        eval_seconds=eval_seconds,
        samples=run.micro_batch * run.accumulation * accelerator.num_processes,
        chosen=f"stage {setup.stage}, optimizer {setup.offload_optimizer}, parameters {setup.offload_param}, "
        f"ratio {setup.ratio:g}",
        losses=losses,
    )
    if accelerator.is_main_process:
        report.write_text(json.dumps(asdict(figures)))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("report", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    train(Run(**json.loads(arguments.run)), arguments.report)
