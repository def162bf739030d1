"""Measure loading of pretrained weights into a ready ZeRO-3 engine: `init_model(weights=…)` against the existing ways.

Two processes (gloo, CPU) load a GPT-2 of about a gigabyte (fp32, random weights, written by this script) from its
folder of safetensors. They build an engine around it, with the configuration that zero_plugin resolves to:

* zero_plugin: `with accelerator.init_model(weights=folder): model = GPT2LMHeadModel(config)`, then `prepare`;
* zero.Init: transformers' `from_pretrained` with its own partitioning, then `deepspeed.initialize`;
* plain: `from_pretrained` with the unpartitioned model on every process, then `deepspeed.initialize`.

Every contender runs in new processes, round by round, in reverse order every other round. Imports, and ops that are
built on first use, are ready before the clock starts. A ratio is the median over the rounds of a contender's time over
zero_plugin's in the same round.

Memory is the largest growth of a process's anonymous memory (RssAnon, sampled), as a fraction of its partition of the
weights. It is measured until the weights are loaded, and until the engine is ready. With an optimizer, the engine also
holds fp32 master weights.

    python benchmarks/load_weights.py --gigabytes 1 --rounds 5 --folder /data

`--clock cpu` takes the processor time of the process that needs most instead of the wall clock. It includes neither
other programs nor waiting, and the sampling of memory is subtracted.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
import torch.distributed as dist
from pairs import WIDTH, Timings, describe_run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from zero_plugin import Accelerator, DummyOptim

OURS, UNDER_INIT, PLAIN = "zero_plugin", "from_pretrained under zero.Init", "plain load, initialize"
CASES = {"no optimizer": False, "AdamW": True}
TARGETS = {OURS: "", UNDER_INIT: ">= 3", PLAIN: ">= 2"}


def make_config(gigabytes: float) -> GPT2Config:
    """Return a config with layers of 12.6 million parameters under a vocabulary of GPT-2's size."""
    width, vocabulary = 1024, 50257
    layers = max(1, round((gigabytes * 2**30 / 4 - vocabulary * width) / (12 * width * width)))
    return GPT2Config(n_embd=width, n_layer=layers, n_head=16, vocab_size=vocabulary)


