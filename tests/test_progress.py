"""The progress line: few lines without a terminal, one redrawn line on a terminal, no read of the loss in between."""

import io
import re
import time
from typing import Any

import pytest
import torch
from on_paths import in_processes
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zero_plugin.demo.train import GPT, GPTConfig
from zero_plugin.loop.progress import Progress
from zero_plugin.plan.decoder import training_flops_per_token
from zero_plugin.plan.machines import peak_flops
from zero_plugin.plan.model_source import model_sizes


class CountedLoss(float):
    """A loss that counts its reads."""

    reads = 0

    def __float__(self) -> float:
        type(self).reads += 1
        return 2.5


def run(steps: int, console: Console, seconds: float, pause: float = 0.0) -> str:
    with Progress(total=steps, seconds=seconds, console=console) as progress:
        for step in range(1, steps + 1):
            time.sleep(pause)
            progress.update(step, loss=CountedLoss(), lr=1e-3, units=100)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_gets_few_plain_lines_with_every_quantity() -> None:
    """Without a terminal: the first step, the last, and few between; text only. The loss is read only for these."""
    CountedLoss.reads = 0
    text = run(1000, Console(file=io.StringIO(), width=60), seconds=10.0)
    lines = text.splitlines()
    assert lines[0].startswith("step 1/1000  loss 2.500  lr 1.00e-03  ")
    assert lines[-1].startswith("step 1000/1000  ")
    assert lines[-1].endswith("ETA 0:00:00")
    assert re.search(r"  [\d.e+]+[kMG]? tokens/s  [\d.]+ [MG]iB/rank  ETA \d+:\d\d:\d\d$", lines[1])
    assert lines[0].endswith("ETA ?")
    assert "\x1b" not in text
    assert CountedLoss.reads == len(lines) < 15


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    """On a terminal the line is drawn over, complete also at 80 columns, and the final state stays."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    text = run(20, console, seconds=0.001)
    assert "20/20" in text
    assert "loss 2.500" in text
    assert "ETA 0:00:00" in text
    assert text.count("\n") == 1


def test_no_time_between_lines_means_a_line_for_every_step() -> None:
    """`seconds=0` is a choice, not the default."""
    assert len(run(20, Console(file=io.StringIO()), seconds=0).splitlines()) == 20


def test_lines_come_about_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of 10 ms with a line each 50 ms: after the first, doubling ones, every fifth step."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    lines = run(20, Console(file=io.StringIO()), seconds=0.05, pause=0.01).splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [1, 3, 7, 12, 17, 20]


def test_without_with_lines_are_printed() -> None:
    """Each is a new line, on a terminal too, and the terminal needs no closing."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    progress = Progress(total=2, seconds=0, console=console)
    for step in (1, 2):
        progress.update(step, loss=2.5, lr=1e-3)
    assert isinstance(console.file, io.StringIO)
    assert [line.split("  ")[0] for line in console.file.getvalue().splitlines()] == ["step 1/2", "step 2/2"]


def test_throughput_is_units_per_second_since_the_last_line() -> None:
    """100 units in each step of 20 ms are at most 5000 per second, and about that."""
    text = run(10, Console(file=io.StringIO()), seconds=0.1, pause=0.02)
    speed = float(re.findall(r"([\d.]+)k tokens/s", text)[-1])
    assert 1.0 < speed <= 5.0


