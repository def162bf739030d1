"""`zero-plugin plan`: table, JSON, written configuration, suggested changes, and errors for wrong inputs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.cli.main import main
from zero_plugin.cli.plan import show_count
from zero_plugin.config.check import find_problems
from zero_plugin.config.read import read_document

LLAMA = ("--params", "7B", "--hidden_size", "4096", "--layers", "32")
NODE = ("--gpu", "A100-40GB", "--gpus", "8", "--host_memory", "512GiB", "--global_batch", "64")

PlanCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: PlanCommand) -> PlanCommand:
    """Run the command in an empty folder. Return exit code, output, and errors."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_command("plan", *arguments)


def test_the_table(plan: PlanCommand) -> None:
    """The table lists Pareto-optimal setups, fastest first, with columns that differ, then briefly the misfits."""
    code, output, _ = plan(*LLAMA, *NODE)
    assert code == 0
    _, _, columns, *lines = output.splitlines()
    assert columns.split() == ["ZeRO", "optimizer", "params", "recompute", "device", "CPU", "samples/s"]
    table = lines[: next(n for n, line in enumerate(lines) if "more fit" in line)]
    assert table[0].startswith("→  stage 3")
    assert all(line.startswith("   ") for line in table[1:])
    rates = [float(line.split()[-1]) for line in table]
    assert rates == sorted(rates, reverse=True)
    assert len(table) == len({line.split("GiB")[0] for line in table}) <= 6
    assert re.search(r"\n\d+ more fit, \d+ of them in less memory; --all prints every strategy\n", output)
    assert "\ndoes not fit: stage 2 (" in output
    assert "\n6 not tried: no NVMe disk is stated" in output
    _, output, _ = plan(*LLAMA, "--gpu", "A100-80GB", "--offload_optimizer_device", "none", "--global_batch", "8")
    assert "adam_bandwidth" not in output  # no strategy steps on the CPU
    assert "network_bandwidth" not in output  # nor is a second node involved


def test_every_strategy(plan: PlanCommand) -> None:
    """Each strategy has a line, one is marked, and misfits have a reason. Below are the terms of the chosen one."""
    code, output, _ = plan(*LLAMA, *NODE, "--all")
    assert code == 0
    head, memories, columns, *lines = output.splitlines()
    assert memories.startswith("device: capacity 39.6 GiB, budget 35.6 GiB; CPU memory of a node: capacity ")
    assert head.startswith("decoder of 4,096 × 32, 7B parameters, 2048 tokens per sample, on 8 × A100-40GB")
    assert columns.split() == ["strategy", "batch", "device", "CPU", "memory", "step", "samples/s", "why", "not"]
    table = lines[: lines.index("")]
    marked = [line for line in table if line.startswith("→")]
    assert len(marked) == 1
    assert marked[0].split()[1:3] == ["stage", "3"]
    without_time = [line for line in table if " s  " not in line]
    assert without_time
    assert all(", budget " in line or "no NVMe disk is stated" in line for line in without_time)
    rest = output[output.index("\n\n") :]
    assert "→ stage 3: the fastest that fits with 10% left free; 64 samples per optimizer step" in rest
    assert "optimizer states" in rest
    assert "activations: closed formula of a decoder" in rest