class AtStage3:
    """Replacement for transformers' HfDeepSpeedConfig, which needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


class Contender:
    """One contender; `load` and then `prepare` return an engine."""

    def __init__(self, way: str, trains: bool) -> None:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        if trains:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        self._way, self._trains = way, trains
        self._accelerator = Accelerator(
            config={"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": config}
        )
        small = nn.Linear(8, 8)
        optimizers = [DummyOptim(small.parameters(), lr=1e-3)] if trains else []
        self._accelerator.prepare(small, *optimizers)
        assert self._accelerator.resolved is not None
        self._config = self._accelerator.resolved.deepspeed_config()
        self._accelerator.free_memory()

    def load(self, folder: Path, config: GPT2Config) -> nn.Module:
        """Return the model with its weights."""
        if self._way == OURS:
            with self._accelerator.init_model(weights=folder):
                return GPT2LMHeadModel(config)
        with transformers_partition(AtStage3(self._config) if self._way == UNDER_INIT else None):
            return GPT2LMHeadModel.from_pretrained(folder)

    def prepare(self, model: nn.Module) -> Any:
        """Return the engine."""
        if self._way == OURS:
            optimizers = [DummyOptim(model.parameters(), lr=1e-3)] if self._trains else []
            return self._accelerator.prepare(model, *optimizers)
        import deepspeed

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parameters = {"model_parameters": model.parameters()} if self._trains else {}
            return deepspeed.initialize(model=model, config=self._config, **parameters)[0]


@contextmanager
def transformers_partition(how: AtStage3 | None) -> Iterator[None]:
    """Make `from_pretrained` partition inside the context, or not partition if `how` is None."""
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    if how is None:
        integration.unset_hf_deepspeed_config()
    else:
        integration.set_hf_deepspeed_config(how)
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


class PeakMemory:
    """Watches how far this process's anonymous memory grows beyond its current size."""

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self.growth = 0
        self.spent = 0.0  # processor seconds of watching
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.look()
            self.spent = time.thread_time()
            time.sleep(0.005)

    def look(self) -> int:
        """Return the largest growth so far, in bytes."""
        self.growth = max(self.growth, anonymous_bytes() - self._before)
        return self.growth


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def seconds_of(call: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    """Return the seconds until every process has returned from the call, and its result."""
    dist.barrier()
    start = clock()
    result = call()
    dist.barrier()
    return clock() - start, result


def measure(rank: int, world: int, way: str, trains: bool, folder: str, store: str, clock: str) -> None:
    """Run in every process; each process writes its numbers."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by DeepSpeed, not used
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    contender = Contender(way, trains)
    warm = contender.prepare(contender.load(Path(folder, "small"), GPT2Config.from_pretrained(Path(folder, "small"))))
    del warm
    gc.collect()
    config = GPT2Config.from_pretrained(Path(folder, "large"))
    memory = PeakMemory()
    read = time.perf_counter if clock == "wall" else lambda: time.process_time() - memory.spent
    loading, model = seconds_of(lambda: contender.load(Path(folder, "large"), config), read)
    loaded = memory.look()
    preparing, _engine = seconds_of(lambda: contender.prepare(model), read)
    numbers = {"load": loading, "prepare": preparing, "loaded": loaded, "ready": memory.look()}
    torch.save(numbers, Path(folder, f"rank-{rank}.pt"))
    dist.barrier()
    os._exit(0)  # engines of both kinds hold the group; nothing remains that needs an orderly end


def run_once(way: str, trains: bool, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds, and the largest growth of any process."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (options.processes, way, trains, folder, f"{meeting}/store", options.clock)
        torch.multiprocessing.spawn(measure, arguments, nprocs=options.processes)
    found = [torch.load(Path(folder, f"rank-{rank}.pt")) for rank in range(options.processes)]
    return {key: max(numbers[key] for numbers in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the parameters in fp32 (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each case (default 5)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="default: all")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="default: wall")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--folder", default=".", help="where the model is written (default: here)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve()) as folder:
        for name, config in (("small", GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)), ("large", None)):
            model = GPT2LMHeadModel(config or make_config(options.gigabytes))
            model.save_pretrained(Path(folder, name))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        del model
        table = Table(
            title=f"seconds ({options.clock}) from nothing to a ZeRO-3 engine with {size / 2**30:.2f} GB of pretrained "
            f"weights, {options.processes} processes",
            caption=f"{describe_run('zero-plugin', 'torch', 'deepspeed', 'transformers')}; medians of {options.rounds} "
            "rounds; ± half the distance between the quartiles",
            caption_justify="left",
            box=MARKDOWN,
        )
        for column in (
            "engine",
            "way",
            "load",
            "prepare",
            "ready",
            "of zero_plugin's",
            "target",
            "memory: loaded",
            "memory: ready",
        ):
            table.add_column(column, justify="left" if column in ("engine", "way") else "right")
        for case in options.cases:
            rounds: list[dict[str, dict[str, float]]] = []
            for index in range(options.rounds):
                order = list(TARGETS) if index % 2 == 0 else list(reversed(TARGETS))
                rounds.append({way: run_once(way, CASES[case], folder, options) for way in order})
            timings = Timings({way: [one[way]["load"] + one[way]["prepare"] for one in rounds] for way in TARGETS})
            partition = size / options.processes
            for way, target in TARGETS.items():
                table.add_row(
                    case,
                    way,
                    *(f"{median(one[way][step] for one in rounds):.2f}" for step in ("load", "prepare")),
                    f"{timings.seconds(way):.2f}",
                    f"{timings.ratio(way, OURS):.2f} ± {timings.spread(way, OURS):.2f}" if way != OURS else "",
                    target,
                    *(f"{median(one[way][step] for one in rounds) / partition:.0%}" for step in ("loaded", "ready")),
                )
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