def test_an_error_in_the_loop_passes_and_leaves_the_terminal_usable() -> None:
    """The line is closed (the cursor shown again), and the loop's own error is raised."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with pytest.raises(ZeroDivisionError), Progress(total=5, console=console):
        _ = 1 / 0
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_mfu_is_the_operations_of_the_throughput_as_a_part_of_the_peak() -> None:
    """100 units of 3e9 operations in a step of at least 10 ms are at most 30 TFLOP/s: 30 % of a peak of 100."""
    console = Console(file=io.StringIO())
    with Progress(total=10, seconds=0, console=console, flops_per_unit=3e9, peak_flops=100e12) as progress:
        for step in range(1, 11):
            time.sleep(0.01)
            progress.update(step, loss=CountedLoss(), lr=1e-3, units=100)
    assert isinstance(console.file, io.StringIO)
    for line in console.file.getvalue().splitlines():
        speed, unit, mfu = re.findall(r"  ([\d.]+)(k?) tokens/s  MFU ([\d.]+)%  ", line)[0]
        assert float(mfu) == pytest.approx(float(speed) * (1000 if unit else 1) * 3e9 / 100e12 * 100, rel=0.02, abs=0.1)
        assert 0 < float(mfu) <= 30


def test_mfu_is_left_out_where_the_peak_is_unknown() -> None:
    """A CPU has no data sheet here. A model alone changes nothing then."""
    model = GPT(GPTConfig(hidden_size=16, layers=1, heads=2, block=8))
    console = Console(file=io.StringIO())
    with Progress(total=1, console=console, model=model, sequence_length=8) as progress:
        progress.update(1, loss=1.0, lr=1e-3, units=8)
    assert isinstance(console.file, io.StringIO)
    assert ("MFU" in console.file.getvalue()) == torch.cuda.is_available()


def test_the_line_with_mfu_has_room_in_80_columns() -> None:
    """On a terminal this narrow the learning rate is left out."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Progress(total=1000, seconds=0, console=console, flops_per_unit=1e9, peak_flops=1e30) as progress:
        progress.update(1000, loss=12.5, lr=1e-3, units=100)
    assert isinstance(console.file, io.StringIO)
    assert re.search(
        r"step 1000/1000 loss 12.500 [\d.]+k? tokens/s MFU 0.0% [\d.]+ GiB/rank ETA \?", console.file.getvalue()
    )


def test_operations_of_a_token_are_those_that_torch_counts() -> None:
    """Forward and backward of the demo's GPT agree within 2 %. torch's count of its attention has no mask either."""
    config = GPTConfig(hidden_size=64, layers=3, heads=4, block=128)
    model = GPT(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, 128, dtype=torch.long)).sum().backward()
    looked_up = sum(p.numel() for p in model.embedding.parameters()) + sum(
        p.numel() for p in model.parameters() if p.dim() == 1
    )  # no multiplications, but in the formula's N
    counted = training_flops_per_token(model_sizes(model), 128) - 6 * looked_up
    assert counted == pytest.approx(counter.get_total_flops() / (2 * 128), rel=0.02)
    before = training_flops_per_token(model_sizes(model), 128)
    model.blocks.requires_grad_(False)  # its gradients are a third
    frozen = sum(p.numel() for p in model.blocks.parameters())
    assert training_flops_per_token(model_sizes(model), 128) == before - 2 * frozen


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("Tesla V100-SXM2-32GB", "bf16", 15.7),  # it computes bf16 as fp32
        ("NVIDIA A100-SXM4-40GB", "no", 19.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("CPU", "bf16", None),
    ],
)
def test_the_peak_of_a_device_is_its_data_sheets(name: str, precision: Any, tflops: float | None) -> None:
    """The driver's name decides. A slower kind whose name contains a known one has no peak."""
    assert peak_flops(name, precision) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_quiet_leaves_the_line_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch --quiet` passes this to its workers."""
    monkeypatch.setenv("ZERO_PLUGIN_QUIET", "1")
    assert run(20, Console(file=io.StringIO()), seconds=0) == ""


@in_processes(2)
def test_two_processes_report_together_and_the_first_speaks(rank: int) -> None:
    """The loss is the mean over processes, only rank 0 writes, and unequal speeds do not hang."""
    console = Console(file=io.StringIO())
    with Progress(total=30, seconds=0.02, console=console) as progress:
        for step in range(1, 31):
            time.sleep(0.002 * (1 + 4 * rank))  # unequal clocks must not make the processes report at different steps
            progress.update(step, loss=torch.tensor(1.0 + 2.0 * rank), lr=1e-3, units=10)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert bool(shown) == (rank == 0), shown
    assert all("loss 2.000" in line for line in shown.splitlines()), shown