def test_json_has_every_number(plan: PlanCommand) -> None:
    """JSON has the terms and their sums. The chosen strategy is given by index and is the fastest that fits."""
    code, output, _ = plan(*LLAMA, *NODE, "--json", "--what_if")
    found = json.loads(output)
    assert code == 0
    fitting = [way for way in found["candidates"] if not way["rejected"]]
    chosen = found["candidates"][found["chosen"]]
    assert chosen["seconds"] == min(way["seconds"] for way in fitting)
    for way in found["candidates"]:
        assert sum(way["device"].values()) == way["device_bytes"]
        assert sum(way["host"].values()) == way["host_bytes"]
        assert sum(way["time"].values()) == pytest.approx(way["seconds"])
    assert any(way["hidden_time"] for way in found["candidates"])
    assert found["model"]["parameters"] == pytest.approx(7e9, rel=0.01)
    assert found["cluster"]["sources"]["flops"] == "40% of A100-40GB, by NVIDIA's data sheet"
    assert found["what_if"]["largest_parameters"] > 7e9


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
@pytest.mark.parametrize(
    "machines",
    [
        (),
        ("--gpu_memory", "24GiB", "--gpus", "1", "--global_batch", "8", "--nodes", "1"),
        ("--zero_stage", "2", "--activation_checkpointing"),
        ("--nodes", "2", "--offload_param_device", "cpu"),
        ("--nvme", "2TB", "--offload_optimizer_device", "nvme", "--nvme_path", "/nvme"),
    ],
)
def test_the_written_config_is_the_chosen_way(
    plan: PlanCommand, tmp_path: Path, name: str, machines: tuple[str]
) -> None:
    """The written config passes the check and has the chosen stage, devices, batch and processes."""
    options = [*LLAMA, *(NODE if "--gpu_memory" not in machines else ("--host_memory", "512GiB")), *machines]
    code, output, errors = plan(*options, "--output", name, "--json")
    assert code == 0, errors
    found = json.loads(output)
    setup = found["candidates"][found["chosen"]]["setup"]
    document = read_document(str(tmp_path / name))
    assert find_problems(document) == []
    tree = document.deepspeed
    assert tree.value("zero_optimization", "stage") == setup["stage"]
    for what in ("optimizer", "param"):
        device = tree.value("zero_optimization", f"offload_{what}", "device", default="none")
        assert device == setup[f"offload_{what}"]
    assert tree.value("train_micro_batch_size_per_gpu") == setup["micro_batch"]
    assert tree.value("gradient_accumulation_steps") == setup["accumulation"]
    if name.endswith("yaml"):
        cluster = found["cluster"]
        assert document.launch.value("num_processes") == cluster["nodes"] * cluster["devices"]
        assert document.launch.value("mixed_precision") == "bf16"


def test_training_without_zero_is_written_too(plan: PlanCommand, tmp_path: Path) -> None:
    """If DDP is the fastest that fits, the YAML requests it. A DeepSpeed JSON gets the fastest ZeRO strategy."""
    small = ("--params", "100M", "--gpu", "A100-80GB", "--gpus", "8")
    assert plan(*small, "--output", "plan.yaml")[0] == 0
    document = read_document(str(tmp_path / "plan.yaml"))
    assert document.launch.value("distributed_type") == "MULTI_GPU"
    assert find_problems(document) == []
    assert plan(*small, "--output", "plan.json")[0] == 0
    assert read_document(str(tmp_path / "plan.json")).deepspeed.value("zero_optimization", "stage") == 1
    code, _, errors = plan(*small, "--output", "plan.yaml")
    assert (code, "plan.yaml exists" in errors) == (2, True)


def test_where_nothing_fits(plan: PlanCommand) -> None:
    """If no strategy fits, the exit code is 1, each has its reason, and fixes are suggested without being asked for."""
    cramped = ("--gpu_memory", "8GiB", "--host_memory", "16GiB")
    code, output, _ = plan(*LLAMA, *cramped, "--gpus", "2", "--output", "plan.yaml")
    assert code == 1
    assert "nothing fits with 10% of each memory left free" in output
    assert "any one of these changes is enough:" in output
    assert "in CPU memory instead of 16 GiB" in output
    assert "the largest model of this shape that fits: " in output
    assert not Path("plan.yaml").exists()
    typed = ("--offload_optimizer_device", "none", "--offload_param_device", "none", "--global_batch", "8")
    _, output, _ = plan(*LLAMA, "--gpu", "A10", "--host_memory", "256GiB", *typed)
    assert "  without --offload_optimizer_device none: stage" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--params", "seven"), ("--params: 'seven' is no count", "Write e.g. 7B")),
        ((*LLAMA, "--gpu_memory", "lots"), ("--gpu_memory: 'lots' is no size", "24GiB")),
        ((*LLAMA, "--gpu", "A1000"), ("--gpu: 'A1000' is not a known GPU", "A100-80GB")),
        ((*LLAMA,), ("the memory of a GPU is not known", "--gpu_memory")),
        (("--gpu", "A100-80GB"), ("the model's size is not given", "--params")),
        (("no_such_folder", "--gpu", "A100-80GB"), ("no_such_folder", "config.json")),
        ((*LLAMA, *NODE, "--micro_batch", "3"), ("64", "micro-batch 3")),
        (("no_such_folder", "--params", "7B"), ("--params is given in addition to no_such_folder",)),
        (("operator:neg", "--layers", "5", "--gpu", "T4"), ("--layers is given in addition to operator:neg",)),
        (("--hidden_size", "4096", "--heads", "7", "--gpu", "T4"), ("4,096 does not divide among 7 heads", "--heads")),
        (
            ("--hidden_size", "4096", "--heads", "32", "--kv_heads", "5", "--gpu", "T4"),
            ("32 heads do not divide among 5 key heads", "--kv_heads"),
        ),
        (
            ("--hidden_size", "4096", "--heads", "4", "--gpu", "T4", "--gpus", "8", "--sequence_parallel_size", "8"),
            ("--sequence_parallel_size: 8 does not divide the model's 4 attention heads", "Write 1 or 2 or 4."),
        ),
        ((*LLAMA, *NODE, "--output", "plan.txt"), ("plan.txt is neither YAML nor JSON", "plan.yaml")),
        ((*LLAMA, *NODE, "--zero_stage", "2", "--offload_param_device", "cpu"), ("stage 2", "need stage 3")),
        (
            (*LLAMA, *NODE, "--nvme", "2TB", "--offload_optimizer_device", "nvme", "--output", "plan.yaml"),
            ("--nvme_path: is missing",),
        ),
    ],
)
def test_wrong_inputs(
    plan: PlanCommand, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """A wrong input gives place, problem and fix, with exit code 2 and no traceback."""
    monkeypatch.setattr("zero_plugin.cli.plan.has_gpu_driver", lambda: False)
    code, _, errors = plan(*arguments)
    assert code == 2
    assert "Traceback" not in errors
    for word in words:
        assert word in errors


def test_a_transformers_config(plan: PlanCommand, tmp_path: Path) -> None:
    """A config.json is enough: the model is built without weights and traced."""
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output, _ = plan("config.json", "--gpu", "T4", "--gpus", "1", "--sequence_length", "16")
    assert code == 0
    assert output.startswith("LlamaForCausalLM, ")
    assert "activations: traced" in output
    assert "activations: closed formula" in plan("config.json", "--gpu", "T4", "--no_trace")[1]


@pytest.mark.parametrize(
    ("own", "reason"),
    [({"type_vocab_size": 2}, "its type_vocab_size"), ({"architectures": ["ModernBertForMaskedLM"]}, "being a Modern")],
)
def test_an_encoder_is_no_decoder(plan: PlanCommand, tmp_path: Path, own: dict[str, Any], reason: str) -> None:
    """The closed formula of decoders is not used for encoders."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, errors = plan("config.json", "--gpu", "T4", "--no_trace")
    assert code == 2
    assert f"because of {reason}" in errors
    assert "does not describe a plain decoder" in errors


def test_sizes_alone_load_no_torch(tmp_path: Path) -> None:
    """A plan from numbers imports neither torch nor transformers, so it is fast."""
    code = (
        "import sys; sys.argv = ['zero-plugin', 'plan', *sys.argv[1:]]\n"
        "from zero_plugin.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'transformers', 'deepspeed', 'matplotlib'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", code, *LLAMA, *NODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "→ stage 3" in done.stdout


def test_a_wrong_picture_leaves_no_config(plan: PlanCommand, tmp_path: Path) -> None:
    """The names of both output files are checked before either is written."""
    code, _, errors = plan(*LLAMA, *NODE, "--output", "plan.yaml", "--picture", "plan.jpeg")
    assert code == 2
    assert "plan.jpeg is not a supported kind of plot" in errors
    assert list(tmp_path.iterdir()) == []


def test_no_optimizer_is_adamw(plan: PlanCommand) -> None:
    """An empty optimizer means AdamW, as in a configuration."""
    assert "is unknown" not in plan(*LLAMA, *NODE, "--optimizer", "")[2]


def test_an_unknown_optimizer_is_said(plan: PlanCommand) -> None:
    """A misspelt optimizer is planned as Adam, with a warning. A known one in any case gives none."""
    assert (
        "optimizer admw is unknown: assuming that it keeps 2 tensors, as Adam"
        in plan(*LLAMA, *NODE, "--optimizer", "AdmW")[2]
    )
    assert plan(*LLAMA, *NODE, "--optimizer", "LION")[2] == ""


def test_stage_0_is_written_without_what_it_does_not_read(
    plan: PlanCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strict check has no warning about a written stage-0 file."""
    assert plan("--params", "100M", "--gpu", "A100-80GB", "--zero_stage", "0", "--output", "plan.json")[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["zero_optimization"] == {"stage": 0}
    monkeypatch.setattr(sys, "argv", ["zero-plugin", "check", "--strict", "plan.json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0), capsys.readouterr()


@pytest.mark.parametrize(
    ("count", "shown"), [(7, "7"), (6_738_415_616, "6.74B"), (999_999_999, "1B"), (1_234 * 10**12, "1,234T")]
)
def test_counts(count: int, shown: str) -> None:
    """Counts have three digits and a unit, and no power of ten."""
    assert show_count(count) == shown


def test_no_powers_of_ten(plan: PlanCommand) -> None:
    """Many samples per second are a plain number."""
    _, output, _ = plan("--params", "10M", "--gpu", "A100-80GB", "--gpus", "8", "--sequence_length", "16")
    assert "e+0" not in output


def test_changes_of_a_model_where_activations_do_not_fit(
    plan: PlanCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Savings of chunked MLPs and of checkpoints in CPU memory are listed for the model that a function returns.

    Chunked MLPs are not suggested to a model that has them.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "long_samples.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from zero_plugin.long_context import chunk_layer\n"
        "def whole():\n"
        "    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)\n"
        "    return LlamaForCausalLM(LlamaConfig(intermediate_size=8192, use_cache=False, **sizes))\n"
        "def in_chunks():\n"
        "    model = whole()\n"
        "    for block in model.model.layers: chunk_layer(block.mlp, 8)\n"
        "    return model\n"
    )
    small = ("--gpu_memory", "4GiB", "--host_memory", "64GiB", "--sequence_length", "131072")
    code, output, _ = plan("long_samples:whole", *small)
    assert code == 1
    assert "  chunk_layer(block.mlp, 4) of zero_plugin.long_context for every block: " in output
    saving = "activation checkpointing under torch.autograd.graph.save_on_cpu(pin_memory=True)"
    assert re.search(rf"  {re.escape(saving)}, with [0-9.]+ [GM]iB more in CPU memory: ", output)
    assert "chunk_layer" not in plan("long_samples:in_chunks", *small)[1]
    code, _, _ = plan("long_samples:in_chunks", *small[2:], "--gpu_memory", "8GiB")
    assert code == 0


def test_quiet_prints_only_what_does_not_fit(tmp_path: Path) -> None:
    """With --quiet nothing is printed if a strategy fits, and files are written. Otherwise everything is printed."""
    command = [sys.executable, "-m", "zero_plugin", "plan", "-q", *LLAMA]

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run(*NODE, "--output", "plan.yaml") == (0, "")
    assert (tmp_path / "plan.yaml").exists()
    code, output = run("--gpu_memory", "2GiB", "--host_memory", "8GiB")
    assert code == 1
    assert "nothing fits with 10% of each memory left free" in output


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a narrow terminal each strategy has two lines: its name and why it is rejected, then its numbers."""
    monkeypatch.setattr("zero_plugin.cli.plan.terminal_width", lambda: 80)
    monkeypatch.setattr(
        sys, "argv", ["zero-plugin", "plan", "--all", "--params", "7B", "--gpu", "A100-80GB", "--gpus", "8"]
    )
    with contextlib.suppress(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    chosen = next(number for number, line in enumerate(lines) if line.startswith("→ "))
    assert re.fullmatch(r"    batch .*, device .* GiB, CPU memory .*, step .* s, samples/s .*", lines[chosen + 1])
    assert any(re.fullmatch(r"  DDP: .* GiB on the device, budget .*", line) for line in lines)


@pytest.mark.parametrize(
    "machines",
    [
        ("--gpu", "A100-80GB", "--gpus", "8"),
        ("--gpu", "A10", "--gpus", "2", "--host_memory", "512GiB"),
        ("--gpu", "V100-32GB", "--gpus", "16", "--nodes", "4", "--nvme", "30TB", "--host_memory", "1500GiB"),
        ("--gpu_memory", "8GiB", "--host_memory", "16GiB", "--gpus", "2"),
    ],
)
def test_a_screen_of_80_columns(machines: tuple[str, ...]) -> None:
    """The complete output fits a terminal of 80 columns without scrolling."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
    command = [sys.executable, "-m", "zero_plugin", "plan", *LLAMA, *machines]
    with subprocess.Popen(command, stdout=terminal, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # of Linux, at the end
            while read := os.read(screen, 4096):
                shown += read
    os.close(screen)
    assert process.returncode in (0, 1)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert len(lines) <= 25, shown.decode()
    assert max(map(len, lines)) <= 80


def test_a_gpu_that_nobody_names(plan: PlanCommand) -> None:
    """Without a GPU model, the message says whose speed is assumed, and only the order of the strategies is shown."""
    code, output, _ = plan(*LLAMA, "--gpu_memory", "80GB", "--gpus", "8")
    assert code == 0
    lines = output.splitlines()
    assert lines[0].endswith("on 8 × devices of 74.5 GiB, as fast as A100-80GB")
    assert lines[2].split()[-1] == "speed"
    assert next(line for line in lines if line.startswith("→")).split()[-1] == "1.00"
    assert "samples/s" not in output
    assert "  GPU model unknown: the order is for A100-80GB; --gpu names another" in lines


def test_the_network_between_machines(plan: PlanCommand) -> None:
    """The network speed is in bits or bytes. A default is reported as assumed. A slower network takes longer."""
    nodes = (*LLAMA, "--gpu", "H100-80GB", "--gpus", "8", "--nodes", "4", "--zero_stage", "3")
    _, output, _ = plan(*nodes)
    assert "network_bandwidth" in output

    def stated(network: str) -> tuple[float, str, float]:
        _, output, _ = plan(*nodes, "--network", network, "--json")
        found = json.loads(output)
        cluster = found["cluster"]
        seconds = found["candidates"][found["chosen"]]["seconds"]
        return cluster["network_bandwidth"], cluster["sources"]["network_bandwidth"], seconds

    assert stated("400Gb")[:2] == stated("50GB/s")[:2] == stated("0.4 Tbps")[:2] == (50e9, "stated")
    assert stated("1Gb")[2] > stated("400Gb")[2]
    _, output, _ = plan(*nodes, "--network", "400Gb")
    assert "network_bandwidth" not in output
    for wrong in ("fast", "400", "0Gb"):
        code, _, errors = plan(*nodes, "--network", wrong)
        assert code == 2
        assert f"--network: {wrong!r} is no bandwidth" in errors
